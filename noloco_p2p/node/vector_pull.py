"""One pull of another replica's vector: ask, decode, and ask again for wrong chunks, until all are right."""

from dataclasses import dataclass, replace

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest
from noloco_p2p.core.status import ForRound, Resource
from noloco_p2p.errors import Declined, Violation
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Transport


@dataclass(frozen=True, slots=True)
class Pull:
    """The result of asking a partner, or all replicas of the stage, and why."""

    reason: str
    theirs: tuple[PartnerVector, ...] = ()
    """The vectors to merge; empty: nobody gave one."""
    nbytes: int = 0
    """Bytes of the answers and of the questions for them."""
    asked_again: int = 0
    """Chunks that arrived wrong (METHOD.md, "Codecs of outer rounds"), counted each time."""
    other: bool = False
    """The vector is not from the partner that was chosen first."""
    counted: bool = True
    """This replica's own vector is merged with them."""
    left_out: int = 0
    """Replicas of the stage whose vectors were expected and are not merged."""
    ahead: tuple[PeerId, ...] = ()
    """This replica differs from these, and copies the state of one of them; empty: it does not differ."""

    def result(self, mine: FrozenRound, of_all: bool) -> str:
        """The result of a round merged with it, as a label; `of_all`: all replicas of the stage were asked."""
        if not self.theirs:
            return "alone"
        if of_all:
            return "some" if self.left_out else "all"
        return "other" if self.other else "partner" if self.theirs[0].round == mine.round else "stale"


class VectorPuller:
    """Pulls for one replica."""

    def __init__(self, node: NodeState, transport: Transport) -> None:
        self._node = node
        self._transport = transport

    async def fetch(self, peer: Advert, mine: FrozenRound, wait_s: float, idle: bool) -> Pull:
        """A peer's complete vector of about my round; only chunks that arrived wrong are asked for again.

        Raises Violation if it is refused (`core.guard`), Declined if its round is too far away or was dropped before
        all of it had arrived, else as Transport.fetch_snapshot. `idle`: nothing waits for it.
        """
        node, found, stale = self._node, None, self._node.manifest.outer.max_stale_rounds
        request = SnapshotRequest(node.index, mine.round, wait_s, lattice=mine.lattice)
        nbytes = asked_again = 0
        while True:
            theirs = await self._ask(peer, request, mine.round, idle)
            if abs(theirs.round - (request.round or 0)) > stale:
                raise Declined(f"its round {theirs.round} is too far from {request.round}")
            nbytes += theirs.nbytes + request.nbytes
            with node.waits.waiting("decoded snapshot", Resource.DEVICE, why=ForRound(mine.round), idle=idle):
                found = await node.stage.decode(mine, request, theirs, found)
            if found.missing is None:
                self._report(found)
                return Pull("", (found,), nbytes, asked_again)
            request, stale = replace(request, round=found.round, wait_s=0.0, lattice=found.missing), 0
            asked_again += len(found.missing.bounds)

    def _report(self, found: PartnerVector) -> None:
        """Report a vector that was not merged as it is. Raises Violation for one that is refused."""
        if found.verdict:
            self._node.distrust(found.verdict, peer=found.peer, round=found.round)
        if found.verdict == "refused":
            raise Violation(f"the vector of {found.peer} is too far from mine to be merged")

    async def _ask(self, peer: Advert, request: SnapshotRequest, round: int, idle: bool) -> Snapshot:
        """The peer's answer, for my round. Raises as Transport.fetch_snapshot, Violation for another replica's."""
        deadline_s, expected = self._node.manifest.outer.deadline_s, self._node.stage.state.answer(request.lattice)
        limit_s = request.wait_s + deadline_s
        with self._node.waits.waiting("snapshot", peer.peer_id, limit_s, ForRound(round), idle=idle):
            theirs = await self._transport.fetch_snapshot(peer, request, deadline_s, expected)
        if theirs.peer != peer.peer_id:
            raise Violation(f"{peer.peer_id} sent the snapshot of {theirs.peer}")
        return theirs
