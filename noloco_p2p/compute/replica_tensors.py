"""Packs and checks the tensors of a replica as they travel and are saved: `<kind>/<name>`, kind after kind.

Whatever comes from a peer or a file is checked here before the stage continues from it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.core.messages import HostTensor, ReplicaState, TensorSpec
from noloco_p2p.errors import Violation

ROUNDED, SQUARE_VANISHES = 2.0, 1e-18
"""Tolerances of the check of Adam's means: a factor for rounding, and one for means whose square rounds to 0."""

Kinds = Mapping[str, Mapping[str, Tensor]]
"""Tensors by kind, then by parameter name, both in the order in which they travel."""


def specs(
    kinds: Iterable[str], parameters: Sequence[TensorSpec], matrices: Collection[str] = ()
) -> tuple[TensorSpec, ...]:
    """The specs of the tensors of a stage with these parameters, in order; `matrices`: those that Muon updates."""
    return tuple(
        spec._replace(name=f"{kind}/{spec.name}")
        for kind in kinds
        for spec in parameters
        if not (kind == "adam_square" and spec.name in matrices)
    )


def pack(kinds: Kinds) -> tuple[HostTensor, ...]:
    """Wrap tensors in host memory without a copy, in order. They must not be written to afterwards."""
    flat = {f"{kind}/{name}": tensor for kind, named in kinds.items() for name, tensor in named.items()}
    return tuple(host_tensor.from_torch(name, tensor) for name, tensor in flat.items())


def checked(
    tensors: Sequence[HostTensor], expected: Sequence[TensorSpec], whose: str, most: float = inf
) -> list[Tensor]:
    """The values of these tensors, possibly sharing their memory; `whose` starts the message.

    Raises Violation if names, dtypes, shapes or lengths are not as expected, in order, or if values are not finite or,
    except for Adam's, larger than `most`.
    """
    found = [tensor.spec for tensor in tensors]
    if found != list(expected):
        wrong = next((a for a, b in zip(found, expected, strict=False) if a != b), None)
        named = "" if wrong is None else f"{wrong.name} {wrong.dtype} {list(wrong.shape)} is out of place"
        raise Violation(f"{whose} does not fit this stage: {named or f'{len(found)} tensors'}")
    values = [host_tensor.to_torch(tensor) for tensor in tensors]
    for tensor, one in zip(tensors, values, strict=True):
        if not isfinite(largest := host_tensor.largest(one)):
            raise Violation(f"{whose} is not finite in {tensor.name}")
        if largest > most and not tensor.name.startswith("adam_"):
            raise Violation(f"{whose} has a value of {largest:.3g} in {tensor.name}; the limit is {most:.3g}")
    return values


def unpack_state(
    state: ReplicaState, index: int, expected: Sequence[TensorSpec], most: float = inf, most_mean: float = inf
) -> dict[str, dict[str, Tensor]]:
    """The tensors of a state from which stage `index` can continue, possibly sharing its memory.

    Raises Violation like `checked`, and for another stage, a negative mean square or step count, or a mean beyond
    `most_mean` times the root of its mean square.
    """
    if state.stage != index or state.adam_steps < 0:
        raise Violation(
            f"the state of {state.peer} does not fit stage {index}: it is of stage {state.stage}, "
            f"after {state.adam_steps} optimizer steps"
        )
    kinds: dict[str, dict[str, Tensor]] = {}
    values = checked(state.tensors, expected, f"the state of {state.peer}", most)
    for tensor, one in zip(state.tensors, values, strict=True):
        kind, _, name = tensor.name.partition("/")
        kinds.setdefault(kind, {})[name] = one
    for name, square in kinds.get("adam_square", {}).items():
        if square.numel() and float(torch.min(square)) < 0:
            raise Violation(f"the state of {state.peer} is below zero in adam_square/{name}")
        beyond = ROUNDED * most_mean * square.sqrt() + SQUARE_VANISHES
        if most_mean < inf and bool((kinds["adam_mean"][name].abs() > beyond).any()):
            raise Violation(f"the state of {state.peer} has means in adam_mean/{name} that its mean squares rule out")
    return kinds
