"""The codecs in which hidden states and gradients travel (`core.block_format`), computed on the device.

Every channel of hidden states has its own mean, which holds about a quarter of their energy; in a few channels of large
models the mean is almost everything (arXiv 2402.17762). So the codes are of the values minus the mean. In a trained
model of 1M parameters and four stages, 4 bits cost 0.003 nats per token this way, and 0.005 if the means stay in.
Gradients have hardly any mean. A Hadamard rotation of each block and stochastic rounding improved nothing there.

Values are rounded to the nearest, so a value has the same bytes each time it is sent. Autograd does not see any of it:
the next stage computes with the decoded values, and the gradient with respect to those is returned (straight-through).

Shape legend: B microbatch, T sequence, D hidden size, R = B·T rows, N blocks of a row, K values of a block.
"""

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.core.block_format import BLOCK_FORMATS, SCALE_BYTES, wire_spec
from noloco_p2p.core.gradient_pairs import GradientLikeness
from noloco_p2p.core.messages import Gradient, HostTensor
from noloco_p2p.errors import Violation

LARGEST_SCALE = 2.0**100
"""Upper limit on means and scales: with larger ones a decoded float32 could be infinite."""


class ActivationCodec:
    """The codec of one direction between two stages. A `wire` tensor is one that travels, as described by `spec`."""

    def __init__(self, name: str, codec: str, shape_BTD: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.spec = wire_spec(name, codec, shape_BTD)
        self._shape, self._dtype = shape_BTD, dtype
        self._format = BLOCK_FORMATS.get(codec)
        if self._format is not None:
            width, block = shape_BTD[2], self._format.block
            self._half = 1 << (self._format.bits - 1)
            self._shape_RNK = (shape_BTD[0] * shape_BTD[1], self._format.blocks(width), block)
            self._means = width if name == "hidden" else 0
            self._codes_at = SCALE_BYTES * (self._means + self._shape_RNK[0] * self._shape_RNK[1])

    def encode(self, values_BTD: Tensor) -> Tensor:
        """The wire tensor, on the device of the values."""
        values_BTD = values_BTD.detach()
        if self._format is None:
            return values_BTD.to(host_tensor.DTYPES[self.spec.dtype])
        values_RD = values_BTD.to(self._dtype).flatten(0, 1)
        parts: list[Tensor] = []
        if self._means:
            mean_D = values_RD.mean(0).to(torch.bfloat16)
            values_RD = values_RD - mean_D.to(self._dtype)
            parts.append(mean_D.view(torch.uint8))
        blocks, block = self._shape_RNK[1:]
        padded_RD = torch.nn.functional.pad(values_RD, (0, blocks * block - self._shape[2]))
        values_RNK = padded_RD.reshape(self._shape_RNK)
        # The value of largest magnitude gets the code −128 (−8), so there is one level more than in a symmetric range.
        least_RN, most_RN = torch.aminmax(values_RNK, dim=-1)
        scale_RN = (torch.where(most_RN > -least_RN, most_RN, least_RN) / -self._half).to(torch.bfloat16)
        divisor_RN = torch.where(scale_RN == 0, 1, scale_RN).to(self._dtype)
        codes_RNK = (values_RNK / divisor_RN[..., None]).round_().clamp_(-self._half, self._half - 1).to(torch.int8)
        codes = codes_RNK.flatten().view(torch.uint8)
        if self._format.bits == 4:
            codes = codes[0::2] & 15 | codes[1::2] << 4
        return torch.cat((*parts, scale_RN.flatten().view(torch.uint8), codes))

    def decode(self, wire: Tensor) -> Tensor:
        """The B×T×D values of a checked wire tensor, on its device."""
        if self._format is None:
            return wire.to(self._dtype)
        head, codes = self._head(wire).to(self._dtype), wire[self._codes_at :]
        if self._format.bits == 4:
            codes = torch.stack((codes << 4, codes), dim=-1).flatten().view(torch.int8) >> 4
        codes_RNK = codes.view(torch.int8).reshape(self._shape_RNK)
        values_RNK = codes_RNK.to(self._dtype).mul_(head[self._means :].reshape(*self._shape_RNK[:2], 1))
        values_RD = values_RNK.flatten(1)[:, : self._shape[2]]
        if self._means:
            values_RD = values_RD + head[: self._means]
        return values_RD.reshape(self._shape)

    def check(self, received: HostTensor) -> Tensor:
        """The wire tensor in host memory. Raises Violation if it does not match `spec`, or if its means or scales are
        not finite.

        Values that travel unencoded are not checked: see `is_finite`.
        """
        wire = host_tensor.check(received, self.spec)
        if self._format is not None and not self.is_finite(wire):
            raise Violation(f"{self.spec.name}: means or scales that are not finite")
        return wire

    def is_finite(self, wire: Tensor) -> bool:
        """Whether the decoded values are finite. A NaN or infinite value shows in the scale of its block."""
        if self._format is None:
            return host_tensor.is_finite(wire)
        return bool((self._head(wire).abs() <= LARGEST_SCALE).all())

    def compare(self, one: Gradient, other: Gradient) -> GradientLikeness:
        """As in the Stage port, for gradients in this codec."""
        sums = [0.0, 0.0, 0.0]
        for a_TD, b_TD in zip(*(self.decode(self.check(each.grad)) for each in (one, other)), strict=True):
            a, b = a_TD.double().flatten(), b_TD.double().flatten()  # float32 would overflow beyond 1e19
            sums = [done + float(torch.dot(*more)) for done, more in zip(sums, ((a, a), (b, b), (a, b)), strict=True)]
        return GradientLikeness.of(*sums)

    def zeros(self) -> HostTensor:
        """An encoded tensor of zeros."""
        return HostTensor(*self.spec, memoryview(bytes(self.spec.nbytes)))

    def _head(self, wire: Tensor) -> Tensor:
        """Means, then scales."""
        return wire[: self._codes_at].view(torch.bfloat16)
