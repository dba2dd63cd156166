"""Serves the microbatches of the stage before: admission, this stage's part, and each id counted exactly once.

A call in flight is one task per (id, digest). Its callers wait for it. When the last caller is gone, the task is
cancelled and leaves no trace, unless its backward pass has been handed to the device: then it runs to its end
(ARCHITECTURE.md, "Exactly once").
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from noloco_p2p.core import members, routing, wire
from noloco_p2p.core.intake import Admission, AttemptKey, Intake
from noloco_p2p.core.messages import Activation, Gradient, Header, LossSum, MicrobatchId, PeerId, Progress
from noloco_p2p.core.status import AnyReplica, Resource, for_microbatch
from noloco_p2p.core.timeouts import WAIT_SHARE, AdaptiveTimeout
from noloco_p2p.errors import Busy, Declined, PeerError, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.dispatch import Dispatcher
from noloco_p2p.node.pipeline.finite_watch import FiniteWatch
from noloco_p2p.node.pipeline.origins import Origins
from noloco_p2p.node.pipeline.task import StageInput, StageResult
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Body

SILENT_READINGS = 2
"""Shortest silence after which an origin is given up, in units of `directory.refresh_s`. Origins announce themselves at
each of their readings of the membership, and one advert may get lost or be late."""


@dataclass(eq=False, slots=True)
class _ServedCall:
    caller: PeerId
    header: Header
    body: Body
    task: asyncio.Task[Gradient] | None = None
    callers: int = 0
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has a place, in the inner step or in the waiting line: its body may be sent."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has a place in the inner step."""
    received: bool = False
    refusal: str = ""
    """Why its callers get Busy; empty if they do not."""


class MicrobatchServer:
    """Serves `propagate` and `evaluate` for one node of a later stage."""

    def __init__(self, node: NodeState, swarm: Membership, dispatcher: Dispatcher) -> None:
        self._node = node
        self._swarm = swarm
        self._dispatcher = dispatcher
        self.intake = Intake(node.places)
        self._calls: dict[AttemptKey, _ServedCall] = {}
        self._evaluating: dict[object, tuple[MicrobatchId, Body]] = {}
        self._watch = FiniteWatch(node, swarm)
        self._timeout = AdaptiveTimeout()
        self._origins = Origins(node, swarm)

    # --- the node's own steps ---------------------------------------------------------------------------------------

    def may_open(self) -> bool:
        """Fix the membership of the coming step. Returns False if steps wait for origins and all are silent: a replica
        cut off from stage 0 would take one empty step after another, and get far ahead of the others."""
        self._swarm.fix_view()
        return not (self._node.manifest.in_step and all(map(self._origins.is_silent, self._swarm.view.origins)))

    def open(self) -> None:
        """Start admitting microbatches into the coming inner step."""
        node, (target, due) = self._node, self._target()
        in_step = node.manifest.in_step and node.step < node.manifest.steps
        self._admit(self.intake.open(node.step, target, due, self._swarm.view.origins if in_step else None))
        self.drop_departed()

    async def until_ready(self, over: Callable[[], bool]) -> None:
        """Wait until the step can be taken, or `over` holds.

        If stages go in step, a step waits for its origins; under `balanced` each fills the slots that name it. So one
        that has been silent for longer than steps ever take is given up: it hangs, or is dead but still listed. The
        steps that follow do not wait for it either, until one of its microbatches arrives.
        """
        node, began, limits = self._node, self._node.now(), self._node.config.limits
        least_s = SILENT_READINGS * node.config.directory.refresh_s
        silence_s = self._timeout.deadline_s(least_s) or limits.microbatch_deadline_s
        with node.waits.waiting("microbatches", AnyReplica(node.index - 1)):
            while not await node.waits.until(
                lambda: self.intake.ready or over(), "sign of life", AnyReplica(0), silence_s, idle=True
            ):
                # Even if none is missing now: the slot of a microbatch that breaks off becomes due again.
                self._origins.give_up(self.intake.missing_origins, began, silence_s)
                self.drop_departed()
        if self.intake.ready:
            self._timeout.observe(node.now() - began)

    async def until_empty(self) -> None:
        """After `close`: wait until everything that was admitted has ended."""
        await self._node.waits.until(lambda: self.intake.in_flight == 0, "admitted microbatches", Resource.INNER_STEP)

    def close(self) -> None:
        """Answer Busy from now on, and flush the waiting line with Busy."""
        for key in self.intake.close():
            self._cancel(self._calls[key], f"{self._node.replica} is in an outer round or leaving")
        self._report_gauges()

    def drop_departed(self) -> None:
        """If the step waits for origins: do not wait for those that have left it or are gone."""
        if self.intake.missing_origins:
            self._admit(self.intake.drop_origins(self._has_left))
            self._node.waits.pulse()

    def _target(self) -> tuple[int, set[tuple[PeerId, int]] | None]:
        """How many microbatches this step takes, and under `balanced` for which slots.

        Beyond the last step there are no slots; late origins are served as they come.
        """
        node, manifest, view = self._node, self._node.manifest, self._swarm.view
        origins = max(1, len(view.origins))
        count = routing.target(manifest.microbatches_per_step, origins, len(view.mates), view.my_share)
        if manifest.routing != "balanced" or node.step >= manifest.steps:
            return count, None
        due = routing.balanced_slots(manifest.seed, node.index, node.step, manifest.microbatches_per_step, view)
        return len(due), due

    def _admit(self, keys: list[AttemptKey]) -> None:
        """Let these waiting calls run, and request the bodies of calls that now have a place in the waiting line."""
        for key in keys:
            self._calls[key].admitted.set()
        for key in (*keys, *self.intake.granted()):
            self._calls[key].granted.set()

    def _has_left(self, origin: PeerId) -> bool:
        """Whether no more microbatches of this origin will come in this step."""
        advert, reached = self._swarm.members.get(origin), self._swarm.members.step_of(origin)
        # An origin that pauses is not at work: nothing that it has started is still under way.
        at_work = advert is not None and advert.state in members.STAGE_0_AT_WORK | members.READY
        passed = reached is not None and int(reached) > self._node.step
        return passed or not at_work or not self._origins.waits_for(origin)

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        """See ports.Handler; the header has been checked."""
        node = self._node
        key = AttemptKey(header.microbatch, header.digest)
        self._origins.heard(header.origin)
        if header.origin.step > node.step:  # a sign that its origin has left this step, even if it gets Busy
            self.drop_departed()
        verdict = self.intake.offer(key, header.origin, patient=header.patient)
        match verdict.answer:
            case Admission.BUSY:
                node.event("busy", direction="in")
                raise Busy(f"{node.replica} is busy: {verdict.reason}")
            case Admission.JOIN:
                call = self._calls[key]
                if call.caller == caller and not call.received:
                    self._cancel(call, "its body broke off; it is requested again")
            case Admission.ADMIT | Admission.WAIT | Admission.QUEUE:
                self._calls[key] = call = _ServedCall(caller, header, body)
                if verdict.answer is Admission.ADMIT:
                    call.admitted.set()
                if verdict.answer is not Admission.QUEUE:
                    call.granted.set()
                call.task = asyncio.create_task(self._serve(key, call, caller))
                call.task.add_done_callback(lambda task: self._ended(call, task))
        self._report_gauges()
        with node.waits.serving(caller, for_microbatch(header.microbatch)):
            return await self._wait(call, body)

    def _ended(self, call: _ServedCall, task: asyncio.Task[Gradient]) -> None:
        """Clean up after a call's task."""
        if not task.cancelled():
            task.exception()  # marks it as retrieved
        call.task = None  # The traceback of its error refers to the call: such a cycle would keep the tensors alive.

    def _forget(self, key: AttemptKey, admitted: list[AttemptKey]) -> None:
        """An attempt has left the intake, which has `admitted` others in its place."""
        self._admit(admitted)
        del self._calls[key]
        self._report_gauges()
        self._node.waits.pulse()

    async def _wait(self, call: _ServedCall, body: Body) -> Gradient:
        """One caller's wait. The call is cancelled when its last caller is gone, or the one still sending the body."""
        assert call.task is not None
        call.callers += 1
        try:
            return await asyncio.shield(call.task)
        except PeerError as error:
            if call.received or call.body is body or isinstance(error, Busy):
                raise
            raise Busy("the body of this attempt came from another caller, and broke off") from error
        finally:
            call.callers -= 1
            lost = call.body is body and not call.received
            if lost or not call.callers:
                self._cancel(call, "the caller that was sending its body is gone")

    def _cancel(self, call: _ServedCall, refusal: str) -> None:
        """Cancel a call; its callers get Busy with this message."""
        call.refusal = call.refusal or refusal
        if call.task is not None:
            # Not before its first line has run: the task would end without Busy, and gRPC would send no answer.
            asyncio.get_running_loop().call_soon(call.task.cancel)

    async def _serve(self, key: AttemptKey, call: _ServedCall, caller: PeerId) -> Gradient:
        """Take one call from its body to its reply."""
        node, header = self._node, call.header
        try:
            self._dispatcher.prepare(header.origin)
            await self._await_place(call.granted, header, "waiting place")
            activation = await self._receive(caller, header, call.body)
            call.received = True
            with node.span("wait"):
                await self._await_place(call.admitted, header, "place in the inner step")
            result = await self._dispatcher.train(StageInput.of(activation, call.body.reply_soon), header.time_left_s)
            reply, counted = self._reply(key, result), result.contribution.counted
        except BaseException as error:
            self._forget(key, self.intake.leave(key))
            if call.refusal:
                raise Busy(call.refusal) from error
            if not isinstance(error, PeerError | asyncio.CancelledError):
                node.fail(error)
                raise Declined("this replica has failed") from error
            if isinstance(error, Violation):
                node.event("microbatch", result="violation", peer=caller, message=str(error))
            raise
        else:
            if counted:
                node.count(key.microbatch, caller, result.next_hop)
                node.event("microbatch", result="done" if reply.finite else "nonfinite")
            self._forget(key, self.intake.done(key, counted=counted))
            # Values that became non-finite further on are not this stage's fault.
            fine = result.contribution.finite or (result.reply is not None and not result.reply.finite)
            await self._watch.ended(fine, header.origin.peer)
            return reply

    async def _receive(self, caller: PeerId, header: Header, body: Body) -> Activation:
        with self._node.waits.waiting("activation", caller, header.time_left_s, for_microbatch(header.microbatch)):
            return await body()

    async def _await_place(self, event: asyncio.Event, header: Header, what: str) -> None:
        """Wait in line while this node's device makes progress; raises Busy before the caller considers it hung."""
        longest_s, why, waits = WAIT_SHARE * header.time_left_s, for_microbatch(header.microbatch), self._node.waits
        with waits.waiting(what, Resource.INNER_STEP, longest_s, why):
            while not event.is_set():
                operations = waits.operations
                try:
                    async with asyncio.timeout(longest_s):
                        await event.wait()
                except TimeoutError:
                    if operations == waits.operations:
                        raise Busy(f"{self._node.replica} has not reached this step yet") from None

    def progress(self, microbatches: Sequence[MicrobatchId]) -> list[Progress | None]:
        """See ports.Handler."""
        bodies = dict(self._evaluating.values()) | {key.microbatch: call.body for key, call in self._calls.items()}
        waits, now = self._node.waits, self._node.now()

        def events(one: MicrobatchId) -> int:
            # The next stage's count is only a claim, and may be any number; it matters only that it changes.
            return (waits.operations + bodies[one].received + self._dispatcher.liveness.events(one)) % wire.REPLYING

        return [Progress(events(one), waits.stuck_s(now)) if one in bodies else None for one in microbatches]

    def _reply(self, key: AttemptKey, result: StageResult) -> Gradient:
        done = result.contribution
        assert done.grad is not None, "a later stage has an input gradient"
        # This node knows which peer served it next, whatever name that peer gives itself.
        later = () if result.reply is None else (result.next_hop or "", *result.reply.served[1:])
        return Gradient(key.microbatch, done.grad, done.loss_sum, done.tokens, (self._node.me, *later), result.finite)

    def _report_gauges(self) -> None:
        self._node.event("gauge", name="in_flight", value=self.intake.in_flight)
        self._node.event("gauge", name="waiting", value=self.intake.waiting)

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """See ports.Handler; the header has been checked. Evaluations bypass the intake, within a small limit."""
        if len(self._evaluating) >= self._node.config.limits.evaluations:
            raise Busy(f"{self._node.replica} already evaluates as many microbatches as allowed")
        key = object()
        self._evaluating[key] = header.microbatch, body
        try:
            with self._node.waits.serving(caller, for_microbatch(header.microbatch)):
                activation = await self._receive(caller, header, body)
                return await self._dispatcher.evaluate(StageInput.of(activation), header.time_left_s)
        finally:
            del self._evaluating[key]
