"""`noloco bench flood`: every kind of flood reaches the node."""

import asyncio
from contextlib import suppress

import pytest
from transport_fixture import Node, hang, run, soon

from noloco_p2p.io.transport import sockets
from noloco_p2p.io.transport.callers import CALLS
from noloco_p2p.io.transport.connection_limit import ConnectionLimit
from noloco_p2p.lab.bench import floods
from noloco_p2p.lab.bench.floods import STRANGER, Stranger
from noloco_p2p.lab.bench.transport import FAR, MIB, PEER, RUN, make_transport

pytestmark = pytest.mark.skipif(not sockets.OPEN_FILES.is_dir(), reason="Linux only")


@pytest.mark.parametrize("kind", sorted(floods.KINDS))
def test_a_flood_reaches_the_node(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floods, "CONNECTIONS", 5)
    monkeypatch.setattr(floods, "STREAMS", 3)

    async def scenario() -> None:
        node, transport = Node(hang), make_transport(FAR, MIB)
        await transport.serve(node)
        limit, held = ConnectionLimit(transport.port), transport._servicer.callers._held

        def has_arrived() -> bool:
            here = sum(end[0] == STRANGER for end in limit.accepted())
            calls = held[CALLS.what, STRANGER]
            return {
                "silent": here == 5,
                "connections": here == 5,
                "handshakes": here > 0,
                "streams": calls == 3 and not node.calls,
                "bodies": len(node.calls) == 3,
            }[kind]

        arrived, stranger = False, Stranger(f"127.0.0.1:{transport.port}", PEER, RUN)
        flood = asyncio.create_task(floods.KINDS[kind](stranger))
        for _ in range(6000):
            if flood.done() or (arrived := has_arrived() and stranger.complete.is_set()):
                break
            await asyncio.sleep(0.01)
        flood.cancel()
        with suppress(asyncio.CancelledError):
            await soon(flood)
        await transport.close()
        assert arrived

    run(scenario())
