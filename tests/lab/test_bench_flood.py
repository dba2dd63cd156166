"""`noloco bench flood`: every kind of flood reaches the node, and rates are over the time that was measured."""

import asyncio
import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from transport_fixture import Node, hang, run, soon

from noloco_p2p.io.transport import sockets
from noloco_p2p.io.transport.callers import CALLS
from noloco_p2p.io.transport.connection_limit import ConnectionLimit
from noloco_p2p.lab.bench import flood, floods, pipeline
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


def test_rates_are_right_however_long_it_takes_to_ask_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A victim and an attacker that keep a core busy all the time, and a Busy every second."""
    now_s = 0.0

    def spend(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def sample_nodes(fleet: object) -> dict[str, Any]:
        spend(5.0)
        metrics = SimpleNamespace(total=lambda *_, now_s=now_s, **__: now_s)
        return {"0-0": SimpleNamespace(metrics=metrics)}

    monkeypatch.setattr(flood, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=spend))
    monkeypatch.setattr(flood, "_cpu_s", lambda pid: now_s)
    monkeypatch.setattr(pipeline, "sample_nodes", sample_nodes)
    monkeypatch.setattr(pipeline, "figures", lambda begin, end: {"tokens_per_s": 1.0})
    fleet: Any = None
    victim: Any = SimpleNamespace(pid=os.getpid())
    found = flood._window(fleet, victim, 20.0, 1)
    assert (found["victim_cores"], found["attacker_cores"], found["busy_per_s"]) == (1.0, 1.0, 1.0)
