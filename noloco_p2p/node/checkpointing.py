"""Writes checkpoints, and hands the weights over before a node leaves or pauses (ARCHITECTURE.md, "Checkpoints")."""

import asyncio
from dataclasses import replace

from noloco_p2p.core import members as membership
from noloco_p2p.core import resume, schedule
from noloco_p2p.core.guardians import WITH_WEIGHTS, guardians_of, holders
from noloco_p2p.core.messages import Checkpoint, Holding, PeerId
from noloco_p2p.core.status import ForRound, Resource, Task
from noloco_p2p.errors import LocalError
from noloco_p2p.node.guardian import EVERY_STEPS
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Checkpoints

LAST_WORDS_S = 1.0
"""Seconds reserved at the end of `drain_s` for announcing that this node has left."""


class Checkpointer:
    """Writes this node's checkpoints, one at a time, while the node continues."""

    def __init__(self, node: NodeState, swarm: Membership, checkpoints: Checkpoints, rounds: OuterRounds) -> None:
        self._node = node
        self._swarm = swarm
        self._checkpoints = checkpoints
        self._rounds = rounds
        self._writing: asyncio.Task[None] | None = None
        self._checked = 0, 0
        """At the last check: how often other weights had replaced this node's own, and the newest outer round."""
        self._newest, self._newest_step = 0, 0
        """Outer round and step of the newest checkpoint."""
        self._alarms, self._calm, self._pins = node.alarms, True, False
        """`NodeState.alarms` at the newest checkpoint, whether there were none between the previous one and it, and
        whether the next one that is written pins the one before it."""

    def go_on(self) -> None:
        """Continue from weights of the advert's outer round and step."""
        node = self._node
        self._newest, self._newest_step = node.advert.outer_round, node.step
        self._checked = node.taken_over, self._newest

    async def save_if_due(self) -> None:
        """Save after the first round that is done at or beyond each multiple of `every_steps`, and at the end, unless
        the weights lack rounds then: a copy is of an earlier step than the clock.

        Called between inner steps. An open round does not count as done unless the rule is `lasting`: a node that
        resumes from the checkpoint does it again.
        """
        node, manifest, every = self._node, self._node.manifest, self._node.config.checkpoint.every_steps
        round: int | None = node.advert.outer_round
        if manifest.outer.pairing == "none":
            round = schedule.due_round(node.step, manifest.outer.inner_steps, self._newest, manifest.steps)
        if every is None or round is None or (node.taken_over, round) <= self._checked:
            return
        self._checked = node.taken_over, round
        at_end = node.step >= manifest.steps
        due = not self._rounds.lacks_rounds() if at_end else node.step // every > self._newest_step // every
        if due:
            await self._save(round)

    async def settle(self) -> None:
        """Wait until the current write has ended."""
        if self._writing is not None:
            with self._node.waits.waiting("checkpoint", Resource.DISK):
                await asyncio.wait([self._writing])

    async def hand_over(self) -> None:
        """Before this node leaves: begin to write its checkpoint, and if it is the last replica, let a guardian pull
        its weights meanwhile. Likewise what it guards of a stage that nobody holds any more.

        Without a guardian there is nothing to wait for. In any case leaving takes at most `drain_s`.
        """
        node, members = self._node, self._swarm.members
        last = await self._last_weights()
        others = [held for held in node.advert.holds if held.stage != node.index]  # not its own checkpoints
        last += [held for held in others if not members.of_stage(held.stage, WITH_WEIGHTS)]
        if all(map(self._is_guarded, last)):
            return
        stages = " and ".join(f"stage {held.stage}" for held in last)
        node.event("info", message=f"waiting until a guardian has the weights of {stages}")
        assert node.drain_by is not None, "only a node that leaves hands over"
        left_s = max(0.0, node.drain_by - node.now() + node.config.limits.drain_s / 2 - LAST_WORDS_S)
        if not await node.waits.until(
            lambda: all(map(self._is_guarded, last)), "guardian", Resource.SWARM, left_s, why=ForRound(last[0].round)
        ):
            node.event("warning", message=f"leaving although no guardian has the weights of {stages}")

    async def _last_weights(self) -> list[Holding]:
        """Begin to write this node's checkpoint, and if it is the last replica, freeze its weights for guardians, if
        there are any. Returns what they can pull. Initial weights are not kept: anybody can make them."""
        node = self._node
        # Weights from a guardian have an age, but no inner step has been counted for them yet.
        if node.inner_steps == 0 and resume.age(node.advert) == 0:
            return []
        await self._rounds.end("leaving")
        unpaired = node.manifest.outer.pairing == "none"
        if node.config.checkpoint.every_steps is not None:
            await self._save(self._newest if unpaired else node.advert.outer_round)
        if await self._has_a_mate() or unpaired or not self._guardians(node.index):
            return []
        final = await self._rounds.freeze(node.advert.outer_round + 1)
        return [Holding(node.index, final.round, final.step, final.fresh_round)]

    async def entrust(self) -> bool:
        """Before a pause: if this is the last replica, freeze its weights for guardians to pull. Returns whether it did
        so; it does not if no guardian could pull them."""
        node = self._node
        if await self._has_a_mate():
            return False
        message = f"stage {node.index} has no other replica: the swarm stands still while this node is paused"
        node.event("warning", message=message)
        if node.manifest.outer.pairing == "none" or not self._guardians(node.index):
            return False
        await self._rounds.freeze(node.advert.outer_round + 1)
        return True

    async def _has_a_mate(self) -> bool:
        """Whether another replica of this stage answers now. One that answered earlier may have died, or be leaving.

        One further behind than a guardian may be does not count: it has only just come back with old weights.
        """
        inquiry, m, mine = self._swarm.inquiry, self._node.manifest.outer.inner_steps, resume.age(self._node.advert)
        mates = self._swarm.members.of_stage(self._node.index, membership.HOLDING)
        said = map(inquiry.with_answer, await inquiry.answering_now(mates, membership.HOLDING))
        return any(mine - resume.age(mate) <= max(resume.NEAR_ROUNDS, EVERY_STEPS // m) for mate in said if mate)

    def _is_guarded(self, held: Holding) -> bool:
        """Whether a node that answers has weights at least as far trained, or no guardian is left to pull them."""
        inquiry, listed = self._swarm.inquiry, holders(held.stage, self._swarm.members.all())
        asked = inquiry.few([a for a, theirs in listed if (theirs.age, theirs.step) >= (held.age, held.step)])
        inquiry.ask(asked)
        return not self._guardians(held.stage) or bool(inquiry.answering(asked, membership.PRESENT))

    def _guardians(self, stage: int) -> tuple[PeerId, ...]:
        return guardians_of(stage, self._swarm.everybody(), self._node.manifest.seed)

    async def _save(self, round: int) -> None:
        """Wait for the previous write to end, freeze everything, and write it in the background."""
        node = self._node
        await self.settle()
        began = node.now()
        with node.waits.computing("copy of the state", Task.CHECKPOINT):
            state = await node.stage.capture(round, node.advert.step, node.inner_steps)
        cursor = node.batches.cursor if node.batches is not None else None
        checkpoint = Checkpoint(replace(state, fresh_round=node.advert.fresh_round), cursor, node.rng.getstate())
        self._newest, self._newest_step = round, node.step
        # In a series of alarms the checkpoint before the first alarm stays.
        self._pins |= self._calm and node.alarms > self._alarms
        self._alarms, self._calm = node.alarms, node.alarms == self._alarms
        self._writing = asyncio.create_task(self._write(checkpoint, began))
        self._writing.add_done_callback(node.task_ended)

    async def _write(self, checkpoint: Checkpoint, began: float) -> None:
        """Write a checkpoint. A failure is reported, and the node trains on: the next checkpoint may fit."""
        node, state = self._node, checkpoint.state
        try:
            with node.waits.waiting("checkpoint", Resource.DISK, idle=True):
                await self._checkpoints.save(checkpoint, pin=self._pins)
        except LocalError as error:
            node.trouble("disk", f"no checkpoint of outer round {state.round}: {error}")
            return
        self._pins = False
        node.trouble("disk", None)
        size = sum(tensor.data.nbytes for tensor in state.tensors)
        node.event("checkpoint", round=state.round, step=state.step, seconds=node.now() - began, bytes=size)
