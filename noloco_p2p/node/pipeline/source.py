"""What stage 0 begins: microbatches are read, and each is brought through the stages and back (design.md §4)."""

import asyncio

from noloco_p2p.core.messages import Batch, Gradient, MicrobatchId, Origin, PeerId
from noloco_p2p.core.nonfinite import NonFiniteStreak
from noloco_p2p.core.status import AnyReplica, Resource, for_microbatch
from noloco_p2p.errors import Busy, Declined, LocalError, PeerError, Violation
from noloco_p2p.node.pipeline.dispatch import Dispatcher, StageOutput
from noloco_p2p.node.state import NodeState, to_the_end


class MicrobatchSource:
    """The microbatches that one stage-0 node begins. `incarnation` is 64 random bits of this process."""

    def __init__(self, node: NodeState, sender: Dispatcher, incarnation: int) -> None:
        self._node = node
        self._sender = sender
        self._incarnation = incarnation
        self._counter = 0
        self._streak = NonFiniteStreak()

    async def read_and_send(self) -> dict[MicrobatchId, Batch]:
        """The microbatches of one inner step, at most `max_in_flight` at once, until the last one has ended."""
        data = self._node.batches
        assert data is not None, "stage 0 has data"
        batches: dict[MicrobatchId, Batch] = {}
        gate = asyncio.Semaphore(self._node.config.limits.max_in_flight)
        async with asyncio.TaskGroup() as flights:
            for index in range(self._node.manifest.microbatches_per_step):
                with self._node.waiting("place in flight", Resource.INNER_STEP):
                    await gate.acquire()
                if self._node.draining:
                    break
                microbatch = MicrobatchId(self._node.me, self._incarnation, self._counter)
                self._counter += 1
                with self._node.waiting("batch", Resource.DATA):
                    batches[microbatch] = await data.next()
                flight = flights.create_task(self._microbatch(microbatch, index, batches[microbatch]))
                flight.add_done_callback(lambda _: gate.release())
        return batches

    async def _microbatch(self, microbatch: MicrobatchId, index: int, batch: Batch) -> None:
        """One microbatch of this origin: it contributes to the inner step, or is dropped with a count and a reason."""
        node = self._node
        try:
            through, finite = await self._route(microbatch, Origin(node.me, node.step, index), batch)
        except (PeerError, asyncio.CancelledError) as error:
            node.event("microbatch", result="dropped", reason=self._why(error), message=str(error))
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        node.heard_at = node.now()
        node.routes[microbatch] = (None, through)
        node.event("microbatch", result="done" if finite else "nonfinite")
        self._streak.record(finite, through or node.me)
        reason = self._streak.reason_to_stop((node.me,) if node.last else node.view.following)
        if reason is not None:
            node.fail(LocalError(reason))

    async def _route(self, microbatch: MicrobatchId, origin: Origin, batch: Batch) -> tuple[PeerId | None, bool]:
        """Forward, the call to the next stage, backward: (who served it next, was everything finite).

        Raises PeerError when nobody could serve it.
        """
        node, stage, why = self._node, self._node.stage, for_microbatch(microbatch)
        if node.last:
            with node.span("backward"), node.computing("backward", why):
                done = await to_the_end(stage.loss_backward(microbatch, batch.inputs, batch.targets, batch.mask))
            return None, done.finite
        with node.span("forward"), node.computing("forward", why):
            graph, hidden = await stage.forward(batch.inputs, batch.mask)
        try:
            gradient, through = await self._deliver(StageOutput(microbatch, origin, hidden, batch.targets, batch.mask))
            with node.span("backward"), node.computing("backward", why):
                done = await to_the_end(stage.backward(graph, microbatch, gradient))
        except BaseException:
            stage.discard(graph)
            raise
        return through, done.finite and gradient.finite

    async def _deliver(self, parcel: StageOutput) -> tuple[Gradient, PeerId]:
        """Busy is no failure, and a stage that nobody serves comes back: try again as long as this node trains."""
        node = self._node
        with node.waiting("gradient", AnyReplica(node.index + 1), None, for_microbatch(parcel.microbatch)):
            while True:
                try:
                    return await self._sender.deliver(parcel, node.now() + node.config.limits.microbatch_deadline_s)
                except Busy:
                    if node.draining:
                        raise
                except Declined:
                    if node.draining or not await self._sender.until_served():
                        raise

    def _why(self, error: BaseException) -> str:
        """The reason for which a microbatch was dropped, as a label."""
        match error:
            case Violation():
                return "violation"
            case Busy():
                return "busy"
            case asyncio.CancelledError():
                return "cancelled"
        return "leaving" if self._node.draining else "declined"
