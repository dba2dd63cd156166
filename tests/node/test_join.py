"""Which replica a node copies in place of its own weights, and what it does if none gives its state."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.agreement import NOT_YET
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.resume import RestoreSource
from noloco_p2p.node.join import Joining
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState


class Place:
    """A replica of lineage 3, and two others of its stage: a of lineage 0, b of its own."""

    def __init__(self, gives: PeerId = "", *, drains: bool = False) -> None:
        manifest = RunManifest(stages=2)
        me = Advert("me", manifest.run_id, 0, (), state="training", fresh_round=3, partner_from_round=5)
        telemetry = SimpleNamespace(event=lambda *_, **__: None)
        self.node = NodeState(me, manifest, NodeConfig(), cast(Any, telemetry))
        self.swarm = Membership(self.node)
        for peer, lineage in (("a", 0), ("b", 3)):
            mates = [Advert(peer, manifest.run_id, 0, (), state="training", fresh_round=lineage)]
            self.swarm.members.update([*self.swarm.members.all(), *mates], now=0.0)
        self._gives, self._drains = gives, drains
        self.asked: list[PeerId] = []
        self.joining = Joining(self.node, self.swarm, cast(Any, None), cast(Any, self))

    async def restore(self, source: RestoreSource) -> bool:
        assert source.peer is not None
        assert self.node.advert.partner_from_round == NOT_YET, "nobody may take what is about to be replaced"
        self.asked.append(source.peer.peer_id)
        if self._drains:
            self.node.drain("moving to stage 1", next_stage=1)
            return False
        return source.peer.peer_id == self._gives

    def takes_over(self) -> tuple[list[PeerId], list[PeerId]]:
        """Who is asked, and who is set aside after that."""

        async def scenario() -> list[PeerId]:
            await self.joining.take_over(("gone", "a", "b"))
            return [peer for peer in "ab" if self.swarm.members.is_aside(peer, now=self.node.now())]

        aside = asyncio.run(scenario())
        return self.asked, aside


@pytest.mark.parametrize(("gives", "asked"), [("a", ["a"]), ("b", ["a", "b"]), ("", ["a", "b"])])
def test_the_first_that_gives_its_state_is_copied(gives: PeerId, asked: list[PeerId]) -> None:
    """One of an earlier lineage that does not give it is set aside: its word would count again at every border."""
    place = Place(gives)
    assert place.takes_over() == (asked, ["a"] if gives != "a" else [])
    assert place.node.advert.partner_from_round == (NOT_YET if gives else 5), "the copy says from when on it counts"


def test_nobody_is_set_aside_because_this_node_leaves_its_stage_meanwhile() -> None:
    assert Place(drains=True).takes_over()[1] == []
