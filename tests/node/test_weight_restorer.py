"""Where one node gets its weights from, and which it does not believe."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.messages import Advert, Checkpoint, Holding, NodeDescription, ReplicaState, TensorSpec
from noloco_p2p.core.resume import RestoreSource
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import LocalError, PeerError, Unreachable
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.restore import HOLDINGS_SHOWN, WeightRestorer
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

M, STEPS = 10, 1000
HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))
WEIGHTS = tuple(TensorSpec("weights", "bfloat16", (10 + stage,)) for stage in range(2))


class Place:
    """A newcomer to stage 0 of 2. The others are at step 50, round 5, and train at 1 step/s."""

    def __init__(self, rule: str = "noloco", pairing: str = "matched") -> None:
        fields: dict[str, Any] = {"rule": rule, "inner_steps": 1 if rule == "sync" else M, "pairing": pairing}
        manifest = RunManifest(stages=2, steps=STEPS, outer=OuterSettings(**fields))
        me = Advert("me", manifest.run_id, 0, (), state="syncing")
        self.events: list[tuple[str, dict[str, Any]]] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.events.append((kind, fields)))
        self.node = NodeState(me, manifest, NodeConfig(), cast(Any, telemetry))
        state = SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN, replica=(), weights=WEIGHTS)
        self.node.hold(cast(Any, SimpleNamespace(state=state, restore=self._took, adopt=self._took)))
        self.swarm = Membership(self.node)
        peers = [self.peer("a", 0), self.peer("b", 0), self.peer("c", 1)]
        self.swarm.members.update(peers, now=0.0)
        for peer in peers:
            self.swarm.members.answered(peer.peer_id)
        self.silent = ""
        self.state = ""
        self.answers_in_s, self.opens_in_s = 0.0, 0.0
        self.taken: list[object] = []
        self.gone_on_from: list[int] = []
        self.answer: ReplicaState | Snapshot | PeerError = Unreachable("gone")
        self.takes_s = 1.0
        self.requests: list[Any] = []
        self.asked = 0
        self.ended = 0
        self.disk: dict[Holding, Checkpoint | None] = {}
        self.opened: list[object] = []
        self.mine: Snapshot | None = None
        transport = SimpleNamespace(fetch_state=self._fetch, fetch_snapshot=self._fetch)
        checkpoints = SimpleNamespace(held=self._held, load=self._load)
        world: Any = SimpleNamespace(transport=transport, checkpoints=checkpoints, make_batches=self._open)
        rounds = SimpleNamespace(freeze_anew=self._goes_on_from, frozen=SimpleNamespace(clear=lambda: None))
        guardian = SimpleNamespace(snapshot_of=lambda stage: self.mine, holding=lambda stage: None)
        self._parts = world, cast(Any, rounds), cast(Any, guardian)
        self.weights = WeightRestorer(self.node, self.swarm, *self._parts)

    def begins(self, state: str) -> WeightRestorer:
        """That of a node that takes up its duties in this state, and then joins its stage."""
        self.node.update(state=state)
        weights = WeightRestorer(self.node, self.swarm, *self._parts)
        self.node.update(state="syncing")
        return weights

    def peer(self, id: str, stage: int, **changes: Any) -> Advert:
        advert = Advert(id, self.node.run_id, stage, (), state="training", step=50.0, outer_round=5, steps_per_s=1.0)
        return replace(advert, **changes)

    async def describe(self, peer: Advert) -> NodeDescription:
        self.asked += 1
        await asyncio.sleep(self.answers_in_s)
        if peer.peer_id in self.silent:
            raise Unreachable("nobody is there")
        return NodeDescription(
            peer.peer_id, peer.run_id, peer.stage, self.state or peer.state, peer.step, peer.outer_round, ""
        )

    async def _took(self, what: object) -> None:
        self.taken.append(what)

    async def _fetch(self, peer: Advert, request: object, *_: object) -> Any:
        self.requests.append(request)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.ended += 1
        if isinstance(self.answer, PeerError):
            raise self.answer
        return self.answer

    async def _goes_on_from(self) -> None:
        self.gone_on_from.append(self.node.advert.outer_round)

    async def _held(self) -> list[Holding]:
        return list(self.disk)

    async def _load(self, held: Holding) -> Checkpoint | None:
        return self.disk[held]

    async def _open(self, cursor: object) -> Any:
        await asyncio.sleep(self.opens_in_s)
        self.opened.append(cursor)
        return SimpleNamespace(cursor=cursor)

    async def know(self) -> None:
        """Ask the others."""
        await self.swarm.inquiry.until_asked(self.swarm.members.all(), anew=True)

    @property
    def came_to(self) -> tuple[int, float, int]:
        """The round, the step and the lineage that are announced."""
        return self.node.advert.outer_round, self.node.advert.step, self.node.advert.fresh_round


def state(round: int = 5, step: float = 48.0, *, stage: int = 0, fresh_round: int = 0) -> ReplicaState:
    return ReplicaState("a", stage, round, step, 40, 40, (), fresh_round=fresh_round)


def from_peer(place: Place, **changes: Any) -> RestoreSource:
    return RestoreSource("peer", "it has them", place.peer("a", 0, **changes))


def at(scenario: Callable[[Place], Awaitable[None]], rule: str = "noloco", pairing: str = "matched") -> None:
    async def main() -> None:
        place = Place(rule, pairing)
        asking = asyncio.create_task(place.swarm.inquiry.run(cast(Any, place), lambda: None))
        await place.know()
        await scenario(place)
        asking.cancel()
        await asyncio.wait([asking])

    virtual_time.run(main(), limit_s=10_000)


@pytest.mark.parametrize(("rule", "came_to", "partner_from"), [("noloco", (5, 50.0, 0), 7), ("sync", (5, 48.0, 0), 50)])
def test_the_state_of_a_peer_is_continued_at_the_clock_of_the_others(
    rule: str, came_to: tuple[int, float, int], partner_from: int
) -> None:
    async def scenario(place: Place) -> None:
        place.answer = state()
        assert await place.weights.restore(from_peer(place))
        assert (place.came_to, place.taken, place.gone_on_from) == (came_to, [place.answer], [5])
        assert (place.node.inner_steps, place.node.advert.partner_from_round) == (40, partner_from)
        [resumed] = [fields for kind, fields in place.events if kind == "resumed"]
        assert resumed == {"source": "peer", "peer": "a", "round": came_to[0], "step": came_to[1]}

    at(scenario, rule)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Unreachable("gone"), "gone"),
        (state(stage=1), "holds stage 1"),
        (state(fresh_round=3), "began at round 3, not 0"),
        (state(round=16), "has not reached"),
        (state(step=131.0), "has not reached"),
    ],
)
def test_what_cannot_be_the_state_of_that_peer_is_not_taken(answer: ReplicaState | PeerError, says: str) -> None:
    async def scenario(place: Place) -> None:
        place.answer = answer
        for times in (1, 2):
            assert not await place.weights.restore(from_peer(place))
            assert place.weights.failures["a"] == times
        assert (place.taken, place.came_to) == ([], (0, 0.0, 0))
        assert says in str(place.events[-1][1]["message"])
        place.answer = state(round=15, step=130.0)
        assert await place.weights.restore(from_peer(place)), "the others can have reached just that"
        assert not place.weights.failures, "it has weights now"

    at(scenario)


@pytest.mark.parametrize("kind", ["peer", "guardian"])
def test_what_a_long_transfer_brings_is_continued_at_the_clock_at_its_end(kind: Any) -> None:
    """After a minute all answers are stale: a guardian's weights were continued at their own step."""

    async def scenario(place: Place) -> None:
        place.takes_s = 100.0
        source = RestoreSource(kind, "", place.peer("a", 0))
        place.answer = state() if kind == "peer" else Snapshot("a", 5, 48, ())
        assert await place.weights.restore(source)
        assert place.came_to == (5, 50.0, 0)

    at(scenario)


def test_the_labels_of_a_copied_state_change_together_with_the_weights() -> None:
    """A replica may give its own state to others meanwhile. While it opened its data or asked for the clock, it gave
    the new weights under the round, the step and the lineage of the old ones."""

    async def scenario(place: Place) -> None:
        place.answer, place.takes_s, place.answers_in_s, place.opens_in_s = state(), 100.0, 1.0, 30.0
        restoring = asyncio.create_task(place.weights.restore(from_peer(place)))
        while not place.taken:
            assert place.came_to == (0, 0.0, 0)
            await asyncio.sleep(0.1)
        assert place.came_to == (5, 50.0, 0)
        assert place.opened == [None], "before the transfer, because the others train on meanwhile"
        assert await restoring

    at(scenario)


@pytest.mark.parametrize("next_stage", [None, 1])
@pytest.mark.parametrize("kind", ["peer", "guardian"])
def test_a_node_that_is_to_leave_or_to_move_ends_the_transfer(kind: Any, next_stage: int | None) -> None:
    """A replica that copies another one while it trains may be told to move. Until it has, nobody else moves."""

    async def scenario(place: Place) -> None:
        place.answer, place.takes_s = state(), 1000.0
        restoring = asyncio.create_task(place.weights.restore(RestoreSource(kind, "", place.peer("a", 0))))
        await asyncio.sleep(1.0)
        assert (restoring.done(), place.ended) == (False, 0)
        place.node.drain("told to leave", next_stage=next_stage)
        await asyncio.wait([restoring], timeout=1.0)
        assert restoring.done()
        assert not restoring.result()
        assert place.ended == 1

    at(scenario)


def test_a_transfer_ends_when_the_node_is_stopped() -> None:
    async def scenario(place: Place) -> None:
        place.takes_s = 1000.0
        restoring = asyncio.create_task(place.weights.restore(from_peer(place)))
        await asyncio.sleep(1.0)
        restoring.cancel()
        await asyncio.wait([restoring])
        assert place.ended == 1

    at(scenario)


@pytest.mark.parametrize("own", [False, True])
def test_the_weights_of_a_guardian_are_continued_at_the_clock_of_the_others(own: bool) -> None:
    async def scenario(place: Place) -> None:
        found = Snapshot("a", 4, 42, (), fresh_round=1)
        place.mine, place.answer = found if own else None, found
        holding = Holding(0, 4, 42, 1)
        peer = None if own else place.peer("c", 1, holds=(holding,))
        assert await place.weights.restore(RestoreSource("guardian", "", peer, holding))
        assert (place.came_to, place.taken, place.ended) == ((4, 50.0, 1), [found], not own)
        assert place.requests == ([] if own else [SnapshotRequest(0, weights="bfloat16")])
        assert place.node.advert.partner_from_round == 0, "the others of its stage have the same"

    at(scenario)


def test_weights_that_the_run_cannot_have_reached_are_not_taken_from_a_guardian() -> None:
    async def scenario(place: Place) -> None:
        place.answer = Snapshot("a", 4, 900, ())
        assert not await place.weights.restore(RestoreSource("guardian", "", place.peer("c", 1)))
        assert (place.taken, place.weights.failures["c"]) == ([], 1)

    at(scenario)


@pytest.mark.parametrize(
    ("listed", "silent", "known"), [(True, False, True), (True, True, False), (False, False, True)]
)
def test_whether_a_node_in_training_has_answered_or_none_is_listed(listed: bool, silent: bool, known: bool) -> None:
    async def scenario(place: Place) -> None:
        await asyncio.sleep(1.0)
        place.swarm.inquiry.forget()
        place.silent = "abc" if silent else ""
        if not listed:
            waiting = [place.peer(peer, 0, state="waiting", announced_at=1.0) for peer in "abc"]
            place.swarm.members.update(waiting, now=1.0)
        assert await place.weights.know_the_clock() == known

    at(scenario)


def test_those_that_were_silent_do_not_stand_in_the_way_of_one_that_was_not_asked_yet() -> None:
    async def scenario(place: Place) -> None:
        place.swarm.inquiry.forget()
        silent = [place.peer(f"gone {number}", 1) for number in range(50)]
        place.swarm.members.update([*silent, place.peer("new", 1)], now=1000.0)
        for peer in silent:
            place.swarm.inquiry.exchanges.note(peer.peer_id, None, now=place.node.now())
        assert await place.weights.know_the_clock()

    at(scenario)


@pytest.mark.parametrize(
    ("rule", "pairing", "lineage"), [("noloco", "matched", 5), ("noloco", "none", 0), ("sync", "matched", 0)]
)
def test_initial_weights_begin_at_the_clock_of_the_others(rule: str, pairing: str, lineage: int) -> None:
    async def scenario(place: Place) -> None:
        assert await place.weights.restore(RestoreSource("fresh", ""))
        assert place.came_to == (5 if rule == "noloco" else 50, 50.0, lineage)
        assert place.events[-2][1] == {"message": "nobody has the weights of stage 0: starting from initial weights"}
        assert place.weights.credible_round() == (6 if rule == "noloco" else 62)

    at(scenario, rule, pairing)


def test_initial_weights_begin_at_the_beginning_if_nobody_answers() -> None:
    async def scenario(place: Place) -> None:
        place.swarm.inquiry.forget()
        assert await place.weights.restore(RestoreSource("fresh", ""))
        assert place.came_to == (0, 0.0, 0)

    at(scenario)


def test_the_weights_of_a_guardian_are_not_trained_on_after_the_end() -> None:
    async def scenario(place: Place) -> None:
        place.answer, place.swarm.run_ended = Snapshot("a", 4, 42, ()), True
        done = [replace(peer, state="finished", announced_at=1.0) for peer in place.swarm.members.all()]
        place.swarm.members.update(done, now=1.0)
        place.state = "finished"
        await asyncio.sleep(1.0)
        await place.know()
        assert await place.weights.restore(RestoreSource("guardian", "", place.peer("c", 1)))
        assert place.came_to == (4, STEPS, 0)

    at(scenario)


def test_only_those_whose_answers_are_out_of_date_are_asked_for_the_clock() -> None:
    async def scenario(place: Place) -> None:
        await asyncio.sleep(1.0)
        before = place.asked
        place.node.update(step=10.0)
        await place.weights.keep_up()
        assert await place.weights.know_the_clock()
        assert (place.node.advert.step, place.asked) == (50.0, before)

    at(scenario)


def test_those_that_were_all_silent_are_asked_again_after_the_lifetime_of_an_advert() -> None:
    async def scenario(place: Place) -> None:
        place.swarm.inquiry.forget()
        place.silent = "abc"
        assert not await place.weights.know_the_clock()
        place.silent = ""
        await asyncio.sleep(1.01 * place.node.config.directory.ttl_s)
        assert await place.weights.know_the_clock()

    at(scenario)


def test_its_own_checkpoint_is_continued_with_its_random_numbers_and_its_data() -> None:
    async def scenario(place: Place) -> None:
        held, torn = Holding(0, 5, 50), Holding(0, 6, 60)
        place.node.rng.random()
        drawn = place.node.rng.getstate()
        place.disk = {held: Checkpoint(state(5, 48.0), {"position": 7}, drawn), torn: None}
        place.node.cursor = {"position": 2}
        await place.weights.find_own()
        place.weights.show_own()
        assert [one.round for one in place.node.advert.holds] == [5, 6]
        place.node.rng.random()
        assert not await place.weights.restore(RestoreSource("shard", "", holding=torn))
        assert [one.round for one in place.node.advert.holds] == [5], "it is no longer offered"
        assert await place.weights.restore(RestoreSource("shard", "", holding=held))
        assert place.node.rng.getstate() == drawn
        assert len(place.taken) == 1
        assert (place.opened, place.came_to) == ([{"position": 7}], (5, 50.0, 0))
        await place.weights.open_data()
        assert len(place.opened) == 1, "data that are open stay open"

    at(scenario)


def test_data_are_opened_where_the_newest_readable_checkpoint_was() -> None:
    async def scenario(place: Place) -> None:
        with_cursor = Checkpoint(state(3, 30.0), {"position": 3}, ())
        place.disk = {
            Holding(0, 2, 20): Checkpoint(state(2, 20.0), {"position": 2}, ()),
            Holding(0, 3, 30): with_cursor,
            Holding(0, 4, 40): replace(with_cursor, cursor=None),
            Holding(0, 5, 50): None,
            Holding(1, 6, 60): replace(with_cursor, cursor={"position": 6}),
        }
        await place.weights.find_own()
        await place.weights.open_data()
        assert place.opened == [{"position": 3}]

    at(scenario)


def test_data_are_opened_where_the_node_left_the_stage_and_only_in_the_first() -> None:
    async def scenario(place: Place) -> None:
        place.disk = {Holding(0, 2, 20): Checkpoint(state(2, 20.0), {"position": 2}, ())}
        await place.weights.find_own()
        place.node.update(stage=1)
        await place.weights.open_data()
        assert place.opened == []
        place.node.update(stage=0)
        place.node.cursor = {"position": 9}
        await place.weights.open_data()
        assert place.opened == [{"position": 9}]

    at(scenario)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("what", ["held", "load"])
def test_only_a_node_that_starts_stops_if_its_disk_cannot_be_read(what: str, starts: bool) -> None:
    async def scenario(place: Place) -> None:
        async def fail(*_: object) -> None:
            raise LocalError("stale file handle")

        weights = place.begins("starting" if starts else "draining")
        place.disk = {Holding(0, 5, 50): None}
        setattr(cast(Any, weights)._world.checkpoints, what, fail)

        async def restores() -> bool:
            await weights.find_own()
            return any([await weights.restore(RestoreSource("shard", "newest", holding=one)) for one in [*weights.own]])

        if starts:
            with pytest.raises(LocalError):
                await restores()
        else:
            assert not await restores()
            assert any("stale file handle" in str(fields.get("message")) for _, fields in place.events)

    at(scenario)


def test_the_newest_checkpoints_are_listed() -> None:
    async def scenario(place: Place) -> None:
        own = [Holding(0, round, 10 * round) for round in range(HOLDINGS_SHOWN + 2)]
        place.disk = dict.fromkeys([*own, Holding(1, 9, 90)])
        await place.weights.find_own()
        place.weights.show_own()
        assert place.node.advert.holds == tuple(own[2:])

    at(scenario)


@pytest.mark.parametrize(
    ("mine", "answering", "then"),
    [(47.0, "abc", 50.0), (47.0, "bc", 50.0), (47.0, "c", 47.0), (49.0, "abc", 49.0), (60.0, "abc", 60.0)],
)
def test_a_clock_that_is_behind_that_of_mates_keeps_up_and_none_goes_back(
    mine: float, answering: str, then: float
) -> None:
    """Even if a copy has failed after minutes, when all answers were stale: then it kept the clock of long ago."""

    async def scenario(place: Place) -> None:
        await asyncio.sleep(100.0)
        place.silent = "".join({*"abc"} - {*answering})
        place.node.update(step=mine)
        await place.weights.keep_up()
        assert place.node.advert.step == then

    at(scenario)
