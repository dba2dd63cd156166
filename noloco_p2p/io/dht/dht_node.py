"""hivemind's DHTNode, hardened so that no peer decides what others see.

The place of a DHT node follows from its peer id, but an attacker can try keys until one is near the place it wants.
Therefore each node also holds its own record, asks linked peers directly for what they hold, and counts what has been
answered when a search takes too long (ARCHITECTURE.md, "What a stranger can do", hole 8). hivemind is imported where it
is used, because the import takes time; its objects are untyped.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from noloco_p2p.core.messages import PeerId
from noloco_p2p.io.dht.adverts import AdvertValidator
from noloco_p2p.io.dht.identity import SIGNATURE_BYTES
from noloco_p2p.io.dht.reach import in_turns

WAIT_TIMEOUT_S = 2.0
"""Longest wait for one peer's answer to one DHT request."""
NEIGHBOURS = 20
"""How many DHT nodes nearest to a key a search asks: Kademlia's k."""
WORKERS = 8
"""How many of them a search asks at the same time."""
COPIES = 5
"""How many nodes store a record, besides the one that it belongs to."""
CHECKED_AT_ONCE = 8
"""How many records are checked before other tasks get a turn: 10 ms, if none of them has been checked before."""
REMEMBERED = 256
"""How many nodes that have answered are remembered, and how many that have not: more than one reading asks."""
AVOIDED_S = 60.0
"""For how long a search does not ask a node that has not answered, unless it answers when it is asked directly."""


class Findings:
    """What other DHT nodes have answered so far. Outlives the node on which they came in."""

    def __init__(self) -> None:
        from noloco_p2p.io.dht.record_store import RecordStore

        self.records = RecordStore()
        self.peers = dict[Any, None]()
        """Those that answered when last asked, the latest last."""
        self.count = 0
        """How often one has answered."""

    async def take(self, find: Callable[..., Awaitable[Any]], peer: Any, key_ids: Sequence[Any]) -> Any:
        """hivemind's `call_find`: ask a peer for the records that it holds under a key, and keep the valid ones."""
        reply = await find(peer, key_ids)
        self.note(peer, reply is not None)
        for key_id, (found, _) in (reply or {}).items():
            async for peer_id, (record, expires) in in_turns(found.value.items() if found is not None else ()):
                self.records.store_subkey(key_id, peer_id, record, expires)
        return reply

    def note(self, peer: Any, answered: bool) -> None:
        """Count a peer's answer, or that there was none."""
        self.peers.pop(peer, None)
        if answered:
            self.peers[peer], self.count = None, self.count + 1
        for oldest in list(self.peers)[:-REMEMBERED]:
            del self.peers[oldest]


async def create(p2p: Any, validator: AdvertValidator, findings: Findings, *, asks_only: bool = False) -> Any:
    """hivemind's DHTNode on its P2P, which adds to `findings`. Its place and those of all others follow from peer ids:
    a stranger with any number of places would be all neighbours of a key, and a search would ask nobody else.

    A node with `asks_only` stays out of others' routing tables and answers nobody, because most could not reach it.
    """
    from hivemind.dht.node import Blacklist, DHTNode
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.proto import dht_pb2

    from noloco_p2p.io.dht.record_store import RecordStore, unpacked

    logging.getLogger("asyncio").addFilter(_belongs_in_log)
    # hivemind sets this only after peers can already ask. Until then they get one without a node id.
    DHTProtocol.node_info, DHTProtocol.serializer._decode_ext_types = dht_pb2.NodeInfo(), staticmethod(unpacked)
    node = await DHTNode.create(
        p2p=p2p,
        node_id=place_of(p2p.peer_id),
        client_mode=asks_only,
        bucket_size=NEIGHBOURS,
        num_workers=WORKERS,
        wait_timeout=WAIT_TIMEOUT_S,
        record_validator=validator,
        authorizer=_Inspection(validator),
    )
    protocol, node.blacklist = node.protocol, Blacklist(AVOIDED_S, 1.0, maxsize=REMEMBERED)
    # With a cache, readers would get what a stranger put into it instead of what is stored.
    protocol.storage, protocol.cache = RecordStore(), RecordStore(0)
    protocol.call_find = functools.partial(findings.take, protocol.call_find)
    protocol.update_routing_table = functools.partial(_update, protocol.update_routing_table)
    node._filter_blacklisted = functools.partial(_others, node.node_id, node._filter_blacklisted)
    return node


def _belongs_in_log(record: logging.LogRecord) -> bool:
    """Log filter: drops asyncio's reports of tasks that were destroyed while waiting for the end of a hivemind search.
    A search that is cancelled because it took too long leaves such tasks behind."""
    return not record.getMessage().startswith("Task was destroyed") or "coro=<Event.wait() " not in record.getMessage()


class _Inspection:
    """hivemind's hook to sign and check messages.

    It refuses nodes whose DHT id is too long, because hivemind fails at one in a task of its own. It refuses requests
    that our nodes never make: to find several keys, because one could be named tens of thousands of times, and its
    records would be sent as often; and to store more than one record, because a message has room for as many as take
    seconds to check. The records of an answer are checked a few at a time. hivemind then checks them again, all at
    once, but the validator remembers the results.
    """

    def __init__(self, validator: AdvertValidator) -> None:
        self._validator, self._turn = validator, asyncio.Lock()

    async def sign_request(self, request: Any, to: Any) -> None:
        """Do nothing."""

    async def validate_request(self, request: Any) -> bool:
        """Whether to answer a request."""
        from hivemind.dht.routing import DHTID

        keys, subkeys = getattr(request, "keys", (b"",)), getattr(request, "subkeys", ())  # a ping has neither
        is_plain = len(keys) == 1 and b"" not in subkeys  # b"" means a dictionary
        return is_plain and len(request.peer.node_id) <= DHTID.HASH_NBYTES

    async def sign_response(self, response: Any, request: Any) -> None:
        """Do nothing."""

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Whether to accept a response. Raises any error if it cannot be read."""
        from hivemind.dht.protocol import DHTProtocol
        from hivemind.dht.routing import DHTID
        from hivemind.dht.validation import DHTRecord

        pack, unpack = DHTProtocol.serializer.dumps, DHTProtocol.serializer.loads
        async with self._turn:
            for found in getattr(response, "results", ()):
                # Nothing (0) or a dictionary (2), a msgpack extension. Reading an id takes the square of its length.
                ids, usual = found.nearest_peer_ids, found.type in (0, 2) and found.value[:1] in b"\xc7\xc8\xc9"
                if not usual or len(ids) > 64 or any(len(one) > 64 for one in ids):
                    return False
                held = unpack(found.value).data if found.value else {}
                async for peer, (record, expires) in in_turns(held.items(), CHECKED_AT_ONCE):
                    if not self._validator.validate(DHTRecord(request.keys[0], pack(peer), record, expires)):
                        break  # hivemind drops all of them
        return bool(len(response.peer.node_id) <= DHTID.HASH_NBYTES)


def place_of(peer: Any) -> Any:
    """The DHTID of a hivemind PeerID."""
    from hivemind.dht.routing import DHTID

    return DHTID.generate(peer.to_base58())


async def _update(update: Callable[..., Awaitable[None]], place: Any, peer: Any, responded: bool = True) -> None:
    """Let hivemind update its routing table, unless a peer claims a place that is not its own."""
    if place in (None, place_of(peer)):
        await update(place, peer, responded)


def _others(own: Any, usable: Callable[[dict[Any, Any]], dict[Any, Any]], named: dict[Any, Any]) -> dict[Any, Any]:
    """The nodes named by a peer that hivemind may ask, without this node, which would end a search with an error."""
    return {place: peer for place, peer in usable(named).items() if place != own and place == place_of(peer)}


async def ping_new(node: Any, linked: Sequence[PeerId]) -> bool:
    """Make linked peers that are not in the routing table aware of this node; returns whether any answers."""
    from hivemind.p2p import PeerID

    peers = [PeerID.from_base58(peer_id) for peer_id in linked]
    new = [peer for peer in peers if node.protocol.routing_table.get(peer_id=peer) is None]
    return any(place is not None for place in await asyncio.gather(*map(node.protocol.call_ping, new)))


def forget_spares(node: Any) -> None:
    """Drop what hivemind keeps for good, whoever sent it: the nodes for which there is no room in its routing table,
    except the newest ones, and how often peers have failed."""
    node.blacklist.ban_counter.clear()
    table = node.protocol.routing_table
    for place in [one for bucket in table.buckets for one in list(bucket.replacement_nodes)[:-NEIGHBOURS]]:
        del table[place]


async def search(node: Any, keys: Sequence[str]) -> None:
    """Ask the nodes nearest to each key for the records under it."""
    from hivemind.dht.routing import DHTID

    await asyncio.gather(*(node.find_nearest_nodes([DHTID.generate(key)]) for key in keys))


def hold(node: Any, key: str, peer_id: PeerId, payload: bytes, expires: float) -> None:
    """Store this node's own record on this node, too, regardless of where else it is stored."""
    key_id, record = _signed(node, key, peer_id, payload, expires)
    node.protocol.storage.store_subkey(key_id, peer_id, record, expires)


def nearest(node: Any, findings: Findings, key: str) -> list[PeerId]:
    """The nodes nearest to a key out of those that have answered lately, or of all known ones if none has."""
    from hivemind.dht.routing import DHTID

    at, known = DHTID.generate(key), findings.peers or node.protocol.routing_table.peer_id_to_uid
    return [one.to_base58() for one in sorted(known, key=lambda one: at.xor_distance(place_of(one)))[:NEIGHBOURS]]


async def store(
    node: Any, findings: Findings, own: tuple[str, PeerId, bytes, float], at: Iterable[PeerId], copies: int
) -> bool:
    """Store this node's `own` record (key, peer id, payload, expiration) `at` the first `copies` of these peers that
    answer. Returns whether any of them has stored it."""
    from hivemind.p2p import PeerID

    (key_id, record), (_, me, _, expires), untried = _signed(node, *own), own, map(PeerID.from_base58, at)

    async def store_one() -> bool:
        for peer in untried:
            stored = await node.protocol.call_store(peer, [key_id], [record], [expires], subkeys=[me])
            findings.note(peer, stored is not None)
            if stored is not None:
                return list(stored) == [True]
        return False

    return any(await asyncio.gather(*(store_one() for _ in range(copies))))


def _signed(node: Any, key: str, peer_id: PeerId, payload: bytes, expires: float) -> tuple[Any, bytes]:
    """The key's DHTID, and the payload with its signature, as it is stored."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord

    protocol, key_id = node.protocol, DHTID.generate(key)
    pack = protocol.serializer.dumps
    record = DHTRecord(key_id.to_bytes(), pack(peer_id), pack(payload), expires)
    return key_id, protocol.record_validator.sign_value(record)


async def ask(node: Any, peers: Iterable[PeerId], keys: Sequence[str]) -> None:
    """Ask each of these peers for the records that it holds."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    async def ask_one(peer: Any, key: str) -> None:
        if await node.protocol.call_find(peer, [DHTID.generate(key)]) is not None:
            node.blacklist.register_success(peer)

    await asyncio.gather(*(ask_one(PeerID.from_base58(peer), key) for peer in peers for key in keys))


def records(node: Any, findings: Findings, key: str) -> dict[object, tuple[object, float]]:
    """Peer id → payload and expiration of each record under a key that this node holds or others have answered. Of two
    records of a peer the one that expires later counts."""
    from hivemind.dht.routing import DHTID

    unpack, key_id, found = node.protocol.serializer.loads, DHTID.generate(key), dict[object, tuple[object, float]]()
    for store in node.protocol.storage, findings.records:
        held = store.get(key_id)
        for peer_id, (record, expires) in held.value.items() if held is not None else ():
            if peer_id not in found or found[peer_id][1] < expires:
                found[peer_id] = unpack(record[SIGNATURE_BYTES:]), expires
    return found
