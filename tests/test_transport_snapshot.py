"""Snapshots over gRPC: the tensors that were expected, bit for bit, or an error and nothing."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from transport_fixture import Node, advert, hang, pair, run, tensor

from noloco_p2p.core.messages import HostTensor, Snapshot, TensorSpec
from noloco_p2p.errors import Declined, Unreachable, Violation
from noloco_p2p.io import weights

TENSORS = (
    tensor("slow/embed", "float32", (384, 1024), seed=1),
    tensor("slow/norm", "float32", (3,), seed=2),
    tensor("slow/none", "float32", (0, 4)),
    tensor("delta/embed", "float64", (700, 999), seed=3),
)
SPECS = tuple(t.spec for t in TENSORS)
SNAPSHOT = Snapshot("B", 4, 40, TENSORS)


class Shelf:
    """Answers with one snapshot, and remembers what was asked."""

    def __init__(self, snapshot: Snapshot = SNAPSHOT) -> None:
        self.snapshot = snapshot
        self.asked: list[tuple[int, int | None, float]] = []

    async def get(self, stage: int, round: int | None, wait_s: float) -> Snapshot:
        self.asked.append((stage, round, wait_s))
        return self.snapshot


def test_a_snapshot_arrives_bit_for_bit() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        async with pair(Node(hang, shelf.get)) as both:
            assert await both.a.fetch_snapshot(both.peer, 1, 4, 1.5, 5.0, SPECS) == SNAPSHOT
            assert await both.a.fetch_snapshot(both.peer, 0, 0, 0.0, 5.0, SPECS) == SNAPSHOT
            assert await both.a.fetch_snapshot(both.peer, 1, None, 0.0, 5.0, SPECS) == SNAPSHOT
        assert shelf.asked == [(1, 4, 1.5), (0, 0, 0.0), (1, None, 0.0)]

    run(scenario())


@pytest.mark.parametrize(
    "expected",
    [
        SPECS[:-1],
        (*SPECS, TensorSpec("delta/norm", "float32", (3,))),
        (SPECS[1], SPECS[0], *SPECS[2:]),
        (SPECS[0]._replace(shape=(1024, 384)), *SPECS[1:]),
        (SPECS[0]._replace(dtype="int32"), *SPECS[1:]),
        (SPECS[0]._replace(name="slow/other"), *SPECS[1:]),
    ],
)
def test_anything_but_the_expected_tensors_is_a_violation(expected: tuple[TensorSpec, ...]) -> None:
    async def scenario() -> None:
        async with pair(Node(hang, Shelf().get)) as both:
            with pytest.raises(Violation) as caught:
                await both.a.fetch_snapshot(both.peer, 1, 4, 0.0, 5.0, expected)
            assert not caught.value.ours

    run(scenario())


@pytest.mark.parametrize(
    "snapshot",
    [
        replace(SNAPSHOT, peer=""),
        replace(SNAPSHOT, peer="C\n"),
        replace(SNAPSHOT, peer="Ç"),
        replace(SNAPSHOT, peer="C" * 129),
        replace(SNAPSHOT, step=1 << 60),
        replace(SNAPSHOT, tensors=(*TENSORS[:3], replace(TENSORS[3], data=TENSORS[3].data[:-8]))),
    ],
)
def test_a_snapshot_with_an_impossible_header_or_cut_short_is_a_violation(snapshot: Snapshot) -> None:
    async def scenario() -> None:
        async with pair(Node(hang, Shelf(snapshot).get)) as both:
            with pytest.raises(Violation):
                await both.a.fetch_snapshot(both.peer, 1, 4, 0.0, 5.0, SPECS)

    run(scenario())


def test_a_refusal_and_a_peer_that_does_not_answer() -> None:
    async def never(stage: int, round: int | None, wait_s: float) -> Snapshot:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def scenario() -> None:
        async with pair(Node(hang)) as both:
            with pytest.raises(Declined, match="no snapshots here"):
                await both.a.fetch_snapshot(both.peer, 1, 4, 0.0, 5.0, SPECS)
        async with pair(Node(hang, never)) as both:
            with pytest.raises(Unreachable, match=r"no snapshot from B within 0\.4 s"):
                await both.a.fetch_snapshot(both.peer, 1, 4, 0.1, 0.3, SPECS)

    run(scenario())


def test_the_transfer_has_its_own_deadline_after_the_wait() -> None:
    """The link stops in the middle of the transfer; the peer's permission to wait does not prolong it."""

    async def scenario() -> None:
        big = tuple(HostTensor(f"slow/{i}", "uint8", (1 << 24,), memoryview(bytes(1 << 24))) for i in range(4))
        stalled = asyncio.Event()

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
            passed = 0
            while data := await reader.read(1 << 16):
                passed += len(data)
                if passed > limit:
                    stalled.set()
                    return
                writer.write(data)
                await writer.drain()

        async with pair(Node(hang, Shelf(Snapshot("B", 4, 40, big)).get)) as both, asyncio.TaskGroup() as group:
            held: list[asyncio.StreamWriter] = []

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there, back = await asyncio.open_connection("127.0.0.1", both.b.port)
                held.extend([writer, back])
                group.create_task(pipe(reader, back, 1 << 30))
                group.create_task(pipe(there, writer, 1 << 22))

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            through = advert(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with pytest.raises(Unreachable, match=r"no whole snapshot from B within 0\.5 s"):
                await both.a.fetch_snapshot(through, 1, 4, 20.0, 0.5, tuple(t.spec for t in big))
            assert stalled.is_set()
            server.close()
            for writer in held:
                writer.close()
            await both.a.close()

    run(scenario())


def test_a_fetch_that_is_given_up_stops_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        sent = 0
        big = tuple(HostTensor(f"slow/{i}", "uint8", (1 << 24,), memoryview(bytes(1 << 24))) for i in range(8))
        original = weights.to_snapshot
        over = asyncio.Event()

        def counted(snapshot: Snapshot) -> Any:
            nonlocal sent
            try:
                for message in original(snapshot):
                    sent += 1
                    yield message
            finally:
                over.set()

        monkeypatch.setattr(weights, "to_snapshot", counted)
        async with pair(Node(hang, Shelf(Snapshot("B", 4, 40, big)).get)) as both:
            with pytest.raises(Violation):
                await both.a.fetch_snapshot(both.peer, 1, 4, 0.0, 5.0, SPECS)
            await asyncio.wait_for(over.wait(), 3.0)
            assert sent < 40, "of 129 messages"

    run(scenario())
