"""Who one node is and how far it has come. Its duties read this state; only the methods here change it."""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from math import floor, inf
from random import Random
from statistics import median
from typing import Any

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core import members as membership
from noloco_p2p.core import schedule
from noloco_p2p.core.agreement import NOT_YET
from noloco_p2p.core.line_rate import MeasuredLine
from noloco_p2p.core.messages import NO_STAGE, Advert, MicrobatchId, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.core.stage_values import StepResult
from noloco_p2p.core.status import MicrobatchSize, Status, Trouble
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.node.waits import Waits
from noloco_p2p.ports import Batches, Telemetry

STEPS_TIMED = 32  # number of recent inner steps whose median is taken as the duration of a step


class NodeState:
    """Identity and progress of one node. `stage` is set once the weights are made, `batches` then at stage 0 only."""

    stage: DeviceStage
    batches: Batches | None = None
    cursor: Mapping[str, object] | None = None
    """How far the data had been read when this node moved away from stage 0."""

    def __init__(self, advert: Advert, manifest: RunManifest, config: NodeConfig, telemetry: Telemetry) -> None:
        self.advert = advert
        self.manifest = manifest
        self.run_id = manifest.run_id
        self.config = config
        self.telemetry = telemetry
        self.waits = Waits(config.limits.microbatch_deadline_s)
        self.rng: Random = generator(manifest.seed, "node", advert.peer_id)
        self.inner_steps, self.taken_over = 0, 0  # the latter: how often other weights have replaced its own
        self.routes: dict[MicrobatchId, tuple[PeerId | None, PeerId | None]] = {}
        """Each microbatch counted in this step → the peer that sent it, and the peer that served it next."""
        self.drain_by: float | None = None  # while draining: when it stops offering microbatches, on the loop's clock
        self.next_stage: int | None = None  # while draining in order to move: the stage to hold next
        self._pause_requested = False
        self.stood_still = False  # and has not yet found out how far the others are
        self.closed_until: str | None = None  # when the owner's hours begin; None: now is within them
        self.microbatch: MicrobatchSize | None = None  # known once the weights are made
        self.error: BaseException | None = None
        self.stepped_at: float | None = None  # when the last inner step ended, or training began; None outside training
        self.step_seconds: deque[float] = deque(maxlen=STEPS_TIMED)  # from one inner step to the next
        self.evaluated_s = self.evaluated_between_steps_s = 0.0  # evaluations, seconds; those up to the last step
        self._clocked_at: float | None = None  # when the clock last advanced at this stage
        self.alarms = 0  # how often a peer sent something too wrong to be merely clipped
        self._troubles: dict[str, tuple[str, float]] = {}  # what is wrong, by name: (message, since when)

    # --- identity ---------------------------------------------------------------------------------------------------

    @property
    def me(self) -> PeerId:
        """This node's peer id."""
        return self.advert.peer_id

    @property
    def chosen_stage(self) -> int | None:
        """This node's stage; None until one is chosen."""
        return None if self.advert.stage == NO_STAGE else self.advert.stage

    @property
    def index(self) -> int:
        """This node's stage; one must have been chosen."""
        assert self.advert.stage != NO_STAGE, "no stage has been chosen"
        return self.advert.stage

    @property
    def last(self) -> bool:
        """Whether this is the last stage, the one with the head and the loss."""
        return self.index == self.manifest.stages - 1

    @property
    def replica(self) -> str:
        """The name of this replica in messages."""
        return f"stage {self.advert.stage} replica {self.me}"

    def update(self, **changes: object) -> None:
        """Change fields of the advert; the next announcement carries them."""
        self.advert = replace(self.advert, **changes)  # type: ignore[arg-type]

    def publish(self, **changes: object) -> None:
        """Change fields of the advert, and wake everything that waits for a change."""
        self.update(**changes)
        self.waits.pulse()

    def enter(self, event: str, reason: str = "") -> None:
        """Move to the next state on `event` (core/members.TRANSITIONS)."""
        self.update(state=membership.next_state(self.advert.state, event))
        self.stepped_at = self.now() if self.advert.state == "training" else None
        self.event("state", state=self.advert.state, reason=reason or event)
        self.waits.pulse()

    def places(self) -> float:
        """How many microbatches may be in flight here: as many as fit into memory, within `limits.max_in_flight`."""
        held = None if self.microbatch is None else self.stage.places
        return min((places for places in (self.config.limits.max_in_flight, held) if places is not None), default=inf)

    def hold(self, stage: DeviceStage) -> None:
        """Take over the stage, whose weights have been made."""
        self.stage = stage
        run, sizes = self.manifest, (stage.state.hidden.nbytes, stage.state.gradient.nbytes)
        self.microbatch = MicrobatchSize(run.microbatches_per_step, *sizes, run.wire.forward, run.wire.backward)

    def read_from(self, batches: Batches) -> None:
        """Take over the opened data of stage 0."""
        self.batches = batches

    def close_batches(self) -> None:
        """Close the data, if they are open."""
        if self.batches is not None:
            self.batches.close()
            self.batches = None

    # --- begin and end ----------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether this node is about to leave, or to move to another stage: it starts nothing new."""
        return self.drain_by is not None

    @property
    def leaving(self) -> bool:
        """Whether this node is about to leave for good."""
        return self.draining and self.next_stage is None

    def drain(self, reason: str, *, next_stage: int | None = None) -> None:
        """Finish the work in hand and start nothing new: to leave, or to continue at `next_stage`."""
        self.drain_by, self.next_stage = self.now() + self.config.limits.drain_s / 2, next_stage
        if self.advert.state not in ("draining", "left"):
            self.enter("drain", reason)
        self.waits.pulse()

    def move(self, stage: int) -> None:
        """Change to another stage, like a newcomer, after the work in hand is done."""
        self.cursor = self.cursor if self.batches is None else self.batches.cursor
        self.close_batches()
        self.stage.close()
        self.drain_by = self.next_stage = self._clocked_at = None
        self.inner_steps = 0
        self.update(stage=stage, moving_to=None, unserved=False, holds=(), microbatches_per_s=0.0, capacity_per_s=0.0)
        self.update(outer_round=0, fresh_round=0, partner_from_round=NOT_YET)

    @property
    def pausing(self) -> bool:
        """Whether no new inner step may start: the owner wants the device, or this node has stood still."""
        return self.wanted_by_owner or self.stood_still

    @property
    def wanted_by_owner(self) -> bool:
        """Whether the owner wants the device."""
        return self._pause_requested or self.closed_until is not None

    def pause(self, pausing: bool) -> None:
        """The owner claims the device, or gives it back. Outside `limits.hours` it is the owner's in any case."""
        self._pause_requested = pausing
        self.waits.pulse()

    def close_until(self, opens_at: str | None) -> None:
        """Set the time of day when the owner's hours begin; None: now is within them."""
        self.closed_until = opens_at

    def stand_still(self, stood_still: bool) -> None:
        """Note whether this node has stood still and has yet to catch up. That time is not part of an inner step."""
        self.stood_still = stood_still
        self.stepped_at = self.stepped_at and self.now()

    def fail(self, error: BaseException) -> None:
        """Make the node's main task raise `error`; only the first error counts."""
        self.error = self.error or error
        self.waits.pulse()

    def task_ended(self, task: asyncio.Task[Any]) -> None:
        """Wake whoever waits for a background task, and report a bug in it at once: nobody may wait for it yet."""
        self.waits.pulse()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def distrust(self, result: str, **fields: object) -> None:
        """Report that something a peer sent was not accepted as it was; `result` says why."""
        self.alarms += result not in ("clipped", "gradient")
        self.event("distrusted", result=result, **fields)

    def trouble(self, name: str, message: str | None) -> None:
        """Note that something is wrong, or (None) no longer wrong; the node continues in any case."""
        before, since = self._troubles.get(name, (None, self.now()))
        if message is None:
            self._troubles.pop(name, None)
        elif message != before:
            self._troubles[name] = message, since
            self.event("warning", message=message)

    def troubles(self, now: float) -> tuple[Trouble, ...]:
        """What is wrong, sorted by name. `now` is on the loop's clock. Callable from any thread."""
        found = sorted(self._troubles.copy().items())
        return tuple(Trouble(name, message, max(0.0, now - since)) for name, (message, since) in found)

    # --- progress ---------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The floor of this node's clock."""
        return floor(self.advert.step)

    def furthest_step(self) -> float:
        """The furthest step that the swarm can have reached, judging by this node's own clock."""
        age_s = 0.0 if self._clocked_at is None else self.now() - self._clocked_at
        return schedule.furthest(self.advert.step, age_s, self.advert.steps_per_s, self.manifest.outer.inner_steps)

    def is_possible(self, round: int, step: float) -> bool:
        """Whether weights of another stage can be of this round and step by now."""
        limit = self.furthest_step()
        # A replica that leaves freezes its last weights under the number of the next round.
        return step <= limit and round <= limit // self.manifest.outer.inner_steps + 2

    def count(self, microbatch: MicrobatchId, sender: PeerId | None, next_hop: PeerId | None) -> None:
        """Note that a microbatch contributes to the current inner step; `next_hop` served it at the next stage."""
        self.routes[microbatch] = (sender, next_hop)

    def go_on_at(self, step: float, inner_steps: int, partner_from_round: int) -> None:
        """Set the clock to that of newly adopted weights. Partners may pull from `partner_from_round` on."""
        self.inner_steps, self.taken_over = inner_steps, self.taken_over + 1
        self.stepped_at = self.stepped_at and self.now()  # the time of their transfer is not part of an inner step
        self.update(step=min(float(self.manifest.steps), max(0.0, step)), partner_from_round=partner_from_round)

    def finish_inner_step(self, result: StepResult, clocks: Iterable[float], line: MeasuredLine) -> None:
        """Advance the clock towards the median of the projected `clocks` of stage 0 (`schedule.advance`), and update
        this node's speeds.

        The announced speed counts inner steps. The speed of the clock itself would feed back: a clock that lags would
        be projected to lag. Microbatches are counted per second of device work, because per second of wall time all
        stages pass the same number, whichever of them is the bottleneck.
        """
        self.inner_steps += 1
        self.routes, self.evaluated_between_steps_s = {}, self.evaluated_s
        now, manifest = self.now(), self.manifest
        samples = [self.advert.step + 0.5] if self.index == 0 else []
        median = schedule.clock_median([*samples, *clocks])
        self.update(step=schedule.advance(self.advert.step, median, manifest.steps, pull=not manifest.in_step))
        began = max(self._clocked_at or 0.0, self.stepped_at or 0.0)  # pauses do not count
        if self._clocked_at is not None and now > began and not self.stood_still:
            self.update(steps_per_s=schedule.smooth_rate(self.advert.steps_per_s, now - began))
        if result.microbatches and result.busy_s > 0 and not self.stood_still:
            rate = schedule.smooth_rate(self.advert.microbatches_per_s, result.busy_s / result.microbatches)
            line_s = line.microbatch_s(first=self.index == 0, last=self.last)
            self.update(microbatches_per_s=rate, capacity_per_s=1 / max(1 / rate, line_s))
        speeds = {"up_bytes_per_s": line.up.bytes_per_s, "down_bytes_per_s": line.down.bytes_per_s}
        self.event("line", **speeds, round_trip_s=line.typical_round_trip_s)
        self._clocked_at = now
        if self.stepped_at is not None:
            self.step_seconds.append(now - self.stepped_at)
            self.stepped_at = now

    def spend_on_evaluation(self, seconds: float) -> None:
        """Add the duration of an evaluation, if it happened while training."""
        if self.advert.state == "training":
            self.evaluated_s += seconds

    def status(self, now: float) -> Status:
        """The part of the node's status that is known here. `now` is on the loop's clock."""
        took, places = tuple(self.step_seconds), self.places()
        return Status(
            self.advert,
            run_name=self.manifest.name,
            stages=self.manifest.stages,
            steps=self.manifest.steps,
            inner_steps=self.inner_steps,
            start_replicas=self.manifest.start_replicas,
            step_took_s=median(took) if took else None,
            since_step_s=None if self.stepped_at is None else max(0.0, now - self.stepped_at),
            places=None if places == inf else int(places),
            troubles=self.troubles(now),
            closed_until=self.closed_until,
            microbatch=self.microbatch,
        )

    @staticmethod
    def now() -> float:
        """The time on the loop's clock, in seconds."""
        return asyncio.get_running_loop().time()

    def event(self, kind: str, /, **fields: object) -> None:
        """Report an event to telemetry."""
        self.telemetry.event(kind, **fields)

    def span(self, phase: str) -> AbstractContextManager[None]:
        """Measure the duration of a phase (ARCHITECTURE.md, "Metrics")."""
        return self.telemetry.span(phase)
