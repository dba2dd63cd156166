"""METHOD.md, "Codecs", implemented independently of the package, for the reference and the tests of the codecs."""

import re
from typing import Any

import numpy as np
import torch


def between_stages(model: Any, parameters: list[tuple[int, str]], wire: dict[str, str]) -> None:
    """Replace the output of every stage but the last by what the wire codecs leave of it.

    `parameters`: (stage, name) of each. The layers of the stages follow one another, in the order of the stages.
    """
    layer = re.compile(r"\.(layers|h)\.(\d+)\.")
    found = [(stage, match) for stage, name in parameters if (match := layer.search(name))]
    layers = getattr(model.base_model, found[0][1][1])
    last = {stage: max(int(match[2]) for at, match in found if at == stage) for stage, _ in found}

    def through(_: Any, __: Any, output: Any) -> Any:
        hidden_BTD = output[0] if isinstance(output, tuple) else output
        coded_BTD = ThroughWire.apply(hidden_BTD, wire["forward"], wire["backward"])  # type: ignore[no-untyped-call]
        return (coded_BTD, *output[1:]) if isinstance(output, tuple) else coded_BTD

    for stage in sorted(last)[:-1]:
        layers[last[stage]].register_forward_hook(through)


class ThroughWire(torch.autograd.Function):
    """Hidden states as the next stage receives them, and their gradient as the previous stage does."""

    @staticmethod
    def forward(ctx: Any, hidden_BTD: torch.Tensor, forward: str, backward: str) -> torch.Tensor:
        ctx.backward_codec = backward
        return after_wire(hidden_BTD, forward, centred=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return after_wire(grads[0], ctx.backward_codec, centred=False), None, None


def after_wire(values: torch.Tensor, codec: str, *, centred: bool) -> torch.Tensor:
    """METHOD.md, "Codecs", block by block in numpy: what the wire leaves of float64 values."""
    if codec == "float64":
        return values.view_as(values)
    if codec == "float32":
        return values.float().double()
    if codec == "bfloat16":
        return torch.from_numpy(as_bfloat16(values.detach().numpy()))
    half, block = {"int8": (128, 64), "int4": (8, 32)}[codec]
    rows = values.detach().numpy().reshape(-1, values.shape[-1])
    mean = as_bfloat16(rows.mean(0)) if centred else np.zeros(rows.shape[1])
    decoded = np.empty_like(rows)
    for at in range(0, rows.shape[1], block):
        part = rows[:, at : at + block] - mean[at : at + block]
        extreme = np.take_along_axis(part, np.abs(part).argmax(1)[:, None], 1)
        step = as_bfloat16(extreme / -half)
        codes = np.rint(np.divide(part, step, out=np.zeros_like(part), where=step != 0)).clip(-half, half - 1)
        decoded[:, at : at + block] = codes * step + mean[at : at + block]
    return torch.from_numpy(decoded.reshape(values.shape))


def as_bfloat16(values: "np.ndarray[Any, np.dtype[np.float64]]") -> "np.ndarray[Any, np.dtype[np.float64]]":
    """The nearest numbers with 8 significant bits, ties to even, from the upper 16 bits of a float32."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)
