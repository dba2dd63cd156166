"""A replica's state to transfer, a donor that lends it, and two transports connected by a link that can fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from link_fixture import Fault, Proxy
from transport_fixture import Node, Pair, hang, pair, tensor

from noloco_p2p.config import OuterSettings, RunManifest
from noloco_p2p.core.messages import MicrobatchId, PeerId, ReplicaState
from noloco_p2p.errors import Declined

MIB = 1 << 20
TENSORS = tuple(
    tensor(f"{kind}/{name}", "float32", shape, seed=len(kind))
    for kind in RunManifest(outer=OuterSettings(rule="noloco")).state_kinds
    for name, shape in (("embed", (3, MIB // 3)), ("norm", (3,)), ("none", (0, 4)), ("head", (MIB // 4, 1)))
)
"""25 MiB."""
SPECS = tuple(t.spec for t in TENSORS)
NUMBER = (1 << 64) - 5
SPENT = tuple(MicrobatchId("origin", 2**63 + at, at) for at in range(3))
STATE = ReplicaState("B", 1, 7, 70.25, 66, 65, TENSORS, NUMBER, SPENT, fresh_round=3)
LONG = replace(STATE, tensors=(tensor("slow/all", "uint8", (16 * MIB,)), *TENSORS))
"""Begins with a tensor of many chunks, so that a cut falls within it."""
LONG_SPECS = tuple(t.spec for t in LONG.tensors)


class Donor:
    """Lends its one copy, and records which caller asked for which copy; `again` is lent to callers that resume."""

    def __init__(self, state: ReplicaState = STATE, again: ReplicaState | None = STATE) -> None:
        self.state = state
        self.again = again
        self.asked: list[int | None] = []
        self.lent = 0
        self.returned = asyncio.Event()

    @asynccontextmanager
    async def lend(self, caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
        self.asked.append(number)
        if number is not None and self.again is None:
            raise Declined("that copy is gone")
        self.lent += 1
        try:
            yield self.again if number is not None and self.again else self.state
        finally:
            self.lent -= 1
            self.returned.set()


@asynccontextmanager
async def linked(donor: Donor, *faults: tuple[int, Fault]) -> AsyncIterator[tuple[Pair, Proxy]]:
    async with pair(Node(hang, lend=donor.lend)) as both, Proxy(both.b.port, *faults) as proxy:
        try:
            yield both, proxy
        finally:
            await both.a.close()
