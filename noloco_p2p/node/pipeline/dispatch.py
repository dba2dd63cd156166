"""One stage's part in a microbatch: forward here, through the later stages and back, backward here.

Every stage goes this way: the source of stage 0 and the server of the later ones call `Dispatcher.train`. The
dispatcher keeps its output and its graph, so a peer that fails costs another call, never the microbatch
(ARCHITECTURE.md, "A microbatch").
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from noloco_p2p.core import members as membership
from noloco_p2p.core import routing
from noloco_p2p.core.messages import (
    Activation,
    Advert,
    Gradient,
    Header,
    HostTensor,
    LossSum,
    MicrobatchId,
    Origin,
    PeerId,
)
from noloco_p2p.core.status import AnyReplica, for_microbatch
from noloco_p2p.core.timeouts import ANSWER_SHARE, AdaptiveTimeout, attempt_s
from noloco_p2p.errors import Busy, Declined, PeerError, Unreachable, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.waits import Waits, to_the_end
from noloco_p2p.ports import Contribution, Transport

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.1
"""Pause after every replica said Busy; it doubles from the first to the longest."""
LONGEST_WITH_NOBODY_S = 0.5
"""The longest one when every replica failed."""
SHORTEST_CALL_S = 0.05
"""With less time than this left, a call is not begun."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StageInput:
    """What a stage is given of a microbatch. Shapes as in `Activation`; at stage 0 `inputs` are B×T tokens."""

    microbatch: MicrobatchId
    origin: Origin
    inputs: HostTensor
    targets: HostTensor
    mask: HostTensor | None


class StageResult(NamedTuple):
    """What came of a microbatch at this stage and after it."""

    contribution: Contribution
    next_hop: PeerId | None = None
    """The replica of the next stage that served it."""
    served: tuple[PeerId, ...] = ()
    """All who served it, from the next stage to the last."""
    finite_below: bool = True
    """Everything was finite at the later stages."""

    @property
    def finite(self) -> bool:
        """Everything was finite, here and later."""
        return self.contribution.finite and self.finite_below


@dataclass(slots=True)
class _Attempts:
    """What one delivery has heard so far."""

    trains: bool
    busy: set[PeerId] = field(default_factory=set)
    failed: set[PeerId] = field(default_factory=set)
    skipped: int = 0
    """Replicas that cannot serve it for no fault of theirs, or had too little time."""
    pause_s: float = FIRST_PAUSE_S
    busy_at: float | None = None
    """When Busy was first heard, on the loop's clock."""
    fell_back: bool = False
    failure: str = ""
    """The last one, in words."""


@dataclass(frozen=True, slots=True)
class RetryPolicy(Generic[R]):
    """One kind of call to the next stage, and how it is retried."""

    reply: str
    """What is waited for."""
    send: Callable[[Advert, Activation], Awaitable[R]]
    choose: Callable[[Origin, _Attempts], Advert | None]
    """The replica to call now; None when all have just said Busy or failed."""
    trains: bool
    """A microbatch that is lost costs gradients: it goes on while the node drains, tries another replica at once, and
    says Busy to its caller if it heard nothing else. An evaluation pauses after each failure: it may come late."""
    timeout: AdaptiveTimeout = field(default_factory=AdaptiveTimeout)


class Dispatcher:
    """Takes microbatches through this stage and the later ones, and knows how long the next one takes to answer."""

    def __init__(self, node: NodeState, swarm: Membership, waits: Waits, transport: Transport) -> None:
        self._node = node
        self._swarm = swarm
        self._waits = waits
        self._training: RetryPolicy[Gradient] = RetryPolicy("gradient", transport.propagate, self._routed, True)
        self._evaluation: RetryPolicy[LossSum] = RetryPolicy("loss", transport.evaluate, self._in_turn, False)

    async def train(self, task: StageInput, deadline: float | None = None) -> StageResult:
        """Forward, the later stages, backward; at the last stage the loss. The graph is freed however it ends.

        `deadline` is on the loop's clock; None at stage 0: as long as it takes. Raises Busy when until then only Busy
        was heard, Declined when no replica could serve it, and Violation when what we send breaks the protocol.
        """
        node, stage, why = self._node, self._node.stage, for_microbatch(task.microbatch)
        if node.last:
            with node.span("backward"), self._waits.computing("backward", why):
                done = await to_the_end(stage.loss_backward(task.microbatch, task.inputs, task.targets, task.mask))
            return StageResult(done)
        with node.span("forward"), self._waits.computing("forward", why):
            graph, hidden = await stage.forward(task.inputs, task.mask)
        try:
            gradient, peer = await self._deliver(replace(task, inputs=hidden), self._training, deadline)
            with node.span("backward"), self._waits.computing("backward", why):
                # Once the device has it, it counts there: a caller that goes away now must not leave it uncounted here.
                done = await to_the_end(stage.backward(graph, task.microbatch, gradient))
        except BaseException:
            stage.discard(graph)
            raise
        return StageResult(done, peer, gradient.served, gradient.finite)

    async def evaluate(self, task: StageInput, deadline: float | None = None) -> LossSum:
        """The loss of a held-out microbatch. Raises Declined when nobody could evaluate it in time."""
        with self._waits.computing("evaluation", for_microbatch(task.microbatch)):
            result = await self._node.stage.evaluate(task.inputs, task.targets, task.mask)
        if isinstance(result, LossSum):
            return result
        loss, _ = await self._deliver(replace(task, inputs=result), self._evaluation, deadline)
        return loss

    # --- the retry loop ---------------------------------------------------------------------------------------------

    async def _deliver(self, output: StageInput, policy: RetryPolicy[R], deadline: float | None) -> tuple[R, PeerId]:
        """The reply of the later stages to an output, and the replica that gave it.

        At stage 0 nobody waits for the reply but this node: Busy is no failure, and a stage that nobody serves comes
        back, so it tries again as long as the node trains.
        """
        node, left_s = self._node, None if deadline is None else deadline - self._node.now()
        with self._waits.waiting(policy.reply, AnyReplica(node.index + 1), left_s, for_microbatch(output.microbatch)):
            while True:
                give_up_at = node.now() + node.config.limits.microbatch_deadline_s
                if deadline is not None and left_s is not None:
                    # My answer must still reach my caller, or it takes me for hung.
                    give_up_at = deadline - ANSWER_SHARE * max(0.0, left_s)
                try:
                    return await self._try_replicas(output, policy, give_up_at)
                except Busy:
                    if deadline is not None or node.draining:
                        raise
                except Declined:
                    if deadline is not None or node.draining or not await self._swarm.until_served():
                        raise

    async def _try_replicas(self, output: StageInput, policy: RetryPolicy[R], deadline: float) -> tuple[R, PeerId]:
        """Call one replica of the next stage after the other until one answers, or the time is up."""
        node, heard, why = self._node, _Attempts(policy.trains), for_microbatch(output.microbatch)
        while True:
            began = node.now()
            if node.drain_by is not None:
                deadline = min(deadline, node.drain_by if policy.trains else began)
            # An adaptive timeout for evaluations comes late, there are few: that of training will do, it takes longer.
            timeout = self._training.timeout if policy.timeout.deadline_s() is None else policy.timeout
            hops_below = node.manifest.stages - 2 - node.index
            longest_s = attempt_s(deadline - began, hops_below, timeout.deadline_s(node.config.limits.patience_floor_s))
            if longest_s < SHORTEST_CALL_S or (node.index == 0 and self._swarm.nobody_there()):
                raise self._give_up(output.microbatch, heard)
            peer = policy.choose(output.origin, heard)
            if peer is None:
                await self._pause(heard)
                continue
            header = Header(node.run_id, output.microbatch, output.origin, node.index + 1, longest_s)
            activation = Activation(header, output.inputs, output.targets, output.mask, reply=node.stage.state.gradient)
            span = node.span("send") if policy.trains else nullcontext()
            try:
                with span, self._waits.waiting(policy.reply, peer.peer_id, longest_s, why):
                    reply = await policy.send(peer, activation)
            except PeerError as error:
                hurried = timeout.was_hurried(longest_s, node.now() - began)
                self._note_failure(peer, error, heard, hurried)
                if not policy.trains:
                    await self._pause(heard)
            else:
                policy.timeout.observe(node.now() - began)
                self._swarm.answered(peer.peer_id)
                return reply, peer.peer_id

    def _note_failure(self, peer: Advert, error: PeerError, heard: _Attempts, hurried: bool) -> None:
        """A call failed: set the peer aside if it is at fault; raise what must not be retried.

        A peer that says Busy or Declined is alive. One that had less time than such calls take is neither praised nor
        blamed: it may have been about to answer.
        """
        swarm, id = self._swarm, peer.peer_id
        if isinstance(error, Violation) and not heard.trains:
            raise Declined(str(error)) from error
        if isinstance(error, Violation) and error.ours:
            raise error
        if isinstance(error, Busy):
            swarm.answered(id)
            self._note_busy(id, heard)
            return
        reason = type(error).__name__.lower()
        if isinstance(error, Declined):
            swarm.answered(id)
        elif isinstance(error, Unreachable) and hurried:
            reason = "hurried"
        else:
            swarm.failed(id)
        heard.skipped += reason in ("declined", "hurried")
        heard.failed.add(id)
        heard.failure = str(error)
        if heard.trains:
            self._node.event("reroute", reason=reason, peer=id, message=str(error))

    def _note_busy(self, peer: PeerId, heard: _Attempts) -> None:
        if not heard.trains:
            heard.failure = "busy"
            return
        node, newest = self._node, self._swarm.members.get(peer)
        node.event("busy", direction="out")
        heard.busy.add(peer)
        heard.busy_at = node.now() if heard.busy_at is None else heard.busy_at
        # `balanced` and `fixed` wait for the replica that they name. One that is still fetching its weights may take
        # minutes: others serve meanwhile.
        waited_s = node.now() - heard.busy_at
        named = node.manifest.routing != "random" and waited_s > node.config.limits.patience_floor_s
        if named and newest is not None and newest.state != "training":
            heard.failed.add(peer)

    def _give_up(self, microbatch: MicrobatchId, heard: _Attempts) -> PeerError:
        """The error for the caller above: in training Busy if that was all that was heard."""
        stage, why = self._node.index + 1, heard.failure or "none is in the membership"
        if heard.busy_at is not None and not heard.failure:
            return Busy(f"every replica of stage {stage} is busy")
        done = f"served microbatch {microbatch.counter}" if heard.trains else "evaluated a microbatch"
        return Declined(f"no replica of stage {stage} {done} in time: {why}")

    async def _pause(self, heard: _Attempts) -> None:
        """Let time pass, then every replica may be asked again."""
        with self._waits.waiting("free replica", AnyReplica(self._node.index + 1), heard.pause_s):
            await asyncio.sleep(heard.pause_s)
        longest_s = LONGEST_WITH_NOBODY_S if heard.trains and not heard.busy else LONGEST_PAUSE_S
        heard.pause_s = min(2 * heard.pause_s, longest_s)
        if not heard.busy:
            heard.failed.clear()
        heard.busy.clear()

    # --- which replica ----------------------------------------------------------------------------------------------

    def _routed(self, origin: Origin, heard: _Attempts) -> Advert | None:
        """Training: the replica that the run's policy chooses."""
        node, view, members = self._node, self._swarm.view, self._swarm.members
        stage, policy = node.index + 1, node.manifest.routing
        usable = members.usable(stage, now=node.now(), without=heard.failed)
        if policy == "random":
            usable = [peer for peer in usable if peer not in heard.busy] if heard.busy else usable
        elif heard.busy:
            return None
        if not usable:
            return None
        seed, me = node.manifest.seed, node.me
        chosen, reason = routing.next_hop(
            policy, seed, stage, origin, view.origins, me, view.mates, view.following, usable, node.rng
        )
        if reason == "fallback" and not heard.fell_back:
            heard.fell_back = True
            node.event("reroute", reason="fallback", peer=chosen, message="the named replica cannot be reached")
        return members.get(chosen)

    def _in_turn(self, origin: Origin, heard: _Attempts) -> Advert | None:
        """Evaluation: replica i of stage 0 (`origin.index` is i) goes through replica i mod n of each later stage.

        The next one in turn stands in for a replica that is set aside or has declined.
        """
        node, members = self._node, self._swarm.members
        replicas = members.of_stage(node.index + 1, membership.HOLDING)
        if not replicas:
            return None
        turn = (origin.index + heard.skipped) % len(replicas)
        in_turn = [*replicas[turn:], *replicas[:turn]]
        free = [a for a in in_turn if not members.is_aside(a.peer_id, now=node.now())]
        return (free or in_turn)[0]
