"""Chunks that come in any order make the same tensors, and whatever else comes is a Violation."""

import random
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core.messages import HostTensor, TensorSpec
from noloco_p2p.core.scattered import MAX_RUNS, ScatteredAssembler
from noloco_p2p.core.wire import Chunk, End, Frame, combined_digest, frames, group_frames
from noloco_p2p.errors import Violation

LIMIT_BYTES = 1 << 20


def digest(data: memoryview | bytes) -> int:
    return crc32(data)


def tensors(*sizes: int) -> tuple[HostTensor, ...]:
    rng = random.Random(sum(sizes))
    return tuple(HostTensor(f"t{i}", "uint8", (size,), memoryview(rng.randbytes(size))) for i, size in enumerate(sizes))


def stream(sent: tuple[HostTensor, ...], message_bytes: int = 100) -> list[Frame]:
    grouped = group_frames(frames(sent, [digest(one.data) for one in sent]), message_bytes)
    return [frame for group in grouped for frame in group]


def assembler(sent: tuple[HostTensor, ...]) -> ScatteredAssembler:
    return ScatteredAssembler([one.spec for one in sent], LIMIT_BYTES, digest)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_order_gives_the_tensors(sizes: list[int], rng: random.Random) -> None:
    sent = tensors(*sizes)
    order = stream(sent)
    rng.shuffle(order)
    into = assembler(sent)
    for number, frame in enumerate(order):
        assert into.complete == (number == len(order))
        into.feed(frame)
    assert into.complete
    specs = [one.spec for one in sent]
    got = into.finish(combined_digest(specs, [digest(one.data) for one in sent], digest))
    assert [(one.spec, bytes(one.data)) for one in got] == [(one.spec, bytes(one.data)) for one in sent]


def feed_all(sent: tuple[HostTensor, ...], order: list[Frame]) -> None:
    into = assembler(sent)
    for frame in order:
        into.feed(frame)
    into.finish()


SENT = tensors(250, 30)
GOOD = stream(SENT)
DATA = bytes(SENT[0].data)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([*GOOD[:2], GOOD[0]], "came twice"),
        ([GOOD[0], Chunk(0, 99, DATA[99:120])], "came twice"),
        ([GOOD[2], Chunk(0, 150, DATA[150:201])], "came twice"),
        ([Chunk(0, 10, DATA[10:20]), Chunk(0, 0, DATA[:50])], "came twice"),
        ([Chunk(0, 10, b"")], "empty"),
        ([Chunk(0, 200, bytes(51))], "goes to byte 251 of 250"),
        ([Chunk(2, 0, b"x")], "tensor 2"),
        ([End(0, 249, 0)], "ends as 249"),
        ([GOOD[3], GOOD[3]], "second time"),
        ([Chunk(0, 0, bytes(100)), *GOOD[1:]], "digest"),
        ([*GOOD, GOOD[-1]], "after the end"),
        (GOOD[:-1], "1 of 2 tensors are not whole"),
        ([Chunk(0, 0, DATA), GOOD[3], GOOD[0]], "came twice"),
    ],
)
def test_anything_else_is_a_violation(order: list[Frame], said: str) -> None:
    with pytest.raises(Violation, match=said):
        feed_all(SENT, order)


def test_gaps_are_bounded() -> None:
    spec = TensorSpec("t", "uint8", (4 * MAX_RUNS,))
    into = ScatteredAssembler([spec], LIMIT_BYTES, digest)
    for number in range(MAX_RUNS):
        into.feed(Chunk(0, 2 * number, b"x"))
    with pytest.raises(Violation, match="gaps"):
        into.feed(Chunk(0, 2 * MAX_RUNS, b"x"))
    with pytest.raises(Violation, match="after the end"):
        into.feed(Chunk(0, 1, b"x"))
