"""Tensors of a replica, by kind and name, to what travels and is saved (`ReplicaState`), and back after checks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.core.messages import REPLICA_KINDS, HostTensor, ReplicaState, TensorSpec
from noloco_p2p.errors import Violation

Kinds = dict[str, dict[str, Tensor]]
"""By kind (REPLICA_KINDS), then by parameter name."""


def specs(slow: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """The tensors of a replica's state, in order; `slow` is φ."""
    return tuple(
        TensorSpec(f"{kind}/{name}", str(phi.dtype).removeprefix("torch."), tuple(phi.shape))
        for kind in REPLICA_KINDS
        for name, phi in slow.items()
    )


def pack(kinds: Kinds) -> tuple[HostTensor, ...]:
    """Tensors in host memory, wrapped without a copy, in order. They must not be written to afterwards."""
    return tuple(
        host_tensor.from_torch(f"{kind}/{name}", kinds[kind][name]) for kind in REPLICA_KINDS for name in kinds[kind]
    )


def read(theirs: ReplicaState, index: int, expected: tuple[TensorSpec, ...]) -> Kinds:
    """The tensors of a state that stage `index` can go on from; they may share memory with it.

    Raises Violation: another stage, other names, dtypes, shapes or lengths, values that are not finite, a mean square
    or a step count below zero.
    """
    if theirs.stage != index or theirs.adam_steps < 0:
        raise Violation(
            f"the state of {theirs.peer} does not fit stage {index}: it is of stage {theirs.stage}, "
            f"after {theirs.adam_steps} steps of Adam"
        )
    values = host_tensor.unpack(theirs.tensors, expected, f"the state of {theirs.peer}")
    kinds: Kinds = {kind: {} for kind in REPLICA_KINDS}
    for spec, value in zip(expected, values, strict=True):
        kind, _, name = spec.name.partition("/")
        if not host_tensor.is_finite(value):
            raise Violation(f"the state of {theirs.peer} is not finite in {spec.name}")
        if kind == "adam_square" and value.numel() and float(torch.min(value)) < 0:
            raise Violation(f"the state of {theirs.peer} is below zero in {spec.name}")
        kinds[kind][name] = value
    return kinds
