"""Serving microbatches of the stage before: admission, the nested call, exactly once per id (design.md §4).

A call in flight is one task per (id, digest). Its callers wait for it; when the last one is gone it is cancelled, and
leaves no trace unless its backward pass has been handed to the device: from there on it runs to its end.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from noloco_p2p.core import members as membership
from noloco_p2p.core import routing
from noloco_p2p.core.intake import Answer, Intake, Key
from noloco_p2p.core.messages import Activation, Gradient, Header, PeerId
from noloco_p2p.core.nonfinite import NonFiniteStreak
from noloco_p2p.core.status import AnyReplica, Resource, for_microbatch
from noloco_p2p.core.timeouts import WAIT_SHARE, AdaptiveTimeout
from noloco_p2p.errors import Busy, Declined, LocalError, PeerError, Violation
from noloco_p2p.node.pipeline.dispatch import Dispatcher, StageOutput
from noloco_p2p.node.pipeline.evaluate import check
from noloco_p2p.node.state import NodeState, to_the_end
from noloco_p2p.ports import Body, Contribution

SILENT_READINGS = 2
"""Origins in training announce themselves at each reading of the membership; one may miss, or come late."""


@dataclass(eq=False, slots=True)
class _Call:
    header: Header
    body: Body
    task: asyncio.Task[Gradient] | None = None
    callers: int = 0
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    flushed: bool = False


class MicrobatchServer:
    """Serves `propagate` for one node of a later stage."""

    def __init__(self, node: NodeState, sender: Dispatcher) -> None:
        limits = node.config.limits
        self._node = node
        self._sender = sender
        self.intake: Intake[Gradient] = Intake(limits.max_in_flight, limits.waiting_places)
        self._calls: dict[Key, _Call] = {}
        self._streak = NonFiniteStreak()
        self._patience = AdaptiveTimeout()
        self._given_up: dict[PeerId, float] = {}
        """Origins that were silent for too long, and since when."""

    # --- the node's side --------------------------------------------------------------------------------------------

    def may_open(self) -> bool:
        """Look who is there. Under `balanced` a step has slots only while stage 0 is there."""
        self._node.look()
        return self._node.manifest.routing != "balanced" or bool(self._node.view.origins)

    def open(self) -> None:
        """Begin to admit into the coming inner step."""
        target, due = self._target()
        self._admit(self.intake.open(self._node.step, target, due))
        self.strike()

    async def until_ready(self, over: Callable[[], bool]) -> None:
        """Until the step can be taken, or it is `over`.

        Under `balanced` an origin that has said nothing for as long as steps never take is not waited for any more:
        it hangs, or is dead and still listed. Nor in the steps that follow, until something is heard of it.
        """
        node, began, limits = self._node, self._node.now(), self._node.config.limits
        silence_s = self._patience.deadline_s(SILENT_READINGS * node.config.directory.refresh_s)
        silence_s = silence_s or limits.microbatch_deadline_s
        with node.waiting("microbatches", AnyReplica(node.index - 1)):
            while not await node.until(
                lambda: self.intake.ready or over(), "word of the origins", AnyReplica(0), silence_s, idle=True
            ):
                since = node.now() - (silence_s or 0.0)
                silent = [o for o in self.intake.missing_origins if not self._was_heard(o, since)]
                self._given_up |= dict.fromkeys(silent, since)
                self._admit(self.intake.strike(silent.__contains__))
                if not self.intake.missing_origins:
                    silence_s = None
        if self.intake.ready:
            self._patience.observe(node.now() - began)

    async def until_empty(self) -> None:
        """Until what was admitted has ended; the door is closed."""
        await self._node.until(lambda: self.intake.in_flight == 0, "end of what was admitted", Resource.INNER_STEP)

    def _target(self) -> tuple[int, frozenset[tuple[PeerId, int]] | None]:
        """How many microbatches this step takes, and under `balanced` which.

        After the last step there are no slots any more; origins that came late are served as they come.
        """
        node, manifest, view = self._node, self._node.manifest, self._node.view
        count = routing.target(manifest.microbatches_per_step, max(1, len(view.origins)), len(view.mates))
        if manifest.routing != "balanced" or node.step >= manifest.steps:
            return count, None
        due = routing.balanced_slots(
            manifest.seed, node.index, node.step, manifest.microbatches_per_step, view.origins, view.mates, node.me
        )
        return len(due), due

    def _admit(self, keys: list[Key]) -> None:
        """Tell those who waited that they may run."""
        for key in keys:
            self._calls[key].admitted.set()

    def close(self) -> None:
        """Answer Busy from now on, and flush the waiting line with Busy."""
        for key in self.intake.close():
            call = self._calls[key]
            call.flushed = True
            if call.task is not None:
                call.task.cancel()
        self._gauge()

    def strike(self) -> None:
        """Forget the due slots of origins that have left this step or are gone (`balanced`)."""
        if self.intake.missing_origins:
            self._admit(self.intake.strike(self._has_left))
            self._node.pulse()

    def _was_heard(self, origin: PeerId, since: float) -> bool:
        """A microbatch of it came by, or its advert is younger. Who still fetches its weights sends nothing."""
        advert, at = self._node.members.get(origin), self._node.members.last_sign(origin)
        return advert is not None and advert.state not in ("waiting", "syncing") and at is not None and at >= since

    def _has_left(self, origin: PeerId) -> bool:
        advert = self._node.members.get(origin)
        reached = self._node.members.step_of(origin)
        if origin in self._given_up and not self._was_heard(origin, self._given_up[origin]):
            return True
        # Who pauses is not at work: it has begun nothing that is still under way.
        at_work = advert is not None and advert.state in membership.STAGE_0_AT_WORK | membership.READY
        return not at_work or (reached is not None and int(reached) > self._node.step)

    # --- propagate --------------------------------------------------------------------------------------------------

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        """See ports.Handler."""
        check(self._node, header)
        node = self._node
        node.heard_at = node.now()
        node.members.heard(header.origin, now=node.heard_at)
        if header.origin.step > node.step:
            self.strike()
        key = Key(header.microbatch, header.digest)
        verdict = self.intake.offer(key, header.origin)
        match verdict.answer:
            case Answer.REPEAT:
                assert verdict.reply is not None
                node.event("microbatch", result="repeat")
                return verdict.reply
            case Answer.BUSY:
                node.event("busy", direction="in")
                raise Busy(f"stage {node.index} replica {node.me} is busy: {verdict.reason}")
            case Answer.JOIN:
                call = self._calls[key]
            case Answer.ADMIT | Answer.WAIT:
                self._calls[key] = call = _Call(header, body)
                if verdict.answer is Answer.ADMIT:
                    call.admitted.set()
                call.task = asyncio.create_task(self._serve(key, call, caller))
                call.task.add_done_callback(lambda task: self._ended(key, call, task))
        self._gauge()
        with node.serving(caller, for_microbatch(header.microbatch)):
            return await self._wait(call)

    def _ended(self, key: Key, call: _Call, task: asyncio.Task[Gradient]) -> None:
        """An attempt's task is over. One that was cancelled before its first line ran still holds its place."""
        if not task.cancelled():
            task.exception()
        if self._calls.get(key) is call:
            del self._calls[key]
            self._admit(self.intake.leave(key))
            self._gauge()
            self._node.pulse()

    async def _wait(self, call: _Call) -> Gradient:
        """One caller's wait. The call ends when its last caller is gone."""
        assert call.task is not None
        call.callers += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.callers -= 1
            if not call.callers and not call.task.done():
                call.task.cancel()

    async def _serve(self, key: Key, call: _Call, caller: PeerId) -> Gradient:
        """One attempt from its body to its reply."""
        node = self._node
        deadline = node.now() + call.header.time_left_s
        try:
            with node.waiting("activation", caller, call.header.time_left_s, for_microbatch(key.microbatch)):
                activation = await call.body()
            await self._admission(call, deadline)
            contribution, reply, below_finite = await self._compute(activation, deadline)
        except BaseException as error:
            self._admit(self.intake.leave(key))
            if call.flushed:
                raise Busy(f"stage {node.index} replica {node.me} is in an outer round or leaving") from error
            if not isinstance(error, PeerError | asyncio.CancelledError):
                node.fail(error)
                raise Declined("this replica has failed") from error
            if isinstance(error, Violation):
                node.event("microbatch", result="violation", peer=caller, message=str(error))
            raise
        else:
            if contribution.counted:
                served = reply.served[1] if len(reply.served) > 1 else None
                node.routes[key.microbatch] = (caller, served)
                node.event("microbatch", result="done" if reply.finite else "nonfinite")
            self._admit(self.intake.done(key, counted=contribution.counted, reply=reply))
            self._judge(contribution.finite or not below_finite, call.header.origin.peer)
            return reply
        finally:
            del self._calls[key]
            self._gauge()
            node.pulse()

    async def _admission(self, call: _Call, deadline: float) -> None:
        """Wait at the door, but not so long that the caller takes this node for hung: Busy is an answer too."""
        node = self._node
        longest_s, why = WAIT_SHARE * (deadline - node.now()), for_microbatch(call.header.microbatch)
        with node.span("wait"), node.waiting("place in the inner step", Resource.INNER_STEP, longest_s, why):
            try:
                async with asyncio.timeout(longest_s):
                    await call.admitted.wait()
            except TimeoutError:
                raise Busy(f"stage {node.index} replica {node.me} has not come so far yet") from None

    async def _compute(self, activation: Activation, deadline: float) -> tuple[Contribution, Gradient, bool]:
        """What this stage added, its reply, and whether everything further on was finite."""
        node, header, stage = self._node, activation.header, self._node.stage
        why = for_microbatch(header.microbatch)
        served: tuple[PeerId, ...]
        if node.last:
            with node.span("backward"), node.computing("backward", why):
                done = await to_the_end(
                    stage.loss_backward(header.microbatch, activation.hidden, activation.targets, activation.mask)
                )
            served, below_finite = (node.me,), True
        else:
            with node.span("forward"), node.computing("forward", why):
                graph, hidden = await stage.forward(activation.hidden, activation.mask)
            try:
                parcel = StageOutput(header.microbatch, header.origin, hidden, activation.targets, activation.mask)
                with node.waiting("gradient", AnyReplica(node.index + 1), deadline - node.now(), why):
                    gradient, _ = await self._sender.deliver(parcel, deadline)
                with node.span("backward"), node.computing("backward", why):
                    done = await to_the_end(stage.backward(graph, header.microbatch, gradient))
            except BaseException:
                stage.discard(graph)
                raise
            served, below_finite = (node.me, *gradient.served), gradient.finite
        assert done.grad is not None, "a later stage has an input gradient"
        finite = done.finite and below_finite
        reply = Gradient(header.microbatch, done.grad, done.loss_sum, done.tokens, served, finite)
        return done, reply, below_finite

    def _judge(self, finite: bool, origin: PeerId) -> None:
        """Stop the node when one result after the other is not finite and it cannot be the others' fault."""
        self._streak.record(finite, origin)
        reason = self._streak.reason_to_stop(self._node.view.origins)
        if reason is not None:
            self._node.fail(LocalError(reason))

    def _gauge(self) -> None:
        self._node.event("gauge", name="in_flight", value=self.intake.in_flight)
        self._node.event("gauge", name="waiting", value=self.intake.waiting)
