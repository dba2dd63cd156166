"""What one node concludes from what it knows of the others."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert, Holding, NodeDescription, Origin, PeerId
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import Unreachable
from noloco_p2p.node.membership import DESERTED_S, DISTRUST, Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

STEPS, TTL_S, LINGER_S, DEADLINE_S = 1000, 30.0, 5.0, 60.0


class Place:
    """Node `me` of a stage in the middle of a run of three; it knows the peers that `sees` names, as stage + number."""

    def __init__(self, stage: int, routing: str) -> None:
        manifest = RunManifest(stages=3, steps=STEPS, routing=cast(Any, routing))
        limits: Any = {"linger_s": LINGER_S, "microbatch_deadline_s": DEADLINE_S}
        me = Advert("me", manifest.run_id, stage, (), state="training", step=500.0)
        self.events: list[tuple[str, dict[str, Any]]] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.events.append((kind, fields)))
        self.node = NodeState(me, manifest, NodeConfig(limits=limits), cast(Any, telemetry))
        self.swarm = Membership(self.node)
        self.step = 500.0  # of all others
        self.says: dict[PeerId, str] = {}
        """The state that a peer answers; those that are not in here are silent."""

    async def describe(self, peer: Advert) -> NodeDescription:
        await asyncio.sleep(0.1)
        if peer.peer_id not in self.says:
            raise Unreachable("nobody is there")
        state = self.says[peer.peer_id]
        return NodeDescription(peer.peer_id, peer.run_id, peer.stage, state, peer.step, 0, "")

    def sees(self, **states: str) -> None:
        """Read the membership: s0r0="training" is a replica of stage 0."""
        now, run = self.node.now(), self.node.run_id
        self.swarm.read(
            [
                Advert(peer, run, int(peer[1]), (), state=state, step=self.step, announced_at=now)
                for peer, state in sorted(states.items())
            ]
        )
        self.swarm.update_deserted(reading=True)


def at(scenario: Callable[[Place], Awaitable[None]], stage: int = 1, routing: str = "random") -> None:
    async def main() -> None:
        place = Place(stage, routing)
        changed = place.swarm.look_for_the_end
        asking = asyncio.create_task(place.swarm.inquiry.run(cast(Any, place), changed))
        await asyncio.sleep(1000.0)
        await scenario(place)
        asking.cancel()
        await asyncio.wait([asking])

    virtual_time.run(main(), limit_s=10_000)


@pytest.mark.parametrize(
    ("states", "says", "clock", "ended"),
    [
        ({"s0r0": "finished"}, {"s0r0": "finished"}, 500.0, True),
        ({"s0r0": "finished"}, {"s0r0": "training"}, 500.0, False),
        ({"s0r0": "finished"}, {}, 500.0, False),
        ({"s0r0": "finished"}, {}, STEPS - 1.0, True),
        ({"s1r0": "finished"}, {"s1r0": "finished"}, STEPS - 1.0, False),
        ({"s1r0": "left"}, {}, STEPS - 1.0, True),
        ({"s1r0": "left"}, {}, 500.0, False),
    ],
)
def test_the_run_has_ended_if_a_node_of_stage_0_says_so_or_the_own_clock_agrees(
    states: dict[PeerId, str], says: dict[PeerId, str], clock: float, ended: bool
) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(step=clock)
        place.says = says
        place.step = float(STEPS)
        place.sees(**states, s2r0="training", s0r1="training")
        await asyncio.sleep(10.0)
        assert place.swarm.run_ended == ended

    at(scenario)


@pytest.mark.parametrize(("empty", "ended"), [("s2r0", True), ("s0r1", True), ("", False)])
def test_the_run_has_ended_if_a_node_left_at_its_end_and_a_stage_has_long_been_empty(empty: str, ended: bool) -> None:
    async def scenario(place: Place) -> None:
        rest = {peer: "training" for peer in ("s0r1", "s2r0") if peer != empty}
        place.step = float(STEPS)
        place.sees(s1r0="left", **rest)
        for second in range(1, 6 * int(TTL_S)):
            await asyncio.sleep(1.0)
            place.sees(**rest)
            assert place.swarm.run_ended == (ended and second > 3 * TTL_S), "a silent stage may come back"

    at(scenario)


@pytest.mark.parametrize(
    ("state", "heard", "after_s"),
    [("training", False, DEADLINE_S), ("training", True, 20.0 + DEADLINE_S), ("syncing", False, 1800.0),
     ("paused", False, 0.0), ("waiting", False, 0.0)],
)  # fmt: skip
def test_when_a_later_stage_waits_for_the_others_of_stage_0_no_longer(state: str, heard: bool, after_s: float) -> None:
    async def scenario(place: Place) -> None:
        place.says = {"s0r0": "finished", "s0r1": state}
        await asyncio.sleep(1.0)
        assert not place.swarm.first_stage_is_done()
        place.sees(s0r0="finished", s0r1=state, s2r0="training")
        await asyncio.sleep(1.0)
        assert place.swarm.run_ended
        assert place.swarm.first_stage_is_done() == (after_s == 0)
        await asyncio.sleep(19.2)
        place.sees(s0r0="finished", s0r1=state, s2r0="training")
        if heard:
            place.swarm.heard(Origin("s0r1", 3, 0))
        await asyncio.sleep(max(0.0, after_s - 20.0 - 1.0))
        assert place.swarm.first_stage_is_done() == (after_s == 0)
        await asyncio.sleep(2.0)
        assert place.swarm.first_stage_is_done()

    at(scenario)


@pytest.mark.parametrize(("answer", "done"), [("training", False), ("syncing", True), (None, True)])
def test_a_node_of_stage_0_waits_only_for_those_that_say_that_they_train(answer: str | None, done: bool) -> None:
    async def scenario(place: Place) -> None:
        place.says = {"s0r0": "finished"} | ({"s0r1": answer} if answer else {})
        place.sees(s0r0="finished", s0r1=answer or "training", s1r0="training", s2r0="training")
        await asyncio.sleep(10.0)
        assert place.swarm.run_ended
        assert place.swarm.first_stage_is_done() == done

    at(scenario, stage=0)


def test_a_stage_that_nobody_serves_is_reported_after_a_while_and_at_each_reading() -> None:
    async def scenario(place: Place) -> None:
        place.sees(s0r0="training", s1r0="training")
        assert place.swarm.nobody_there()
        await asyncio.sleep(DESERTED_S / 2)
        place.sees(s0r0="training", s1r0="training")
        reports = [fields["stages"] for kind, fields in place.events if kind == "deserted"]
        assert reports == []
        for _ in range(2):
            await asyncio.sleep(DESERTED_S)
            place.sees(s0r0="training", s1r0="training")
            place.swarm.failed("s2r0")
        place.sees(s0r0="training", s1r0="training", s2r0="waiting")
        place.sees(s0r0="training", s1r0="training", s2r0="training")
        reports = [fields["stages"] for kind, fields in place.events if kind == "deserted"]
        assert reports == [{2: 1.5 * DESERTED_S}, {2: 2.5 * DESERTED_S}, {}], "once for a reading, not for each call"
        assert not place.swarm.nobody_there()

    at(scenario)


def test_after_the_end_a_later_stage_counts_as_empty_once_it_has_been_for_a_while() -> None:
    async def scenario(place: Place) -> None:
        place.says = {"s0r0": "finished"}
        place.sees(s0r0="finished", s1r0="training")
        await asyncio.sleep(LINGER_S - 1.0)
        assert (place.swarm.run_ended, place.swarm.nobody_there()) == (True, False)
        await asyncio.sleep(2.0)
        assert place.swarm.nobody_there()

    at(scenario)


def test_the_trouble_lasts_until_the_last_peer_is_trusted_again() -> None:
    async def scenario(place: Place) -> None:
        place.sees(s0r0="training", s2r0="training")
        place.node.trouble(DISTRUST, "wrong gradients")
        place.swarm.members.distrust("s2r0", now=place.node.now(), for_s=10.0)
        place.sees(s0r0="training", s2r0="training")
        assert len(place.node.troubles(place.node.now())) == 1
        await asyncio.sleep(11.0)
        place.sees(s0r0="training", s2r0="training")
        assert place.node.troubles(place.node.now()) == ()

    at(scenario)


@pytest.mark.parametrize(
    ("routing", "silent", "origins"),
    [("balanced", 1, 3), ("balanced", 2, 1), ("random", 1, 2)],
)
def test_under_balanced_few_doubted_replicas_count(routing: str, silent: int, origins: int) -> None:
    async def scenario(place: Place) -> None:
        everybody = dict.fromkeys(("s0r0", "s0r1", "s0r2", "s1r0", "s2r0"), "training")
        place.says = dict(list(everybody.items())[silent:4])
        place.sees(**everybody)
        await asyncio.sleep(5.0)
        place.swarm.fix_view()
        view = place.swarm.view
        assert (len(view.origins), view.mates) == (origins, ("me", "s1r0"))
        assert view.following == ("s2r0",), "one of the next stage must serve, even if all are doubted"

    at(scenario, routing=routing)


def test_partners_are_replicas_of_this_stage_and_lineage_whose_interval_is_complete() -> None:
    async def scenario(place: Place) -> None:
        run, now = place.node.run_id, place.node.now()
        fields: dict[str, dict[str, Any]] = {
            "a": {}, "b": {"partner_from_round": 7}, "c": {"partner_from_round": 8}, "d": {"fresh_round": 3},
            "e": {"stage": 0}, "f": {"state": "paused"}, "g": {"state": "finished"}, "h": {"state": "waiting"},
        }  # fmt: skip
        usual: dict[str, Any] = {"stage": 1, "addresses": (), "state": "training", "announced_at": now}
        listed = [Advert(peer, run, **(usual | more)) for peer, more in fields.items()]
        place.swarm.members.update(listed, now=now)
        assert [a.peer_id for a in place.swarm.partners(7)] == ["a", "b", "g", "h"]
        for _ in range(2):
            place.swarm.members.failed("a", now=place.node.now())
            await asyncio.sleep(10.0)
        assert [a.peer_id for a in place.swarm.partners(7)] == ["b", "g", "h"]

    at(scenario)


def test_a_label_counts_only_as_far_as_its_origin_can_have_got() -> None:
    async def scenario(place: Place) -> None:
        place.sees(s0r0="training", s2r0="training")
        place.node.update(steps_per_s=1.0)
        await asyncio.sleep(10.0)
        m, step_of = place.node.manifest.outer.inner_steps, place.swarm.members.step_of
        place.swarm.heard(Origin("s0r0", 510, 0))
        assert step_of("s0r0") == 510
        place.swarm.heard(Origin("s0r0", 10**6, 0))
        assert step_of("s0r0") == 500 + 2 * max(m, 4) + 20
        place.swarm.heard(Origin("s0r9", 510, 0))
        assert step_of("s0r9") is None

    at(scenario)


def test_an_unlisted_caller_is_noted_until_the_next_reading() -> None:
    async def scenario(place: Place) -> None:
        woken = asyncio.create_task(place.node.waits.until(lambda: place.swarm.unlisted_called, "", Resource.SWARM))
        await asyncio.sleep(1.0)
        place.swarm.refused_unlisted()
        await asyncio.sleep(1.0)
        assert woken.done()
        assert [place.swarm.take_unlisted_call() for _ in range(2)] == [True, False]

    at(scenario)


@pytest.mark.parametrize("why", ["answers", "other", "drain", "pause", "end"])
def test_how_the_wait_for_a_silent_or_missing_stage_ends(why: str) -> None:
    """Two calls in a row without an answer make the next stage deserted; a later one must have left."""

    async def scenario(place: Place) -> None:
        node, swarm = place.node, place.swarm
        place.sees(s0r0="training", s1r0="training", s2r0="training")
        node.pause(True)
        assert not swarm.cut_short()
        node.pause(False)
        assert not await swarm.until_served(), "there was nothing to wait for"
        for _ in range(2):
            assert not swarm.nobody_there()
            swarm.failed("s1r0")
            await asyncio.sleep(10.0)
        assert list(swarm.deserted) == [1]
        assert not swarm.nobody_there(), "one that is silent may come back"
        woken = asyncio.create_task(node.waits.until(lambda: not swarm.deserted, "", Resource.SWARM))
        await asyncio.sleep(1.0)
        swarm.answered("s1r0")
        await asyncio.sleep(1.0)
        assert woken.done()
        assert list(swarm.deserted) == []
        place.sees(s0r0="training", s1r0="training", s2r0="left")
        assert (swarm.nobody_there(), swarm.cut_short(), swarm.is_left_behind()) == (True, False, False)
        waiting = asyncio.create_task(swarm.until_served())
        await asyncio.sleep(LINGER_S + 1.0)
        assert not waiting.done()
        if why == "drain":
            node.drain("told to leave")
        elif why == "pause":
            node.pause(True)
            assert swarm.cut_short()
        elif why == "end":
            swarm.run_ended = True
            node.waits.pulse()
        else:
            place.sees(s0r0="training", s1r0="training", **({"s2r0": "waiting"} if why == "answers" else {}))
        await asyncio.sleep(1.0)
        assert waiting.done() == (why != "other")
        assert why != "end" or not await swarm.until_served(), "nobody comes any more"
        assert why == "other" or waiting.result() == (why in ("answers", "end"))
        waiting.cancel()

    at(scenario, stage=0)


@pytest.mark.parametrize(
    ("left", "after_s", "behind"), [("s1r0", 0.0, True), ("s2r0", 0.0, False), ("s2r0", LINGER_S + 1.0, True)]
)
def test_when_stage_0_is_left_behind(left: str, after_s: float, behind: bool) -> None:
    async def scenario(place: Place) -> None:
        place.sees(**dict.fromkeys({"s0r0", "s1r0", "s2r0"} - {left}, "training"))
        assert not place.swarm.is_left_behind()
        place.swarm.run_ended = True
        await asyncio.sleep(after_s)
        assert place.swarm.is_left_behind() == behind

    at(scenario, stage=0)


@pytest.mark.parametrize("routing", ["weighted", "random"])
def test_a_view_has_those_that_have_their_weights_and_under_weighted_their_shares(routing: str) -> None:
    async def scenario(place: Place) -> None:
        later = {"s2r0": "waiting", "s2r1": "training", "s2r2": "finished", "s2r3": "starting"}
        place.says = {"s0r0": "training", "s1r0": "syncing"} | later
        place.sees(**place.says)
        await asyncio.sleep(5.0)
        place.swarm.fix_view()
        view = place.swarm.view
        assert (view.mates, view.following) == (("me", "s1r0"), ("s2r0", "s2r1"))
        assert bool(view.shares) == (view.my_share is not None) == (routing == "weighted")
        assert view.my_share in (None, 0.5)

    at(scenario, routing=routing)


@pytest.mark.parametrize("answering", [{"s2r0"}, {"s0r0"}, {"s1r0"}])
def test_only_of_the_next_stage_doubted_replicas_count_and_only_if_all_are(answering: set[PeerId]) -> None:
    async def scenario(place: Place) -> None:
        place.says = dict.fromkeys(answering, "training")
        place.sees(**dict.fromkeys(("s0r0", "s1r0", "s2r0", "s2r1"), "training"))
        await asyncio.sleep(5.0)
        place.swarm.fix_view()
        view = place.swarm.view
        assert set(view.origins) == answering & {"s0r0"}
        assert set(view.mates) == {"me"} | answering & {"s1r0"}
        assert set(view.following) == (answering & {"s2r0"} or {"s2r0", "s2r1"})

    at(scenario)


@pytest.mark.parametrize("state", ["syncing", "training", "paused", "finished", "draining"])
def test_only_a_node_that_needs_the_other_stages_looks_if_they_are_served(state: str) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(state=state)
        place.sees(s1r0="training", s2r0="training")
        assert list(place.swarm.deserted) == ([0] if state in ("syncing", "training") else [])
        assert not place.swarm.nobody_there(), "nothing that it sends goes to stage 0"

    at(scenario)


def test_a_reading_counts_this_node_and_who_came_and_went_and_asks_those_that_have_not_answered() -> None:
    async def scenario(place: Place) -> None:
        place.says = {"s1r0": "waiting"}
        place.sees(s1r0="training", s2r0="waiting")
        await asyncio.sleep(1.0)
        assert place.swarm.members.met == {"s1r0"}
        place.sees(s1r0="left", s2r0="waiting")
        counts = {(1, "training"): 2, (2, "waiting"): 1}, {(1, "training"): 1, (2, "waiting"): 1}
        first, second = [fields for kind, fields in place.events if kind == "membership"]
        assert first == {"counts": counts[0], "joined": 2, "departed": 0}
        assert second == {"counts": counts[1], "joined": 0, "departed": 1}

    at(scenario)


def test_a_node_that_has_answered_is_asked_again_when_it_is_listed_as_finished() -> None:
    async def scenario(place: Place) -> None:
        place.says = {"s0r0": "training"}
        place.sees(s0r0="training", s2r0="training")
        await asyncio.sleep(50.0)
        place.says = {"s0r0": "finished"}
        place.sees(s0r0="finished", s2r0="training")
        await asyncio.sleep(1.0)
        assert place.swarm.run_ended

    at(scenario)


@pytest.mark.parametrize(("last", "done"), [(True, False), (False, True)])
def test_the_time_for_the_last_microbatches_begins_when_this_node_learns_that_the_run_has_ended(
    last: bool, done: bool
) -> None:
    """It may have known long before that a node of stage 0 claims it."""

    async def scenario(place: Place) -> None:
        listed = {"s0r0": "finished", "s0r1": "training", "s2r0": "training"}
        for second in range(int(DEADLINE_S) + 2):
            place.sees(**listed)
            if second == (DEADLINE_S if last else 0):
                place.says = {"s0r0": "finished"}
                place.swarm.inquiry.forget()
            await asyncio.sleep(1.0)
        assert place.swarm.run_ended
        assert place.swarm.inquiry.is_silent("s0r1")
        assert place.swarm.first_stage_is_done() == done

    at(scenario)


@pytest.mark.parametrize(
    ("peer", "state", "fields", "done"),
    [
        ("s0r0", "training", {"outer_round": 1}, True),
        ("s0r0", "training", {"outer_round": 0}, False),
        ("s1r0", "training", {"outer_round": 1}, True),
        ("s1r0", "waiting", {"holds": (1, 3)}, False),
        ("s0r0", "waiting", {"holds": (0, 3)}, True),
        ("s0r0", "waiting", {"holds": (0, 0)}, False),
        ("s0r0", "training", {"holds": (2, 3)}, True),
    ],
)
def test_whether_any_node_has_shown_a_round(peer: PeerId, state: str, fields: dict[str, Any], done: bool) -> None:
    """Checkpoints of this node's own stage do not: those that wait for each other could all have them."""

    async def scenario(place: Place) -> None:
        if held := fields.pop("holds", None):
            fields["holds"] = (Holding(held[0], held[1], 10),)
        advert = Advert(peer, place.node.run_id, int(peer[1]), (), state=state, **fields)
        place.swarm.read([advert])
        assert place.swarm.rounds_done == done
        place.swarm.read([])
        assert place.swarm.rounds_done == done, "it may have gone"

    at(scenario)
