"""The simulated network keeps the promises of ports.Transport, and its faults do what they say."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from noloco_p2p.core.messages import (
    Activation,
    Advert,
    Description,
    Gradient,
    Header,
    HostTensor,
    LossSum,
    MicrobatchId,
    Origin,
    ReplicaState,
    Snapshot,
    TensorSpec,
)
from noloco_p2p.errors import Busy, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.ports import Body
from noloco_p2p.sim.loop import run
from noloco_p2p.sim.network import Link, Network
from noloco_p2p.sim.transport import SimTransport

LATENCY_S = 0.1
ID = MicrobatchId("a", 7, 1)
CALLEE = Advert("b", "run", 1, ("b",))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _floats(name: str, *values: float) -> HostTensor:
    return HostTensor(name, "float64", (1, len(values), 1), memoryview(array("d", values).tobytes()))


def _activation(time_left_s: float = 5.0) -> Activation:
    targets = HostTensor("targets", "int32", (1, 2), memoryview(array("i", [1, 2]).tobytes()))
    header = Header("run", ID, Origin("a", 3, 0), 1, time_left_s)
    return Activation(header, _floats("hidden", 1.0, 2.0), targets)


def _gradient() -> Gradient:
    return Gradient(ID, _floats("grad", 3.0, 4.0), 1.5, 2, ("b",))


class Serving:
    """A handler that does what it is told and remembers what happened when."""

    def __init__(self, answer: Callable[[Body], Awaitable[Gradient]]) -> None:
        self.answer = answer
        self.log: list[tuple[str, float]] = []
        self.headers: list[Header] = []

    async def propagate(self, caller: str, header: Header, body: Body) -> Gradient:
        """Answer as told; logs the header's arrival, a cancellation, and the end."""
        self.headers.append(header)
        self.log.append((f"header from {caller}", _now()))
        try:
            gradient = await self.answer(body)
        except asyncio.CancelledError:
            self.log.append(("cancelled", _now()))
            raise
        self.log.append(("done", _now()))
        return gradient

    async def evaluate(self, caller: str, header: Header, body: Body) -> LossSum:
        """The loss is the sum of the hidden states."""
        return LossSum(sum((await body()).hidden.data.cast("d")), 2)

    async def fetch_snapshot(self, caller: str, stage: int, round: int | None, wait_s: float) -> Snapshot:
        """After the whole wait, with one parameter."""
        await asyncio.sleep(wait_s)
        return Snapshot("b" if stage == 1 else "c", round or 0, 3, (_floats("slow/w", 1.0), _floats("delta/w", 2.0)))

    @asynccontextmanager
    async def lend_state(self, caller: str, number: int | None) -> AsyncIterator[ReplicaState]:
        """Eight bytes of a state; logs how the loan ends."""
        assert number is None
        try:
            yield ReplicaState("b", 1, 4, 40.5, 44, 43, (_floats("slow/w", 1.0),), 7, (ID,))
        except asyncio.CancelledError:
            self.log.append(("loan cancelled", _now()))
            raise
        self.log.append(("loan over", _now()))

    def describe(self, caller: str) -> Description:
        """Who it is."""
        return Description("b", "run", 1, "training", 2.5, 1, "0")


async def _at_once(body: Body) -> Gradient:
    return _gradient()


async def _never(body: Body) -> Gradient:
    await asyncio.Event().wait()
    raise AssertionError("nobody wakes this")


def _after(seconds: float) -> Callable[[Body], Awaitable[Gradient]]:
    async def answer(body: Body) -> Gradient:
        await asyncio.sleep(seconds)
        return _gradient()

    return answer


Script = Callable[[Network, SimTransport, Serving], Awaitable[None]]


def _play(
    script: Script, answer: Callable[[Body], Awaitable[Gradient]] = _at_once, link: Link | None = None
) -> Serving:
    """Two nodes: `a` plays the script, `b` serves with `answer`."""
    serving = Serving(answer)

    async def main() -> None:
        network = Network(1, link or Link(latency_s=LATENCY_S))
        await SimTransport(network, "b").serve(serving)
        await script(network, SimTransport(network, "a"), serving)

    run(main(), limit_s=100.0)
    return serving


async def _fails(
    transport: SimTransport, error: type[PeerError], match: str, after_s: float, time_left_s: float = 5.0
) -> PeerError:
    began = _now()
    with pytest.raises(error, match=match) as caught:
        await transport.propagate(CALLEE, _activation(time_left_s))
    assert _now() - began == pytest.approx(after_s)
    return caught.value


def test_the_header_comes_first_and_the_body_takes_its_time() -> None:
    got: list[tuple[Activation, float]] = []

    async def answer(body: Body) -> Gradient:
        got.append((await body(), _now()))
        return _gradient()

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        assert await transport.propagate(CALLEE, _activation()) == _gradient()
        assert _now() == pytest.approx(2 * LATENCY_S + 24 / 48 + 16 / 48)

    serving = _play(script, answer, Link(latency_s=LATENCY_S, bytes_per_s=48.0))
    assert serving.log[0] == ("header from a", LATENCY_S)
    sent, at = got[0]
    assert at == pytest.approx(LATENCY_S + 24 / 48)
    assert (sent.hidden, sent.targets) == (_activation().hidden, _activation().targets)
    assert sent.header == serving.headers[0]
    assert sent.header.specs == (TensorSpec("hidden", "float64", (1, 2, 1)), TensorSpec("targets", "int32", (1, 2)))


def test_the_digest_follows_the_bytes_and_what_travels_is_a_copy() -> None:
    seen: list[float] = []

    async def answer(body: Body) -> Gradient:
        await asyncio.sleep(1.0)
        seen.extend((await body()).hidden.data.cast("d"))
        return _gradient()

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        buffer = bytearray(array("d", [1.0, 2.0]).tobytes())
        activation = replace(_activation(), hidden=replace(_activation().hidden, data=memoryview(buffer)))
        flight = asyncio.create_task(transport.propagate(CALLEE, activation))
        await asyncio.sleep(0.5)
        buffer[:] = array("d", [9.0, 9.0]).tobytes()
        await flight
        await transport.propagate(CALLEE, activation)
        await transport.propagate(CALLEE, activation)

    serving = _play(script, answer)
    assert seen == [1.0, 2.0, 9.0, 9.0, 9.0, 9.0]
    first, second, third = (header.digest for header in serving.headers)
    assert first != second == third


@pytest.mark.parametrize("error", [Busy("full"), Declined("no"), Violation("bad bytes")])
def test_errors_pass_through_and_a_violation_is_ours(error: PeerError) -> None:
    async def answer(body: Body) -> Gradient:
        raise error

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        caught = await _fails(transport, type(error), str(error), 2 * LATENCY_S)
        assert getattr(caught, "ours", None) == (True if isinstance(error, Violation) else None)
        assert network.bugs == []

    _play(script, answer)


def test_any_other_error_is_declined_and_kept_as_a_bug() -> None:
    async def answer(body: Body) -> Gradient:
        raise KeyError("planned")

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        await _fails(transport, Declined, "KeyError", 2 * LATENCY_S)
        assert [type(bug) for bug in network.bugs] == [KeyError]

    _play(script, answer)


def test_a_passed_deadline_ends_both_sides() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        await _fails(transport, Unreachable, "within 2 s", 2.0, time_left_s=2.0)
        await asyncio.sleep(1.0)

    assert _play(script, _never).log == [("header from a", LATENCY_S), ("cancelled", pytest.approx(2.0 + LATENCY_S))]


def test_a_cancelled_caller_cancels_the_handler() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        flight = asyncio.create_task(transport.propagate(CALLEE, _activation()))
        await asyncio.sleep(1.0)
        flight.cancel()
        await asyncio.sleep(1.0)
        assert flight.cancelled()

    assert _play(script, _never).log == [("header from a", LATENCY_S), ("cancelled", 1.0 + LATENCY_S)]


def test_a_handler_that_cannot_hear_that_its_caller_is_gone_ends_at_the_deadline() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        flight = asyncio.create_task(transport.propagate(CALLEE, _activation()))
        await asyncio.sleep(1.0)
        network.hold("a")
        flight.cancel()
        await asyncio.sleep(9.0)

    assert _play(script, _never).log == [("header from a", LATENCY_S), ("cancelled", pytest.approx(5.0 + LATENCY_S))]


def test_a_lost_reply_leaves_the_work_done_and_the_caller_waiting() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.lose_next_reply("x", "b")
        network.lose_next_reply("a", "b")
        await _fails(transport, Unreachable, "no answer", 5.0)
        assert await transport.propagate(CALLEE, _activation()) == _gradient()

    assert [what for what, _ in _play(script).log] == ["header from a", "done", "header from a", "done"]


def test_random_loss_of_requests_and_replies() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.set_link("a", "b", Link(LATENCY_S, request_loss=0.5))
        network.set_link("b", "a", Link(LATENCY_S, reply_loss=0.5))
        calls = [transport.propagate(CALLEE, _activation()) for _ in range(400)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(answer, Unreachable) for answer in answers) == pytest.approx(300, abs=40)
        assert all(answer == _gradient() for answer in answers if not isinstance(answer, BaseException))

    assert [what for what, _ in _play(script).log].count("done") == pytest.approx(200, abs=40)


def test_a_crash_breaks_calls_at_once_and_later_ones_are_refused() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        asyncio.get_running_loop().call_later(1.0, network.crash, "b")
        await _fails(transport, Unreachable, "broke the connection", 1.0)
        await _fails(transport, Unreachable, "refused", 2 * LATENCY_S)

    assert _play(script, _never).log == [("header from a", LATENCY_S), ("cancelled", 1.0)]


@pytest.mark.parametrize("fault", ["hold", "partition"])
def test_held_messages_are_swallowed_until_the_release(fault: str) -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        def cut() -> None:
            network.hold("b") if fault == "hold" else network.partition("b", "a")

        def mend() -> None:
            network.release("b") if fault == "hold" else network.repair("a", "b")

        cut()
        await _fails(transport, Unreachable, "no answer", 5.0)
        assert serving.log == []
        mend()
        flight = asyncio.create_task(transport.propagate(CALLEE, _activation()))
        await asyncio.sleep(0.5)
        cut()
        with pytest.raises(Unreachable):
            await flight
        assert serving.log[-1][0] == "done"
        mend()
        assert await transport.propagate(CALLEE, _activation()) == _gradient()

    _play(script, _after(1.0))


@pytest.mark.parametrize(
    "wrong",
    [
        replace(_gradient(), microbatch=MicrobatchId("a", 7, 2)),
        replace(_gradient(), grad=_floats("grad", 1.0)),
        replace(_gradient(), grad=replace(_gradient().grad, dtype="int64")),
    ],
    ids=["id", "shape", "dtype"],
)
def test_a_reply_that_does_not_fit_is_the_peers_violation(wrong: Gradient) -> None:
    async def answer(body: Body) -> Gradient:
        return wrong

    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        caught = await _fails(transport, Violation, "answered", 2 * LATENCY_S)
        assert isinstance(caught, Violation)
        assert not caught.ours

    _play(script, answer)


def test_the_other_calls() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        assert await transport.evaluate(CALLEE, _activation()) == LossSum(3.0, 2)
        assert (await transport.describe(CALLEE)).step == 2.5
        expected = tuple(TensorSpec(f"{kind}/w", "float64", (1, 1, 1)) for kind in ("slow", "delta"))
        began = _now()
        snapshot = await transport.fetch_snapshot(CALLEE, 1, 4, 6.0, 1.0, expected)
        assert (snapshot.round, snapshot.peer) == (4, "b")
        assert _now() - began == pytest.approx(6.0 + 2 * LATENCY_S)
        with pytest.raises(Violation, match="tensors"):
            await transport.fetch_snapshot(CALLEE, 1, 4, 0.0, 1.0, (*expected, *expected))
        with pytest.raises(Unreachable, match=r"within 0\.15 s"):
            await transport.fetch_snapshot(CALLEE, 1, 4, 0.05, 0.1, expected)

    _play(script)


STATE_SPECS = (TensorSpec("slow/w", "float64", (1, 1, 1)),)
SLOW_LINK = Link(LATENCY_S, bytes_per_s=0.8)
"""A state takes ten seconds over it, a snapshot twenty."""


async def _fetches_state(transport: SimTransport, deadline_s: float = 60.0) -> ReplicaState:
    return await transport.fetch_state(CALLEE, deadline_s, STATE_SPECS)


def test_a_state_takes_its_time_and_is_lent_meanwhile() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        state = await _fetches_state(transport)
        assert _now() == pytest.approx(10.0 + 2 * LATENCY_S)
        assert (state.number, state.step, state.spent, state.tensors) == (7, 40.5, (), (_floats("slow/w", 1.0),))
        with pytest.raises(Violation, match="tensors"):
            await transport.fetch_state(CALLEE, 60.0, STATE_SPECS * 2)
        with pytest.raises(Declined, match="stage 1 now"):
            await transport.fetch_state(replace(CALLEE, stage=0), 60.0, STATE_SPECS)
        with pytest.raises(Unreachable, match=r"within 5 s"):
            await _fetches_state(transport, 5.0)

    assert _play(script, link=SLOW_LINK).log[0] == ("loan over", pytest.approx(10.0 + LATENCY_S))


def test_a_donor_that_crashes_is_unreachable_at_once_and_one_that_is_held_soon() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(4.0, network.hold, "b")
        with pytest.raises(Unreachable, match=r"for 20 s"):
            await _fetches_state(transport)
        assert 23.0 < _now() < 24.5
        network.release("b")
        began = _now()
        loop.call_later(4.0, network.crash, "b")
        with pytest.raises(Unreachable, match="broke"):
            await _fetches_state(transport)
        assert _now() - began == pytest.approx(4.0)
        with pytest.raises(Unreachable, match="refused"):
            await _fetches_state(transport)

    assert [what for what, _ in _play(script, link=SLOW_LINK).log][-1] == "loan cancelled"


def test_a_state_goes_on_after_a_short_hold() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(4.0, network.partition_one_way, "b", "a")
        loop.call_later(12.0, network.repair, "a", "b")
        assert (await _fetches_state(transport)).number == 7
        assert 17.5 < _now() < 19.5

    _play(script, link=SLOW_LINK)


def test_a_snapshot_that_falls_silent_is_given_up_long_before_its_deadline() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        assert (await transport.fetch_snapshot(CALLEE, 2, 4, 3.0, 60.0, 16)).peer == "c"
        assert _now() == pytest.approx(23.0 + 2 * LATENCY_S)
        for bad in (15, 17):
            with pytest.raises(Violation):
                await transport.fetch_snapshot(CALLEE, 2, None, 0.0, 60.0, bad)
        began = _now()
        asyncio.get_running_loop().call_later(6.0, network.hold, "b")
        with pytest.raises(Unreachable, match=r"for 5 s"):
            await transport.fetch_snapshot(CALLEE, 2, 4, 3.0, 60.0, 16)
        assert 10.0 < _now() - began < 11.5
        began = _now()
        with pytest.raises(Unreachable, match=r"for 8 s"):
            await transport.fetch_snapshot(CALLEE, 2, 4, 3.0, 60.0, 16)
        assert _now() - began == pytest.approx(8.0)

    _play(script, link=SLOW_LINK)


def test_a_one_way_partition_swallows_one_direction() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.partition_one_way("b", "a")
        await _fails(transport, Unreachable, "no answer", 5.0)
        assert [what for what, _ in serving.log] == ["header from a", "done"]
        network.repair("b", "a")
        network.partition_one_way("a", "b")
        await _fails(transport, Unreachable, "no answer", 5.0)
        assert len(serving.log) == 2, "it has not arrived"
        network.repair("b", "a")
        assert await transport.propagate(CALLEE, _activation()) == _gradient()

    _play(script)


def test_a_split_cuts_the_links_between_its_groups_only() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.split([["a", "c"], ["b"]])
        await _fails(transport, Unreachable, "no answer", 5.0)
        newcomer = SimTransport(network, "in no group")
        assert await newcomer.propagate(CALLEE, _activation()) == _gradient()
        network.split([["a", "b"], ["c"]])
        assert await transport.propagate(CALLEE, _activation()) == _gradient()
        network.split([["a"], ["b"]])
        network.heal()
        assert await transport.propagate(CALLEE, _activation()) == _gradient()

    _play(script)


def test_serving_twice_is_refused_and_close_ends_what_is_in_flight() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        other = SimTransport(network, "b")
        with pytest.raises(LocalError, match="served already"):
            await other.serve(serving)
        flight = asyncio.create_task(transport.propagate(CALLEE, _activation()))
        await asyncio.sleep(1.0)
        await other.close()
        assert serving.log[-1] == ("cancelled", 1.0)
        with pytest.raises(Unreachable):
            await flight

    _play(script, _never)


def test_log_normal_latency_has_its_median() -> None:
    network = Network(3, Link(latency_s=0.2, spread=0.5))
    delays = sorted(network.latency_s("a", "b") for _ in range(1001))
    assert delays[500] == pytest.approx(0.2, rel=0.1)
    assert delays[0] < 0.1 < 0.4 < delays[-1]
    assert [Network(3, Link(0.2, 0.5)).latency_s("a", "b")] != [Network(4, Link(0.2, 0.5)).latency_s("a", "b")]
