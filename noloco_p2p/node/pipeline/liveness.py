"""Checks that the peers that serve this node's calls are alive and make progress (ARCHITECTURE.md, "Failure and
timeouts").

A call may take as long as the queues in its path, so its duration proves nothing. While calls are open, their peer is
asked about once a second how far it is with them. Silence, or a stuck device, ends the calls; a long queue does not.
The peer that serves a call asks the next peer in the same way, so only the caller next to a failure detects it, and
only the failed peer is blamed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from noloco_p2p.core.messages import Advert, MicrobatchId, PeerId, Progress
from noloco_p2p.core.timeouts import AdaptiveTimeout
from noloco_p2p.errors import Busy, PeerError, Stalled, Unreachable
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Transport

ASKED_PER_SILENCE = 2
"""Requests for progress within `limits.patience_floor_s`, the shortest silence after which a peer counts as gone."""
STUCK_SILENCES = 5.0
STUCK_OPERATIONS = 20.0
"""A device is stuck if it has completed nothing for STUCK_SILENCES × `limits.patience_floor_s`, and for as long as
STUCK_OPERATIONS microbatches take."""

LOST_SILENCES = 15.0
"""How long a header or a reply may be in transit without a sign, in units of `limits.patience_floor_s`: below the
transport it shares one queue with bodies, and nothing is known about that queue."""

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class _WatchedCall:
    """A call in flight, as its caller sees it. Times are on the loop's clock."""

    peer: Advert
    microbatch: MicrobatchId
    longest_s: float
    progressed: Callable[[], None]
    began: float
    bound: asyncio.Timeout
    """Expires `longest_s` after the call began, or after its last progress."""
    unknown_since: float | None = None
    """Since when the peer has reported that it does not know the call, and has made no progress with our others."""
    events: int | None = None
    """The peer's last progress count. That it knows of the call is not progress yet: otherwise a peer could fail all
    calls and still seem to get on."""
    failure: PeerError | None = None

    def fail(self, failure: PeerError, now: float) -> None:
        """End the call with this error, unless it is already ending."""
        if self.failure is None and not self.bound.expired():
            self.failure = failure
            self.bound.reschedule(now)


class Liveness:
    """Watches the calls that one node has in flight."""

    def __init__(self, node: NodeState, transport: Transport) -> None:
        self._node = node
        self._transport = transport
        self._calls: dict[_WatchedCall, None] = {}
        self._answers = AdaptiveTimeout()
        """Learns how long answers about progress take."""
        self._tick: asyncio.TimerHandle
        """Runs while there are calls."""
        self._asking: dict[PeerId, asyncio.Task[None]] = {}

    async def watched(
        self,
        peer: Advert,
        microbatch: MicrobatchId,
        longest_s: float,
        reply: Awaitable[R],
        progressed: Callable[[], None],
        limit_s: float | None = None,
    ) -> R:
        """Await a reply for at most `limit_s`, while the peer makes progress with it, or for `longest_s` without any.

        `progressed` is called when the peer reports progress.

        Raises what the call raises, Unreachable if the peer is silent, is stuck or has lost the call, and Stalled if
        the time runs out.
        """
        bound = asyncio.timeout(longest_s)
        call = _WatchedCall(peer, microbatch, longest_s, progressed, self._node.now(), bound)
        self._calls[call] = None
        if len(self._calls) == 1:
            self._tick = asyncio.get_running_loop().call_later(self._pause_s, self._ask)
        try:
            async with bound, asyncio.timeout(limit_s):
                return await reply
        except TimeoutError:
            why = f"made no progress for {longest_s:.3g} s" if bound.expired() else f"took more than {limit_s:.3g} s"
            raise call.failure or Stalled(f"{peer.peer_id} {why}") from None
        finally:
            del self._calls[call]
            if not self._calls:
                for task in self._asking.values():
                    task.cancel()
                self._tick.cancel()

    def events(self, microbatch: MicrobatchId) -> int:
        """The progress with a microbatch that the next stage has reported."""
        return sum(call.events or 0 for call in self._calls if call.microbatch == microbatch)

    @property
    def _pause_s(self) -> float:
        return self._node.config.limits.patience_floor_s / ASKED_PER_SILENCE

    def _ask(self) -> None:
        """Ask every peer that has been serving a call of ours for a while."""
        before = self._node.now() - self._pause_s / 2
        peers = {call.peer.peer_id: call.peer for call in self._calls if call.began < before}
        for id, peer in peers.items():
            if id not in self._asking:
                self._asking[id] = task = asyncio.create_task(self._ask_peer(peer))
                task.add_done_callback(partial(self._asking.pop, id))
        self._tick = asyncio.get_running_loop().call_later(self._pause_s, self._ask)

    async def _ask_peer(self, peer: Advert) -> None:
        asked = [call for call in self._calls if call.peer.peer_id == peer.peer_id]
        began, floor_s = self._node.now(), self._node.config.limits.patience_floor_s
        silence_s = self._answers.deadline_s(floor_s) or floor_s
        try:
            with self._node.waits.waiting("progress", peer.peer_id, silence_s):
                reports = await self._transport.progress(peer, [call.microbatch for call in asked], silence_s)
        except Busy:
            return
        except PeerError as error:
            for call in asked:
                if call in self._calls:
                    call.fail(Unreachable(f"{peer.peer_id} does not report progress: {error}"), self._node.now())
            return
        self._answers.observe(self._node.now() - began)
        answered = [(call, report) for call, report in zip(asked, reports, strict=True) if call in self._calls]
        gets_on = any(report is not None and report.events != call.events for call, report in answered)
        for call, report in answered:
            if report is None and gets_on:
                # Its header waits behind the calls that make progress.
                call.unknown_since = None
                self._progressed(call)
            else:
                self._take(call, report)

    def _take(self, call: _WatchedCall, report: Progress | None) -> None:
        """Act on a peer's report about a call; None: the peer does not know the call."""
        now, id, floor_s = self._node.now(), call.peer.peer_id, self._node.config.limits.patience_floor_s
        if report is None:
            # The header may still be queued behind the bodies of other calls, or the reply be on its way. After a
            # while the call counts as lost.
            call.unknown_since = now if call.unknown_since is None else call.unknown_since
            if now - call.unknown_since > LOST_SILENCES * floor_s:
                call.fail(Unreachable(f"{id} does not have microbatch {call.microbatch.counter}"), now)
            return
        call.unknown_since = None
        rate = call.peer.microbatches_per_s
        stuck_s = max(STUCK_SILENCES * floor_s, STUCK_OPERATIONS / rate) if rate else None
        if stuck_s is not None and report.stuck_s > stuck_s:
            call.fail(Unreachable(f"the device of {id} has completed nothing for {report.stuck_s:.3g} s"), now)
        else:
            known, call.events = call.events, report.events
            if known not in (None, report.events):
                self._progressed(call)

    def _progressed(self, call: _WatchedCall) -> None:
        if call.failure is None and not call.bound.expired():
            call.bound.reschedule(self._node.now() + call.longest_s)
            call.progressed()
