"""One stage's part in a microbatch: forward here, through the later stages and back, backward here.

The source of stage 0 and the server of the later ones call `Dispatcher.train`, which keeps the output and its graph: a
peer that fails costs another call, never the microbatch (ARCHITECTURE.md, "A microbatch").
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Generic, TypeVar

from noloco_p2p.core import members, routing
from noloco_p2p.core.line_rate import Sending
from noloco_p2p.core.messages import Activation, Advert, Gradient, Header, LossSum, MicrobatchId, Origin, PeerId
from noloco_p2p.core.status import AnyReplica, for_microbatch
from noloco_p2p.core.timeouts import ANSWER_SHARE, attempt_s
from noloco_p2p.errors import Busy, Declined, PeerError, Stalled, Unreachable, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.asking import Asking
from noloco_p2p.node.pipeline.choice import Attempts, Choice, ReplicaChoice
from noloco_p2p.node.pipeline.liveness import Liveness
from noloco_p2p.node.pipeline.race import first_granted
from noloco_p2p.node.pipeline.task import StageInput, StageResult
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.waits import to_the_end
from noloco_p2p.ports import Claim, Transport

ALONE_SILENCES = 2.0
"""How long a later stage waits for a replica that serves the next one, in units of `limits.patience_floor_s`."""
MOST_AWAITED = 80
"""Maximum number of microbatches whose gradients a node awaits at a time. A peer serves 160 calls of one caller, and
each microbatch may be offered to two replicas."""
SHORTEST_CALL_S = 0.05
"""No call is started with less time left than this, seconds."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RetryPolicy(Generic[R]):
    """One kind of call to the next stage, and how it is retried."""

    reply: str
    """The name of the awaited reply, for the list of waits."""
    send: Callable[[Advert, Activation, Claim], Awaitable[R]]
    choose: Callable[[Origin, Attempts, Callable[[Advert], Sending]], Choice]
    """Chooses the replicas to call now; the last argument tells how the activation would be sent to a replica."""
    trains: bool
    """Whether this is training. A lost microbatch costs gradients, so it continues while the node drains, tries another
    replica at once, and raises Busy for its caller if it received nothing else. An evaluation may be late, so it pauses
    after each failure."""


class Dispatcher:
    """Takes microbatches through this stage and the later ones, for one node."""

    def __init__(self, node: NodeState, swarm: Membership, transport: Transport) -> None:
        self._node = node
        self._swarm = swarm
        self._transport = transport
        self._asking = Asking(node, transport)
        self._awaited = asyncio.Semaphore(MOST_AWAITED)
        self.liveness = Liveness(node, transport)
        self.given_up = False
        """Set when the node has moved to another stage: what is still under way here must not be sent on from there."""
        self.evaluated = 0
        """Number of held-out microbatches that this node's device has evaluated."""
        self._busy: dict[tuple[PeerId, bool], tuple[float, float]] = {}
        """(replica of the next stage, in training?) → when it first and last answered Busy without serving."""
        self._choice = choice = ReplicaChoice(node, swarm, transport.line)
        self._training: RetryPolicy[Gradient] = RetryPolicy("gradient", self._propagate, choice.by_policy, True)
        self._evaluation: RetryPolicy[LossSum] = RetryPolicy("loss", transport.evaluate, choice.in_turn, False)

    async def train(self, task: StageInput, left_s: float | None = None) -> StageResult:
        """Forward, the later stages, backward; at the last stage the loss. The graph is freed in any case.

        `left_s` is how long our caller tolerates no progress; None at stage 0: as long as it takes. Raises Busy if
        replicas answered nothing but Busy in that time, Declined if none could serve the microbatch, and Violation if
        what we send breaks the protocol.
        """
        node, stage, why = self._node, self._node.stage, for_microbatch(task.microbatch)
        # What the device has been given counts, so it is awaited even if the caller goes away now. At stage 0 nobody
        # calls: only the end of the node cancels it.
        finish = to_the_end if node.index > 0 else asyncio.ensure_future
        if node.last:
            task.reply_soon()
            with node.span("backward"), node.waits.computing("backward", why):
                done = await finish(stage.loss_backward(task.microbatch, task.inputs, task.targets, task.mask))
            return StageResult(done)
        with node.span("forward"), node.waits.computing("forward", why):
            graph, hidden = await stage.forward(task.inputs, task.mask)
        node.waits.pulse()  # there may be room for more microbatches now
        try:
            gradient, peer = await self._deliver(replace(task, inputs=hidden), self._training, left_s)
            with node.span("backward"), node.waits.computing("backward", why):
                done = await finish(stage.backward(graph, task.microbatch, gradient))
        except BaseException:
            stage.discard(graph)
            raise
        self._choice.served_by(peer)
        if done.clip < 1:
            node.distrust("gradient", peer=peer)
        return StageResult(done, peer, gradient)

    async def _propagate(self, peer: Advert, activation: Activation, claim: Claim) -> Gradient:
        """The gradient from one replica. One that this stage cannot use is a Violation, so the call has failed."""
        stage = self._node.stage  # the node may hold another one by the time of the reply
        gradient = await self._transport.propagate(peer, activation, claim)
        stage.check(gradient)
        return gradient

    def prepare(self, origin: Origin) -> None:
        """Warm up the connections to the replicas that may get this microbatch next: it will soon leave this stage."""
        if not self._node.last:
            self._transport.warm(self._choice.expected(origin), self._node.stage.state.hidden.nbytes)

    async def evaluate(self, task: StageInput, left_s: float | None = None) -> LossSum:
        """The loss of a held-out microbatch. Raises Declined if nobody evaluated it in time, or if this node moved."""
        if self.given_up:
            raise Declined(f"{self._node.replica} held another stage when this microbatch was sent")
        with self._node.waits.computing("evaluation", for_microbatch(task.microbatch)):
            result = await self._node.stage.evaluate(task.inputs, task.targets, task.mask)
        self.evaluated += 1
        if isinstance(result, LossSum):
            return result
        loss, peer = await self._deliver(replace(task, inputs=result), self._evaluation, left_s)
        self._choice.served_by(peer)
        return loss

    # --- the retry loop ---------------------------------------------------------------------------------------------

    async def _deliver(self, output: StageInput, policy: RetryPolicy[R], left_s: float | None) -> tuple[R, PeerId]:
        """The reply of the later stages to an output, and the replica that sent it.

        At stage 0 only this node waits for the reply: Busy is no failure, and a deserted stage will be served again, so
        it keeps trying while the node trains.
        """
        node = self._node
        # A replica that the policy names may be waiting for exactly the last microbatch that a middle stage has.
        limited = policy.trains and (node.index == 0 or node.manifest.routing in routing.FREE)
        # Our answer must still reach the caller in time, or it considers this node hung.
        budget_s = node.config.limits.microbatch_deadline_s if left_s is None else (1 - ANSWER_SHARE) * left_s
        with node.waits.waiting(policy.reply, AnyReplica(node.index + 1), left_s, for_microbatch(output.microbatch)):
            async with self._awaited if limited else nullcontext():
                while True:
                    try:
                        return await self._try_replicas(output, policy, budget_s)
                    except (Busy, Declined) as error:
                        waits = left_s is None and not node.draining
                        if not (waits and (isinstance(error, Busy) or await self._swarm.until_served())):
                            raise

    async def _try_replicas(self, output: StageInput, policy: RetryPolicy[R], budget_s: float) -> tuple[R, PeerId]:
        """Call replicas of the next stage, one after another, until one answers or `budget_s` pass without progress."""
        node, attempts = self._node, Attempts(policy.trains, frozenset(output.avoid), output.origin.step)
        deadline = node.now() + budget_s

        def progressed() -> None:
            nonlocal deadline
            deadline, attempts.alone_since = node.now() + budget_s, None

        while True:
            began = node.now()
            if node.drain_by is not None:
                deadline = min(deadline, node.drain_by if policy.trains else began)
            longest_s = attempt_s(deadline - began, node.manifest.stages - 2 - node.index)
            nobody = node.index == 0 and self._swarm.nobody_there()
            if longest_s < SHORTEST_CALL_S or self.given_up or nobody:
                raise self._final_error(output.microbatch, attempts)
            header = Header(node.run_id, output.microbatch, output.origin, node.index + 1, longest_s)
            activation = Activation(header, output.inputs, output.targets, output.mask, reply=node.stage.state.gradient)
            sending = partial(self._transport.sending, activation)
            peers, header_first, patient = policy.choose(output.origin, attempts, sending)
            if not peers:
                if self._nobody_to_ask(attempts):
                    raise self._final_error(output.microbatch, attempts)
                await self._pause(attempts)
                continue
            asks = header_first and policy.trains
            if asks and not self._asking.may_ask():
                if await self._asking.until_may_ask(output.microbatch, longest_s):
                    progressed()
                continue
            header = replace(header, patient=patient, label=output.label, avoid=output.avoid)
            activation = replace(activation, header=header)
            calls = {a.peer_id: partial(self._call, policy, activation, header_first, progressed, a) for a in peers}
            left = self._asking.begin() if asks else (lambda: None)
            try:
                with node.span("send") if policy.trains else nullcontext():
                    answer = await first_granted(calls, partial(self._note_failure, attempts), left, output.reply_soon)
            finally:
                left()
            if answer is not None:
                self._busy.pop((answer[0], policy.trains), None)
                return answer[1], answer[0]
            if not policy.trains:
                await self._pause(attempts)

    async def _call(
        self,
        policy: RetryPolicy[R],
        activation: Activation,
        header_first: bool,
        progressed: Callable[[], None],
        peer: Advert,
        claim: Claim,
    ) -> R:
        """Make one call to one replica, and watch over its progress."""
        microbatch, longest_s = activation.header.microbatch, activation.header.time_left_s
        waiting = self._node.waits.waiting(policy.reply, peer.peer_id, longest_s, for_microbatch(microbatch))
        with waiting, self._swarm.trials.call(peer.peer_id, usual=policy.trains) as limit_s:
            reply = policy.send(peer, activation, replace(claim, asked=header_first))
            return await self.liveness.watched(peer, microbatch, longest_s, reply, progressed, limit_s)

    def _note_failure(self, attempts: Attempts, id: PeerId, error: PeerError) -> None:
        """Record that a call failed: set the peer aside if it is at fault, and raise what must not be retried. A peer
        that refuses is alive. What it calls our violation is one only if another says so, too, or there is no other."""
        swarm, ours = self._swarm, isinstance(error, Violation) and error.ours
        if ours:
            attempts.refused.add(id)
            listed = {advert.peer_id for advert in swarm.members.of_stage(self._node.index + 1, members.IN_ROUNDS)}
            if len(attempts.refused) > 1 or listed <= attempts.refused:
                raise error if attempts.trains else Declined(str(error))
        if isinstance(error, Busy):
            swarm.answered(id)
            self._note_busy(id, attempts)
            return
        failed = isinstance(error, Unreachable | Violation) and not ours
        if failed or (isinstance(error, Stalled) and swarm.trials.on_trial(id)):
            swarm.failed(id)
        else:
            attempts.skipped += 1
            if not isinstance(error, Stalled):
                swarm.answered(id)
        attempts.failed[id] = self._node.now()
        attempts.failure = str(error)
        if attempts.trains:
            self._node.event("reroute", reason=type(error).__name__.lower(), peer=id, message=str(error))

    def _nobody_to_ask(self, attempts: Attempts) -> bool:
        """Whether to give up because no replica can be asked. A later stage does so after a while, which frees its
        graph; the stage before keeps its own. Stage 0 does so after the end of the run, because no node returns
        then."""
        if attempts.busy:
            attempts.alone_since = None
            return False
        now, limits = self._node.now(), self._node.config.limits
        attempts.alone_since = attempts.alone_since or now
        if self._node.index > 0:
            return now - attempts.alone_since > ALONE_SILENCES * limits.patience_floor_s
        return self._swarm.run_ended and now - attempts.alone_since > limits.linger_s

    def _note_busy(self, peer: PeerId, attempts: Attempts) -> None:
        node, newest, now, key = self._node, self._swarm.members.get(peer), self._node.now(), (peer, attempts.trains)
        if attempts.trains:
            node.event("busy", direction="out")
            attempts.busy.add(peer)
            attempts.busy_at = attempts.busy_at or now
        else:
            attempts.failure = "busy"
        if newest is None or (attempts.trains and node.manifest.routing in routing.FREE):
            return
        # `balanced` and `fixed` wait for the replica that they name, but not while it fetches its weights, nor longer
        # than an honest one is busy: an inner step, or without overlap an outer round. Nor do they if its slots of this
        # step are gone: its round may need them. In an evaluation the next in order stands in, while it is still there.
        outer, limits = node.manifest.outer, node.config.limits
        step_s = max(limits.patience_floor_s, median(node.step_seconds or [0.0]))
        longest_s = (step_s if outer.overlap else outer.deadline_s) if attempts.trains else limits.linger_s / 2
        self._busy = {k: spell for k, spell in self._busy.items() if now - spell[1] < 2 * longest_s}
        began, _ = self._busy.get(key, (now, now))
        self._busy[key] = began, now
        passed = node.manifest.routing == "balanced" and int(newest.step) > attempts.step
        fetches = newest.state != "training" and now - (attempts.busy_at or now) > limits.patience_floor_s
        if not attempts.trains:
            attempts.skipped += now - began > longest_s
        elif passed or fetches or now - began > longest_s:
            attempts.failed[peer] = now

    def _final_error(self, microbatch: MicrobatchId, attempts: Attempts) -> PeerError:
        """The error for the calling stage: in training Busy, if replicas answered nothing else."""
        stage, why = self._node.index + 1, attempts.failure or "none is listed"
        if attempts.busy_at is not None and not attempts.failure:
            return Busy(f"every replica of stage {stage} is busy")
        done = f"served microbatch {microbatch.counter}" if attempts.trains else "evaluated a microbatch"
        return Declined(f"no replica of stage {stage} {done} in time: {why}")

    async def _pause(self, attempts: Attempts) -> None:
        with self._node.waits.waiting("free replica", AnyReplica(self._node.index + 1), attempts.pause_s):
            await asyncio.sleep(attempts.pause_s)
        attempts.begin_anew(self._node.now(), free=self._node.manifest.routing in routing.FREE)
