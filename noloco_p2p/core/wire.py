"""How tensors are cut into frames and put together again: values in, values out, no I/O and no hashing of its own.

A tensor travels as `Chunk`s in order, closed by an `End` with its length and digest; tensors travel one after the
other, as declared in advance. What arrives is not trusted: anything but exactly the declared stream is a
`Violation`, and memory for a tensor is taken only when its first chunk comes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
MAX_DIMENSIONS = 8
MAX_NAME_CHARACTERS = 512

Digest = Callable[[memoryview | bytes], int]
"""A 64-bit digest of bytes."""
Allocate = Callable[[int], memoryview]
"""A writable, flat buffer of this many bytes, with any content."""


class Chunk(NamedTuple):
    """A run of a tensor's bytes that starts where the chunk before ended."""

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


class Assembler:
    """Puts one declared stream together. Frames go in by `feed`, the tensors come out of `finish`.

    After a Violation, and after `discard`, it holds no memory and takes nothing more.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], max_bytes: int, digest: Digest, allocate: Allocate = buffer
    ) -> None:
        """Raises Violation when the declared tensors may not travel (see `total_bytes`)."""
        total_bytes(specs, max_bytes)
        self._specs = tuple(specs)
        self._digest = digest
        self._allocate = allocate
        self._done: list[HostTensor] = []
        self._digests: list[int] = []
        self._current: memoryview | None = None
        self._filled = 0
        self._open = True

    @property
    def complete(self) -> bool:
        """Every declared tensor has been closed by its end marker."""
        return self._open and len(self._done) == len(self._specs)

    @property
    def place(self) -> tuple[int, int]:
        """The tensor that is due, and the byte of it that is; it only grows."""
        return len(self._done), self._filled

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers held now."""
        current = 0 if self._current is None else self._current.nbytes
        return current + sum(tensor.data.nbytes for tensor in self._done)

    def feed(self, frame: Frame) -> None:
        """Take the next frame. Raises Violation, and frees everything, when it is not the one that must come."""
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
                raise Violation(f"the stream is truncated: {self._progress()}")
            if digest is not None and combined_digest(self._specs, self._digests, self._digest) != digest:
                raise Violation("the tensors do not have the digest that was declared for all of them")
            return tuple(self._done)
        finally:
            self.discard()

    def discard(self) -> None:
        """Free all buffers."""
        self._open = False
        self._done = []
        self._current = None

    def _progress(self) -> str:
        if len(self._done) == len(self._specs):
            return "all tensors are there"
        spec = self._specs[len(self._done)]
        return f"{self._filled} of {spec.nbytes} bytes of {spec.name!r} have come"

    def _take(self, frame: Frame) -> None:
        index = len(self._done)
        if not self._open or index == len(self._specs):
            raise Violation("a frame came after the end of the stream")
        if frame.tensor != index:
            raise Violation(f"a frame of tensor {frame.tensor} came, {index} is due")
        if isinstance(frame, Chunk):
            self._take_chunk(self._specs[index], frame)
        else:
            self._take_end(self._specs[index], frame)

    def _take_chunk(self, spec: TensorSpec, chunk: Chunk) -> None:
        if chunk.offset != self._filled:
            raise Violation(f"a chunk of {spec.name!r} starts at byte {chunk.offset}, {self._filled} is due")
        end = self._filled + len(chunk.data)
        if end > spec.nbytes or not chunk.data:
            raise Violation(f"a chunk of {spec.name!r} is empty or goes to byte {end} of {spec.nbytes}")
        if self._current is None:
            self._current = self._allocate(spec.nbytes)
        self._current[self._filled : end] = chunk.data
        self._filled = end

    def _take_end(self, spec: TensorSpec, end: End) -> None:
        if not end.length == self._filled == spec.nbytes:
            raise Violation(f"{spec.name!r} ends after {self._filled} of {spec.nbytes} bytes, as {end.length}")
        if self._current is None:
            self._current = self._allocate(0)
        digest = self._digest(self._current)
        if digest != end.digest:
            raise Violation(f"the bytes of {spec.name!r} do not have the digest that was sent with them")
        self._done.append(HostTensor(spec.name, spec.dtype, spec.shape, self._current))
        self._digests.append(digest)
        self._current = None
        self._filled = 0
