"""Serving held-out microbatches of the stage before: past the intake, within a small limit (design.md §4)."""

from math import isfinite

from noloco_p2p.core.messages import Header, LossSum, PeerId, TensorSpec
from noloco_p2p.core.status import for_microbatch
from noloco_p2p.errors import Busy, Declined, Violation
from noloco_p2p.node.pipeline.dispatch import Dispatcher, StageOutput
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Body


def check(node: NodeState, header: Header) -> None:
    """Refuse what is not for this node, on the header alone."""
    if header.run_id != node.run_id:
        raise Violation(f"this node works on run {node.run_id[:12]}, not {header.run_id[:12]}")
    if header.stage != node.index:
        raise Declined(f"this node holds stage {node.index}, not {header.stage}")
    if node.advert.state in ("starting", "waiting", "syncing"):
        raise Busy(f"stage {node.index} replica {node.me} is {node.advert.state}")
    if node.draining or node.advert.state not in ("training", "finished"):
        what = "leaving" if node.draining else node.advert.state
        raise Declined(f"stage {node.index} replica {node.me} is {what}")
    hidden = node.stage.state.hidden
    rows = hidden.shape[:2]
    expected = (hidden, TensorSpec("targets", "int32", rows), TensorSpec("mask", "uint8", rows))
    if header.specs not in (expected, expected[:2]):
        raise Violation(f"an activation of this run is {expected[:2]} with or without a mask, not {header.specs}")
    if not (isfinite(header.time_left_s) and header.time_left_s > 0):
        raise Violation("an activation needs a positive time left")


class EvaluationServer:
    """Serves `evaluate` for one node of a later stage."""

    def __init__(self, node: NodeState, sender: Dispatcher) -> None:
        self._node = node
        self._sender = sender
        self._evaluating = 0

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """See ports.Handler."""
        node = self._node
        check(node, header)
        if self._evaluating >= node.config.limits.evaluations:
            raise Busy(f"stage {node.index} replica {node.me} evaluates as many microbatches as it may")
        self._evaluating += 1
        why = for_microbatch(header.microbatch)
        try:
            with node.serving(caller, why):
                deadline = node.now() + header.time_left_s
                with node.waiting("activation", caller, header.time_left_s, why):
                    activation = await body()
                with node.computing("evaluation", why):
                    result = await node.stage.evaluate(activation.hidden, activation.targets, activation.mask)
                if isinstance(result, LossSum):
                    return result
                parcel = StageOutput(header.microbatch, header.origin, result, activation.targets, activation.mask)
                return await self._sender.evaluate(parcel, deadline)
        finally:
            self._evaluating -= 1
