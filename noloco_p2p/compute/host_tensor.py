"""`HostTensor` to torch and back. Element types by torch's names; values flat, C order, little endian."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from noloco_p2p.core.messages import HostTensor, TensorSpec
from noloco_p2p.errors import Violation

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


def to_torch(tensor: HostTensor) -> Tensor:
    """A CPU tensor with the values; it shares memory with a writable buffer and copies a read-only one.

    Raises Violation when the buffer's length does not fit the shape.
    """
    count, dtype = prod(tensor.shape), DTYPES[tensor.dtype]
    if tensor.data.nbytes != count * dtype.itemsize:
        raise Violation(f"{tensor.name}: {tensor.data.nbytes} bytes do not hold {tensor.shape} of {tensor.dtype}")
    if count == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    buffer = bytearray(tensor.data) if tensor.data.readonly else tensor.data
    return torch.frombuffer(buffer, dtype=dtype).reshape(tensor.shape)


def from_torch(name: str, tensor: Tensor) -> HostTensor:
    """Wrap a CPU tensor without a copy if it is contiguous. It must not be written to afterwards."""
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    return HostTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, whole when this returns, that shares nothing with the tensor on whatever device."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def check(tensor: HostTensor, expected: TensorSpec) -> Tensor:
    """The tensor as torch, if dtype and shape are those of `expected`. Raises Violation. The name is not compared."""
    if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
        raise Violation(
            f"{expected.name}: got {tensor.dtype} {list(tensor.shape)}, not {expected.dtype} {list(expected.shape)}"
        )
    return to_torch(tensor)


def unpack(tensors: Sequence[HostTensor], expected: tuple[TensorSpec, ...], whose: str) -> list[Tensor]:
    """The tensors as torch. Raises Violation unless names, dtypes, shapes and lengths are as expected, in order.

    `whose` begins the message.
    """
    found = tuple(tensor.spec for tensor in tensors)
    if found != expected:
        wrong = next((a for a, b in zip(found, expected, strict=False) if a != b), None)
        told = f"{len(found)} tensors"
        if wrong is not None:
            told = f"{wrong.name} {wrong.dtype} {list(wrong.shape)} is out of place"
        raise Violation(f"{whose} does not fit this stage: {told}")
    return [to_torch(tensor) for tensor in tensors]


def is_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity: one pass, nothing allocated (aminmax hands NaN on)."""
    if tensor.numel() == 0:
        return True
    least, most = torch.aminmax(tensor)
    return bool(torch.isfinite(least) & torch.isfinite(most))
