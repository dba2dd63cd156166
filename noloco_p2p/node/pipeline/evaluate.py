"""Serving held-out microbatches of the stage before: past the intake, within a small limit (design.md §4)."""

from math import isfinite

from noloco_p2p.core.messages import Header, LossSum, PeerId, TensorSpec
from noloco_p2p.core.status import of_microbatch
from noloco_p2p.errors import Busy, Declined, Violation
from noloco_p2p.node.pipeline.dispatch import Dispatcher, StageOutput
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Body


def check(seat: NodeState, header: Header) -> None:
    """Refuse what is not for this node, on the header alone."""
    if header.run_id != seat.run_id:
        raise Violation(f"this node works on run {seat.run_id[:12]}, not {header.run_id[:12]}")
    if header.stage != seat.index:
        raise Declined(f"this node holds stage {seat.index}, not {header.stage}")
    if seat.advert.state in ("starting", "waiting", "syncing"):
        raise Busy(f"stage {seat.index} replica {seat.me} is {seat.advert.state}")
    if seat.draining or seat.advert.state not in ("training", "finished"):
        what = "leaving" if seat.draining else seat.advert.state
        raise Declined(f"stage {seat.index} replica {seat.me} is {what}")
    hidden = seat.stage.state.hidden
    rows = hidden.shape[:2]
    expected = (hidden, TensorSpec("targets", "int32", rows), TensorSpec("mask", "uint8", rows))
    if header.specs not in (expected, expected[:2]):
        raise Violation(f"an activation of this run is {expected[:2]} with or without a mask, not {header.specs}")
    if not (isfinite(header.time_left_s) and header.time_left_s > 0):
        raise Violation("an activation needs a positive time left")


class EvaluationServer:
    """Serves `evaluate` for one node of a later stage."""

    def __init__(self, seat: NodeState, sender: Dispatcher) -> None:
        self._seat = seat
        self._sender = sender
        self._evaluating = 0

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """See ports.Handler."""
        seat = self._seat
        check(seat, header)
        if self._evaluating >= seat.config.limits.evaluations:
            raise Busy(f"stage {seat.index} replica {seat.me} evaluates as many microbatches as it may")
        self._evaluating += 1
        why = of_microbatch(header.microbatch)
        try:
            with seat.serving(caller, why):
                deadline = seat.now() + header.time_left_s
                with seat.waiting("activation", caller, header.time_left_s, why):
                    activation = await body()
                with seat.computing("evaluation", why):
                    result = await seat.stage.evaluate(activation.hidden, activation.targets, activation.mask)
                if isinstance(result, LossSum):
                    return result
                parcel = StageOutput(header.microbatch, header.origin, result, activation.targets, activation.mask)
                return await self._sender.evaluate(parcel, deadline)
        finally:
            self._evaluating -= 1
