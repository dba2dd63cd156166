"""Eclipse attacks: peers that try to control what others find in the DHT."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from daemons import RUN, Node, daemon, node, run, until

from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht import adverts, dht_node, hivemind_directory
from noloco_p2p.io.dht.adverts import AdvertRecord, dht_time, living_records, stage_key
from noloco_p2p.io.dht.identity import Identity, peer_id_of

TTL_S = 30.0


def choose_half(home: Path, near: bool) -> Path:
    """Give a node to be an identity whose place is in that half of all places where the key of stage 0 is, or in the
    other; returns its folder."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    key = DHTID.generate(stage_key(RUN, 0))
    while True:
        with closing(Identity.open(home / "identity.key")) as identity:
            place = dht_node.place_of(PeerID.from_base58(identity.peer_id))
        if (key.xor_distance(place) < DHTID.MAX // 2) is near:
            return home
        identity.path.unlink()


@asynccontextmanager
async def neighbour_of_a_key(home: Path, join: list[str]) -> AsyncIterator[Any]:
    """A DHT node that is nearer to the key of stage 0 than half of all others, and drops the records that it claims to
    store."""
    from hivemind.dht.node import DHTNode
    from hivemind.dht.storage import DHTLocalStorage
    from hivemind.p2p import PeerID

    class Forgetful(DHTLocalStorage):  # type: ignore[misc]  # hivemind is untyped
        def store_subkey(self, *args: Any) -> bool:
            return True

    async with daemon(choose_half(home, near=True), join=join) as libp2p:
        place = dht_node.place_of(libp2p.p2p.peer_id)
        liar = await DHTNode.create(p2p=libp2p.p2p, node_id=place, initial_peers=[])
        liar.protocol.storage = Forgetful()
        for one in await libp2p.links():
            await liar.protocol.call_ping(PeerID.from_base58(one))
        try:
            yield liar
        finally:
            await liar.shutdown()


@asynccontextmanager
async def eclipsed(home: Path, liars: int) -> AsyncIterator[tuple[Node, Node]]:
    """Two nodes that both know `liars` more, which are the nearest to the key of stage 0.

    The liars fill the bucket of their half in each table: none is left out of it, as it could be beside one of the two.
    """
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(node(choose_half(home / "a", near=False)))
        b = await stack.enter_async_context(node(choose_half(home / "b", near=False), join=[a.address]))
        for number in range(liars):
            await stack.enter_async_context(neighbour_of_a_key(home / f"liar{number}", [a.address, b.address]))
        table = [one.directory._node.protocol.routing_table for one in (a, b)]
        async with asyncio.timeout(10.0):
            while any(len(one.peer_id_to_uid) < liars + 1 for one in table):  # noqa: ASYNC110  other processes
                await asyncio.sleep(0.02)
        yield a, b


def test_linked_peers_are_found_even_if_a_search_asks_only_liars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivemind.dht.routing import DHTID

    monkeypatch.setattr(dht_node, "NEIGHBOURS", 5)
    monkeypatch.setattr(dht_node, "WAIT_TIMEOUT_S", 30.0)  # otherwise an honest node would replace a slow liar
    monkeypatch.setattr(hivemind_directory, "REJOIN_PERIOD_S", 3600.0)  # the test rejoins explicitly

    async def scenario() -> None:
        async with eclipsed(tmp_path, 5) as (a, b):
            for one in (a, b):
                await one.directory.announce(one.advert(), TTL_S)
            everybody = sorted([a.libp2p.peer_id, b.libp2p.peer_id])
            table = b.directory._node.protocol.routing_table
            nearest = table.get_nearest_neighbors(DHTID.generate(stage_key(RUN, 0)), dht_node.NEIGHBOURS)
            assert len(nearest) == 5
            assert a.libp2p.peer_id not in [peer_id.to_base58() for _, peer_id in nearest]
            await b.directory.rejoin()
            assert [advert.peer_id for advert in await b.directory.peers()] == everybody

    run(scenario)


def test_a_cached_record_does_not_hide_the_stored_ones(tmp_path: Path) -> None:
    from hivemind.dht.routing import DHTID

    async def scenario() -> None:
        async with (
            node(tmp_path / "a") as a,
            node(tmp_path / "b", join=[a.address]) as b,
            node(tmp_path / "liar", join=[a.address, b.address]) as liar,
        ):
            for one in (a, b, liar):
                await one.directory.announce(one.advert(), TTL_S if one is not liar else 10 * TTL_S)
            protocol, key = liar.directory._node.protocol, DHTID.generate(stage_key(RUN, 0))
            record, expires = protocol.storage.get(key).value.get(liar.libp2p.peer_id)
            for one in (a, b):
                stored = await protocol.call_store(
                    one.libp2p.p2p.peer_id, [key], [record], [expires], subkeys=[liar.libp2p.peer_id], in_cache=True
                )
                assert stored == [False]
            everybody = sorted(one.libp2p.peer_id for one in (a, b, liar))
            for one in (a, b):
                assert [advert.peer_id for advert in await one.directory.peers()] == everybody

    run(scenario)


def fall_silent(one: Node) -> list[object]:
    """Let a node answer no request from now on; returns the list to which they are added."""
    asked = list[object]()

    async def validate_request(request: object) -> None:
        asked.append(request)
        await asyncio.Event().wait()

    one.directory._node.protocol.authorizer.validate_request = validate_request
    return asked


def test_nodes_that_never_answer_void_no_reading_and_no_announcement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen machines, of no member, stopped every announcement of a swarm for as long as they liked, and two dozen
    every reading: each search waited for them until it had no time left, and then dropped all that others had said."""
    monkeypatch.setattr(hivemind_directory, "READ_TIMEOUT_S", 0.75 * dht_node.WAIT_TIMEOUT_S)

    async def scenario() -> None:
        async with (
            node(tmp_path / "a") as a,
            node(tmp_path / "b", join=[a.address]) as b,
            node(tmp_path / "silent", join=[a.address, b.address]) as silent,
        ):
            for one in (a, b):
                await one.directory.announce(one.advert(), TTL_S)
            everybody = sorted(one.libp2p.peer_id for one in (a, b))
            inspection = silent.directory._node.protocol.authorizer
            answer, asked = inspection.validate_request, fall_silent(silent)
            for found in await asyncio.gather(*(one.directory.peers() for one in (a, b))):
                assert [advert.peer_id for advert in found] == everybody
            assert len(asked) > 1, "each has asked it in vain"
            for one in (a, b):
                await one.directory.announce(one.advert(), TTL_S)

            async def avoided() -> bool:
                return all(silent.libp2p.p2p.peer_id in one.directory._node.blacklist for one in (a, b))

            await until(avoided)
            asked.clear()
            for one in (a, b):
                await one.directory.peers()
            assert not asked
            inspection.validate_request = answer
            await a.directory.rejoin()
            assert not await avoided(), "it has answered when it was asked directly"

    run(scenario)


def test_a_reading_that_nobody_has_answered_in_time_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hivemind_directory, "READ_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "silent", join=[a.address]) as silent:
            await a.directory.announce(a.advert(), TTL_S)
            fall_silent(silent)
            with pytest.raises(Unreachable, match="the directory's answer did not arrive"):
                await a.directory.peers()

    run(scenario)


def test_a_record_is_stored_at_the_nearest_nodes_that_answer() -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    asked = list[Any]()

    async def call_store(peer: Any, *_: object, **__: object) -> list[bool] | None:
        asked.append(peer)
        await asyncio.sleep(0)
        return None if peer in silent else [peer in willing]

    async def scenario(copies: int) -> bool:
        asked.clear()
        own = "key", "me", b"payload", dht_time() + TTL_S
        return await dht_node.store(dht, findings, own, dht_node.nearest(dht, findings, "key"), copies)

    serializer, signer = SimpleNamespace(dumps=lambda _: b""), SimpleNamespace(sign_value=lambda _: b"")
    peers, findings = [PeerID(number.to_bytes(34, "big")) for number in range(300)], dht_node.Findings()
    table = SimpleNamespace(peer_id_to_uid=dict.fromkeys(peers))
    parts = {"serializer": serializer, "record_validator": signer, "routing_table": table}
    dht = SimpleNamespace(protocol=SimpleNamespace(call_store=call_store, **parts))
    assert len(set(dht_node.nearest(dht, findings, "key"))) == dht_node.NEIGHBOURS, "of all known ones"
    for peer in peers:
        findings.note(peer, True)
    assert list(findings.peers) == peers[-dht_node.REMEMBERED :], "the last ones that answered"
    ranked = sorted(findings.peers, key=lambda peer: DHTID.generate("key").xor_distance(dht_node.place_of(peer)))
    silent, willing = set(ranked[:2]), {ranked[4]}
    assert asyncio.run(scenario(3))
    assert asked == ranked[:5]
    assert not silent & set(findings.peers), "they are not asked first again"
    willing = set()
    assert not asyncio.run(scenario(3))
    assert asked == ranked[2:5]


def test_a_peer_with_an_invalid_dht_id_neither_fills_the_log_nor_keeps_others_from_rejoining(tmp_path: Path) -> None:
    from hivemind.dht.routing import DHTID

    bugs = list[dict[str, Any]]()

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
        async with node(tmp_path / "a") as a, node(tmp_path / "liar", join=[a.address]) as liar:
            liar.directory._node.protocol.node_info.node_id = b"\xff" * 21
            assert await liar.directory._node.protocol.call_find(a.libp2p.p2p.peer_id, [DHTID.generate("key")]) is None
            table = a.directory._node.protocol.routing_table
            del table[table.get(peer_id=liar.libp2p.p2p.peer_id)]
            await a.directory.rejoin()
            assert not table.peer_id_to_uid
            async with node(tmp_path / "b", join=[liar.address, a.address]) as b:
                assert list(b.directory._node.protocol.routing_table.peer_id_to_uid) == [a.libp2p.p2p.peer_id]

    run(scenario)
    assert not bugs


def test_a_peer_that_returns_the_asking_node_does_not_keep_it_from_announcing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "liar", join=[a.address]) as liar:
            table = liar.directory._node.protocol.routing_table
            honest = table.get_nearest_neighbors
            table.get_nearest_neighbors = lambda query, k, exclude: honest(query, k)
            await a.directory.announce(a.advert(), TTL_S)
            assert [advert.peer_id for advert in await liar.directory.peers()] == [a.libp2p.peer_id]

    run(scenario)


def test_false_metadata_in_a_reply_does_not_keep_others_from_reading(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            node(tmp_path / "a") as a,
            node(tmp_path / "liar", join=[a.address]) as liar,
            node(tmp_path / "b", join=[a.address, liar.address]) as b,
        ):
            protocol = liar.directory._node.protocol
            honest = protocol.storage.get

            def get(key: Any) -> Any:
                found = honest(key)
                if found is not None:
                    vars(found.value).update(maxsize="much", latest_expiration_time="late", frozen=True)
                return found

            await a.directory.announce(a.advert(), TTL_S)
            protocol.storage.get = get
            await b.directory.rejoin()
            for one in (a, b):
                assert [advert.peer_id for advert in await one.directory.peers()] == [a.libp2p.peer_id]

    run(scenario)


def test_a_request_that_repeats_a_key_or_stores_many_records_is_refused(tmp_path: Path) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
    from hivemind.proto import dht_pb2

    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "liar", join=[a.address]) as liar:
            await a.directory.announce(a.advert(), TTL_S)
            protocol, key = liar.directory._node.protocol, DHTID.generate(stage_key(RUN, 0)).to_bytes()
            ask = protocol.get_stub(a.libp2p.p2p.peer_id).rpc_find
            answer = await ask(dht_pb2.FindRequest(keys=[key], peer=protocol.node_info))
            assert [each.type for each in answer.results] == [dht_pb2.FOUND_DICTIONARY]
            with pytest.raises(P2PHandlerError):
                await ask(dht_pb2.FindRequest(keys=[key] * 10_000, peer=protocol.node_info))
            store = protocol.get_stub(a.libp2p.p2p.peer_id).rpc_store
            for keys, subkey in ([key] * 3, b"x"), ([key], b""):
                parts = {"subkeys": [subkey] * len(keys), "values": [b"x"] * len(keys), "in_cache": [True] * len(keys)}
                with pytest.raises(P2PHandlerError):
                    await store(dht_pb2.StoreRequest(keys=keys, expiration_time=[1.0] * len(keys), **parts))

    run(scenario)


def test_a_stranger_with_any_number_of_places_or_names_takes_a_bounded_amount_of_memory() -> None:
    """hivemind keeps all places for which its table has no room, and the failures of all peers that never answered."""
    from hivemind.dht.node import Blacklist
    from hivemind.dht.routing import DHTID, RoutingTable
    from hivemind.p2p import PeerID

    table, blacklist = RoutingTable(DHTID.generate("me"), dht_node.NEIGHBOURS, 5), Blacklist(60.0, 1.0)
    dht = SimpleNamespace(protocol=SimpleNamespace(routing_table=table), blacklist=blacklist)
    for number in range(10_000):
        table.add_or_update_node(DHTID.generate(number), PeerID(bytes(34)))
        blacklist.register_failure(PeerID(number.to_bytes(34, "big")))
    before = [[*bucket.nodes_to_peer_id] for bucket in table.buckets]
    dht_node.forget_spares(dht)
    assert len(table.uid_to_peer_id) <= 2 * dht_node.NEIGHBOURS * len(table.buckets) < 4000
    assert [[*bucket.nodes_to_peer_id] for bucket in table.buckets] == before
    assert not blacklist.ban_counter


class Turns:
    """A validator that notes in which turn of the event loop each record was checked."""

    def __init__(self) -> None:
        self.now, self.checked = 0, Counter[int]()

    async def count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)

    def validate(self, record: object) -> bool:
        self.checked[self.now] += 1
        return True


def test_an_answer_full_of_records_is_checked_a_few_at_a_time() -> None:
    """The signatures of 1,024 adverts take 0.2 s, and with certificates 1 s."""
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.proto import dht_pb2

    async def scenario() -> None:
        turns = Turns()
        counting = asyncio.create_task(turns.count())
        inspection = dht_node._Inspection(cast(Any, turns))
        held = DictionaryDHTValue()
        for number in range(1000):
            held.store(f"{number}", b"record", dht_time() + TTL_S)
        result = dht_pb2.FindResult(value=DHTProtocol.serializer.dumps(held))
        asked, answer = dht_pb2.FindRequest(keys=[b"key"]), dht_pb2.FindResponse(results=[result])
        assert all(await asyncio.gather(*(inspection.validate_response(answer, asked) for _ in range(20))))
        counting.cancel()
        assert turns.checked.total() == 20_000
        assert max(turns.checked.values()) <= dht_node.CHECKED_AT_ONCE

    asyncio.run(scenario())


def test_no_answer_has_more_records_checked_than_a_reading_takes_in(tmp_path: Path) -> None:
    """The 9,000 that fit into an answer took 2 to 4 s, if their sender had signed new ones; a reading has 10 s."""
    import msgpack
    from hivemind.proto import dht_pb2

    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            inspection, turns = a.directory._node.protocol.authorizer, Turns()
            inspection._validator = turns
            records = [(f"{number}", b"record", dht_time() + TTL_S) for number in range(9_000)]
            packed = msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([None, 0.0, records])))
            answer = dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=packed)])
            assert await inspection.validate_response(answer, dht_pb2.FindRequest(keys=[b"key"]))
            assert turns.checked.total() == adverts.ADVERTS_PER_STAGE_LIMIT

    run(scenario)


def nested(levels: int) -> bytes:
    import msgpack

    inner = b"\x90"
    for _ in range(levels):
        inner = b"\x91" + cast(bytes, msgpack.packb(msgpack.ExtType(0x40, inner)))
    return inner


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (0x40, b"\x93\xc0\x00\xc4\x20" + bytes(32)),
        (0x01, b"\x93\xc0\x00\xc4\x20" + bytes(32)),
        (0x50, b"\x93\xc0\x00\xdd\x00\x01\x00\x00" + b"\x93\xa1x\xc4\x00\x00" * 65_536),
    ],
    ids=["a tuple", "an unknown extension", "a million records"],
)
def test_an_answer_with_anything_but_a_dictionary_of_records_is_refused(
    kind: int, fields: bytes, tmp_path: Path
) -> None:
    """A line in the log for each unknown extension, and seconds of work for a million records of nothing."""
    import msgpack
    from hivemind.proto import dht_pb2

    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            result = dht_pb2.FindResult(value=msgpack.packb(msgpack.ExtType(kind, fields)))
            inspection, asked = a.directory._node.protocol.authorizer, dht_pb2.FindRequest(keys=[b"key"])
            with pytest.raises(ValueError, match=r"extension|max_array_len"):
                await inspection.validate_response(dht_pb2.FindResponse(results=[result]), asked)

    run(scenario)


def test_extensions_within_a_record_are_not_unpacked(tmp_path: Path) -> None:
    """Two hundred levels of them, each in another, took all of the stack and ended the process."""
    import msgpack
    from hivemind.dht.protocol import DHTProtocol

    async def scenario() -> None:
        async with node(tmp_path / "a"):
            fields = b"\x93\xc0\x00\x91\x93\xa1x" + nested(100) + b"\x00"
            held = DHTProtocol.serializer.loads(msgpack.packb(msgpack.ExtType(0x50, fields)))
            assert isinstance(held.data["x"].value[0], msgpack.ExtType)

    run(scenario)


@pytest.mark.parametrize("named", [[bytes(65)], [bytes(34)] * 65], ids=["an endless id", "too many"])
def test_an_answer_that_names_no_peers_as_it_should_is_refused(named: list[bytes]) -> None:
    """An id of 100 kB kept the event loop busy for 8 s, one of a megabyte for a quarter of an hour."""
    from hivemind.proto import dht_pb2

    async def scenario() -> None:
        inspection = dht_node._Inspection(cast(Any, Turns()))
        asked = dht_pb2.FindRequest(keys=[b"key"])
        usual, other = (
            dht_pb2.FindResponse(
                results=[dht_pb2.FindResult(nearest_node_ids=[bytes(20)] * len(ids), nearest_peer_ids=ids)]
            )
            for ids in ([bytes(38)] * 20, named)
        )
        assert await inspection.validate_response(usual, asked)
        assert not await inspection.validate_response(other, asked)
        unknown = dht_pb2.FindResponse(results=[dht_pb2.FindResult(type=cast(Any, 7))])
        assert not await inspection.validate_response(unknown, asked), "hivemind would log an error"

    asyncio.run(scenario())


def test_nobody_has_another_place_than_that_of_its_peer_id(tmp_path: Path) -> None:
    """With fifty places around a key, one machine was the only one that searches asked, and was sent all records for
    each of them."""
    from hivemind.dht.routing import DHTID
    from hivemind.proto import dht_pb2

    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "liar", join=[a.address]) as liar:
            await a.directory.announce(a.advert(), TTL_S)
            dht, me = a.directory._node, liar.libp2p.p2p.peer_id
            key, own, sent = int(DHTID.generate(stage_key(RUN, 0))), dht_node.place_of(me), list[object]()
            places = [DHTID(key ^ (1 << (150 - number))) for number in range(50)]
            dht.protocol.call_store = lambda *what, **_: sent.append(what)
            ping = liar.directory._node.protocol.get_stub(a.libp2p.p2p.peer_id).rpc_ping
            del dht.protocol.routing_table[own]
            for place in (*places, own):
                await ping(dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=place.to_bytes())))
            assert list(dht.protocol.routing_table.uid_to_peer_id) == [own]
            assert dht._filter_blacklisted(dict.fromkeys((*places, own), me)) == {own: me}
            assert not sent

    run(scenario)


def test_strangers_with_many_links_do_not_put_off_asking_those_in_the_last_reading(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            directory, linked = a.directory, [f"{number:03}" for number in range(200)]
            directory._seen = frozenset(linked[::10])
            some = [set(directory._some(linked)) for _ in range(13)]
            assert directory._seen <= some[0] | some[1]
            assert set[str]().union(*some) == set(linked)
            assert all(len(each) <= 2 * hivemind_directory.ASKED_AT_ONCE for each in some)

    run(scenario)


def test_a_record_that_is_renewed_without_end_takes_no_more_memory() -> None:
    from hivemind.dht.routing import DHTID

    from noloco_p2p.io.dht.record_store import RecordStore

    store, key, expires = RecordStore(), DHTID.generate("key"), dht_time() + TTL_S
    for number in range(10_000):
        assert store.store_subkey(key, f"{number % 2}", b"record", expires + number / 1000)
    held = store.get(key).value
    assert sorted(held.data) == ["0", "1"]
    assert len(held.expiration_heap) + len(store.expiration_heap) < 200
    assert held.top()[0] == "0", "the first to expire"


def test_what_has_expired_makes_room_in_a_full_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.utils import timed_storage

    from noloco_p2p.io.dht.record_store import RecordStore

    store, key, now = RecordStore(1000), DHTID.generate("key"), dht_time()
    assert store.store_subkey(key, "short", bytes(600), now + TTL_S)
    assert store.store_subkey(key, "long", bytes(400), now + 3 * TTL_S)
    assert not store.store_subkey(key, "new", bytes(1), now + 3 * TTL_S)
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: now + 2 * TTL_S)
    assert store.store_subkey(key, "new", bytes(600), now + 3 * TTL_S)
    assert not store.store_subkey(key, "newer", bytes(1), now + 3 * TTL_S)


def test_a_full_stage_keeps_its_records() -> None:
    from hivemind.dht.routing import DHTID

    from noloco_p2p.io.dht.record_store import RecordStore

    store, key, expires = RecordStore(1000), DHTID.generate("key"), dht_time() + TTL_S
    assert store.store_subkey(key, "honest", bytes(400), expires)
    assert store.store_subkey(key, "first", bytes(600), expires)
    assert not store.store_subkey(key, "second", bytes(1), expires)
    assert store.store_subkey(key, "honest", bytes(400), expires + 1)
    assert not store.store_subkey(key, "honest", bytes(401), expires + 2)
    assert sorted(store.get(key).value.data) == ["first", "honest"]
    assert store.store_subkey(DHTID.generate("another"), "second", bytes(1000), expires)


def test_a_replayed_older_record_does_not_shorten_the_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.utils import timed_storage

    from noloco_p2p.io.dht.record_store import RecordStore

    store, key, now = RecordStore(), DHTID.generate("key"), dht_time()
    assert store.store_subkey(key, "peer", b"new", now + 2 * TTL_S)
    assert not store.store_subkey(key, "peer", b"old", now + TTL_S)
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: now + 1.5 * TTL_S)
    assert store.get(key).value.get("peer").value == b"new"


def test_known_peers_take_precedence_over_small_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adverts, "ADVERTS_PER_STAGE_LIMIT", 2)
    ids = sorted(peer_id_of(bytes([number]) * 32) for number in range(5))
    identity = Identity.open(tmp_path / "identity.key")
    made = Advert(identity.peer_id, RUN, 0, ("127.0.0.1:5000",), state="training")
    payload = adverts.encode(AdvertRecord(made, dht_time(), ()))
    subkeys: dict[object, object] = {peer_id: (payload, dht_time() + TTL_S) for peer_id in ids}
    read = living_records(subkeys, RUN, 0, dht_time(), frozenset(ids[3:]))
    assert [record.advert.peer_id for record in read] == ids[3:]
    identity.close()
