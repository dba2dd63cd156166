"""Whom a node blames for many results in a row that are not finite: itself, or those that they came from."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert, PeerId, TensorSpec
from noloco_p2p.errors import LocalError
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.finite_watch import LONGEST_STREAK, FiniteWatch
from noloco_p2p.node.state import NodeState

HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))
ROW = [False] * LONGEST_STREAK


@pytest.mark.parametrize(
    ("sound", "finite", "peers", "stops", "blames", "aside"),
    [
        (True, ROW, ["b", "c"], False, 1, {"b", "c"}),
        (True, ROW, ["b"], False, 1, {"b"}),
        (True, ROW, ["me", "b"], False, 1, {"b"}),
        (True, ROW, ["b", "c", "d"], False, 1, set()),
        (True, ROW, ["me"], True, 0, set()),
        (False, ROW, ["b", "c"], True, 0, set()),
        (False, ROW[1:], ["b", "c"], False, 0, set()),
        (False, [*ROW[1:], True, *ROW[1:]], ["me"], False, 0, set()),
        (True, [*ROW, *ROW[1:]], ["b"], False, 1, {"b"}),
        (True, [False, True] * LONGEST_STREAK, ["b", "c"], False, 1, {"b"}),
        (True, [False, True] * (2 * LONGEST_STREAK - 1), ["b", "c"], False, 1, {"b"}),
        (False, [False, True] * LONGEST_STREAK, ["b", "c"], True, 0, set()),
        (True, [True, False, True, False, False, True] * (LONGEST_STREAK // 2), ["c", "b", "d"], False, 1, {"b"}),
        (True, [False, True] * (LONGEST_STREAK - 1), ["b", "c"], False, 0, set()),
        (True, [*ROW[1:], True] * 3, ["b"], False, 0, set()),
        (True, [False, True] * LONGEST_STREAK, ["an origin", "another"], False, 0, set()),
    ],
)
def test_whose_fault_it_is(
    sound: bool, finite: Sequence[bool], peers: Sequence[PeerId], stops: bool, blames: int, aside: set[PeerId]
) -> None:
    """`peers`: those that they came from or went through, in turn."""
    events: list[str] = []

    async def is_sound() -> bool:
        return sound

    async def scenario() -> None:
        manifest = RunManifest()
        me = Advert("me", manifest.run_id, 0, (), state="training")
        telemetry = SimpleNamespace(event=lambda kind, **_: events.append(kind))
        node = NodeState(me, manifest, NodeConfig(), cast(Any, telemetry))
        node.hold(cast(Any, SimpleNamespace(state=SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN), is_sound=is_sound)))
        swarm = Membership(node)
        swarm.members.update([Advert(peer, manifest.run_id, 1, (), state="training") for peer in "bcd"], now=node.now())
        swarm.fix_view()
        watch = FiniteWatch(node, swarm)
        for number, one in enumerate(finite):
            await watch.ended(one, peers[number % len(peers)])
        assert isinstance(node.error, LocalError) == stops
        for peer in "bcd":
            swarm.answered(peer)  # as those do whose microbatches are still under way
        assert {peer for peer in "bcd" if swarm.members.is_aside(peer, now=node.now() + 59.0)} == aside
        assert not any(swarm.members.is_aside(peer, now=node.now() + 61.0) for peer in "bcd")
        assert events.count("distrusted") == events.count("warning") == blames

    asyncio.run(scenario())
