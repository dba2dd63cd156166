"""Admission of microbatches into the inner steps of one replica, on the header alone (ARCHITECTURE.md, "Admission").

Forward and backward use the same weights, because a microbatch is admitted into one inner step, and the step is taken
only once everything admitted has ended. A microbatch that cannot be admitted now waits in a short line, or gets Busy.

Pure: the node calls `offer` when a header arrives, `leave` or `done` when the attempt ends, and `open`, `seal` and
`close` around its inner steps. Each call returns what it admits. No clock, no tasks, no tensors.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from noloco_p2p.core.messages import MicrobatchId, Origin, PeerId
from noloco_p2p.core.spent_ids import SpentIds

QUEUE_PLACES = 256
"""Maximum number of headers that queue for a waiting place."""
LAST_PLACES = 3
"""Maximum of waiting places plus microbatches in flight, so that the next step's bodies travel while this step drains.
If they came earlier, a body would be bound to a replica that need not be the first with room."""
AHEAD_PLACES = 2
"""Waiting places for microbatches that are ahead of the step, if stages go in step: no other replica is further on."""

Slot = tuple[PeerId, int]
"""(origin, index): the place of a microbatch in a step under `balanced`."""


class AttemptKey(NamedTuple):
    """One route of one microbatch: the same id with another digest came along another route."""

    microbatch: MicrobatchId
    digest: int


class Phase(Enum):
    """OPEN admits; SEALED makes microbatches wait while the inner step is taken; CLOSED answers Busy (outer round)."""

    OPEN = "open"
    SEALED = "sealed"
    CLOSED = "closed"


class Admission(Enum):
    """What happens to a microbatch whose header has arrived."""

    ADMIT = "admit"
    WAIT = "wait"
    """It gets a waiting place: its body may come."""
    QUEUE = "queue"
    """No waiting place is free: its body may come once `granted` names it."""
    JOIN = "join"
    """The same attempt is already here: share its reply."""
    BUSY = "busy"


class Verdict(NamedTuple):
    """The decision on a header, and its reason."""

    answer: Admission
    reason: str


@dataclass(slots=True)
class _Attempt:
    origin: Origin
    running: bool = False
    queued: bool = False
    """It waits without a waiting place, so its body has not been asked for."""


@dataclass(slots=True)
class _Place:
    """A place in the target. An id holds it while an attempt of it runs, and for good once it has counted."""

    slot: Slot | None
    counted: bool = False


@dataclass(slots=True)
class _Step:
    number: int
    target: int
    """Number of places; under `balanced` the due slots are the target instead."""
    due: set[Slot] | None
    """Slots that have not been taken yet (`balanced`)."""
    origins: tuple[PeerId, ...] | None
    """Whose microbatches it takes, if stages go in step; None if microbatches of any step count."""
    places: dict[MicrobatchId, _Place] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return not self.due if self.due is not None else len(self.places) >= self.target


class Intake:
    """The admission of one replica.

    `places` returns how many attempts may be in flight now (each may hold an autograd graph). If stages go in step,
    labels ahead of the step have waiting places of their own, so that they take none from those of this step.
    """

    def __init__(self, places: Callable[[], float]) -> None:
        self._places = places
        self._phase = Phase.CLOSED
        self._step = _Step(number=0, target=0, due=None, origins=None)
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._in_flight = 0
        self._spent = SpentIds()

    # --- the node's own steps -------------------------------------------------------------------------------------

    def open(
        self, step: int, target: int, due: Iterable[Slot] | None = None, origins: tuple[PeerId, ...] | None = None
    ) -> list[AttemptKey]:
        """Begin inner step `step` with `target` places, or with the `due` slots; returns those now admitted.

        `origins`: if given, stages go in step. A place is only for a microbatch of this step then; and unless slots are
        due, the step is complete once most origins have left it.
        """
        self._step = _Step(step, target, None if due is None else set(due), origins)
        self._phase = Phase.OPEN
        return self._admit_from_line()

    def seal(self) -> None:
        """The inner step is about to be taken: whatever arrives now waits for the next one."""
        assert self._in_flight == 0, "an inner step may not be taken while an admitted microbatch is in flight"
        self._phase = Phase.SEALED
        self._spent.end_step()

    def close(self) -> list[AttemptKey]:
        """Answer Busy from now on. Returns the waiting line: send these Busy and call `leave`. The others continue."""
        self._phase = Phase.CLOSED
        return [key for key, attempt in self._attempts.items() if not attempt.running]

    @property
    def ready(self) -> bool:
        """The step can be taken: its target is reached, and everything admitted has ended."""
        return self._phase is Phase.OPEN and self._in_flight == 0 and self._step.full

    @property
    def in_flight(self) -> int:
        """Admitted attempts that have not ended."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Attempts in the waiting line."""
        return len(self._attempts) - self._in_flight

    @property
    def missing_origins(self) -> list[PeerId]:
        """Origins that this step waits for, sorted: of the slots that are still due, or all, if stages go in step."""
        return sorted(self._step.origins or () if self._step.due is None else {peer for peer, _ in self._step.due})

    # --- what arrives ---------------------------------------------------------------------------------------------

    def offer(self, key: AttemptKey, origin: Origin, *, patient: bool = False) -> Verdict:
        """A header has arrived; a `patient` one queues if it can, rather than get Busy.

        ADMIT, WAIT and QUEUE must be followed by exactly one `leave` or `done` of the same key.
        """
        if key in self._attempts:
            return Verdict(Admission.JOIN, "in flight")
        if self._phase is Phase.CLOSED:
            return Verdict(Admission.BUSY, "closed")
        attempt = _Attempt(origin)
        obstacle = self._obstacle(key, attempt)
        if obstacle is None:
            self._attempts[key] = attempt
            self._run(key, attempt)
            return Verdict(Admission.ADMIT, "place")
        attempt.queued = self._free_places(ahead=self._ahead(attempt)) <= 0
        if attempt.queued and (not patient or sum(one.queued for one in self._attempts.values()) >= QUEUE_PLACES):
            return Verdict(Admission.BUSY, obstacle)
        self._attempts[key] = attempt
        return Verdict(Admission.QUEUE if attempt.queued else Admission.WAIT, obstacle)

    def granted(self) -> list[AttemptKey]:
        """Give free waiting places to queued attempts, in turn over their origins; returns those that got one."""
        given = []
        for ahead in (False, True):
            for _ in range(self._free_places(ahead=ahead)):
                key = self._first_queued(ahead=ahead)
                if key is None:
                    break
                self._attempts[key].queued = False
                given.append(key)
        return given

    def leave(self, key: AttemptKey) -> list[AttemptKey]:
        """A waiting or running attempt failed or was cancelled; it leaves no trace. Returns those now admitted."""
        self._end(key)
        return self._admit_from_line()

    def done(self, key: AttemptKey, *, counted: bool) -> list[AttemptKey]:
        """An attempt ended with a reply; `counted`: its gradients were added here. Returns those now admitted."""
        if counted:
            self._spent.spend(key.microbatch)
            if key.microbatch in self._step.places:
                self._step.places[key.microbatch].counted = True
        self._end(key)
        return self._admit_from_line()

    def drop_origins(self, has_left: Callable[[PeerId], bool]) -> list[AttemptKey]:
        """Do not wait for origins that have left this step or the swarm. Returns those now admitted."""
        step, origins = self._step, self._step.origins or ()
        if step.due:
            step.due = {slot for slot in step.due if not has_left(slot[0])}
        if 2 * sum(map(has_left, origins)) > len(origins):
            step.target = 0
        return self._admit_from_line()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _ahead(self, attempt: _Attempt) -> bool:
        return self._step.origins is not None and attempt.origin.step > self._step.number

    def _free_places(self, *, ahead: bool) -> int:
        """Number of free waiting places: for labels `ahead` of the step, or for the others. Those that were ahead may
        take more of the others when a step begins; until these are free again, there are fewer places ahead."""
        held = Counter(self._ahead(one) for one in self._attempts.values() if not (one.running or one.queued))
        free = LAST_PLACES - self._in_flight - held[False]
        return AHEAD_PLACES - held[True] + min(0, free) if ahead else free

    def _first_queued(self, *, ahead: bool) -> AttemptKey | None:
        """The attempt that has queued longest, of the origin with the fewest attempts here that are not queued."""
        held: Counter[PeerId] = Counter(one.origin.peer for one in self._attempts.values() if not one.queued)
        queue = [key for key, one in self._attempts.items() if one.queued and self._ahead(one) == ahead]
        return min(queue, key=lambda key: held[self._attempts[key].origin.peer], default=None)

    def _slot(self, attempt: _Attempt) -> Slot | None:
        """The due slot that an attempt fills, if any."""
        slot = (attempt.origin.peer, attempt.origin.index)
        return slot if attempt.origin.step == self._step.number and slot in (self._step.due or ()) else None

    def _wants_place(self, key: AttemptKey, attempt: _Attempt) -> bool:
        """Reply-only attempts take no place, nor do microbatches of an earlier step if stages go in step, nor, under
        `balanced`, those whose slot is not ours."""
        if key.microbatch in self._step.places or key.microbatch in self._spent:
            return False
        if self._step.due is not None:
            return self._slot(attempt) is not None
        return self._step.origins is None or attempt.origin.step >= self._step.number

    def _obstacle(self, key: AttemptKey, attempt: _Attempt) -> str | None:
        """Why an attempt cannot be admitted now; None if it can.

        A label ahead of the step waits even while there is room, because its place is in a later step. A label
        behind the step is served, because its origin still waits for the gradient, but it takes no place.
        """
        if self._phase is not Phase.OPEN:
            return "stepping"
        if self._ahead(attempt):
            return "ahead"
        if self._in_flight >= self._places():
            return "in_flight"
        if self._wants_place(key, attempt) and self._step.full:
            return "target"
        return None

    def _run(self, key: AttemptKey, attempt: _Attempt) -> None:
        if self._wants_place(key, attempt):
            slot = self._slot(attempt)
            self._step.places[key.microbatch] = _Place(slot)
            if slot is not None and self._step.due is not None:
                self._step.due.discard(slot)
        attempt.running, attempt.queued = True, False
        self._in_flight += 1

    def _end(self, key: AttemptKey) -> None:
        attempt = self._attempts.pop(key)
        if not attempt.running:
            return
        self._in_flight -= 1
        place = self._step.places.get(key.microbatch)
        others = any(o.running and k.microbatch == key.microbatch for k, o in self._attempts.items())
        if place is None or place.counted or others:
            return
        del self._step.places[key.microbatch]
        if place.slot is not None and self._step.due is not None:
            self._step.due.add(place.slot)

    def _admit_from_line(self) -> list[AttemptKey]:
        admitted = []
        # Those with a waiting place go first: their bodies are here, or on their way.
        for key, attempt in sorted(self._attempts.items(), key=lambda item: item[1].queued):
            if not attempt.running and self._obstacle(key, attempt) is None:
                self._run(key, attempt)
                admitted.append(key)
        return admitted
