"""At stage 0: reads microbatches and takes each through the stages (ARCHITECTURE.md, "A microbatch")."""

import asyncio
from collections import deque

from noloco_p2p.core.messages import Batch, MicrobatchId, Origin
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import Busy, PeerError, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.dispatch import Dispatcher
from noloco_p2p.node.pipeline.finite_watch import FiniteWatch
from noloco_p2p.node.pipeline.gradient_audit import GradientAudit, Twins
from noloco_p2p.node.pipeline.task import StageInput
from noloco_p2p.node.state import NodeState


class MicrobatchSource:
    """Starts the microbatches of one stage-0 node. `incarnation` and `secret` are random bits of this process."""

    def __init__(
        self, node: NodeState, swarm: Membership, dispatcher: Dispatcher, secret: int | None, incarnation: int
    ) -> None:
        self._node = node
        self._swarm = swarm
        self._dispatcher = dispatcher
        self._incarnation = incarnation
        self._counter = 0
        self._audit = GradientAudit(node, swarm, secret)
        self._first: Twins | None = None
        """The pair opened by the latest microbatch; the next one gets the same data."""
        self._put_off: deque[tuple[MicrobatchId, Batch]] = deque()
        """Microbatches that a pause has cut short; they are sent first after it."""
        self._watch = FiniteWatch(node, swarm)

    async def read_and_send(self) -> dict[MicrobatchId, Batch]:
        """Send the microbatches of one inner step, at most `NodeState.places` at once, until the last one has ended.

        Returns their data; a pause may cut this short, to fewer microbatches or none.
        """
        node = self._node
        batches: dict[MicrobatchId, Batch] = {}
        under_way: set[asyncio.Task[None]] = set()

        def ended(flight: asyncio.Task[None]) -> None:
            under_way.remove(flight)
            node.waits.pulse()

        async with asyncio.TaskGroup() as flights:
            for index in range(node.manifest.microbatches_per_step):
                await node.waits.until(lambda: len(under_way) < node.places(), "place in flight", Resource.INNER_STEP)
                if node.draining or self._swarm.cut_short():
                    break
                microbatch, batch, twins = await self._next()
                batches[microbatch] = batch
                under_way.add(flight := flights.create_task(self._send(microbatch, index, batch, twins)))
                flight.add_done_callback(ended)
        for microbatch, _ in self._put_off:
            batches.pop(microbatch, None)
        return batches

    async def _next(self) -> tuple[MicrobatchId, Batch, Twins | None]:
        """The id of the next microbatch, its data, and its pair if the one before or after it has the same data."""
        if self._put_off:
            return *self._put_off.popleft(), None
        microbatch = MicrobatchId(self._node.me, self._incarnation, self._counter)
        self._counter += 1
        if (twins := self._first) is not None:
            self._first = None
            return microbatch, twins.batch, twins
        assert self._node.batches is not None, "stage 0 has data"
        with self._node.waits.waiting("batch", Resource.DATA):
            batch = await self._node.batches.next()
        self._first = self._audit.twins(microbatch, batch)
        return microbatch, batch, self._first

    async def _send(self, microbatch: MicrobatchId, index: int, batch: Batch, twins: Twins | None) -> None:
        """Take one microbatch through the stages. It counts in the inner step, or is dropped and reported."""
        node, origin = self._node, Origin(self._node.me, self._node.step, index)
        try:
            self._dispatcher.prepare(origin)
            task = StageInput(microbatch, origin, batch.inputs, batch.targets, batch.mask, avoid=self._audit.avoided())
            result = await self._dispatcher.train(task)
        except (PeerError, asyncio.CancelledError) as error:
            reason = self._reason(error)
            node.event("microbatch", result="dropped", reason=reason, message=str(error))
            if isinstance(error, asyncio.CancelledError):
                raise
            if reason == "paused":
                self._put_off.append((microbatch, batch))
            return
        self._swarm.heard()
        node.count(microbatch, None, result.next_hop)
        node.event("microbatch", result="done" if result.finite else "nonfinite")
        await self._watch.ended(result.finite, result.next_hop or node.me)
        if twins is not None:
            await self._audit.ended(twins, microbatch, result)

    def _reason(self, error: BaseException) -> str:
        """The reason why a microbatch was dropped, as a label."""
        if isinstance(error, Violation | Busy):
            return type(error).__name__.lower()
        if isinstance(error, asyncio.CancelledError):
            return "cancelled"
        if self._node.draining:
            return "leaving"
        return "paused" if self._swarm.cut_short() else "declined"
