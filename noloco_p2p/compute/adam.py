"""AdamW of one replica: torch's own, with its moments and its step count to read and to set."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from noloco_p2p.config import InnerSettings

Named = dict[str, Tensor]
"""A tensor for each parameter, by global name, in the stage's order."""


class Adam:
    """Steps on the `.grad` of the parameters. Moments are on the parameters' device, in their dtype."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: InnerSettings) -> None:
        self._parameters = parameters
        self._settings = settings
        self.reset()

    def reset(self) -> None:
        """Start over: no moments, no steps."""
        settings = self._settings
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.peak_learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, learning_rate: float) -> None:
        """One update of θ, in place."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    @property
    def steps(self) -> int:
        """Updates that the bias correction counts; all parameters have had the same ones."""
        states = iter(self._optimizer.state.values())
        return int(next(states, {"step": 0})["step"])

    def moments(self) -> tuple[Named, Named]:
        """(means, mean squares), the live tensors; zeros before the first step."""
        return self._named("exp_avg"), self._named("exp_avg_sq")

    def restore(self, means: Mapping[str, Tensor], squares: Mapping[str, Tensor], steps: int) -> None:
        """Continue with copies of these moments, after `steps` updates."""
        self.reset()
        for name, parameter in self._parameters.items():
            self._optimizer.state[parameter] = {
                "step": torch.full((), float(steps), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.empty_like(parameter, requires_grad=False).copy_(means[name]),
                "exp_avg_sq": torch.empty_like(parameter, requires_grad=False).copy_(squares[name]),
            }

    def _named(self, key: str) -> Named:
        states = self._optimizer.state
        return {
            name: states[parameter][key] if parameter in states else torch.zeros_like(parameter, requires_grad=False)
            for name, parameter in self._parameters.items()
        }
