"""Where a node that joins, or comes back, takes its weights from, and for how long it waits for them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.agreement import NOT_YET
from noloco_p2p.core.messages import NO_STAGE, Advert, Holding, NodeDescription, PeerId
from noloco_p2p.core.resume import RestoreSource
from noloco_p2p.core.timeouts import TRANSFER_DEADLINE_S
from noloco_p2p.errors import Unreachable
from noloco_p2p.node.join import RETURN_LIFETIMES, Joining
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.restore import WeightRestorer
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

TTL_S, STEPS, M = 30.0, 1000, 10
THIRD_S, LOST_S, RETURN_S, NEVER_S = TTL_S / 3, 3 * TTL_S, RETURN_LIFETIMES * TTL_S, 2 * TRANSFER_DEADLINE_S


class Place:
    """A node of stage 1 of 3, or of none yet, which reads the membership every `reading_s`."""

    def __init__(self, stage: int, state: str, own: Iterable[Holding], reading_s: float, **run: Any) -> None:
        outer = OuterSettings(rule="noloco", inner_steps=M)
        manifest = RunManifest(steps=STEPS, outer=outer, **run)
        me = Advert("me", manifest.run_id, stage, (), state=state)
        self.said: list[str] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.said.append(fields.get("message", "")))
        self.node = NodeState(me, manifest, NodeConfig(), cast(Any, telemetry))
        self.swarm = Membership(self.node)
        self._reading_s, self._own = reading_s, list(own)
        self.listed: dict[PeerId, Advert] = {}
        self.silent: set[PeerId] = set()
        self.gives: set[str] = {"fresh"}
        """The kinds of sources, and the peers, that give what they have."""
        self.tried: list[tuple[float, str, PeerId]] = []
        self.withheld = 0
        checkpoints = SimpleNamespace(held=self._held)
        rounds = SimpleNamespace(frozen=SimpleNamespace(clear=self._withhold))
        guardian = SimpleNamespace(holding=lambda stage: self.guarded)
        self.guarded: Holding | None = None
        world = cast(Any, SimpleNamespace(checkpoints=checkpoints))
        self.weights = WeightRestorer(self.node, self.swarm, world, cast(Any, rounds), cast(Any, guardian))
        cast(Any, self.weights).restore = self._restore
        cast(Any, self.weights).open_data = self._open_data
        self.opened: list[float] = []
        self.joining = Joining(self.node, self.swarm, cast(Any, self), self.weights)
        self._began = 0.0

    def lists(self, peer: PeerId, state: str = "training", round: int = 0, **changes: Any) -> None:
        """s0r0 is a replica of stage 0."""
        fields: dict[str, Any] = {"state": state, "outer_round": round, "step": float(round * M), "steps_per_s": 1.0}
        self.listed[peer] = Advert(peer, self.node.run_id, int(peer[1]), (), **fields | changes)

    def read(self) -> None:
        self.swarm.read([replace(a, announced_at=self.node.now()) for _, a in sorted(self.listed.items())])

    async def next_reading(self) -> None:
        await self.node.waits.until(lambda: self.node.draining, "", cast(Any, None), self._reading_s)
        self.read()

    async def keeps_reading(self) -> None:
        while True:
            await self.next_reading()
            self.node.waits.pulse()

    async def describe(self, peer: Advert) -> NodeDescription:
        await asyncio.sleep(0.1)
        if (now := self.listed.get(peer.peer_id)) is None or peer.peer_id in self.silent:
            raise Unreachable("nobody is there")
        return NodeDescription(
            now.peer_id, now.run_id, now.stage, now.state, now.step, now.outer_round, "", now.fresh_round
        )

    def _withhold(self) -> None:
        self.withheld += 1

    async def _open_data(self) -> None:
        self.opened.append(self.node.now() - self._began)

    async def _held(self) -> list[Holding]:
        return self._own

    async def _restore(self, source: RestoreSource) -> bool:
        peer = source.peer.peer_id if source.peer else ""
        self.tried.append((self.node.now() - self._began, source.kind, peer))
        if peer in self.silent or not {source.kind, peer} & self.gives:
            if source.peer:
                self.weights.failures[peer] += 1
            await asyncio.sleep(1.0)
            return False
        return True

    async def joins(self) -> bool:
        self._began = self.node.now()
        return await asyncio.wait_for(self.joining.wait_for_others(), NEVER_S)


def at(
    scenario: Callable[[Place], Awaitable[None]],
    *,
    stage: int = 1,
    state: str = "starting",
    own: Iterable[Holding] = (),
    reading_s: float = 10.0,
    stages: int = 3,
    start_replicas: int = 1,
) -> None:
    async def main() -> None:
        place = Place(stage, state, own, reading_s, stages=stages, start_replicas=start_replicas)
        asking = asyncio.create_task(place.swarm.inquiry.run(cast(Any, place), place.swarm.look_for_the_end))
        await asyncio.sleep(1000.0)
        await place.weights.find_own()
        await scenario(place)
        asking.cancel()
        await asyncio.wait([asking])

    virtual_time.run(main(), limit_s=20_000)


MATE, WARD = Holding(1, 4, 40), Holding(1, 5, 50)


@pytest.mark.parametrize(
    ("round", "mate", "guards", "gone_at_s", "after_s"),
    [
        (0, {}, (), None, 0.0),
        (5, {}, (), None, RETURN_S),
        (0, {"silent": True}, (), None, LOST_S),
        (5, {"silent": True, "round": 5}, (), None, RETURN_S),
        (0, {"silent": True, "state": "paused"}, (), None, LOST_S),
        (0, {"silent": True, "state": "waiting"}, (), None, 0.0),
        (0, {}, (WARD,), None, TRANSFER_DEADLINE_S),
        (5, {}, (WARD,), None, TRANSFER_DEADLINE_S),
        (5, {"round": 5}, (), 100.0, 90.0 + TRANSFER_DEADLINE_S),
        (0, {"round": 0}, (), 100.0, 90.0 + TRANSFER_DEADLINE_S),
        (5, {"round": 5}, (WARD,), 100.0, 90.0 + TRANSFER_DEADLINE_S),
        (5, {"state": "waiting", "holds": (MATE,)}, (), None, TRANSFER_DEADLINE_S),
        (0, {"silent": True, "state": "waiting", "holds": (MATE,)}, (), None, LOST_S),
    ],
)
def test_how_long_a_newcomer_waits_before_it_begins_afresh(
    round: int, mate: dict[str, Any], guards: tuple[Holding, ...], gone_at_s: float | None, after_s: float
) -> None:
    """ARCHITECTURE.md, "Recovery". Nobody gives it what it claims to have. A replica goes at `gone_at_s`."""

    async def scenario(place: Place) -> None:
        fields = dict(mate)
        place.lists("s0r0", round=round)
        place.lists("s2r0", round=round, holds=guards)
        if fields.pop("silent", False):
            place.silent.add("s1r0")
        if mate:
            place.lists("s1r0", **fields)
        place.read()
        if gone_at_s is not None:
            asyncio.get_running_loop().call_later(gone_at_s, lambda: place.listed.pop("s1r0"))
        assert await place.joins()
        at_s, kind, _ = place.tried[-1]
        assert kind == "fresh"
        assert "wait" not in [kind for _, kind, _ in place.tried]
        assert after_s == 0 or [said for said in place.said if said.startswith("waiting")] in (
            ["waiting for a node with weights of stage 1"],
            ["waiting: another node has round 4 of stage 1"],
        )
        assert after_s <= at_s <= after_s + 25.0, "that, and up to two readings"
        assert place.node.advert.state == "training"
        assert place.withheld > 0

    at(scenario)


@pytest.mark.parametrize(
    ("own", "mates", "guards", "gives", "from_s", "takes"),
    [
        ((), {"s1r0": 5}, (), {"peer"}, 0.0, "peer s1r0"),
        ((), {"s1r0": 5, "s1r1": 5}, (), {"s1r1"}, 0.0, "peer s1r1"),
        ((), {"s1r0": 5}, (WARD,), {"peer", "guardian"}, 0.0, "peer s1r0"),
        ((), {"s1r0": 5}, (WARD,), {"guardian"}, TRANSFER_DEADLINE_S, "guardian s2r0"),
        ((), {"-s1r0": 5}, (WARD,), {"guardian"}, 0.0, "guardian s2r0"),
        ((), {"-s1r0": 5}, (), {"peer", "fresh"}, 50.0, "peer s1r0"),
        ((), {"~s1r0": 5}, (WARD,), {"peer", "guardian"}, 0.0, "peer s1r0"),
        ((MATE,), {"s1r0": 5}, (), {"peer", "shard"}, 0.0, "shard "),
        ((Holding(1, 3, 30),), {"s1r0": 5}, (), {"peer", "shard"}, 0.0, "peer s1r0"),
        ((Holding(1, 3, 30),), {}, (WARD,), {"guardian", "shard"}, 0.0, "guardian s2r0"),
        ((Holding(1, 3, 30),), {}, (WARD,), {"shard"}, 0.0, "shard "),
        ((Holding(0, 5, 50),), {}, (WARD,), {"shard", "guardian"}, 0.0, "guardian s2r0"),
    ],
)
def test_where_a_newcomer_takes_its_weights(
    own: tuple[Holding, ...], mates: dict[PeerId, int], guards: Any, gives: set[str], from_s: float, takes: str
) -> None:
    """One whose name begins with - answers only after 50 s, and one with ~ only when it is asked once more."""

    async def scenario(place: Place) -> None:
        place.gives = gives
        place.lists("s0r0", round=5)
        place.lists("s2r0", round=5, holds=guards)
        for mate, round in mates.items():
            place.lists(mate.strip("-~"), round=round)
        place.silent = {mate[1:] for mate in mates if mate[0] in "-~"}
        place.read()
        await asyncio.sleep(1.5)
        asyncio.get_running_loop().call_later(0.15 if "~s1r0" in mates else 50.0, place.silent.clear)
        assert await place.joins()
        at_s, kind, peer = place.tried[-1]
        assert f"{kind} {peer}" == takes
        assert from_s <= at_s <= from_s + 25.0

    at(scenario, own=own)


@pytest.mark.parametrize("round", [0, 5])
def test_a_newcomer_that_nobody_answers_does_not_begin_afresh_until_somebody_does(round: int) -> None:
    async def scenario(place: Place) -> None:
        place.lists("s0r0", round=round)
        place.lists("s2r0", round=round)
        place.lists("s1r0", "waiting")
        place.lists("s0r1", "draining")
        place.silent = {"s0r0", "s2r0"}
        asyncio.get_running_loop().call_later(1500.0, lambda: place.silent.discard("s2r0"))
        place.read()
        assert await place.joins()
        assert [kind for _, kind, _ in place.tried] == ["fresh"]
        assert 1500.0 <= place.tried[0][0] <= 1525.0
        assert place.said.count("waiting for an answer from a node in training") == 1

    at(scenario)


@pytest.mark.parametrize("silent", [0, 10])
@pytest.mark.parametrize("gives", ["s1r0", "s1r19"])
def test_nobody_is_asked_for_its_state_twice_before_all_that_answer_have_been_asked_once(
    gives: PeerId, silent: int
) -> None:
    """A newcomer asks eight at a time who they are, first those that have answered, which may give nothing for ever."""

    async def scenario(place: Place) -> None:
        mates = [f"s1r{number}" for number in range(20)]
        place.silent = set(mates[5 : 5 + silent])
        for peer in ("s0r0", "s2r0", *mates):
            place.lists(peer, round=5)
        place.read()
        place.gives = {gives}
        assert await place.joins()
        tried = [peer for _, _, peer in place.tried]
        assert tried[-1] == gives
        assert len(tried) == len(set(tried))
        assert not place.silent.intersection(tried)

    at(scenario)


def test_a_replica_that_gave_nothing_is_asked_again() -> None:
    async def scenario(place: Place) -> None:
        for peer in ("s0r0", "s1r0", "s2r0"):
            place.lists(peer, round=5)
        place.read()
        asyncio.get_running_loop().call_later(50.0, place.gives.add, "peer")
        assert await place.joins()
        assert {kind for _, kind, _ in place.tried} == {"peer"}
        assert 50.0 <= place.tried[-1][0] <= 75.0

    at(scenario)


def test_a_run_of_one_stage_needs_nobody_else() -> None:
    async def scenario(place: Place) -> None:
        place.lists("s0r0")
        place.silent = {"s0r0"}
        place.read()
        assert await place.joins()
        assert LOST_S <= place.tried[0][0] <= LOST_S + 25.0

    at(scenario, stage=0, stages=1)


def test_a_round_that_only_an_answer_has_shown_counts_too() -> None:
    """Its node may be gone before it is listed with it."""

    async def scenario(place: Place) -> None:
        place.lists("s0r0")
        place.lists("s2r0")
        place.read()
        place.lists("s0r0", round=5)
        asyncio.get_running_loop().call_later(5.0, lambda: place.listed.pop("s0r0"))
        assert await place.joins()
        assert RETURN_S <= place.tried[0][0] <= RETURN_S + 25.0

    at(scenario)


def test_a_node_that_nobody_answers_goes_on_with_its_own_checkpoint_after_a_while() -> None:
    async def scenario(place: Place) -> None:
        for peer in ("s0r0", "s1r0", "s2r0"):
            place.lists(peer, round=5)
        place.silent, place.gives = set(place.listed), {"shard"}
        place.read()
        assert await place.joins()
        assert [kind for _, kind, _ in place.tried] == ["shard"]
        assert LOST_S <= place.tried[0][0] <= LOST_S + 25.0

    at(scenario, own=[MATE])


@pytest.mark.parametrize(
    ("mate", "gives", "went_on", "after_s"),
    [
        ({}, {"fresh"}, False, 0.0),
        ({"state": "finished", "round": 100}, {"peer"}, True, 0.0),
        ({"state": "finished", "round": 100}, set(), False, TRANSFER_DEADLINE_S),
    ],
)
def test_a_newcomer_at_the_end_of_a_run_takes_what_there_is_or_ends(
    mate: dict[str, Any], gives: set[str], went_on: bool, after_s: float
) -> None:
    """Fresh weights would pass for those of the last step."""

    async def scenario(place: Place) -> None:
        place.gives = gives
        place.lists("s0r0", "finished", round=STEPS // M)
        place.lists("s2r0", "finished", round=STEPS // M)
        if mate:
            place.lists("s1r0", **mate)
        place.read()
        assert await place.joins() == went_on
        assert after_s <= place.node.now() - 1000.0 <= after_s + 25.0
        assert "fresh" not in [kind for _, kind, _ in place.tried]
        assert place.node.step == (0 if went_on else STEPS)
        why = "nobody has weights of stage 1 any more, and the run has ended: the run is complete"
        assert went_on or why in place.said

    at(scenario)


@pytest.mark.parametrize(("steps", "ended"), [((STEPS, STEPS, STEPS), True), ((STEPS, 900, 900), False)])
def test_nodes_that_have_lost_the_first_stage_of_a_finished_run_end(steps: tuple[int, ...], ended: bool) -> None:
    """All nodes came back after the end, those of stage 0 without their weights. They took initial weights at the last
    step, and evaluated them. One node that claims the last step does not end a run that goes on."""

    async def scenario(place: Place) -> None:
        for number, step in enumerate(steps):
            place.lists(f"s{1 + number % 2}r{number}", round=step // M)
        place.read()
        assert await place.joins() != ended
        assert RETURN_S <= place.node.now() - 1000.0 <= RETURN_S + 25.0
        assert [kind for _, kind, _ in place.tried] == ([] if ended else ["fresh"])
        why = "nobody has weights of stage 0 any more, and the run has ended: the run is complete"
        assert (why in place.said) == ended

    at(scenario, stage=0)


@pytest.mark.parametrize("state", ["starting", "syncing"])
@pytest.mark.parametrize(
    ("mine", "theirs", "after_s"),
    [((), (), 150.0), ((MATE,), (), THIRD_S), ((), (0, 2), THIRD_S + RETURN_S), ((MATE,), (0, 2), THIRD_S)],
)
def test_restarted_nodes_go_on_without_the_full_number_after_a_while(
    mine: tuple[Holding, ...], theirs: tuple[int, ...], after_s: float, state: str
) -> None:
    """Two of each stage begin a run; one of stage 1 comes only after 150 s."""

    async def scenario(place: Place) -> None:
        for peer in ("s0r0", "s0r1", "s2r0", "s2r1"):
            place.lists(peer, "waiting", holds=tuple(MATE._replace(stage=s) for s in theirs if s == int(peer[1])))
        asyncio.get_running_loop().call_later(150.0, lambda: place.lists("s1r0", "waiting"))
        place.gives = {"shard", "fresh"}
        place.read()
        reading = asyncio.create_task(place.keeps_reading())
        assert await place.joins()
        assert after_s <= place.node.now() - 1000.0 <= after_s + 7.0
        kinds = [kind for _, kind, _ in place.tried]
        assert kinds == (["shard"] if mine else ["fresh"] if theirs else [])
        reading.cancel()

    at(scenario, state=state, own=mine, reading_s=3.0, start_replicas=2)


def test_a_node_that_has_done_all_steps_ends_unless_another_one_lacks_some() -> None:
    async def scenario(place: Place) -> None:
        done = Holding(2, STEPS // M, STEPS)
        place.lists("s2r1", "waiting", holds=(done,))
        place.lists("s2r0", "waiting", holds=(MATE._replace(stage=2),))
        asyncio.get_running_loop().call_later(100.0, lambda: place.lists("s2r0", "waiting", holds=(done,)))
        place.read()
        reading = asyncio.create_task(place.keeps_reading())
        assert not await place.joins()
        assert place.node.now() - 1000.0 == pytest.approx(2 * LOST_S, abs=2.0)
        assert "this node has done all 1000 steps, and no other node lacks any: the run is complete" in place.said
        reading.cancel()

    at(scenario, own=[Holding(1, STEPS // M, STEPS)], reading_s=1.0)


GUARDED = Holding(1, 9, 90)


@pytest.mark.parametrize(
    ("mate", "answers_s", "guards", "gives", "copies", "after_s"),
    [
        ({"round": 7}, 0.0, (), {"peer"}, "peer", 0.0),
        ({"round": 6}, 0.0, (GUARDED,), {"peer", "guardian"}, "", 0.0),
        ({"round": 7, "state": "paused"}, 0.0, (), {"peer"}, "peer", 0.0),
        ({"round": 9, "fresh_round": 3}, 0.0, (), {"peer"}, "", 0.0),
        ({"round": 9, "fresh_round": 2}, 0.0, (), {"peer"}, "peer", 0.0),
        ({"round": 7}, 5.0, (), {"peer"}, "peer", 5.0),
        ({"round": 7}, 1e9, (), {"peer"}, "", THIRD_S),
        ({"round": 7}, 1e9, (GUARDED,), {"peer", "guardian"}, "guardian", THIRD_S),
        ({"round": 7, "state": "draining"}, 0.0, (), {"peer"}, "", THIRD_S),
        ({"round": 7, "state": "draining"}, 0.0, (GUARDED,), {"guardian"}, "guardian", THIRD_S),
        ({"round": 6, "state": "draining"}, 0.0, (GUARDED,), {"guardian"}, "guardian", 0.0),
        ({"round": 7}, 0.0, (), set(), "", 0.0),
        ({"round": 7}, 0.0, (GUARDED,), {"guardian"}, "guardian", 0.0),
        ({}, 0.0, (GUARDED,), {"guardian"}, "guardian", 0.0),
        ({}, 0.0, (GUARDED._replace(round=6),), {"guardian"}, "", 0.0),
    ],
)
def test_what_a_replica_takes_after_a_pause(
    mate: dict[str, Any], answers_s: float, guards: Any, gives: set[str], copies: str, after_s: float
) -> None:
    """It is at round 5, as is its lineage 0. Its mate is silent for `answers_s`, and another stage guards this one."""

    async def scenario(place: Place) -> None:
        place.gives = gives
        place.node.update(outer_round=5, step=50.0)
        place.lists("s0r0", round=9)
        place.lists("s2r0", round=9, holds=guards)
        if mate:
            place.lists("s1r0", **mate)
        if answers_s:
            place.silent.add("s1r0")
            asyncio.get_running_loop().call_later(answers_s, place.silent.clear)
        place.read()
        assert await place.joining.catch_up() == bool(copies)
        assert after_s <= place.node.now() - 1000.0 <= after_s + 5.0
        assert [kind for _, kind, _ in place.tried][-1:] == ([copies] if copies else ["peer"] if not gives else [])

    at(scenario, state="training", reading_s=1.0)


@pytest.mark.parametrize(
    ("given", "own", "states", "stage", "after_s"),
    [
        (NO_STAGE, (Holding(0, 3, 30), Holding(2, 4, 40)), {}, 2, 1.0),
        (1, (Holding(0, 3, 30), Holding(2, 4, 40)), {}, 1, 1.0),
        (NO_STAGE, (), {"s0r0": "training", "s1r0": "training"}, 2, 4.0),
        (NO_STAGE, (), {"s0r0": "training", "s2r0": "paused"}, 1, 4.0),
        (NO_STAGE, (), {"s0r0": "training"}, 1, 4.0),
        (NO_STAGE, (), {"s0r0": "waiting", "s2r0": "waiting"}, 1, 4.0),
        (NO_STAGE, (), {"s0r0": "waiting", "-s2r0": "waiting"}, 1, 52.0),
    ],
)
def test_which_stage_a_newcomer_chooses(given: int, own: Any, states: Any, stage: int, after_s: float) -> None:
    """It settles at once in the one that it was given or that of its newest checkpoint, otherwise after two readings
    that show that nobody needs to move. One whose name begins with - comes only after 49.5 s."""

    async def scenario(place: Place) -> None:
        place.node.update(settled=given != NO_STAGE)
        for peer, state in states.items():
            at_s = 49.5 if peer[0] == "-" else 0.0
            asyncio.get_running_loop().call_later(at_s, place.lists, peer.strip("-"), state)
        await place.joining.choose_stage()
        assert (place.node.chosen_stage, place.node.advert.settled) == (stage, True)
        assert place.node.advert.holds == tuple(held for held in own if held.stage == stage)
        assert place.node.now() - 1000.0 == pytest.approx(after_s, abs=0.1)
        waited = [said for said in place.said if said.startswith("waiting for ")]
        assert waited == (["waiting for 1 more of stage 2"] if after_s > 10.0 else [])
        assert f"holds stage {stage} of 3" in place.said

    at(scenario, stage=given, own=own, reading_s=1.0)


def test_a_node_that_leaves_before_it_has_chosen_a_stage_says_nothing() -> None:
    async def scenario(place: Place) -> None:
        choosing = asyncio.create_task(place.joining.choose_stage())
        await asyncio.sleep(10.0)
        assert not choosing.done()
        place.node.drain("told to leave")
        await asyncio.sleep(0.1)
        assert choosing.done()
        assert not [said for said in place.said if said.startswith("holds")]

    at(scenario, stage=NO_STAGE, reading_s=1.0)


@pytest.mark.parametrize(
    ("state", "own", "others", "withheld", "from_round"),
    [
        ("starting", (), "waiting", False, 0),
        ("starting", (MATE,), "waiting", True, 0),
        ("starting", (Holding(0, 4, 40),), "waiting", False, 0),
        ("starting", (), "training", True, NOT_YET),
        ("syncing", (), "waiting", True, 0),
    ],
)
def test_the_initial_weights_are_offered_only_while_they_may_be_those_of_the_run(
    state: str, own: tuple[Holding, ...], others: str, withheld: bool, from_round: int
) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(partner_from_round=3)
        place.lists("s0r0", others)
        place.read()
        place.weights.own, place.gives = [], {"shard", "fresh"}
        if state == "starting":
            await place.weights.find_own()
        joining = asyncio.create_task(place.joins())
        await asyncio.sleep(0.1)
        assert (place.withheld > 0, place.node.advert.partner_from_round) == (withheld, from_round)
        here = own if own and own[0].stage == 1 else ()
        assert place.node.advert.holds == here
        assert place.opened == ([] if here else [0.0]), "where a checkpoint says, if it can be read"
        await asyncio.sleep(THIRD_S)
        place.lists("s2r0", others)
        await place.next_reading()
        place.node.waits.pulse()
        assert await joining
        assert bool(place.tried) == bool(here or others == "training")
        assert (place.node.advert.holds, place.node.advert.state) == ((), "training")
        assert len(place.opened) > 0

    at(scenario, state=state, own=own)


@pytest.mark.parametrize("round", [0, 1, 2])
def test_a_node_that_could_not_begin_with_the_others_copies_one_that_is_more_than_a_round_ahead(round: int) -> None:
    async def scenario(place: Place) -> None:
        for peer in ("s0r0", "s0r1", "s2r0"):
            place.lists(peer, "waiting")
        place.read()
        place.gives = {"peer"}
        joining = asyncio.create_task(place.joins())
        await asyncio.sleep(THIRD_S / 2)
        assert "waiting for 1 more of stage 1, 1 more of stage 2" in place.said
        for peer in ("s0r0", "s1r0", "s2r0"):
            place.lists(peer, round=round)
        await place.next_reading()
        place.node.waits.pulse()
        assert await joining
        assert place.node.now() - 1000.0 < THIRD_S, "somebody trains"
        assert [kind for _, kind, _ in place.tried] == (["peer"] if round > 1 else [])
        assert (place.withheld > 0) == (round > 1)

    at(scenario, reading_s=1.0, start_replicas=2)


@pytest.mark.parametrize("guarded", [None, GUARDED])
@pytest.mark.parametrize("mate", [False, True])
def test_a_node_that_moved_and_is_to_leave_before_it_has_weights_hands_over_those_that_it_guarded(
    guarded: Holding | None, mate: bool
) -> None:
    async def scenario(place: Place) -> None:
        place.guarded, place.gives = guarded, set()
        for peer in ("s0r0", "s2r0", *(["s1r0"] if mate else [])):
            place.lists(peer, round=9)
        place.silent = {"s0r0", "s1r0", "s2r0"}
        place.read()
        joining = asyncio.create_task(place.joins())
        await asyncio.sleep(20.0)
        assert place.tried == []
        place.gives.add("guardian")
        place.node.drain("told to leave")
        assert await joining
        assert [kind for _, kind, _ in place.tried] == (["guardian"] if guarded and not mate else [])
        assert place.node.advert.state == "draining"

    at(scenario, state="syncing")


@pytest.mark.parametrize(
    ("mate", "answers", "earlier"),
    [
        ({"round": 9}, True, True),
        ({"round": 5}, True, False),
        ({"round": 6, "fresh_round": 1}, True, False),
        ({"round": 7, "fresh_round": 1}, True, True),
        ({"round": 7, "fresh_round": 1, "state": "syncing"}, True, False),
        ({"round": 12, "fresh_round": 3}, True, False),
        ({"round": 12, "fresh_round": 4}, True, False),
        ({"round": 9}, False, False),
        ({"round": 9, "says": {"round": 12, "fresh_round": 3}}, True, False),
        ({"round": 5, "says": {"round": 6}}, True, True),
    ],
)
def test_which_replicas_are_of_an_earlier_lineage_and_of_at_least_the_same_age(
    mate: dict[str, Any], answers: bool, earlier: bool
) -> None:
    """This one is at round 9, and its lineage is 3. A mate's answer is newer than its advert."""

    async def scenario(place: Place) -> None:
        listed = dict(mate)
        says = listed.pop("says", {})
        place.node.update(outer_round=9, fresh_round=3)
        place.lists("s1r0", **listed)
        place.silent = set() if answers else {"s1r0"}
        place.swarm.members.update([place.listed["s1r0"]], now=place.node.now())
        place.lists("s1r0", **listed | says)
        place.joining.of_earlier_lineage()
        await asyncio.sleep(1.0)
        assert place.joining.of_earlier_lineage() == (("s1r0",) if earlier else ())
        place.swarm.members.failed("s1r0", now=place.node.now())
        assert place.joining.of_earlier_lineage() == ()

    at(scenario, state="training")


@pytest.mark.parametrize(("silent", "clock"), [((), 90.0), (("s0r0", "s2r0"), 60.0)])
def test_a_replica_that_keeps_its_weights_after_a_pause_follows_the_clock_of_all_that_answer_now(
    silent: tuple[PeerId, ...], clock: float
) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(outer_round=5, step=50.0)
        for round, mate in ((5, 5), (9, 6)):
            place.lists("s0r0", round=round)
            place.lists("s1r0", round=mate)
            place.lists("s2r0", round=round)
            place.read()
            await place.swarm.inquiry.until_asked(place.swarm.members.all(), anew=False)
            await asyncio.sleep(1.0)
        place.silent = set(silent)
        assert not await place.joining.catch_up()
        assert (place.tried, place.node.advert.step) == ([], clock)

    at(scenario, state="training", reading_s=1.0)


@pytest.mark.parametrize("state", ["starting", "training"])
@pytest.mark.parametrize(("clock", "first"), [(12, "s1r1"), (10, "s1r1"), (8, "s1r0")])
def test_a_mate_that_is_far_ahead_of_the_others_is_asked_first_only_if_the_clock_allows_it(
    clock: int, first: PeerId, state: str
) -> None:
    """It claims round 11: a clock that is 12 steps short of it at most may be out of date."""

    async def scenario(place: Place) -> None:
        place.lists("s0r0", round=clock)
        place.lists("s1r0", round=7, step=10.0 * clock)
        place.lists("s1r1", round=11, step=10.0 * clock)
        place.lists("s2r0", round=clock)
        place.read()
        place.gives = {"peer"}
        await (place.joins() if state == "starting" else place.joining.catch_up())
        assert place.tried[0][2] == first

    at(scenario, state=state, reading_s=1.0)
