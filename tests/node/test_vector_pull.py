"""One replica that pulls a vector: what it requests, which answers it takes, and who is held to account."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.lattice_format import LatticeRequest
from noloco_p2p.core.messages import Advert, HostTensor, TensorSpec
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest, Verdict
from noloco_p2p.errors import Declined, PeerError, Unreachable, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.vector_pull import Pull, VectorPuller
from noloco_p2p.sim import virtual_time

ROUND, LINEAGE, STALE = 5, 2, 2
WAIT_S, DEADLINE_S = 20.0, 60.0
HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))
NOTHING = HostTensor("vector", "float32", (0,), memoryview(b""))
VALUES = HostTensor("vector", "float32", (2,), memoryview(bytes(8)))
MINE = FrozenRound("me", ROUND, 50, NOTHING, NOTHING, bounds=b"123", fresh_round=LINEAGE)
THEIRS = Snapshot("b", ROUND, 51, (VALUES,), fresh_round=LINEAGE)
SOME = LatticeRequest(b"45", (0, 2), 1)


class Place:
    """A replica with a mate b, whose `answers` are given one after the other. Of each, the chunks in `missing` arrived
    wrong."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []
        telemetry = cast(Any, SimpleNamespace(event=lambda kind, **fields: self.events.append((kind, fields))))
        manifest = RunManifest(outer=OuterSettings(rule="gossip", deadline_s=DEADLINE_S, max_stale_rounds=STALE))
        me = Advert("me", manifest.run_id, 0, (), state="training")
        self.node = NodeState(me, manifest, NodeConfig(), telemetry)
        self.state = SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN, lattice=None, answer=lambda lattice: (lattice,))
        self.node.hold(cast(Any, self))
        swarm = Membership(self.node)
        self.members = swarm.members
        self.mate = Advert("b", manifest.run_id, 0, (), state="training")
        self.members.update([self.mate], now=0.0)
        self.answers: list[Snapshot | PeerError] = [THEIRS]
        self.missing: list[LatticeRequest] = []
        self.verdict: Verdict = ""
        self.asked: list[SnapshotRequest] = []
        self.puller = VectorPuller(self.node, swarm, cast(Any, self))

    async def fetch_snapshot(
        self, peer: Advert, request: SnapshotRequest, limit_s: float, expected: object
    ) -> Snapshot:
        """As in the port."""
        assert (peer, limit_s, expected) == (self.mate, DEADLINE_S, (request.lattice,))
        self.asked.append(request)
        [wait] = self.node.waits.current(self.node.now())
        assert (wait.whom, wait.deadline_s) == ("b", request.wait_s + DEADLINE_S)
        await asyncio.sleep(1.0)
        answer = self.answers.pop(0)
        if isinstance(answer, PeerError):
            raise answer
        return answer

    async def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None
    ) -> PartnerVector:
        """As in the port."""
        assert (mine, request, before is not None) == (MINE, self.asked[-1], len(self.asked) > 1)
        missing = self.missing.pop(0) if self.missing else None
        verdict = "" if missing else self.verdict
        return PartnerVector(theirs.peer, theirs.round, theirs.step, NOTHING, NOTHING, missing=missing, verdict=verdict)

    async def pull(self) -> Pull:
        return await self.puller.fetch(self.mate, MINE, WAIT_S, idle=True)


def at(scenario: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Place())

    virtual_time.run(main(), limit_s=1000)


def test_chunks_that_arrived_wrong_are_requested_again_from_the_same_round_at_once() -> None:
    async def scenario(place: Place) -> None:
        older = replace(THEIRS, round=ROUND - 1)
        place.answers, place.missing = [older] * 3, [SOME, replace_some(SOME)]
        pull = await place.pull()
        whole = SnapshotRequest(0, ROUND, WAIT_S, lattice=LatticeRequest(b"123"))
        again = replace(whole, round=ROUND - 1, wait_s=0.0, lattice=SOME)
        assert place.asked == [whole, again, replace(again, lattice=replace_some(SOME))]
        assert (pull.reason, pull.other, pull.counted, pull.asked_again) == ("", False, True, 3)
        assert [one.round for one in pull.theirs] == [ROUND - 1]
        answers = 3 * VALUES.data.nbytes
        assert pull.nbytes == answers + sum(request.nbytes for request in place.asked) > answers
        assert place.events == []

    at(scenario)


def replace_some(request: LatticeRequest) -> LatticeRequest:
    """What is requested when only the last chunk has come wrong once more."""
    return LatticeRequest(request.bounds[-1:], request.some[-1:], request.widened + 1)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, None),
        ({"round": ROUND - STALE}, None),
        ({"round": ROUND + STALE}, None),
        ({"round": ROUND - STALE - 1}, Declined),
        ({"round": ROUND + STALE + 1}, Declined),
        ({"fresh_round": LINEAGE + 1}, Declined),
        ({"fresh_round": LINEAGE - 1}, Declined),
        ({"peer": "c"}, Violation),
    ],
)
def test_which_answers_are_taken(changes: dict[str, Any], error: type[PeerError] | None) -> None:
    """One of about the same round, of weights that began when this replica's did, and of the peer that was asked."""

    async def scenario(place: Place) -> None:
        place.answers = [replace(THEIRS, **changes)]
        if error is None:
            assert len((await place.pull()).theirs) == 1
        else:
            with pytest.raises(error):
                await place.pull()

    at(scenario)


@pytest.mark.parametrize(
    ("verdict", "refused"), [("", False), ("clipped", False), ("outlier", False), ("refused", True)]
)
def test_what_the_guard_says_is_reported_and_what_it_refuses_is_not_merged(verdict: Verdict, refused: bool) -> None:
    async def scenario(place: Place) -> None:
        place.verdict = verdict
        pull = await place.puller.try_fetch(place.mate, MINE, WAIT_S, idle=True)
        assert (pull.theirs == (), pull.reason) == (refused, "violation" if refused else "")
        said = [fields for kind, fields in place.events if kind == "distrusted"]
        assert said == [{"result": verdict, "peer": "b", "round": ROUND}] * bool(verdict)
        assert place.members.is_aside("b", now=place.node.now()) == refused

    at(scenario)


@pytest.mark.parametrize(
    ("error", "false"),
    [(Unreachable("gone"), False), (Declined("no such round"), False), (Violation("no vector"), True)],
)
def test_only_one_that_answers_falsely_is_set_aside(error: PeerError, false: bool) -> None:
    """Late weights prove nothing. A false answer shows that the peer exists."""

    async def scenario(place: Place) -> None:
        place.answers = [error]
        pull = await place.puller.try_fetch(place.mate, MINE, WAIT_S, idle=True)
        assert (pull.theirs, pull.reason) == ((), type(error).__name__.lower())
        assert place.members.is_aside("b", now=place.node.now()) == false
        assert place.members.met == ({"b"} if false else set())
        assert [kind for kind, _ in place.events] == ["warning"]

    at(scenario)
