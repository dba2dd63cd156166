"""Snapshots over gRPC: the expected tensors, bit for bit, or an error and no tensors."""

import asyncio
import socket
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from link_fixture import Proxy
from machine import in_time
from transport_fixture import SOON_S, Node, advert, hang, logged, pair, run, soon, tensor, watched_buffers

from noloco_p2p.core.agreement import LARGEST_GROUP, GroupView
from noloco_p2p.core.lattice_format import LatticeRequest
from noloco_p2p.core.messages import HostTensor, TensorSpec
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import Declined, Unreachable, Violation
from noloco_p2p.io.transport import channels, grpc_transport, message_codec, servicer, weights_codec

TENSORS = (
    tensor("slow/embed", "float32", (384, 1024), seed=1),
    tensor("slow/norm", "float32", (3,), seed=2),
    tensor("slow/none", "float32", (0, 4)),
    tensor("delta/embed", "float64", (700, 999), seed=3),
)
BIG = tuple(HostTensor(f"slow/{i}", "uint8", (1 << 24,), memoryview(bytes(1 << 24))) for i in range(8))
SPECS = tuple(t.spec for t in TENSORS)
SNAPSHOT = Snapshot("B", 4, 40, TENSORS, GroupView(("A", "B"), 2**64 - 1), fresh_round=4)
REQUESTS = [
    SnapshotRequest(1, 4, 1.5),
    SnapshotRequest(0, 0),
    SnapshotRequest(1),
    SnapshotRequest(3, 2, weights="bfloat16"),
    SnapshotRequest(1, 4, lattice=LatticeRequest(bytes(range(256)))),
    SnapshotRequest(1, 4, lattice=LatticeRequest(b"\x7f\xff", (0, 300))),
]


class Shelf:
    """Answers with one snapshot, and records the requests."""

    def __init__(self, snapshot: Snapshot = SNAPSHOT) -> None:
        self.snapshot = snapshot
        self.asked: list[SnapshotRequest] = []

    async def get(self, request: SnapshotRequest) -> Snapshot:
        self.asked.append(request)
        return self.snapshot


def test_the_limit_holds_while_the_round_trip_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that nobody has called before is first asked to describe itself, for which others wait 5 s."""
    monkeypatch.setattr(grpc_transport, "DESCRIBE_S", 60.0)
    monkeypatch.setattr(channels, "CONNECT_S", 60.0)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with pair(Node(hang)) as both:
                nobody = advert(f"127.0.0.1:{silent.getsockname()[1]}")
                both.a.line._round_trips.clear()
                with pytest.raises(Unreachable):
                    await soon(both.a.fetch_snapshot(nobody, SnapshotRequest(1, 4), 0.1, SPECS))

    run(scenario())


def test_a_cancelled_pull_frees_at_once_what_has_arrived_and_what_was_to_be_sent(
    monkeypatch: pytest.MonkeyPatch, without_collection: None
) -> None:
    """A cancelled task refers to its own frames: gigabytes stayed at both ends until the next garbage collection."""
    made, specs = watched_buffers(monkeypatch), tuple(one.spec for one in BIG)

    async def freeze(request: SnapshotRequest) -> Snapshot:
        return replace(SNAPSHOT, tensors=tuple(HostTensor(*one, message_codec.allocate(one.nbytes)) for one in specs))

    async def scenario() -> None:
        async with pair(Node(hang, freeze)) as both:
            pull = asyncio.create_task(both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4), 60.0, specs))
            while len(made) <= len(specs):  # noqa: ASYNC110
                await asyncio.sleep(0)
            pull.cancel()
            await asyncio.wait([pull])
            assert pull.cancelled()
            assert all(one() is None for one in made[len(specs) :])

            async def all_are_free() -> None:
                while any(one() is not None for one in made):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

            await soon(all_are_free())

    run(scenario())


def test_a_snapshot_arrives_bit_for_bit() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        async with pair(Node(hang, shelf.get)) as both:
            for request in REQUESTS:
                assert await both.a.fetch_snapshot(both.peer, request, 5.0, SPECS) == SNAPSHOT
        assert shelf.asked == REQUESTS

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
                await both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4, 0.0), 5.0, expected)
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
        replace(SNAPSHOT, fresh_round=5),
        replace(SNAPSHOT, view=GroupView(("B", "A"), 1)),
        replace(SNAPSHOT, view=GroupView(("B", "B"), 1)),
        replace(SNAPSHOT, view=GroupView(("A", "B\n"), 1)),
        replace(SNAPSHOT, view=GroupView(tuple(f"{number:04}" for number in range(LARGEST_GROUP + 1)), 1)),
        replace(SNAPSHOT, tensors=(*TENSORS[:3], replace(TENSORS[3], data=TENSORS[3].data[:-8]))),
    ],
)
def test_a_snapshot_with_an_impossible_header_or_cut_short_is_a_violation(snapshot: Snapshot) -> None:
    async def scenario() -> None:
        async with pair(Node(hang, Shelf(snapshot).get)) as both:
            with pytest.raises(Violation):
                await both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4, 0.0), 5.0, SPECS)

    run(scenario())


def test_a_refusal_and_a_peer_that_does_not_answer_are_different_errors() -> None:
    async def never(request: SnapshotRequest) -> Snapshot:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def scenario() -> None:
        async with pair(Node(hang)) as both:
            with pytest.raises(Declined, match="no snapshots here"):
                await both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4, 0.0), 5.0, SPECS)
        async with pair(Node(hang, never)) as both:
            with pytest.raises(Unreachable, match=r"no snapshot from B within 0\.4 s"):
                await both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4, 0.1), 0.3, SPECS)

    run(scenario())


def test_a_transfer_refused_before_it_begins_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with pair(Node(hang)) as both:
            both.b._servicer.handler = None
            for fetch in (
                both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 5, 0.0), 5.0, ()),
                both.a.fetch_state(both.peer, 5.0, ()),
            ):
                with pytest.raises(Declined, match="starting"):
                    await soon(fetch)

    run(scenario())
    assert not logged(caplog)


def test_the_transfer_has_its_own_deadline_after_the_wait() -> None:
    """The link stops in the middle of the transfer; the peer's permission to wait does not extend the deadline."""

    async def scenario() -> None:
        shelf = Shelf(Snapshot("B", 4, 40, BIG))
        async with pair(Node(hang, shelf.get)) as both, Proxy(both.b.port, (1 << 18, "swallow")) as proxy:
            with pytest.raises(Unreachable, match=r"not all of the snapshot came from B within 0\.5 s"):
                await both.a.fetch_snapshot(proxy.peer, SnapshotRequest(1, 4, 20.0), 0.5, tuple(t.spec for t in BIG))
            assert proxy.faulty.is_set()

    run(scenario())


@pytest.mark.parametrize("passed", [1 << 22, 0], ids=["in the middle", "from the first byte"])
def test_a_silent_transfer_ends_long_before_its_deadline(passed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport, "SILENCE_S", 0.3)
    monkeypatch.setattr(channels, "CONNECT_S", 0.3)

    async def scenario() -> None:
        shelf = Shelf(Snapshot("B", 4, 40, BIG))
        async with pair(Node(hang, shelf.get)) as both, Proxy(both.b.port, (passed, "swallow")) as proxy:
            began = asyncio.get_running_loop().time()
            with pytest.raises(Unreachable):
                await both.a.fetch_snapshot(proxy.peer, SnapshotRequest(1, 4, 0.2), 20.0, tuple(t.spec for t in BIG))
            assert in_time(asyncio.get_running_loop().time() - began, SOON_S)

    run(scenario())


@pytest.mark.parametrize("messages", [0, 3])
def test_a_hung_server_behind_a_healthy_link_is_soon_unreachable(
    messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers gRPC's keepalive pings and nothing else."""
    monkeypatch.setattr(grpc_transport, "SILENCE_S", 0.3)
    hung = asyncio.Event()

    async def stalling(self: servicer.GrpcServicer, said: Any, context: Any, held: Any) -> None:
        for message in islice(weights_codec.to_snapshot(Snapshot("B", 4, 40, BIG)), messages):
            await context.write(message)
        hung.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(servicer.GrpcServicer, "fetch_snapshot", stalling)

    async def scenario() -> None:
        async with pair(Node(hang)) as both:
            began = asyncio.get_running_loop().time()
            with pytest.raises(Unreachable, match=r"no more of the snapshot came from B for 0\.[35] s"):
                await both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4, 0.2), 20.0, tuple(t.spec for t in BIG))
            assert hung.is_set()
            assert in_time(asyncio.get_running_loop().time() - began, SOON_S)

    run(scenario())


@pytest.mark.parametrize(
    "tensors",
    [
        (tensor("weights", "bfloat16", (1 << 20,)), tensor("weights", "bfloat16", (1 << 20,))),
        (tensor("weights", "bfloat16", ((1 << 20) + 1,)),),
        (tensor("weights", "float16", (1 << 20,)),),
        (tensor("vector", "bfloat16", (1 << 20,)),),
        (),
    ],
)
def test_weights_of_another_size_or_form_are_refused_before_memory_is_allocated(
    tensors: tuple[HostTensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watched_buffers(monkeypatch)

    async def scenario() -> None:
        expected = (TensorSpec("weights", "bfloat16", (1 << 20,)),)
        async with pair(Node(hang, Shelf(Snapshot("C", 4, 40, tensors)).get)) as both:
            with pytest.raises(Violation):
                await both.a.fetch_snapshot(both.peer, SnapshotRequest(3, weights="bfloat16"), 5.0, expected)
        assert made == []

    run(scenario())


def test_a_cancelled_fetch_stops_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        sent = 0
        original = weights_codec.to_snapshot
        over = asyncio.Event()

        def counted(snapshot: Snapshot, *sizes: int) -> Any:
            nonlocal sent
            try:
                for message in original(snapshot, *sizes):
                    sent += 1
                    yield message
            finally:
                over.set()

        monkeypatch.setattr(weights_codec, "to_snapshot", counted)
        async with pair(Node(hang, Shelf(Snapshot("B", 4, 40, BIG)).get)) as both:
            with pytest.raises(Violation):
                await both.a.fetch_snapshot(both.peer, SnapshotRequest(1, 4, 0.0), 5.0, SPECS)
            await soon(over.wait())
            assert sent < 40, "of 129 messages"

    run(scenario())
