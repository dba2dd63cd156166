"""The frozen rounds that a replica keeps for others to pull (ARCHITECTURE.md, "An outer round")."""

from dataclasses import replace

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.snapshots import FrozenRound, Snapshot, SnapshotRequest
from noloco_p2p.core.status import ForRound, Resource
from noloco_p2p.errors import Declined
from noloco_p2p.node.state import NodeState

KEPT_ROUNDS, KEPT_STEPS = 2, 4
"""How many of the newest frozen rounds stay fetchable: KEPT_STEPS under a rule of gradients, because a newcomer's state
is some steps old when it arrives."""
GIVEN_ROUNDS = 3
"""How many older rounds stay if others recently pulled them in a codec with bounds, and may need chunks again."""


class FrozenRounds:
    """The frozen rounds of one replica."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._kept: dict[int, FrozenRound] = {}
        self._given: dict[PeerId, tuple[float, int]] = {}
        """Peers that were sent a vector within the last `deadline_s` → when, and of which round. After that time they
        have it or never will."""
        self._encoding: list[int] = []
        """The rounds that are being encoded for others, which may ask for chunks of them again."""

    def keep(self, mine: FrozenRound) -> None:
        """Keep a new round, and drop those for which nobody can ask any more. Only in a codec with bounds may peers ask
        for parts of an older round again."""
        outer = self._node.manifest.outer
        self._kept[mine.round] = mine
        rounds, given = sorted(self._kept), set[int]()
        newest = KEPT_STEPS if outer.update.gradients else KEPT_ROUNDS
        if self._node.stage.state.lattice is not None:
            pulled = (*self._encoding, *(round for _, round in self._given.values()))
            given = {round for round in pulled if round >= rounds[-1] - outer.max_stale_rounds}
        older = [round for round in rounds[:-newest] if round in given][-GIVEN_ROUNDS:]
        self._kept = {round: self._kept[round] for round in (*older, *rounds[-newest:])}
        self._node.waits.pulse()

    def clear(self) -> None:
        """Forget all rounds, because this replica's weights are being replaced."""
        self._kept.clear()

    def pullers(self) -> set[PeerId]:
        """The peers that were sent a vector and may not have all of it yet."""
        self._forget_pullers()
        return set(self._given)

    def _forget_pullers(self) -> None:
        since = self._node.now() - self._node.manifest.outer.deadline_s
        self._given = {peer: given for peer, given in self._given.items() if given[0] > since}

    def _will_freeze(self, round: int) -> bool:
        """Whether this replica will freeze a round that its whole group needs, unless it has already."""
        node = self._node
        going_on = not node.draining and node.advert.state not in ("paused", "finished")
        return going_on and node.advert.partner_from_round <= round

    async def serve(self, caller: PeerId, request: SnapshotRequest) -> Snapshot:
        """See ports.Handler.fetch_snapshot."""
        outer, round = self._node.manifest.outer, request.round
        whole_group = bool(outer.update.common) and request.weights is None
        if round is not None:
            await self._node.waits.until(
                lambda: any(kept >= round for kept in self._kept) or (whole_group and not self._will_freeze(round)),
                "outer round",
                Resource.INNER_STEP,
                min(request.wait_s, outer.deadline_s),
                why=ForRound(round, asked=True),
                idle=True,
            )
        if whole_group and round not in self._kept:
            raise Declined(f"this replica has no round {round} to give: its newest is {max(self._kept, default=0)}")
        if not self._kept:
            raise Declined("this replica has no snapshot yet")
        at = max(self._kept)
        if round is not None and (outer.update.lasting or round in self._kept):
            # Under a lasting rule the caller merges its round as it was frozen, so the nearest round kept fits best.
            at = min(self._kept, key=lambda kept: abs(kept - round))
        frozen = self._kept[at]
        self._encoding.append(frozen.round)
        try:
            with self._node.waits.waiting("encoded snapshot", Resource.DEVICE, idle=True):
                found = await self._node.stage.encode(frozen, request, caller)
        finally:
            self._encoding.remove(frozen.round)
        # Recorded only now, because a malformed request must not count as a puller.
        self._forget_pullers()
        self._given[caller] = self._node.now(), frozen.round
        return replace(found, fresh_round=frozen.fresh_round)
