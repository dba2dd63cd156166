"""hivemind's DHTNode, hardened so that no peer decides what others see.

A DHT node chooses its own place, so an attacker can always be near a key. Therefore each node also holds its own
record, and asks linked peers directly for what they hold (ARCHITECTURE.md, "What a stranger can do", hole 8). hivemind
is imported where it is used, because the import takes time; its objects are untyped.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from noloco_p2p.core.messages import PeerId
from noloco_p2p.io.dht.adverts import AdvertValidator
from noloco_p2p.io.dht.identity import SIGNATURE_BYTES
from noloco_p2p.io.dht.reach import in_turns

WAIT_TIMEOUT_S = 2.0
"""Longest wait for one peer's answer to one DHT request."""
NEIGHBOURS = 20
"""How many DHT nodes nearest to a key a search asks: Kademlia's k."""
CHECKED_AT_ONCE = 8
"""How many records are checked before other tasks get a turn: 10 ms, if none of them has been checked before."""
UNTIL_ALL_ARE_ASKED = float("nan")
"""Passed as the expiration at which a search may stop. No expiration in a reply reaches NaN, not even infinity, so a
search asks all nearest nodes."""


async def create(p2p: Any, validator: AdvertValidator, *, asks_only: bool = False) -> Any:
    """hivemind's DHTNode on its P2P, at the place that follows from its peer id: others keep the earlier places of a
    peer that restarts at another one, and never notice that nobody is there once it has left.

    A node with `asks_only` stays out of others' routing tables and answers nobody, because most could not reach it.
    """
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.proto import dht_pb2

    from noloco_p2p.io.dht.record_store import RecordStore, unpacked

    logging.getLogger("asyncio").addFilter(_belongs_in_log)
    # hivemind sets this only after peers can already ask. Until then they get one without a node id.
    DHTProtocol.node_info, DHTProtocol.serializer._decode_ext_types = dht_pb2.NodeInfo(), staticmethod(unpacked)
    node = await DHTNode.create(
        p2p=p2p,
        node_id=DHTID.generate(p2p.peer_id.to_base58()),
        client_mode=asks_only,
        bucket_size=NEIGHBOURS,
        wait_timeout=WAIT_TIMEOUT_S,
        record_validator=validator,
        backoff_rate=1.0,  # however long a peer has been away, it is asked again after the same 5 s
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        reuse_get_requests=False,
        chunk_size=1,  # one key per request: a reply cannot carry the records of two full ones
        authorizer=_Inspection(validator),
    )
    # With a cache, readers would get what a stranger put into it instead of what is stored.
    node.protocol.storage, node.protocol.cache = RecordStore(), RecordStore(0)
    node._filter_blacklisted = functools.partial(_others, node.node_id, node._filter_blacklisted)
    node.protocol.routing_table.split_bucket = functools.partial(_split, node.protocol.routing_table)
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


def _others(own: Any, usable: Callable[[dict[Any, Any]], dict[Any, Any]], named: dict[Any, Any]) -> dict[Any, Any]:
    """The nodes named by a peer that hivemind may ask, without this node, which would end a search with an error."""
    return {place: peer for place, peer in usable(named).items() if place != own}


def _split(table: Any, index: int) -> None:
    """Split a bucket of the routing table. hivemind leaves a node at the first place of the upper half in the lower
    one, where it does not find it: an error would end what later drops that node."""
    lower, upper = table.buckets[index].split()
    table.buckets[index : index + 1] = lower, upper
    for held in lower.nodes_to_peer_id, lower.replacement_nodes:
        for place in [one for one in held if one == upper.lower]:
            upper.add_or_update_node(place, held.pop(place))


async def ping_new(node: Any, linked: Sequence[PeerId]) -> bool:
    """Make linked peers that are not in the routing table aware of this node; returns whether any answers."""
    from hivemind.p2p import PeerID

    peers = [PeerID.from_base58(peer_id) for peer_id in linked]
    new = [peer for peer in peers if node.protocol.routing_table.get(peer_id=peer) is None]
    return any(place is not None for place in await asyncio.gather(*map(node.protocol.call_ping, new)))


def forget_spares(node: Any) -> None:
    """Drop what hivemind keeps for good, whoever sent it: the nodes for which there is no room in its routing table,
    except the newest ones, and the failures of peers."""
    node.blacklist.clear()
    table = node.protocol.routing_table
    for place in [one for bucket in table.buckets for one in list(bucket.replacement_nodes)[:-NEIGHBOURS]]:
        del table[place]


async def search(node: Any, keys: Sequence[str]) -> dict[str, Any]:
    """For each key, what the nodes nearest to it hold: a value that maps peer ids to valid payloads, or None."""
    return dict(await node.get_many(keys, sufficient_expiration_time=UNTIL_ALL_ARE_ASKED))


def hold(node: Any, key: str, peer_id: PeerId, payload: bytes, expires: float) -> None:
    """Store this node's own record on this node, too, regardless of where else it is stored."""
    key_id, record = _signed(node, key, peer_id, payload, expires)
    node.protocol.storage.store_subkey(key_id, peer_id, record, expires)


async def give(node: Any, peers: Iterable[PeerId], key: str, peer_id: PeerId, payload: bytes, expires: float) -> None:
    """Store this node's own record at each of these peers, regardless of where else it is stored."""
    from hivemind.p2p import PeerID

    key_id, record = _signed(node, key, peer_id, payload, expires)
    store, to = node.protocol.call_store, [PeerID.from_base58(peer) for peer in peers]
    await asyncio.gather(*(store(peer, [key_id], [record], [expires], subkeys=[peer_id]) for peer in to))


def _signed(node: Any, key: str, peer_id: PeerId, payload: bytes, expires: float) -> tuple[Any, bytes]:
    """The key's DHTID, and the payload with its signature, as it is stored."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord

    protocol, key_id = node.protocol, DHTID.generate(key)
    pack = protocol.serializer.dumps
    record = DHTRecord(key_id.to_bytes(), pack(peer_id), pack(payload), expires)
    return key_id, protocol.record_validator.sign_value(record)


async def ask(node: Any, peers: Iterable[PeerId], keys: Sequence[str], into: Any) -> None:
    """Ask each of these peers for the records that it holds, and put the valid ones into a `RecordStore`."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    find, key_ids = node.protocol.call_find, [DHTID.generate(key) for key in keys]
    asking = [find(PeerID.from_base58(peer), [key_id]) for peer in peers for key_id in key_ids]
    for reply in await asyncio.gather(*asking):
        for key_id, (found, _) in (reply or {}).items():
            async for peer_id, (record, expires) in in_turns(found.value.items() if found is not None else ()):
                into.store_subkey(key_id, peer_id, record, expires)


def merged(node: Any, found: Any, held: Any, key: str) -> dict[object, tuple[object, float]]:
    """Peer id → payload and expiration of the record under a key, from what a search `found` and what is in `held`. Of
    two records of a peer the one that expires later counts."""
    from hivemind.dht.routing import DHTID

    unpack, others = node.protocol.serializer.loads, held.get(DHTID.generate(key))
    records = dict(found.value) if found is not None else {}
    for peer_id, (record, expires) in others.value.items() if others is not None else ():
        if peer_id not in records or records[peer_id][1] < expires:
            records[peer_id] = (unpack(record[SIGNATURE_BYTES:]), expires)
    return records
