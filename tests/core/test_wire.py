"""Wire: a split stream is reassembled bit for bit, in any order; anything else is refused, and its memory freed."""

import gc
import random
import weakref
import zlib
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.core import wire
from noloco_p2p.core.messages import ITEM_BYTES, HostTensor, TensorSpec
from noloco_p2p.core.wire import MAX_RUNS, Assembler, Chunk, End, Frame
from noloco_p2p.errors import Violation


def digest(data: memoryview | bytes | bytearray) -> int:
    """A 64-bit digest made with the standard library."""
    return zlib.crc32(data) << 32 | zlib.adler32(data)


class Hash:
    """The same digest, of bytes that come one after the other."""

    def __init__(self, data: memoryview | bytes) -> None:
        self._data = bytearray(data)

    def update(self, data: memoryview) -> None:
        self._data += data

    def intdigest(self) -> int:
        return digest(self._data)


def tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> HostTensor:
    nbytes = TensorSpec(name, dtype, shape).nbytes
    return HostTensor(name, dtype, shape, memoryview(random.Random(seed).randbytes(nbytes)))


def buffer(length: int) -> memoryview:
    return memoryview(bytearray(length))


def stream(tensors: list[HostTensor]) -> list[Frame]:
    return list(wire.frames(tensors, (digest(t.data) for t in tensors)))


def assemble(specs: list[TensorSpec], frames: list[Frame], total: int | None = None) -> tuple[HostTensor, ...]:
    assembler = Assembler(specs, Hash, buffer)
    for frame in frames:
        assembler.feed(frame)
    return assembler.finish(total)


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
some_tensors = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), max_size=5).map(
    lambda kinds: [tensor(f"t{i}", dtype, shape, seed=i) for i, (dtype, shape) in enumerate(kinds)]
)
long_tensors = [
    tensor("hidden", "bfloat16", (3, wire.CHUNK_BYTES // 2 + 5), seed=1),
    tensor("empty", "float32", (2, 0, 3)),
    tensor("targets", "int32", (4, 128), seed=2),
    tensor("exact", "float64", (2, wire.CHUNK_BYTES // 8), seed=3),
]


@given(some_tensors)
def test_round_trip_over_element_types_and_shapes(tensors: list[HostTensor]) -> None:
    specs = [t.spec for t in tensors]
    total = wire.combined_digest(specs, [digest(t.data) for t in tensors], Hash)
    received = assemble(specs, [frame for pack in wire.group_frames(stream(tensors)) for frame in pack], total)
    assert [t.spec for t in received] == specs
    assert [bytes(t.data) for t in received] == [bytes(t.data) for t in tensors]


def test_round_trip_of_tensors_longer_than_a_chunk() -> None:
    frames = stream(long_tensors)
    assert max(len(f.data) for f in frames if isinstance(f, Chunk)) == wire.CHUNK_BYTES
    received = assemble([t.spec for t in long_tensors], frames)
    assert all(a.data == b.data for a, b in zip(received, long_tensors, strict=True))


def test_packs_keep_the_order_and_the_bound() -> None:
    frames = stream(long_tensors)
    grouped = list(wire.group_frames(frames))
    assert [f for pack in grouped for f in pack] == frames
    assert all(sum(len(f.data) for f in pack if isinstance(f, Chunk)) <= wire.PACK_BYTES for pack in grouped)
    hidden = tensor("hidden", "float32", (4, 64, 1024))
    assert len(list(wire.group_frames(stream([hidden, tensor("targets", "int32", (4, 128))])))) == 1, (
        "1 MiB and its targets"
    )


@settings(max_examples=300)
@given(some_tensors.filter(lambda ts: any(t.data.nbytes for t in ts)), st.randoms(use_true_random=False))
def test_any_change_of_the_stream_is_refused(tensors: list[HostTensor], rng: random.Random) -> None:
    frames = stream(tensors)
    place = rng.randrange(len(frames))
    frame = frames[place]
    match rng.choice(["drop", "repeat", "flip", "truncate", "offset", "digest", "length"]):
        case "drop":
            del frames[place]
        case "repeat":
            frames.insert(place, frame)
        case "truncate":
            del frames[place:]
        case "flip" if isinstance(frame, Chunk):
            at = rng.randrange(len(frame.data))
            data = bytearray(frame.data)
            data[at] ^= 1 << rng.randrange(8)
            frames[place] = frame._replace(data=bytes(data))
        case "offset" if isinstance(frame, Chunk):
            frames[place] = frame._replace(offset=frame.offset + 1)
        case "digest" if isinstance(frame, End):
            frames[place] = frame._replace(digest=frame.digest ^ 1)
        case "length" if isinstance(frame, End):
            frames[place] = frame._replace(length=frame.length + 1)
        case _:
            frames[place] = frame._replace(tensor=frame.tensor + 1)
    with pytest.raises(Violation):
        assemble([t.spec for t in tensors], frames)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=4), st.data(), st.randoms(use_true_random=False))
def test_frames_in_any_order_are_reassembled_and_a_stream_resumes(
    sizes: list[int], data: st.DataObject, rng: random.Random
) -> None:
    """Everything after the place from which the stream is requested again arrives twice."""
    sent = [tensor(f"t{i}", "uint8", (size,), seed=i) for i, size in enumerate(sizes)]
    order, into = cut(stream(sent)), Assembler([one.spec for one in sent], Hash, buffer)
    rng.shuffle(order)
    came = data.draw(st.integers(0, len(order)))
    for number, frame in enumerate(order):
        assert into.complete == (number == len(order))
        if number == came:
            first, offset = before = into.place
            into.rewind()
            assert into.place == before
            break
        into.feed(frame)
    else:
        first, offset = len(sent), 0
    digests = [digest(one.data) for one in sent]
    again = cut(list(wire.frames(sent[first:], digests[first:], first=first, offset=offset)))
    rng.shuffle(again)
    for frame in again:
        assert into.place >= (first, offset)
        into.feed(frame)
    got = into.finish(wire.combined_digest([one.spec for one in sent], digests, Hash))
    assert [(one.spec, bytes(one.data)) for one in got] == [(one.spec, bytes(one.data)) for one in sent]


def test_a_digest_grows_as_the_chunks_arrive_and_leave_no_gap() -> None:
    """That of a whole vector would stop the event loop for as long as it takes."""
    added = list[int]()

    class Noted(Hash):
        def update(self, data: memoryview) -> None:
            added.append(len(data))
            super().update(data)

    data = bytes(range(40))
    into = Assembler([TensorSpec("t", "uint8", (40,))], Noted, buffer)
    for at, sizes in (10, []), (0, [20]), (30, [20]), (20, [20, 20]):
        into.feed(Chunk(0, at, data[at : at + 10]))
        assert added == sizes
    into.feed(End(0, 40, digest(data)))
    assert added == [20, 20]
    assert bytes(into.finish()[0].data) == data


def test_a_discarded_stream_may_begin_anew() -> None:
    sent = [tensor(f"t{i}", "uint8", (100,), seed=i) for i in range(3)]
    into = Assembler([one.spec for one in sent], Hash, buffer)
    for frame in stream(sent)[:3]:
        into.feed(frame)
    into.discard()
    assert not into.complete
    with pytest.raises(Violation):
        into.finish()
    into.rewind()
    assert into.place == (0, 0)
    for frame in stream(sent):
        assert not into.complete
        into.feed(frame)
    assert [bytes(one.data) for one in into.finish()] == [bytes(one.data) for one in sent]


def cut(frames: list[Frame]) -> list[Frame]:
    return [frame for group in wire.group_frames(frames, 100) for frame in group]


HIDDEN = TensorSpec("hidden", "float32", (2, 3))
DATA = bytes(range(24))
GOOD: list[Frame] = [Chunk(0, 0, DATA[:16]), Chunk(0, 16, DATA[16:]), End(0, 24, digest(DATA))]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (GOOD[:1], "truncated: 1 of 1"),
        (GOOD[1:], "truncated: 1 of 1"),
        (GOOD[:2], "truncated: 1 of 1"),
        ([], "truncated: 1 of 1"),
        ([GOOD[0], GOOD[0]], "arrived twice"),
        ([GOOD[0], Chunk(0, 15, DATA[15:20])], "arrived twice"),
        ([GOOD[1], Chunk(0, 10, DATA[10:17])], "arrived twice"),
        ([Chunk(0, 4, DATA[4:8]), Chunk(0, 0, DATA[:16])], "arrived twice"),
        ([Chunk(0, 0, DATA + b"x")], "extends to byte 25 of 24"),
        ([Chunk(0, 23, DATA[:2])], "extends to byte 25 of 24"),
        ([Chunk(0, 10, b"")], "is empty"),
        ([Chunk(1, 0, DATA)], "of tensor 1 arrived, but there are only 1"),
        ([GOOD[2], GOOD[2]], "closed twice"),
        ([*GOOD[:2], End(0, 23, digest(DATA))], "with length 23"),
        ([*GOOD[:2], End(0, 24, digest(DATA) ^ 1)], "do not match the digest"),
        ([GOOD[2], Chunk(0, 0, bytes(16)), GOOD[1]], "do not match the digest"),
        ([*GOOD, Chunk(1, 0, b"x")], "after the end of the stream"),
        ([*GOOD, GOOD[-1]], "after the end of the stream"),
    ],
)
def test_each_fault_is_named(frames: list[Frame], message: str) -> None:
    assert bytes(assemble([HIDDEN], GOOD)[0].data) == DATA
    with pytest.raises(Violation, match=message):
        assemble([HIDDEN], frames)


def test_the_digest_over_all_binds_contents_names_types_and_shapes() -> None:
    specs = [HIDDEN, HIDDEN._replace(name="targets")]
    total = wire.combined_digest(specs, [1, 2], Hash)
    others = [
        wire.combined_digest(specs, [2, 1], Hash),
        wire.combined_digest(specs[::-1], [1, 2], Hash),
        wire.combined_digest([HIDDEN._replace(shape=(3, 2)), specs[1]], [1, 2], Hash),
        wire.combined_digest([HIDDEN._replace(dtype="int32"), specs[1]], [1, 2], Hash),
    ]
    assert total == wire.combined_digest(tuple(specs), (1, 2), Hash)
    assert total not in others
    with pytest.raises(Violation, match="declared for them"):
        assemble([HIDDEN], GOOD, total=total)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec("x", "complex64", (1,)), "unknown element type 'complex64'"),
        (TensorSpec("x", "float32", (-1, 4)), "invalid shape"),
        (TensorSpec("x", "float32", (1,) * 9), "invalid shape"),
        (TensorSpec("x" * 513, "float32", (1,)), "a name that is too long"),
        (TensorSpec("x", "float32", (1 << 40, 1 << 40)), "at most 100 are allowed"),
        (TensorSpec("x", "uint8", (101,)), "have 101 bytes, at most 100 are allowed"),
    ],
)
def test_what_may_not_travel_is_refused_before_any_memory_is_taken(spec: TensorSpec, message: str) -> None:
    with pytest.raises(Violation, match=message):
        wire.total_bytes([spec], 100)


def test_more_tensors_than_any_message_has_are_refused() -> None:
    empty = [TensorSpec(f"t{number}", "uint8", (0,)) for number in range(wire.MAX_TENSORS + 1)]
    assert wire.total_bytes(empty[:-1], 100) == 0
    with pytest.raises(Violation, match=f"at most {wire.MAX_TENSORS} are allowed"):
        wire.total_bytes(empty, 100)


class Tracked(bytearray):
    """A buffer that shows when it is freed."""


class Memory:
    """Allocates buffers, and knows which are still alive."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Tracked] = weakref.WeakSet()
        self.taken: list[int] = []

    def __call__(self, length: int) -> memoryview:
        block = Tracked(length)
        self.alive.add(block)
        self.taken.append(length)
        return memoryview(block)


Tracked.__hash__ = object.__hash__  # type: ignore[assignment]


def test_gaps_are_bounded() -> None:
    into = Assembler([TensorSpec("t", "uint8", (4 * MAX_RUNS,))], Hash, buffer)
    for number in range(MAX_RUNS):
        into.feed(Chunk(0, 2 * number, b"x"))
    with pytest.raises(Violation, match="separate pieces"):
        into.feed(Chunk(0, 2 * MAX_RUNS, b"x"))
    with pytest.raises(Violation, match="after the end"):
        into.feed(Chunk(0, 1, b"x"))


def test_memory_of_a_tensor_is_taken_at_its_first_chunk() -> None:
    memory = Memory()
    tensors = [tensor("a", "uint8", (10,)), tensor("b", "uint8", (20,))]
    assembler = Assembler([t.spec for t in tensors], Hash, memory)
    assert memory.taken == []
    frames = stream(tensors)
    for frame, taken in zip(frames, ([10], [10], [10, 20], [10, 20]), strict=True):
        assembler.feed(frame)
        assert memory.taken == taken
    assert assembler.complete
    assert [t.spec for t in assembler.finish()] == [t.spec for t in tensors]
    gc.collect()
    assert len(memory.alive) == 0


@pytest.mark.parametrize("bad", [Chunk(1, 7, b"x"), End(1, 21, 0), Chunk(0, 0, b"x"), None])
def test_a_violation_frees_all_buffers_while_the_assembler_lives(bad: Frame | None) -> None:
    memory = Memory()
    tensors = [tensor("a", "uint8", (10,)), tensor("b", "uint8", (20,))]
    assembler = Assembler([t.spec for t in tensors], Hash, memory)
    for frame in stream(tensors)[:3]:
        assembler.feed(frame)
    assert len(memory.alive) == 2
    offend: Callable[[], object] = assembler.finish if bad is None else partial(assembler.feed, bad)
    with pytest.raises(Violation):
        offend()
    gc.collect()
    assert len(memory.alive) == 0
    with pytest.raises(Violation, match="after the end"):
        assembler.feed(stream(tensors)[3])
