"""Intake: no microbatch sees two versions of the weights, no id counts twice, places are returned, and no deadlock."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from noloco_p2p.core.intake import AHEAD_PLACES, LAST_PLACES, QUEUE_PLACES, Admission, AttemptKey, Intake
from noloco_p2p.core.messages import MicrobatchId, Origin
from noloco_p2p.core.spent_ids import SPENT_IDS, SPENT_STEPS, SpentIds

ORIGINS = ("a", "b", "c")


def key(origin: str, counter: int, digest: int = 0) -> AttemptKey:
    return AttemptKey(MicrobatchId(origin, 1, counter), digest)


def test_admits_up_to_the_target_and_steps_when_all_have_ended() -> None:
    intake = Intake(lambda: 4)
    intake.open(0, target=2)
    first, second, third, fourth = (key("a", n) for n in range(4))
    assert intake.offer(first, Origin("a", 0, 0)).answer is Admission.ADMIT
    assert intake.offer(second, Origin("a", 0, 1)).answer is Admission.ADMIT
    assert intake.offer(third, Origin("b", 0, 0)).answer is Admission.WAIT
    assert intake.offer(fourth, Origin("b", 0, 1)).answer is Admission.BUSY
    assert not intake.ready
    assert intake.done(first, counted=True) == []
    assert not intake.ready
    assert intake.done(second, counted=True) == []
    assert intake.ready
    assert intake.missing_origins == [], "only under `balanced` it matters whose they are"
    intake.seal()
    again = key("a", 0, 1)
    assert intake.offer(again, Origin("a", 0, 0)).answer is Admission.WAIT, "the weights are about to change"
    assert not intake.ready
    assert intake.open(1, target=2) == [third, again]


def test_a_failed_attempt_gives_its_place_back() -> None:
    intake = Intake(lambda: 4)
    intake.open(0, target=1)
    intake.offer(key("a", 0), Origin("a", 0, 0))
    intake.offer(key("a", 1), Origin("a", 0, 1))
    assert intake.leave(key("a", 0)) == [key("a", 1)]
    intake.offer(key("a", 2), Origin("a", 0, 2))
    assert intake.done(key("a", 1), counted=False) == [key("a", 2)]
    assert not intake.ready
    intake.done(key("a", 2), counted=True)
    assert intake.ready
    intake.open(1, target=1, due={("a", 3)}, origins=("a",))
    intake.offer(key("a", 3), Origin("a", 1, 3))
    assert intake.missing_origins == []
    intake.leave(key("a", 3))
    assert intake.missing_origins == ["a"], "its slot is due again"
    assert not intake.ready


def test_an_id_that_has_counted_is_served_again_for_its_reply_only() -> None:
    intake = Intake(lambda: 4)
    intake.open(0, target=1)
    intake.offer(key("a", 0), Origin("a", 0, 0))
    assert intake.offer(key("a", 0), Origin("a", 0, 0)).answer is Admission.JOIN
    intake.done(key("a", 0), counted=True)
    for step in (1, 2):
        assert intake.offer(key("a", 0), Origin("a", 0, 0)).answer is Admission.ADMIT, "its reply may be lost"
        assert not intake.ready, "it holds the step open"
        intake.done(key("a", 0), counted=False)
        assert intake.ready
        intake.seal()
        intake.open(step, target=1)
        assert not intake.ready, "it takes no place in the target"
        intake.offer(key("a", step), Origin("a", step, 0))
        intake.done(key("a", step), counted=True)


def test_another_route_takes_no_second_place() -> None:
    intake = Intake(lambda: 4)
    intake.open(0, target=2)
    for digest in (1, 2):
        assert intake.offer(key("a", 0, digest), Origin("a", 0, 0)).answer is Admission.ADMIT
    intake.leave(key("a", 0, 1))
    intake.done(key("a", 0, 2), counted=True)
    assert not intake.ready
    assert intake.offer(key("a", 1), Origin("a", 0, 1)).answer is Admission.ADMIT
    intake.done(key("a", 1), counted=True)
    assert intake.ready


def test_another_route_is_admitted_although_the_target_is_reached() -> None:
    intake = Intake(lambda: 4)
    intake.open(0, target=1)
    assert intake.offer(key("a", 0, 1), Origin("a", 0, 0)).answer is Admission.ADMIT
    assert intake.offer(key("a", 0, 2), Origin("a", 0, 0)).answer is Admission.ADMIT
    intake.done(key("a", 0, 1), counted=True)
    assert not intake.ready, "what was let in holds the step open"
    intake.done(key("a", 0, 2), counted=False)
    assert intake.ready


def test_a_route_that_only_waits_holds_no_place() -> None:
    places = 1
    intake = Intake(lambda: places)
    intake.open(0, target=1)
    assert intake.offer(key("a", 0, 1), Origin("a", 0, 0)).answer is Admission.ADMIT
    assert intake.offer(key("a", 0, 2), Origin("a", 0, 0)).answer is Admission.WAIT
    places = 0
    for digest in (1, 2):
        assert intake.leave(key("a", 0, digest)) == []
    places = 1
    assert intake.offer(key("a", 1), Origin("a", 0, 1)).answer is Admission.ADMIT


def test_balanced_labels() -> None:
    """A due slot is admitted, a slot that is not ours is admitted beyond the target, and one ahead of the step waits
    separately."""
    intake = Intake(lambda: 8)
    intake.open(5, target=1, due={("a", 0)}, origins=("a", "b"))
    for index in range(AHEAD_PLACES):
        assert intake.offer(key("b", index), Origin("b", 6, index)).answer is Admission.WAIT
    assert intake.offer(key("b", 9), Origin("b", 6, 9)).answer is Admission.BUSY
    assert intake.offer(key("b", 9), Origin("b", 6, 9), patient=True).answer is Admission.QUEUE
    assert intake.granted() == []
    intake.leave(key("b", 1))
    assert intake.granted() == [key("b", 9)]
    assert intake.offer(key("c", 0), Origin("c", 5, 7)).answer is Admission.ADMIT
    assert intake.offer(key("a", 9), Origin("a", 4, 0)).answer is Admission.ADMIT
    assert intake.missing_origins == ["a"], "not its slot of this step"
    assert intake.offer(key("a", 0), Origin("a", 5, 0)).answer is Admission.ADMIT
    intake.leave(key("c", 0))
    assert intake.missing_origins == []
    for name, number in (("a", 9), ("a", 0)):
        assert not intake.ready
        intake.done(key(name, number), counted=True)
    assert intake.ready
    intake.seal()
    assert intake.open(6, target=2, due={("b", 0), ("b", 9)}, origins=("a", "b")) == [key("b", 0), key("b", 9)]


def test_a_label_ahead_never_takes_the_place_of_a_due_slot() -> None:
    intake = Intake(lambda: 1)
    intake.open(0, 2, due={("a", 0), ("a", 1)}, origins=("a",))
    for index in range(AHEAD_PLACES):
        assert intake.offer(key("b", index), Origin("b", 1, index)).answer is Admission.WAIT
    assert intake.offer(key("a", 0), Origin("a", 0, 0)).answer is Admission.ADMIT
    assert intake.offer(key("a", 1), Origin("a", 0, 1)).answer is Admission.WAIT
    assert intake.done(key("a", 0), counted=True) == [key("a", 1)]


def test_waiting_places_stay_within_their_bound_when_labels_that_were_ahead_become_current() -> None:
    intake = Intake(lambda: 1)
    intake.open(0, target=3, origins=("a", "b"))
    intake.drop_origins(lambda _: True)
    for index in range(LAST_PLACES):
        assert intake.offer(key("a", index), Origin("a", 0, index)).answer is Admission.WAIT
    for index in range(AHEAD_PLACES):
        assert intake.offer(key("b", index), Origin("b", 1, index)).answer is Admission.WAIT
    intake.seal()
    assert intake.open(1, target=3, origins=("a", "b")) == [key("a", 0)]
    assert intake.in_flight + intake.waiting == LAST_PLACES + AHEAD_PLACES
    assert intake.offer(key("b", 10), Origin("b", 2, 0)).answer is Admission.BUSY
    for index in range(AHEAD_PLACES):
        intake.done(key("a", index), counted=False)
    assert intake.offer(key("b", 10), Origin("b", 2, 0)).answer is Admission.WAIT


@pytest.mark.parametrize("origins", [None, ("a", "b", "c", "d")])
def test_a_struck_slot_is_not_waited_for(origins: tuple[str, ...] | None) -> None:
    intake = Intake(lambda: 1)
    intake.open(0, 2, due={(peer, 0) for peer in "dcba"}, origins=origins)
    intake.offer(key("a", 0), Origin("a", 0, 0))
    intake.done(key("a", 0), counted=True)
    assert not intake.ready
    assert intake.missing_origins == ["b", "c", "d"], "sorted, whatever the order of a set"
    intake.drop_origins(lambda peer: peer in "bcd")
    assert intake.ready


def test_where_stages_go_in_step_places_are_for_microbatches_of_the_step_until_most_origins_have_left_it() -> None:
    intake = Intake(lambda: 4)
    intake.open(4, target=2, origins=("a", "b"))
    intake.drop_origins({"a"}.__contains__)
    assert not intake.ready, "half of them is not most"
    intake.open(5, target=2, origins=("a", "b", "c"))
    late, first, early = key("a", 0), key("b", 0), key("a", 1)
    assert intake.offer(late, Origin("a", 4, 0)).answer is Admission.ADMIT, "its origin still waits for the gradient"
    assert intake.offer(first, Origin("b", 5, 0)).answer is Admission.ADMIT
    assert intake.offer(early, Origin("a", 6, 0)) == (Admission.WAIT, "ahead")
    intake.done(late, counted=True)
    intake.done(first, counted=True)
    assert intake.missing_origins == ["a", "b", "c"]
    assert intake.drop_origins({"a"}.__contains__) == []
    assert not intake.ready, "most may still send something"
    assert intake.drop_origins({"a", "b"}.__contains__) == []
    assert intake.ready
    intake.seal()
    assert intake.open(6, target=1, origins=("a", "b", "c")) == [early]
    intake.done(early, counted=True)
    assert intake.ready, "the target is reached"


def test_close_flushes_the_line_and_admits_nothing_new() -> None:
    intake = Intake(lambda: 1)
    assert intake.offer(key("a", 0), Origin("a", 0, 0)).answer is Admission.BUSY, "before its first step"
    assert not intake.ready
    assert intake.missing_origins == []
    intake.open(0, 1)
    intake.offer(key("a", 0), Origin("a", 0, 0))
    intake.offer(key("a", 1), Origin("a", 0, 1))
    assert intake.close() == [key("a", 1)]
    intake.leave(key("a", 1))
    assert intake.offer(key("a", 2), Origin("a", 0, 2)).answer is Admission.BUSY
    assert intake.in_flight == 1
    assert intake.waiting == 0


def test_a_step_may_not_be_taken_while_something_is_in_flight() -> None:
    intake = Intake(lambda: 1)
    intake.open(0, 1)
    intake.offer(key("a", 0), Origin("a", 0, 0))
    with pytest.raises(AssertionError, match="in flight"):
        intake.seal()


def test_spent_ids_are_kept_for_eight_steps_and_at_least_4096() -> None:
    first, *numbered = (MicrobatchId("p", 1, number) for number in range(SPENT_IDS + 11))
    spent = SpentIds()
    assert spent.spend(first)
    assert not spent.spend(first)
    for _ in range(100):
        spent.end_step()
    assert first in spent, "few ids are kept for ever"
    for each in numbered:
        spent.spend(each)
    for step in range(SPENT_STEPS):
        assert numbered[0] in spent, step
        spent.end_step()
    assert len(spent.ended()) == SPENT_IDS
    assert first not in spent.ended()


def test_an_id_that_was_forgotten_cannot_be_spent_again_nor_can_an_older_one_of_the_same_process() -> None:
    spent = SpentIds()
    for number in range(1, SPENT_IDS + 2):
        spent.spend(MicrobatchId("p", 1, number))
    for _ in range(SPENT_STEPS):
        spent.end_step()
    assert len(spent.ended()) == SPENT_IDS
    assert not spent.spend(MicrobatchId("p", 1, 1)), "counted long ago"
    assert not spent.spend(MicrobatchId("p", 1, 0)), "it may have been"
    assert spent.spend(MicrobatchId("p", 1, SPENT_IDS + 2))
    assert spent.spend(MicrobatchId("p", 2, 0)), "another incarnation"
    assert spent.spend(MicrobatchId("q", 1, 0)), "another peer"


def test_the_ids_of_a_state_are_remembered_even_below_those_that_were_forgotten() -> None:
    """They travel on with the state: whoever takes it over must know them."""
    spent = SpentIds()
    for number in range(1, SPENT_IDS + 2):
        spent.spend(MicrobatchId("p", 1, number))
    for _ in range(SPENT_STEPS):
        spent.end_step()
    assert MicrobatchId("p", 1, 0) in spent, "it is below one that was forgotten"
    spent.refill([MicrobatchId("p", 1, 0)])
    assert spent.ended() == (MicrobatchId("p", 1, 0),)


def test_an_id_that_may_be_spent_is_served_for_its_reply_only_however_late_it_comes() -> None:
    intake = Intake(lambda: 2)
    intake.open(0, target=SPENT_IDS + 1)
    for number in range(SPENT_IDS + 1):
        intake.offer(key("a", number), Origin("a", 0, number))
        intake.done(key("a", number), counted=True)
    for step in range(1, SPENT_STEPS + 1):
        intake.seal()
        intake.open(step, target=0)
    assert len(intake._spent.ended()) == SPENT_IDS, "not all that it ever counted"
    late = SPENT_IDS + 1
    assert intake.offer(key("a", late), Origin("a", 0, late)).answer is Admission.WAIT, "it would count"
    assert intake.offer(key("a", 0), Origin("a", 0, 0)).answer is Admission.ADMIT
    assert intake.offer(key("a", 1), Origin("a", 0, 1)).answer is Admission.ADMIT


def test_bodies_of_the_next_step_come_while_this_one_drains() -> None:
    intake = Intake(lambda: 100)
    intake.open(0, target=5)
    for number in range(5):
        assert intake.offer(key("a", number), Origin("a", 0, number), patient=True).answer is Admission.ADMIT
    for number in range(5, 9):
        assert intake.offer(key("a", number), Origin("a", 1, number), patient=True).answer is Admission.QUEUE
    for number, granted in enumerate(([], [], [5], [6], [7])):
        assert intake.done(key("a", number), counted=True) == []
        assert intake.granted() == [key("a", one) for one in granted], number
    intake.seal()
    assert intake.open(1, target=5) == [key("a", number) for number in range(5, 9)]


def test_places_gained_or_lost_with_memory_count_at_once() -> None:
    places = 1
    intake = Intake(lambda: places)
    intake.open(0, target=9)
    assert intake.offer(key("a", 0), Origin("a", 0, 0)).answer is Admission.ADMIT
    assert intake.offer(key("a", 1), Origin("a", 0, 1)).answer is Admission.WAIT
    places = 2
    assert intake.offer(key("a", 2), Origin("a", 0, 2)).answer is Admission.ADMIT
    places = 1
    assert intake.done(key("a", 0), counted=True) == [], "one is still in flight"
    assert intake.done(key("a", 2), counted=True) == [key("a", 1)]


def test_a_patient_header_queues_and_each_origin_is_granted_in_turn() -> None:
    intake = Intake(lambda: 1)
    intake.open(0, target=20)
    assert intake.offer(key("a", 0), Origin("a", 0, 0), patient=True).answer is Admission.ADMIT
    for number in (1, 2):
        assert intake.offer(key("a", number), Origin("a", 0, number), patient=True).answer is Admission.WAIT
    assert intake.offer(key("a", 3), Origin("a", 0, 3)).answer is Admission.BUSY
    for origin, number in (("a", 3), *(("b", number) for number in range(4))):
        header = intake.offer(key(origin, number), Origin(origin, 0, number), patient=True)
        assert header.answer is Admission.QUEUE
    assert intake.granted() == []
    assert intake.done(key("a", 0), counted=True) == [key("a", 1)]
    for number in range(4):
        assert intake.granted() == [key("b", number)], "b has nothing in hand here, a has two"
        assert (intake.in_flight, intake.waiting) == (1, 6 - number)
        assert intake.leave(key("b", number)) == []
    assert intake.granted() == [key("a", 3)]
    assert intake.granted() == []
    assert intake.close() == [key("a", 2), key("a", 3)]


def test_those_with_a_waiting_place_are_admitted_before_those_that_came_earlier_and_queue() -> None:
    """Their bodies are here, or on their way."""
    intake = Intake(lambda: 9)
    intake.open(0, target=0)
    for number in range(LAST_PLACES + 1):
        intake.offer(key("a", number), Origin("a", 0, number), patient=True)
    assert intake.offer(key("b", 0), Origin("b", 0, 0), patient=True).answer is Admission.QUEUE
    intake.leave(key("a", 0))
    assert intake.granted() == [key("b", 0)], "it has nothing here, and a has more"
    placed = [*(key("a", number) for number in range(1, LAST_PLACES)), key("b", 0)]
    intake.seal()
    assert intake.open(1, target=LAST_PLACES) == placed
    assert intake.close() == [key("a", LAST_PLACES)]


def test_the_queue_is_bounded() -> None:
    intake = Intake(lambda: 1)
    intake.open(0, target=0)
    headers = range(LAST_PLACES + QUEUE_PLACES + 1)
    answers = [intake.offer(key("a", n), Origin("a", 0, n), patient=True).answer for n in headers]
    assert answers == [Admission.WAIT] * LAST_PLACES + [Admission.QUEUE] * QUEUE_PLACES + [Admission.BUSY]


class MicrobatchServer(RuleBasedStateMachine):
    """One replica and its senders: offers, repeats along other routes, cancellations, replies in any order, steps and
    rounds.

    The model stands for the stage: it counts an id once, and each attempt notes the version of its weights when it is
    admitted.
    """

    balanced = in_step = False

    def __init__(self) -> None:
        super().__init__()
        self.places = 3
        self.intake = Intake(lambda: self.places)
        self.version = 0
        self.step = 0
        self.running: dict[AttemptKey, int] = {}
        self.waiting: set[AttemptKey] = set()
        self.queued: set[AttemptKey] = set()
        self.origin: dict[AttemptKey, Origin] = {}
        self.counted: dict[MicrobatchId, int] = {}
        self.counted_in_step = 0
        self.placed: set[MicrobatchId] = set()
        self.target = 0
        self.opened = False
        self.counters = dict.fromkeys(ORIGINS, 0)
        self.open_step()

    def due(self) -> set[tuple[str, int]]:
        return {(origin, index) for origin in ORIGINS for index in range(2) if (index + self.step) % 2 == 0}

    def open_step(self) -> None:
        due = self.due() if self.balanced else None
        self.target = len(due) if due is not None else 3
        self.opened = True
        self.admit(self.intake.open(self.step, self.target, due, ORIGINS if self.in_step else None))

    def admit(self, keys: list[AttemptKey]) -> None:
        for one in keys:
            assert one in self.waiting | self.queued, "only a waiting header is let in"
            self.waiting.discard(one)
            self.queued.discard(one)
            self.running[one] = self.version
        for one in self.intake.granted():
            self.queued.remove(one)
            self.waiting.add(one)

    @rule(
        origin=st.sampled_from(ORIGINS),
        index=st.integers(0, 1),
        digest=st.integers(0, 1),
        ahead=st.integers(-1, 1),
        patient=st.booleans(),
    )
    def offer(self, origin: str, index: int, digest: int, ahead: int, patient: bool) -> None:
        label = Origin(origin, max(0, self.step + ahead), index)
        one = key(origin, 2 * label.step + index, digest)
        verdict = self.intake.offer(one, label, patient=patient)
        match verdict.answer:
            case Admission.ADMIT:
                assert one not in self.running
                self.running[one] = self.version
            case Admission.WAIT:
                assert one not in self.waiting
                self.waiting.add(one)
            case Admission.QUEUE:
                assert patient
                assert one not in self.queued
                self.queued.add(one)
            case Admission.JOIN:
                assert one in self.running or one in self.waiting | self.queued
            case Admission.BUSY:
                assert one not in self.running
        self.origin[one] = label

    @rule(places=st.integers(1, 3))
    def look_at_memory(self, places: int) -> None:
        self.places = places

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: Any, fails: bool) -> None:
        one = data.draw(st.sampled_from(sorted(self.running)))
        version = self.running.pop(one)
        assert version == self.version, "the weights changed while a microbatch was in flight"
        if fails:
            self.admit(self.intake.leave(one))
            return
        counted = one.microbatch not in self.counted
        self.counted.setdefault(one.microbatch, self.step)
        self.counted_in_step += counted
        self.admit(self.intake.done(one, counted=counted))

    @precondition(lambda self: self.waiting or self.queued)
    @rule(data=st.data())
    def cancel_waiting(self, data: Any) -> None:
        one = data.draw(st.sampled_from(sorted(self.waiting | self.queued)))
        self.waiting.discard(one)
        self.queued.discard(one)
        self.admit(self.intake.leave(one))

    @precondition(lambda self: self.opened and self.intake.ready)
    @rule(outer=st.booleans())
    def take_step(self, outer: bool) -> None:
        assert not self.running
        if not self.in_step:
            assert self.counted_in_step == self.target, "counted microbatches reach the target and never exceed it"
        on_time = sum(at == self.step == one.counter // 2 for one, at in self.counted.items())
        assert self.balanced or on_time <= self.target, "those of this step do not exceed it"
        self.intake.seal()
        self.version += 1
        self.step += 1
        self.counted_in_step = 0
        if outer:
            for one in self.intake.close():
                self.waiting.discard(one)
                self.queued.discard(one)
                self.intake.leave(one)
            assert not self.waiting | self.queued
        self.open_step()

    @precondition(lambda self: self.balanced and self.intake.missing_origins)
    @rule()
    def origins_leave(self) -> None:
        gone = self.intake.missing_origins[0]
        self.admit(self.intake.drop_origins(lambda peer: peer == gone))
        assert gone not in self.intake.missing_origins

    @precondition(lambda self: self.in_step)
    @rule()
    def most_origins_leave(self) -> None:
        self.admit(self.intake.drop_origins(lambda peer: peer != ORIGINS[0]))
        assert self.balanced or self.running or self.intake.ready

    @invariant()
    def bounds_hold(self) -> None:
        assert self.intake.in_flight == len(self.running) <= 3
        assert len(self.waiting) <= LAST_PLACES + (AHEAD_PLACES if self.in_step else 0)
        assert self.intake.waiting == len(self.waiting) + len(self.queued)

    @invariant()
    def somebody_can_go_on(self) -> None:
        """No deadlock: something runs, or the step can be taken, or a new microbatch that is due is admitted."""
        if self.running or self.intake.ready:
            return
        if self.balanced:
            assert self.intake.missing_origins, "nothing runs, nothing is due, and the step is not ready"
        else:
            probe = key("a", 10_000)
            assert self.intake.offer(probe, Origin("a", self.step, 0)).answer is Admission.ADMIT
            self.intake.leave(probe)


class BalancedServer(MicrobatchServer):
    """The same under `balanced`: slots instead of arrival order."""

    balanced = in_step = True


class InStepServer(MicrobatchServer):
    """The same where stages go in step: only microbatches of the step take places."""

    in_step = True


TestDoor = MicrobatchServer.TestCase
TestBalancedDoor = BalancedServer.TestCase
TestInStepDoor = InStepServer.TestCase
TestDoor.settings = TestBalancedDoor.settings = TestInStepDoor.settings = settings(
    max_examples=80, stateful_step_count=60
)


@pytest.mark.parametrize("seed", range(20))
def test_under_pressure_every_step_ends(seed: int) -> None:
    """Many senders retry until they are served: all of them are, in steps of the target's size."""
    rng = random.Random(seed)
    intake = Intake(lambda: 2)
    intake.open(0, target=4)
    outside = [key(rng.choice(ORIGINS), n) for n in range(40)]
    running: list[AttemptKey] = []
    steps = served = 0
    while served < 40:
        if outside:
            one = outside.pop(0)
            verdict = intake.offer(one, Origin(one.microbatch.peer, 0, 0))
            if verdict.answer is Admission.ADMIT:
                running.append(one)
            elif verdict.answer is Admission.BUSY:
                outside.append(one)
        if running and rng.random() < 0.5:
            one = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.2:
                running += intake.leave(one)
                outside.append(one)
            else:
                served += 1
                running += intake.done(one, counted=True)
        if intake.ready:
            intake.seal()
            steps += 1
            running += intake.open(steps, target=4)
    assert steps == 10
