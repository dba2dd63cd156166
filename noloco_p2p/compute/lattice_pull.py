"""Pulls another replica's vector in few bits: which bounds to request, what the answers yield, what to request again.

METHOD.md, "Codecs of outer rounds". No I/O; works on host memory only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.compute.lattice_codec import LatticeCodec, PairDither
from noloco_p2p.core.lattice_format import BOUND_ZERO, CHUNK, LARGEST_BOUND, MIN_BOUND, PLAIN, LatticeRequest

SAFETY, DECAY = 1.25, 0.7
"""Ratio of a bound to the largest recent distance, and the factor by which that decays per round (METHOD.md)."""
WIDENINGS, FACTOR_BITS = 2, 2
"""A wrong chunk is requested again with a bound 4 times as wide; after two such attempts its values travel plain."""
FINEST_BITS = 22
"""A step is at least 2^-22 of the largest value in its chunk: float32 has hardly more precision."""


class ReplicaDistances:
    """How far other replicas were from this one, chunk by chunk: the largest recent distance."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._largest_C: Tensor | None = None
        self._before: Tensor | None = None
        """The vector of the previous round, until the first pull."""

    def bounds(self, vector: Tensor) -> Tensor:
        """The bounds (uint8) to request for the vector just frozen; `PLAIN` for chunks that are not finite, or too
        large to scale.

        Before the first pull, the distance to other replicas is estimated from how far this one has moved since the
        previous round.
        """
        if (distance_C := self._largest_C) is None:
            distance_C = _largest(vector - (vector if self._before is None else self._before))
        self._before = vector if self._largest_C is None else None
        finest_C = _exponent(_largest(vector)) - FINEST_BITS + self._bits - 1
        bound_C = torch.maximum(_exponent(SAFETY * distance_C), finest_C) + BOUND_ZERO
        return torch.where(bound_C > LARGEST_BOUND, PLAIN, bound_C.clamp(min=MIN_BOUND)).to(torch.uint8)

    def observe(self, distance_C: Tensor) -> None:
        """Record the distances that a pull has found."""
        before_C = self._largest_C
        self._largest_C = distance_C if before_C is None else torch.maximum(DECAY * before_C, distance_C)


@dataclass(slots=True)
class LatticePull:
    """What is known of another replica's vector. Request `missing` and `take` the answer until nothing is missing."""

    codec: LatticeCodec
    own: Tensor
    missing: LatticeRequest | None
    """The next request: at first all chunks, with the bounds of `own`."""
    vector: Tensor
    """The other replica's vector, as far as it is known; updated in place. At first a copy of `own`."""
    distances: Tensor
    """The largest difference in each known chunk, float64; updated in place."""

    def take(self, answer: Tensor, dither: PairDither) -> None:
        """Process the answer to `missing`. Raises Violation like `LatticeCodec.decode`."""
        asked = self.missing
        assert asked is not None, "nothing was asked for"
        found = self.codec.decode(answer, self.own, asked, dither, self.vector)
        chunks, widened = torch.tensor(asked.chunks), asked.widened + 1
        self.distances[chunks] = found.distances
        self.missing = None
        if found.wrong:
            wider_C = found.bounds[torch.isin(chunks, torch.tensor(found.wrong))].int() + FACTOR_BITS
            bounds_C = torch.where((wider_C > LARGEST_BOUND) | (widened > WIDENINGS), PLAIN, wider_C)
            self.missing = LatticeRequest(bytes(bounds_C.tolist()), found.wrong, widened)


def _largest(vector: Tensor) -> Tensor:
    """The largest magnitude in each chunk, float64, in host memory; NaN and infinity propagate."""
    whole = len(vector) // CHUNK * CHUNK
    parts = [vector[:whole].view(-1, CHUNK), vector[None, whole:]]
    found = [torch.maximum(-one.amin(-1), one.amax(-1)) for one in parts if one.numel()]
    return torch.cat(found).to("cpu", torch.float64)


def _exponent(magnitude_C: Tensor) -> Tensor:
    """The least e with magnitude ≤ 2^e, or one more. Above all bounds if the magnitude is not finite; that of the least
    bound if it is 0."""
    exponent_C = torch.frexp(magnitude_C).exponent
    exponent_C = torch.where(magnitude_C == 0, MIN_BOUND - BOUND_ZERO, exponent_C)
    return torch.where(torch.isfinite(magnitude_C), exponent_C, PLAIN + FINEST_BITS)
