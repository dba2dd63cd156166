"""One guardian in isolation: what it keeps, what it forgets, and which replicas it asks."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.guardians import guardians_of
from noloco_p2p.core.messages import STREAM, Advert, Holding, NodeDescription, TensorSpec
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import TensorSpecs
from noloco_p2p.errors import Declined, Unreachable
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.node.guardian import AGAIN_S, EVERY_S, EVERY_STEPS, LONGER, REST, WAIT_S, Guardian
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Telemetry, Transport
from noloco_p2p.sim.virtual_time import run

STAGES = 3
WARD = 1
TTL_S = NodeConfig().directory.ttl_s
HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))
WEIGHTS = tuple(TensorSpec("weights", "bfloat16", (10 * (stage + 1),)) for stage in range(STAGES))


class Place:
    """A stage-0 node in training, whose peers give the answers in `answers`, and its running guardian."""

    def __init__(self, inner_steps: int) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []
        self.asked: list[tuple[str, int, int | None]] = []
        self.asked_at: list[float] = []
        self.may_wait_s: list[float] = []
        self.answers: dict[str, Snapshot | Exception] = {}
        self.takes_s = 0.0
        """Duration of each transfer, seconds."""
        self.silent: set[str] = set()
        """Peers that are listed, but do not answer when asked who they are."""
        outer = OuterSettings(rule="noloco", inner_steps=inner_steps)
        manifest = RunManifest(stages=STAGES, steps=100_000, outer=outer)
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.events.append((kind, fields)))
        advert = Advert("me", manifest.run_id, 0, ("127.0.0.1:1",), state="training", outer_round=3, step=30.0)
        self.node = NodeState(advert, manifest, NodeConfig(), cast(Telemetry, telemetry))
        self.swarm = Membership(self.node)
        self.members = self.swarm.members
        self.node.hold(
            cast(DeviceStage, SimpleNamespace(state=SimpleNamespace(weights=WEIGHTS, hidden=HIDDEN, gradient=HIDDEN)))
        )
        self.guardian = Guardian(self.node, self.swarm, cast(Transport, self))

    async def fetch_snapshot(
        self, peer: Advert, request: SnapshotRequest, deadline_s: float, expected: TensorSpecs
    ) -> Snapshot:
        assert expected == (WEIGHTS[request.stage],)
        assert (request.weights, deadline_s) == ("bfloat16", LONGER * self.node.manifest.outer.deadline_s)
        self.asked.append((peer.peer_id, request.stage, request.round))
        self.asked_at.append(self.node.now())
        self.may_wait_s.append(request.wait_s)
        await asyncio.sleep(self.takes_s)
        answer = self.answers.get(peer.peer_id, Declined("nothing to give"))
        if isinstance(answer, Exception):
            raise answer
        return replace(answer, took_s=self.takes_s)

    async def describe(self, peer: Advert) -> NodeDescription:
        if peer.peer_id in self.silent:
            raise Unreachable("nobody is there")
        said = peer.stage, peer.state, peer.step, peer.outer_round, "", peer.fresh_round
        return NodeDescription(peer.peer_id, peer.run_id, *said)

    def goes_on(self, round: int) -> None:
        """Let the node do the round, and enough steps that it asks again."""
        self.node.update(outer_round=round, step=self.node.advert.step + EVERY_STEPS)

    async def sees(self, *adverts: Advert) -> None:
        """Read the membership again; peers that are not listed have left."""
        gone = [a for a in self.members.all() if a.peer_id not in {b.peer_id for b in adverts}]
        left = [self.advert(a.peer_id, a.stage, "left") for a in gone]
        self.members.update([*adverts, *left], now=self.node.now())
        self.swarm.readings += 1
        self.node.waits.pulse()
        await asyncio.sleep(0.1)

    def advert(self, peer: str, stage: int, state: str = "training", *holds: Holding, round: int = 3) -> Advert:
        run_id = self.node.run_id
        return Advert(peer, run_id, stage, ("127.0.0.1:1",), state=state, holds=holds, outer_round=round, step=30.0)

    @property
    def holds(self) -> tuple[Holding, ...]:
        return self.node.advert.holds


def at(scenario: Callable[[Place], Awaitable[None]], inner_steps: int = 10) -> None:
    async def main() -> None:
        place = Place(inner_steps)
        answers = place.swarm.inquiry.run(cast(Transport, place), lambda: None)
        asking = asyncio.create_task(answers)
        guarding = asyncio.create_task(place.guardian.run())
        await scenario(place)
        assert not guarding.done(), "a guardian never ends"
        asking.cancel()
        guarding.cancel()

    run(main(), limit_s=1000)


def snapshot(peer: str, round: int, step: int = 30) -> Snapshot:
    return Snapshot(peer, round, step, ())


def test_it_pulls_what_is_new_once_and_only_what_is_newer_replaces() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        await place.sees(place.advert("w", WARD))
        assert place.holds == (Holding(WARD, 3, 30),)
        await place.sees(place.advert("w", WARD))
        assert place.asked == [("w", WARD, 3)], "there can be nothing new"
        place.answers["w"] = snapshot("w", 2, 20)
        place.goes_on(4)
        await place.sees(place.advert("w", WARD))
        await place.sees(place.advert("w", WARD))
        place.node.update(step=place.node.advert.step + EVERY_STEPS)
        await place.sees(place.advert("w", WARD))
        assert place.asked[1:] == [("w", WARD, 4)], "it answered with what it had, and has announced nothing new since"
        assert place.guardian.snapshot_of(WARD) == snapshot("w", 3)
        place.answers["w"] = snapshot("w", 5, 50)
        place.goes_on(4)
        await place.sees(place.advert("w", WARD, round=5))
        assert place.holds == (Holding(WARD, 5, 50),)
        assert [fields for kind, fields in place.events if kind == "guarded"] == [
            {"stage": WARD, "round": 3, "bytes": 0},
            {"stage": WARD, "round": 5, "bytes": 0},
        ]

    at(scenario)


def test_weights_that_began_afresh_replace_what_is_kept_only_once_they_have_trained_for_longer() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        await place.sees(place.advert("w", WARD))
        for round, kept in ((4, 3), (6, 3), (8, 8)):
            place.answers["w"] = replace(snapshot("w", round, 10 * round), fresh_round=4)
            place.goes_on(round)
            await place.sees(place.advert("w", WARD, round=round))
            assert [held.round for held in place.holds] == [kept]

    at(scenario)


def test_a_node_that_has_stood_still_pulls_nothing_until_it_knows_how_far_the_others_are() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        for still in (True, False):
            place.node.stand_still(still)
            await place.sees(place.advert("w", WARD))
            assert bool(place.asked) != still

    at(scenario)


def test_what_is_new_during_a_rest_is_pulled_when_it_ends_without_further_news() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"], place.takes_s = snapshot("w", 3), 1.0
        await place.sees(place.advert("w", WARD))
        await asyncio.sleep(2.0)
        place.goes_on(4)
        await place.sees(place.advert("w", WARD, round=4))
        await asyncio.sleep(REST + 2.0)
        assert place.asked_at == pytest.approx([0.0, REST], abs=2.0)

    at(scenario)


def test_the_guardians_of_a_stage_ask_its_replicas_in_turn_and_not_the_same_one_at_a_time() -> None:
    first: dict[int, list[str]] = {}

    async def scenario(place: Place) -> None:
        ward = [place.advert(peer, WARD) for peer in "vw"]
        for rival in (f"p{number}" for number in range(20)):
            mate = place.advert(rival, 2)
            at = guardians_of(WARD, [*ward, mate, place.node.advert], place.node.manifest.seed).index("me")
            await place.sees(*ward, mate)
            first[at] = [place.guardian._in_turn(WARD, ward, round)[0].peer_id for round in range(4, 8)]

    at(scenario)
    assert sorted(first) == [0, 1]
    assert first[0] in (["v", "w"] * 2, ["w", "v"] * 2)
    assert first[1] == first[0][::-1]


def test_a_round_that_no_clock_has_come_to_is_not_kept() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 2**53, 2**53)
        await place.sees(place.advert("w", WARD, round=2**53))
        place.answers["w"] = snapshot("w", 3, 2**53)
        await place.sees(place.advert("w", WARD, round=4))
        assert place.guardian.snapshot_of(WARD) is None
        place.answers["w"] = snapshot("w", 5, 50)
        await place.sees(place.advert("w", WARD, round=5))
        assert place.holds == (Holding(WARD, 5, 50),), "otherwise it would refuse everything newer"

    at(scenario)


def test_before_the_first_round_there_is_nothing_to_guard() -> None:
    async def scenario(place: Place) -> None:
        place.node.update(outer_round=0)
        await place.sees(place.advert("w", WARD, round=0))
        assert place.asked == []
        await place.sees(place.advert("w", WARD, round=1))
        assert place.asked == [("w", WARD, 1)]

    at(scenario)


def test_the_other_replica_is_asked_when_one_fails_or_gives_what_is_not_its_own() -> None:
    async def scenario(place: Place) -> None:
        for wrong in (Unreachable("gone"), snapshot("somebody else", 9)):
            place.goes_on(place.node.advert.outer_round + 2)
            round = place.node.advert.outer_round
            place.answers = {"v": wrong, "w": wrong}
            place.asked.clear()
            await place.sees(place.advert("v", WARD), place.advert("w", WARD))
            assert sorted(peer for peer, _, _ in place.asked) == ["v", "w"]
            assert place.members.is_aside("v", now=place.node.now()) == isinstance(wrong, Snapshot), (
                "only the peer that lies, not the one that is late"
            )
            place.answers["v"] = snapshot("v", round)
            place.asked.clear()
            await place.sees(place.advert("v", WARD), place.advert("w", WARD))
            assert place.holds == (Holding(WARD, round, 30),)
            place.members.answered("v")
            place.members.answered("w")
        assert all(kind in ("warning", "guarded", "guards") for kind, _ in place.events)

    at(scenario)


def test_a_guardian_that_nobody_can_dial_first_asks_replicas_that_need_no_relay() -> None:
    async def scenario(place: Place) -> None:
        place.node.update(addresses=("127.0.0.1:1", STREAM))
        hidden = replace(place.advert("v", WARD), addresses=(STREAM,))
        for round in (4, 5):
            place.asked.clear()
            place.goes_on(round)
            await place.sees(hidden, place.advert("w", WARD))
            assert [peer for peer, _, _ in place.asked] == ["w", "v"], "turns matter less than relays"

    at(scenario)


@pytest.mark.parametrize(("states", "silent", "guarded"), [
    ([], "", True),
    (["waiting"], "", True),
    (["starting", "syncing"], "", True),
    (["training"], "", True),
    (["paused"], "", True),
    (["draining", "finished"], "", True),
    (["training", "training", "syncing"], "", True),
    (["training", "training", "draining"], "", True),
    (["training", "training", "paused"], "", False),
    (["training", "training", "paused"], "w0", True),
    (["training", "training", "paused", "finished"], "w1", False),
])  # fmt: skip
def test_only_a_stage_of_at_most_two_replicas_that_answer_is_guarded(
    states: list[str], silent: str, guarded: bool
) -> None:
    async def scenario(place: Place) -> None:
        place.silent = {silent}
        for _ in range(2):
            await place.sees(*(place.advert(f"w{i}", WARD, state) for i, state in enumerate(states)))
        assert (WARD in place.guardian._wards()) == guarded

    at(scenario)


def test_what_is_held_is_kept_until_all_new_guardians_list_it() -> None:
    async def scenario(place: Place) -> None:
        ward = place.advert("w", WARD)
        place.answers["w"] = snapshot("w", 3)
        await place.sees(ward)
        names = [f"p{i}" for i in range(40)]
        seen = [place.advert(peer, 2) for peer in names]
        better = guardians_of(WARD, [ward, place.node.advert, *seen], place.node.manifest.seed)
        assert "me" not in better, "draw other names"
        one, other = better
        held, older = Holding(WARD, 3, 30), Holding(WARD, 2, 20)
        await place.sees(ward, place.advert(one, 2), place.advert(other, 2))
        assert place.holds == (held,)
        await place.sees(ward, place.advert(one, 2, "training", held), place.advert(other, 2, "training", older))
        assert place.holds == (held,), "one of them may die with the ward"
        await place.sees(place.advert(one, 2, "training", held), place.advert(other, 2, "training", older))
        assert place.holds == (held,), "a stage that nobody holds has guardians, too"
        third = next(peer for peer in names if peer not in better)
        safe = [ward, *(place.advert(peer, 2, "training", held) for peer in (one, other, third))]
        place.silent.add(other)
        await place.sees(*safe)
        assert place.holds == (held,), "one of them does not answer"
        place.silent.clear()
        await asyncio.sleep(TTL_S)
        for _ in range(2):
            await place.sees(*safe)
        assert len(place.holds) == 0
        assert place.guardian.snapshot_of(WARD) is None

    at(scenario)


def test_a_ward_that_has_few_replicas_again_before_its_next_round_is_guarded_at_once() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        await place.sees(place.advert("w", WARD))
        for _ in range(2):
            await place.sees(*(place.advert(peer, WARD) for peer in "wxy"))
        assert not place.holds
        await place.sees(place.advert("w", WARD))
        assert place.holds == (Holding(WARD, 3, 30),)

    at(scenario)


def test_what_is_held_is_kept_while_the_new_guardians_list_only_weights_that_began_afresh() -> None:
    async def scenario(place: Place) -> None:
        ward, names = place.advert("w", WARD), [f"p{i}" for i in range(40)]
        everybody = [ward, place.node.advert, *(place.advert(peer, 2) for peer in names)]
        one, other = guardians_of(WARD, everybody, place.node.manifest.seed)
        place.answers["w"] = replace(snapshot("w", 3), fresh_round=1)
        await place.sees(ward)
        held = Holding(WARD, 3, 30, 1)
        assert place.holds == (held,)
        later = Holding(WARD, 9, 90, 8)
        await place.sees(ward, place.advert(one, 2, "training", held), place.advert(other, 2, "training", later))
        assert place.holds == (held,)
        await place.sees(ward, place.advert(one, 2, "training", held), place.advert(other, 2, "training", held))
        assert len(place.holds) == 0

    at(scenario)


def test_what_is_held_is_kept_while_even_many_replicas_have_only_weights_that_began_afresh() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        await place.sees(place.advert("w", WARD))
        for round, older, kept in ((5, 0, True), (6, 2, True), (7, 0, False)):
            place.goes_on(round)
            began = [3] * older + [4] * (3 - older)
            fresh = [
                replace(place.advert(peer, WARD, round=round), fresh_round=at)
                for peer, at in zip("uvx", began, strict=True)
            ]
            for _ in range(3):
                await place.sees(*fresh)
                await asyncio.sleep(100.0)
            assert bool(place.holds) == kept

    at(scenario)


def test_the_weights_of_a_stage_that_nobody_holds_are_copied_once_from_the_guardian_with_the_best() -> None:
    async def scenario(place: Place) -> None:
        best, older = Holding(WARD, 3, 30), Holding(WARD, 2, 20)
        place.answers = {"p": snapshot("w", 3), "q": snapshot("w", 2, 20), "v": snapshot("v", 9, 90)}
        mate = place.advert("v", WARD, "syncing", Holding(WARD, 3, 33))
        for _ in range(3):
            await place.sees(place.advert("p", 2, "draining", best), place.advert("q", 2, "training", older), mate)
            assert place.holds == (best,)
            asked = [peer for peer, stage, _ in place.asked if stage == WARD]
            assert asked == ["p"], "not the node that may take the stage: that is its own checkpoint"

    at(scenario)


def test_better_weights_of_a_stage_that_nobody_holds_are_copied_when_they_appear_but_not_during_a_rest() -> None:
    async def scenario(place: Place) -> None:
        place.answers, place.takes_s = {"p": snapshot("w", 3), "q": snapshot("w", 4, 40)}, 1.0
        worse, better = place.advert("p", 2, "training", Holding(WARD, 3, 30)), Holding(WARD, 4, 40)
        await place.sees(worse)
        await asyncio.sleep(2.0)
        both = worse, place.advert("q", 2, "training", better)
        for after_s, held in ((1.0, 3), (3 * REST, 4)):
            await asyncio.sleep(after_s)
            await place.sees(*both)
            await asyncio.sleep(2.0)
            assert [one.round for one in place.holds if one.stage == WARD] == [held]

    at(scenario)


def test_the_weights_of_a_stage_that_nobody_holds_are_copied_from_another_guardian_if_one_has_died() -> None:
    async def scenario(place: Place) -> None:
        held, impossible = Holding(WARD, 3, 30), Holding(WARD, 2**53, 2**53)
        place.answers = {"q": snapshot("w", 3)}
        listed = (("l", impossible), ("p", held), ("q", held))
        await place.sees(*(place.advert(peer, 2, "training", what) for peer, what in listed))
        assert [peer for peer, stage, _ in place.asked if stage == WARD] == ["p", "q"]
        assert place.holds == (held,)

    at(scenario)


def test_the_stage_that_the_node_moves_to_is_kept_until_it_has_its_weights() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        await place.sees(place.advert("w", WARD))
        place.node.update(stage=WARD, state="syncing")
        await place.sees()
        assert place.guardian.snapshot_of(WARD) == snapshot("w", 3), "perhaps no other node has them"
        for _ in range(2):
            await place.sees(*(place.advert(peer, WARD) for peer in "uvw"))
            assert place.guardian.snapshot_of(WARD) == snapshot("w", 3), "those that have them may not give them"
        place.node.update(state="training")
        await place.sees()
        assert place.guardian.snapshot_of(WARD) is None

    at(scenario)


def test_a_node_that_moves_still_lists_its_own_checkpoints_of_its_new_stage_until_it_has_its_weights() -> None:
    """Others of that stage wait for a node with newer weights than their own."""

    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        await place.sees(place.advert("w", WARD))
        own, guarded = Holding(2, 5, 50), Holding(WARD, 3, 30)
        place.node.update(stage=2, state="syncing", holds=(own,))
        for _ in range(2):
            await place.sees(place.advert("w", WARD))
            assert place.holds == (own, guarded)
        for _ in range(2):
            await place.sees(*(place.advert(peer, WARD) for peer in "uvw"))
        assert place.holds == (own,), "what is safe with others it holds no longer"
        place.node.update(state="training")
        await place.sees(place.advert("w", WARD))
        assert place.holds == (guarded,)

    at(scenario)


def test_a_leaving_ward_is_asked_until_its_final_snapshot_is_here() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        await place.sees(place.advert("w", WARD))
        await place.sees(place.advert("w", WARD, "draining"))
        assert place.asked == [("w", WARD, 3), ("w", WARD, 4)]
        assert place.may_wait_s == [WAIT_S, AGAIN_S]
        place.answers["w"] = snapshot("w", 4, 33)
        await asyncio.sleep(5.0)
        assert place.holds == (Holding(WARD, 4, 33),)
        count = len(place.asked)
        await asyncio.sleep(20.0)
        assert len(place.asked) == count <= 4, "and not after that"

    at(scenario)


def test_a_paused_ward_is_asked_only_once_though_it_gives_no_newer_weights() -> None:
    """It may be paused for the night, and a guardian asks one that leaves every two seconds."""

    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        await place.sees(place.advert("w", WARD))
        for _ in range(3):
            await place.sees(place.advert("w", WARD, "paused"))
            await asyncio.sleep(100.0)
        assert place.asked == [("w", WARD, 3), ("w", WARD, 4)]
        await place.sees(place.advert("w", WARD, "draining"))
        assert place.asked[2:] == [("w", WARD, 4)]

    at(scenario)


@pytest.mark.parametrize("mates", ["", "v"])
def test_a_ward_that_pauses_twice_within_a_round_is_asked_for_what_it_has_trained_between(mates: str) -> None:
    async def scenario(place: Place) -> None:
        paused = [place.advert(mate, WARD, "paused") for mate in mates]
        for step in (33, 37):
            place.answers["w"] = snapshot("w", 4, step)
            await place.sees(replace(place.advert("w", WARD, "paused"), step=step + 0.5), *paused)
            assert place.holds == (Holding(WARD, 4, step),)
            await place.sees(replace(place.advert("w", WARD), step=step + 0.5), *paused)

    at(scenario)


@pytest.mark.parametrize("other", ["draining", "paused"])
def test_of_replicas_that_leave_together_the_one_that_got_furthest_is_asked_until_it_gives_its_last_weights(
    other: str,
) -> None:
    """The last snapshots of all have the number of the next round."""

    async def scenario(place: Place) -> None:
        place.answers = {"v": snapshot("v", 4, 31), "w": Declined("not yet")}
        last = replace(place.advert("w", WARD, "draining"), step=33.5)
        await place.sees(replace(place.advert("v", WARD, other), step=31.0), last)
        assert [peer for peer, _, _ in place.asked][:2] == ["w", "v"]
        assert place.holds == (Holding(WARD, 4, 31),)
        place.answers["w"] = snapshot("w", 4, 33)
        await asyncio.sleep(2 * AGAIN_S)
        assert place.holds == (Holding(WARD, 4, 33),)
        count = len(place.asked)
        await asyncio.sleep(20.0)
        assert len(place.asked) == count

    at(scenario)


def test_weights_of_the_stage_to_which_the_node_moves_while_they_are_pulled_are_not_kept() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"], place.takes_s = snapshot("w", 3), 1.0
        await place.sees(place.advert("w", WARD))
        place.node.update(stage=WARD, state="syncing")
        await asyncio.sleep(2.0)
        assert place.asked == [("w", WARD, 3)]
        assert place.guardian.snapshot_of(WARD) is None
        assert place.holds == ()

    at(scenario)


def test_the_rests_after_the_pulls_from_two_wards_add_up() -> None:
    """Otherwise a node that guards many stages would do nothing else."""

    async def scenario(place: Place) -> None:
        place.takes_s = 1.0

        async def trains_for(seconds: int) -> list[float]:
            began, count = place.node.now(), len(place.asked)
            for second in range(seconds):
                round = place.node.advert.outer_round + 1
                place.goes_on(round)
                place.answers = {peer: snapshot(peer, round, place.node.step) for peer in "uw"}
                await place.sees(place.advert("w", WARD, round=round), place.advert("u", 2, round=round))
                await asyncio.sleep(began + second + 1.0 - place.node.now())
            return [at_s - began for at_s in place.asked_at[count:]]

        rest_s = 2 * REST  # each has two guardians
        assert await trains_for(130) == pytest.approx([0.0, 1.0, 2 * rest_s, 3 * rest_s], abs=2.0)
        await asyncio.sleep(200.0)
        assert await trains_for(50) == pytest.approx([0.0, rest_s], abs=2.0)

    at(scenario)


def test_a_leaving_replica_is_asked_for_its_last_weights_though_one_that_has_died_is_listed_as_training() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        place.members.update([place.advert("v", WARD), place.advert("w", WARD)], now=place.node.now())
        place.swarm.inquiry.ask(place.members.all())
        await place.sees(place.advert("v", WARD), place.advert("w", WARD))
        assert place.holds == (Holding(WARD, 3, 30),)
        await asyncio.sleep(AGAIN_S)
        place.silent.add("v")
        place.answers["w"] = snapshot("w", 4, 33)
        await place.sees(place.advert("v", WARD), place.advert("w", WARD, "draining"))
        assert place.holds == (Holding(WARD, 4, 33),)

    at(scenario)


def test_a_replica_that_stays_is_asked_before_one_that_leaves() -> None:
    async def scenario(place: Place) -> None:
        place.answers = {"v": snapshot("v", 4), "w": snapshot("w", 4)}
        for round in (4, 5):
            place.goes_on(round)
            await place.sees(place.advert("v", WARD, "draining"), place.advert("w", WARD))
        assert [peer for peer, _, _ in place.asked] == ["w", "w"]

    at(scenario)


def test_the_last_weights_of_a_replica_that_leaves_come_before_older_ones_of_a_paused_one() -> None:
    async def scenario(place: Place) -> None:
        place.answers = {"v": snapshot("v", 3, 30), "w": snapshot("w", 5, 44)}
        paused = replace(place.advert("v", WARD, "paused", round=2), step=30.0)
        await place.sees(paused, replace(place.advert("w", WARD, "draining", round=4), step=44.0))
        assert place.asked == [("w", WARD, 5)]
        assert place.holds == (Holding(WARD, 5, 44),)

    at(scenario)


def test_guarding_takes_a_twentieth_of_the_line_and_less_where_guardians_share_a_replica() -> None:
    async def scenario(place: Place) -> None:
        place.takes_s = 2.0
        names = ["w", "v"]
        for count, others, duty in ((1, [], 20), (1, ["p"], 40), (2, ["p"], 20)):
            place.asked.clear()
            wards, rivals = names[:count], [place.advert(peer, 2) for peer in others]
            began, first = place.node.now(), place.node.advert.outer_round + 1
            for round in range(first, first + 300):
                place.goes_on(round)
                place.answers = {peer: snapshot(peer, round) for peer in wards}
                await place.sees(*(place.advert(peer, WARD, round=round) for peer in wards), *rivals)
                await asyncio.sleep(0.9)
            pulls = [one for one in place.asked if one[1] == WARD]
            share = len(pulls) * place.takes_s / (place.node.now() - began)
            assert 0.8 / duty <= share <= 1.1 / duty, f"{len(pulls)} pulls of {wards} with {others}"
            place.members.update([], now=place.node.now())

    at(scenario)


def test_weights_are_pulled_again_after_some_steps_or_after_a_minute_however_many_rounds_there_are() -> None:
    async def scenario(place: Place) -> None:
        for step_s in (0.5, 20.0):
            place.asked.clear()
            began, rounds = place.node.now(), round(100 * EVERY_S / step_s / 60)
            for number in range(place.node.advert.outer_round + 1, place.node.advert.outer_round + 1 + rounds):
                place.node.update(outer_round=number, step=place.node.advert.step + 1)
                place.answers["w"] = snapshot("w", number)
                await place.sees(place.advert("w", WARD, round=number))
                await asyncio.sleep(step_s - 0.1)
            between_s = (place.node.now() - began) / len(place.asked)
            assert 0.8 < between_s / min(EVERY_S, EVERY_STEPS * step_s) < 1.3, step_s

    at(scenario, inner_steps=1)


def test_no_ward_waits_for_ever_because_another_has_news_after_every_rest() -> None:
    async def scenario(place: Place) -> None:
        place.takes_s = 0.5
        for round in range(4, 304):
            place.goes_on(round)
            place.answers = {"w": snapshot("w", round), "v": snapshot("v", round)}
            await place.sees(place.advert("w", WARD, round=round), place.advert("v", 2, round=round))
            await asyncio.sleep(0.9)
        asked = [peer for peer, _, _ in place.asked]
        assert len(asked) > 10
        assert abs(asked.count("w") - asked.count("v")) <= 1, asked

    at(scenario)


def test_the_first_weights_of_a_ward_and_the_last_ones_do_not_wait_for_a_rest() -> None:
    async def scenario(place: Place) -> None:
        place.takes_s = 5.0
        place.answers = {"w": snapshot("w", 3), "v": snapshot("v", 3)}
        await place.sees(place.advert("w", WARD), place.advert("v", 2))
        await asyncio.sleep(11.0)
        assert [peer for peer, _, _ in place.asked] == ["w", "v"]
        place.goes_on(4)
        await place.sees(place.advert("w", WARD, round=4), place.advert("v", 2))
        await asyncio.sleep(50.0)
        assert len(place.asked) == 2, "it rests"
        place.answers["w"] = snapshot("w", 5, 44)
        await place.sees(place.advert("w", WARD, "draining", round=4), place.advert("v", 2))
        await asyncio.sleep(6.0)
        assert place.asked[2:] == [("w", WARD, 5)]
        assert Holding(WARD, 5, 44) in place.holds

    at(scenario)


def test_weights_that_come_too_slowly_are_paid_for_too() -> None:
    async def scenario(place: Place) -> None:
        place.takes_s = place.node.manifest.outer.deadline_s
        place.answers["w"] = Unreachable("no whole weights")
        await place.sees(place.advert("w", WARD))
        for _ in range(600):
            place.members.answered("w")
            await place.sees(place.advert("w", WARD))
            await asyncio.sleep(1.0)
        assert len(place.asked) == 1

    at(scenario)


def test_a_ward_that_has_finished_is_not_asked() -> None:
    async def scenario(place: Place) -> None:
        place.answers["w"] = snapshot("w", 3)
        await place.sees(place.advert("w", WARD, "finished"))
        assert place.asked == []
        await place.sees(place.advert("v", WARD), place.advert("w", WARD, "finished"))
        assert place.holds == (Holding(WARD, 3, 30),), "another replica has not, and may be lost"

    at(scenario)
