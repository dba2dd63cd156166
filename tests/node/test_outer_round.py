"""The outer rounds of one replica, border by border: what it freezes, merges and waits for."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.agreement import GroupView
from noloco_p2p.core.lattice_format import LatticeRequest
from noloco_p2p.core.messages import Advert, HostTensor, PeerId, TensorSpec
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest
from noloco_p2p.errors import Declined, LocalError, Unreachable, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

M, STEPS = 4, 40
HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))
NOTHING = HostTensor("vector", "float32", (0,), memoryview(b""))


class Place:
    """A replica with mates, b by default, whose vectors arrive when `comes` is set."""

    def __init__(self, mates: str = "b", **outer: Any) -> None:
        fields: dict[str, Any] = {"rule": "noloco", "inner_steps": M, "deadline_s": 60.0} | outer
        settings = OuterSettings(**fields)
        manifest = RunManifest(steps=STEPS, outer=settings)
        me = Advert("me", manifest.run_id, 0, (), state="training")
        self.events: list[tuple[str, dict[str, Any]]] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.events.append((kind, fields)), span=self._span)
        self.node = NodeState(me, manifest, NodeConfig(), cast(Any, telemetry))
        self.state: Any = SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN, lattice=None, answer=lambda _: ())
        self.node.hold(cast(Any, self))
        self.common, self.digest = bool(settings.update.common), 7
        self.swarm = Membership(self.node)
        self.members = self.swarm.members
        self.members.update([Advert(peer, manifest.run_id, 0, (), state="training") for peer in mates], now=0.0)
        for peer in mates:
            self.members.answered(peer)
        self.comes = asyncio.Event()
        self.answers: dict[PeerId, Exception | int] = {}
        """What comes of a mate: an error, or a vector of this round instead of that of the request."""
        self.asked: list[tuple[PeerId, int | None, float]] = []
        self.frozen: list[int] = []
        self.merged: list[tuple[int, list[PeerId]]] = []
        self.closed = 0
        self.rounds = OuterRounds(self.node, self.swarm, cast(Any, self), self.close_intake)

    @staticmethod
    def _span(_: str) -> Any:
        return nullcontext()

    # As in the ports.

    async def fetch_snapshot(self, peer: Advert, request: SnapshotRequest, _: float, expected: object) -> Snapshot:
        self.asked.append((peer.peer_id, request.round, request.wait_s))
        await self.comes.wait()
        answer = self.answers.get(peer.peer_id, request.round)
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return Snapshot(peer.peer_id, answer, 0, (), GroupView(("b", "me"), 7) if self.common else None)

    async def snapshot(self, round: int, step: int) -> FrozenRound:
        self.frozen.append(round)
        view = GroupView((), self.digest) if self.common else None
        return FrozenRound("me", round, step, NOTHING, NOTHING, self.node.inner_steps, view=view)

    async def encode(self, frozen: FrozenRound, request: object, caller: PeerId) -> Snapshot:
        return Snapshot("me", frozen.round, frozen.step, ())

    async def decode(self, mine: FrozenRound, request: object, theirs: Snapshot, before: object) -> PartnerVector:
        return PartnerVector(theirs.peer, theirs.round, theirs.step, NOTHING, NOTHING, view=theirs.view)

    async def merge(self, mine: FrozenRound, theirs: tuple[PartnerVector, ...], counted: bool) -> None:
        self.merged.append((mine.round, [one.peer for one in theirs]))

    # The node.

    def close_intake(self) -> None:
        self.closed += 1

    async def border(self, step: float) -> None:
        self.node.update(step=float(step))
        self.node.inner_steps = int(step)
        await self.rounds.at_border()
        await asyncio.sleep(0.1)

    @property
    def results(self) -> list[str]:
        return [str(fields["result"]) for kind, fields in self.events if kind == "outer_round"]

    @property
    def done(self) -> int:
        return self.node.advert.outer_round


def at(scenario: Callable[[Place], Awaitable[None]], **outer: Any) -> None:
    async def main() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        place = Place(**outer)
        await scenario(place)
        await place.rounds.forget()
        assert not failures
        assert len(asyncio.all_tasks()) <= 2, "no pull is left"

    virtual_time.run(main(), limit_s=10_000)


def test_a_replica_trains_on_until_its_partner_s_vector_is_there() -> None:
    async def scenario(place: Place) -> None:
        for step in range(1, M + 3):
            assert await place.rounds.before_step() == 0.0
            await place.border(step)
        assert (place.frozen, place.merged, place.done) == ([1], [], 0)
        place.comes.set()
        await asyncio.sleep(1.0)
        await place.border(M + 3)
        assert (place.frozen, place.merged, place.done) == ([1], [(1, ["b"])], 1)
        assert place.results == ["partner"]
        [found] = [fields for kind, fields in place.events if kind == "outer_round"]
        assert (found["trained"], found["partner"]) == (3, "b")
        assert found["seconds"] > 1.0
        await place.border(M + 3)
        assert (place.closed, len(place.merged)) == (0, 1)
        assert place.rounds._open is None, "the vector does not stay in memory until the next round"

    at(scenario)


def test_a_pull_that_is_late_serves_the_next_round_until_it_is_too_old() -> None:
    async def scenario(place: Place) -> None:
        for round in range(1, 5):
            await place.border(round * M)
        assert place.merged == [(1, []), (2, []), (3, [])]
        assert place.results == ["alone"] * 3
        assert [round for _, round, _ in place.asked] == [1, 4], "at the fourth it begins anew"
        place.comes.set()
        await asyncio.sleep(1.0)
        await place.border(4 * M + 1)
        assert place.merged[3:] == [(4, ["b"])]
        assert place.done == 4

    at(scenario, max_stale_rounds=2)


@pytest.mark.parametrize(("round", "merged", "result"), [(1, ["b"], "stale"), (0, [], "alone")])
def test_the_vector_of_an_earlier_round_is_merged_as_stale_unless_it_is_too_old(
    round: int, merged: list[PeerId], result: str
) -> None:
    async def scenario(place: Place) -> None:
        place.answers["b"] = round
        for due in (1, 2, 3):
            await place.border(due * M)
        place.comes.set()
        await asyncio.sleep(1.0)
        await place.border(3 * M + 1)
        assert (place.merged, place.results) == ([(1, []), (2, []), (3, merged)], ["alone", "alone", result])

    at(scenario, max_stale_rounds=2)


def test_under_a_lasting_rule_an_open_round_lasts_and_others_are_only_frozen() -> None:
    async def scenario(place: Place) -> None:
        for step in (1, 2, 3):
            await place.border(step)
            assert place.done == step, "others need not wait for the merge"
        assert (place.frozen, place.merged, len(place.asked)) == ([1, 2, 3], [], 1)
        place.comes.set()
        await asyncio.sleep(1.0)
        await place.border(4)
        assert place.merged == [(1, ["b"])]
        assert (place.frozen, len(place.asked)) == ([1, 2, 3, 4], 2), "and the next one begins"

    at(scenario, rule="gossip", inner_steps=1, max_stale_rounds=4)


def test_under_a_lasting_rule_a_round_that_is_too_old_is_given_up() -> None:
    async def scenario(place: Place) -> None:
        for step in (1, 2, 3, 4):
            await place.border(step)
        assert (place.merged, [round for _, round, _ in place.asked]) == ([(1, [])], [1, 4])
        assert place.done == 4, "the newest one that it has frozen"

    at(scenario, rule="gossip", inner_steps=1, max_stale_rounds=2)


@pytest.mark.parametrize(("overlap", "step"), [(False, M), (True, STEPS)])
def test_without_overlap_and_at_the_end_it_waits_and_takes_nothing_meanwhile(overlap: bool, step: int) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(outer_round=step // M - 1)
        border = asyncio.create_task(place.border(step))
        await asyncio.sleep(7.0)
        assert (border.done(), place.closed, place.merged) == (False, 1, [])
        place.comes.set()
        await border
        assert place.merged == [(step // M, ["b"])]
        assert [fields["seconds"] for kind, fields in place.events if kind == "idle"] == [pytest.approx(7.0)]

    at(scenario, overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_node_that_leaves_waits_no_longer_and_begins_no_round(overlap: bool) -> None:
    async def scenario(place: Place) -> None:
        border = asyncio.create_task(place.border(M))
        await asyncio.sleep(7.0)
        place.node.drain("told to leave")
        await border
        await place.border(2 * M)
        assert place.rounds._open is None, "nobody needs the vector any more"
        await place.rounds.end("leaving")
        assert (place.frozen, place.merged) == ([1], [(1, [])])
        [found] = [fields for kind, fields in place.events if kind == "outer_round"]
        assert found["reason"] == ("late" if overlap else "leaving")

    at(scenario, overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", ["diloco", "dct"])
def test_a_node_that_leaves_does_not_merge_alone_what_all_must_merge_alike(rule: str, overlap: bool) -> None:
    async def scenario(place: Place) -> None:
        border = asyncio.create_task(place.border(M))
        await asyncio.sleep(7.0)
        place.node.drain("told to leave")
        await border
        await place.rounds.end("leaving")
        assert (place.frozen, place.merged, place.done) == ([1], [], 0), "it is due again"

    at(scenario, rule=rule, inner_steps=M, overlap=overlap)


def test_a_node_that_leaves_merges_what_has_arrived() -> None:
    async def scenario(place: Place) -> None:
        await place.border(M)
        place.comes.set()
        await asyncio.sleep(1.0)
        place.node.drain("told to leave")
        assert await place.rounds.end("leaving") == 0.0
        assert await place.rounds.end("leaving") == 0.0
        assert place.merged == [(1, ["b"])]

    at(scenario)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_replica_without_a_partner_merges_at_once(overlap: bool) -> None:
    async def scenario(place: Place) -> None:
        await place.border(M)
        assert (place.merged, place.done, place.asked) == ([(1, [])], 1, [])
        assert sum(fields["seconds"] for kind, fields in place.events if kind == "idle") == 0.0

    at(scenario, mates="", overlap=overlap)


def test_rounds_with_all_wait_for_all() -> None:
    async def scenario(place: Place) -> None:
        border = asyncio.create_task(place.border(M))
        await asyncio.sleep(7.0)
        assert (border.done(), place.closed) == (False, 1)
        place.comes.set()
        await border
        assert (place.merged, place.results, place.done) == ([(1, ["b"])], ["all"], 1)

    at(scenario, rule="diloco", inner_steps=M)


def test_an_open_round_with_all_is_waited_for_when_the_next_one_is_due() -> None:
    async def scenario(place: Place) -> None:
        await place.border(M)
        await place.border(M + 1)
        assert (place.closed, place.merged) == (0, [])
        border = asyncio.create_task(place.border(2 * M))
        await asyncio.sleep(7.0)
        assert (border.done(), place.closed, place.frozen) == (False, 1, [1])
        place.comes.set()
        await border
        assert (place.merged, place.frozen) == ([(1, ["b"])], [1, 2])

    at(scenario, rule="diloco", inner_steps=M, overlap=True, max_stale_rounds=2)


def test_a_replica_that_differs_merges_nothing_and_knows_whom_to_copy() -> None:
    async def scenario(place: Place) -> None:
        place.comes.set()
        place.digest = 8
        await place.border(M)
        assert (place.merged, place.rounds.ahead, place.done) == ([], ("b",), 0)
        place.digest = 7
        await place.border(M)
        assert (place.merged, place.rounds.ahead, place.done) == ([(1, ["b"])], (), 1)

    at(scenario, rule="diloco", inner_steps=M)


def test_gradients_are_added_up_before_the_step_and_rounds_follow_the_clock() -> None:
    async def scenario(place: Place) -> None:
        step = asyncio.create_task(place.rounds.before_step())
        await asyncio.sleep(7.0)
        assert (step.done(), place.closed, place.frozen) == (False, 1, [1])
        place.comes.set()
        assert await step == pytest.approx(7.0)
        assert (place.merged, place.done) == ([(1, ["b"])], 0)
        await place.border(1)
        assert (place.done, place.frozen) == (1, [1])
        place.node.update(step=float(STEPS))
        assert await place.rounds.before_step() == 0.0
        place.node.update(step=2.0)
        place.node.drain("told to leave")
        assert await place.rounds.before_step() == 0.0
        assert place.frozen == [1]

    at(scenario, rule="sync", inner_steps=1)


@pytest.mark.parametrize("rule", ["noloco", "sync"])
def test_without_pairs_there_are_no_rounds(rule: str) -> None:
    async def scenario(place: Place) -> None:
        assert await place.rounds.before_step() == 0.0
        await place.border(M)
        assert (place.frozen, place.done, place.rounds.lacks_rounds()) == ([], 0, False)

    at(scenario, rule=rule, pairing="none", inner_steps=1 if rule == "sync" else M)


def test_a_round_that_was_given_up_is_due_again() -> None:
    async def scenario(place: Place) -> None:
        await place.border(M)
        await place.rounds.forget()
        assert (place.rounds._open, place.merged, place.results) == (None, [], [])
        place.comes.set()
        await place.border(M + 1)
        await place.border(M + 2)
        assert (place.frozen, place.merged) == ([1, 1], [(1, ["b"])])
        place.comes.clear()
        await place.border(2 * M)
        place.node.update(outer_round=6)
        await place.rounds.freeze_anew()
        assert (place.done, place.frozen[2:]) == (6, [2, 6])
        assert (await place.rounds.frozen.serve("b", SnapshotRequest(0, 2))).round == 6
        place.comes.set()
        await asyncio.sleep(1.0)
        await place.border(2 * M + 1)
        assert len(place.merged) == 1, "what was open is of no use to the new weights"

    at(scenario)


def test_a_bug_in_a_pull_ends_the_node_at_once() -> None:
    async def scenario(place: Place) -> None:
        place.answers = {"b": LocalError("no memory")}
        place.comes.set()
        await place.border(M)
        assert place.node.error is place.answers["b"]
        place.rounds._open = None

    at(scenario)


def test_chunks_of_weights_that_replaced_the_first_ones_under_the_same_round_are_not_mixed_with_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The partner has come back from a pause, or has copied another replica, since its first answer."""

    async def scenario(place: Place) -> None:
        answers = iter([Snapshot("b", 1, M, ()), Snapshot("b", 1, M + 2, ())])

        async def fetch(*_: object) -> Snapshot:
            return next(answers)

        async def decode(mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, _: object) -> PartnerVector:
            missing = None if request.lattice else LatticeRequest(b"1")
            return PartnerVector("b", theirs.round, theirs.step, NOTHING, NOTHING, missing=missing)

        monkeypatch.setattr(place, "fetch_snapshot", fetch)
        monkeypatch.setattr(place, "decode", decode)
        await place.border(M)
        await place.border(M + 1)
        assert (place.merged, place.results) == ([(1, [])], ["alone"])
        assert any("have changed" in str(fields.get("message")) for _, fields in place.events)

    at(scenario)


@pytest.mark.parametrize(
    ("answer", "result", "reason", "aside"),
    [
        (Unreachable("gone"), "other", "unreachable", False),
        (Declined("no such round"), "other", "declined", False),
        (Violation("not a vector"), "other", "violation", True),
        (9, "other", "declined", False),
        ("aside", "other", "aside", True),
    ],
)
def test_another_replica_stands_in_for_a_partner_that_fails(
    answer: Exception | int | str, result: str, reason: str, aside: bool
) -> None:
    async def scenario(place: Place) -> None:
        chosen = place.rounds._choose_partner(1).partner
        assert chosen is not None
        set_aside, other = sorted({*"bcd"} - {chosen})
        place.members.failed(set_aside, now=place.node.now())
        if isinstance(answer, str):
            place.members.failed(chosen, now=place.node.now())
        else:
            place.answers = {chosen: answer}
        place.comes.set()
        await place.border(M)
        await place.border(M + 1)
        [found] = [fields for kind, fields in place.events if kind == "outer_round"]
        assert (found["result"], found["reason"]) == (result, reason)
        assert place.merged == [(1, [other])]
        assert place.members.is_aside(chosen, now=place.node.now()) == aside
        assert place.asked[-1][2] == 0.0, "nobody waits for a second one"

    at(scenario, mates="bcd")


def test_a_partner_that_fails_is_asked_once_if_there_is_no_other_replica() -> None:
    async def scenario(place: Place) -> None:
        place.answers["b"] = Declined("no such round")
        place.comes.set()
        await place.border(M)
        await place.border(M + 1)
        assert (len(place.asked), place.results, place.node.error) == (1, ["alone"], None)

    at(scenario)


@pytest.mark.parametrize("pairing", ["matched", "random"])
def test_a_newcomer_draws_its_partner_until_the_others_reckon_with_it(pairing: str) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(partner_from_round=2)
        assert [place.rounds._choose_partner(round).reason for round in (1, 2)] == ["random", pairing]

    at(scenario, mates="bcd", pairing=pairing)


def test_how_long_it_waits_for_a_partner_that_is_behind() -> None:
    async def scenario(place: Place) -> None:
        place.rounds.inner_step_took(2.0)
        place.rounds.inner_step_took(4.0)
        assert [place.rounds._partner_wait_s(on) for on in (False, True)] == [pytest.approx(2 * 2.4)] * 2
        place.node.step_seconds.extend([1.0, 9.0, 5.0])
        assert [place.rounds._partner_wait_s(on) for on in (False, True)] == [pytest.approx(2 * 2.4), 10.0]

    at(scenario)
    at(lambda place: _waits(place, 3.0), partner_wait_s=3.0)


async def _waits(place: Place, wait_s: float) -> None:
    await place.border(M)
    assert [wait for _, _, wait in place.asked] == [wait_s]


def test_whether_weights_lack_more_than_the_last_round() -> None:
    async def scenario(place: Place) -> None:
        found = []
        for done in (STEPS // M - 2, STEPS // M - 1, STEPS // M):
            place.node.update(outer_round=done)
            found.append(place.rounds.lacks_rounds())
        assert found == [True, False, False]

    at(scenario)
