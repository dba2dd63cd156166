"""The Directory port over a hivemind DHT. The DHT node runs in this process's event loop, the libp2p daemon outside.

The directory outlives the daemon, which `keep` restarts if it dies. No microbatch ever waits for the directory.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.errors import LocalError, NolocoError, PeerError, Unreachable
from noloco_p2p.io.dht import adverts, daemon_restarts, dht_node
from noloco_p2p.io.dht.addresses import KnownPeers
from noloco_p2p.io.dht.adverts import AdvertRecord, dht_time, stage_key
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.dht.reach import T, in_turns
from noloco_p2p.io.dht.streams import cancelled, logged

STORE_TIMEOUT_S = READ_TIMEOUT_S = 10.0
BOOTSTRAP_TIMEOUT_S = 5.0
REJOIN_PERIOD_S = 10.0
"""How often known peers without a link are dialled again, and linked peers are made aware of this node, seconds."""
DIALS_PER_REJOIN = 8
ASKED_AT_ONCE = 16
"""How many linked peers are asked for the records they hold at each rejoin, or notified that this node leaves; and as
many of those in the last reading, in case most links are those of strangers."""
SHORTEST_TTL_S = 15.0
"""Lifetime of the record that a node has left, and of a record announced again after it expired during a sleep."""
_MIN_GROWTH_S = 0.001

log = logging.getLogger(__name__)


class HivemindDirectory:
    """`ports.Directory` over the DHT; one per run and process.

    Without a daemon every call raises Unreachable. Identity, address, adverts, known peers and the records that this
    node keeps for others outlive the daemon, so peers need not notice a restart.
    """

    def __init__(
        self, libp2p: Libp2pDaemon, run_id: str, stages: int, known: KnownPeers, members: MemberRecords | None
    ) -> None:
        """See `open`."""
        self._libp2p = libp2p
        self._node: Any = None
        """hivemind's DHTNode on the daemon."""
        self._cut_off = ""
        """Why the directory cannot be used, from a restart until this node has rejoined; otherwise empty."""
        self._run_id = run_id
        self._members = members
        self._keys = {stage_key(run_id, stage): stage for stage in range(stages)}
        self._known = known
        self._expires: dict[int, float] = {}
        """For each stage, the DHT time at which our newest record expires. It may only grow; see `_until`."""
        self._newest: Advert | None = None
        self._seen: frozenset[PeerId] = frozenset()
        """The peers in the last reading."""
        self._findings = dht_node.Findings()
        self._turn = 0
        self._announcing = asyncio.Lock()  # until an advert is stored: an older one stored later would outlive it
        self._rejoining: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, libp2p: Libp2pDaemon, *, run_id: str, stages: int, known_path: Path, members: MemberRecords | None = None
    ) -> "HivemindDirectory":
        """Start a DHT node for the run on the daemon of `libp2p`, and find the others; only `members`, if given.

        Dials the known peers in `known_path` in addition to those that `libp2p` has joined. Raises Unreachable if peers
        were joined and none answers as a DHT node. A node that joins nobody and finds nobody is the first one.
        """
        known = KnownPeers(known_path, libp2p.joined)
        known.remember(libp2p.joined)
        directory = cls(libp2p, run_id, stages, known, members)
        directory._node = await directory._dht_node()
        try:
            await directory._bootstrap()
        except BaseException:
            await directory.close()
            raise
        directory._rejoining = asyncio.create_task(directory._rejoin_forever())
        return directory

    async def announce(self, advert: Advert, ttl_s: float) -> None:
        """See `ports.Directory`."""
        async with self._announcing:
            if self._newest is not None and self._newest.stage != advert.stage:
                await self._withdraw(advert.step)
            await self._store(advert, ttl_s)

    async def announce_again(self) -> None:
        """Announce the newest advert again, with this node's current addresses. Raises as `announce`."""
        async with self._announcing:
            if (newest := self._newest) is not None:
                left_s = min(self._expires[newest.stage] - dht_time(), adverts.LONGEST_TTL_S)
                await self._store(newest, max(left_s, SHORTEST_TTL_S))

    async def withdraw(self, step: float) -> None:
        """See `ports.Directory`. Does nothing if no announcement has begun since the last withdrawal."""
        async with self._announcing:
            await self._withdraw(step)

    async def _withdraw(self, step: float) -> None:
        if self._newest is not None:
            await self._store(replace(self._newest, state="left", step=step), SHORTEST_TTL_S)
            self._newest = None

    async def peers(self) -> list[Advert]:
        """See `ports.Directory`. Only the newest record of a peer counts. Addresses not to be dialled are left out."""
        asked_at = dht_time()
        await self._search(list(self._keys))
        entries = {key: dht_node.records(self._node, self._findings, key) for key in self._keys}
        own, living_at = self._newest, asked_at + dht_node.WAIT_TIMEOUT_S
        if own is not None and not any(entries.values()) and self._until(own.stage) > living_at:
            raise Unreachable("the directory has lost all adverts, including this node's own")
        read = list[AdvertRecord]()
        for key, stage in self._keys.items():
            living = adverts.living_records(entries[key], self._run_id, stage, dht_time(), self._seen)
            read += [record async for record in in_turns(living)]
        records = adverts.newest_of_each(read)
        self._seen = frozenset(record.advert.peer_id for record in records)
        daemons = [adverts.libp2p_address(record) async for record in in_turns(records)]
        met = await self._libp2p.reach.joins(one for one in daemons if one and one.peer_id != self._libp2p.peer_id)
        self._libp2p.met = {address.peer_id: address for address in met}
        if self._members is not None:
            records = self._members.read(records, self._libp2p.met)
        now, unix_s = asyncio.get_running_loop().time(), dht_time()
        return await self._libp2p.reach.within(
            replace(record.advert, announced_at=now - max(0.0, unix_s - record.announced_at)) for record in records
        )

    async def rejoin(self) -> None:
        """Dial some known peers without a link, make this node known to linked ones, and remember those that answer.

        Raises LocalError if there is no daemon, or the file of known peers cannot be written.
        """
        await self._libp2p.dial_all(self._known.unlinked(await self._libp2p.links(), DIALS_PER_REJOIN))
        linked = await self._libp2p.links()
        dht_node.forget_spares(self._node)
        await self._ping(linked)
        await self._ask_directly(sorted(linked))
        met = [address for peer_id, address in sorted(self._libp2p.met.items()) if peer_id in linked]
        await asyncio.to_thread(self._known.remember, met)

    async def keep(self, trouble: Callable[[str | None], None]) -> None:
        """See `daemon_restarts.keep`."""
        await daemon_restarts.keep(self._libp2p, self._restart, trouble)

    async def close(self) -> None:
        """Stop the DHT node and the task that keeps it linked, but not the daemon. Does not withdraw."""
        await cancelled([] if self._rejoining is None else [self._rejoining])
        with contextlib.suppress(NolocoError):
            await self._libp2p.guard(self._node.shutdown(), BOOTSTRAP_TIMEOUT_S, "the libp2p daemon")

    @property
    def _dht(self) -> Any:
        """hivemind's DHTNode. Raises Unreachable while its daemon is being restarted."""
        if self._cut_off:
            raise Unreachable(self._cut_off)
        return self._node

    async def _search(self, keys: Sequence[str]) -> None:
        """Search for the records under keys. Nodes that have not answered in time, maybe on purpose, do not void what
        others have answered. Raises Unreachable if nobody has."""
        before = self._findings.count
        try:
            await self._answer(dht_node.search(self._dht, keys), READ_TIMEOUT_S, "the directory's answer")
        except Unreachable:
            if self._findings.count == before:
                raise

    async def _answer(self, waiting: Awaitable[T], timeout_s: float, what: str) -> T:
        """Like `Libp2pDaemon.guard`, but a dead daemon only makes the directory Unreachable: it will be restarted."""
        try:
            return await self._libp2p.guard(waiting, timeout_s, what)
        except LocalError as error:
            raise Unreachable(f"{error}") from error

    async def _restart(self) -> str:
        """Restart the daemon and continue on it with all records. Returns why it failed, or an empty string."""
        self._cut_off = "the libp2p daemon is being restarted"
        await self.close()
        try:
            await self._libp2p.restart()
            node = await self._dht_node()
        except (LocalError, PeerError) as error:
            self._cut_off = f"the libp2p daemon (p2pd) could not be restarted ({error})"
            return self._cut_off
        node.protocol.storage, self._node = self._node.protocol.storage, node
        # On a full disk they are dialled all the same.
        await logged("rejoining", asyncio.to_thread(self._known.remember, list(self._libp2p.met.values())))
        await logged("rejoining", self.rejoin())
        self._rejoining = asyncio.create_task(self._rejoin_forever())
        self._cut_off = ""
        return ""

    async def _store(self, advert: Advert, ttl_s: float) -> None:
        members = self._members
        of_member = (members.certificate, members.revoked.held.number) if members is not None else ("", 0)
        ways, places = self._libp2p.ways, () if self._libp2p.asks_only else tuple(self._libp2p.join_addresses)
        if ways is not None:
            advert = replace(advert, addresses=ways())
        payload = adverts.encode(AdvertRecord(advert, dht_time(), places, *of_member))
        self._newest = advert  # others may store it even if that fails or is cancelled here
        try:
            await self._store_at_others(advert, payload, ttl_s)
        finally:
            own = stage_key(self._run_id, advert.stage), advert.peer_id, payload, self._expires[advert.stage]
            dht_node.hold(self._node, *own)
        if advert.state == "left":
            await self._give_directly(own)

    async def _store_at_others(self, advert: Advert, payload: bytes, ttl_s: float) -> None:
        for _ in range(2):
            expires = max(dht_time() + ttl_s, self._until(advert.stage) + _MIN_GROWTH_S)
            if await self._put(advert, payload, expires):
                return
            await self._search([stage_key(self._run_id, advert.stage)])  # others may hold one that outlives it
        raise Unreachable("the directory does not accept this node's advert: no peer stored it")

    def _until(self, stage: int) -> float:
        """When the newest record of this node in a stage expires, maybe of an earlier process; 0.0 if there is none, or
        it is from before the clock jumped."""
        known = dht_node.records(self._node, self._findings, stage_key(self._run_id, stage))
        _, held = known.get(self._libp2p.peer_id, (None, 0.0))
        until = max(self._expires.get(stage, 0.0), held)
        return until if until <= dht_time() + adverts.LONGEST_TTL_S else 0.0

    async def _put(self, advert: Advert, payload: bytes, expires: float) -> bool:
        self._expires[advert.stage] = expires
        own = stage_key(self._run_id, advert.stage), advert.peer_id, payload, expires
        others = dht_node.nearest(self._dht, self._findings, own[0])
        storing = dht_node.store(self._dht, self._findings, own, others, dht_node.COPIES)
        stored = await self._answer(storing, STORE_TIMEOUT_S, "the directory's confirmation of the advert")
        return stored or not others

    async def _ask_directly(self, linked: Sequence[PeerId]) -> None:
        """Ask some of the linked peers, different ones each time, for the records that they hold."""
        asking = dht_node.ask(self._node, self._some(linked), list(self._keys))
        with contextlib.suppress(Unreachable):
            await self._libp2p.guard(asking, BOOTSTRAP_TIMEOUT_S, "what linked peers hold")

    async def _give_directly(self, own: tuple[str, PeerId, bytes, float]) -> None:
        """Store this node's last record directly at some linked peers, too: those nearest to its key may soon leave."""
        with contextlib.suppress(LocalError, Unreachable):
            some = self._some(sorted(await self._libp2p.links()))
            giving = dht_node.store(self._node, self._findings, own, some, len(some))
            await self._libp2p.guard(giving, BOOTSTRAP_TIMEOUT_S, "the peers' confirmation")

    def _some(self, linked: Sequence[PeerId]) -> list[PeerId]:
        turn, self._turn = self._turn, self._turn + ASKED_AT_ONCE
        seen = [peer for peer in linked if peer in self._seen]
        return sorted({some[(turn + n) % len(some)] for some in (seen, linked) if some for n in range(ASKED_AT_ONCE)})

    async def _bootstrap(self) -> None:
        """Find the DHT nodes behind the links, and wait a little for a joined peer that is still starting."""
        deadline = asyncio.get_running_loop().time() + BOOTSTRAP_TIMEOUT_S
        await self.rejoin()
        while self._libp2p.joined and not self._node.protocol.routing_table.peer_id_to_uid:
            if asyncio.get_running_loop().time() > deadline:
                raise Unreachable(f"join address {self._libp2p.joined[0]}: the peer there has no directory of this run")
            await asyncio.sleep(0.2)
            await self._ping(await self._libp2p.links())

    async def _ping(self, linked: Iterable[PeerId]) -> None:
        """Make linked peers that are not in the DHT's routing table aware of us, and look for our neighbours."""
        pinging = dht_node.ping_new(self._node, sorted(linked))
        if await self._libp2p.guard(pinging, BOOTSTRAP_TIMEOUT_S, "the peers' answers to a ping"):
            finding = self._node.find_nearest_nodes([self._node.node_id])
            with contextlib.suppress(Unreachable):
                await self._libp2p.guard(finding, BOOTSTRAP_TIMEOUT_S, "the neighbours")

    async def _rejoin_forever(self) -> None:
        said = ""
        while not self._libp2p.failed.done():
            await asyncio.sleep(REJOIN_PERIOD_S)
            said = await logged("rejoining", self.rejoin(), said)

    async def _dht_node(self) -> Any:
        from hivemind.dht.routing import DHTID

        hashed = {DHTID.generate(key).to_bytes(): stage for key, stage in self._keys.items()}
        validator = adverts.AdvertValidator(self._libp2p.identity, self._run_id, hashed, dht_time, self._members)
        creating = dht_node.create(self._libp2p.p2p, validator, self._findings, asks_only=self._libp2p.asks_only)
        return await self._libp2p.guard(creating, BOOTSTRAP_TIMEOUT_S, "the libp2p daemon")
