"""The simulated network keeps the contract of ports.Transport, and its faults have their stated effects."""

import asyncio
from array import array
from dataclasses import replace

import pytest
from barriers import barrier
from sim_transport_fixture import (
    CALLEE,
    LATENCY_S,
    SNAPSHOT_SPECS,
    Serving,
    activation,
    after,
    fails,
    floats,
    gradient,
    lose_next_reply,
    never,
    now,
    play,
)

from noloco_p2p.core.messages import Activation, Gradient, LossSum, MicrobatchId, TensorSpec
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.errors import Busy, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.ports import Body
from noloco_p2p.sim.calls import DEAD_LINK_S
from noloco_p2p.sim.links import ControlSizes, Geography, Link, MessageSizes
from noloco_p2p.sim.network import Barrier, Network
from noloco_p2p.sim.transport import SimTransport


def test_the_header_arrives_first_and_the_body_takes_its_time() -> None:
    got: list[tuple[Activation, float]] = []

    async def answer(body: Body) -> Gradient:
        got.append((await body(), now()))
        return gradient()

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        assert await transport.propagate(CALLEE, activation()) == gradient()
        assert now() == pytest.approx(2 * LATENCY_S + 24 / 48 + 16 / 48)

    serving = play(script, answer, Link(latency_s=LATENCY_S, bytes_per_s=48.0))
    assert serving.log[0] == ("header from a", LATENCY_S)
    sent, at = got[0]
    assert at == pytest.approx(LATENCY_S + 24 / 48)
    assert (sent.hidden, sent.targets) == (activation().hidden, activation().targets)
    assert sent.header == serving.headers[0]
    assert sent.header.specs == (TensorSpec("hidden", "float64", (1, 2, 1)), TensorSpec("targets", "int32", (1, 2)))


def test_the_digest_follows_the_bytes_and_tensors_are_copied() -> None:
    seen: list[float] = []

    async def answer(body: Body) -> Gradient:
        await asyncio.sleep(1.0)
        seen.extend((await body()).hidden.data.cast("d"))
        return gradient()

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        buffer = bytearray(array("d", [1.0, 2.0]).tobytes())
        sending = replace(activation(), hidden=replace(activation().hidden, data=memoryview(buffer)))
        flight = asyncio.create_task(transport.propagate(CALLEE, sending))
        await asyncio.sleep(0.5)
        buffer[:] = array("d", [9.0, 9.0]).tobytes()
        await flight
        await transport.propagate(CALLEE, sending)
        await transport.propagate(CALLEE, sending)

    serving = play(script, answer)
    assert seen == [1.0, 2.0, 9.0, 9.0, 9.0, 9.0]
    first, second, third = (header.digest for header in serving.headers)
    assert first != second == third


@pytest.mark.parametrize("error", [Busy("full"), Declined("no"), Violation("bad bytes")])
def test_errors_reach_the_caller_and_a_violation_is_marked_as_its_own(error: PeerError) -> None:
    async def answer(body: Body) -> Gradient:
        raise error

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        caught = await fails(transport, type(error), str(error), 2 * LATENCY_S)
        assert getattr(caught, "ours", None) == (True if isinstance(error, Violation) else None)
        assert network.bugs == []

    play(script, answer)


def test_any_other_error_is_declined_and_recorded_as_a_bug() -> None:
    async def answer(body: Body) -> Gradient:
        raise KeyError("planned")

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        await fails(transport, Declined, "KeyError", 2 * LATENCY_S)
        assert [type(bug) for bug in network.bugs] == [KeyError]

    play(script, answer)


def test_an_expired_deadline_ends_both_sides() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        await fails(transport, Unreachable, "within 5 s", 5.0)
        await asyncio.sleep(1.0)

    assert play(script, never).log == [("header from a", LATENCY_S), ("cancelled", pytest.approx(5.0 + LATENCY_S))]


def test_a_cancelled_caller_cancels_the_handler() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        flight = asyncio.create_task(transport.propagate(CALLEE, activation()))
        await asyncio.sleep(1.0)
        flight.cancel()
        await asyncio.sleep(1.0)
        assert flight.cancelled()

    assert play(script, never).log == [("header from a", LATENCY_S), ("cancelled", 1.0 + LATENCY_S)]


def test_a_handler_that_misses_the_cancellation_ends_at_the_deadline() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        flight = asyncio.create_task(transport.propagate(CALLEE, activation()))
        await asyncio.sleep(1.0)
        network.block(barrier("hang", "a"))
        flight.cancel()
        await asyncio.sleep(9.0)

    assert play(script, never).log == [("header from a", LATENCY_S), ("cancelled", pytest.approx(5.0 + LATENCY_S))]


@pytest.mark.parametrize("end", ["cut", "crash"])
def test_a_handler_is_cancelled_even_if_the_cancellation_is_lost(end: str) -> None:
    """The cancellation is stuck on a slow line and never arrives: the callee notices that the link is dead."""

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.sizes = MessageSizes(0, 0, (0, 0), (0, 0), (0, 0), ControlSizes(word=100))
        call = asyncio.create_task(transport.propagate(CALLEE, activation(60.0)))
        await asyncio.sleep(1.0)
        call.cancel()
        await asyncio.sleep(0.5)
        if end == "cut":
            network.block(barrier("cut", "a", "b"))
        else:
            network.crash("a")
        await asyncio.sleep(DEAD_LINK_S + 0.1)
        assert [what for what, _ in serving.log] == ["header from a", "cancelled"]

    play(script, never, Link(LATENCY_S, bytes_per_s=100.0), longest_s=90.0)


def test_after_a_lost_reply_the_work_is_done_and_the_caller_waits() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        lose_next_reply(network, "x", "b")
        lose_next_reply(network, "a", "b")
        await fails(transport, Unreachable, "no answer", 5.0)
        assert await transport.propagate(CALLEE, activation()) == gradient()

    assert [what for what, _ in play(script).log] == ["header from a", "done", "header from a", "done"]


def test_requests_and_replies_are_lost_at_the_given_rates() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        calls = [transport.propagate(CALLEE, activation()) for _ in range(400)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(answer, Unreachable) for answer in answers) == pytest.approx(300, abs=40)
        assert all(answer == gradient() for answer in answers if not isinstance(answer, BaseException))

    served = play(script, link=Link(LATENCY_S, request_loss=0.5, reply_loss=0.5))
    assert [what for what, _ in served.log].count("done") == pytest.approx(200, abs=40)


def test_a_crash_breaks_calls_at_once_and_later_ones_are_refused() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        asyncio.get_running_loop().call_later(1.0, network.crash, "b")
        await fails(transport, Unreachable, "broke the connection", 1.0)
        await fails(transport, Unreachable, "refused", 2 * LATENCY_S)

    assert play(script, never).log == [("header from a", LATENCY_S), ("cancelled", 1.0)]


@pytest.mark.parametrize("fault", [barrier("hang", "b"), barrier("cut", "b", "a")])
def test_held_messages_are_swallowed_until_the_release(fault: Barrier) -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.block(fault)
        await fails(transport, Unreachable, "no answer", 5.0)
        assert serving.log == []
        network.unblock(fault)
        flight = asyncio.create_task(transport.propagate(CALLEE, activation()))
        await asyncio.sleep(0.5)
        network.block(fault)
        with pytest.raises(Unreachable):
            await flight
        assert serving.log[-1][0] == "done"
        network.unblock(fault)
        assert await transport.propagate(CALLEE, activation()) == gradient()

    play(script, after(1.0))


@pytest.mark.parametrize("fault", [barrier("hang", "b"), barrier("cut", "a", "b")])
@pytest.mark.parametrize("at_s", [0.0, 0.5])
def test_messages_lost_in_a_short_cut_are_sent_again(fault: Barrier, at_s: float) -> None:
    """The request, or the answer, which is ready after a second. TCP retries after 0.2, 0.4, 0.8, 1.6 and 3.2 s."""

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(at_s, network.block, fault)
        loop.call_later(at_s + 2.0, network.unblock, fault)
        await asyncio.sleep(0.001)
        assert await transport.propagate(CALLEE, activation()) == gradient()
        assert 2.0 < loop.time() < 5.0
        assert [what for what, _ in serving.log].count("header from a") == 1

    play(script, after(1.0))


@pytest.mark.parametrize("at_s", [0.0, 0.5])
def test_both_ends_notice_that_a_link_is_dead(at_s: float) -> None:
    """As over gRPC, which pings. Otherwise a pull from a partner that may take minutes to answer lasts that long."""

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        asyncio.get_running_loop().call_later(at_s, network.block, barrier("cut", "a", "b"))
        await asyncio.sleep(0.001)
        began = now()
        with pytest.raises(Unreachable, match="not been heard of"):
            await transport.propagate(CALLEE, activation(60.0))
        assert DEAD_LINK_S <= now() - began < 2 * DEAD_LINK_S

    play(script, after(1.0), longest_s=90.0)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(gradient(), microbatch=MicrobatchId("a", 7, 2)),
        replace(gradient(), grad=floats("grad", 1.0)),
        replace(gradient(), grad=replace(gradient().grad, dtype="int64")),
    ],
    ids=["id", "shape", "dtype"],
)
def test_a_reply_that_does_not_match_is_the_peers_violation(wrong: Gradient) -> None:
    async def answer(body: Body) -> Gradient:
        return wrong

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        caught = await fails(transport, Violation, "answered", 2 * LATENCY_S)
        assert isinstance(caught, Violation)
        assert not caught.ours

    play(script, answer)


def test_evaluate_describe_progress_and_fetches() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        assert await transport.evaluate(CALLEE, activation()) == LossSum(3.0, 2)
        assert (await transport.describe(CALLEE)).step == 2.5
        expected = SNAPSHOT_SPECS
        began = now()
        snapshot = await transport.fetch_snapshot(CALLEE, SnapshotRequest(1, 4, 6.0), 1.0, expected)
        assert (snapshot.round, snapshot.peer) == (4, "b")
        assert now() - began == pytest.approx(6.0 + 2 * LATENCY_S)
        with pytest.raises(Violation, match="tensors"):
            await transport.fetch_snapshot(CALLEE, SnapshotRequest(1, 4), 1.0, (*expected, *expected))
        with pytest.raises(Unreachable, match=r"within 0\.15 s"):
            await transport.fetch_snapshot(CALLEE, SnapshotRequest(1, 4, 0.05), 0.1, expected)

    play(script)


def test_serving_twice_is_refused_and_close_ends_calls_in_flight() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        other = SimTransport(network, "b")
        with pytest.raises(LocalError, match="already has a handler"):
            await other.serve(serving)
        flight = asyncio.create_task(transport.propagate(CALLEE, activation()))
        await asyncio.sleep(1.0)
        await other.close()
        assert serving.log[-1] == ("cancelled", 1.0)
        with pytest.raises(Unreachable):
            await flight

    play(script, never)


def test_log_normal_latency_has_its_median() -> None:
    network = Network(3, Geography(Link(latency_s=0.2, spread=0.5)))
    delays = sorted(network.latency_s("a", "b") for _ in range(1001))
    assert delays[500] == pytest.approx(0.2, rel=0.1)
    assert delays[0] < 0.1 < 0.4 < delays[-1]
    other = Network(4, Geography(Link(latency_s=0.2, spread=0.5)))
    assert Network(3, Geography(Link(0.2, 0.5))).latency_s("a", "b") != other.latency_s("a", "b")
