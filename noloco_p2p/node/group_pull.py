"""An outer round in which a replica pulls from all replicas of its stage: which of them it expects to count, the pulls,
and the agreement on what to merge (ARCHITECTURE.md, "All replicas")."""

import asyncio
from dataclasses import replace

from noloco_p2p.core.agreement import GroupView, agree
from noloco_p2p.core.snapshots import FrozenRound
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.vector_pull import Pull, VectorPuller


class GroupPull:
    """Runs the group pulls of one replica."""

    def __init__(self, node: NodeState, swarm: Membership, puller: VectorPuller) -> None:
        self._node = node
        self._swarm = swarm
        self._puller = puller

    def with_view(self, mine: FrozenRound) -> FrozenRound:
        """The frozen round, with the replicas that this one expects to count filled in."""
        assert mine.view is not None, "the rule takes from all"
        node, members, now = self._node, self._swarm.members, self._node.now()
        peers = [a.peer_id for a in self._swarm.partners(mine.round) if not members.is_aside(a.peer_id, now=now)]
        own = [node.me] if node.advert.partner_from_round <= mine.round else []
        return replace(mine, view=GroupView(tuple(sorted(own + self._puller.trials.among(peers))), mine.view.digest))

    async def pull(self, mine: FrozenRound, idle: bool) -> Pull:
        """The round's vectors of all replicas that this one expects to count, reduced to those that all agree on.

        Each vector is held in memory until the merge, one for every replica of the stage. `idle`: nothing waits for the
        result.
        """
        assert mine.view is not None, "the rule takes from all"
        members, me = self._swarm.members, self._node.me
        mates = [a for peer in mine.view.peers if peer != me and (a := members.get(peer)) is not None]
        if not mates:
            return Pull("nobody")
        outer = self._node.manifest.outer
        wait_s = outer.deadline_s if outer.partner_wait_s is None else outer.partner_wait_s
        found = await asyncio.gather(*(self._puller.try_fetch(mate, mine, wait_s, idle) for mate in mates))
        came = {one.peer: one for pull in found for one in pull.theirs}
        agreed = agree({peer: one.view for peer, one in came.items() if one.view is not None} | {me: mine.view})
        theirs = tuple(came[peer] for peer in agreed.counted if peer != me)
        return Pull(
            next((pull.reason for pull in found if not pull.theirs), "all"),
            theirs,
            sum(pull.nbytes for pull in found),
            sum(pull.asked_again for pull in found),
            counted=me in agreed.counted,
            left_out=len(mates) - len(theirs),
            ahead=() if agreed.digest == mine.view.digest else agreed.counted,
        )
