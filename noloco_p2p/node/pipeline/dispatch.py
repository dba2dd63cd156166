"""Sending on: one output to replicas of the next stage until one of them answers (design.md §4).

The sender keeps its output and its graph; a peer that fails costs another call, never the microbatch.
"""

import asyncio
from dataclasses import dataclass

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
from noloco_p2p.node.state import NodeState

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.1
"""Pause after everybody said Busy; it doubles from the first to the longest."""
LONGEST_WITH_NOBODY_S = 0.5
"""The longest one when everybody failed."""
SHORTEST_CALL_S = 0.05
"""With less time than this left, a call is not begun."""
TIMER_S = 0.01
"""Timers are as exact as this: a call that took all of its time but this was ended by it."""


@dataclass(frozen=True, slots=True)
class StageOutput:
    """A stage's output, kept until the gradient is back. Shapes as in `Activation`."""

    microbatch: MicrobatchId
    origin: Origin
    hidden: HostTensor
    targets: HostTensor
    mask: HostTensor | None


@dataclass(slots=True)
class _Attempts:
    """What one delivery has heard so far."""

    busy: set[PeerId]
    failed: set[PeerId]
    pause_s: float = FIRST_PAUSE_S
    heard_busy: bool = False
    busy_at: float = 0.0
    """When Busy was first heard, on the loop's clock."""
    fell_back: bool = False
    failure: str = ""

    def give_up(self, stage: int, waited_for: MicrobatchId) -> PeerError:
        """The error for whoever waits above: Busy if that was all that was heard."""
        if self.heard_busy and not self.failure:
            return Busy(f"every replica of stage {stage} is busy")
        why = self.failure or "none is in the membership"
        return Declined(f"no replica of stage {stage} served microbatch {waited_for.counter} in time: {why}")


class Dispatcher:
    """Sends to the next stage for one node, and knows how long its answers take. A node that moves begins anew."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._patience = AdaptiveTimeout()
        self._evaluations = AdaptiveTimeout()

    async def deliver(self, parcel: StageOutput, deadline: float) -> tuple[Gradient, PeerId]:
        """The gradient of an output, and the replica that served it; `deadline` is on the loop's clock.

        Raises Busy when until then only Busy was heard, Declined when nobody could serve it, and Violation when what
        we send breaks the protocol: then nobody retries it.
        """
        node, heard = self._node, _Attempts(set(), set())
        patience, why = self._patience, for_microbatch(parcel.microbatch)
        deadline = self._before_my_caller(deadline)
        while True:
            if node.drain_by is not None:
                deadline = min(deadline, node.drain_by)
            began = node.now()
            longest_s = self._attempt_s(deadline - began, patience)
            if longest_s < SHORTEST_CALL_S or (node.index == 0 and self.nobody_there()):
                raise heard.give_up(node.index + 1, parcel.microbatch)
            peer = self._choose(parcel.origin, heard)
            if peer is None:
                await self._pause(heard)
                continue
            try:
                with node.span("send"), node.waiting("gradient", peer.peer_id, longest_s, why):
                    gradient = await node.world.transport.propagate(peer, self._activation(parcel, longest_s))
            except Busy:
                self._answered(peer)
                node.event("busy", direction="out")
                heard.busy.add(peer.peer_id)
                heard.busy_at = heard.busy_at if heard.heard_busy else node.now()
                heard.heard_busy = True
                if self._comes_late(peer.peer_id, heard):
                    heard.failed.add(peer.peer_id)
            except (Unreachable, Declined, Violation) as error:
                hurried = self._was_hurried(longest_s, node.now() - began, patience)
                self._blame(peer, error, heard, hurried=hurried)
            else:
                patience.observe(node.now() - began)
                self._answered(peer)
                return gradient, peer.peer_id

    def _blame(self, peer: Advert, error: PeerError, heard: _Attempts, *, hurried: bool) -> None:
        """A call failed: set aside whose fault it is, go on with another; raise what nobody may retry."""
        if isinstance(error, Violation) and error.ours:
            raise error
        reason = type(error).__name__.lower()
        if isinstance(error, Declined):
            self._answered(peer)
        elif isinstance(error, Unreachable) and hurried:
            reason = "hurried"
        else:
            self._failed(peer)
        heard.failed.add(peer.peer_id)
        heard.failure = str(error)
        self._node.event("reroute", reason=reason, peer=peer.peer_id, message=str(error))

    # --- how long a call may take -----------------------------------------------------------------------------------

    def _before_my_caller(self, deadline: float) -> float:
        """Until when I try: my answer must still reach who called me, or it takes me for hung."""
        if self._node.index == 0:
            return deadline
        return deadline - ANSWER_SHARE * max(0.0, deadline - self._node.now())

    def _attempt_s(self, left_s: float, patience: AdaptiveTimeout) -> float:
        """How long the next call may take, with the calls nested in it."""
        hops_below = self._node.manifest.stages - 2 - self._node.index
        return attempt_s(left_s, hops_below, patience.deadline_s(self._node.config.limits.patience_floor_s))

    @staticmethod
    def _was_hurried(longest_s: float, took_s: float, patience: AdaptiveTimeout) -> bool:
        """The call was ended by its time, and had less of it than such calls need: no proof against the peer."""
        needed_s = patience.deadline_s()
        return needed_s is not None and longest_s < needed_s and took_s >= longest_s - TIMER_S

    # --- whom to trust ----------------------------------------------------------------------------------------------

    def _answered(self, peer: Advert) -> None:
        self._node.members.answered(peer.peer_id)
        if self._node.deserted:
            self.look_for_deserted()

    def _failed(self, peer: Advert) -> None:
        self._node.members.failed(peer.peer_id, now=self._node.now())
        self.look_for_deserted()

    def look_for_deserted(self, *, reading: bool = False) -> None:
        """Keep `node.deserted` true; tell of it when it changes, and at each `reading` while it is not empty."""
        node, now = self._node, self._node.now()
        found = node.members.deserted(node.manifest.stages, node.index) if node.advert.state == "training" else []
        changed = found != sorted(node.deserted)
        node.deserted = {stage: node.deserted.get(stage, now) for stage in found}
        if changed or (reading and found):
            node.event("deserted", stages={stage: now - since for stage, since in node.deserted.items()})
        if changed:
            node.pulse()

    def nobody_there(self) -> bool:
        """A later stage has no replica at all, so that nothing that stage 0 sends could come back.

        False once somebody of stage 0 has finished: then nobody need come.
        """
        node = self._node
        return not node.saw_the_end and any(
            stage > node.index and not node.members.anybody(stage) for stage in node.deserted
        )

    async def until_served(self) -> bool:
        """Wait while a later stage is deserted and nobody of it is there. False: none was deserted, or I leave."""
        node = self._node
        if node.saw_the_end or not any(stage > node.index for stage in node.deserted):
            return False
        empty = min(stage for stage in node.deserted if stage > node.index)
        await node.until(lambda: node.draining or not self.nobody_there(), "replica", AnyReplica(empty))
        return not node.draining

    def _comes_late(self, peer: PeerId, heard: _Attempts) -> bool:
        """The replica that the policy names is still fetching its weights: others serve meanwhile."""
        node, newest = self._node, self._node.members.get(peer)
        waits_s = node.now() - heard.busy_at
        named = node.manifest.routing != "random" and waits_s > node.config.limits.patience_floor_s
        return named and newest is not None and newest.state != "training"

    def _choose(self, origin: Origin, heard: _Attempts) -> Advert | None:
        """The replica to call now, or None when everybody has just said Busy or failed."""
        node = self._node
        stage, policy = node.index + 1, node.manifest.routing
        usable = node.members.usable(stage, now=node.now(), without=heard.failed)
        if policy == "random":
            usable = [peer for peer in usable if peer not in heard.busy] if heard.busy else usable
        elif heard.busy:
            return None
        if not usable:
            return None
        chosen, reason = routing.next_hop(
            policy,
            node.manifest.seed,
            stage,
            origin,
            node.view.origins,
            node.me,
            node.view.mates,
            node.view.following,
            usable,
            node.rng,
        )
        if reason == "fallback" and not heard.fell_back:
            heard.fell_back = True
            node.event("reroute", reason="fallback", peer=chosen, message="the named replica cannot be reached")
        return node.members.get(chosen)

    async def _pause(self, heard: _Attempts) -> None:
        """Let time pass, then everybody may be asked again."""
        with self._node.waiting("free replica", AnyReplica(self._node.index + 1), heard.pause_s):
            await asyncio.sleep(heard.pause_s)
        heard.pause_s = min(2 * heard.pause_s, LONGEST_PAUSE_S if heard.busy else LONGEST_WITH_NOBODY_S)
        if not heard.busy:
            heard.failed.clear()
        heard.busy.clear()

    def _activation(self, parcel: StageOutput, left_s: float) -> Activation:
        node = self._node
        header = Header(node.run_id, parcel.microbatch, parcel.origin, node.index + 1, left_s)
        return Activation(header, parcel.hidden, parcel.targets, parcel.mask)

    # --- evaluation -------------------------------------------------------------------------------------------------

    async def evaluate(self, parcel: StageOutput, deadline: float) -> LossSum:
        """The loss of a held-out microbatch; replica i of stage 0 goes through replica i mod n (`origin.index` is i).

        The next one in turn stands in for a replica that is set aside. Raises Declined when nobody of the next stage
        could serve it until `deadline`.
        """
        node = self._node
        pause_s, failure, skip = FIRST_PAUSE_S, "none is in the membership", 0
        patience = self._evaluations
        deadline = self._before_my_caller(deadline)
        while not node.draining:
            began = node.now()
            # Until enough evaluations were seen, what is known of training will do: it takes longer.
            known = patience if patience.deadline_s() is not None else self._patience
            longest_s = self._attempt_s(deadline - began, known)
            if longest_s < SHORTEST_CALL_S or (node.index == 0 and self.nobody_there()):
                break
            peer = self._evaluator(parcel.origin.index + skip)
            if peer is not None:
                try:
                    with node.waiting("loss", peer.peer_id, longest_s, for_microbatch(parcel.microbatch)):
                        loss = await node.world.transport.evaluate(peer, self._activation(parcel, longest_s))
                except Busy:
                    self._answered(peer)
                    failure = "busy"
                except Violation as error:
                    raise Declined(str(error)) from error
                except Declined as error:
                    self._answered(peer)
                    failure, skip = str(error), skip + 1
                except Unreachable as error:
                    failure = str(error)
                    if self._was_hurried(longest_s, node.now() - began, known):
                        skip += 1
                    else:
                        self._failed(peer)
                else:
                    patience.observe(node.now() - began)
                    self._answered(peer)
                    return loss
            with node.waiting("free replica", AnyReplica(node.index + 1), pause_s):
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise Declined(f"no replica of stage {node.index + 1} evaluated a microbatch in time: {failure}")

    def _evaluator(self, turn: int) -> Advert | None:
        """The replica whose turn it is, or the next one that is not set aside; None when nobody is there."""
        node = self._node
        replicas = node.members.of_stage(node.index + 1, membership.HOLDING)
        if not replicas:
            return None
        in_turn = [replicas[(turn + more) % len(replicas)] for more in range(len(replicas))]
        free = [a for a in in_turn if not node.members.is_aside(a.peer_id, now=node.now())]
        return (free or in_turn)[0]
