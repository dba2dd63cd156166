"""Measures the round trip to a peer and the bandwidth from it, for observers. Nothing received is kept.

The bandwidth is measured on the peer's weights: every caller gets the same bytes, and they cost its device no work.
"""

import asyncio
import statistics
from dataclasses import dataclass

import grpc.aio

from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.transport import callers, message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.channels import ChannelPool
from noloco_p2p.io.transport.frame_codec import unpacked
from noloco_p2p.io.transport.grpc_errors import translated_errors
from noloco_p2p.io.transport.peer_links import Links

ANSWER_S = 3.0
"""Longest wait for a peer's answer, seconds."""


@dataclass(frozen=True, slots=True)
class SnapshotTransfer:
    """The part of a snapshot that was received."""

    bytes: int
    """Without the first message, the head."""
    seconds: float
    """From the first message to the last one received in time."""
    whole: bool
    """False if time ran out."""

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0.0 if nothing followed the head."""
        return self.bytes / max(self.seconds, 1e-6)


class LinkProbe:
    """Measures the links to the peers of one run. Bound to one event loop."""

    def __init__(self, links: Links) -> None:
        self._metadata = callers.metadata()
        self._channels = ChannelPool(links)

    async def close(self) -> None:
        """Close every connection."""
        await self._channels.close()

    async def round_trip_s(self, peer: Advert, calls: int) -> float:
        """Median seconds of `calls` small calls, without connection set-up. Raises as `Transport.describe` does."""
        clock = asyncio.get_running_loop().time
        took: list[float] = []
        for number in range(calls + 1):
            async with self._channels.acquire(peer, ANSWER_S) as channel:
                with translated_errors(peer.peer_id, "description", ANSWER_S, clock() + ANSWER_S):
                    began = clock()
                    await channel.send_whole("Describe", b"", timeout=ANSWER_S, metadata=self._metadata)
            if number:
                took.append(clock() - began)
        return statistics.median(took)

    async def transfer(self, peer: Advert, limit_s: float) -> SnapshotTransfer:
        """Receive the peer's newest weights for at most `limit_s`.

        Raises the error of a refusal, and Unreachable if none of the weights arrive in time.
        """
        clock = asyncio.get_running_loop().time
        request = pb.SnapshotRequest(wait_s=0.0, stage=peer.stage, weights="float32")
        size, began, ended, whole = 0, 0.0, 0.0, False
        async with self._channels.acquire(peer, ANSWER_S) as channel:
            with translated_errors(peer.peer_id, "snapshot", ANSWER_S + limit_s, clock() + ANSWER_S + limit_s):
                call = channel.fetch("FetchSnapshot", request, timeout=ANSWER_S + limit_s, metadata=self._metadata)
                try:
                    async with asyncio.timeout(ANSWER_S):
                        message = await call.read()
                    if message is not grpc.aio.EOF:
                        head, _ = unpacked(message, pb.SnapshotMessage)
                        message_codec.check_served(head)
                    began = ended = clock()
                    async with asyncio.timeout(limit_s):
                        while (message := await call.read()) is not grpc.aio.EOF:
                            size, ended = size + len(message), clock()
                    whole = True
                except TimeoutError:
                    if not size:
                        raise Unreachable(f"{peer.peer_id} did not send any of its weights in time") from None
                finally:
                    call.cancel()
        return SnapshotTransfer(size, ended - began, whole)
