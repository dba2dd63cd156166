"""Evaluation on held-out data, and how a run ends (design.md §4)."""

import asyncio
from collections.abc import Callable

from noloco_p2p.core import members as membership
from noloco_p2p.core.messages import Batch, LossSum, MicrobatchId, Origin
from noloco_p2p.core.status import DEVICE, SWARM, of_microbatch, of_stage
from noloco_p2p.errors import Declined, PeerError
from noloco_p2p.node.pipeline.dispatch import Dispatcher, StageOutput
from noloco_p2p.node.state import NodeState

EVALUATIONS_AT_ONCE = 2


class Shutdown:
    """Evaluations of one node, and its stay after its last step."""

    def __init__(self, seat: NodeState, sender: Dispatcher) -> None:
        self._seat = seat
        self._sender = sender
        self.evaluated_s = 0.0
        """Seconds spent in evaluations while training."""

    async def evaluate_if_due(self) -> None:
        """Every so many inner steps; the last evaluation is `finish`'s."""
        seat = self._seat
        every = seat.manifest.evaluation.every_steps
        if every is not None and seat.step < seat.manifest.steps and seat.inner_steps % every == 0:
            await self.evaluate()

    async def evaluate(self) -> None:
        """The same held-out microbatches as everybody, on fixed routes, no weight averaging (method.md §5).

        A stage that nobody serves is waited for; an evaluation of which a microbatch is missing does not count.
        """
        seat = self._seat
        rank = sorted([seat.me, *(a.peer_id for a in seat.members.of_stage(0))]).index(seat.me)
        gate = asyncio.Semaphore(EVALUATIONS_AT_ONCE)
        began, missed = seat.now(), False

        async def one(number: int, batch: Batch) -> LossSum | None:
            nonlocal missed
            with seat.waiting("place among the evaluations", DEVICE, idle=True):
                await gate.acquire()
            try:
                if missed:
                    return None
                return await self._loss(number, rank, batch)
            except PeerError as error:
                # What nobody evaluates until its deadline, nobody evaluates of the others either.
                missed = True
                seat.event("warning", message=f"a held-out microbatch was not evaluated: {error}")
                return None
            finally:
                gate.release()

        assert seat.batches is not None, "stage 0 has data"
        flights = [one(number, batch) for number, batch in enumerate(seat.batches.validation())]
        sums = [loss for loss in await asyncio.gather(*flights) if loss is not None]
        tokens = sum(s.tokens for s in sums)
        if seat.advert.state == "training":
            self.evaluated_s += seat.now() - began
        if tokens and not missed:
            seat.event("evaluation", step=seat.step, loss=sum(s.loss_sum for s in sums) / tokens, tokens=tokens)

    async def _loss(self, number: int, rank: int, batch: Batch) -> LossSum:
        seat = self._seat
        # Evaluations have ids of their own kind: no incarnation has number 0 (the wiring draws from 1).
        microbatch = MicrobatchId(seat.me, 0, number)
        why = of_microbatch(microbatch)
        with seat.computing("evaluation", why):
            result = await seat.stage.evaluate(batch.inputs, batch.targets, batch.mask)
        if isinstance(result, LossSum):
            return result
        parcel = StageOutput(microbatch, Origin(seat.me, seat.step, rank), result, batch.targets, batch.mask)
        with seat.waiting("loss", of_stage(seat.index + 1), None, why):
            while True:
                try:
                    return await self._sender.evaluate(parcel, seat.now() + seat.config.limits.microbatch_deadline_s)
                except Declined:
                    if seat.draining or not await self._sender.until_served():
                        raise

    async def finish(self) -> None:
        """Stay until the others no longer need this node, at most `linger_s` for each thing waited for."""
        seat, linger_s = self._seat, self._seat.config.limits.linger_s

        def others(stages: Callable[[int], bool], states: frozenset[str]) -> bool:
            return any(stages(stage) and state in states for stage, state in seat.members.counts())

        at_work = membership.STAGE_0_AT_WORK | membership.READY
        if seat.index == 0:
            if not await seat.until(
                lambda: seat.draining or not others(lambda s: s > 0, at_work),
                "end of the later stages",
                SWARM,
                linger_s,
            ):
                seat.event("warning", message="evaluates although a later stage has not finished")
            await self.evaluate()
            seat.update(evaluated=True)
            seat.pulse()
            await seat.until(
                lambda: seat.draining or not others(lambda s: s == 0, at_work), "end of stage 0", SWARM, linger_s
            )
            return

        def all_evaluated() -> bool:
            finished = seat.members.of_stage(0, {"finished"})
            return all(a.evaluated for a in finished) and not others(lambda s: s == 0, at_work)

        await seat.until(lambda: seat.draining or all_evaluated(), "last evaluations", of_stage(0), linger_s)
