"""Checkpoints, and what a node does with its weights before it leaves (ARCHITECTURE.md, "Checkpoints")."""

import asyncio

from noloco_p2p.core import members as membership
from noloco_p2p.core import schedule
from noloco_p2p.core.guardians import candidates, holders
from noloco_p2p.core.messages import Checkpoint, PeerId
from noloco_p2p.core.status import ForRound, Resource, Task
from noloco_p2p.errors import LocalError
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Checkpoints

LAST_WORDS_S = 1.0
"""Time reserved at the end of `drain_s` for announcing that this node has left."""


class Checkpointer:
    """Writes this node's checkpoints, one at a time, while the node continues."""

    def __init__(self, node: NodeState, swarm: Membership, checkpoints: Checkpoints, rounds: OuterRounds) -> None:
        self._node = node
        self._swarm = swarm
        self._checkpoints = checkpoints
        self._rounds = rounds
        self._writing: asyncio.Task[None] | None = None
        self._seen = 0
        """The newest outer round done at the last check."""
        self._newest, self._newest_step = 0, 0
        """Outer round and step of the newest checkpoint."""
        self._alarms, self._calm = node.alarms, True
        """`NodeState.alarms` by then; and whether there was none since the one before it."""

    def go_on(self) -> None:
        """Continue with weights of the advert's outer round and step."""
        node = self._node
        self._seen = self._newest = node.advert.outer_round
        self._newest_step = node.step

    async def save_if_due(self) -> None:
        """Save after the first round done at or beyond each multiple of `every_steps`, and at the end.

        Called between inner steps. An open round does not count, unless the rule is `lasting`: it is due again for a
        node that resumes from the checkpoint.
        """
        node, every = self._node, self._node.config.checkpoint.every_steps
        manifest = node.manifest
        round: int | None = node.advert.outer_round
        if manifest.outer.pairing == "none":
            round = schedule.due_round(node.step, manifest.outer.inner_steps, self._newest, manifest.steps)
        if every is None or round is None or round <= self._seen:
            return
        self._seen = round
        if node.step // every > self._newest_step // every or node.step >= manifest.steps:
            await self._save(round)

    async def settle(self) -> None:
        """Wait until the current write has ended."""
        if self._writing is not None:
            with self._node.waits.waiting("checkpoint", Resource.DISK):
                await asyncio.wait([self._writing])

    async def hand_over(self) -> None:
        """Before this node leaves: write its checkpoint, and let a guardian pull the weights of a last replica.

        Without a guardian there is nothing to wait for. Leaving takes at most `drain_s` in any case.
        """
        node = self._node
        if node.inner_steps == 0:
            return
        await self._rounds.end("leaving")
        if node.config.checkpoint.every_steps is not None:
            await self._save(max(node.advert.outer_round, self._newest))
            await self.settle()
        if await self._has_a_mate() or node.manifest.outer.pairing == "none" or not self._guardians():
            return
        final = await self._rounds.freeze(node.advert.outer_round + 1)
        node.event("info", message=f"waiting until a guardian has the weights of stage {node.index}")
        assert node.drain_by is not None, "only a node that leaves hands over"
        left_s = max(0.0, node.drain_by - node.now() + node.config.limits.drain_s / 2 - LAST_WORDS_S)
        why = ForRound(final.round)
        if not await node.waits.until(lambda: self._is_guarded(why.round), "guardian", Resource.SWARM, left_s, why=why):
            node.event("warning", message="leaving although no guardian has pulled its weights")

    async def entrust(self) -> bool:
        """Before a pause: freeze a last replica's weights for guardians to pull. False: it is not the last."""
        node = self._node
        if await self._has_a_mate():
            return False
        message = f"stage {node.index} has no other replica: the swarm stands still while this node is paused"
        node.event("warning", message=message)
        if node.manifest.outer.pairing == "none" or not self._guardians():
            return False
        await self._rounds.freeze(node.advert.outer_round + 1)
        return True

    async def _has_a_mate(self) -> bool:
        """Whether another replica of this stage answers now; one that did before may have died, or leave too."""
        inquiry = self._swarm.inquiry
        asked = inquiry.few(self._swarm.members.of_stage(self._node.index, membership.HOLDING))
        await inquiry.until_asked(asked, anew=True)
        return bool(inquiry.answering(asked, membership.HOLDING))

    def _is_guarded(self, round: int) -> bool:
        """Whether an answering guardian has the weights that this node froze, or no guardian is left to pull them."""
        inquiry = self._swarm.inquiry
        held = [a for a, holding in holders(self._node.index, self._swarm.members.all()) if holding.round >= round]
        asked = inquiry.few(held)
        inquiry.ask(asked)
        return not self._guardians() or bool(inquiry.answering(asked, membership.PRESENT))

    def _guardians(self) -> tuple[PeerId, ...]:
        node = self._node
        return candidates(node.index, self._swarm.everybody(), node.manifest.seed)

    async def _save(self, round: int) -> None:
        """Freeze everything now and write it in the background, after the previous checkpoint has been written."""
        node = self._node
        await self.settle()
        began = node.now()
        with node.waits.computing("copy of the state", Task.CHECKPOINT):
            state = await node.stage.capture(round, node.advert.step, node.inner_steps)
        cursor = node.batches.cursor if node.batches is not None else None
        checkpoint = Checkpoint(state, cursor, node.rng.getstate())
        self._newest, self._newest_step = round, node.step
        # Of alarms that go on and on, the checkpoint before the first one stays.
        alarmed, calm = node.alarms > self._alarms, self._calm
        self._alarms, self._calm = node.alarms, not alarmed
        self._writing = asyncio.create_task(self._write(checkpoint, began, pin=alarmed and calm))

    async def _write(self, checkpoint: Checkpoint, began: float, *, pin: bool) -> None:
        """Write a checkpoint. A failure is reported, and the node trains on: the next one may fit."""
        node, state = self._node, checkpoint.state
        try:
            with node.waits.waiting("checkpoint", Resource.DISK, idle=True):
                await self._checkpoints.save(checkpoint, pin=pin)
        except LocalError as error:
            node.trouble("disk", f"no checkpoint of outer round {state.round}: {error}")
            return
        node.trouble("disk", None)
        size = sum(tensor.data.nbytes for tensor in state.tensors)
        node.event("checkpoint", round=state.round, step=state.step, seconds=node.now() - began, bytes=size)
