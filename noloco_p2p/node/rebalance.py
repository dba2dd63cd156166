"""Moving to another stage while training (design.md §6): announced, looked at twice more, then done."""

from noloco_p2p.core import balance
from noloco_p2p.node.state import NodeState

READINGS_BEFORE = 2
"""Readings of the membership between the announcement and the move: others may announce as well."""


class Rebalancer:
    """Decides after each reading of the membership. A node that was told its stage stays there."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._readings = 0

    def consider(self) -> None:
        """Announce, withdraw, or begin a move."""
        node = self._node
        if not node.config.rebalance or node.config.stage is not None:
            return
        if node.advert.state != "training" or node.draining:
            return
        others, manifest = node.members.all(), node.manifest
        rounds_left = (manifest.steps - node.advert.step) / manifest.outer.inner_steps
        target, reason = balance.move(node.advert, others, manifest.stages, rounds_left)
        if target != node.advert.moving_to:
            self._readings = 0
            node.update(moving_to=target)
            node.pulse()
            return
        self._readings += 1
        if target is not None and self._readings >= READINGS_BEFORE and balance.may_go(node.advert, others):
            node.event("moved", stage=target, reason=reason)
            node.drain(f"moves to stage {target}: {reason}", next_stage=target)
