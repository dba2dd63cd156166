"""The wire format of hidden states and gradients: the names of the codecs, and the layout and size of each.

`float64`, `float32` and `bfloat16` send the values as they are. `int8` and `int4` send bytes: the mean of each of the D
channels (for hidden states only), a scale for each block of values along D, then the codes of all values.
`compute.activation_codec` computes them.

Shape legend: B microbatch, T sequence, D hidden size.
"""

from typing import Literal, NamedTuple

from noloco_p2p.core.messages import TensorSpec

WireCodec = Literal["float64", "float32", "bfloat16", "int8", "int4"]
"""The codecs of hidden states and gradients (config.WireSettings)."""
SCALE_BYTES = 2
"""Means and scales are bfloat16: gradients of a summed loss need its range, and its rounding costs next to nothing."""


class BlockFormat(NamedTuple):
    """Integer codes of `bits` bits, with one scale for each `block` values."""

    bits: int
    block: int

    def blocks(self, width: int) -> int:
        """Number of blocks in a row of `width` values; the last one is padded with zeros."""
        return -(-width // self.block)

    def nbytes(self, rows: int, width: int, means: int) -> int:
        """Size of `means` means, and of the scales and codes of `rows` rows of `width` values."""
        return SCALE_BYTES * means + rows * self.blocks(width) * (SCALE_BYTES + self.block * self.bits // 8)


BLOCK_FORMATS: dict[str, BlockFormat] = {"int8": BlockFormat(8, 64), "int4": BlockFormat(4, 32)}
"""The codecs with scales: 8.25 and 4.5 bits per value."""


def wire_spec(name: str, codec: str, shape_BTD: tuple[int, int, int]) -> TensorSpec:
    """Spec of the tensor that carries B×T×D values as `hidden` or `grad`: in the codec's own dtype, or as bytes."""
    microbatch, tokens, width = shape_BTD
    if codec not in BLOCK_FORMATS:
        return TensorSpec(name, codec, shape_BTD)
    means = width if name == "hidden" else 0
    return TensorSpec(name, "uint8", (BLOCK_FORMATS[codec].nbytes(microbatch * tokens, width, means),))
