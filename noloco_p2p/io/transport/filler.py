"""Sends filler to make idle connections fast again before a body or its reply needs them (ARCHITECTURE.md, "The wire").

TCP forgets the speed of a connection that has rested, and finds it again within a few round trips of sending.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

from noloco_p2p.core.line_rate import PART_BYTES
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.errors import PeerError
from noloco_p2p.io.dht.streams import cancelled
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import OwnersLine
from noloco_p2p.io.transport.channels import PeerChannel, Turns

WARM_S = 5.0
"""Longest wait for a connection to accept its filler, seconds. Later it would be of no use."""
Calling = Callable[..., AbstractAsyncContextManager[tuple[PeerChannel, float]]]
"""Yields a connection to a peer, and the seconds left once it is open (`GrpcTransport`)."""


class Warming:
    """Sends filler to peers that will soon be sent a body."""

    def __init__(self, line: OwnersLine, calling: Calling, describe: Callable[[Advert], Awaitable[object]]) -> None:
        """`describe` sends a peer a short request, which measures the round trip to it."""
        self._charge, self._line = line.charge, line.measured
        self._turns = Turns(line.measured)
        self._calling = calling
        self._describe = describe
        self._under_way: dict[PeerId, asyncio.Task[None]] = {}

    def warm(self, peers: Sequence[Advert], nbytes: int) -> None:
        """See `ports.Transport`."""
        line = self._line
        for peer in peers:
            id, filler = peer.peer_id, partial(line.filler_bytes, peer.peer_id, nbytes, peers=len(peers))
            far = nbytes >= PART_BYTES if line.round_trip_s(id) is None else filler()
            if far and id not in self._under_way and line.rested(id, asyncio.get_running_loop().time()):
                self._under_way[id] = task = asyncio.create_task(self._warm(peer, nbytes, filler))
                task.add_done_callback(lambda _, id=id: self._under_way.pop(id))  # type: ignore[misc]

    async def close(self) -> None:
        """Stop sending filler at once."""
        await cancelled(self._under_way.values())

    async def _warm(self, peer: Advert, nbytes: int, filler: Callable[[], int]) -> None:
        id, line = peer.peer_id, self._line
        with suppress(PeerError):
            if line.round_trip_s(id) is None:
                await self._describe(peer)
            async with self._calling(peer, "connection", WARM_S, control=True) as (channel, _):
                connections = channel.at_most(line.connections(id, nbytes))
            if each := filler():
                async with self._turns.at_once(id):
                    await asyncio.gather(*(self._fill(peer, part, each) for part in range(1, connections + 1)))

    async def _fill(self, peer: Advert, part: int, nbytes: int) -> None:
        with suppress(PeerError):
            async with self._calling(peer, "answer to filler", WARM_S, part=part) as (channel, left_s):
                self._charge(sent=nbytes, received=0)
                await channel.send_whole("Warm", pb.Filler(data=bytes(nbytes)).SerializeToString(), timeout=left_s)
