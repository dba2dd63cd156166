"""Evaluation on held-out data, and how a run ends (ARCHITECTURE.md, "Start and end")."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain

from noloco_p2p.core import members as membership
from noloco_p2p.core.exchanges import PROBES
from noloco_p2p.core.messages import Advert, LossSum, MicrobatchId, Origin
from noloco_p2p.core.status import AnyReplica, Resource
from noloco_p2p.errors import Declined, PeerError
from noloco_p2p.node.directory_loop import RENEWALS_PER_TTL
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.pipeline.dispatch import Dispatcher
from noloco_p2p.node.pipeline.task import StageInput
from noloco_p2p.node.state import NodeState

EVALUATIONS_AT_ONCE = 2


async def watch_failure(node: NodeState) -> None:
    """Returns when the node has spent `drain_s` on leaving. Raises what made the node fail."""
    drain_s = node.config.limits.drain_s
    await node.waits.until(
        lambda: node.leaving or node.error is not None, "request to leave", Resource.OWNER, idle=True
    )
    await node.waits.until(lambda: node.error is not None, "unfinished work", Resource.INNER_STEP, drain_s)
    if node.error is not None:
        raise node.error
    node.event("warning", message=f"left after {drain_s:g} s with unfinished work")


class Shutdown:
    """The evaluations of a node, and its stay after its last step."""

    def __init__(self, node: NodeState, swarm: Membership, dispatcher: Dispatcher, rounds: OuterRounds) -> None:
        self._node = node
        self._swarm = swarm
        self._dispatcher = dispatcher
        self._rounds = rounds

    async def evaluate_if_due(self) -> None:
        """Evaluate every `every_steps` inner steps; the last evaluation is left to `finish`."""
        node, every = self._node, self._node.manifest.evaluation.every_steps
        if every is not None and node.step < node.manifest.steps and node.inner_steps % every == 0:
            await self.evaluate()

    async def evaluate(self) -> None:
        """Evaluate the held-out microbatches, the same as on all nodes, over fixed routes, without averaging weights
        (METHOD.md, "Measures").

        Waits for stages that nobody serves. An evaluation that misses a microbatch does not count. It ends when the
        node is to leave or to move, or to pause between two inner steps.
        """
        node = self._node
        rank = sorted([node.me, *(a.peer_id for a in self._swarm.members.of_stage(0))]).index(node.me)
        assert node.batches is not None, "stage 0 has data"
        began, left, losses = node.now(), enumerate(node.batches.validation()), dict[int, LossSum]()

        async def evaluate_some() -> None:
            for number, batch in left:
                if node.draining or (node.wanted_by_owner and node.advert.state == "training"):
                    raise Declined("this node is to leave or to pause")
                # Evaluations have ids of their own, with incarnation 0, which no process has.
                microbatch, origin = MicrobatchId(node.me, 0, number), Origin(node.me, node.step, rank)
                task = StageInput(microbatch, origin, batch.inputs, batch.targets, batch.mask)
                losses[number] = await self._dispatcher.evaluate(task)

        try:
            async with asyncio.TaskGroup() as flights:
                for _ in range(EVALUATIONS_AT_ONCE):
                    flights.create_task(evaluate_some())
        except* PeerError as missed:
            # If one is not evaluated within its deadline, the others will not be either.
            if not node.draining:
                node.event("warning", message=f"a held-out microbatch was not evaluated: {missed.exceptions[0]}")
            losses.clear()
        node.spend_on_evaluation(node.now() - began)
        sums = [loss for _, loss in sorted(losses.items())]
        if tokens := sum(s.tokens for s in sums):
            node.event("evaluation", step=node.step, loss=sum(s.loss_sum for s in sums) / tokens, tokens=tokens)

    async def finish(self) -> None:
        """Stay until the others no longer need this node, for at most `linger_s` per wait. A later stage stays while
        held-out microbatches arrive, for at most about `microbatch_deadline_s`.

        A replica that pulls from this node in its last outer round gets as much time as a transfer may take.
        """
        node, members, limits = self._node, self._swarm.members, self._node.config.limits
        at_work, began = membership.STAGE_0_AT_WORK | membership.READY, node.now()

        def others(stages: Iterable[int]) -> bool:
            return bool(self._present(chain.from_iterable(members.of_stage(stage, at_work) for stage in stages), began))

        def all_evaluated() -> bool:
            found = members.of_stage(0, at_work | {"finished"})
            return not self._present((a for a in found if a.state in at_work or not a.evaluated), began)

        def all_pulled() -> bool:
            return self._rounds.frozen.pullers().isdisjoint(a.peer_id for a in members.of_stage(node.index, at_work))

        async def stay(
            over: Callable[[], bool], what: str, whom: Resource | AnyReplica, longest_s: float = limits.linger_s
        ) -> bool:
            return await node.waits.until(lambda: node.draining or over(), what, whom, longest_s)

        if node.index > 0:
            seen, longest_at = -1, node.now() + limits.microbatch_deadline_s
            # Some node still evaluates and needs this one: the time starts over.
            while self._dispatcher.evaluated > seen and node.now() < longest_at:
                seen = self._dispatcher.evaluated
                await stay(all_evaluated, "last evaluations", AnyReplica(0))
        else:
            later = range(1, node.manifest.stages)
            if not await stay(lambda: not others(later), "end of the later stages", Resource.SWARM):
                node.event("warning", message="evaluating although a later stage has not finished")
            await self.evaluate()
            node.publish(evaluated=True)
            await stay(lambda: not others([0]), "end of stage 0", Resource.SWARM)
        await stay(all_pulled, "last outer rounds", AnyReplica(node.index), node.manifest.outer.deadline_s)

    def _present(self, listed: Iterable[Advert], since: float) -> list[Advert]:
        """The listed nodes that are still running.

        A node may have left without its last advert reaching this one. So once only a few are listed, they are asked: a
        node that has been silent since `since`, for longer than the time between two renewals of its advert, is gone.
        """
        found, node, inquiry = list(listed), self._node, self._swarm.inquiry
        if len(found) <= PROBES:
            inquiry.ask(found, node.now() - node.config.limits.patience_floor_s)
        longest_s = node.config.directory.ttl_s / RENEWALS_PER_TTL
        return [advert for advert in found if inquiry.silent_s(advert.peer_id, since) <= longest_s]
