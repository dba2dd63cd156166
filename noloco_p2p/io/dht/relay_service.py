"""Makes a public node a relay for peers behind NAT: it splices the streams of two peers that have a reservation with
it.

It sees only ciphertext, because the peers speak TLS with each other.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from weakref import WeakSet, WeakValueDictionary

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Declined, LocalError, PeerError
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.dht.libp2p import Libp2pDaemon, Stream
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.dht.streams import RELAY_STREAMS, RELAYED_STREAMS, RESERVE_CALL, hear, say, splice

RESERVED_S = 15.0
"""Lifetime of a reservation that is not renewed, seconds."""
MAX_RESERVED = 256
CIRCUITS, CIRCUITS_OF_PEER, CIRCUITS_OF_PAIR = 512, 64, 8
"""Most circuits (pairs of spliced streams) at a time: in all, per peer, and from one peer to another, which takes up to
four, and as many again while connections are replaced."""
BURST_S = 0.25
"""How much of the relayed share may be sent in one burst, in seconds of its rate."""


class MemberRelay:
    """The reservations and circuits of one relay. Belongs to one event loop."""

    def __init__(
        self, libp2p: Libp2pDaemon, run_id: str, members: MemberRecords | None, bytes_per_s: Callable[[], float]
    ) -> None:
        """`members`: if given, only members may reserve; `bytes_per_s` returns the rate of all circuits together."""
        self._libp2p, self._run_id, self._members, self._bytes_per_s = libp2p, run_id, members, bytes_per_s
        self._until: dict[PeerId, float] = {}
        """When each reservation ends, on the loop's clock."""
        self._circuits: Counter[tuple[PeerId, ...]] = Counter()
        """How many each peer has, and each caller with each target."""
        self._carrying = WeakSet[asyncio.Task[None]]()
        if members is not None:
            members.revoked.listen(self._cut)
        self._turn, self._free_at = asyncio.Lock(), 0.0
        self._turns: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()
        """By caller: of all its circuits, one at a time waits for `_turn`."""

    async def serve(self) -> None:
        """Accept reservations and splice streams from now on. To be called once per daemon."""
        await self._libp2p.serve(RESERVE_CALL, self._reserve)
        await self._libp2p.serve_streams(RELAY_STREAMS, self._relay)

    async def _reserve(self, caller: PeerId, request: bytes) -> bytes:
        run_id, _, certificate = request[:8192].decode("ascii", errors="replace").partition("\n")
        now = asyncio.get_running_loop().time()
        if run_id != self._run_id:
            raise Declined("this relay belongs to another run")
        if self._members is not None and not self._members.belongs(caller, certificate, dht_time() + RESERVED_S):
            raise Declined("this relay serves only members of its run")
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        self._circuits += Counter()  # drops the entries that are zero
        if caller not in self._until and len(self._until) >= MAX_RESERVED:
            raise Declined("this relay accepts no more reservations")
        self._until[caller] = now + RESERVED_S
        return b""

    async def _relay(self, caller: PeerId, stream: Stream) -> None:
        if (task := asyncio.current_task()) is not None:
            self._carrying.add(task)
        with suppress(PeerError, LocalError), ExitStack() as leaving:
            self._take(leaving, caller)  # if it raises, the stream ends without an answer
            target = await hear(stream)
            try:
                self._take(leaving, target)
                self._take(leaving, caller, target)
                onward = await self._libp2p.open_stream(target, RELAYED_STREAMS)
            except (PeerError, LocalError) as error:
                await say(stream, str(error))
                return
            leaving.callback(onward.writer.close)
            await say(stream, "")
            await splice(stream, onward, partial(self.pace, caller))

    def _take(self, leaving: ExitStack, *peers: PeerId) -> None:
        """Count a circuit of a peer, or from one to another, until the stack ends. Raises Declined beyond a limit."""
        most = CIRCUITS_OF_PEER if len(peers) == 1 else CIRCUITS_OF_PAIR
        if self._until.get(peers[-1], 0.0) < asyncio.get_running_loop().time():
            raise Declined(f"{peers[-1]} has no reservation")
        if self._circuits[peers] >= most or self._circuits.total() >= 3 * CIRCUITS:
            raise Declined(f"{peers[-1]} may have no more circuits")
        self._circuits[peers] += 1
        leaving.callback(self._circuits.subtract, [peers])

    def _cut(self) -> None:
        """End all reservations and circuits after a revocation; peers that still belong to the run reserve again."""
        self._until.clear()
        for task in self._carrying:
            task.cancel()

    async def pace(self, caller: PeerId, nbytes: int) -> None:
        """Wait until `nbytes` more may be sent over a circuit of `caller`. Callers take turns, however many circuits
        each has."""
        async with self._turns.setdefault(caller, asyncio.Lock()), self._turn:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._bytes_per_s()
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)
