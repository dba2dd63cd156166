"""hivemind's DHTNode, hardened so that no peer decides what others see.

A DHT node chooses its own place, so an attacker can always be near a key. Therefore each node also holds its own
record, and asks linked peers directly for what they hold (ARCHITECTURE.md, "What a stranger can do", hole 8). hivemind
is imported where it is used, because the import takes time; its objects are untyped.
"""

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from noloco_p2p.core.messages import PeerId
from noloco_p2p.io.dht.adverts import LONGEST_TTL_S, AdvertValidator, dht_time
from noloco_p2p.io.dht.identity import SIGNATURE_BYTES
from noloco_p2p.io.dht.reach import in_turns

WAIT_TIMEOUT_S = 2.0
"""Longest wait for one peer's answer to one DHT request."""
NEIGHBOURS = 20
"""How many DHT nodes nearest to a key a search asks: Kademlia's k."""
STAGE_LIMIT_BYTES = 3 << 20
"""Most bytes of one stage's records, without keys. With keys they still fit into one reply of hivemind (4 MiB)."""
LEAST_RECORD_BYTES = 256
"""Every record is larger."""
DICTIONARY = 0x50
"""Type of the msgpack extension in which hivemind sends records."""
SPARE_ENTRIES = 64
"""Beyond that, and beyond one for each record, entries of earlier expirations are dropped from a store."""
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

    logging.getLogger("asyncio").addFilter(_belongs_in_log)
    # hivemind sets this only after peers can already ask. Until then they get one without a node id.
    DHTProtocol.node_info = dht_pb2.NodeInfo()
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
    node.protocol.storage, node.protocol.cache = record_store(), record_store(0)
    node._filter_blacklisted = functools.partial(_others, node.node_id, node._filter_blacklisted)
    protocol, table = node.protocol, node.protocol.routing_table
    protocol._validate_dictionary = functools.partial(_valid, protocol._validate_dictionary)
    table.split_bucket = functools.partial(_split, table)
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

        if len(request.peer.node_id) > DHTID.HASH_NBYTES:
            return False
        if type(request).__name__ == "PingRequest":
            return True
        return len(request.keys) == 1 and b"" not in getattr(request, "subkeys", ())  # b"" means a dictionary

    async def sign_response(self, response: Any, request: Any) -> None:
        """Do nothing."""

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Whether to accept a response. Raises any error if it cannot be read."""
        from hivemind.dht.protocol import DHTProtocol
        from hivemind.dht.routing import DHTID
        from hivemind.dht.validation import DHTRecord

        pack = DHTProtocol.serializer.dumps
        async with self._turn:
            for found in getattr(response, "results", ()):
                if len(found.nearest_peer_ids) > NEIGHBOURS or any(len(one) > 64 for one in found.nearest_peer_ids):
                    return False  # naming a peer takes hivemind time that grows with the square of the id's length
                async for peer, record, expires in in_turns(_records(found.value), CHECKED_AT_ONCE):
                    if not self._validator.validate(DHTRecord(request.keys[0], pack(peer), record, expires)):
                        break  # hivemind drops all of them
        return bool(len(response.peer.node_id) <= DHTID.HASH_NBYTES)


def _records(packed: bytes) -> Any:
    """Peer id, record and expiration of each record in an answer. Raises any error unless that is a dictionary without
    further extensions: each level of these takes hivemind 40 KiB of the stack, whose end ends the process."""
    import msgpack

    def refuse(kind: int, data: bytes) -> None:
        raise ValueError(f"an extension of type {kind}")

    if not packed:
        return ()
    found = msgpack.unpackb(packed)
    if found.code != DICTIONARY:
        refuse(*found)
    return msgpack.unpackb(found.data, ext_hook=refuse, max_array_len=STAGE_LIMIT_BYTES // LEAST_RECORD_BYTES)[2]


def _valid(validate: Callable[[bytes, Any], bool], key: bytes, records: Any) -> bool:
    """Whether a peer's records are valid. Drops the bounds that it sends, which hivemind would use unchecked."""
    records.maxsize, records.latest_expiration_time = math.inf, -math.inf
    return validate(key, records)


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
    found: dict[str, Any] = await node.get_many(keys, sufficient_expiration_time=UNTIL_ALL_ARE_ASKED)
    return found


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
    """Ask each of these peers for the records that it holds, and put the valid ones into a `record_store`."""
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


def record_store(limit_bytes: int = STAGE_LIMIT_BYTES) -> Any:
    """A storage for hivemind's DHTProtocol that holds `limit_bytes` under each key; with 0 it stores nothing.

    hivemind's own storage is unbounded, lets a replayed older record shorten the life of a newer one, and hands out its
    own dictionary, into which a reader then merges other peers' answers.
    """
    return _store_class()(limit_bytes)


def _copied(held: Any) -> Any:
    """A copy of the records under a key."""
    copy = type(held)()
    copy.data, copy.key_to_heap = dict(held.data), dict(held.key_to_heap)
    copy.expiration_heap, copy.latest_expiration_time = list(held.expiration_heap), held.latest_expiration_time
    return copy


def _drop_spare_entries(*storages: Any) -> None:
    """hivemind keeps an entry for each renewal until it would have expired: drop them if they are many."""
    for one in storages:
        if len(one.expiration_heap) > 2 * len(one.data) + SPARE_ENTRIES:
            one.expiration_heap = sorted(one.key_to_heap.values())


@functools.cache
def _store_class() -> Any:
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue

    class RecordStore(DHTLocalStorage):  # type: ignore[misc]  # hivemind is untyped
        """Peers with a record keep their place and may renew the record; newcomers share the room that is left."""

        def __init__(self, limit_bytes: int) -> None:
            super().__init__()
            self._limit_bytes = limit_bytes

        def get(self, key: Any) -> Any:
            """A copy of what is held under a key, or None if there is nothing."""
            found = self._found(key)
            return None if found is None else type(found)(_copied(found.value), found.expiration_time)

        def items(self) -> Any:
            """Nothing: hivemind would send them to whoever claims a new place, any number of times."""
            return iter(())

        def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
            """Store a record if it expires later than the one held and there is room; returns whether it was stored."""
            found = self._found(key)
            held = found.value if found is not None else DictionaryDHTValue()
            before = held.get(subkey)
            if before is not None and before.expiration_time >= expiration_time:
                return False
            nbytes = vars(held).get("nbytes", 0) + len(value) - (len(before.value) if before is not None else 0)
            if nbytes > self._limit_bytes:  # some of these records may have expired
                nbytes = len(value) + sum(len(one.value) for peer_id, one in held.items() if peer_id != subkey)
            if nbytes > self._limit_bytes or not held.store(subkey, value, expiration_time):
                return False
            held.nbytes = nbytes
            if found is None or found.expiration_time < expiration_time:
                self.store(key, held, expiration_time)
            _drop_spare_entries(held, self)
            return True

        def _found(self, key: Any) -> Any:
            """What is held under a key. Records from before the clock was set back are dropped: peers would refuse them
            along with all others, and no newer ones could replace them."""
            found, latest = super().get(key), dht_time() + LONGEST_TTL_S
            if found is None or found.expiration_time <= latest:
                return found
            del self[key]
            for peer_id, (record, expires) in found.value.items():
                if expires <= latest:
                    self.store_subkey(key, peer_id, record, expires)
            return super().get(key)

    return RecordStore
