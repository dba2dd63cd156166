"""Simulated transfers of states and snapshots take time, stall and fail like real ones; partial failures of links."""

import asyncio
from dataclasses import replace

import pytest
from barriers import barrier
from sim_transport_fixture import (
    CALLEE,
    ID,
    LATENCY_S,
    SNAPSHOT_SPECS,
    Serving,
    activation,
    fails,
    floats,
    gradient,
    now,
    play,
)

from noloco_p2p.core.messages import ReplicaState, TensorSpec
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.errors import Declined, Unreachable, Violation
from noloco_p2p.sim.faults import Fault
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.network import Network
from noloco_p2p.sim.transport import SimTransport

STATE_SPECS = (TensorSpec("slow/w", "float64", (1, 1, 1)),)
SLOW_LINK = Link(LATENCY_S, bytes_per_s=0.8)
"""A state takes ten seconds over this link, a snapshot twenty."""


async def _fetches_state(transport: SimTransport, deadline_s: float = 60.0) -> ReplicaState:
    return await transport.fetch_state(CALLEE, deadline_s, STATE_SPECS)


def test_a_state_takes_its_transfer_time_and_is_on_loan_meanwhile() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        state = await _fetches_state(transport)
        assert now() == pytest.approx(10.0 + 2 * LATENCY_S)
        assert (state.number, state.step, state.spent, state.tensors) == (7, 40.5, (ID,), (floats("slow/w", 1.0),))
        with pytest.raises(Violation, match="tensors"):
            await transport.fetch_state(CALLEE, 60.0, STATE_SPECS * 2)
        with pytest.raises(Declined, match="stage 1 now"):
            await transport.fetch_state(replace(CALLEE, stage=0), 60.0, STATE_SPECS)
        with pytest.raises(Unreachable, match=r"within 5 s"):
            await _fetches_state(transport, 5.0)

    what, at = play(script, link=SLOW_LINK).log[0]
    assert (what, round(at, 6)) == ("loan over", 10.0 + LATENCY_S)


def test_a_crashed_donor_is_unreachable_at_once_and_a_silent_one_soon() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(4.0, network.block, barrier("hang", "b"))
        with pytest.raises(Unreachable, match=r"for 20 s"):
            await _fetches_state(transport)
        assert 23.0 < now() < 24.5
        network.unblock(barrier("hang", "b"))
        began = now()
        loop.call_later(4.0, network.crash, "b")
        with pytest.raises(Unreachable, match="broke"):
            await _fetches_state(transport)
        assert now() - began == pytest.approx(4.0)
        with pytest.raises(Unreachable, match="refused"):
            await _fetches_state(transport)

    assert [what for what, _ in play(script, link=SLOW_LINK).log][-1] == "loan cancelled"


def test_a_state_transfer_resumes_after_a_short_cut() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(4.0, network.block, barrier("one_way", "b", "a"))
        loop.call_later(12.0, network.unblock, barrier("one_way", "b", "a"))
        assert (await _fetches_state(transport)).number == 7
        assert 17.5 < now() < 19.5

    play(script, link=SLOW_LINK)


def test_a_silent_snapshot_is_given_up_long_before_its_deadline() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        request = SnapshotRequest(2, 4, 3.0)
        assert (await transport.fetch_snapshot(CALLEE, request, 60.0, SNAPSHOT_SPECS)).peer == "c"
        assert now() == pytest.approx(23.0 + 2 * LATENCY_S)
        for bad in (SNAPSHOT_SPECS[:1], SNAPSHOT_SPECS[::-1]):
            with pytest.raises(Violation):
                await transport.fetch_snapshot(CALLEE, SnapshotRequest(2), 60.0, bad)
        began = now()
        asyncio.get_running_loop().call_later(6.0, network.block, barrier("hang", "b"))
        with pytest.raises(Unreachable, match=r"for 5 s"):
            await transport.fetch_snapshot(CALLEE, request, 60.0, SNAPSHOT_SPECS)
        assert 10.0 < now() - began < 11.5
        began = now()
        with pytest.raises(Unreachable, match=r"for 8 s"):
            await transport.fetch_snapshot(CALLEE, request, 60.0, SNAPSHOT_SPECS)
        assert now() - began == pytest.approx(8.0)

    play(script, link=SLOW_LINK)


def test_a_snapshot_that_has_begun_takes_no_longer_than_its_deadline_however_long_it_might_have_waited() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        answer = serving.fetch_snapshot
        serving.fetch_snapshot = lambda caller, request: answer(caller, replace(request, wait_s=0.0))  # type: ignore[method-assign]
        request = SnapshotRequest(2, 4, 60.0)
        assert await transport.fetch_snapshot(CALLEE, request, 20.5, SNAPSHOT_SPECS)
        began = now()
        with pytest.raises(Unreachable, match=r"sent not all of the snapshot in time"):
            await transport.fetch_snapshot(CALLEE, request, 12.0, SNAPSHOT_SPECS)
        assert now() - began == pytest.approx(LATENCY_S + 12.0)

    play(script, link=SLOW_LINK)


def test_a_one_way_partition_swallows_one_direction() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        network.block(barrier("one_way", "b", "a"))
        await fails(transport, Unreachable, "no answer", 5.0)
        assert [what for what, _ in serving.log] == ["header from a", "done"]
        network.unblock(barrier("one_way", "b", "a"))
        network.block(barrier("one_way", "a", "b"))
        await fails(transport, Unreachable, "no answer", 5.0)
        assert len(serving.log) == 2, "the request has not arrived"
        network.unblock(barrier("one_way", "a", "b"))
        assert await transport.propagate(CALLEE, activation()) == gradient()

    play(script)


def test_a_split_cuts_only_the_links_between_its_nodes_and_the_rest() -> None:
    async def script(network: Network, transport: SimTransport, serving: Serving) -> None:
        parted, together = (Fault(0.0, "split", peers).blocks for peers in (("a", "c"), ("a", "b")))
        network.block(parted)
        await fails(transport, Unreachable, "no answer", 5.0)
        other = SimTransport(network, "d")
        assert await other.propagate(CALLEE, activation()) == gradient()
        network.block(together)
        network.unblock(parted)
        assert await transport.propagate(CALLEE, activation()) == gradient()
        network.block(parted)
        network.unblock(together)
        network.unblock(parted)
        assert await transport.propagate(CALLEE, activation()) == gradient()

    play(script)
