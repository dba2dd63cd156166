"""The inner optimizer of one replica: torch's AdamW and our Muon, whose moments and step count can be read and set.

METHOD.md, "Inner step". AdamW updates all parameters, or, under `inner.optimizer=muon`, those that are not matrices of
layers.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from noloco_p2p.compute.muon import Muon
from noloco_p2p.compute.replica_tensors import Kinds
from noloco_p2p.config import InnerSettings

Named = dict[str, Tensor]
"""One tensor per parameter, by global name, in the stage's order."""


class InnerOptimizer:
    """Updates parameters by their `.grad`. Moments are on the parameters' device, in their dtype."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: InnerSettings, matrices: Collection[str] = ()
    ) -> None:
        self._parameters = parameters
        self._settings = settings
        self.matrices = matrices
        """Names of the parameters that Muon updates. They have a mean, but no mean square."""
        self.reset()

    def reset(self) -> None:
        """Start over: no moments, no steps."""
        settings = self._settings
        self.steps = 0
        """Number of updates, for the bias correction; the same for all parameters."""
        matrices, others = (
            [parameter for name, parameter in self._parameters.items() if (name in self.matrices) == by_muon]
            for by_muon in (True, False)
        )
        adamw = torch.optim.AdamW(
            [{"params": others}],  # there may be none, and torch accepts an empty group but no empty list
            lr=settings.peak_learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._optimizers: list[torch.optim.Optimizer] = [adamw]
        if matrices:
            muon = Muon(matrices, lr=settings.peak_learning_rate, weight_decay=settings.weight_decay)
            self._optimizers.append(muon)

    def step(self, learning_rate: float) -> None:
        """One update of θ, in place."""
        of_adamw = learning_rate * (self._settings.adamw_factor if self._settings.optimizer == "muon" else 1)
        for optimizer, rate in zip(self._optimizers, (of_adamw, learning_rate), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.steps += 1

    def moments(self) -> dict[str, Named]:
        """The live tensors by kind, zeros before the first step.

        `adam_mean`: the running mean of the gradients, called first moment in AdamW and momentum in Muon.
        `adam_square`: the running mean of their squares, for parameters that AdamW updates.
        """
        of_adamw = [name for name in self._parameters if name not in self.matrices]
        return {
            "adam_mean": {name: self._moment(name, self._mean_key(name)) for name in self._parameters},
            "adam_square": {name: self._moment(name, "exp_avg_sq") for name in of_adamw},
        }

    def restore(self, kinds: Kinds, steps: int) -> None:
        """Continue with copies of these `moments`, after `steps` updates."""
        self.steps = steps
        for name, parameter in self._parameters.items():
            state = {self._mean_key(name): torch.empty_like(parameter).copy_(kinds["adam_mean"][name])}
            if name not in self.matrices:
                state["exp_avg_sq"] = torch.empty_like(parameter).copy_(kinds["adam_square"][name])
                state["step"] = torch.full((), float(steps), dtype=torch.float32, device=parameter.device)
            self._optimizer_of(name).state[parameter] = state

    def _mean_key(self, name: str) -> str:
        return "momentum_buffer" if name in self.matrices else "exp_avg"

    def _optimizer_of(self, name: str) -> torch.optim.Optimizer:
        return self._optimizers[1 if name in self.matrices else 0]

    def _moment(self, name: str, key: str) -> Tensor:
        parameter, states = self._parameters[name], self._optimizer_of(name).state
        moment: Tensor = states[parameter][key] if parameter in states else torch.zeros_like(parameter)
        return moment
