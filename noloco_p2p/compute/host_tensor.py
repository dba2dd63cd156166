"""Converts `HostTensor` to torch and back. Values are flat, in C order, little endian."""

from math import isfinite, prod

import torch
from torch import Tensor

from noloco_p2p.core.messages import ITEM_BYTES, HostTensor, TensorSpec
from noloco_p2p.errors import Violation

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


def to_torch(tensor: HostTensor) -> Tensor:
    """A CPU tensor with the values. It shares memory with a writable buffer, and copies a read-only one.

    Raises Violation if the buffer's length does not fit the shape.
    """
    count, dtype = prod(tensor.shape), DTYPES[tensor.dtype]
    if tensor.data.nbytes != count * dtype.itemsize:
        raise Violation(f"{tensor.name}: {tensor.data.nbytes} bytes do not hold {tensor.shape} of {tensor.dtype}")
    if count == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    buffer = bytearray(tensor.data) if tensor.data.readonly else tensor.data
    return torch.frombuffer(buffer, dtype=dtype).reshape(tensor.shape)


def from_torch(name: str, tensor: Tensor) -> HostTensor:
    """Wrap a CPU tensor, without a copy if it is contiguous. The tensor must not be written to afterwards."""
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    return HostTensor(*spec_of(name, tensor), data)


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of a tensor."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory: itself if it is there already, or a copy from the GPU in pinned memory.

    torch reuses freed pinned memory. A copy into fresh pages of the system took 40 times as long.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory, pinned if the tensor is, and complete on return."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_pinned()).copy_(tensor.detach())


def check(tensor: HostTensor, expected: TensorSpec) -> Tensor:
    """The tensor as torch. Raises Violation unless dtype and shape match `expected`; the name is not compared."""
    if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
        raise Violation(
            f"{expected.name}: got {tensor.dtype} {list(tensor.shape)}, not {expected.dtype} {list(expected.shape)}"
        )
    return to_torch(tensor)


def is_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN and no infinity. One pass without an allocation (aminmax propagates NaN)."""
    return isfinite(largest(tensor))


def largest(tensor: Tensor) -> float:
    """The largest magnitude; NaN if there is any NaN, because then both extremes are. One pass."""
    if tensor.numel() == 0:
        return 0.0
    least, most = (float(one) for one in torch.aminmax(tensor))
    return max(-least, most)
