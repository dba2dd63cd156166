"""Evaluation on held-out data, and how a run ends (design.md §4)."""

import asyncio
from collections.abc import Callable

from noloco_p2p.core import members as membership
from noloco_p2p.core.messages import Batch, LossSum, MicrobatchId, Origin
from noloco_p2p.core.status import AnyReplica, Resource, for_microbatch
from noloco_p2p.errors import Declined, PeerError
from noloco_p2p.node.pipeline.dispatch import Dispatcher, StageOutput
from noloco_p2p.node.state import NodeState

EVALUATIONS_AT_ONCE = 2


class Shutdown:
    """Evaluations of one node, and its stay after its last step."""

    def __init__(self, node: NodeState, sender: Dispatcher) -> None:
        self._node = node
        self._sender = sender
        self.evaluated_s = 0.0
        """Seconds spent in evaluations while training."""

    async def evaluate_if_due(self) -> None:
        """Every so many inner steps; the last evaluation is `finish`'s."""
        node = self._node
        every = node.manifest.evaluation.every_steps
        if every is not None and node.step < node.manifest.steps and node.inner_steps % every == 0:
            await self.evaluate()

    async def evaluate(self) -> None:
        """The same held-out microbatches as everybody, on fixed routes, no weight averaging (method.md §5).

        A stage that nobody serves is waited for; an evaluation of which a microbatch is missing does not count.
        """
        node = self._node
        rank = sorted([node.me, *(a.peer_id for a in node.members.of_stage(0))]).index(node.me)
        gate = asyncio.Semaphore(EVALUATIONS_AT_ONCE)
        began, missed = node.now(), False

        async def one(number: int, batch: Batch) -> LossSum | None:
            nonlocal missed
            with node.waiting("place among the evaluations", Resource.DEVICE, idle=True):
                await gate.acquire()
            try:
                if missed:
                    return None
                return await self._loss(number, rank, batch)
            except PeerError as error:
                # What nobody evaluates until its deadline, nobody evaluates of the others either.
                missed = True
                node.event("warning", message=f"a held-out microbatch was not evaluated: {error}")
                return None
            finally:
                gate.release()

        assert node.batches is not None, "stage 0 has data"
        flights = [one(number, batch) for number, batch in enumerate(node.batches.validation())]
        sums = [loss for loss in await asyncio.gather(*flights) if loss is not None]
        tokens = sum(s.tokens for s in sums)
        if node.advert.state == "training":
            self.evaluated_s += node.now() - began
        if tokens and not missed:
            node.event("evaluation", step=node.step, loss=sum(s.loss_sum for s in sums) / tokens, tokens=tokens)

    async def _loss(self, number: int, rank: int, batch: Batch) -> LossSum:
        node = self._node
        # Evaluations have ids of their own kind: no incarnation has number 0 (the wiring draws from 1).
        microbatch = MicrobatchId(node.me, 0, number)
        why = for_microbatch(microbatch)
        with node.computing("evaluation", why):
            result = await node.stage.evaluate(batch.inputs, batch.targets, batch.mask)
        if isinstance(result, LossSum):
            return result
        parcel = StageOutput(microbatch, Origin(node.me, node.step, rank), result, batch.targets, batch.mask)
        with node.waiting("loss", AnyReplica(node.index + 1), None, why):
            while True:
                try:
                    return await self._sender.evaluate(parcel, node.now() + node.config.limits.microbatch_deadline_s)
                except Declined:
                    if node.draining or not await self._sender.until_served():
                        raise

    async def finish(self) -> None:
        """Stay until the others no longer need this node, at most `linger_s` for each thing waited for."""
        node, linger_s = self._node, self._node.config.limits.linger_s

        def others(stages: Callable[[int], bool], states: frozenset[str]) -> bool:
            return any(stages(stage) and state in states for stage, state in node.members.counts())

        at_work = membership.STAGE_0_AT_WORK | membership.READY
        if node.index == 0:
            if not await node.until(
                lambda: node.draining or not others(lambda s: s > 0, at_work),
                "end of the later stages",
                Resource.SWARM,
                linger_s,
            ):
                node.event("warning", message="evaluates although a later stage has not finished")
            await self.evaluate()
            node.update(evaluated=True)
            node.pulse()
            await node.until(
                lambda: node.draining or not others(lambda s: s == 0, at_work),
                "end of stage 0",
                Resource.SWARM,
                linger_s,
            )
            return

        def all_evaluated() -> bool:
            finished = node.members.of_stage(0, {"finished"})
            return all(a.evaluated for a in finished) and not others(lambda s: s == 0, at_work)

        await node.until(lambda: node.draining or all_evaluated(), "last evaluations", AnyReplica(0), linger_s)
