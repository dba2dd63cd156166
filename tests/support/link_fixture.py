"""A TCP forwarder between two transports whose connections a test cuts or makes half-open."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

from transport_fixture import advert

from noloco_p2p.core.messages import Advert

Fault = Literal["cut", "swallow"]
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

    Connections reach `port` from these `hosts` in turn.
    """

    def __init__(self, port: int, *faults: tuple[int, Fault], hosts: Sequence[str] = ("127.0.0.1",)) -> None:
        self.wires: list[Wire] = []
        self.passed: tuple[list[Passage], list[Passage]] = [], []
        """What has arrived from connecting peers, and from `port`."""
        self.faulty = asyncio.Event()
        """Set once a fault has happened."""
        self._port = port
        self._faults = faults
        self._hosts = hosts
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
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
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=source)
        except ConnectionRefusedError:
            writer.transport.abort()
            return
        fault = self._faults[len(self.wires)] if len(self.wires) < len(self._faults) else None
        wire = Wire(writer, far_writer)
        self.wires.append(wire)
        self._tasks.append(asyncio.create_task(self._pump(reader, far_writer, wire, None, self.passed[0])))
        self._tasks.append(asyncio.create_task(self._pump(far_reader, writer, wire, fault, self.passed[1])))

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        wire: Wire,
        fault: tuple[int, Fault] | None,
        seen: list[Passage],
    ) -> None:
        passed = 0
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                passed += len(data)
                seen.append((asyncio.get_running_loop().time(), len(data)))
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
