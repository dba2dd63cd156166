"""The libp2p daemon on loopback: joining and its errors, the manifest, the dial-back, shutting down."""

import asyncio
import os
import select
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from math import nan
from pathlib import Path

import pytest
from daemons import RUN, STRANGER, daemon, gone, run
from machine import in_time

from noloco_p2p.config import MANIFEST_LIMIT_BYTES
from noloco_p2p.errors import Busy, ConfigError, Declined, LocalError, Unreachable, Violation
from noloco_p2p.io.dht import libp2p as libp2p_module
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import peer_id_of
from noloco_p2p.io.dht.join_handshake import (
    DIAL_BACK_CALL,
    MANIFEST_CALL,
    ask_dial_back,
    fetch_manifest,
    serve_dial_back,
    serve_manifest,
)
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.p2p_daemon import SOCKETS_MIN_AGE_S, sweep_stale_sockets
from noloco_p2p.launch.node_probe import scrape


def test_each_kind_of_bad_join_address_has_its_own_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert libp2p_module.DIAL_TIMEOUT_S <= 5.0
    monkeypatch.setattr("noloco_p2p.io.dht.libp2p.DIAL_TIMEOUT_S", 1.0)
    monkeypatch.setattr("noloco_p2p.io.dht.hivemind_directory.BOOTSTRAP_TIMEOUT_S", 1.0)

    async def refused(join: list[str], kind: type[Exception], message: str) -> None:
        begun = time.monotonic()
        with pytest.raises(kind, match=message) as caught:
            async with daemon(tmp_path / "b", join=join):
                pass
        assert "\n" not in str(caught.value)
        assert in_time(time.monotonic() - begun, 10.0)

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a:
            good = a.join_addresses[0]
            with socket.socket() as silent:
                silent.bind(("127.0.0.1", 0))
                dead = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{a.peer_id}"
                await refused([dead], Unreachable, "nobody answers .*refused")
                silent.listen()
                await refused([dead], Unreachable, "an answer did not arrive within 1 s")
            await refused([good[:-4]], ConfigError, "malformed join address")
            other = good.replace(a.peer_id, STRANGER)
            await refused([other], ConfigError, f"another peer answers there .{a.peer_id}")
            for either in ([dead, other], [other, dead]):  # whoever ran before falls back to the peers that it knows
                await refused(either, Unreachable, "nobody answers .*refused")
            with pytest.raises(ConfigError, match="this node's own"):
                await Libp2pDaemon.open(a.identity, host="127.0.0.1", port=0, join=[good])
            with pytest.raises(ConfigError, match=r"'10\.0\.0\.1:4101' in .*listen\.announce_host is neither"):
                await Libp2pDaemon.open(a.identity, host="127.0.0.1", port=0, announce_host="10.0.0.1:4101")
            async with daemon(tmp_path / "b", join=[dead.replace(a.peer_id, STRANGER), good]) as b:
                assert [str(address) for address in b.joined] == [good]
                with pytest.raises(Unreachable, match="has no directory of this run"):
                    await HivemindDirectory.open(b, run_id=RUN, stages=1, known_path=tmp_path / "known")

    run(scenario)


def test_whatever_answers_a_dial_is_only_a_reason_that_is_safe_to_show(tmp_path: Path) -> None:
    """Words of the remote end ended the node, because they looked like an error about its peer id, or coloured the
    terminal."""
    said = b"peer id mismatch remote key matches ", b"peer id mismatch", b"no: \x1b[31m\x07", b"\xff"

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a:

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read(1)
                for text in (b"/multistream/1.0.0\n", said[dialled] + b"\n"):
                    writer.write(bytes([len(text)]) + text)
                await writer.drain()
                writer.close()

            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                for dialled in range(len(said)):
                    with pytest.raises(Unreachable, match="nobody answers") as caught:
                        await a.dial(JoinAddress("127.0.0.1", port, peer_id_of(bytes([dialled]) * 32)))
                    assert str(caught.value).isprintable()

    run(scenario)


def test_a_port_in_use_is_refused_even_by_another_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a:
            port = int(a.join_addresses[0].split("/")[4])
            with pytest.raises(LocalError, match=f"port {port} on 127.0.0.1 is in use"):
                async with daemon(tmp_path / "b", port=port):
                    pass

    run(scenario)


def test_the_daemon_serves_its_metrics_at_the_given_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", metrics_port=0) as b:
            assert a.metrics_port is None
            found = None
            while found is None:  # the daemon opens its metrics port a little after the others
                await asyncio.sleep(0.1)
                with suppress(Unreachable):
                    found = await asyncio.to_thread(scrape, f"http://127.0.0.1:{b.metrics_port}/metrics", 5.0)
            assert any(name.startswith("libp2p_") for name, _, _ in found.samples)
            with pytest.raises(LocalError, match=f"port {b.metrics_port} .*choose another listen.libp2p_metrics_port"):
                async with daemon(tmp_path / "c", metrics_port=b.metrics_port):
                    pass

    run(scenario)


def test_the_daemon_does_not_relay_for_strangers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            for service in ("/libp2p/circuit/relay/0.2.0/hop", "/libp2p/autonat/1.0.0"):
                with pytest.raises(Unreachable, match="protocols not supported"):
                    await b.open_stream(a.peer_id, service)

    run(scenario)


@pytest.mark.parametrize("ready", [False, True])
def test_a_daemon_that_dies_at_its_start_is_reported_with_the_reason(
    ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivemind.p2p import P2P

    read = P2P._read_outputs

    async def read_and_kill(self: P2P, is_ready: "asyncio.Future[None]") -> None:
        if ready:
            is_ready.add_done_callback(lambda _: os.kill(self._child.pid, signal.SIGKILL))
        else:
            os.kill(self._child.pid, signal.SIGKILL)
        await read(self, is_ready)

    monkeypatch.setattr(P2P, "_read_outputs", read_and_kill)

    async def scenario() -> None:
        with pytest.raises(LocalError, match=r"(died while starting \(.*; |did not start: .*\()signal 9\)"):
            async with daemon(tmp_path / "a"):
                pass

    run(scenario)


def test_a_cancelled_start_leaves_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.p2p import P2P

    async def scenario() -> None:
        there: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def read(self: P2P, is_ready: "asyncio.Future[None]") -> None:
            there.set_result(self._child.pid)
            await asyncio.Event().wait()

        monkeypatch.setattr(P2P, "_read_outputs", read)

        async def start() -> None:
            async with daemon(tmp_path / "a"):
                pass

        starting = asyncio.create_task(start())
        pid = await there
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert gone(pid)

    run(scenario)


def test_ctrl_c_in_a_terminal_does_not_reach_the_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a:
            assert os.getpgid(a.p2p._child.pid) == a.p2p._child.pid != os.getpgid(0)

    run(scenario)


def test_the_manifest_and_the_time_come_from_the_joined_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            with pytest.raises(Declined, match="still starting, or runs another version of noloco"):
                await fetch_manifest(b, a.peer_id)
            await serve_manifest(a, b"m" * MANIFEST_LIMIT_BYTES)
            began = time.time()
            manifest, ahead = await fetch_manifest(b, a.peer_id)
            assert manifest == b"m" * MANIFEST_LIMIT_BYTES
            assert abs(ahead) <= (time.time() - began) / 2, "both have the same clock"
            await serve_manifest(b, b"m" * (MANIFEST_LIMIT_BYTES + 1))
            with pytest.raises(Violation, match="manifest of 65537 bytes"):
                await fetch_manifest(a, b.peer_id)
            with pytest.raises(Unreachable):
                await b.call(STRANGER, MANIFEST_CALL, b"", 2.0)
            monkeypatch.setattr("noloco_p2p.io.dht.join_handshake.dht_time", lambda: nan)
            with pytest.raises(Violation, match="a time that is not finite"):
                await fetch_manifest(b, a.peer_id)

    run(scenario)


def test_an_unreadable_answer_is_a_violation(tmp_path: Path) -> None:
    async def nonsense(request: bytes, caller: object) -> bytes:
        return b"\xff"

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            await a.p2p._client.add_unary_handler(MANIFEST_CALL, nonsense)
            with pytest.raises(Violation, match=f"{a.peer_id} answered {MANIFEST_CALL} with something that cannot be"):
                await fetch_manifest(b, a.peer_id)

    run(scenario)


def test_an_answer_that_arrives_as_its_call_is_cancelled_does_not_break_later_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            asked, may_answer = asyncio.Event(), asyncio.Event()

            async def answer(caller: str, request: bytes) -> bytes:
                asked.set()
                await may_answer.wait()
                return b"late"

            await a.serve("late", answer)
            await serve_manifest(a, b"the manifest")
            calling = asyncio.create_task(b.call(a.peer_id, "late", b"", 30.0))
            await asked.wait()
            [answering] = a.p2p._client.control._handler_tasks.values()
            may_answer.set()
            await answering
            await asyncio.sleep(0)  # a's answer is written
            reader = b.p2p._client.control._read_task.get_coro().cr_frame.f_locals["reader"]
            select.select(
                [reader._transport.get_extra_info("socket")], [], [], 10.0
            )  # blocks the loop until the answer has arrived
            calling.cancel()
            with suppress(asyncio.CancelledError):
                await calling
            assert (await fetch_manifest(b, a.peer_id))[0] == b"the manifest"

    run(scenario)


def test_a_peer_that_reuses_a_call_id_does_not_break_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivemind.p2p.p2p_daemon_bindings import control

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            asked = {"never": asyncio.Event(), "mine": asyncio.Event()}

            async def never(name: str, caller: str, request: bytes) -> bytes:
                asked[name].set()
                await asyncio.Event().wait()
                return b""

            await b.serve("never", partial(never, "never"))
            await a.serve("mine", partial(never, "mine"))
            await serve_manifest(a, b"the manifest")
            calling = asyncio.create_task(a.call(b.peer_id, "never", b"", 30.0))
            await asked["never"].wait()
            liar = b.p2p._client.control
            [call_id] = liar._handler_tasks
            with monkeypatch.context() as patch:
                patch.setattr(control, "uuid4", lambda: call_id)
                hanging = asyncio.create_task(liar.call_unary_handler(a.p2p.peer_id, "mine", b""))
                await asked["mine"].wait()
                await fetch_manifest(b, a.peer_id)
            await b.p2p._client.disconnect(a.p2p.peer_id)
            with pytest.raises((Unreachable, Violation)):
                await calling
            hanging.cancel()
            await a.dial(JoinAddress.parse(b.join_addresses[0]))
            await serve_manifest(b, b"another")
            assert (await fetch_manifest(a, b.peer_id))[0] == b"another"

    run(scenario)


def test_a_cancelled_call_leaves_nothing_at_the_callee(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            asked, ended = asyncio.Event(), asyncio.Event()

            async def never(caller: str, request: bytes) -> bytes:
                asked.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()
                return b""

            await a.serve("never", never)
            calling = asyncio.create_task(b.call(a.peer_id, "never", b"", 30.0))
            await asked.wait()
            calling.cancel()
            await ended.wait()
            await asyncio.sleep(0)  # its task ends
            assert not a.p2p._client.control._handler_tasks

    run(scenario)


def test_a_joined_peer_dials_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[tuple[str, str]] = []

    async def probe(address: str, peer_id: str) -> str | None:
        dialled.append((address, peer_id))
        if address.endswith(":2"):
            raise Unreachable("refused")
        if address.endswith(":4"):
            await asyncio.Event().wait()
        return None if address.endswith(":1") else "another peer is there"

    async def scenario() -> None:
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            monkeypatch.setattr("noloco_p2p.io.dht.join_handshake.DIALS_PER_MINUTE", 4)
            await serve_dial_back(a, probe)
            assert await ask_dial_back(b, a.peer_id, "127.0.0.1:1") is None
            assert await ask_dial_back(b, a.peer_id, "127.0.0.1:2") == "refused"
            assert await ask_dial_back(b, a.peer_id, "127.0.0.1:3") == "another peer is there"
            monkeypatch.setattr("noloco_p2p.io.dht.join_handshake.PROBE_TIMEOUT_S", 0.1)
            assert await ask_dial_back(b, a.peer_id, "127.0.0.1:4") == "no answer within 0.1 s"
            assert dialled == [(f"127.0.0.1:{port}", b.peer_id) for port in (1, 2, 3, 4)]
            for nonsense in (b"nonsense", b"\xff:1"):
                with pytest.raises(Declined, match="not of the form host:port"):
                    await b.call(a.peer_id, DIAL_BACK_CALL, nonsense, 5.0)
            with pytest.raises(Busy):
                await ask_dial_back(b, a.peer_id, "127.0.0.1:1")
            assert len(dialled) == 4

    run(scenario)


def test_only_sockets_without_a_listener_are_swept(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as live:
        dead.bind(str(tmp_path / "hivemind-p2pd-dead.sock"))
        live.bind(str(tmp_path / "hivemind-p2pd-live.sock"))
        live.listen()
        (tmp_path / "other.sock").touch()
        before = sorted(tmp_path.iterdir())
        sweep_stale_sockets(tmp_path, SOCKETS_MIN_AGE_S)
        assert sorted(tmp_path.iterdir()) == before
        sweep_stale_sockets(tmp_path, 0.0)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hivemind-p2pd-live.sock", "other.sock"]
