"""Checkpoints, and what a node does with its weights before it leaves (design.md §5 and §6)."""

import asyncio

from noloco_p2p.core import members as membership
from noloco_p2p.core import schedule
from noloco_p2p.core.guardians import guardians_of, holders
from noloco_p2p.core.messages import Checkpoint, PeerId
from noloco_p2p.core.status import DISK, SWARM
from noloco_p2p.errors import LocalError
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.state import NodeState

LAST_WORDS_S = 1.0
"""Of the time to leave, so much is kept for telling the others."""


class Checkpointer:
    """Writes this node's checkpoints, one at a time, while it goes on."""

    def __init__(self, seat: NodeState, rounds: OuterRounds) -> None:
        self._seat = seat
        self._rounds = rounds
        self._writing: asyncio.Task[None] | None = None
        self.newest = 0
        """Outer round of the newest checkpoint."""

    async def save_if_due(self) -> None:
        """Every so many outer rounds, and at the end. Called where θ = φ, right after a merge."""
        seat, every = self._seat, self._seat.config.checkpoint.every_rounds
        manifest = seat.manifest
        round = schedule.due_round(seat.step, manifest.outer.inner_steps, self.newest, manifest.steps)
        if every is None or round is None:
            return
        if round // every > self.newest // every or seat.step >= manifest.steps:
            await self._save(round)

    async def settle(self) -> None:
        """Wait until what is being written has been written."""
        if self._writing is not None:
            with self._seat.waiting("checkpoint", DISK):
                await asyncio.wait([self._writing])

    async def hand_over(self) -> None:
        """Before this node leaves: its checkpoint is written, and a last replica's weights are pulled by a guardian.

        It is not waited for a guardian when there is none; leaving ends after `drain_s` in any case.
        """
        seat = self._seat
        if seat.inner_steps == 0:
            return
        if seat.config.checkpoint.every_rounds is not None:
            await self._save(max(self._rounds.done, self.newest))
            await self.settle()
        if seat.members.of_stage(seat.index, membership.HOLDING):
            return
        if seat.manifest.outer.pairing == "none" or not self._guardians():
            return
        final = await self._rounds.freeze(self._rounds.done + 1)
        seat.event("info", message=f"waits until a guardian has the weights of stage {seat.index}")
        assert seat.drain_by is not None, "only who leaves hands over"
        left_s = seat.drain_by - seat.now() + seat.config.limits.drain_s / 2 - LAST_WORDS_S
        guarded = f"outer round {final.round}"
        if not await seat.until(
            lambda: self._is_guarded(final.round), "guardian", SWARM, max(0.0, left_s), why=guarded
        ):
            seat.event("warning", message="leaves although no guardian has pulled its weights")

    def _is_guarded(self, round: int) -> bool:
        """A guardian has what I froze, or none is left that could pull it."""
        held = holders(self._seat.index, self._seat.members.all())
        return not self._guardians() or any(holding.round >= round for _, holding in held)

    def _guardians(self) -> tuple[PeerId, ...]:
        seat = self._seat
        return guardians_of(seat.index, [*seat.members.all(), seat.advert], seat.manifest.seed)

    async def _save(self, round: int) -> None:
        """Freeze everything now, write it in the background; the one before is written first."""
        seat = self._seat
        await self.settle()
        began = seat.now()
        with seat.computing("copy of the state", "checkpoint"):
            state = await seat.stage.capture(round, seat.advert.step, seat.inner_steps)
        cursor = seat.batches.cursor if seat.batches is not None else None
        checkpoint = Checkpoint(state, cursor, seat.rng.getstate())
        self.newest = round
        self._writing = asyncio.create_task(self._write(checkpoint, began))

    async def _write(self, checkpoint: Checkpoint, began: float) -> None:
        """A checkpoint that cannot be written is told, and the node trains on: the next one may fit."""
        seat, state = self._seat, checkpoint.state
        try:
            with seat.waiting("checkpoint", DISK, idle=True):
                await seat.world.checkpoints.save(checkpoint)
        except LocalError as error:
            seat.trouble("disk", f"no checkpoint of outer round {state.round}: {error}")
            return
        seat.trouble("disk", None)
        size = sum(tensor.data.nbytes for tensor in state.tensors)
        seat.event("checkpoint", round=state.round, step=state.step, seconds=seat.now() - began, bytes=size)
