"""What peers ask of this node, and which duty answers (ports.Handler)."""

from contextlib import AbstractAsyncContextManager

from noloco_p2p.core.messages import Gradient, Header, LossSum, NodeDescription, PeerId, ReplicaState, Snapshot
from noloco_p2p.errors import Declined, Violation
from noloco_p2p.node.guardian import Guardian
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.pipeline.evaluate import EvaluationServer
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.state_donor import StateDonor
from noloco_p2p.ports import Body


class RpcHandler:
    """Implements ports.Handler for one node; its duties change when the node moves to another stage."""

    def __init__(self, node: NodeState, guardian: Guardian) -> None:
        self._node = node
        self._guardian = guardian

    def give_to(
        self, door: MicrobatchServer, examiner: EvaluationServer, rounds: OuterRounds, donor: StateDonor
    ) -> None:
        """From now on these duties answer. Called before anybody can ask."""
        self._door, self._examiner, self._rounds, self._donor = door, examiner, rounds, donor

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        """See ports.Handler."""
        self._check_stage()
        return await self._door.propagate(caller, header, body)

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """See ports.Handler."""
        self._check_stage()
        return await self._examiner.evaluate(caller, header, body)

    async def fetch_snapshot(self, caller: PeerId, stage: int, round: int | None, wait_s: float) -> Snapshot:
        """See ports.Handler."""
        if not (wait_s >= 0):
            raise Violation("a snapshot needs a wait of 0 s or more")
        if stage == self._node.index:
            return await self._rounds.serve(round, wait_s)
        guarded = self._guardian.snapshot_of(stage)
        if guarded is None:
            raise Declined(f"this node guards no weights of stage {stage}")
        return guarded

    def lend_state(self, caller: PeerId, number: int | None) -> AbstractAsyncContextManager[ReplicaState]:
        """See ports.Handler."""
        return self._donor.lend_state(caller, number)

    def describe(self, caller: PeerId) -> NodeDescription:
        """See ports.Handler."""
        me = self._node.advert
        if me.stage < 0:
            raise Declined("this node has not chosen its stage yet")
        return NodeDescription(me.peer_id, me.run_id, me.stage, me.state, me.step, me.outer_round, me.version)

    def _check_stage(self) -> None:
        if self._node.index <= 0:
            raise Declined("this node holds stage 0, which nobody sends to")
