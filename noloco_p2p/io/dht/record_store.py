"""What a node holds of the DHT's records. Imports hivemind, which takes time: import it where it is used."""

from typing import Any

import msgpack
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue

from noloco_p2p.io.dht.adverts import ADVERTS_PER_STAGE_LIMIT, LONGEST_TTL_S, dht_time

STAGE_LIMIT_BYTES = 3 << 20
"""Most bytes of one stage's records, without keys. With keys they still fit into one reply of hivemind (4 MiB)."""
SPARE_ENTRIES = 64
"""Beyond that, and beyond one for each record, entries of earlier expirations are dropped from a store."""
DICTIONARY, MOST_RECORDS = 0x50, STAGE_LIMIT_BYTES // 256
"""Type of the msgpack extension in which hivemind sends the records of a stage, and their number if all are small."""


def unpacked(kind: int, packed: bytes) -> Any:
    """The records in an extension, at most as many as a reading takes in, because each has to be checked, and without
    the bounds that its sender gives, which hivemind would use unchecked. Raises any error if it is something else.

    hivemind also unpacks extensions in extensions, each level of which takes 40 KiB of the stack of this process.
    """
    if kind != DICTIONARY:
        raise ValueError(f"an extension of type {kind}")
    with DictionaryDHTValue().freeze() as records:
        for record in msgpack.unpackb(packed, max_array_len=MOST_RECORDS)[2][:ADVERTS_PER_STAGE_LIMIT]:
            records.store(*record)
    return records


class RecordStore(DHTLocalStorage):  # type: ignore[misc]  # hivemind is untyped
    """Holds `limit_bytes` under each key; with 0 it stores nothing. Peers with a record keep their place and may renew
    the record; newcomers share the room that is left.

    hivemind's own storage is unbounded, lets a replayed older record shorten the life of a newer one, and hands out its
    own dictionary, into which a reader then merges other peers' answers.
    """

    def __init__(self, limit_bytes: int = STAGE_LIMIT_BYTES) -> None:
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
        for one in (held, self):  # hivemind keeps an entry for each renewal until it would have expired
            if len(one.expiration_heap) > 2 * len(one.data) + SPARE_ENTRIES:
                one.expiration_heap = sorted(one.key_to_heap.values())
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


def _copied(held: Any) -> Any:
    """A copy of the records under a key."""
    copy = type(held)()
    copy.data, copy.key_to_heap = dict(held.data), dict(held.key_to_heap)
    copy.expiration_heap, copy.latest_expiration_time = list(held.expiration_heap), held.latest_expiration_time
    return copy
