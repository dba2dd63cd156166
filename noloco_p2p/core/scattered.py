"""A stream of tensors that travels over several connections: its chunks come in any order. Pure, as `wire`."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from noloco_p2p.core.messages import HostTensor, TensorSpec
from noloco_p2p.core.wire import Allocate, Assembler, Chunk, Digest, End, Frame, buffer
from noloco_p2p.errors import Violation

MAX_RUNS = 1024
"""Most pieces of one tensor with gaps between them. Who sends in order over a few connections has some dozens, as many
as are under way on the slowest of them."""


@dataclass(slots=True)
class _Part:
    """What has come of one tensor."""

    data: memoryview | None = None
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(begin, end) of the bytes that are there, in order; between two of them is a gap."""
    end: End | None = None
    digest: int | None = None
    """Of the whole, once it is whole."""


class ScatteredAssembler(Assembler):
    """Puts one declared stream together, whose every byte must come exactly once."""

    def __init__(
        self, specs: Sequence[TensorSpec], max_bytes: int, digest: Digest, allocate: Allocate = buffer
    ) -> None:
        """See `Assembler`."""
        super().__init__(specs, max_bytes, digest, allocate)
        self._parts = [_Part() for _ in self._specs]
        self._due = len(self._specs)
        """Tensors that are not whole."""

    def discard(self) -> None:
        """Free all buffers."""
        super().discard()
        self._parts = []

    def _progress(self) -> str:
        return f"{self._due} of {len(self._specs)} tensors are not whole"

    def _take(self, frame: Frame) -> None:
        if not self._open or not self._due:
            raise Violation("a frame came after the end of the stream")
        if frame.tensor >= len(self._specs):
            raise Violation(f"a frame of tensor {frame.tensor} came, there are {len(self._specs)}")
        spec, part = self._specs[frame.tensor], self._parts[frame.tensor]
        if isinstance(frame, Chunk):
            self._take_piece(spec, part, frame)
        elif part.end is not None or frame.length != spec.nbytes:
            raise Violation(f"{spec.name!r} of {spec.nbytes} bytes ends as {frame.length}, or for a second time")
        else:
            part.end = frame
        if part.end is not None and part.runs == ([(0, spec.nbytes)] if spec.nbytes else []):
            self._close(spec, part, part.end)

    def _take_piece(self, spec: TensorSpec, part: _Part, chunk: Chunk) -> None:
        begin, end = chunk.offset, chunk.offset + len(chunk.data)
        if begin == end or end > spec.nbytes:
            raise Violation(f"a chunk of {spec.name!r} is empty or goes to byte {end} of {spec.nbytes}")
        runs = part.runs
        at = bisect(runs, (begin, end))
        before, after = runs[at - 1 : at] if at else [], runs[at : at + 1]
        if (before and before[0][1] > begin) or (after and after[0][0] < end):
            raise Violation(f"a chunk of {spec.name!r} at byte {begin} came twice")
        first = at - 1 if before and before[0][1] == begin else at
        last = at + 1 if after and after[0][0] == end else at
        runs[first:last] = [(runs[first][0] if first < at else begin, runs[at][1] if last > at else end)]
        if len(runs) > MAX_RUNS:
            raise Violation(f"the chunks of {spec.name!r} come with more than {MAX_RUNS} gaps")
        if part.data is None:
            part.data = self._allocate(spec.nbytes)
        part.data[begin:end] = chunk.data

    def _close(self, spec: TensorSpec, part: _Part, end: End) -> None:
        if part.data is None:
            part.data = self._allocate(0)
        part.digest = self._digest(part.data)
        if part.digest != end.digest:
            raise Violation(f"the bytes of {spec.name!r} do not have the digest that was sent with them")
        self._due -= 1
        if self._due:
            return
        for one, whole in zip(self._specs, self._parts, strict=True):
            assert whole.data is not None
            assert whole.digest is not None
            self._done.append(HostTensor(one.name, one.dtype, one.shape, whole.data))
            self._digests.append(whole.digest)
        self._parts = []
