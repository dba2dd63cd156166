"""The process that puts emulated lines between the nodes on one machine: `python -m noloco_p2p.launch.relay`.

Each node has a *door*, a listening port of this process, and uses it as gRPC's HTTP proxy (`grpc_proxy`). So every
connection that a node opens to a peer arrives at its door with `CONNECT host:port`. The door tells whose line up the
connection uses, and the host whose line down, because every node has its own loopback address. `line_model` decides
what moves on and when; this module has the sockets.

Standard input: one line of JSON, `{"link": …, "hosts": […], "seed": …}`, then one line for each request for the counts.
The process ends when it closes. Standard output: `{"ports": […]}`, then the counts.
"""

import asyncio
import json
import math
import random
import re
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import uvloop

from noloco_p2p.launch.line_model import Line, LineModel, OneWay
from noloco_p2p.launch.line_spec import LineSpec

REQUEST = re.compile(rb"CONNECT (?P<host>[\d.]+):(?P<port>\d{1,5}) HTTP/1\.[01]\r\n")
LONGEST_HEAD_BYTES = 4096
CONNECT_S = 5.0
RECEIVE_BUFFER_BYTES = 1 << 16
"""Receive buffer of each socket, which is kept small because the model does not see what waits there. Linux doubles it.
"""
WRITE_BUFFER_BYTES = 1 << 18
TICK_S = 0.001
"""Everything that is due within a tick happens at once, because a wake-up costs as much as many pieces."""


class Relay:
    """The lines of all nodes, and the connections over them. Bound to one event loop."""

    def __init__(self, link: LineSpec, hosts: Sequence[str], rng: random.Random) -> None:
        self.lines = {host: (Line(link.up_bytes_per_s), Line(link.down_bytes_per_s)) for host in hosts}
        """(up, down) by the node's address."""
        self._model = LineModel(link.latency_s, link.spread, rng)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._connecting: set[asyncio.Task[None]] = set()

    async def open(self) -> list[int]:
        """Open every node's door at its address. Returns the ports, in the order of the hosts. Raises OSError."""
        ports = []
        for host in self.lines:
            listening = new_socket()
            listening.bind((host, 0))
            ports.append(int(listening.getsockname()[1]))
            await self._loop.create_server(lambda: CallerEnd(self), sock=listening)
        return ports

    def counts(self) -> dict[str, Any]:
        """Bytes that each node has sent and received over its line, and the CPU seconds of this process."""
        lines = {
            host: {"sent": up.carried_bytes, "received": down.carried_bytes} for host, (up, down) in self.lines.items()
        }
        return {"lines": lines, "cpu_s": time.process_time()}

    def send(self, flow: OneWay, data: bytes) -> None:
        """One end has sent data; empty data: it has finished sending."""
        now = self._loop.time()
        self._model.advance(now)
        self._model.send(flow, data, now)
        self._set_timer()

    def stall(self, flow: OneWay, stalled: bool) -> None:
        """The receiving end stops accepting data, or accepts data again."""
        self._model.stall(flow, stalled, self._loop.time())
        self._set_timer()

    def connect(self, caller: "CallerEnd", host: str, port: int) -> None:
        """Start to connect a caller to a node; the caller gets the answer."""
        task = self._loop.create_task(self._connect(caller, host, port))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, caller: "CallerEnd", host: str, port: int) -> None:
        if host not in self.lines:
            caller.refuse("403 Forbidden")
            return
        # One round trip, for the handshake of TCP.
        await asyncio.sleep(2 * self._model.latency_s)
        callee = new_socket()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.sock_connect(callee, (host, port))
            await self._loop.create_connection(lambda: CalleeEnd(self, caller, host), sock=callee)
        except (OSError, TimeoutError):
            callee.close()
            caller.refuse("502 Bad Gateway")

    def _set_timer(self) -> None:
        at = self._model.next_at
        if at is None or at >= self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = max(at, self._loop.time() + TICK_S)
        self._timer = self._loop.call_at(self._wakes_at, self._wake)

    def _wake(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        # The loop rounds its timers to milliseconds. Running events half a millisecond early avoids a second wake-up.
        self._model.advance(self._loop.time() + TICK_S / 2)
        self._set_timer()


class SocketEnd(asyncio.Protocol):
    """The socket at one end of a connection. `join` connects it to the other end."""

    transport: asyncio.Transport

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.lost = False
        self._out: OneWay | None = None
        """The direction from here to the other end."""
        self._into: OneWay | None = None
        """The direction from the other end to here."""
        self._other: SocketEnd
        self._finished = False
        """This end sends no more."""
        self._ended = False
        """This end has received the end of the stream."""

    def join(self, other: "SocketEnd", there: OneWay, back: OneWay) -> None:
        """Connect to the other end. `there` leads from here to the other end, `back` from there to here."""
        self._other, self._out, self._into = other, there, back

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own transports are not subclasses of it
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._out is not None:
            self.relay.send(self._out, data)

    def eof_received(self) -> bool:
        """See `asyncio.Protocol`. The other direction stays open."""
        self._finish()
        if self._ended or self._out is None:
            self.transport.close()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.lost = True
        if self._into is not None:
            self._into.end()
            if self._finished and self._other._ended:
                self._other.transport.close()
        self._finish()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        if self._into is not None:
            self.relay.stall(self._into, True)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        if self._into is not None:
            self.relay.stall(self._into, False)

    def deliver(self, piece: memoryview) -> None:
        """Write data that came over the lines; an empty piece is the end of the stream."""
        if self.transport.is_closing():
            return
        if piece:
            self.transport.write(piece)
            return
        self._ended = True
        if self._finished or self._other.lost:
            self.transport.close()
        else:
            self.transport.write_eof()

    def hold(self, held: bool) -> None:
        """Stop reading for now, or continue."""
        if not self.transport.is_closing():
            (self.transport.pause_reading if held else self.transport.resume_reading)()

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            if self._out is not None:
                self.relay.send(self._out, b"")


class CallerEnd(SocketEnd):
    """The end at a door: it reads which node the caller wants."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self._head = b""
        self._asked = False

    @property
    def host(self) -> str:
        """The caller's address, which is that of its door."""
        return str(self.transport.get_extra_info("sockname")[0])

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. A caller sends nothing else before it has the answer to its request."""
        if self._out is not None:
            self.relay.send(self._out, data)
            return
        self._head += data
        request = REQUEST.match(self._head)
        if self._asked or len(self._head) > LONGEST_HEAD_BYTES:
            self.refuse("400 Bad Request")
        elif self._head.endswith(b"\r\n\r\n"):
            self._asked = True
            if request is None or int(request["port"]) > 65535:  # uvloop would connect to port % 65536
                self.refuse("400 Bad Request")
            else:
                self.relay.connect(self, request["host"].decode(), int(request["port"]))

    def refuse(self, status: str) -> None:
        """Answer with this HTTP status, and close."""
        if not self.transport.is_closing():
            self.transport.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
            self.transport.close()


class CalleeEnd(SocketEnd):
    """The end at the node that the caller wanted."""

    def __init__(self, relay: Relay, caller: CallerEnd, host: str) -> None:
        super().__init__(relay)
        self._caller, self._host = caller, host

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        caller, lines = self._caller, self.relay.lines
        if caller.transport.is_closing():
            transport.close()
            return
        (caller_up, caller_down), (my_up, my_down) = lines[caller.host], lines[self._host]
        there = OneWay((caller_up, my_down), self.deliver, caller.hold)
        back = OneWay((my_up, caller_down), caller.deliver, self.hold)
        caller.join(self, there, back)
        self.join(caller, back, there)
        caller.transport.write(b"HTTP/1.1 200 OK\r\n\r\n")


def new_socket() -> socket.socket:
    """A non-blocking socket with a small receive buffer."""
    made = socket.socket()
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    return made


async def serve(link: str, hosts: Sequence[str], seed: int) -> None:
    """Run the relay until standard input closes. Raises ConfigError, OSError."""
    relay = Relay(LineSpec.parse(link), hosts, random.Random(seed))
    _say({"ports": await relay.open()})
    asks = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(asks), sys.stdin)
    while await asks.readline():
        _say(relay.counts())


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    # Unbuffered, so that whatever follows this line is left for the event loop.
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:
        request = json.loads(unbuffered.readline())
    uvloop.run(serve(**request))
