"""The main loop of a node, in run order: start reading here.

    choose a stage → make the weights → wait for the others → train → finish

Training at stage 0 reads microbatches and sends them through the stages; at a later stage it serves what arrives. Both
take inner steps, and once in a while an outer round. The node sees the world through the ports only; the same code runs
over gRPC and, a thousand times, in one process under virtual time.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core import members as membership
from noloco_p2p.core import routing, schedule
from noloco_p2p.core.messages import (
    Advert,
    Batch,
    Description,
    Gradient,
    Header,
    HostTensor,
    LossSum,
    MicrobatchId,
    Origin,
    PeerId,
    Snapshot,
)
from noloco_p2p.core.streak import NonFiniteStreak
from noloco_p2p.duties.door import Door, to_the_end
from noloco_p2p.duties.rounds import Rounds
from noloco_p2p.duties.routes import Parcel, Sender
from noloco_p2p.duties.seat import Seat
from noloco_p2p.errors import Busy, Declined, LocalError, PeerError, Violation
from noloco_p2p.ports import Batches, Body, StepLabel, World

BRISK_REFRESH_S = 0.5
"""Seconds between two readings of the membership while the node waits for others."""
EVALUATIONS_AT_ONCE = 2


class Node:
    """One replica of one stage. Implements ports.Handler; `run` is its life.

    `advert` says who this node is and where it can be reached; its stage and state are the node's to change.
    `incarnation` is 64 random bits of this process.
    """

    def __init__(
        self, advert: Advert, manifest: RunManifest, config: NodeConfig, world: World, incarnation: int
    ) -> None:
        stage = -1 if config.stage is None else config.stage
        advert = replace(advert, stage=stage, state="starting", settled=config.stage is not None)
        self.seat = Seat(advert, manifest, config, world)
        self._sender = Sender(self.seat)
        self._door = Door(self.seat, self._sender)
        self._rounds = Rounds(self.seat)
        self._incarnation = incarnation
        self._counter = 0
        self._batches: Batches | None = None
        self._announced: tuple[object, ...] = ()
        self._readings = 0
        self._said = ""
        self._saw_the_end = False
        self._stepped_at: float | None = None

    # === life =======================================================================================================

    async def run(self) -> None:
        """Take part until the run has ended or `drain` was called and done. Raises what made the node fail."""
        seat = self.seat
        tasks = [asyncio.create_task(self._watch_membership()), asyncio.create_task(self._live())]
        tasks.append(asyncio.create_task(self._watch_failure()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._batches is not None:
                self._batches.close()
            if not seat.draining:
                seat.enter("drain", "the run has ended")
            seat.enter("leave")
            try:
                await seat.world.directory.withdraw()
            except PeerError as error:
                seat.event("warning", message=f"could not tell the others that this node leaves: {error}")

    def drain(self) -> None:
        """Leave: finish what is held, begin nothing new, at most `limits.drain_s`."""
        if not self.seat.draining:
            self.seat.drain_by = self.seat.now() + self.seat.config.limits.drain_s / 2
            self.seat.enter("drain", "told to leave")

    async def _watch_failure(self) -> None:
        """Ends when the node has failed, or has been draining for as long as it may."""
        seat = self.seat
        await seat.until(lambda: seat.draining or seat.error is not None)
        if seat.error is None:
            await seat.until(lambda: seat.error is not None, seat.config.limits.drain_s)
        if seat.error is not None:
            raise seat.error
        seat.event("warning", message=f"left after {seat.config.limits.drain_s:g} s with work in hand")

    async def _live(self) -> None:
        await self._choose_stage()
        await self._make_weights()
        await self._wait_for_others()
        if self.seat.index == 0:
            await self._train_first_stage()
        else:
            await self._train_later_stage()
        if not self.seat.draining:
            self.seat.enter("end", "the run has reached its last step")
            await self._finish()

    # === membership =================================================================================================

    async def _watch_membership(self) -> None:
        """The one task that speaks to the directory; everything else routes from what it read."""
        seat = self.seat
        while True:
            self._announced = self._shown()
            if seat.index >= 0:
                await self._announce()
            await self._read()
            training = seat.advert.state == "training"
            refresh_s = seat.config.directory.refresh_s
            await seat.until(
                lambda: self._shown() != self._announced, refresh_s if training else min(refresh_s, BRISK_REFRESH_S)
            )

    def _shown(self) -> tuple[object, ...]:
        """The part of the advert whose change is announced at once."""
        advert = self.seat.advert
        return advert.stage, advert.state, advert.settled, advert.evaluated

    async def _announce(self) -> None:
        seat = self.seat
        try:
            await seat.world.directory.announce(seat.advert, seat.config.directory.ttl_s)
        except PeerError as error:
            seat.event("warning", message=f"this node could not be announced: {error}")

    async def _read(self) -> None:
        seat = self.seat
        try:
            adverts = await seat.world.directory.peers()
        except PeerError as error:
            seat.event("warning", message=f"the membership could not be read: {error}")
            return
        seat.members.update([a for a in adverts if a.run_id == seat.run_id], now=seat.now())
        counts: dict[tuple[int, str], int] = {}
        for advert in (*seat.members.all(), seat.advert):
            counts[advert.stage, advert.state] = counts.get((advert.stage, advert.state), 0) + 1
        seat.event("membership", counts=counts)
        self._readings += 1
        self._door.strike()
        seat.pulse()

    async def _next_reading(self) -> None:
        """Wait until the membership has been read anew, from now on."""
        seen = self._readings
        await self.seat.until(lambda: self._readings > seen)

    # === the stage and its weights ==================================================================================

    async def _choose_stage(self) -> None:
        """Settle on a stage: the emptiest one, until two readings in a row show that nobody need move."""
        seat, manifest, quiet = self.seat, self.seat.manifest, 0
        await self._next_reading()
        while not seat.advert.settled:
            others = seat.members.all()
            stage = membership.stage_to_take(seat.advert, others, manifest.stages)
            missing = membership.lacking(
                seat.advert, others, manifest.stages, manifest.start_replicas, membership.PRESENT
            )
            if stage != seat.index:
                seat.update(stage=stage)
                seat.pulse()
                quiet = 0
            elif self._run_has_begun() or not missing:
                quiet += 1
                if quiet == 2:
                    seat.update(settled=True)
            else:
                quiet = 0
                self._say_missing(missing)
            await self._next_reading()
        seat.event("info", message=f"holds stage {seat.index} of {manifest.stages}")

    async def _make_weights(self) -> None:
        seat = self.seat
        seat.stage = await seat.world.make_stage(seat.index)
        if seat.index == 0:
            self._batches = await seat.world.make_batches()
        await self._rounds.freeze(0)

    async def _wait_for_others(self) -> None:
        """Until every stage has `start_replicas`; a run that has begun is joined at the newest snapshot of a mate."""
        seat, manifest = self.seat, self.seat.manifest
        # Who was there before the others began starts with them, whatever is announced meanwhile.
        late = self._run_has_begun()
        seat.enter("made", "the weights are made")

        def may_begin() -> bool:
            missing = membership.lacking(
                seat.advert,
                seat.members.all(),
                manifest.stages,
                manifest.start_replicas,
                membership.READY | membership.IN_ROUNDS,
            )
            if missing and not self._run_has_begun():
                self._say_missing(missing)
                return seat.draining
            return True

        await seat.until(may_begin)
        if seat.draining:
            return
        seat.enter("begin")
        if late:
            await self._catch_up()
        seat.enter("synced", "joined the run under way" if late else "everybody is here")

    def _run_has_begun(self) -> bool:
        return any(a.state in ("training", "finished") for a in self.seat.members.all())

    def _say_missing(self, missing: dict[int, int]) -> None:
        what = "waiting for " + ", ".join(f"{n} more of stage {s}" for s, n in sorted(missing.items()))
        if what != self._said:
            self._said = what
            self.seat.event("info", message=what)

    async def _catch_up(self) -> None:
        """A later joiner adopts step, round and the newest snapshot of one replica of its stage."""
        seat = self.seat
        donors = seat.members.of_stage(seat.index, membership.IN_ROUNDS)
        for donor in donors:
            try:
                described = await seat.world.transport.describe(donor)
                theirs = await self._rounds.adopt(donor)
            except PeerError as error:
                seat.event("warning", message=f"could not start from {donor.peer_id}: {error}")
                continue
            seat.update(step=min(float(seat.manifest.steps), max(0.0, described.step)))
            seat.event("info", message=f"starts from round {theirs.round} of {donor.peer_id}, step {seat.step}")
            return
        clocks = [a.step for a in seat.members.all()]
        seat.update(
            step=max(clocks, default=0.0), outer_round=max((a.outer_round for a in seat.members.all()), default=0)
        )
        self._rounds.done = seat.advert.outer_round
        seat.event("warning", message=f"stage {seat.index} has no replica to start from: it begins with fresh weights")

    # === training, stage 0 ==========================================================================================

    async def _train_first_stage(self) -> None:
        """Read microbatches, send each through the stages, step when all of them are back."""
        seat, streak = self.seat, NonFiniteStreak()
        while seat.step < seat.manifest.steps and not seat.draining:
            began = seat.now()
            seat.look()
            batches = await self._read_and_send(streak)
            await self._inner_step(began, batches)
            # Once in a while: pull a partner's slow weights and outer delta.
            await self._outer_round_if_due()
            # Once in a while: evaluate on held-out data.
            await self._evaluate_if_due()

    async def _read_and_send(self, streak: NonFiniteStreak) -> dict[MicrobatchId, Batch]:
        """The microbatches of one inner step, at most `max_in_flight` at once, until the last one has ended."""
        assert self._batches is not None, "stage 0 has data"
        batches: dict[MicrobatchId, Batch] = {}
        gate = asyncio.Semaphore(self.seat.config.limits.max_in_flight)
        async with asyncio.TaskGroup() as flights:
            for index in range(self.seat.manifest.microbatches_per_step):
                await gate.acquire()
                if self.seat.draining:
                    break
                microbatch = MicrobatchId(self.seat.me, self._incarnation, self._counter)
                self._counter += 1
                batches[microbatch] = await self._batches.next()
                flight = flights.create_task(self._microbatch(microbatch, index, batches[microbatch], streak))
                flight.add_done_callback(lambda _: gate.release())
        return batches

    async def _microbatch(self, microbatch: MicrobatchId, index: int, batch: Batch, streak: NonFiniteStreak) -> None:
        """One microbatch of this origin: it contributes to the inner step, or is dropped with a count and a reason."""
        seat = self.seat
        try:
            through, finite = await self._route(microbatch, Origin(seat.me, seat.step, index), batch)
        except (PeerError, asyncio.CancelledError) as error:
            seat.event("microbatch", result="dropped", message=str(error))
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        self._door.routes[microbatch] = (None, through)
        seat.event("microbatch", result="done" if finite else "nonfinite")
        streak.record(finite, through or seat.me)
        reason = streak.reason_to_stop(1 if seat.last else len(seat.view.following))
        if reason is not None:
            seat.fail(LocalError(reason))

    async def _route(self, microbatch: MicrobatchId, origin: Origin, batch: Batch) -> tuple[PeerId | None, bool]:
        """Forward, the call to the next stage, backward: (who served it next, was everything finite).

        Raises PeerError when nobody could serve it.
        """
        seat, stage = self.seat, self.seat.stage
        if seat.last:
            done = await to_the_end(stage.loss_backward(microbatch, batch.inputs, batch.targets, batch.mask))
            return None, done.finite
        graph, hidden = await stage.forward(batch.inputs, batch.mask)
        try:
            gradient, through = await self._deliver(Parcel(microbatch, origin, hidden, batch.targets, batch.mask))
        except BaseException:
            stage.discard(graph)
            raise
        done = await to_the_end(stage.backward(graph, microbatch, gradient))
        return through, done.finite and gradient.finite

    async def _deliver(self, parcel: Parcel) -> tuple[Gradient, PeerId]:
        """Busy is no failure: try again as long as this node trains."""
        seat = self.seat
        while True:
            try:
                return await self._sender.deliver(parcel, seat.now() + seat.config.limits.microbatch_deadline_s)
            except Busy:
                if seat.draining:
                    raise

    # === training, later stages =====================================================================================

    async def _train_later_stage(self) -> None:
        """Serve what arrives; step when the target is reached and all that was admitted has ended."""
        seat, intake = self.seat, self._door.intake

        def over() -> bool:
            return seat.draining or self._first_stage_is_done()

        began = seat.now()
        while not over():
            began = seat.now()
            seat.look()
            target, due = self._target()
            self._door.admit(intake.open(seat.step, target, due))
            self._door.strike()
            await seat.until(lambda: intake.ready or over())
            if not intake.ready:
                break
            intake.seal()
            await self._inner_step(began, {})
            # Once in a while: pull a partner's slow weights and outer delta.
            await self._outer_round_if_due()
        self._door.close()
        await seat.until(lambda: intake.in_flight == 0)
        if not seat.draining:
            await self._inner_step(began, {})
            seat.update(step=float(seat.manifest.steps))
            await self._outer_round_if_due()

    def _target(self) -> tuple[int, frozenset[tuple[PeerId, int]] | None]:
        """How many microbatches this step takes, and under `balanced` which."""
        seat, manifest, view = self.seat, self.seat.manifest, self.seat.view
        count = routing.target(manifest.microbatches_per_step, max(1, len(view.origins)), len(view.mates))
        if manifest.routing != "balanced":
            return count, None
        due = routing.balanced_slots(
            manifest.seed, seat.index, seat.step, manifest.microbatches_per_step, view.origins, view.mates, seat.me
        )
        return len(due), due

    def _first_stage_is_done(self) -> bool:
        """Somebody of stage 0 was seen finished, and nobody of it is at work."""
        first = self.seat.members.of_stage(0, membership.STAGE_0_AT_WORK | {"finished"})
        self._saw_the_end = self._saw_the_end or any(a.state == "finished" for a in first)
        return self._saw_the_end and all(a.state == "finished" for a in first)

    # === inner steps, outer rounds ==================================================================================

    async def _inner_step(self, began: float, batches: dict[MicrobatchId, Batch]) -> None:
        """AdamW on what was added since `began`, then the clock moves (design.md, The step is a clock)."""
        seat, manifest, inner = self.seat, self.seat.manifest, self.seat.manifest.inner
        rate = schedule.learning_rate(
            min(seat.step + 1, manifest.steps),
            manifest.steps,
            inner.peak_learning_rate,
            inner.warmup_steps,
            inner.final_fraction,
        )
        label = StepLabel(seat.inner_steps + 1, seat.step, rate, self._door.routes, batches)
        result = await to_the_end(seat.stage.inner_step(label))
        seat.inner_steps += 1
        self._door.routes = {}
        self._rounds.inner_step_took(result.busy_s)
        self._move_clock(result.microbatches)
        cause = "gradients" if seat.index == 0 else "microbatches"
        seat.event("idle", cause=cause, seconds=max(0.0, seat.now() - began - result.busy_s))
        seat.event(
            "inner_step",
            inner_step=seat.inner_steps,
            step=seat.advert.step,
            tokens=result.tokens,
            loss_sum=result.loss_sum,
            loss_tokens=result.tokens,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            busy_s=result.busy_s,
        )

    def _move_clock(self, microbatches: int) -> None:
        """step ← step + 1 + ¼·(median − step − ½), and the speeds that the advert announces."""
        seat, manifest = self.seat, self.seat.manifest
        now, m = seat.now(), manifest.outer.inner_steps
        samples = [schedule.project(*clock, m) for clock in seat.members.clocks(now=now)]
        if seat.index == 0:
            samples.append(seat.advert.step + 0.5)
        median = schedule.clock_median(samples)
        step = schedule.advance(seat.advert.step, median, manifest.steps, manifest.routing != "balanced")
        if self._stepped_at is not None and now > self._stepped_at:
            took_s = now - self._stepped_at
            seat.update(
                steps_per_s=_smooth(seat.advert.steps_per_s, (step - seat.advert.step) / took_s),
                microbatches_per_s=_smooth(seat.advert.microbatches_per_s, microbatches / took_s),
            )
        self._stepped_at = now
        seat.update(step=step)

    async def _outer_round_if_due(self) -> None:
        seat, manifest = self.seat, self.seat.manifest
        if manifest.outer.pairing == "none":
            return
        due = schedule.due_round(seat.step, manifest.outer.inner_steps, self._rounds.done, manifest.steps)
        if due is not None:
            # No circular wait: from snapshot to merge the door answers Busy and its line is flushed.
            self._door.close()
            await self._rounds.run(due)

    # === evaluation and the end =====================================================================================

    async def _evaluate_if_due(self) -> None:
        every = self.seat.manifest.evaluation.every_steps
        at_end = self.seat.step >= self.seat.manifest.steps
        if every is not None and not at_end and self.seat.inner_steps % every == 0:
            await self._evaluate()

    async def _evaluate(self) -> None:
        """The same held-out microbatches as everybody, on fixed routes, no weight averaging (method.md §5)."""
        seat = self.seat
        assert self._batches is not None, "stage 0 has data"
        rank = sorted([seat.me, *(a.peer_id for a in seat.members.of_stage(0))]).index(seat.me)
        gate = asyncio.Semaphore(EVALUATIONS_AT_ONCE)
        began = seat.now()

        async def one(number: int, batch: Batch) -> LossSum | None:
            async with gate:
                try:
                    return await self._loss(number, rank, batch)
                except PeerError as error:
                    seat.event("warning", message=f"a held-out microbatch was not evaluated: {error}")
                    return None

        flights = [one(number, batch) for number, batch in enumerate(self._batches.validation())]
        sums = [loss for loss in await asyncio.gather(*flights) if loss is not None]
        tokens = sum(s.tokens for s in sums)
        seat.event("idle", cause="evaluation", seconds=seat.now() - began)
        if tokens:
            seat.event("evaluation", step=seat.step, loss=sum(s.loss_sum for s in sums) / tokens, tokens=tokens)

    async def _loss(self, number: int, rank: int, batch: Batch) -> LossSum:
        seat = self.seat
        result = await seat.stage.evaluate(batch.inputs, batch.targets, batch.mask)
        if isinstance(result, LossSum):
            return result
        assert isinstance(result, HostTensor)
        # Evaluations have ids of their own kind: no incarnation has number 0 (cli draws from 1).
        parcel = Parcel(
            MicrobatchId(seat.me, 0, number), Origin(seat.me, seat.step, rank), result, batch.targets, batch.mask
        )
        return await self._sender.evaluate(parcel, seat.now() + seat.config.limits.microbatch_deadline_s)

    async def _finish(self) -> None:
        """Stay until the others no longer need this node, at most `linger_s` for each thing waited for."""
        seat, linger_s = self.seat, self.seat.config.limits.linger_s

        def others(stages: Callable[[int], bool], states: frozenset[str]) -> list[Advert]:
            return [a for a in seat.members.all() if stages(a.stage) and a.state in states and a.peer_id != seat.me]

        at_work = membership.STAGE_0_AT_WORK | membership.READY
        if seat.index == 0:
            if not await seat.until(lambda: seat.draining or not others(lambda s: s > 0, at_work), linger_s):
                seat.event("warning", message="evaluates although a later stage has not finished")
            await self._evaluate()
            seat.update(evaluated=True)
            seat.pulse()
            await seat.until(lambda: seat.draining or not others(lambda s: s == 0, at_work), linger_s)
            return

        def all_evaluated() -> bool:
            first = others(lambda s: s == 0, membership.PRESENT)
            return all(a.evaluated for a in first if a.state == "finished") and not others(lambda s: s == 0, at_work)

        await seat.until(lambda: seat.draining or all_evaluated(), linger_s)

    # === ports.Handler ==============================================================================================

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        """See ports.Handler."""
        if self.seat.index <= 0:
            raise Declined("this node holds stage 0, which nobody sends to")
        return await self._door.propagate(caller, header, body)

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """See ports.Handler."""
        if self.seat.index <= 0:
            raise Declined("this node holds stage 0, which nobody sends to")
        return await self._door.evaluate(caller, header, body)

    async def fetch_snapshot(self, caller: PeerId, round: int | None, wait_s: float) -> Snapshot:
        """See ports.Handler."""
        if not (wait_s >= 0):
            raise Violation("a snapshot needs a wait of 0 s or more")
        return await self._rounds.serve(round, wait_s)

    def describe(self, caller: PeerId) -> Description:
        """See ports.Handler."""
        advert = self.seat.advert
        return Description(
            advert.peer_id, advert.run_id, advert.stage, advert.state, advert.step, advert.outer_round, advert.version
        )


def _smooth(old: float, new: float) -> float:
    """A moving average over about ten inner steps, which begins with the first value."""
    return 0.9 * old + 0.1 * new if old else new
