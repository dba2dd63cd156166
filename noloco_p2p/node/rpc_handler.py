"""Routes the calls of peers to the duties that answer them (ports.Handler)."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from math import isfinite

from noloco_p2p.core.messages import (
    Gradient,
    Header,
    LossSum,
    MicrobatchId,
    NodeDescription,
    PeerId,
    Progress,
    ReplicaState,
    TensorSpec,
)
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import Busy, Declined, Violation
from noloco_p2p.node.guardian import Guardian
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.state_donor import StateDonor
from noloco_p2p.ports import Body


class RpcHandler:
    """Implements ports.Handler for one node; its duties change when the node moves to another stage."""

    def __init__(self, node: NodeState, swarm: Membership, guardian: Guardian) -> None:
        self._node, self._swarm = node, swarm
        self._guardian = guardian

    def answer_with(self, server: MicrobatchServer, rounds: OuterRounds, donor: StateDonor) -> None:
        """Let these duties answer from now on. Called before any peer can call."""
        self._server, self._rounds, self._donor = server, rounds, donor

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        """See ports.Handler."""
        self._check(caller, header)
        return await self._server.propagate(caller, header, body)

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """See ports.Handler."""
        self._check(caller, header)
        return await self._server.evaluate(caller, header, body)

    async def fetch_snapshot(self, caller: PeerId, request: SnapshotRequest) -> Snapshot:
        """See ports.Handler."""
        if not (request.wait_s >= 0):
            raise Violation("the wait of a snapshot request must be 0 s or more")
        if request.stage == self._node.chosen_stage:
            return await self._rounds.frozen.serve(caller, request)
        guarded = self._guardian.snapshot_of(request.stage)
        if guarded is None or request.weights != guarded.tensors[0].dtype:
            raise Declined(f"this node guards no weights of stage {request.stage} as {request.weights or 'a vector'}")
        return guarded

    def lend_state(self, caller: PeerId, number: int | None) -> AbstractAsyncContextManager[ReplicaState]:
        """See ports.Handler."""
        return self._donor.lend_state(caller, number)

    def progress(self, caller: PeerId, microbatches: Sequence[MicrobatchId]) -> list[Progress | None]:
        """See ports.Handler."""
        return self._server.progress(microbatches)

    def describe(self, caller: PeerId) -> NodeDescription:
        """See ports.Handler."""
        me = self._node.advert
        if self._node.chosen_stage is None:
            raise Declined("this node has not chosen its stage yet")
        self._swarm.inquiry.meet(caller)
        # As soon as the owner wants the device: otherwise two last replicas with equal hours would rely on each other.
        state = "paused" if me.state == "training" and self._node.wanted_by_owner else me.state
        return NodeDescription(
            me.peer_id, me.run_id, me.stage, state, me.step, me.outer_round, me.version, me.fresh_round
        )

    def _check(self, caller: PeerId, header: Header) -> None:
        """Refuse a microbatch that is not for this node, by its header alone: the tensors are not read.

        The order of the checks decides what the caller does next. The wrong run or stage is an error whatever this node
        is doing. A node that will soon train answers Busy; one that no longer does answers Declined, so that the caller
        looks for another replica. Shapes come last, because they can be checked only once there is a stage.
        """
        node, state = self._node, self._node.advert.state
        if not node.chosen_stage:
            raise Declined("this node holds no stage that takes activations")
        if header.run_id != node.run_id:
            raise Violation(f"this node works on run {node.run_id[:12]}, not {header.run_id[:12]}")
        if header.stage != node.index:
            raise Declined(f"this node holds stage {node.index}, not {header.stage}")
        if state in ("starting", "waiting", "syncing"):
            raise Busy(f"{node.replica} is {state}")
        if node.draining or state not in ("training", "finished"):
            raise Declined(f"{node.replica} is {'leaving' if node.draining else state}")
        seen = self._swarm.members.get(caller)
        if seen is None or seen.stage != node.index - 1:
            self._swarm.refused_unlisted()
            raise Busy(f"{node.replica} has not seen the caller in stage {node.index - 1} yet", late=True)
        rows = (node.manifest.microbatch_size, node.manifest.sequence_length)
        expected = (node.stage.state.hidden, TensorSpec("targets", "int32", rows), TensorSpec("mask", "uint8", rows))
        if header.specs not in (expected, expected[:2]):
            raise Violation(f"an activation of this run is {expected[:2]} with or without a mask, not {header.specs}")
        if not (isfinite(header.time_left_s) and header.time_left_s > 0):
            raise Violation("an activation must have a positive time left")
