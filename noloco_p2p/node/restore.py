"""The weights that a node begins with: where they come from, and what it has of its own (design.md §4 and §6)."""

from noloco_p2p.core import members as membership
from noloco_p2p.core import schedule
from noloco_p2p.core.messages import Checkpoint, Holding
from noloco_p2p.core.resume import WeightsSource
from noloco_p2p.core.status import Resource, Task
from noloco_p2p.errors import Declined, PeerError
from noloco_p2p.node.guardian import Guardian
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.state import NodeState

TRANSFER_DEADLINE_S = 1800.0
"""Longest transfer of a replica's whole state; a peer that falls silent is given up in seconds."""
HOLDINGS_SHOWN = 4
"""Checkpoints that an advert lists: the newest ones."""


class WeightRestorer:
    """Takes weights, and at stage 0 the place in the data, from one source at a time."""

    def __init__(self, node: NodeState, rounds: OuterRounds, guardian: Guardian) -> None:
        self._node = node
        self._rounds = rounds
        self._guardian = guardian
        self.own: list[Holding] = []
        """The checkpoints that this node has, of any stage."""

    def show_own(self) -> None:
        """Tell the others what I have, until I train."""
        node = self._node
        own = [held for held in self.own if held.stage == node.index]
        node.update(holds=tuple(own[-HOLDINGS_SHOWN:]))

    def guarded(self) -> Holding | None:
        """What this node holds, as a guardian, of the stage that it comes to."""
        held = self._guardian.snapshot_of(self._node.index)
        return None if held is None else Holding(self._node.index, held.round, held.step)

    async def tried(self, source: WeightsSource) -> bool:
        """Whether the source gave its weights; they are this replica's now."""
        node = self._node
        try:
            match source.kind:
                case "peer":
                    await self._from_peer(source)
                case "shard":
                    if not await self._from_shard(source):
                        return False
                case "guardian":
                    await self._from_guardian(source)
                case _:
                    await self._fresh()
        except PeerError as error:
            node.event("warning", message=f"could not start from {source.kind}: {error}")
            return False
        peer = source.peer.peer_id if source.peer else None
        node.event("resumed", source=source.kind, round=self._rounds.done, step=node.advert.step, peer=peer)
        return True

    # --- the sources ------------------------------------------------------------------------------------------------

    async def _from_peer(self, source: WeightsSource) -> None:
        """Everything of a living replica; partners may pull from here after the first whole outer interval.

        The clock is that of the others: they went on while the weights came, and under `balanced` they would wait for
        every step that this node is behind.
        """
        node, donor = self._node, source.peer
        assert donor is not None
        expected = node.stage.state.replica
        with node.waiting("state", donor.peer_id, TRANSFER_DEADLINE_S):
            state = await node.world.transport.fetch_state(donor, TRANSFER_DEADLINE_S, expected)
        if state.stage != node.index:
            raise Declined(f"{donor.peer_id} holds stage {state.stage}")
        with node.computing("restored state"):
            await node.stage.restore(state)
        step = max(state.step, self._clock_of_others())
        from_round = max(state.round, int(step) // node.manifest.outer.inner_steps) + 2
        await self._stand_at(state.round, step, state.inner_steps, partner_from_round=from_round)
        own = [held for held in self.own if held.stage == node.index]
        if node.index == 0 and own and node.batches is None:
            with node.waiting("checkpoint", Resource.DISK):
                mine = await node.world.checkpoints.load(own[-1])
            await self.open_data(mine)

    async def _from_shard(self, source: WeightsSource) -> bool:
        """My own checkpoint, unless it turns out damaged."""
        node = self._node
        assert source.holding is not None
        with node.waiting("checkpoint", Resource.DISK):
            mine = await node.world.checkpoints.load(source.holding)
        if mine is None:
            self.own.remove(source.holding)
            self.show_own()
            return False
        with node.computing("restored state"):
            await node.stage.restore(mine.state)
        node.rng.setstate(mine.random_state)
        state = mine.state
        await self._stand_at(state.round, state.step, state.inner_steps)
        await self.open_data(mine)
        return True

    async def _from_guardian(self, source: WeightsSource) -> None:
        """A lost stage's weights from who pulled them in time; the optimizer begins anew."""
        node = self._node
        theirs = self._guardian.snapshot_of(node.index)
        if source.peer is not None:
            deadline_s = node.manifest.outer.deadline_s
            with node.waiting("snapshot", source.peer.peer_id, deadline_s, Task.LOST_STAGE):
                theirs = await node.world.transport.fetch_snapshot(
                    source.peer, node.index, None, 0.0, deadline_s, node.stage.state.snapshot
                )
        assert theirs is not None, "a source without a peer is held here"
        with node.computing("adopted snapshot"):
            await node.stage.adopt(theirs)
        step = max(float(theirs.step), self._clock_of_others())
        await self._stand_at(theirs.round, step, node.inner_steps)

    async def _fresh(self) -> None:
        """Nobody has the weights: the stage begins with its initial ones, at the clock of the others."""
        node, step = self._node, self._clock_of_others()
        await self._stand_at(int(step) // node.manifest.outer.inner_steps, step, node.inner_steps)
        node.event(
            "warning", message=f"nobody has the weights of stage {node.index}: it begins with its initial weights"
        )

    def _clock_of_others(self) -> float:
        """The median over those who train, in steps: one liar among them does not move it."""
        clocks = [a.step for a in self._node.members.all() if a.state in membership.TRAINED]
        median = schedule.clock_median(clocks)
        return 0.0 if median is None else min(median, float(self._node.manifest.steps))

    async def _stand_at(self, round: int, step: float, inner_steps: int, partner_from_round: int = 0) -> None:
        node = self._node
        node.inner_steps = inner_steps
        node.update(step=min(float(node.manifest.steps), max(0.0, step)), partner_from_round=partner_from_round)
        await self._rounds.go_on_from(round)

    async def open_data(self, checkpoint: Checkpoint | None) -> None:
        """At stage 0: the data from where the checkpoint was, or from the beginning. What is open stays open."""
        node = self._node
        if node.index != 0 or node.batches is not None:
            return
        with node.waiting("opened data", Resource.DATA):
            node.batches = await node.world.make_batches(checkpoint.cursor if checkpoint is not None else None)
