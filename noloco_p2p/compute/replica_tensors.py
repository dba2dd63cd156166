"""The tensors of a replica by kind and parameter, as they travel and are saved: `<kind>/<name>`, kind after kind.

What comes from a peer or a file is checked here before the stage continues from it.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.core.messages import HostTensor, ReplicaState, Snapshot, TensorSpec
from noloco_p2p.errors import Violation

SNAPSHOT_KINDS = ("slow", "delta")
"""What a snapshot has of every parameter: φ and Δ = θ − φ."""

Kinds = Mapping[str, Mapping[str, Tensor]]
"""By kind, then by parameter name, both in the order in which they travel."""


def specs(kinds: Iterable[str], parameters: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The tensors of a stage with these parameters, in order."""
    return tuple(spec._replace(name=f"{kind}/{spec.name}") for kind in kinds for spec in parameters)


def pack(kinds: Kinds) -> tuple[HostTensor, ...]:
    """Tensors in host memory, wrapped without a copy, in order. They must not be written to afterwards."""
    flat = {f"{kind}/{name}": tensor for kind, named in kinds.items() for name, tensor in named.items()}
    return tuple(host_tensor.from_torch(name, tensor) for name, tensor in flat.items())


def unpack(
    source: Snapshot | ReplicaState, expected: Sequence[TensorSpec], *, finite: bool = True
) -> dict[str, dict[str, Tensor]]:
    """The tensors of a snapshot or state, which they may share memory with.

    Raises Violation unless names, dtypes, shapes and lengths are as expected, in order, and with `finite` all values.
    """
    whose = f"the {'snapshot' if isinstance(source, Snapshot) else 'state'} of {source.peer}"
    found = [tensor.spec for tensor in source.tensors]
    if found != list(expected):
        wrong = next((a for a, b in zip(found, expected, strict=False) if a != b), None)
        reason = f"{len(found)} tensors"
        if wrong is not None:
            reason = f"{wrong.name} {wrong.dtype} {list(wrong.shape)} is out of place"
        raise Violation(f"{whose} does not fit this stage: {reason}")
    kinds: dict[str, dict[str, Tensor]] = {}
    for tensor in source.tensors:
        kind, _, name = tensor.name.partition("/")
        values = kinds.setdefault(kind, {})[name] = host_tensor.to_torch(tensor)
        if finite and not host_tensor.is_finite(values):
            raise Violation(f"{whose} is not finite in {tensor.name}")
    return kinds


def unpack_state(state: ReplicaState, index: int, expected: Sequence[TensorSpec]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a state that stage `index` can continue from; they may share memory with it.

    Raises Violation as `unpack`, and for another stage, a mean square or a step count below zero.
    """
    if state.stage != index or state.adam_steps < 0:
        raise Violation(
            f"the state of {state.peer} does not fit stage {index}: it is of stage {state.stage}, "
            f"after {state.adam_steps} steps of Adam"
        )
    kinds = unpack(state, expected)
    for name, square in kinds["adam_square"].items():
        if square.numel() and float(torch.min(square)) < 0:
            raise Violation(f"the state of {state.peer} is below zero in adam_square/{name}")
    return kinds
