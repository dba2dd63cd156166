"""How tensors are cut into frames and put together again: values in, values out, no I/O and no hashing of its own.

A tensor travels as `Chunk`s, with an `End` that has its length and digest. They leave in order, and over several
connections arrive in any. What arrives is not trusted: anything but exactly the declared tensors is a `Violation`, and
memory for a tensor is taken only when its first chunk comes.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from noloco_p2p.core.messages import ITEM_BYTES, HostTensor, TensorSpec
from noloco_p2p.errors import Violation

CHUNK_BYTES = 1 << 20
"""Longest chunk. Longer ones are slower: they leave the processor's cache between two copies."""
PACK_BYTES = CHUNK_BYTES + (CHUNK_BYTES >> 4)
"""Most tensor bytes in one message: a full chunk, and room beside it for the small tensors of the same activation."""
REPLYING = 2**62
"""Added to `Progress.events` of a microbatch whose reply is being sent; those of others are below it."""
MAX_TENSORS = 65_536
"""Most tensors in one stream."""
MOST_FRAMES = 4096
"""Most frames in one message: a receiver looks at each before it does anything else."""
MAX_RUNS = 1024
"""Most pieces of one tensor with gaps between them. Who sends in order over a few connections has some dozens, as many
as are under way on the slowest of them."""
MAX_DIMENSIONS = 8
MAX_NAME_CHARACTERS = 512

Digest = Callable[[memoryview | bytes], int]
"""A 64-bit digest of bytes."""
Allocate = Callable[[int], memoryview]
"""A writable, flat buffer of this many bytes, with any content."""


class Chunk(NamedTuple):
    """A run of a tensor's bytes."""

    tensor: int
    """Index of the tensor among the declared ones."""
    offset: int
    data: bytes | memoryview


class End(NamedTuple):
    """Closes a tensor."""

    tensor: int
    length: int
    digest: int


Frame = Chunk | End


def frames(
    tensors: Iterable[HostTensor], digests: Iterable[int], *, first: int = 0, offset: int = 0
) -> Iterator[Frame]:
    """The stream of these tensors. A digest is asked for when its tensor's turn comes; chunks are views, not copies.

    The rest of a stream has the index of the `first` tensor given, and begins at byte `offset` of that one.
    """
    begin = offset
    for index, (tensor, digest) in enumerate(zip(tensors, digests, strict=True), first):
        length = tensor.data.nbytes
        for at in range(begin, length, CHUNK_BYTES):
            yield Chunk(index, at, tensor.data[at : at + CHUNK_BYTES])
        yield End(index, length, digest)
        begin = 0


def group_frames(stream: Iterable[Frame], most_bytes: int = PACK_BYTES) -> Iterator[list[Frame]]:
    """Groups frames into messages of at most `most_bytes` of tensor bytes; chunks that are longer are cut."""
    group: list[Frame] = []
    size = 0
    for frame in stream if most_bytes >= CHUNK_BYTES else _cut(stream, most_bytes):
        length = len(frame.data) if isinstance(frame, Chunk) else 0
        if group and (size + length > most_bytes or len(group) >= MOST_FRAMES):
            yield group
            group, size = [], 0
        group.append(frame)
        size += length
    if group:
        yield group


def _cut(stream: Iterable[Frame], most_bytes: int) -> Iterator[Frame]:
    for frame in stream:
        if isinstance(frame, Chunk):
            for at in range(0, len(frame.data), most_bytes):
                yield Chunk(frame.tensor, frame.offset + at, frame.data[at : at + most_bytes])
        else:
            yield frame


def combined_digest(specs: Sequence[TensorSpec], digests: Sequence[int], digest: Digest) -> int:
    """One digest over names, element types, shapes and contents: equal activations have equal ones."""
    parts = [
        f"{s.name}\0{s.dtype}\0{','.join(map(str, s.shape))}\0{d:016x}\n" for s, d in zip(specs, digests, strict=True)
    ]
    return digest("".join(parts).encode())


def total_bytes(specs: Sequence[TensorSpec], max_bytes: int) -> int:
    """Sum of the declared lengths. Raises Violation: unknown element type, odd shape, or more than `max_bytes`."""
    if len(specs) > MAX_TENSORS:
        raise Violation(f"{len(specs)} tensors are declared, at most {MAX_TENSORS} may travel together")
    total = 0
    for spec in specs:
        name = spec.name[:64]
        if spec.dtype not in ITEM_BYTES:
            raise Violation(f"tensor {name!r} has the unknown element type {spec.dtype[:32]!r}")
        if len(spec.name) > MAX_NAME_CHARACTERS or len(spec.shape) > MAX_DIMENSIONS or min(spec.shape, default=0) < 0:
            raise Violation(f"tensor {name!r} has too long a name or an impossible shape")
        total += spec.nbytes
        if total > max_bytes:
            raise Violation(f"the tensors up to {name!r} have {total} bytes, at most {max_bytes} are taken")
    return total


def check_same(sent: Sequence[TensorSpec], expected: Sequence[TensorSpec], what: str) -> None:
    """Raises Violation, which names the first difference, unless these tensors are the expected ones in their order."""
    for one, wanted in zip(sent, expected, strict=False):
        if one != wanted:
            raise Violation(f"the {what} has {one}, expected {wanted}"[:MAX_NAME_CHARACTERS])
    if len(sent) != len(expected):
        raise Violation(f"the {what} has {len(sent)} tensors, expected {len(expected)}")


def buffer(length: int) -> memoryview:
    """A zeroed buffer."""
    return memoryview(bytearray(length))


@dataclass(slots=True)
class _Part:
    """What has come of one tensor."""

    data: memoryview | None = None
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(begin, end) of the bytes that are there, in order; between two of them is a gap."""
    end: End | None = None
    digest: int | None = None
    """Of the whole, once it is whole."""


class Assembler:
    """Puts one declared stream together, whose every byte must come exactly once; in any order, because several
    connections may carry it.

    Frames go in by `feed`, the tensors come out of `finish`. After a Violation, and after `discard`, it holds no memory
    and takes nothing more before `rewind`.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], max_bytes: int, digest: Digest, allocate: Allocate = buffer
    ) -> None:
        """Raises Violation when the declared tensors may not travel (see `total_bytes`)."""
        total_bytes(specs, max_bytes)
        self._specs = tuple(specs)
        self._digest = digest
        self._allocate = allocate
        self._parts = [_Part() for _ in specs]
        self._due = len(self._parts)
        """Tensors that are not whole."""

    @property
    def complete(self) -> bool:
        """Every declared tensor has come, with its end marker."""
        return len(self._parts) == len(self._specs) and not self._due

    @property
    def place(self) -> tuple[int, int]:
        """The first tensor that is not whole, and the first byte of it that has not come; it only grows."""
        for index, part in enumerate(self._parts):
            if part.digest is None:
                return index, part.runs[0][1] if part.runs and not part.runs[0][0] else 0
        return len(self._parts), 0

    def rewind(self) -> None:
        """Forget what has come beyond `place`, because all from there on comes again; after `discard`, everything."""
        self._parts = self._parts or [_Part() for _ in self._specs]
        index, offset = self.place
        for part in self._parts[index : index + 1]:
            part.runs, part.end = ([(0, offset)] if offset else []), None
        self._parts[index + 1 :] = [_Part() for _ in self._specs[index + 1 :]]
        self._due = len(self._specs) - index

    def feed(self, frame: Frame) -> None:
        """Take the next frame. Raises Violation, and frees everything, when it is none of those that must come."""
        try:
            self._take(frame)
        except Violation:
            self.discard()
            raise

    def finish(self, digest: int | None = None) -> tuple[HostTensor, ...]:
        """The tensors, which are the caller's from now on.

        Raises Violation when some are missing, or when `digest` is given and is not their `combined_digest` one.
        """
        try:
            if not self.complete:
                raise Violation(f"the stream is truncated: {self._due} of {len(self._specs)} tensors are not whole")
            digests = [part.digest or 0 for part in self._parts]
            if digest is not None and combined_digest(self._specs, digests, self._digest) != digest:
                raise Violation("the tensors do not have the digest that was declared for all of them")
            return tuple(
                HostTensor(*spec, part.data or self._allocate(0))
                for spec, part in zip(self._specs, self._parts, strict=True)
            )
        finally:
            self.discard()

    def discard(self) -> None:
        """Free all buffers, also where a traceback refers to a part."""
        for part in self._parts:
            part.data = None
        self._parts, self._due = [], 0

    def _take(self, frame: Frame) -> None:
        if not self._due:
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
        part.digest = self._digest(part.data or b"")
        if part.digest != end.digest:
            raise Violation(f"the bytes of {spec.name!r} do not have the digest that was sent with them")
        self._due -= 1
