"""The check at start-up that the split of an architecture computes what the whole model computes.

A tiny random model of the same architecture is cut at every layer boundary; the parts, chained, must give the whole's
initial weights, logits and gradients. A family that scales its embeddings inside the decoder (granite) fails here, with
a message, rather than train a wrong model.
"""

from typing import Any

import torch
from torch import Tensor

from noloco_p2p.compute import model_family
from noloco_p2p.compute.model import StageModule, make_stage_module, meta_stage_module
from noloco_p2p.errors import ConfigError

TOLERANCE = 1e-5
"""Largest difference over largest value. A right split agrees bit for bit; this allows for another summation order."""
SAMPLES, TOKENS = 2, 6
MOST_PARAMETERS = 1 << 27
"""Of the small model: it keeps the size of a head, by which a stranger's manifest could fill memory."""


def check_architecture(config: Any, stages: int, dtype: torch.dtype) -> None:
    """Raises ConfigError when the split of this architecture is not exact. One stage is never split: no check."""
    if stages == 1:
        return
    try:
        small = model_family.small_config(config)
        count = sum(parameter.numel() for parameter in meta_stage_module(small, 0, 1, dtype=dtype).parameters.values())
        too_large = f"its heads are too wide to be tried: a small model has {count:,} parameters"
        reason = too_large if count > MOST_PARAMETERS else _difference(small, dtype)
    except model_family.FOREIGN_ERRORS as error:
        reason = f"it fails with {type(error).__name__}: {model_family.one_line(error)}"
    if reason is not None:
        raise ConfigError(
            f"model: the family {config.model_type} cannot be split over {stages} stages: {reason}; "
            "use another family, or stages: 1"
        )


def _difference(config: Any, dtype: torch.dtype) -> str | None:
    """How a one-layer-a-stage split differs from the whole, or None."""
    layers = config.num_hidden_layers
    whole = make_stage_module(config, 0, 1, seed=0, dtype=dtype)
    parts = [make_stage_module(config, index, layers, seed=0, dtype=dtype) for index in range(layers)]
    names = [name for part in parts for name in part.parameters]
    if sorted(names) != sorted(whole.parameters):
        return "its parameters are not divided among the stages exactly once"
    for part in parts:
        for name, parameter in part.parameters.items():
            if not torch.equal(parameter, whole.parameters[name]):
                return f"the initial value of {name} depends on the split"
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, config.vocab_size, (SAMPLES, TOKENS), generator=generator)
    mask_BT = torch.ones_like(tokens_BT)
    mask_BT[-1, TOKENS // 2 :] = 0
    for mask in (None, mask_BT):
        reason = _compare(whole, parts, tokens_BT, mask)
        if reason is not None:
            return reason
    return None


def _compare(whole: StageModule, parts: list[StageModule], tokens_BT: Tensor, mask: Tensor | None) -> str | None:
    logits_BTV = whole(tokens_BT, mask)
    flow = tokens_BT
    for part in parts:
        flow = part(flow, mask)
    if flow.shape != logits_BTV.shape or not _near(flow, logits_BTV):
        return "its logits differ from those of the whole model"
    weights = torch.linspace(-1, 1, logits_BTV.numel(), dtype=logits_BTV.dtype).reshape(logits_BTV.shape)
    expected = _gradients(logits_BTV, weights, whole)
    found = {name: grad for part in parts for name, grad in _gradients(flow, weights, part).items()}
    for name, grad in expected.items():
        if not _near(found[name], grad):
            return f"the gradient of {name} differs from that of the whole model"
    return None


def _gradients(logits_BTV: Tensor, weights: Tensor, part: StageModule) -> dict[str, Tensor]:
    """Gradient of Σ weights·logits² for each parameter; zeros where it does not reach."""
    scalar = (weights * logits_BTV.square()).sum()
    grads = torch.autograd.grad(scalar, list(part.parameters.values()), retain_graph=True, materialize_grads=True)
    return dict(zip(part.parameters, grads, strict=True))


def _near(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach(), expected.detach()
    scale = float(expected.abs().max())
    return bool(torch.isfinite(found).all()) and float((found - expected).abs().max()) <= TOLERANCE * scale
