"""The directory over a real DHT on loopback: a few libp2p daemons and one event loop."""

import asyncio
import gc
import os
import signal
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from daemons import RUN, STRANGER, Node, gone, node, run, until
from machine import at_most

from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import LocalError, Unreachable
from noloco_p2p.io.dht import addresses
from noloco_p2p.io.dht.adverts import AdvertRecord, decode, encode, packed_bytes, stage_key
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.sim import virtual_time


def test_three_nodes_see_each_other_move_leave_and_expire(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            node(tmp_path / "a") as a,
            node(tmp_path / "b", join=[a.address]) as b,
            node(tmp_path / "c", join=[a.address]) as c,
        ):
            assert await a.directory.peers() == []
            await a.directory.announce(a.advert(), 30.0)
            await b.directory.announce(b.advert(stage=1), 30.0)
            await c.directory.announce(c.advert(step=7.25), 1.0)
            everybody = sorted((a.advert(), b.advert(stage=1), c.advert(step=7.25)), key=lambda one: one.peer_id)
            for one in (a, b, c):
                seen = await one.directory.peers()
                assert [replace(peer, announced_at=0.0) for peer in seen] == everybody
                now = asyncio.get_running_loop().time()
                assert all(0.0 < now - peer.announced_at < 5.0 for peer in seen)
                assert {one.libp2p.peer_id, *one.libp2p.met} == {peer.peer_id for peer in everybody}
                assert one.libp2p.peer_id not in one.libp2p.met, "it would dial itself"

            async def expired() -> bool:
                return {peer.peer_id for peer in await a.directory.peers()} == {a.libp2p.peer_id, b.libp2p.peer_id}

            await until(expired, 3.0)  # c stops renewing, without withdrawing
            await b.directory.announce(b.advert(stage=0, state="syncing"), 30.0)
            moved = [peer for peer in await a.directory.peers() if peer.peer_id == b.libp2p.peer_id]
            assert [(peer.stage, peer.state) for peer in moved] == [(0, "syncing")]
            old = (await a.directory._node.get(stage_key(RUN, 1), latest=True)).value[b.libp2p.peer_id].value
            assert decode(old, run_id=RUN, stage=1, peer_id=b.libp2p.peer_id).advert.state == "left"
            await b.directory.withdraw(7.0)
            found = {peer.peer_id: (peer.state, peer.step) for peer in await a.directory.peers()}
            assert found == {a.libp2p.peer_id: ("training", a.advert().step), b.libp2p.peer_id: ("left", 7.0)}
            await b.directory.withdraw(7.0)
            await b.directory.announce(b.advert(), 1.0)  # a shorter lifetime than before, and renewed nevertheless
            assert b.libp2p.peer_id in [peer.peer_id for peer in await c.directory.peers()]
            pids = [one.libp2p.p2p._child.pid for one in (a, b, c)]
            assert not any(gone(pid) for pid in pids)
        assert all(gone(pid) for pid in pids)

    run(scenario)


def test_a_departure_reaches_a_node_without_its_record_though_all_holders_leave_too(tmp_path: Path) -> None:
    """A record is stored at five other nodes: of seven nodes, at all but the one farthest from its key. At the end of a
    run all six may leave before the seventh has asked them."""
    from hivemind.dht.routing import DHTID

    key = DHTID.generate(stage_key(RUN, 0))

    async def scenario() -> None:
        async with AsyncExitStack() as lasting:
            swarm: list[Node] = []
            exits: dict[int, AsyncExitStack] = {}
            for number in range(7):
                exits[number] = await lasting.enter_async_context(AsyncExitStack())
                join = [one.address for one in swarm]
                swarm.append(await exits[number].enter_async_context(node(tmp_path / str(number), join=join)))

            async def acquainted() -> bool:
                return all(len(one.directory._node.protocol.routing_table.peer_id_to_uid) == 6 for one in swarm)

            await until(acquainted)
            by_distance = sorted(range(7), key=lambda number: swarm[number].directory._node.node_id.xor_distance(key))
            leaving, left_out = swarm[by_distance[0]], swarm[by_distance[-1]]
            await left_out.directory.announce(left_out.advert(stage=1), 30.0)
            await leaving.directory.peers()
            await leaving.directory.announce(leaving.advert(), 30.0)

            async def seen() -> str | None:
                states = {peer.peer_id: peer.state for peer in await left_out.directory.peers()}
                return states.get(leaving.libp2p.peer_id)

            assert left_out.directory._node.protocol.storage.get(key) is None
            assert await seen() == "training"
            await leaving.directory.withdraw(7.0)
            for number in by_distance[:-1]:
                await exits[number].aclose()
            assert await seen() == "left"

    run(scenario)


@pytest.mark.parametrize("state", ["left", "finished"])
def test_a_repeated_announcement_does_not_outlive_a_newer_advert(tmp_path: Path, state: str) -> None:
    """A node announces itself again when its relays change, even while another announcement is in progress."""

    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            await b.directory.announce(b.advert(), 30.0)
            stored, go_on, put = asyncio.Event(), asyncio.Event(), b.directory._put

            async def held_up(advert: Advert, payload: bytes, expires: float) -> bool:
                took = await put(advert, payload, expires)
                if not stored.is_set():
                    stored.set()
                    await go_on.wait()
                return took

            b.directory._put = held_up  # type: ignore[method-assign]
            newer = b.directory.withdraw(7.0) if state == "left" else b.directory.announce(b.advert(state=state), 30.0)
            announcing = asyncio.create_task(newer)
            await stored.wait()
            again = asyncio.create_task(b.directory.announce_again())
            await asyncio.wait([again], timeout=1.0)
            go_on.set()
            await asyncio.gather(announcing, again)
            assert [peer.state for peer in await a.directory.peers()] == [state]

    run(scenario)


def test_a_node_that_leaves_during_its_first_announcement_says_so(tmp_path: Path) -> None:
    """It is told to stop while it waits for the confirmation of an advert that others already have."""

    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            stored, put = asyncio.Event(), b.directory._put

            async def unconfirmed(advert: Advert, payload: bytes, expires: float) -> bool:
                await put(advert, payload, expires)
                stored.set()
                return bool(await asyncio.Event().wait())

            b.directory._put = unconfirmed  # type: ignore[method-assign]
            announcing = asyncio.create_task(b.directory.announce(b.advert(), 30.0))
            await stored.wait()
            announcing.cancel()
            await asyncio.wait([announcing])
            b.directory._put = put  # type: ignore[method-assign]
            assert [peer.state for peer in await a.directory.peers()] == ["training"]
            await b.directory.withdraw(7.0)
            assert [peer.state for peer in await a.directory.peers()] == ["left"]

    run(scenario)


def test_a_directory_that_lost_everything_fails_to_read_instead_of_showing_an_empty_swarm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            await a.directory.announce(a.advert(), 30.0)
            a.directory._node.protocol.storage.clear()
            with pytest.raises(Unreachable, match="lost all adverts"):
                await a.directory.peers()

    run(scenario)


def test_forged_records_are_refused_by_storing_and_by_reading_nodes(tmp_path: Path) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue

    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            await a.directory.announce(a.advert(), 30.0)
            await b.directory.announce(b.advert(), 30.0)
            honest = [peer.peer_id for peer in await b.directory.peers()]
            key = DHTID.generate(stage_key(RUN, 0))
            mallory, victim = a.directory._node.protocol, b.directory._node.protocol
            expires = time.time() + 60.0
            made = packed_bytes(encode(AdvertRecord(a.advert(step=99.0), time.time(), ())))
            forged = bytes(64) + made
            stored = [
                await mallory.call_store(b.libp2p.p2p.peer_id, [key], [forged], [expires], subkeys=[subkey])
                for subkey in (STRANGER, b.libp2p.peer_id, None)
            ]
            assert stored == [[False]] * 3
            poisoned = DictionaryDHTValue()
            poisoned.store(STRANGER, forged, expires)
            assert await mallory.call_store(b.libp2p.p2p.peer_id, [key], [poisoned], [expires]) is None
            assert STRANGER not in victim.storage.get(key).value

            # Mallory's own storage answers readers with a forgery: the reader drops it and keeps the honest records.
            mallory.storage.store(key, forged, expires, subkey=STRANGER)
            assert [peer.peer_id for peer in await b.directory.peers()] == honest

    run(scenario)


def test_a_restarted_node_outbids_its_earlier_advert(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            async with node(tmp_path / "b", join=[a.address]) as b:
                await b.directory.announce(b.advert(step=1.0), 60.0)
            async with node(tmp_path / "b", join=[a.address]) as b:
                await b.directory.announce(b.advert(step=2.0), 10.0)
            assert [peer.step for peer in await a.directory.peers()] == [2.0]

    run(scenario)


def test_an_advert_that_nobody_stores_is_tried_again_with_a_longer_life_than_the_one_that_others_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = HivemindDirectory(cast(Libp2pDaemon, None), RUN, 1, cast(addresses.KnownPeers, None), None)
    tried, held_until = list[float](), dict[int, float]()

    async def refused(advert: Advert, payload: bytes, expires: float) -> bool:
        tried.append(expires)
        return False

    async def search(keys: list[str]) -> None:
        assert keys == [stage_key(RUN, 0)]
        held_until[0] = tried[0] + 5.0

    monkeypatch.setattr(directory, "_put", refused)
    monkeypatch.setattr(directory, "_search", search)
    monkeypatch.setattr(directory, "_until", lambda stage: held_until.get(stage, 0.0))
    with pytest.raises(Unreachable, match="no peer stored it"):
        asyncio.run(directory._store_at_others(Advert(STRANGER, RUN, 0, ()), b"", 30.0))
    assert len(tried) == 2
    assert tried[1] > tried[0] + 5.0


def test_adverts_are_renewed_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a clock that was hours ahead is corrected, earlier adverts must not block new ones for hours."""
    ahead_s, clock = 7_200.0, time.time
    monkeypatch.setattr(time, "time", lambda: clock() + ahead_s)

    async def scenario() -> None:
        nonlocal ahead_s
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:

            async def announce(step: float) -> None:
                await a.directory.announce(a.advert(step=step), 30.0)
                await b.directory.announce(b.advert(stage=1, step=step), 30.0)
                for one in (a, b):
                    seen = {peer.peer_id: peer.step for peer in await one.directory.peers()}
                    assert seen == {a.libp2p.peer_id: step, b.libp2p.peer_id: step}

            await announce(1.0)
            await a.directory.rejoin()
            await b.directory.rejoin()
            await announce(2.0)
            ahead_s = 0.0
            await announce(3.0)
            assert all(one.directory._expires[stage] < clock() + 31.0 for stage, one in enumerate((a, b)))

    run(scenario)


def test_a_restarted_bootstrap_node_rejoins_its_swarm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            await b.directory.announce(b.advert(), 30.0)
            await a.directory.peers()
            await a.directory.rejoin()
            await a.directory.close()
            await a.libp2p.close()
            a.libp2p.identity.close()
            async with node(tmp_path / "a") as again:
                assert again.libp2p.joined == ()
                assert [peer.peer_id for peer in await again.directory.peers()] == [b.libp2p.peer_id]
                await again.directory.announce(again.advert(), 30.0)
                assert len(await b.directory.peers()) == 2

    run(scenario)


def test_a_node_that_restarts_leaves_one_place_in_the_routing_tables_of_others(tmp_path: Path) -> None:
    """hivemind never removes the others when the peer is gone: a search would wait for it again and again."""

    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            for _ in range(3):
                async with node(tmp_path / "b", join=[a.address]) as b:
                    await a.directory.rejoin()
                    assert list(a.directory._node.protocol.routing_table.uid_to_peer_id.values()) == [
                        b.libp2p.p2p.peer_id
                    ]

    run(scenario)


def test_an_advert_that_expired_while_the_machine_slept_is_announced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lost its relays meanwhile, and immediately announces the ones that it has now."""
    slept_s, clock = 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: clock() + slept_s)

    async def scenario() -> None:
        nonlocal slept_s
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            await b.directory.announce(b.advert(), 30.0)
            slept_s = 7_200.0
            assert await a.directory.peers() == []
            await b.directory.announce_again()
            assert [peer.peer_id for peer in await a.directory.peers()] == [b.libp2p.peer_id]

    run(scenario)


def test_an_isolated_node_finds_its_swarm_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_p2p.io.dht.hivemind_directory.REJOIN_PERIOD_S", 2.0)

    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            port = int(a.address.split("/")[4])
            async with node(tmp_path / "b", join=[a.address]) as b:
                await a.directory.close()
                await a.libp2p.close()
                a.libp2p.identity.close()

                async def alone() -> bool:
                    return not await b.libp2p.links()

                await until(alone)
                table = b.directory._node.protocol.routing_table
                for node_id in list(table.uid_to_peer_id):
                    del table[node_id]  # as hivemind does when a peer does not answer
                (tmp_path / "a" / "known_peers.json").unlink(missing_ok=True)
                async with node(tmp_path / "a", port=port) as again:
                    await again.directory.announce(again.advert(), 30.0)

                    async def seen() -> bool:
                        return [peer.peer_id for peer in await b.directory.peers()] == [again.libp2p.peer_id]

                    await until(seen, 20.0)

    run(scenario)


def test_while_the_disk_is_full_the_log_says_once_that_known_peers_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = iter(["full", "full", "", "full", "other"])

    async def rejoin(_: HivemindDirectory) -> None:
        outcome = next(outcomes)
        if outcome == "other":
            libp2p.failed.set_result(None)
        if outcome:
            raise LocalError(outcome)

    async def scenario() -> None:
        libp2p.failed = asyncio.Future()
        await HivemindDirectory(cast(Any, libp2p), RUN, 1, cast(Any, None), None)._rejoin_forever()

    libp2p = SimpleNamespace()
    monkeypatch.setattr(HivemindDirectory, "rejoin", rejoin)
    virtual_time.run(scenario(), limit_s=1_000)
    assert [record.getMessage() for record in caplog.records] == [
        f"rejoining: {why}" for why in ("full", "full", "other")
    ]


def test_the_loop_does_not_wait_for_the_disk_when_known_peers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            await b.directory.announce(b.advert(), 30.0)
            await a.directory.peers()
            wrote = list[int]()
            monkeypatch.setattr(addresses, "write_whole", lambda *_: wrote.append(threading.get_ident()))
            await a.directory.rejoin()
            assert wrote
            assert threading.get_ident() not in wrote

    run(scenario)


def test_the_death_of_the_daemon_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path / "a") as a:
            await a.directory.announce(a.advert(), 30.0)
            os.kill(a.libp2p.p2p._child.pid, signal.SIGKILL)
            with pytest.raises(LocalError, match="has died"):
                await asyncio.wait_for(asyncio.shield(a.libp2p.failed), at_most(5.0))
            for refused in (a.directory.announce(a.advert(), 30.0), a.directory.peers(), a.directory.withdraw(7.0)):
                with pytest.raises(Unreachable, match="has died"):
                    await refused

    run(scenario)


def test_a_ping_during_the_start_of_a_node_causes_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.proto import dht_pb2

    answers_from, bugs = DHTProtocol.add_p2p_handlers, list[dict[str, Any]]()

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
        async with node(tmp_path / "a") as a:

            async def pinged(self: DHTProtocol, *arguments: Any) -> None:
                await answers_from(self, *arguments)
                asking = a.directory._node.protocol
                ping = dht_pb2.PingRequest(peer=asking.node_info)
                answer = await asking.get_stub(self.p2p.peer_id).rpc_ping(ping, timeout=5.0)
                assert not answer.peer.node_id

            monkeypatch.setattr(DHTProtocol, "add_p2p_handlers", pinged)
            async with node(tmp_path / "b", join=[a.address]) as b:
                await b.directory.announce(b.advert(), 30.0)
                assert [peer.peer_id for peer in await a.directory.peers()] == [b.libp2p.peer_id]
        gc.collect()
        await asyncio.sleep(0)

    run(scenario)
    assert not bugs


async def knows(one: Node, other: Node) -> bool:
    """Whether one node asks the other in the DHT. It does so only once it has dialled the other back."""
    return other.libp2p.p2p.peer_id in one.directory._node.protocol.routing_table.peer_id_to_uid


def test_a_search_that_times_out_leaves_no_unhandled_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("noloco_p2p.io.dht.hivemind_directory.STORE_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        async with node(tmp_path / "a") as a, node(tmp_path / "b", join=[a.address]) as b:
            await until(lambda: knows(a, b))
            stopped = b.libp2p.p2p._child.pid
            os.kill(stopped, signal.SIGSTOP)
            await asyncio.to_thread(os.waitid, os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(Unreachable, match="did not arrive within"):
                await a.directory.announce(a.advert(), 30.0)
            os.kill(stopped, signal.SIGCONT)
            await a.directory.peers()
            gc.collect()

    run(scenario)
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]
