"""The links between the nodes of one process, the calls that travel on them, and the faults.

A message that is lost or swallowed leaves its caller waiting until the deadline; a node that is not there refuses
after one round trip; one that crashes breaks its connections at once. Tensors flow through the bandwidth that there is,
and stall while nothing gets through. A packet that a link loses is sent again (`tcp`).
"""

import asyncio
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from noloco_p2p.core.messages import Gradient, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import LocalError
from noloco_p2p.ports import Handler
from noloco_p2p.sim.calls import Call, Endpoint, Flow, Request
from noloco_p2p.sim.cuts import Cuts
from noloco_p2p.sim.links import Geography, Link, Sizes, Uniform
from noloco_p2p.sim.tcp import resend_s
from noloco_p2p.sim.traffic import Account, Traffic

T = TypeVar("T")


class Network:
    """The links, the nodes that serve on them, and the faults."""

    def __init__(self, seed: int, geography: Geography | None = None, sizes: Sizes | None = None) -> None:
        self.sizes = sizes
        """What travels, where it is not what the tensors have."""
        self.bugs: list[Exception] = []
        """What handlers raised that is no PeerError a handler may raise; empty in a healthy swarm."""
        self._seed = seed
        self._geography = geography or Uniform()
        self._cuts = Cuts()
        self.traffic = Traffic(self._geography, self.link, self._cuts)
        """The tensors under way."""
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self._chance: dict[PeerId, random.Random] = {}
        self._endpoints: dict[PeerId, Endpoint] = {}
        self._lose_next: list[tuple[PeerId | None, PeerId | None]] = []

    @property
    def ledger(self) -> Mapping[PeerId, Mapping[str, Account]]:
        """What became of the bytes of every node that had any, by kind (activation, gradient, snapshot, state)."""
        return self.traffic.ledger()

    # --- the fault vocabulary -------------------------------------------------------------------------------------

    def set_link(self, sender: PeerId, receiver: PeerId, link: Link) -> None:
        """Replace the link of one direction."""
        self._links[sender, receiver] = link
        self.traffic.relink(sender, receiver)

    def slow_link(self, sender: PeerId, receiver: PeerId, slowness: float) -> None:
        """One direction has so many times its latency, and its bandwidth divided by as much; 1.0: as it was made."""
        link = self._geography.link(sender, receiver)
        speed = link.bytes_per_s / slowness if link.bytes_per_s else None
        self.set_link(sender, receiver, replace(link, latency_s=link.latency_s * slowness, bytes_per_s=speed))

    def hold(self, peer: PeerId) -> None:
        """Swallow all messages from and to a node until `release`; its callers wait until their deadlines.

        Tensors that are on their way stall, and go on when the hold ends.
        """
        self._cuts.hold(peer)
        self.traffic.review()

    def release(self, peer: PeerId) -> None:
        """End a hold. What was swallowed stays lost."""
        self._cuts.release(peer)
        self.traffic.review()

    def partition(self, one: PeerId, other: PeerId) -> None:
        """Swallow all messages between two nodes until `repair`."""
        self._cuts.cut(one, other)
        self._cuts.cut(other, one)
        self.traffic.review()

    def partition_one_way(self, sender: PeerId, receiver: PeerId) -> None:
        """Swallow the messages from one node to another, not those back, until `repair`."""
        self._cuts.cut(sender, receiver)
        self.traffic.review()

    def repair(self, one: PeerId, other: PeerId) -> None:
        """End a partition, of both ways or of one."""
        self._cuts.repair(one, other)
        self._cuts.repair(other, one)
        self.traffic.review()

    def split(self, groups: Sequence[Collection[PeerId]]) -> None:
        """Swallow all messages between nodes of different groups until `heal`; who is in none is reached by all."""
        self._cuts.split(groups)
        self.traffic.review()

    def heal(self) -> None:
        """End a split."""
        self._cuts.heal()
        self.traffic.review()

    def lose_next_reply(self, caller: PeerId | None = None, callee: PeerId | None = None) -> None:
        """The next answer to `caller` from `callee` (None: anybody) is lost after the work is done."""
        self._lose_next.append((caller, callee))

    def crash(self, peer: PeerId) -> None:
        """A node is gone at once: its handlers are cancelled, and the calls that wait for them fail."""
        endpoint = self._endpoints.pop(peer, None)
        for task in endpoint.work if endpoint else ():
            task.cancel()
        self.traffic.crash(peer)

    # --- for the transports ---------------------------------------------------------------------------------------

    def serve(self, peer: PeerId, handler: Handler) -> None:
        """Answer calls to `peer` with `handler`. Raises LocalError when somebody does already."""
        if peer in self._endpoints:
            raise LocalError(f"{peer} is served already")
        self._endpoints[peer] = Endpoint(handler)

    async def stop(self, peer: PeerId) -> None:
        """Answer no more calls; the handlers at work are cancelled and waited for."""
        endpoint = self._endpoints.get(peer)
        self.crash(peer)
        if endpoint:
            await asyncio.gather(*endpoint.work, return_exceptions=True)

    async def call(self, request: Request[T]) -> T:
        """One call and its answer. Raises Unreachable after its deadline, at once when the callee crashes.

        With a `flow`, also when its stream is silent for too long.
        """
        call = Call(self, request)
        try:
            return await call.answer
        finally:
            call.end()
            del call  # An error in its answer holds this frame.

    async def stream(self, sender: PeerId, receiver: PeerId, kind: str, nbytes: int, flow: Flow) -> None:
        """Takes the time of `nbytes` of tensors, at their sender, which is the callee of the call that has the flow."""
        flow.letter = letter = self.traffic.depart(sender, receiver, kind, nbytes)
        if flow.listen is not None:
            flow.listen()
        try:
            await self.traffic.whole(letter)
        except asyncio.CancelledError:
            self.traffic.drop(letter)
            raise

    # --- for the calls --------------------------------------------------------------------------------------------

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """What lies between two nodes, in one direction."""
        way = (sender, receiver)
        link = self._links.get(way)
        if link is None:
            link = self._links[way] = self._geography.link(sender, receiver)
        return link

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float:
        """Time on the way for one message; draws from the sender's own generator."""
        link = self.link(sender, receiver)
        latency_s = link.latency_s
        if link.spread:
            latency_s *= math.exp(self._rng(sender).gauss(0.0, link.spread))
        if link.loss:
            round_trip_s = link.latency_s + self.link(receiver, sender).latency_s
            latency_s += resend_s(link.loss, round_trip_s, self._rng(sender))
        return latency_s

    def endpoint(self, peer: PeerId) -> Endpoint | None:
        """Who serves there; None: nobody."""
        return self._endpoints.get(peer)

    def cut(self, sender: PeerId, receiver: PeerId) -> bool:
        """Nothing gets through from the one to the other."""
        return self._cuts.between(sender, receiver)

    def request_lost(self, caller: PeerId, callee: PeerId) -> bool:
        """A call that arrives now is swallowed."""
        return self._swallowed(caller, callee, self.link(caller, callee).request_loss)

    def reply_lost(self, caller: PeerId, callee: PeerId) -> bool:
        """An answer that sets out now is swallowed."""
        for wanted in self._lose_next:
            if wanted[0] in (None, caller) and wanted[1] in (None, callee):
                self._lose_next.remove(wanted)
                return True
        return self._swallowed(callee, caller, self.link(callee, caller).reply_loss)

    def reply_bytes(self, reply: object) -> int:
        """Bytes of the tensors in an answer that is no stream."""
        if not isinstance(reply, Gradient):
            return 0
        return self.sizes.gradient_bytes if self.sizes else reply.grad.data.nbytes

    # --- inside ---------------------------------------------------------------------------------------------------

    def _swallowed(self, sender: PeerId, receiver: PeerId, chance: float) -> bool:
        if self._cuts.between(sender, receiver):
            return True
        return chance > 0 and self._rng(sender).random() < chance

    def _rng(self, sender: PeerId) -> random.Random:
        if sender not in self._chance:
            self._chance[sender] = generator(self._seed, "link", sender)
        return self._chance[sender]
