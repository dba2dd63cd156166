"""The main loop of a node, in run order: start reading here.

    choose a stage → make the weights → wait for the others, or take up a run that has begun → train → finish

Training at stage 0 reads microbatches and sends them through the stages; at a later stage it serves what arrives. Both
take inner steps, and once in a while an outer round. The node sees the world through the ports only; the same code runs
over gRPC and, a thousand times, in one process under virtual time.
"""

import asyncio
from dataclasses import replace

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core import members as membership
from noloco_p2p.core import schedule
from noloco_p2p.core.messages import Advert, Batch, MicrobatchId
from noloco_p2p.core.status import AnyReplica, Resource, Status
from noloco_p2p.node import status_view
from noloco_p2p.node.checkpointing import Checkpointer
from noloco_p2p.node.guardian import Guardian
from noloco_p2p.node.join import Joining
from noloco_p2p.node.membership import MembershipLoop
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.pipeline.dispatch import Dispatcher
from noloco_p2p.node.pipeline.evaluate import EvaluationServer
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.pipeline.source import MicrobatchSource
from noloco_p2p.node.rebalance import Rebalancer
from noloco_p2p.node.rpc_handler import RpcHandler
from noloco_p2p.node.shutdown import Shutdown
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.state_donor import StateDonor
from noloco_p2p.node.step_clock import StepClock
from noloco_p2p.ports import StepLabel, World


class Node:
    """One replica of one stage. `run` is its life; `answers` is the ports.Handler that its transport serves.

    `advert` says who this node is and where it can be reached; its stage and state are the node's to change.
    `incarnation` is 64 random bits of this process.
    """

    def __init__(
        self, advert: Advert, manifest: RunManifest, config: NodeConfig, world: World, incarnation: int
    ) -> None:
        stage = -1 if config.stage is None else config.stage
        advert = replace(advert, stage=stage, state="starting", settled=config.stage is not None)
        self.state = NodeState(advert, manifest, config, world)
        self._incarnation = incarnation
        self._watch = MembershipLoop(self.state, self._noticed)
        self._moving = Rebalancer(self.state)
        self._guardian = Guardian(self.state)
        self.answers = RpcHandler(self.state, self._guardian)
        """The handler for this node's transport."""
        self._take_duties()
        self.finished = False
        """The run has ended, and this node was there until its end."""

    def _take_duties(self) -> None:
        """The duties of one stage; a node that moves begins them anew."""
        self._sender = Dispatcher(self.state)
        self._door = MicrobatchServer(self.state, self._sender)
        self._rounds = OuterRounds(self.state)
        self._clock = StepClock(self.state)
        self._arrival = Joining(self.state, self._watch, self._rounds, self._guardian)
        self._ending = Shutdown(self.state, self._sender)
        self._saving = Checkpointer(self.state, self._rounds)
        self._donor = StateDonor(self.state, self._incarnation)
        self._beginnings = MicrobatchSource(self.state, self._sender, self._incarnation)
        examiner = EvaluationServer(self.state, self._sender)
        self.answers.give_to(self._door, examiner, self._rounds, self._donor)

    # === life =======================================================================================================

    async def run(self) -> None:
        """Take part until the run has ended or `drain` was called and done. Raises what made the node fail."""
        node = self.state
        tasks = [asyncio.create_task(self._watch.run()), asyncio.create_task(self._live())]
        tasks += [asyncio.create_task(self._watch_failure()), asyncio.create_task(self._guardian.stand_by())]
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
            await self._saving.settle()
            self._donor.close()
            if node.batches is not None:
                node.batches.close()
            if not node.draining:
                node.enter("drain", "the run has ended")
            node.enter("leave")
            await self._watch.withdraw()

    @property
    def evaluated_s(self) -> float:
        """Seconds spent in evaluations before the last step."""
        return self._ending.evaluated_s

    def status(self, now: float) -> Status:
        """What this node tells of itself at `now` on the loop's clock; from any thread. Without `figures`."""
        return status_view.status(self.state, self._door, now)

    def trouble(self, name: str, message: str | None) -> None:
        """Something outside the duties is wrong from now on, or (None) no longer; the node goes on."""
        self.state.trouble(name, message)

    def drain(self) -> None:
        """Leave: finish what is held, begin nothing new, at most `limits.drain_s`."""
        if not self.state.leaving and self.state.advert.state != "left":
            self.state.drain("told to leave")

    def pause(self) -> None:
        """Give the device to its owner at the end of the inner step: leave the routes, keep everything."""
        self.state.pausing = True
        self.state.pulse()

    def resume(self) -> None:
        """Come back from a pause."""
        self.state.pausing = False
        self.state.pulse()

    async def _watch_failure(self) -> None:
        """Ends when the node has failed, or has been leaving for as long as it may."""
        node = self.state
        await node.until(lambda: node.leaving or node.error is not None, "order to leave", Resource.OWNER, idle=True)
        if node.error is None:
            await node.until(
                lambda: node.error is not None, "end of what is held", Resource.INNER_STEP, node.config.limits.drain_s
            )
        if node.error is not None:
            raise node.error
        node.event("warning", message=f"left after {node.config.limits.drain_s:g} s with work in hand")

    async def _live(self) -> None:
        node = self.state
        await self._arrival.choose_stage()
        while not node.draining:
            await self._make_weights()
            await self._arrival.wait_for_others()
            self._saving.newest = self._rounds.done
            if not node.draining:
                await (self._train_first_stage() if node.index == 0 else self._train_later_stage())
            if node.next_stage is not None:
                await self._move(node.next_stage)
            elif not node.draining:
                node.enter("end", "the run has reached its last step")
                await self._ending.finish()
                self.finished = not node.draining
                return
        await self._saving.hand_over()

    # === the stage and its weights ==================================================================================

    async def _make_weights(self) -> None:
        with self.state.waiting("weights", Resource.DEVICE):
            self.state.stage = await self.state.world.make_stage(self.state.index)
        await self._rounds.freeze(0)

    async def _move(self, stage: int) -> None:
        """What was held has been finished: give this stage up, and come to the other one like a newcomer."""
        node = self.state
        await self._saving.settle()
        if node.batches is not None:
            node.batches.close()
            node.batches = None
        self._donor.close()
        node.stage.close()
        node.drain_by = node.next_stage = None
        node.update(stage=stage, moving_to=None, holds=(), microbatches_per_s=0.0, outer_round=0)
        # Ids of microbatches are never used twice: their counter begins anew.
        self._incarnation = (self._incarnation + 1) % 2**64 or 1
        self._take_duties()
        node.enter("move", f"comes to stage {stage}")

    async def _pause(self) -> None:
        """Until the owner gives the device back; then the weights of now, if the others have gone far ahead."""
        node = self.state
        self._door.close()
        node.enter("pause", "the owner needs the device")
        await node.until(lambda: not node.pausing or node.draining, "device", Resource.OWNER)
        if not node.draining:
            await self._arrival.catch_up()
        if not node.draining:
            node.enter("resume", "the device is back")

    # === training, stage 0 ==========================================================================================

    async def _train_first_stage(self) -> None:
        """Read microbatches, send each through the stages, step when all of them are back."""
        node = self.state
        while node.step < node.manifest.steps and not node.draining:
            if node.pausing:
                await self._pause()
                continue
            began = node.now()
            node.look()
            batches = await self._beginnings.read_and_send()
            await self._inner_step(began, batches)
            # Once in a while: pull a partner's slow weights and outer delta.
            await self._rounds.run_if_due(self._door.close)
            # Once in a while: write a checkpoint.
            await self._saving.save_if_due()
            # Once in a while: evaluate on held-out data.
            await self._ending.evaluate_if_due()

    # === training, later stages =====================================================================================

    async def _train_later_stage(self) -> None:
        """Serve what arrives; step when the target is reached and all that was admitted has ended."""
        node, intake = self.state, self._door.intake

        def over() -> bool:
            return node.draining or self._first_stage_is_done()

        began = node.now()
        while not over():
            began = node.now()
            if node.pausing:
                await self._pause()
                continue
            if not self._door.may_open():
                await node.until(lambda: over() or node.pausing or self._door.may_open(), "origins", AnyReplica(0))
                continue
            self._door.open()
            await self._door.until_ready(lambda: over() or node.pausing)
            if not intake.ready:
                if not node.pausing:
                    break
                # What was admitted is finished, and applied before the pause.
                self._door.close()
                await self._door.until_empty()
                if not node.routes:
                    continue
            intake.seal()
            await self._inner_step(began, {})
            # Once in a while: pull a partner's slow weights and outer delta.
            await self._rounds.run_if_due(self._door.close)
            # Once in a while: write a checkpoint.
            await self._saving.save_if_due()
        self._door.close()
        await self._door.until_empty()
        if node.routes:
            await self._inner_step(began, {})
        if not node.draining:
            node.update(step=float(node.manifest.steps))
            await self._rounds.run_if_due(self._door.close)
            await self._saving.save_if_due()

    def _first_stage_is_done(self) -> bool:
        """Somebody of stage 0 was seen finished, and nobody of it is at work."""
        first = self.state.members.of_stage(0, membership.STAGE_0_AT_WORK | {"finished"})
        return self.state.saw_the_end and all(a.state == "finished" for a in first)

    def _noticed(self) -> None:
        """After each reading of the membership. Who finished may be gone by the time that somebody asks."""
        node = self.state
        ended = node.members.left_at_step >= node.manifest.steps or bool(node.members.of_stage(0, {"finished"}))
        node.saw_the_end = node.saw_the_end or ended
        self._door.strike()
        self._moving.consider()
        self._guardian.noticed()
        self._sender.look_for_deserted(reading=True)

    # === inner steps ==================================================================================================

    async def _inner_step(self, began: float, batches: dict[MicrobatchId, Batch]) -> None:
        """AdamW on what was added since `began`, then the clock moves (design.md, The step is a clock)."""
        node, manifest, inner = self.state, self.state.manifest, self.state.manifest.inner
        step = min(node.step + 1, manifest.steps)
        rate = schedule.learning_rate(
            step, manifest.steps, inner.peak_learning_rate, inner.warmup_steps, inner.final_fraction
        )
        label = StepLabel(node.inner_steps + 1, node.step, rate, node.routes, batches)
        with node.span("step"), node.computing("inner step"):
            result = await node.stage.inner_step(label)
        node.inner_steps += 1
        node.routes = {}
        self._rounds.inner_step_took(result.busy_s)
        self._clock.move(result.microbatches, result.busy_s)
        cause = "gradients" if node.index == 0 else "microbatches"
        node.event("idle", cause=cause, seconds=max(0.0, node.now() - began - result.busy_s))
        node.event(
            "inner_step",
            inner_step=node.inner_steps,
            step=node.advert.step,
            tokens=result.tokens,
            loss_sum=result.loss_sum,
            loss_tokens=result.tokens,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            busy_s=result.busy_s,
        )
