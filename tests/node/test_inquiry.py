"""Which peers a node asks when there are more than it may ask."""

from types import SimpleNamespace
from typing import cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.exchanges import PROBES
from noloco_p2p.core.members import Members
from noloco_p2p.core.messages import Advert
from noloco_p2p.node.inquiry import Inquiry
from noloco_p2p.node.state import NodeState

MANIFEST = RunManifest()
PEERS = [Advert(f"peer-{i:04d}", MANIFEST.run_id, 0, ("127.0.0.1:1",)) for i in range(2048)]


def inquiry(me: str) -> Inquiry:
    node = SimpleNamespace(config=NodeConfig(), manifest=MANIFEST, me=me, now=lambda: 0.0)
    return Inquiry(cast(NodeState, node), Members(me, 30.0))


def test_the_few_that_are_asked_are_the_same_every_time_and_others_for_another_node() -> None:
    chosen = inquiry("me").few(PEERS)
    assert len(set(chosen)) == PROBES
    assert inquiry("me").few(PEERS[::-1]) == chosen
    assert inquiry("me").few(sorted({*PEERS[1000:], *chosen}, key=lambda one: one.peer_id)) == chosen, (
        "the others play no part"
    )
    counts = [sum(peer in PEERS[:1024] for peer in inquiry(f"node {i}").few(PEERS)) for i in range(64)]
    assert sum(counts) == pytest.approx(64 * PROBES / 2, abs=64)
    assert len({inquiry(f"node {i}").few(PEERS)[0] for i in range(64)}) > 32
