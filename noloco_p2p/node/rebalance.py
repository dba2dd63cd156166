"""Moving to another stage while training (ARCHITECTURE.md, "Rebalancing")."""

from collections.abc import Sequence

from noloco_p2p.core import balance
from noloco_p2p.core.exchanges import sample
from noloco_p2p.core.messages import Advert
from noloco_p2p.core.timeouts import TRANSFER_DEADLINE_S
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState

READINGS_BEFORE = 2
"""Readings of the membership between announcing a move and making it, in case others announce the same move."""


class Rebalancer:
    """Decides after each reading of the membership whether to move. A node that was given its stage stays there."""

    def __init__(self, node: NodeState, swarm: Membership) -> None:
        self._node = node
        self._swarm = swarm
        self._readings = 0
        self._deciding: Sequence[Advert] = ()
        """The replicas of this stage that must have answered before this node leaves it to them."""
        self._asked_at = 0.0
        """When they were last asked, at a reading."""
        self._held_up: dict[balance.HoldUp, float] = {}
        """Why nobody moves → since when."""

    def consider(self) -> None:
        """Announce a move, withdraw it, or start it."""
        node, manifest = self._node, self._node.manifest
        if node.advert.state != "training" or node.draining or node.pausing:
            self._held_up, self._readings = {}, 0
            return
        others = self._swarm.members.all()
        held_up = balance.HoldUp.among([*others, node.advert], self._swarm.members.doubted())
        self._held_up = {one: self._held_up.get(one, node.now()) for one in held_up}
        others = balance.expected(node.advert, others, self._overdue())
        rounds_left = (manifest.steps - node.advert.step) / manifest.outer.inner_steps
        since, self._asked_at = self._asked_at, node.now()
        target, reason = balance.choose_move(node.advert, others, manifest.stages, rounds_left, self._overdue())
        if target is not None and not self._would_move_anyway(others, target, rounds_left):
            target = None
        if target != node.advert.moving_to:
            self._readings = 0
            node.publish(moving_to=target)
            return
        self._readings += 1
        if target is None or self._readings < READINGS_BEFORE:
            return
        if self._have_answered(since, balance.others_left(others, target)):
            node.event("moved", stage=target, reason=reason)
            node.drain(f"moving to stage {target}: {reason}", next_stage=target)

    def _would_move_anyway(self, others: Sequence[Advert], target: int, rounds_left: float) -> bool:
        """Whether to move even if silent replicas of this stage do not count: a move must not rely on adverts alone."""
        node, inquiry = self._node, self._swarm.inquiry
        there = [a for a in others if a.stage != node.index or not inquiry.is_silent(a.peer_id)]
        if balance.choose_move(node.advert, there, node.manifest.stages, rounds_left, self._overdue())[0] != target:
            return False
        mates = [a for a in there if a.stage == node.index and a.state in balance.COUNTED]
        if node.advert.moving_to is None or any(inquiry.is_silent(a.peer_id) for a in self._deciding):
            self._deciding = sample(mates, node.rng)
        self._deciding = [a for a in mates if a.peer_id in {one.peer_id for one in self._deciding}]
        inquiry.ask(self._deciding, self._asked_at)
        return True

    def _overdue(self) -> set[balance.HoldUp]:
        """What has held up moves for as long as a transfer may take."""
        return {one for one, since in self._held_up.items() if self._node.now() - since >= TRANSFER_DEADLINE_S}

    def _have_answered(self, since: float, least: int) -> bool:
        """Whether all `_deciding` replicas, at least `least`, have answered since then: older answers may be stale."""
        inquiry, asked = self._swarm.inquiry, self._deciding
        anew = not inquiry.unknown(asked, since)
        return anew and len(inquiry.answering(asked, balance.COUNTED)) == len(asked) >= least
