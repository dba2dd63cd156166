"""Encodes a replica's vector in few bits, for a replica with a similar one (METHOD.md, "Codecs of outer rounds").

Replicas of a stage are close together, but their weights can be anywhere. Both round their values to integers on the
same dithered lattice. The low bits of the sender's integers travel, and the receiver takes the integers with these bits
that are nearest to its own. It applies only the difference of the integers: dither and rounding are the same on both
sides, so the two replicas of a pair move by opposite amounts, and their mean stays. A digest of the integers' high bits
shows where the nearest integer was wrong because the bound was too small: those chunks are requested again.

Any two machines get the same integers: a value is rounded once, to 2^-8 of a step, and all that follows is exact.

On a CPU each operation is a pass over the values, and these passes take the time: so they are few, and in place.

Shape legend: C chunks of the vector, or some of them; K values of a chunk.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from noloco_p2p.core import seeds
from noloco_p2p.core.lattice_format import (
    BOUND_ZERO,
    CHUNK,
    DIGEST_BYTES,
    LARGEST_BOUND,
    PLAIN,
    LatticeFormat,
    LatticeRequest,
    chunk_count,
)
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Declined, Violation

BATCH, GPU_BATCH = 32, 2048
"""How many chunks are computed together: on a CPU half a megabyte of float32, so that the passes stay in its cache; on
a GPU 32 megabytes, so that it does not wait for kernel launches."""
FRACTION_BITS = 8
"""Values and dither are multiples of 2^-8 of a step. A value is at most 2^22 steps (`lattice_pull.FINEST_BITS`), so it
fits 32 bits."""


class PairDither:
    """The dither of a pair's exchange in one round, equal on both sides: a uniform fraction of a step for each value.

    It is the sum modulo 1 of a number for the value's place in its chunk and one for its chunk. So any two values of
    the vector have independent dither, which is all that means and variances require.
    """

    def __init__(self, seed: int, round: int, pair: tuple[PeerId, PeerId], parameters: int) -> None:
        chunks = chunk_count(parameters)
        random = seeds.generator(seed, "lattice", round, *sorted(pair)).randbytes(CHUNK + chunks)
        numbers = torch.frombuffer(bytearray(random), dtype=torch.uint8).to(torch.int32)
        self.place_K, self.chunk_C = numbers[:CHUNK], numbers[CHUNK:]
        """int32, in units of 2^-8."""


@cache
def _digest_factors() -> Tensor:
    """An odd int32 number for each place in a chunk, the same in every run."""
    random = seeds.generator(0, "lattice digest").randbytes(4 * CHUNK)
    return torch.frombuffer(bytearray(random), dtype=torch.int32) | 1


class _ChunkRows(NamedTuple):
    """Chunks of equal width that are computed together."""

    at: slice
    """Their positions among the requested chunks."""
    chunks: Sequence[int]
    width: int

    def rows(self, vector: Tensor) -> Tensor:
        """Their values, C×K; a view if they are adjacent. An odd width is padded with a zero."""
        first, last = self.chunks[0], self.chunks[-1]
        if last - first + 1 == len(self.chunks):
            rows_CK = vector[first * CHUNK : first * CHUNK + len(self.chunks) * self.width].view(-1, self.width)
        else:
            rows_CK = torch.stack([vector[chunk * CHUNK : chunk * CHUNK + self.width] for chunk in self.chunks])
        return rows_CK if self.width % 2 == 0 else torch.nn.functional.pad(rows_CK, (0, 1))

    def write(self, vector: Tensor, rows_CK: Tensor) -> None:
        """Write the rows to a vector."""
        rows_CK = rows_CK[:, : self.width]
        first, last = self.chunks[0], self.chunks[-1]
        if last - first + 1 == len(self.chunks):
            vector[first * CHUNK : first * CHUNK + rows_CK.numel()].view_as(rows_CK).copy_(rows_CK)
            return
        for chunk, row in zip(self.chunks, rows_CK, strict=True):
            vector[chunk * CHUNK : chunk * CHUNK + self.width] = row


class _Lattice(NamedTuple):
    """The lattice of the requested chunks, on the device."""

    scales: Tensor
    """How many units of 2^-8 of a step a value of 1 is in each chunk, in the vector's dtype."""
    places: Tensor
    """The dither of each place."""
    chunks: Tensor
    """The dither of each chunk."""

    def integers(self, rows_CK: Tensor, at: slice) -> Tensor:
        """⌊value / step + dither⌋, int32, C×K, of the chunks at these positions."""
        fixed_CK = (rows_CK * self.scales[at, None]).round_().to(torch.int32)
        fixed_CK += self.places[: rows_CK.shape[1]]
        fixed_CK += self.chunks[at, None]
        return fixed_CK.bitwise_right_shift_(FRACTION_BITS)


class LatticeAnswer(NamedTuple):
    """The result of decoding an answer."""

    wrong: tuple[int, ...]
    """Chunks that are still unknown, ascending."""
    bounds: Tensor
    """The bound that was used for each requested chunk."""
    distances: Tensor
    """The largest difference in each requested chunk, rounded to the lattice; meaningless for a wrong one."""


class LatticeCodec:
    """The codec of one stage's vectors, which are in host memory; the work is done on `device`, batch by batch.

    `own_C`: the bounds that a replica uses in its own requests in a round.
    """

    def __init__(self, bits: int, parameters: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.format = LatticeFormat(bits, parameters, dtype.itemsize)
        self._dtype, self._device = dtype, torch.device(device)
        self._batch = BATCH if self._device.type == "cpu" else GPU_BATCH
        self._levels = 1 << (bits - 1)

    def encode(self, vector: Tensor, own_C: Tensor, asked: LatticeRequest, dither: PairDither) -> Tensor:
        """The answer (uint8, `format.nbytes(asked)`): digests, plain values, the bounds used, codes.

        Each chunk's bound is the larger of the requested one and that of `own_C`, so that both replicas of a pair use
        the same. Raises Violation if the request is invalid, Declined if `vector` is not finite, or nearly infinite.
        """
        self.format.check(asked)
        asked_C, own_C = _to_tensor(asked.bounds), _of(own_C, asked.chunks)
        if bool((own_C == PLAIN).any()):
            raise Declined("this replica's vector is not finite")
        used_C = torch.maximum(asked_C, own_C)
        lattice = self._lattice(asked, self._steps(used_C), dither)
        digest_C = torch.zeros(len(used_C), dtype=torch.int32)
        codes: list[Tensor] = []
        plain: list[Tensor] = []
        for batch in self._batches(asked, used_C):
            if int(used_C[batch.at.start]) == PLAIN:
                plain.append(batch.rows(vector)[:, : batch.width].flatten().view(torch.uint8))
                continue
            integers_CK = lattice.integers(batch.rows(vector).to(self._device), batch.at)
            codes.append(self._packed(integers_CK).flatten().cpu())
            digest_C[batch.at] = self._digest_of(integers_CK)
        return torch.cat((digest_C.view(torch.uint8), *plain, used_C, *codes))

    def decode(
        self, wire: Tensor, own: Tensor, asked: LatticeRequest, dither: PairDither, into: Tensor
    ) -> LatticeAnswer:
        """Decode an answer into the vector `into`: own + (the integers' difference) × step, chunk by chunk.

        `own` is the vector for which this replica made the request `asked`; wrong chunks are as in `own`. Raises
        Violation if the length does not match the request, bounds are invalid, or plain values are not finite.
        """
        digest_C, plain, used_C, codes = self._parts(wire, asked)
        step_C = self._steps(used_C)
        lattice, moved_C = self._lattice(asked, step_C, dither), step_C.to(self._dtype)
        good_C, distance_C = torch.ones_like(used_C, dtype=torch.bool), torch.zeros_like(step_C)
        for batch in self._batches(asked, used_C):
            at, rows_CK = batch.at, batch.rows(own)
            if int(used_C[at.start]) == PLAIN:
                taken, plain = plain[: batch.width], plain[batch.width :]
                distance_C[at] = float((taken - rows_CK[0, : batch.width]).abs().max())
                batch.write(into, taken[None])
                continue
            size = len(batch.chunks) * self.format.code_bytes(batch.width)
            taken, codes = codes[:size], codes[size:]
            rows_CK = rows_CK.to(self._device)
            integers_CK = lattice.integers(rows_CK, at)
            gap_CK = self._gap(taken.to(self._device).view(len(batch.chunks), -1), integers_CK)
            integers_CK += gap_CK
            least_C, most_C = gap_CK.amin(-1).cpu(), gap_CK.amax(-1).cpu()
            # The lowest code counts as wrong: otherwise only one replica of a pair might find the chunk wrong. So it
            # does not matter that −128 has no opposite.
            good_C[at] = (self._digest_of(integers_CK).cpu() == digest_C[at]) & (least_C > -self._levels)
            distance_C[at] = torch.maximum(-least_C, most_C) * step_C[at]
            applied_C = (moved_C[at] * good_C[at]).to(self._device)
            batch.write(into, torch.addcmul(rows_CK, gap_CK.to(self._dtype), applied_C[:, None]))
        wrong = tuple(asked.chunks[at] for at in torch.nonzero(~good_C).flatten().tolist())
        return LatticeAnswer(wrong, used_C, distance_C)

    def _parts(self, wire: Tensor, asked: LatticeRequest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Digests, plain values, the bounds used and codes of an answer. Raises Violation like `decode`."""
        count, nbytes = len(asked.bounds), self.format.nbytes(asked)
        if wire.dtype != torch.uint8 or wire.shape != (nbytes,):
            raise Violation(f"the answer has {wire.numel()} bytes, not {nbytes}")
        values = self.format.value_bytes * self.format.plain_values(asked)
        plain_at, used_at, codes_at = itertools.accumulate((DIGEST_BYTES * count, values, count))
        asked_C, used_C = _to_tensor(asked.bounds), wire[used_at:codes_at]
        plain = wire[plain_at:used_at].clone().view(self._dtype)
        if bool(((used_C < asked_C) | ((used_C > LARGEST_BOUND) & (asked_C != PLAIN))).any()):
            raise Violation("the answer has bounds that do not match the request")
        if not bool(torch.isfinite(plain).all()):
            raise Violation("the answer has values that are not finite")
        return wire[:plain_at].clone().view(torch.int32), plain, used_C, wire[codes_at:]

    def _batches(self, asked: LatticeRequest, used_C: Tensor) -> Iterator[_ChunkRows]:
        """The requested chunks in order, in batches. Plain chunks, and the last chunk of the vector, come alone."""
        used, start = used_C.tolist(), 0
        last = chunk_count(self.format.parameters) - 1
        while start < len(used):
            end = start + 1
            if used[start] != PLAIN:
                limit = min(start + self._batch, len(used))
                while end < limit and used[end] != PLAIN and asked.chunks[end] != last:
                    end += 1
            chunks = asked.chunks[start:end]
            yield _ChunkRows(slice(start, end), chunks, self.format.width(chunks[0]))
            start = end

    def _steps(self, bounds_C: Tensor) -> Tensor:
        """2·bound / 2^bits, float64."""
        exponent_C = bounds_C.to(torch.int32) - BOUND_ZERO
        return torch.ldexp(torch.ones(len(bounds_C), dtype=torch.float64), exponent_C) / self._levels

    def _lattice(self, asked: LatticeRequest, step_C: Tensor, dither: PairDither) -> _Lattice:
        scale_C = ((1 << FRACTION_BITS) / step_C).to(self._device, self._dtype)
        return _Lattice(scale_C, dither.place_K.to(self._device), _of(dither.chunk_C, asked.chunks).to(self._device))

    def _packed(self, integers_CK: Tensor) -> Tensor:
        """The low bits. With 4 bits, the first half of a row is in the lower halves of the bytes."""
        codes = integers_CK.to(torch.uint8)
        if self.format.bits == 8:
            return codes
        low, high = codes.chunk(2, dim=1)
        return (high << 4).bitwise_or_(low & 15)

    def _gap(self, packed: Tensor, integers_CK: Tensor) -> Tensor:
        """How far the nearest integers with these low bits are from this replica's own, int8."""
        codes = packed if self.format.bits == 8 else torch.cat((packed, packed >> 4), dim=1)
        gap_CK = codes - integers_CK.to(torch.uint8)
        return gap_CK.view(torch.int8) if self.format.bits == 8 else (gap_CK << 4).view(torch.int8) >> 4

    def _digest_of(self, integers_CK: Tensor) -> Tensor:
        """The digest of each chunk, int32: the sum of odd multiples of the high bits, modulo 2^32.

        A wrong integer has the right low bits, because those travel. Overwrites the integers.
        """
        factors_K = _digest_factors()[: integers_CK.shape[1]].to(self._device)
        return integers_CK.bitwise_right_shift_(self.format.bits).mul_(factors_K).sum(-1, dtype=torch.int32)


def _to_tensor(bounds: bytes) -> Tensor:
    return torch.frombuffer(bytearray(bounds), dtype=torch.uint8)


def _of(all_C: Tensor, chunks: Sequence[int]) -> Tensor:
    """The values of some chunks; a view if they are adjacent."""
    if chunks[-1] - chunks[0] + 1 == len(chunks):
        return all_C[chunks[0] : chunks[-1] + 1]
    return all_C[torch.tensor(chunks)]
