"""A TCP forwarder between two transports whose connections a test cuts or makes half-open."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

from transport_fixture import advert

from noloco_p2p.core.messages import Advert

Fault = Literal["cut", "swallow"]
SEGMENT_BYTES = 1400
Passage = tuple[float, int]
"""When, on the loop's clock, and how many bytes."""


class Wire:
    """One connection through the forwarder."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.ends = (near, far)
        self.swallows = False
        """Whether it is half-open: whatever either end sends is acknowledged and lost."""

    def cut(self) -> None:
        for end in self.ends:
            end.transport.abort()


class Proxy:
    """Forwards to `port`. The n-th connection meets the n-th fault, after its number of bytes from `port`; later
    connections meet none.

    Connections reach `port` from these `hosts` in turn. With `bytes_per_s`, all of them together carry no more than
    that in each direction.
    """

    def __init__(
        self,
        port: int,
        *faults: tuple[int, Fault],
        hosts: Sequence[str] = ("127.0.0.1",),
        bytes_per_s: float | None = None,
    ) -> None:
        self.wires: list[Wire] = []
        self.passed: tuple[list[Passage], list[Passage]] = [], []
        """What has arrived from connecting peers, and from `port`."""
        self.faulty = asyncio.Event()
        """Set once a fault has happened."""
        self._port = port
        self._faults = faults
        self._hosts = hosts
        self._bytes_per_s = bytes_per_s
        self._free_at = [0.0, 0.0]
        """By direction, as in `passed`: when everything that has been read will have passed."""
        self._tasks: list[asyncio.Task[None]] = []

    def _socket(self) -> socket.socket:
        """With `bytes_per_s`, its buffer is small, and its segments are those of a network."""
        made = socket.socket()
        made.setblocking(False)
        if self._bytes_per_s is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        return made

    async def __aenter__(self) -> Self:
        listening = self._socket()
        listening.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._accept, sock=listening)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for wire in self.wires:
            wire.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def peer(self) -> Advert:
        """The peer behind the proxy."""
        return advert(f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}")

    def swallow(self) -> None:
        """Make all connections half-open from now on."""
        self.faulty.set()
        for wire in self.wires:
            wire.swallows = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = self._hosts[len(self.wires) % len(self._hosts)], 0
        far = self._socket()
        far.bind(source)
        try:
            await asyncio.get_running_loop().sock_connect(far, ("127.0.0.1", self._port))
            far_reader, far_writer = await asyncio.open_connection(sock=far)
        except ConnectionRefusedError:
            far.close()
            writer.transport.abort()
            return
        fault = self._faults[len(self.wires)] if len(self.wires) < len(self._faults) else None
        wire = Wire(writer, far_writer)
        self.wires.append(wire)
        self._tasks.append(asyncio.create_task(self._pump(reader, far_writer, wire, None, 0)))
        self._tasks.append(asyncio.create_task(self._pump(far_reader, writer, wire, fault, 1)))

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        wire: Wire,
        fault: tuple[int, Fault] | None,
        way: int,
    ) -> None:
        passed, clock = 0, asyncio.get_running_loop().time
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16 if self._bytes_per_s is None else 4 * SEGMENT_BYTES):
                passed += len(data)
                if self._bytes_per_s is not None:
                    # Whoever comes next waits until this has passed.
                    self._free_at[way] = max(clock(), self._free_at[way]) + len(data) / self._bytes_per_s
                    await asyncio.sleep(self._free_at[way] - clock())
                self.passed[way].append((clock(), len(data)))
                if fault is not None and passed > fault[0]:
                    self.faulty.set()
                    if fault[1] == "cut":
                        break
                    wire.swallows = True
                if not wire.swallows:
                    writer.write(data)
                    await writer.drain()
        if not wire.swallows:
            wire.cut()
