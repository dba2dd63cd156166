"""How tensors are split into frames and reassembled. Pure: no I/O, and the hash function is an argument.

A tensor travels as `Chunk`s, closed by an `End` with its length and digest. Frames leave in order, but over several
connections they may arrive in any order. What arrives is not trusted: anything but exactly the declared tensors is a
`Violation`, and memory for a tensor is allocated only when its first chunk arrives.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from noloco_p2p.core.messages import ITEM_BYTES, HostTensor, TensorSpec
from noloco_p2p.errors import Violation

PROTOCOL = "12"
"""Version of proto/noloco.proto, the lattice of outer rounds and the slots of `balanced`, on which all nodes agree."""
CHUNK_BYTES = 1 << 20
"""Maximum length of a chunk. Longer ones are slower: they drop out of the processor's cache between two copies."""
PACK_BYTES = CHUNK_BYTES + (CHUNK_BYTES >> 4)
"""Maximum tensor bytes in one message: a full chunk, plus room for the small tensors of the same activation."""
REPLYING = 2**62
"""Added to `Progress.events` of a microbatch whose reply is being sent; all other counts are below it."""
MAX_TENSORS = 65_536
"""Maximum number of tensors in one stream."""
MAX_FRAMES = 4096
"""Maximum number of frames in one message: a receiver looks at each of them before it does anything else."""
MAX_RUNS = 1024
"""Maximum number of separate pieces of one tensor, with gaps between them. Sending in order over a few connections
leaves a few dozen, as many as are in flight on the slowest connection."""
MAX_DIMENSIONS = 8
MAX_NAME_CHARACTERS = 512

Hasher = Callable[[memoryview | bytes], Any]
"""A function that begins a 64-bit digest with these bytes; `update` adds more, and `intdigest` returns it."""
Allocate = Callable[[int], memoryview]
"""A function that returns a writable, flat buffer of this many bytes, with arbitrary content."""


class Chunk(NamedTuple):
    """A contiguous run of a tensor's bytes."""

    tensor: int
    """Index of the tensor among the declared ones."""
    offset: int
    data: bytes | memoryview


class End(NamedTuple):
    """Marks the end of a tensor."""

    tensor: int
    length: int
    digest: int


Frame = Chunk | End


def frames(
    tensors: Iterable[HostTensor], digests: Iterable[int], *, first: int = 0, offset: int = 0
) -> Iterator[Frame]:
    """The stream of these tensors. A digest is taken only when its tensor's turn comes; chunks are views, not copies.

    To resume a stream, pass the remaining tensors, the index of the `first` of them, and the byte `offset` within it.
    """
    begin = offset
    for index, (tensor, digest) in enumerate(zip(tensors, digests, strict=True), first):
        length = tensor.data.nbytes
        for at in range(begin, length, CHUNK_BYTES):
            yield Chunk(index, at, tensor.data[at : at + CHUNK_BYTES])
        yield End(index, length, digest)
        begin = 0


def group_frames(stream: Iterable[Frame], most_bytes: int = PACK_BYTES) -> Iterator[list[Frame]]:
    """Group frames into messages of at most `most_bytes` tensor bytes each; longer chunks are split."""
    group: list[Frame] = []
    size = 0
    for frame in stream if most_bytes >= CHUNK_BYTES else _cut(stream, most_bytes):
        length = len(frame.data) if isinstance(frame, Chunk) else 0
        if group and (size + length > most_bytes or len(group) >= MAX_FRAMES):
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


def combined_digest(specs: Sequence[TensorSpec], digests: Sequence[int], hasher: Hasher) -> int:
    """One digest over names, element types, shapes and contents: equal activations have equal digests."""
    parts = [
        f"{s.name}\0{s.dtype}\0{','.join(map(str, s.shape))}\0{d:016x}\n" for s, d in zip(specs, digests, strict=True)
    ]
    return int(hasher("".join(parts).encode()).intdigest())


def total_bytes(specs: Sequence[TensorSpec], max_bytes: int) -> int:
    """Sum of the declared sizes. Raises Violation if there are too many tensors, an element type, a name or a shape is
    invalid, or the sum exceeds `max_bytes`."""
    if len(specs) > MAX_TENSORS:
        raise Violation(f"{len(specs)} tensors are declared, at most {MAX_TENSORS} are allowed")
    total = 0
    for spec in specs:
        name = spec.name[:64]
        if spec.dtype not in ITEM_BYTES:
            raise Violation(f"tensor {name!r} has the unknown element type {spec.dtype[:32]!r}")
        if len(spec.name) > MAX_NAME_CHARACTERS or len(spec.shape) > MAX_DIMENSIONS or min(spec.shape, default=0) < 0:
            raise Violation(f"tensor {name!r} has a name that is too long, or an invalid shape")
        total += spec.nbytes
        if total > max_bytes:
            raise Violation(f"the tensors up to {name!r} have {total} bytes, at most {max_bytes} are allowed")
    return total


def check_same(sent: Sequence[TensorSpec], expected: Sequence[TensorSpec], what: str) -> None:
    """Raises Violation, naming the first difference, unless these are the expected tensors in the expected order."""
    for one, wanted in zip(sent, expected, strict=False):
        if one != wanted:
            raise Violation(f"the {what} has {one}, expected {wanted}"[:MAX_NAME_CHARACTERS])
    if len(sent) != len(expected):
        raise Violation(f"the {what} has {len(sent)} tensors, expected {len(expected)}")


@dataclass(slots=True)
class _Part:
    """What has arrived of one tensor."""

    data: memoryview | None = None
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(begin, end) of each run of bytes that has arrived, in order, with a gap between any two."""
    hash: Any = None
    """Of the bytes up to the first gap, from the first chunk on."""
    end: End | None = None
    digest: int | None = None
    """Of the complete tensor; None until it is complete."""


class Assembler:
    """Reassembles one declared stream. Every byte must arrive exactly once, but in any order, because several
    connections may carry it.

    Frames go in through `feed`, and `finish` returns the tensors. After a Violation or `discard` it holds no memory and
    accepts nothing more until `rewind`.
    """

    def __init__(self, specs: Sequence[TensorSpec], hasher: Hasher, allocate: Allocate) -> None:
        """The declared tensors have been checked, with `total_bytes` or `check_same`."""
        self._specs = tuple(specs)
        self._hasher = hasher
        self._allocate = allocate
        self._parts = [_Part() for _ in specs]
        self._due = len(self._parts)
        """Number of incomplete tensors."""

    @property
    def complete(self) -> bool:
        """Whether every declared tensor has arrived, with its end marker."""
        return len(self._parts) == len(self._specs) and not self._due

    @property
    def place(self) -> tuple[int, int]:
        """The first incomplete tensor, and its first byte that has not arrived. Never moves back."""
        for index, part in enumerate(self._parts):
            if part.digest is None:
                return index, part.runs[0][1] if part.runs and not part.runs[0][0] else 0
        return len(self._parts), 0

    def rewind(self) -> None:
        """Forget what arrived beyond `place`, because it will be sent again from there; after `discard`, everything."""
        self._parts = self._parts or [_Part() for _ in self._specs]
        index, offset = self.place
        for part in self._parts[index : index + 1]:
            part.runs, part.end = ([(0, offset)] if offset else []), None
        self._parts[index + 1 :] = [_Part() for _ in self._specs[index + 1 :]]
        self._due = len(self._specs) - index

    def feed(self, frame: Frame) -> None:
        """Accept the next frame. Raises Violation, and frees everything, if it is not one that is still missing."""
        try:
            self._take(frame)
        except Violation:
            self.discard()
            raise

    def finish(self, digest: int | None = None) -> tuple[HostTensor, ...]:
        """The tensors; from now on they belong to the caller.

        Raises Violation if some are incomplete, or if `digest` is given and is not their `combined_digest`.
        """
        try:
            if not self.complete:
                raise Violation(f"the stream is truncated: {self._due} of {len(self._specs)} tensors are incomplete")
            digests = [part.digest or 0 for part in self._parts]
            if digest is not None and combined_digest(self._specs, digests, self._hasher) != digest:
                raise Violation("the tensors do not match the digest that was declared for them")
            return tuple(
                HostTensor(*spec, part.data or self._allocate(0))
                for spec, part in zip(self._specs, self._parts, strict=True)
            )
        finally:
            self.discard()

    def discard(self) -> None:
        """Free all buffers, even if a traceback still refers to a part."""
        for part in self._parts:
            part.data = None
        self._parts, self._due = [], 0

    def _take(self, frame: Frame) -> None:
        if not self._due:
            raise Violation("a frame arrived after the end of the stream")
        if frame.tensor >= len(self._specs):
            raise Violation(f"a frame of tensor {frame.tensor} arrived, but there are only {len(self._specs)}")
        spec, part = self._specs[frame.tensor], self._parts[frame.tensor]
        if isinstance(frame, Chunk):
            self._take_piece(spec, part, frame)
        elif part.end is not None or frame.length != spec.nbytes:
            raise Violation(f"{spec.name!r} of {spec.nbytes} bytes was closed twice, or with length {frame.length}")
        else:
            part.end = frame
        if part.end is not None and part.runs == ([(0, spec.nbytes)] if spec.nbytes else []):
            self._close(spec, part, part.end)

    def _take_piece(self, spec: TensorSpec, part: _Part, chunk: Chunk) -> None:
        begin, end = chunk.offset, chunk.offset + len(chunk.data)
        if begin == end or end > spec.nbytes:
            raise Violation(f"a chunk of {spec.name!r} is empty or extends to byte {end} of {spec.nbytes}")
        runs = part.runs
        at = bisect(runs, (begin, end))
        before, after = runs[at - 1 : at] if at else [], runs[at : at + 1]
        if (before and before[0][1] > begin) or (after and after[0][0] < end):
            raise Violation(f"a chunk of {spec.name!r} at byte {begin} arrived twice")
        first = at - 1 if before and before[0][1] == begin else at
        last = at + 1 if after and after[0][0] == end else at
        runs[first:last] = [(runs[first][0] if first < at else begin, runs[at][1] if last > at else end)]
        if len(runs) > MAX_RUNS:
            raise Violation(f"the chunks of {spec.name!r} arrive in more than {MAX_RUNS} separate pieces")
        if part.data is None:
            part.data, part.hash = self._allocate(spec.nbytes), self._hasher(b"")
        part.data[begin:end] = chunk.data
        if first == runs[0][0] == 0:
            part.hash.update(part.data[begin : runs[0][1]])

    def _close(self, spec: TensorSpec, part: _Part, end: End) -> None:
        part.digest = (part.hash or self._hasher(b"")).intdigest()
        if part.digest != end.digest:
            raise Violation(f"the bytes of {spec.name!r} do not match the digest that was sent with them")
        self._due -= 1
