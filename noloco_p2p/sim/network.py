"""The network between the nodes of one process: its links, the serving nodes, and its faults.

If a message is lost, its caller waits until the deadline. A call to a node that does not serve is refused after one
round trip; a node that crashes breaks its connections at once. Tensors flow at the available bandwidth and stall while
nothing gets through. A packet lost on a link is retransmitted (see `links`).
"""

import asyncio
import math
import random
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from noloco_p2p.core.messages import HostTensor, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import LocalError
from noloco_p2p.ports import Handler
from noloco_p2p.sim.links import ControlSizes, Geography, Link, MessageSizes, resend_s
from noloco_p2p.sim.traffic import Traffic

Barrier = Callable[[PeerId, PeerId], bool]
"""Whether nothing gets through from the first node to the second while it stands."""


@dataclass(slots=True)
class Endpoint:
    """A serving node and the running tasks of its handlers."""

    handler: Handler
    context: Context = field(default_factory=copy_context)
    """The context of the node's process."""
    work: dict[asyncio.Task[Any], None] = field(default_factory=dict)


class Network:
    """The links, the nodes that serve on them, and the faults."""

    def __init__(self, seed: int, geography: Geography, sizes: MessageSizes | None = None) -> None:
        self.sizes = sizes
        """Message sizes to account for; None: the sizes of the actual tensors."""
        self.control = sizes.control if sizes else ControlSizes()
        """Sizes of messages without tensors."""
        self.bugs: list[Exception] = []
        """Exceptions that handlers raised although they must not; empty in a healthy swarm."""
        self.news = asyncio.Event()
        """Set when a handler has raised one, or the swarm has started a node."""
        self.traffic = Traffic(geography, self.cut)
        """The payloads in flight, and the counts of all bytes."""
        self.link: Callable[[PeerId, PeerId], Link] = cache(geography.link)
        """The link between two nodes, in one direction."""
        self._generator: Callable[[PeerId], random.Random] = cache(partial(generator, seed, "link"))
        """The random generator of a sender."""
        self.endpoints: dict[PeerId, Endpoint] = {}
        """The nodes that serve."""
        self._barriers: list[Barrier] = []

    # --- faults ---------------------------------------------------------------------------------------------------

    def block(self, barrier: Barrier) -> None:
        """Let nothing through where a barrier stands, until `unblock`.

        Messages that would arrive meanwhile are retransmitted (see `calls`), and callers wait until their deadlines;
        tensors in flight continue when nothing holds them up any more.
        """
        self._barriers.append(barrier)
        self.traffic.review()

    def unblock(self, barrier: Barrier) -> None:
        """Remove a barrier."""
        self._barriers.remove(barrier)
        self.traffic.review()

    def cut(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether nothing gets through from one node to the other."""
        return any(barrier(sender, receiver) for barrier in self._barriers)

    def crash(self, peer: PeerId) -> None:
        """Take a node down at once: its handlers are cancelled, and calls that wait for them fail."""
        endpoint = self.endpoints.pop(peer, None)
        for task in endpoint.work if endpoint else ():
            task.cancel()
        self.traffic.crash(peer)

    # --- for transports and calls ---------------------------------------------------------------------------------

    def serve(self, peer: PeerId, handler: Handler) -> None:
        """Answer calls to `peer` with `handler`. Raises LocalError if it already has one."""
        if peer in self.endpoints:
            raise LocalError(f"{peer} already has a handler")
        self.endpoints[peer] = Endpoint(handler)

    async def stop(self, peer: PeerId) -> None:
        """Stop answering calls. Running handlers are cancelled and awaited."""
        endpoint = self.endpoints.get(peer)
        self.crash(peer)
        if endpoint:
            await asyncio.gather(*endpoint.work, return_exceptions=True)

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float:
        """Latency of one message; draws from the sender's own generator."""
        link = self.link(sender, receiver)
        latency_s = link.latency_s
        if link.spread:
            latency_s *= math.exp(self._generator(sender).gauss(0.0, link.spread))
        if link.loss:
            round_trip_s = link.latency_s + self.link(receiver, sender).latency_s
            latency_s += resend_s(link.loss, round_trip_s, self._generator(sender))
        return latency_s

    def request_lost(self, caller: PeerId, callee: PeerId) -> bool:
        """Whether a call that arrives now is lost."""
        return self._swallowed(caller, callee, self.link(caller, callee).request_loss)

    def reply_lost(self, caller: PeerId, callee: PeerId) -> bool:
        """Whether an answer sent now is lost."""
        return self._swallowed(callee, caller, self.link(callee, caller).reply_loss)

    def payload_bytes(self, kind: str, tensors: Iterable[HostTensor], stage: int = 0) -> int:
        """Bytes of the tensors of a message. `stage` is the stage of a snapshot, weights or a state."""
        return self.sizes.of(kind, stage) if self.sizes else sum(tensor.data.nbytes for tensor in tensors)

    async def exchange(self, peer: PeerId, adverts: int) -> None:
        """Wait as long as this many adverts take over a node's own line, up and down."""
        await self.traffic.deliver(peer, peer, adverts * self.control.advert)

    def _swallowed(self, sender: PeerId, receiver: PeerId, chance: float) -> bool:
        return self.cut(sender, receiver) or (chance > 0 and self._generator(sender).random() < chance)
