"""The links between the nodes of one process, the calls that travel on them, and the faults.

A message that is lost or swallowed leaves its caller waiting until the deadline; a node that is not there refuses
after one round trip; one that crashes breaks its connections at once.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from noloco_p2p.core.messages import Gradient, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import Busy, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.ports import Handler
from noloco_p2p.sim.links import Geography, Link, Sizes, Uniform

STREAM_PART_S = 1.0
"""A long transfer is in flight for so long at once: how often it meets the faults of its link."""

T = TypeVar("T")


@dataclass(slots=True)
class _Endpoint:
    handler: Handler
    work: dict[asyncio.Task[Any], None] = field(default_factory=dict)


@dataclass(slots=True)
class Flow:
    """What the caller of a transfer has heard of it, and how long it waits for more."""

    patience_s: float
    """Longest silence before the transfer begins, seconds."""
    silence_s: float
    """Longest silence in it."""
    heard_at: float = 0.0


class Network:
    """The links, the nodes that serve on them, and the faults."""

    def __init__(self, seed: int, geography: Geography | None = None, sizes: Sizes | None = None) -> None:
        self.sizes = sizes
        """What travels, where it is not what the tensors have."""
        self.bugs: list[Exception] = []
        """What handlers raised that is no PeerError a handler may raise; empty in a healthy swarm."""
        self._seed = seed
        self._geography = geography or Uniform()
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self._chance: dict[tuple[PeerId, PeerId], random.Random] = {}
        self._endpoints: dict[PeerId, _Endpoint] = {}
        self._held: dict[PeerId, None] = {}
        self._cut: dict[tuple[PeerId, PeerId], None] = {}
        self._group: dict[PeerId, int] = {}
        self._lose_next: list[tuple[PeerId | None, PeerId | None]] = []
        self._couriers: dict[asyncio.Task[None], None] = {}

    # --- the fault vocabulary -------------------------------------------------------------------------------------

    def set_link(self, sender: PeerId, receiver: PeerId, link: Link) -> None:
        """Replace the link of one direction."""
        self._links[sender, receiver] = link

    def hold(self, peer: PeerId) -> None:
        """Swallow all messages from and to a node until `release`; its callers wait until their deadlines."""
        self._held[peer] = None

    def release(self, peer: PeerId) -> None:
        """End a hold. What was swallowed stays lost."""
        self._held.pop(peer, None)

    def partition(self, one: PeerId, other: PeerId) -> None:
        """Swallow all messages between two nodes until `repair`."""
        self._cut[one, other] = self._cut[other, one] = None

    def partition_one_way(self, sender: PeerId, receiver: PeerId) -> None:
        """Swallow the messages from one node to another, not those back, until `repair`."""
        self._cut[sender, receiver] = None

    def repair(self, one: PeerId, other: PeerId) -> None:
        """End a partition, of both ways or of one."""
        self._cut.pop((one, other), None)
        self._cut.pop((other, one), None)

    def split(self, groups: Sequence[Collection[PeerId]]) -> None:
        """Swallow all messages between nodes of different groups until `heal`; who is in none is reached by all."""
        self._group = {peer: number for number, group in enumerate(groups) for peer in group}

    def heal(self) -> None:
        """End a split."""
        self._group = {}

    def lose_next_reply(self, caller: PeerId | None = None, callee: PeerId | None = None) -> None:
        """The next answer to `caller` from `callee` (None: anybody) is lost after the work is done."""
        self._lose_next.append((caller, callee))

    def crash(self, peer: PeerId) -> None:
        """A node is gone at once: its handlers are cancelled, and the calls that wait for them fail."""
        endpoint = self._endpoints.pop(peer, None)
        for task in endpoint.work if endpoint else ():
            task.cancel()

    # --- for the transports ---------------------------------------------------------------------------------------

    def serve(self, peer: PeerId, handler: Handler) -> None:
        """Answer calls to `peer` with `handler`. Raises LocalError when somebody does already."""
        if peer in self._endpoints:
            raise LocalError(f"{peer} is served already")
        self._endpoints[peer] = _Endpoint(handler)

    async def stop(self, peer: PeerId) -> None:
        """Answer no more calls; the handlers at work are cancelled and waited for."""
        endpoint = self._endpoints.get(peer)
        self.crash(peer)
        if endpoint:
            await asyncio.gather(*endpoint.work, return_exceptions=True)

    async def call(
        self,
        caller: PeerId,
        callee: PeerId,
        invoke: Callable[[Handler], Awaitable[T]],
        deadline_s: float,
        what: str,
        flow: Flow | None = None,
    ) -> T:
        """One call and its answer. Raises Unreachable after `deadline_s`, at once when the callee crashes.

        With a `flow`, which the callee's part of the call hands to `stream`, also when that is silent for too long.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        courier = loop.create_task(self._carry(caller, callee, invoke, deadline_s, answer))
        self._couriers[courier] = None
        courier.add_done_callback(lambda done: self._couriers.pop(done, None))
        try:
            async with asyncio.timeout(deadline_s):
                return await (answer if flow is None else _unless_silent(answer, flow, callee, what))
        except TimeoutError:
            raise Unreachable(f"{callee} gave no answer to {what} within {deadline_s:.3g} s") from None
        finally:
            # Nobody waits for it any more: what still comes is not an error that nobody looked at.
            answer.cancel()
            if not courier.done():
                loop.call_later(self.latency_s(caller, callee), self._hang_up, caller, callee, courier)

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float:
        """Time on the way for one message; draws from the link's own generator."""
        link = self._link_of(sender, receiver)
        return link.latency_s * (math.exp(self._rng(sender, receiver).gauss(0.0, link.spread)) if link.spread else 1.0)

    def transfer_s(self, sender: PeerId, receiver: PeerId, nbytes: int) -> float:
        """Time that `nbytes` of tensors take beyond the latency."""
        speed = self._link_of(sender, receiver).bytes_per_s
        return nbytes / speed if speed else 0.0

    async def stream(self, sender: PeerId, receiver: PeerId, nbytes: int, flow: Flow) -> None:
        """Takes the time of `nbytes` of tensors, at their sender. What is swallowed is sent again, as TCP does."""
        loop = asyncio.get_running_loop()
        left_s = self.transfer_s(sender, receiver, nbytes)
        flow.patience_s, flow.heard_at = flow.silence_s, loop.time()
        while left_s > 0:
            part_s = min(STREAM_PART_S, left_s)
            await asyncio.sleep(part_s)
            if not self._swallowed(sender, receiver, 0.0):
                flow.heard_at = loop.time()
                left_s -= part_s

    # --- inside ---------------------------------------------------------------------------------------------------

    def _link_of(self, sender: PeerId, receiver: PeerId) -> Link:
        if (sender, receiver) not in self._links:
            self._links[sender, receiver] = self._geography.link(sender, receiver)
        return self._links[sender, receiver]

    def _rng(self, sender: PeerId, receiver: PeerId) -> random.Random:
        way = (sender, receiver)
        if way not in self._chance:
            self._chance[way] = generator(self._seed, "link", sender, receiver)
        return self._chance[way]

    def _swallowed(self, sender: PeerId, receiver: PeerId, chance: float) -> bool:
        if sender in self._held or receiver in self._held or (sender, receiver) in self._cut:
            return True
        if sender in self._group and receiver in self._group and self._group[sender] != self._group[receiver]:
            return True
        return chance > 0 and self._rng(sender, receiver).random() < chance

    def _reply_lost(self, caller: PeerId, callee: PeerId) -> bool:
        for wanted in self._lose_next:
            if wanted[0] in (None, caller) and wanted[1] in (None, callee):
                self._lose_next.remove(wanted)
                return True
        return self._swallowed(callee, caller, self._link_of(callee, caller).reply_loss)

    def _hang_up(self, caller: PeerId, callee: PeerId, courier: asyncio.Task[None]) -> None:
        """The callee learns that its caller is gone, unless nothing gets through: then its deadline ends the work."""
        if not self._swallowed(caller, callee, 0.0):
            courier.cancel()

    async def _carry(
        self,
        caller: PeerId,
        callee: PeerId,
        invoke: Callable[[Handler], Awaitable[T]],
        deadline_s: float,
        answer: asyncio.Future[T],
    ) -> None:
        """One call's way there, its work, and the answer's way back. Cancelled when the caller is known to be gone."""
        await asyncio.sleep(self.latency_s(caller, callee))
        if self._swallowed(caller, callee, self._link_of(caller, callee).request_loss):
            return
        endpoint = self._endpoints.get(callee)
        if endpoint is None:
            await asyncio.sleep(self.latency_s(callee, caller))
            _settle(answer, Unreachable(f"{callee} refused the connection"))
            return
        outcome = await self._work(endpoint, callee, invoke, deadline_s)
        if outcome is None:
            _settle(answer, Unreachable(f"{callee} broke the connection"))
            return
        if self._reply_lost(caller, callee):
            return
        way_s = self.latency_s(callee, caller) + self.transfer_s(callee, caller, _reply_bytes(outcome))
        await asyncio.sleep(way_s)
        _settle(answer, outcome)

    async def _work(
        self, endpoint: _Endpoint, callee: PeerId, invoke: Callable[[Handler], Awaitable[T]], deadline_s: float
    ) -> T | PeerError | None:
        """What the handler gave within the deadline; None when it was cancelled."""
        task = asyncio.ensure_future(invoke(endpoint.handler))
        endpoint.work[task] = None
        task.add_done_callback(lambda done: endpoint.work.pop(done, None))
        try:
            await asyncio.wait([task], timeout=deadline_s)
        finally:
            task.cancel()
        if not task.done() or task.cancelled():
            return None
        error = task.exception()
        match error:
            case None:
                return task.result()
            case Violation():
                return Violation(str(error), ours=True)
            case Busy() | Declined():
                return type(error)(str(error))
            case Exception():
                self.bugs.append(error)
                return Declined(f"{callee} failed: {type(error).__name__}: {error}")
        raise error


def _settle(answer: "asyncio.Future[T]", outcome: "T | PeerError") -> None:
    if answer.done():
        return
    if isinstance(outcome, PeerError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


async def _unless_silent(answer: "asyncio.Future[T]", flow: Flow, callee: PeerId, what: str) -> T:
    """The answer. Raises Unreachable when nothing has come of it for as long as the flow allows."""
    loop = asyncio.get_running_loop()
    flow.heard_at = loop.time()
    while not answer.done():
        left_s = flow.heard_at + flow.patience_s - loop.time()
        if left_s <= 0:
            raise Unreachable(f"nothing more of {what} came from {callee} for {flow.patience_s:g} s")
        await asyncio.wait([answer], timeout=left_s)
    return answer.result()


def _reply_bytes(reply: object) -> int:
    return reply.grad.data.nbytes if isinstance(reply, Gradient) else 0
