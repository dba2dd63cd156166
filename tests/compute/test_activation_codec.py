"""Hidden states and gradients on the wire: how much they lose, that encoding is deterministic, and what is refused."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from wire_reference import after_wire

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.activation_codec import LARGEST_SCALE, ActivationCodec
from noloco_p2p.core.block_format import BLOCK_FORMATS, wire_spec
from noloco_p2p.core.messages import Gradient, HostTensor, MicrobatchId
from noloco_p2p.errors import Violation

SHAPE = (4, 64, 192)
RELATIVE_ERROR = {"bfloat16": 0.002, "int8": 0.0065, "int4": 0.09}
"""Root mean square of the error, relative to that of normally distributed values."""
CODED = [(name, codec) for name in ("hidden", "grad") for codec in BLOCK_FORMATS]


def make(
    codec: str, name: str = "hidden", shape: tuple[int, int, int] = SHAPE, dtype: torch.dtype = torch.float32
) -> ActivationCodec:
    return ActivationCodec(name, codec, shape, dtype)


def normal(shape: tuple[int, int, int] = SHAPE, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def sent(codec: ActivationCodec, values: Tensor) -> HostTensor:
    """The encoded values as they arrive at the receiver."""
    wire = host_tensor.from_torch(codec.spec.name, codec.encode(values))
    assert wire.spec == codec.spec
    return HostTensor(*wire.spec, memoryview(bytes(wire.data)))


def decoded(codec: ActivationCodec, values: Tensor) -> Tensor:
    found = codec.decode(codec.check(sent(codec, values)))
    assert (found.shape, found.dtype) == (values.shape, values.dtype)
    return found


def relative_error(found: Tensor, values: Tensor) -> float:
    return float((found - values).norm() / values.norm())


@pytest.mark.parametrize("codec", ["float32", *RELATIVE_ERROR])
@pytest.mark.parametrize("name", ["hidden", "grad"])
def test_normal_values_lose_little(codec: str, name: str) -> None:
    values = normal()
    error = relative_error(decoded(make(codec, name), values), values)
    assert error <= RELATIVE_ERROR.get(codec, 0.0)
    assert error >= RELATIVE_ERROR.get(codec, 0.0) / 2


@pytest.mark.parametrize(("codec", "bits"), [("int8", 8.25), ("int4", 4.5)])
def test_bits_of_a_value(codec: str, bits: float) -> None:
    shape = (8, 1024, 1024)
    values = math.prod(shape)
    assert 8 * wire_spec("grad", codec, shape).nbytes == bits * values
    assert 8 * wire_spec("hidden", codec, shape).nbytes == bits * values + 16 * shape[2]
    assert wire_spec("hidden", "bfloat16", shape) == ("hidden", "bfloat16", shape)


def test_a_channel_with_a_large_mean_costs_the_others_nothing() -> None:
    """A hundred times as large as the rest: without the means it would use up all the levels of its block."""
    values = normal()
    values[..., 5] += 100.0
    rest = [channel for channel in range(SHAPE[2]) if channel != 5]
    error = relative_error(decoded(make("int4"), values)[..., rest], values[..., rest])
    assert error <= RELATIVE_ERROR["int4"]
    assert relative_error(decoded(make("int4", "grad"), values)[..., rest], values[..., rest]) > 0.3


@pytest.mark.parametrize(("name", "codec"), CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 130)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-30, 1e-12, 1.0, 1e20]),
)
@example((1, 4, 29), 6753, 1e20)  # 1.33 levels in int8
def test_no_value_is_off_by_more_than_a_level(
    name: str, codec: str, dtype: torch.dtype, shape: tuple[int, int, int], seed: int, scale: float
) -> None:
    """Half a level if it is rounded; one level if it is nearly as large as the largest value and has the opposite sign,
    because codes go from −128 to 127. At both ends 1/256 of a level more for each level, if the step was rounded down
    by as much as bfloat16 can."""
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(scale * generator.standard_t(2, shape) * generator.integers(0, 2, shape)).to(dtype)
    one = make(codec, name, shape, dtype)
    found = decoded(one, values)
    _, block = BLOCK_FORMATS[codec]
    mean_D = values.flatten(0, 1).mean(0).bfloat16().to(dtype) * (name == "hidden")
    for at in range(0, shape[2], block):
        rest = values[..., at : at + block] - mean_D[at : at + block]
        levels = 128 if codec == "int8" else 8
        level = rest.abs().amax(-1, keepdim=True) / levels
        wrong = (found - values)[..., at : at + block].abs()
        slack = 1e-6 * values.abs().max() + 1e-37  # rounding of float32 next to a mean; the smallest bfloat16
        assert bool((wrong <= (1 + levels / 256) * level + slack).all())


@pytest.mark.parametrize(("name", "codec"), CODED)
@pytest.mark.parametrize("width", [16, 64, 100])
def test_what_is_decoded_is_what_the_reference_says(name: str, codec: str, width: int) -> None:
    values = normal((2, 8, width), dtype=torch.float64) * torch.logspace(-3, 3, 8, dtype=torch.float64)[:, None] + 0.3
    found = decoded(make(codec, name, (2, 8, width), torch.float64), values)
    assert torch.allclose(found, after_wire(values, codec, centred=name == "hidden"), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("name", "codec"), CODED)
def test_the_same_values_have_the_same_bytes(name: str, codec: str) -> None:
    values = normal()
    first = sent(make(codec, name), values)
    assert first.data == sent(make(codec, name), values.clone()).data
    assert first.data == sent(make(codec, name), values.transpose(0, 1).contiguous().transpose(0, 1)).data


@pytest.mark.parametrize(("name", "codec"), CODED)
def test_zeros_stay_zeros(name: str, codec: str) -> None:
    one = make(codec, name)
    assert not decoded(one, torch.zeros(SHAPE)).any()
    assert not one.decode(one.check(one.zeros())).any()
    some = normal()
    some[1:] = 0
    assert name == "hidden" or not decoded(one, some)[1:].any()


@pytest.mark.parametrize(("name", "codec"), [*CODED, ("grad", "bfloat16")])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0, 0), (3, 63, 191), (2, 5, 64)])
def test_a_value_that_is_not_finite_shows(name: str, codec: str, value: float, place: tuple[int, int, int]) -> None:
    one, values = make(codec, name), normal()
    assert one.is_finite(one.encode(values))
    values[place] = value
    assert not one.is_finite(one.encode(values))
    # Uncoded values pass: a gradient that is not finite is counted as such, and is no violation.
    with nullcontext() if codec == "bfloat16" else pytest.raises(Violation, match="means or scales"):
        one.check(sent(one, values))


@pytest.mark.parametrize(("name", "codec"), CODED)
def test_any_codes_are_taken_but_not_scales_or_means_that_are_not_finite(name: str, codec: str) -> None:
    one = make(codec, name)
    good = bytearray(sent(one, normal()).data)
    rows = SHAPE[0] * SHAPE[1]
    head = 2 * (rows * -(-SHAPE[2] // BLOCK_FORMATS[codec].block) + (SHAPE[2] if name == "hidden" else 0))
    for code in (0, 0x80, 0x88, 0xFF):
        values = one.decode(
            one.check(HostTensor(*one.spec, memoryview(good[:head] + bytes([code]) * (len(good) - head))))
        )
        assert host_tensor.is_finite(values)
    for at in (0, head - 2):
        for bad in (
            b"\x80\x7f",
            b"\x80\xff",
            b"\xc0\x7f",
            torch.tensor([2 * LARGEST_SCALE]).bfloat16().view(torch.uint8),
        ):
            wire = good.copy()
            wire[at : at + 2] = bytes(bad) if isinstance(bad, bytes) else bytes(bad.tolist())
            with pytest.raises(Violation, match=f"{name}: means or scales that are not finite"):
                one.check(HostTensor(*one.spec, memoryview(wire)))


@pytest.mark.parametrize("codec", ["float32", "bfloat16", *BLOCK_FORMATS])
@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_two_gradients_are_compared_as_they_are_decoded(codec: str, scale: float) -> None:
    """With values whose squares overflow float32, or are 0 in it."""
    wire = make(codec, "grad")
    values = [normal(seed=1) * scale, (0.1 * normal(seed=2) - normal(seed=1)) * scale]
    a, b = (decoded(wire, each).double().numpy().ravel() for each in values)
    one, other = (Gradient(MicrobatchId("p", 1, at), sent(wire, each), 1.0, 1, ()) for at, each in enumerate(values))
    found = wire.compare(one, other)
    norms = np.linalg.norm(a), np.linalg.norm(b)
    assert found.norms == pytest.approx(norms)
    assert found.cosine == pytest.approx(a @ b / (norms[0] * norms[1]))
    assert found.apart == pytest.approx(np.linalg.norm(a - b) / np.hypot(*norms))


def test_another_length_or_codec_is_a_violation() -> None:
    one = make("int4")
    good = sent(one, normal())
    for bad in (
        HostTensor("hidden", "uint8", (good.data.nbytes - 1,), good.data[:-1]),
        HostTensor("hidden", "uint8", one.spec.shape, good.data[:-1]),
        sent(make("int8"), normal()),
        sent(make("float32"), normal()),
    ):
        with pytest.raises(Violation, match=r"hidden: got|bytes do not hold"):
            one.check(bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "codec"), CODED)
def test_a_gpu_decodes_what_a_cpu_does(name: str, codec: str) -> None:
    one, values = make(codec, name), normal()
    wire = one.encode(values.cuda())
    assert torch.equal(one.decode(wire).cpu(), one.decode(wire.cpu()))
    assert relative_error(one.decode(wire).cpu(), values) <= RELATIVE_ERROR[codec]
