"""Tensors in host memory become messages and back: the values, what shares memory, and the largest magnitude."""

import math

import pytest
import torch

from noloco_p2p.compute import host_tensor
from noloco_p2p.core.messages import HostTensor, TensorSpec


@pytest.mark.parametrize("dtype", sorted(host_tensor.DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)])
def test_a_tensor_comes_back_as_it_was(shape: tuple[int, ...], dtype: str) -> None:
    """In any memory layout, and even if it is empty."""
    values = torch.arange(math.prod(shape)).reshape(shape[::-1]).permute(list(range(len(shape)))[::-1])
    sent = host_tensor.from_torch("x", values.to(host_tensor.DTYPES[dtype]))
    assert sent.spec == TensorSpec("x", dtype, shape)
    assert sent.data.nbytes == sent.spec.nbytes
    found = host_tensor.to_torch(HostTensor(*sent.spec, memoryview(bytes(sent.data))))
    assert (found.dtype, found.shape) == (host_tensor.DTYPES[dtype], values.shape)
    assert torch.equal(found, values.to(found.dtype))


def test_memory_is_shared_with_a_writable_buffer_only() -> None:
    """A read-only buffer may be bytes, which nobody may change."""
    buffer = bytearray(8)
    for data in (memoryview(buffer), memoryview(buffer).toreadonly()):
        host_tensor.to_torch(HostTensor("x", "int64", (1,), data)).add_(1)
    assert buffer == (1).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([], 0.0),
        ([0.0], 0.0),
        ([-3.0, 2.0], 3.0),
        ([-2.0, 3.0], 3.0),
        ([1.0, -math.inf], math.inf),
        ([math.inf], math.inf),
    ],
)
def test_the_largest_magnitude_shows_what_is_not_finite(values: list[float], largest: float) -> None:
    assert host_tensor.largest(torch.tensor(values)) == largest
    assert host_tensor.is_finite(torch.tensor(values)) == math.isfinite(largest)
    spoilt = torch.tensor([*values, math.nan, 1.0])
    assert math.isnan(host_tensor.largest(spoilt))
    assert not host_tensor.is_finite(spoilt)
