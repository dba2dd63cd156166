"""The main loop of a node, in run order: start reading here.

    choose a stage → make the weights → wait for the others, or enter a run that has begun → train → finish

In training, a stage-0 node reads microbatches and sends them through the stages; a node of a later stage serves what
arrives. Both take inner steps, and now and then an outer round. The node sees the world through the ports only.
"""

import asyncio
from dataclasses import replace

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core import schedule
from noloco_p2p.core.messages import NO_STAGE, Advert, Batch, MicrobatchId
from noloco_p2p.core.stage_values import StepLabel
from noloco_p2p.core.status import AnyReplica, Resource, Status
from noloco_p2p.node.checkpointing import Checkpointer
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.node.directory_loop import MembershipLoop
from noloco_p2p.node.guardian import Guardian
from noloco_p2p.node.join import Joining
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.pauses import Pauses
from noloco_p2p.node.pipeline.dispatch import Dispatcher
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.pipeline.source import MicrobatchSource
from noloco_p2p.node.rebalance import Rebalancer
from noloco_p2p.node.restore import WeightRestorer
from noloco_p2p.node.rpc_handler import RpcHandler
from noloco_p2p.node.shutdown import Shutdown, watch_failure
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.state_donor import StateDonor
from noloco_p2p.ports import World


class Node:
    """One replica of one stage. `run` is its life; `handler` is the ports.Handler that its transport serves.

    `advert`: where this node can be reached; its stage and state change. `incarnation`: 64 random bits of this process.
    """

    def __init__(
        self, advert: Advert, manifest: RunManifest, config: NodeConfig, world: World, incarnation: int
    ) -> None:
        stage, given = NO_STAGE if config.stage is None else config.stage, config.stage is not None
        advert = replace(advert, stage=stage, state="starting", settled=given, stays=given or not config.rebalance)
        self.state = NodeState(advert, manifest, config, world.telemetry)
        self._pauses = Pauses(self.state, world.local_time)
        if self.state.closed_until is not None:
            self.state.update(stage=NO_STAGE)
        self.swarm = Membership(self.state)
        self._world = world
        self._incarnation = incarnation
        self._membership_loop = MembershipLoop(self.state, self.swarm, world.directory, self._members_read)
        self._rebalancer = Rebalancer(self.state, self.swarm)
        self._guardian = Guardian(self.state, self.swarm, world.transport)
        self.handler = RpcHandler(self.state, self.swarm, self._guardian)  # for this node's transport
        self._take_duties()
        self.finished = False  # whether this node stayed until the run ended

    def _take_duties(self) -> None:
        """Create the duties of one stage; a node that moves creates them again."""
        node, swarm, world = self.state, self.swarm, self._world
        self._dispatcher = dispatcher = Dispatcher(node, swarm, world.transport)
        self._source = MicrobatchSource(node, swarm, dispatcher, world.secret, self._incarnation)
        self._server = MicrobatchServer(node, swarm, dispatcher)
        self._rounds = OuterRounds(node, swarm, world.transport, self._server.close)
        weights = WeightRestorer(node, swarm, world, self._rounds, self._guardian)
        self._joining = Joining(node, swarm, self._membership_loop, weights)
        self._shutdown = Shutdown(node, swarm, dispatcher, self._rounds)
        self._checkpointer = Checkpointer(node, swarm, world.checkpoints, self._rounds)
        self._donor = StateDonor(node, self._incarnation)
        self.handler.answer_with(self._server, self._rounds, self._donor)

    # === life =======================================================================================================

    async def run(self) -> None:
        """Take part until the run has ended or a `drain` is done. Raises the error that made the node fail."""
        node = self.state
        inquiry = self.swarm.inquiry.run(self._world.transport, self.swarm.look_for_the_end)
        duties = self._membership_loop.run(), self._live(), watch_failure(node), self._guardian.run()
        tasks = [asyncio.create_task(duty) for duty in (*duties, inquiry, self._pauses.keep_watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in filter(asyncio.Task.done, reversed(tasks)):  # others may have failed because a device hangs
                task.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._rounds.forget()
            await self._checkpointer.settle()
            self._donor.close()
            node.close_batches()
            if not node.draining:
                node.enter("drain", "the run has ended" if self.finished else "it cannot continue")
            node.enter("leave")
            await self._membership_loop.withdraw()
        if node.error is not None:
            raise node.error  # of the last checkpoint

    def drain(self) -> None:
        """Leave: finish the work in hand and start nothing new, within `limits.drain_s`."""
        if not self.state.leaving:
            self.state.drain("told to leave")

    def pause(self) -> None:
        """Give the device to its owner after the current inner step: take no microbatches, keep all state."""
        self.state.pause(True)

    def resume(self) -> None:
        """End a pause."""
        self.state.pause(False)

    async def _live(self) -> None:
        node = self.state
        await self._pauses.until_open()
        await self._joining.choose_stage()
        while not node.draining:
            await self._make_weights()
            self.finished = not await self._joining.wait_for_others()
            if self.finished:
                return
            self._checkpointer.go_on()
            self._pauses.begin()
            await (self._train_first_stage() if node.index == 0 else self._train_later_stage())
            if node.next_stage is not None:
                await self._move(node.next_stage)
            elif not node.draining:
                node.enter("end", "the run has reached its last step")
                await self._shutdown.finish()
                self.finished = not node.draining
                return
        await self._checkpointer.hand_over()

    # === the stage and its weights ==================================================================================

    async def _make_weights(self) -> None:
        with self.state.waits.waiting("weights", Resource.DEVICE):
            stage, device = await self._world.make_stage(self.state.index)
        self.state.hold(DeviceStage(stage, device))
        await self._rounds.freeze(0)

    async def _move(self, stage: int) -> None:
        """Join another stage like a newcomer, now that the work in hand is done, unless told to leave meanwhile."""
        await self._rounds.forget()
        await self._checkpointer.settle()
        if self.state.leaving:
            return
        self._donor.close()
        self._rounds.frozen.clear()
        self._dispatcher.given_up = True
        self.state.move(stage)
        # The counter of microbatches starts over, and their ids must never repeat.
        self._incarnation = (self._incarnation + 1) % 2**64 or 1
        self._take_duties()
        self.state.enter("move", f"moves to stage {stage}")

    async def _pause(self) -> None:
        self._server.close()
        await self._pauses.pause(self._rounds, self._joining, self._checkpointer)
        self._came_late = True

    # === training, stage 0 ==========================================================================================

    async def _train_first_stage(self) -> None:
        """Read microbatches, send each through the stages, and take the inner step when all of them are back."""
        node = self.state
        if node.step >= node.manifest.steps and not self._rounds.lacks_rounds():  # it had left before the last round
            await self._outer_round()
        while node.step < node.manifest.steps and not node.draining:
            if node.pausing:
                await self._pause()
                continue
            began = node.now()
            self.swarm.fix_view()
            batches = await self._source.read_and_send()
            if not (node.routes or node.draining) and self.swarm.is_left_behind():
                node.update(step=float(node.manifest.steps))
                break
            if node.pausing and not batches:
                continue
            await self._inner_step(began, batches)
            await self._outer_round()
            await self._shutdown.evaluate_if_due()

    # === training, later stages =====================================================================================

    async def _train_later_stage(self) -> None:
        """Serve what arrives; step when the target is reached and everything that was admitted has ended.

        Whatever was admitted is applied: forward and backward must use the same weights, and a gradient that an origin
        counts must count here. So every way out of the loop leads through an inner step on what is left.
        """
        node, server = self.state, self._server

        def over() -> bool:
            return node.draining or self.swarm.first_stage_is_done()

        began, self._came_late = node.now(), self.swarm.first_stage_is_done()
        while self._pauses.check_clock() or not over():
            began = node.now()
            if node.pausing:
                await self._pause()
                continue
            if not server.may_open():
                # Stages go in step, and stage 0 is silent: the step would be empty.
                await node.waits.until(lambda: over() or node.pausing or server.may_open(), "origins", AnyReplica(0))
                continue
            server.open()
            await server.until_ready(lambda: over() or node.pausing)
            if not server.intake.ready:
                if not (self._pauses.check_clock() or node.pausing):
                    break
                # Cut short by a pause: finish what was admitted, and apply it before the owner gets the device.
                server.close()
                await server.until_empty()
                if not node.routes:
                    continue
            # From here until the next `open`, arriving microbatches wait for the next step.
            server.intake.seal()
            self._came_late &= not node.routes
            await self._inner_step(began, {})
            await self._outer_round()
        server.close()
        await server.until_empty()
        joint = node.manifest.outer.update.gradients and node.step < node.manifest.steps
        if node.routes or (joint and not node.draining):
            await self._inner_step(began, {})
        if not node.draining:
            # Stage 0 has ended, maybe a step ahead of this clock. A node that came or woke only then has older weights.
            left_behind = self._came_late and (node.step < node.manifest.steps - 1 or self._rounds.lacks_rounds())
            node.update(step=float(node.manifest.steps))
            if not left_behind:
                await self._outer_round()
                node.update(step=float(node.manifest.steps))  # A state copied meanwhile may be of an earlier step.

    def _members_read(self) -> None:
        self._server.drop_departed()
        self._rebalancer.consider()
        self.swarm.update_deserted(reading=True)

    # === inner steps ================================================================================================

    async def _inner_step(self, began: float, batches: dict[MicrobatchId, Batch]) -> None:
        """Run the optimizer on what was added since `began`, advance the clock (ARCHITECTURE.md, "The step clock")."""
        node, manifest, inner = self.state, self.state.manifest, self.state.manifest.inner
        step = min(node.step + 1, manifest.steps)
        rate = schedule.learning_rate(
            step, manifest.steps, inner.peak_learning_rate, inner.warmup_steps, inner.final_fraction
        )
        # A rule of gradients adds up those of all replicas here. The wait for them is reported as idle time separately.
        began += await self._rounds.before_step()
        with node.span("step"), node.waits.computing("inner step"):
            result = await node.stage.inner_step(StepLabel(node.inner_steps + 1, node.step, rate, node.routes, batches))
        self._rounds.inner_step_took(result.busy_s)
        self._pauses.check_clock()
        self._pauses.stepped(result.microbatches)
        node.finish_inner_step(result, self.swarm.inquiry.clocks(), self._world.transport.line)
        idle_s = max(0.0, node.now() - began - result.busy_s)
        node.event("idle", cause="gradients" if node.index == 0 else "microbatches", seconds=idle_s)
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

    async def _outer_round(self) -> None:
        """Do what is due between two inner steps, and save it. A replica that must then copy another one does so."""
        if self.state.stood_still:
            await self._pause()
        await self._rounds.at_border()
        ahead, self._rounds.ahead = self._joining.of_earlier_lineage() or self._rounds.ahead, ()
        if ahead and not self.state.draining:
            self._server.close()
            await self._joining.take_over(ahead)
            if self.state.step >= self.state.manifest.steps:  # the copied state may lack the last round
                await self._rounds.at_border()
        await self._checkpointer.save_if_due()

    def status(self, now: float) -> Status:
        """The status of this node at `now` on the loop's clock, without `figures`. Callable from any thread."""
        return replace(
            self.state.status(now),
            waits=self.state.waits.current(now),
            serving=self.state.waits.served(now),
            seen=self.swarm.members.seen(now=now),
            deserted={stage: max(0.0, now - since) for stage, since in sorted(self.swarm.deserted.items())},
            in_flight=self._server.intake.in_flight,
            waiting=self._server.intake.waiting,
        )
