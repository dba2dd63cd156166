"""The relay with real sockets: which lines a connection uses, its ends, back-pressure, and the process."""

import asyncio
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import uvloop
from machine import at_most, in_time
from processes import wait_until

from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.launch import relay_process
from noloco_p2p.launch.line_spec import LineSpec
from noloco_p2p.launch.node_process import NodeProcess
from noloco_p2p.launch.relay import Relay
from noloco_p2p.launch.relay_process import RelayProcess

HOSTS = ("127.1.9.1", "127.1.9.2", "127.1.9.3")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LONGEST_S = 15.0


class Homes:
    """A relay, servers on the addresses behind it, and connections through it."""

    def __init__(self, relay: Relay, doors: list[int]) -> None:
        self.relay = relay
        self.doors = dict(zip(HOSTS, doors, strict=True))
        self.servers: list[asyncio.Server] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, host: str, handler: Serve) -> int:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.writers.append(writer)
            try:
                await handler(reader, writer)
            except ConnectionError:
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(handle, host, 0)
        self.servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def ask(self, caller: str, request: bytes) -> tuple[bytes, Streams]:
        """The first line of the answer to a request on the caller's port, and the connection."""
        reader, writer = await asyncio.open_connection(caller, self.doors[caller])
        self.writers.append(writer)
        writer.write(request)
        return (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0], (reader, writer)

    async def connect(self, caller: str, host: str, port: int) -> Streams:
        answer, streams = await self.ask(caller, f"CONNECT {host}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert answer == b"HTTP/1.1 200 OK"
        return streams


@asynccontextmanager
async def homes(link: str) -> AsyncIterator[Homes]:
    relay = Relay(LineSpec.parse(link), HOSTS, random.Random(0))
    found = Homes(relay, await relay.open())
    try:
        yield found
    finally:
        for writer in found.writers:
            writer.close()
        for server in found.servers:
            server.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    bugs: list[dict[str, object]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
        async with asyncio.timeout(at_most(LONGEST_S)):
            await test()

    uvloop.run(bounded())
    assert bugs == []


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 18):
        pass


def test_a_transfer_has_the_latency_and_is_charged_to_both_lines() -> None:
    async def test() -> None:
        async with homes("100mbit,30ms") as found:
            port = await found.serve(HOSTS[1], echo)
            began = time.perf_counter()
            reader, writer = await found.connect(HOSTS[0], HOSTS[1], port)
            assert time.perf_counter() - began > 0.059
            took = []
            for _ in range(5):
                began = time.perf_counter()
                writer.write(b"ping" * 10)
                assert await reader.readexactly(40) == b"ping" * 10
                took.append(time.perf_counter() - began)
            assert min(took) > 0.0585
            assert in_time(min(took), 0.066)
            lines = found.relay.counts()["lines"]
            assert lines[HOSTS[0]] == lines[HOSTS[1]] == {"sent": 200, "received": 200}
            assert lines[HOSTS[2]] == {"sent": 0, "received": 0}

    run(test)


@pytest.mark.parametrize(("link", "mbit"), [("40/20mbit", 20), ("20/40mbit,10ms", 20), ("200mbit,5ms", 200)])
def test_the_rate_is_that_of_the_slower_line(link: str, mbit: int) -> None:
    async def test() -> None:
        async with homes(link) as found:
            arrived: list[tuple[float, int]] = []
            over = asyncio.Event()

            async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                total = 0
                while data := await reader.read(1 << 18):
                    total += len(data)
                    arrived.append((time.perf_counter(), total))
                over.set()

            _, writer = await found.connect(HOSTS[0], HOSTS[1], await found.serve(HOSTS[1], count))
            sent_at = time.perf_counter()
            writer.write(bytes(int(mbit * 1e6 / 8 * 1.5)))
            writer.write_eof()
            await over.wait()
            begin = next(at for at in arrived if at[1] > mbit * 1e6 / 8 * 0.3)
            took_s, nbytes = arrived[-1][0] - begin[0], arrived[-1][1] - begin[1]
            assert arrived[-1][1] / (arrived[-1][0] - sent_at) < 1.01 * mbit * 1e6 / 8, "the rate is never exceeded"
            assert in_time(took_s, 1.05 * nbytes / (mbit * 1e6 / 8))

    run(test)


def test_one_half_of_a_connection_can_close_while_the_other_continues() -> None:
    async def test() -> None:
        async with homes("100mbit,10ms") as found:

            async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                whole = await reader.read()
                writer.write(whole[::-1] * 3)
                await writer.drain()

            reader, writer = await found.connect(HOSTS[0], HOSTS[1], await found.serve(HOSTS[1], answer_at_the_end))
            sent = random.Random(1).randbytes(300_000)
            writer.write(sent)
            writer.write_eof()
            assert await reader.read() == sent[::-1] * 3

    run(test)


@pytest.mark.parametrize("end", ["caller", "callee"])
def test_a_killed_end_closes_the_other(end: str) -> None:
    """Its socket is reset, as with a killed process that has unread data; what it had sent still arrives."""

    async def test() -> None:
        async with homes("100mbit,10ms") as found:
            served: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
            over = asyncio.Event()

            async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                served.set_result((reader, writer))
                await over.wait()

            mine = await found.connect(HOSTS[0], HOSTS[1], await found.serve(HOSTS[1], keep))
            both = [mine, await served]
            dies, lives = both if end == "caller" else reversed(both)
            dies[1].write(bytes(50_000))
            await dies[1].drain()
            linger = struct.pack("ii", 1, 0)
            dies[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await asyncio.sleep(0.1)
            dies[1].transport.abort()
            assert len(await lives[0].read()) == 50_000
            # What the other end still sends is discarded without harm.
            lives[1].write(bytes(1_000_000))
            lives[1].close()
            over.set()
            await asyncio.sleep(0.1)

    run(test)


def test_a_reader_that_does_not_read_stops_only_its_own_writer() -> None:
    async def test() -> None:
        async with homes("200mbit,5ms") as found:
            wake, over = asyncio.Event(), asyncio.Event()
            swallowed = 0

            async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                nonlocal swallowed
                # Otherwise the kernel enlarges the buffer, on some machines beyond what is written here.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                await wake.wait()
                while data := await reader.read(1 << 18):
                    swallowed += len(data)
                over.set()

            stuck = await found.connect(HOSTS[0], HOSTS[1], await found.serve(HOSTS[1], late))
            stuck[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            stuck[1].transport.set_write_buffer_limits(high=0)
            free = await found.connect(HOSTS[0], HOSTS[1], await found.serve(HOSTS[1], echo))
            written = 0
            try:
                while True:
                    stuck[1].write(bytes(100_000))
                    async with asyncio.timeout(1.0):
                        await stuck[1].drain()
                    written += 100_000
            except TimeoutError:
                pass
            assert written < 8_000_000
            free[1].write(bytes(500_000))
            assert len(await free[0].readexactly(500_000)) == 500_000
            wake.set()
            stuck[1].close()
            await over.wait()
            assert swallowed >= written

    run(test)


def test_many_parallel_connections_carry_their_data_intact() -> None:
    async def test() -> None:
        async with homes("500mbit,5ms,1ms") as found:
            ports = {host: await found.serve(host, echo) for host in HOSTS}

            async def call(number: int) -> None:
                caller, callee = HOSTS[number % 3], HOSTS[(number + 1) % 3]
                reader, writer = await found.connect(caller, callee, ports[callee])
                data = random.Random(number).randbytes(1 + 700 * number)
                writer.write(data)
                writer.write_eof()
                assert await reader.read() == data

            await asyncio.gather(*(call(number) for number in range(120)))

    run(test)


def test_an_unreachable_target_is_refused() -> None:
    async def test() -> None:
        async with homes("100mbit,20ms") as found:
            with socket.socket() as unused:
                unused.bind((HOSTS[1], 0))
                port = unused.getsockname()[1]
            for request, status in (
                (f"CONNECT {HOSTS[1]}:{port} HTTP/1.1\r\n\r\n", b"502"),
                (f"CONNECT {HOSTS[1]}:65536 HTTP/1.1\r\n\r\n", b"400"),
                ("CONNECT 127.0.0.1:22 HTTP/1.1\r\n\r\n", b"403"),
                ("GET / HTTP/1.1\r\n\r\n", b"400"),
                ("x" * 5000, b"400"),
            ):
                answer, (reader, _) = await found.ask(HOSTS[0], request.encode())
                assert answer.split()[1] == status
                assert await reader.read() == b""

    run(test)


# --- the process ------------------------------------------------------------------------------------------------------


def test_the_relay_process_counts_bytes_and_ends_with_its_input(tmp_path: Path) -> None:
    relay = RelayProcess("100mbit,1ms", ["0-0", "1-0"], seed=0)
    one, other = NodeProcess(tmp_path, 0, 0), NodeProcess(tmp_path, 1, 0)
    relay.start((one, other))
    try:
        assert relay.running
        assert relay.counts()["lines"] == {name: {"sent": 0, "received": 0} for name in ("0-0", "1-0")}
        assert one.host != other.host
        assert one.environment["grpc_proxy"].startswith(f"http://{one.host}:")
    finally:
        relay.close()
    assert not relay.running


def test_the_relay_uses_little_cpu(tmp_path: Path) -> None:
    """40 MB over lines of 1 Gbit/s: about 1.5 CPU seconds per GB, so a core could carry several times as much."""
    relay = RelayProcess("1gbit,5ms", ["0-0", "1-0"], seed=0)
    one, other = NodeProcess(tmp_path, 0, 0), NodeProcess(tmp_path, 1, 0)
    relay.start((one, other))
    try:
        began_s, nbytes = relay.counts()["cpu_s"], 40_000_000
        with socket.create_server((other.host, 0)) as listening:
            port = int(one.environment["grpc_proxy"].rpartition(":")[2])
            with socket.create_connection((one.host, port)) as sending:
                sending.sendall(f"CONNECT {other.host}:{listening.getsockname()[1]} HTTP/1.1\r\n\r\n".encode())
                receiving, _ = listening.accept()
                with receiving, ThreadPoolExecutor(1) as pool:
                    assert b"200" in sending.recv(100)
                    whole = pool.submit(lambda: sum(iter(lambda: len(receiving.recv(1 << 18)), 0)))
                    sending.sendall(bytes(nbytes))
                    sending.shutdown(socket.SHUT_WR)
                    assert whole.result() == nbytes
        assert in_time(relay.counts()["cpu_s"] - began_s, 5.0 * nbytes / 1e9)
        assert relay.counts()["lines"]["1-0"] == {"sent": 0, "received": nbytes}
    finally:
        relay.close()


def test_a_dead_relay_is_reported() -> None:
    relay = RelayProcess("100mbit,1ms", ["0-0"], seed=0)
    relay.start(())
    try:
        assert relay._process is not None
        relay._process.kill()
        wait_until(lambda: not relay.running, "its end")
        with pytest.raises(LocalError, match="relay"):
            relay.counts()
    finally:
        relay.close()


def test_a_relay_that_cannot_listen_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_process, "FIRST_HOST", IPv4Address("192.0.2.1"))
    relay = RelayProcess("100mbit,1ms", ["0-0"], seed=0)
    with pytest.raises(LocalError, match="does not answer"):
        relay.start(())
    assert not relay.running


def test_a_malformed_link_starts_no_relay() -> None:
    with pytest.raises(ConfigError, match="--link 5 apples"):
        RelayProcess("5 apples", ["0-0"], seed=0)


def test_the_relay_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    script = (
        "import time; from noloco_p2p.launch.relay_process import RelayProcess\n"
        "relay = RelayProcess('100mbit', ['0-0'], 0); relay.start(())\n"
        "print(relay._process.pid, flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text(), "its end")
