"""Moving to another stage while training (design.md §6): announced, looked at twice more, then done."""

from noloco_p2p.core import balance
from noloco_p2p.node.state import NodeState

READINGS_BEFORE = 2
"""Readings of the membership between the announcement and the move: others may announce as well."""


class Rebalancer:
    """Decides after each reading of the membership. A node that was told its stage stays there."""

    def __init__(self, seat: NodeState) -> None:
        self._seat = seat
        self._readings = 0

    def consider(self) -> None:
        """Announce, withdraw, or begin a move."""
        seat = self._seat
        if not seat.config.rebalance or seat.config.stage is not None:
            return
        if seat.advert.state != "training" or seat.draining:
            return
        others, manifest = seat.members.all(), seat.manifest
        rounds_left = (manifest.steps - seat.advert.step) / manifest.outer.inner_steps
        target, reason = balance.move(seat.advert, others, manifest.stages, rounds_left)
        if target != seat.advert.moving_to:
            self._readings = 0
            seat.update(moving_to=target)
            seat.pulse()
            return
        self._readings += 1
        if target is not None and self._readings >= READINGS_BEFORE and balance.may_go(seat.advert, others):
            seat.event("moved", stage=target, reason=reason)
            seat.drain(f"moves to stage {target}: {reason}", next_stage=target)
