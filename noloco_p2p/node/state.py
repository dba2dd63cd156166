"""What the duties of one node share: who it is, how far it has come, whom it knows. The node owns it.

Every wait of a duty for something inside this node goes through `until`, and every change ends in `pulse`. A wait for
something else stands inside `waiting`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from math import floor
from random import Random
from typing import TypeVar

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core import members as membership
from noloco_p2p.core.members import Members
from noloco_p2p.core.messages import Advert, MicrobatchId, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.core.status import Purpose, Resource, WaitTarget
from noloco_p2p.node.waits import Waiting, Waits
from noloco_p2p.ports import Batches, Stage, World

R = TypeVar("R")

STEPS_TIMED = 32
"""Inner steps whose median is what a step takes."""


async def to_the_end(awaitable: Awaitable[R]) -> R:
    """Await something that must not be abandoned half-way: a cancellation of the waiter is dropped."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
    return task.result()


@dataclass(frozen=True, slots=True)
class StepView:
    """The membership that an inner step started with, each sorted by id, mine included where I belong."""

    origins: tuple[PeerId, ...] = ()
    mates: tuple[PeerId, ...] = ()
    following: tuple[PeerId, ...] = ()


class NodeState:
    """The shared state of one node. `stage` exists once the weights are made, `batches` then at stage 0 only."""

    stage: Stage
    batches: Batches | None = None

    def __init__(self, advert: Advert, manifest: RunManifest, config: NodeConfig, world: World) -> None:
        self.advert = advert
        self.manifest = manifest
        self.run_id = manifest.run_id
        self.config = config
        self.world = world
        self.members = Members(advert.peer_id, config.directory.ttl_s)
        self.rng: Random = generator(manifest.seed, "node", advert.peer_id)
        self.view = StepView()
        self.inner_steps = 0
        self.heard_at = float("-inf")
        """When a microbatch, or at stage 0 a gradient, came last."""
        self.routes: dict[MicrobatchId, tuple[PeerId | None, PeerId | None]] = {}
        """Of each microbatch counted in this step: who sent it, and who served it next."""
        self.drain_by: float | None = None
        """Once told to leave or to move: when, on the loop's clock, it stops to offer what it holds to others."""
        self.next_stage: int | None = None
        """While draining in order to move: the stage to hold next."""
        self.pausing = False
        """The owner wants the device: no inner step is begun."""
        self.deserted: dict[int, float] = {}
        """Stages that nobody serves, as far as is known here: since when, on the loop's clock."""
        self.saw_the_end = False
        """Somebody of stage 0 was seen finished; by now it may be gone."""
        self.error: BaseException | None = None
        self.waits = Waits()
        self.calls: dict[object, tuple[PeerId, Purpose, float]] = {}
        """Calls of peers that this node has in hand: (caller, on whose behalf, since when)."""
        self.troubles: dict[str, tuple[str, float]] = {}
        """What is wrong although the node goes on, by name: (message, since when)."""
        self.stepped_at: float | None = None
        """When the last inner step ended, or training began; None while not training."""
        self.steps_took: deque[float] = deque(maxlen=STEPS_TIMED)
        """Seconds from one inner step to the next."""
        self._conditions: dict[asyncio.Future[bool], Callable[[], bool]] = {}
        """What `until` waits for. They are looked at here, so that a pulse wakes nobody in vain."""
        self._looking: asyncio.Handle | None = None

    # --- who and where ----------------------------------------------------------------------------------------------

    @property
    def me(self) -> PeerId:
        """My peer id."""
        return self.advert.peer_id

    @property
    def index(self) -> int:
        """My stage."""
        return self.advert.stage

    @property
    def last(self) -> bool:
        """My stage has the head and the loss."""
        return self.advert.stage == self.manifest.stages - 1

    @property
    def draining(self) -> bool:
        """Told to leave, or to move to another stage: nothing new is begun."""
        return self.drain_by is not None

    @property
    def leaving(self) -> bool:
        """Told to leave for good."""
        return self.draining and self.next_stage is None

    @property
    def step(self) -> int:
        """Floor of my clock."""
        return floor(self.advert.step)

    def update(self, **changes: object) -> None:
        """Change what the advert says; the next announcement carries it."""
        self.advert = replace(self.advert, **changes)  # type: ignore[arg-type]

    def enter(self, event: str, reason: str = "") -> None:
        """Move to the next state on `event` (core/members.TRANSITIONS)."""
        self.update(state=membership.next_state(self.advert.state, event))
        self.stepped_at = self.now() if self.advert.state == "training" else None
        self.event("state", state=self.advert.state, reason=reason or event)
        self.pulse()

    def drain(self, reason: str, *, next_stage: int | None = None) -> None:
        """Finish what is held and begin nothing new: to leave, or to go on at `next_stage`."""
        self.drain_by = self.now() + self.config.limits.drain_s / 2
        self.next_stage = next_stage
        if self.advert.state != "draining":
            self.enter("drain", reason)
        self.pulse()

    def look(self) -> None:
        """Fix the membership that the coming inner step starts with."""

        def ids(stage: int) -> tuple[PeerId, ...]:
            found = self.members.ids(stage, membership.READY)
            return tuple(sorted([*found, self.me]) if stage == self.index else found)

        self.view = StepView(ids(0), ids(self.index), ids(self.index + 1))

    # --- time and change --------------------------------------------------------------------------------------------

    @staticmethod
    def now() -> float:
        """The loop's clock, seconds."""
        return asyncio.get_running_loop().time()

    def event(self, kind: str, /, **fields: object) -> None:
        """Tell whoever watches this node."""
        self.world.telemetry.event(kind, **fields)

    def span(self, phase: str) -> AbstractContextManager[None]:
        """Measure a phase (design.md §9)."""
        return self.world.telemetry.span(phase)

    def pulse(self) -> None:
        """Something changed that somebody may wait for: all conditions are looked at in the loop's next turn."""
        if self._conditions and self._looking is None:
            self._looking = asyncio.get_running_loop().call_soon(self._look_at_conditions)

    def _look_at_conditions(self) -> None:
        self._looking = None
        for waiter, condition in tuple(self._conditions.items()):
            if not waiter.done() and _may_hold(condition):
                waiter.set_result(True)

    def fail(self, error: BaseException) -> None:
        """This node cannot go on; its main task raises `error`."""
        if self.error is None:
            self.error = error
            self.pulse()

    def stepped(self) -> None:
        """An inner step has ended."""
        now = self.now()
        if self.stepped_at is not None:
            self.steps_took.append(now - self.stepped_at)
            self.stepped_at = now

    def trouble(self, name: str, message: str | None) -> None:
        """Something is wrong from now on, or (None) is so no longer; the node goes on in any case."""
        before = self.troubles.get(name)
        if message is None:
            self.troubles.pop(name, None)
            return
        self.troubles[name] = message, before[1] if before else self.now()
        if before is None or before[0] != message:
            self.event("warning", message=message)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def waiting(
        self,
        what: str,
        whom: WaitTarget,
        deadline_s: float | None = None,
        why: Purpose | None = None,
        *,
        idle: bool = False,
    ) -> Waiting:
        """A `with` around an await that is not `until`; see core.status.Wait."""
        return self.waits.waiting(what, whom, deadline_s, why, idle=idle)

    def computing(self, what: str, why: Purpose | None = None) -> Waiting:
        """A `with` around an operation of this node's device, which takes as long as a microbatch may at most."""
        return self.waits.waiting(what, Resource.DEVICE, self.config.limits.microbatch_deadline_s, why)

    @contextmanager
    def serving(self, caller: PeerId, why: Purpose) -> Iterator[None]:
        """Inside, a call of a peer is in hand."""
        key = object()
        self.calls[key] = caller, why, self.now()
        try:
            yield
        finally:
            del self.calls[key]

    async def until(
        self,
        condition: Callable[[], bool],
        what: str,
        whom: WaitTarget,
        timeout_s: float | None = None,
        *,
        why: Purpose | None = None,
        idle: bool = False,
    ) -> bool:
        """Wait until `condition` holds (looked at after every pulse), at most `timeout_s`. False: the time was up.

        `what`, `whom`, `why` and `idle` name the wait, see core.status.Wait.
        """
        if condition():
            return True
        loop = asyncio.get_running_loop()
        ends_at = None if timeout_s is None else loop.time() + timeout_s
        with self.waiting(what, whom, timeout_s, why, idle=idle):
            while not condition():
                waiter = loop.create_future()
                timer = None if ends_at is None else loop.call_at(ends_at, _time_is_up, waiter)
                self._conditions[waiter] = condition
                try:
                    if not await waiter:
                        return condition()
                finally:
                    del self._conditions[waiter]
                    if timer is not None:
                        timer.cancel()
        return True


def _may_hold(condition: Callable[[], bool]) -> bool:
    """True also where it raises: it does so again for who waits, and there it belongs."""
    with suppress(Exception):
        return condition()
    return True


def _time_is_up(waiter: "asyncio.Future[bool]") -> None:
    if not waiter.done():
        waiter.set_result(False)
