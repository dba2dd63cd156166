"""Pulls another replica's vector: request, decode, and request wrong chunks again until all are right."""

from dataclasses import dataclass, replace

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, SnapshotRequest
from noloco_p2p.core.status import ForRound, Resource
from noloco_p2p.core.trials import Trials
from noloco_p2p.errors import Declined, PeerError, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Transport


@dataclass(frozen=True, slots=True)
class Pull:
    """The vectors pulled from a partner, or from all replicas of the stage."""

    reason: str
    """Why this is the result, as a label."""
    theirs: tuple[PartnerVector, ...] = ()
    """The vectors to merge; empty if no replica provided one."""
    nbytes: int = 0
    """Bytes of the answers and of the requests for them."""
    asked_again: int = 0
    """Chunks that arrived wrong (METHOD.md, "Codecs of outer rounds"), counted each time."""
    other: bool = False
    """Whether the vector is from another replica than the partner that was chosen first."""
    counted: bool = True
    """Whether this replica's own vector is merged with them."""
    left_out: int = 0
    """How many replicas of the stage were expected but are not merged."""
    ahead: tuple[PeerId, ...] = ()
    """The replicas from which this one differs, so that it copies the state of one of them; empty if it does not."""

    def result(self, mine: FrozenRound, of_all: bool) -> str:
        """The result of a round that merges this pull, as a label. `of_all`: all replicas of the stage were asked."""
        if not self.theirs:
            return "alone"
        if of_all:
            return "some" if self.left_out else "all"
        return "other" if self.other else "partner" if self.theirs[0].round == mine.round else "stale"


class VectorPuller:
    """Pulls vectors for one replica."""

    def __init__(self, node: NodeState, swarm: Membership, transport: Transport) -> None:
        self._node = node
        self._members = swarm.members
        self._transport = transport
        self.trials = Trials(node.config.limits.patience_floor_s, node.now, swarm.members.get)

    async def try_fetch(self, peer: Advert, mine: FrozenRound, wait_s: float, idle: bool) -> Pull:
        """What `fetch` returns, or the reason why there is nothing, as a label. The peer's error message goes to the
        log. A peer is set aside for a violation, and if all replicas wait for each other, also if it fails, or does not
        freeze the round in time; otherwise late weights prove nothing, because a full line delays them."""
        node, began, of_all = self._node, self._node.now(), mine.view is not None
        try:
            with self.trials.call(peer.peer_id):
                found = await self.fetch(peer, mine, wait_s, idle)
            if of_all and found.theirs[0].view is None:
                raise Violation(f"{peer.peer_id} does not say which replicas it expects")
        except PeerError as error:
            false = isinstance(error, Violation)
            if false or (of_all and (not isinstance(error, Declined) or node.now() - began >= wait_s)):
                self._members.failed(peer.peer_id, now=node.now(), answered=false)
            node.event("warning", message=f"no snapshot from {peer.peer_id}: {error}")
            return Pull(type(error).__name__.lower())
        if of_all:
            self._members.answered(peer.peer_id)
        return found

    async def fetch(self, peer: Advert, mine: FrozenRound, wait_s: float, idle: bool) -> Pull:
        """A peer's complete vector of about the same round; only chunks that arrived wrong are requested again.

        Raises Violation if the vector is refused (`core.guard`), Declined if its round is too far away or the peer
        dropped the round before all chunks had arrived, and otherwise the errors of Transport.fetch_snapshot. `idle`:
        nothing waits for the result.
        """
        node, found, outer = self._node, None, self._node.manifest.outer
        request = SnapshotRequest(node.index, mine.round, wait_s, lattice=mine.lattice)
        nbytes = asked_again = 0
        while True:
            expected, limit_s = node.stage.state.answer(request.lattice), request.wait_s + outer.deadline_s
            with node.waits.waiting("snapshot", peer.peer_id, limit_s, ForRound(mine.round), idle=idle):
                theirs = await self._transport.fetch_snapshot(peer, request, outer.deadline_s, expected)
            if theirs.peer != peer.peer_id:
                raise Violation(f"{peer.peer_id} sent the snapshot of {theirs.peer}")
            if theirs.fresh_round != mine.fresh_round:
                raise Declined(f"its weights began at round {theirs.fresh_round}, not {mine.fresh_round}")
            if abs(theirs.round - mine.round) > outer.max_stale_rounds:
                raise Declined(f"its round {theirs.round} is too far from {mine.round}")
            if found is not None and (theirs.round, theirs.step) != (found.round, found.step):
                raise Declined(f"its weights of round {found.round} have changed since its first answer")
            nbytes += theirs.nbytes + request.nbytes
            with node.waits.waiting("decoded snapshot", Resource.DEVICE, why=ForRound(mine.round), idle=idle):
                found = await node.stage.decode(mine, request, theirs, found)
            if found.missing is None:
                if found.verdict:
                    node.distrust(found.verdict, peer=found.peer, round=found.round)
                if found.verdict == "refused":
                    raise Violation(f"the vector of {found.peer} is too far from this replica's to be merged")
                return Pull("", (found,), nbytes, asked_again)
            request = replace(request, round=found.round, wait_s=0.0, lattice=found.missing)
            asked_again += len(found.missing.bounds)
