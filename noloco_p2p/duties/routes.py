"""Sending on: one output to replicas of the next stage until one of them answers (design.md §4).

The sender keeps its output and its graph; a peer that fails costs another call, never the microbatch.
"""

import asyncio
from collections.abc import Sequence
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
from noloco_p2p.duties.seat import Seat
from noloco_p2p.errors import Busy, Declined, PeerError, Unreachable, Violation

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.1
"""Pause after everybody said Busy; it doubles from the first to the longest."""
SHORTEST_CALL_S = 0.05
"""With less time than this left, a call is not begun."""


@dataclass(frozen=True, slots=True)
class Parcel:
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
    fell_back: bool = False
    failure: str = ""

    def give_up(self, stage: int, waited_for: MicrobatchId) -> PeerError:
        """The error for whoever waits above: Busy if that was all that was heard."""
        if self.heard_busy and not self.failure:
            return Busy(f"every replica of stage {stage} is busy")
        why = self.failure or "none is in the membership"
        return Declined(f"no replica of stage {stage} served microbatch {waited_for.counter} in time: {why}")


class Sender:
    """Sends to the next stage for one node."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    async def deliver(self, parcel: Parcel, deadline: float) -> tuple[Gradient, PeerId]:
        """The gradient of an output, and the replica that served it; `deadline` is on the loop's clock.

        Raises Busy when until then only Busy was heard, Declined when nobody could serve it, and Violation when what
        we send breaks the protocol: then nobody retries it.
        """
        seat, heard = self._seat, _Attempts(set(), set())
        while True:
            if seat.drain_by is not None:
                deadline = min(deadline, seat.drain_by)
            left_s = self._share(deadline - seat.now())
            if left_s < SHORTEST_CALL_S:
                raise heard.give_up(seat.index + 1, parcel.microbatch)
            peer = self._choose(parcel.origin, heard)
            if peer is None:
                await self._pause(heard)
                continue
            try:
                with seat.span("send"):
                    gradient = await seat.world.transport.propagate(peer, self._activation(parcel, left_s))
            except Busy:
                seat.members.answered(peer.peer_id)
                seat.event("busy", direction="out")
                heard.busy.add(peer.peer_id)
                heard.heard_busy = True
            except (Unreachable, Declined, Violation) as error:
                self._blame(peer, error, heard)
            else:
                seat.members.answered(peer.peer_id)
                return gradient, peer.peer_id

    def _blame(self, peer: Advert, error: PeerError, heard: _Attempts) -> None:
        """A call failed: set aside whose fault it is, go on with another; raise what nobody may retry."""
        if isinstance(error, Violation) and error.ours:
            raise error
        if isinstance(error, Declined):
            self._seat.members.answered(peer.peer_id)
        else:
            self._seat.members.failed(peer.peer_id, now=self._seat.now())
        heard.failed.add(peer.peer_id)
        heard.failure = str(error)
        self._seat.event("reroute", reason=type(error).__name__.lower(), peer=peer.peer_id, message=str(error))

    def _share(self, left_s: float) -> float:
        """How much of my time the next hop gets: all but a margin for one retry at each hop below.

        When little is left, half of it: a retry must still end before my own caller gives up.
        """
        hops_below = self._seat.manifest.stages - 1 - self._seat.index
        return max(left_s - hops_below * self._seat.config.limits.hop_margin_s, left_s / 2)

    def _choose(self, origin: Origin, heard: _Attempts) -> Advert | None:
        """The replica to call now, or None when everybody has just said Busy or failed."""
        seat = self._seat
        stage, policy = seat.index + 1, seat.manifest.routing
        usable = seat.members.usable(stage, now=seat.now(), without=heard.failed)
        if policy == "random":
            usable = [a for a in usable if a.peer_id not in heard.busy]
        elif heard.busy:
            return None
        if not usable:
            return None
        chosen, reason = routing.next_hop(
            policy,
            seat.manifest.seed,
            stage,
            origin,
            seat.view.origins,
            seat.me,
            seat.view.mates,
            seat.view.following,
            [a.peer_id for a in usable],
            seat.rng,
        )
        if reason == "fallback" and not heard.fell_back:
            heard.fell_back = True
            seat.event("reroute", reason="fallback", peer=chosen, message="the named replica cannot be reached")
        return next(a for a in usable if a.peer_id == chosen)

    async def _pause(self, heard: _Attempts) -> None:
        """Let time pass, then everybody may be asked again."""
        await asyncio.sleep(heard.pause_s)
        heard.pause_s = min(2 * heard.pause_s, LONGEST_PAUSE_S)
        if not heard.busy:
            heard.failed.clear()
        heard.busy.clear()

    def _activation(self, parcel: Parcel, left_s: float) -> Activation:
        seat = self._seat
        header = Header(seat.run_id, parcel.microbatch, parcel.origin, seat.index + 1, left_s)
        return Activation(header, parcel.hidden, parcel.targets, parcel.mask)

    # --- evaluation -------------------------------------------------------------------------------------------------

    async def evaluate(self, parcel: Parcel, deadline: float) -> LossSum:
        """The loss of a held-out microbatch; replica i of stage 0 goes through replica i mod n (`origin.index` is i).

        Raises Declined when nobody of the next stage could serve it until `deadline`.
        """
        seat = self._seat
        pause_s, failure, skip = FIRST_PAUSE_S, "none is in the membership", 0
        while (left_s := self._share(deadline - seat.now())) >= SHORTEST_CALL_S:
            replicas: Sequence[Advert] = seat.members.of_stage(seat.index + 1, membership.HOLDING)
            if replicas:
                peer = replicas[(parcel.origin.index + skip) % len(replicas)]
                try:
                    return await seat.world.transport.evaluate(peer, self._activation(parcel, left_s))
                except Busy:
                    failure = "busy"
                except Violation as error:
                    raise Declined(str(error)) from error
                except (Unreachable, Declined) as error:
                    failure, skip = str(error), skip + 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise Declined(f"no replica of stage {seat.index + 1} evaluated a microbatch in time: {failure}")
