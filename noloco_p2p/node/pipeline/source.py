"""What stage 0 begins: it reads microbatches and takes each through the stages (ARCHITECTURE.md, "A microbatch")."""

import asyncio

from noloco_p2p.core.messages import Batch, MicrobatchId, Origin
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import Busy, PeerError, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.dispatch import Dispatcher, StageInput
from noloco_p2p.node.pipeline.finite_watch import FiniteWatch
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.waits import Waits


class MicrobatchSource:
    """The microbatches that one stage-0 node begins. `incarnation` is 64 random bits of this process."""

    def __init__(
        self, node: NodeState, swarm: Membership, waits: Waits, dispatcher: Dispatcher, incarnation: int
    ) -> None:
        self._node = node
        self._swarm = swarm
        self._waits = waits
        self._dispatcher = dispatcher
        self._incarnation = incarnation
        self._counter = 0
        self._watch = FiniteWatch(node, swarm, waits)

    async def read_and_send(self) -> dict[MicrobatchId, Batch]:
        """The microbatches of one inner step, at most `NodeState.places` at once, until the last one has ended."""
        node, data = self._node, self._node.batches
        assert data is not None, "stage 0 has data"
        batches: dict[MicrobatchId, Batch] = {}
        under_way: set[asyncio.Task[None]] = set()

        def ended(flight: asyncio.Task[None]) -> None:
            under_way.remove(flight)
            self._waits.pulse()

        async with asyncio.TaskGroup() as flights:
            for index in range(node.manifest.microbatches_per_step):
                await self._waits.until(lambda: len(under_way) < node.places(), "place in flight", Resource.INNER_STEP)
                if node.draining:
                    break
                microbatch = MicrobatchId(node.me, self._incarnation, self._counter)
                self._counter += 1
                with self._waits.waiting("batch", Resource.DATA):
                    batches[microbatch] = batch = await data.next()
                under_way.add(flight := flights.create_task(self._send(microbatch, index, batch)))
                flight.add_done_callback(ended)
        return batches

    async def _send(self, microbatch: MicrobatchId, index: int, batch: Batch) -> None:
        """One microbatch contributes to the inner step, or is dropped with a count and a reason."""
        node, origin = self._node, Origin(self._node.me, self._node.step, index)
        try:
            result = await self._dispatcher.train(
                StageInput(microbatch, origin, batch.inputs, batch.targets, batch.mask)
            )
        except (PeerError, asyncio.CancelledError) as error:
            node.event("microbatch", result="dropped", reason=self._reason(error), message=str(error))
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        self._swarm.heard()
        node.count(microbatch, None, result.next_hop)
        node.event("microbatch", result="done" if result.finite else "nonfinite")
        await self._watch.ended(result.finite, result.next_hop or node.me)

    def _reason(self, error: BaseException) -> str:
        """The reason for which a microbatch was dropped, as a label."""
        match error:
            case Violation():
                return "violation"
            case Busy():
                return "busy"
            case asyncio.CancelledError():
                return "cancelled"
        return "leaving" if self._node.draining else "declined"
