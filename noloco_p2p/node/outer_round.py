"""Outer rounds: freeze a snapshot, pull a partner's, merge, go on (ARCHITECTURE.md, "An outer round").

A replica trains on while its partner's snapshot is on its way (`outer.overlap`). All happens at borders of inner steps,
where no graph is open: what is due is frozen (θ_f stays in the stage, Δ and φ are the snapshot), a task of its own
pulls, and the first border after it ended merges. Until then φ and δ are those before the round: whatever is captured
meanwhile says that the round is still due, so that an open round needs no place in states and checkpoints, and is given
up by forgetting it. Weights that are replaced, a move and a pause do that. What ends it without waiting, when the next
one is due or the node leaves, merges alone. Nothing else is left to train at the end of the run: there it is waited
for, one partner at most, and for a while.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from noloco_p2p.core import members as membership
from noloco_p2p.core import pairing, schedule
from noloco_p2p.core.messages import Advert, PeerId, Snapshot
from noloco_p2p.core.status import ForRound, Resource
from noloco_p2p.core.timeouts import AdaptiveTimeout
from noloco_p2p.errors import Declined, PeerError, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.waits import Waits
from noloco_p2p.ports import Transport

KEPT_ROUNDS = 2
"""Snapshots that stay fetchable."""


@dataclass(frozen=True, slots=True)
class Pull:
    """What came of looking for a partner: `partner`, `stale`, `other` or `alone`, why, and the snapshot."""

    result: str
    reason: str
    theirs: Snapshot | None = None


class PartnerChoice(NamedTuple):
    """The replicas that could be asked, the one that is, and why."""

    mates: Mapping[PeerId, Advert]
    partner: PeerId | None
    reason: str


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round that is frozen, while the partner's snapshot is on its way and the replica trains on."""

    mine: Snapshot
    pull: asyncio.Task[Pull]
    frozen_at: float
    inner_steps: int
    """How many had been taken when it was frozen."""


class OuterRounds:
    """The outer rounds of one replica, and the snapshots that it keeps for others."""

    def __init__(self, node: NodeState, swarm: Membership, waits: Waits, transport: Transport) -> None:
        self._node = node
        self._swarm = swarm
        self._waits = waits
        self._transport = transport
        self._kept: dict[int, Snapshot] = {}
        self._open: OpenRound | None = None
        self._step_busy_s = 0.0
        self._timeout = AdaptiveTimeout()

    async def freeze(self, round: int) -> Snapshot:
        """Take this replica's snapshot of `round` and keep it for others."""
        with self._waits.computing("snapshot"):
            mine = await self._node.stage.snapshot(round, self._node.step)
        self._kept[round] = mine
        for old in sorted(self._kept)[:-KEPT_ROUNDS]:
            del self._kept[old]
        self._waits.pulse()
        return mine

    def inner_step_took(self, busy_s: float) -> None:
        """Device-busy seconds of an inner step: the unit in which a partner is waited for."""
        self._step_busy_s = busy_s if not self._step_busy_s else 0.8 * self._step_busy_s + 0.2 * busy_s

    async def at_border(self, close_intake: Callable[[], None]) -> None:
        """Between two inner steps, nothing in flight: merge what has come, and begin the round that is due.

        A round without a partner merges at once. Only the last one of a run is waited for, or each where the run does
        not overlap, and no wait is circular: then the intake answers Busy, and its waiting line is flushed. A node that
        leaves begins none.
        """
        node, outer, opened = self._node, self._node.manifest.outer, self._open
        if outer.pairing == "none":
            return
        done, is_last = opened.mine.round if opened else node.advert.outer_round, node.step >= node.manifest.steps
        due = schedule.due_round(node.step, outer.inner_steps, done, node.manifest.steps)
        if opened is not None and (due is not None or is_last or opened.pull.done()):
            await self.end("late", wait=due is None)
        if due is None or (outer.overlap and node.draining):
            return
        goes_on = outer.overlap and not is_last
        if not goes_on:
            close_intake()
        with node.span("outer"):
            frozen_at, mine = node.now(), await self.freeze(due)
            choice = self._choose_partner(due)
            if goes_on and choice.partner is not None:
                pulling = asyncio.create_task(self._pull(due, choice), name=f"outer round {due}")
                pulling.add_done_callback(self._pull_ended)
                self._open = OpenRound(mine, pulling, frozen_at, node.inner_steps)
                return
            pull = await self._pull(due, choice)
            node.event("idle", cause="partner", seconds=node.now() - frozen_at)
            await self._merge(mine, pull, frozen_at, 0)

    async def end(self, reason: str, *, wait: bool = False) -> None:
        """End the open round, if there is one: with what has come, else alone, for `reason`; or `wait` for it."""
        opened, self._open = self._open, None
        if opened is None:
            return
        with self._node.span("outer"):
            if not wait and not opened.pull.done():
                opened.pull.cancel()
            with self._waits.waiting("outer round", Resource.SWARM, why=ForRound(opened.mine.round)):
                await asyncio.wait([opened.pull])
            pull = Pull("alone", reason) if opened.pull.cancelled() else opened.pull.result()
            await self._merge(opened.mine, pull, opened.frozen_at, self._node.inner_steps - opened.inner_steps)

    async def forget(self) -> None:
        """Give the open round up, if there is one: it is due again where training goes on."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.pull.cancel()
            with self._waits.waiting("outer round", Resource.SWARM, why=ForRound(opened.mine.round)):
                await asyncio.wait([opened.pull])

    def _pull_ended(self, pull: asyncio.Task[Pull]) -> None:
        """A bug is not kept until the next border, which may never come."""
        if not pull.cancelled() and (error := pull.exception()) is not None:
            self._node.fail(error)

    async def _merge(self, mine: Snapshot, pull: Pull, frozen_at: float, trained: int) -> None:
        """N1 to N3; `trained` inner steps were taken since the snapshot was frozen."""
        node = self._node
        with self._waits.computing("merge"):
            try:
                merged = await node.stage.merge(mine, pull.theirs)
            except Violation as error:
                pull = Pull("alone", f"refused: {error}")
                merged = await node.stage.merge(mine, None)
        node.publish(outer_round=mine.round)
        node.event(
            "outer_round",
            round=mine.round,
            result=pull.result,
            partner=pull.theirs.peer if pull.theirs else None,
            reason=pull.reason,
            seconds=node.now() - frozen_at,
            bytes=sum(t.spec.nbytes for t in pull.theirs.tensors) if pull.theirs else 0,
            **({"trained": trained} if trained else {}),
        )
        if merged.replica_std is not None:
            node.event("replica_std", value=merged.replica_std)

    # --- pulling ----------------------------------------------------------------------------------------------------

    def _choose_partner(self, round: int) -> PartnerChoice:
        """Whom to ask in this round, and why.

        A replica that is new to the stage is nobody's partner before its first whole outer interval, and draws its own
        partner at random: the others' pairing does not count it yet.
        """
        node, outer = self._node, self._node.manifest.outer
        found = self._swarm.members.of_stage(node.index, membership.IN_ROUNDS)
        mates = {a.peer_id: a for a in found if a.partner_from_round <= round}
        is_matched = outer.pairing == "matched" and node.advert.partner_from_round <= round
        kind: Literal["matched", "random"] = "matched" if is_matched else "random"
        return PartnerChoice(mates, *pairing.partner(kind, node.manifest.seed, round, sorted(mates), node.me, node.rng))

    async def _pull(self, round: int, choice: PartnerChoice) -> Pull:
        """The partner's snapshot of this round, else its newest, else another replica's, else none."""
        node, members = self._node, self._swarm.members
        mates, chosen, reason = choice
        if chosen is None:
            return Pull("alone", reason)
        failure = "aside"
        if not members.is_aside(chosen, now=node.now()):
            theirs, failure = await self._try_fetch(mates[chosen], round, self._partner_wait_s())
            if theirs is not None:
                return Pull("partner" if theirs.round == round else "stale", reason, theirs)
        others = [p for p in sorted(mates) if p != chosen and not members.is_aside(p, now=node.now())]
        if not others:
            return Pull("alone", failure)
        theirs, second_failure = await self._try_fetch(mates[node.rng.choice(others)], round, 0.0)
        return Pull("alone", second_failure) if theirs is None else Pull("other", failure, theirs)

    async def _try_fetch(self, peer: Advert, round: int, wait_s: float) -> tuple[Snapshot | None, str]:
        """A peer's snapshot near `round`; or why there is none, as a label: the peer's own words go to the log."""
        try:
            return await self._fetch(peer, round, wait_s), ""
        except PeerError as error:
            if not isinstance(error, Declined):
                self._swarm.members.failed(peer.peer_id, now=self._node.now())
            self._node.event("warning", message=f"no snapshot from {peer.peer_id}: {error}")
            return None, type(error).__name__.lower()

    async def _fetch(self, peer: Advert, round: int, wait_s: float) -> Snapshot:
        """A peer's snapshot near `round`. Raises Declined when it is too old, else as Transport.fetch_snapshot."""
        node, outer = self._node, self._node.manifest.outer
        floor_s = node.config.limits.patience_floor_s + wait_s
        deadline_s = min(outer.deadline_s, self._timeout.deadline_s(floor_s) or outer.deadline_s)
        began = node.now()
        idle = self._open is not None
        with self._waits.waiting("snapshot", peer.peer_id, wait_s + deadline_s, ForRound(round), idle=idle):
            theirs = await self._transport.fetch_snapshot(
                peer, node.index, round, wait_s, deadline_s, node.stage.state.snapshot
            )
        self._timeout.observe(node.now() - began)
        if theirs.peer != peer.peer_id:
            raise Violation(f"{peer.peer_id} sent the snapshot of {theirs.peer}")
        if abs(theirs.round - round) > outer.max_stale_rounds:
            raise Declined(f"its round {theirs.round} is too far from {round}")
        return theirs

    def _partner_wait_s(self) -> float:
        """By default two inner steps: of wall time where the replica trains on, else of device-busy time, for wall time
        would feed on itself."""
        outer, took = self._node.manifest.outer, self._node.step_seconds
        if outer.partner_wait_s is not None:
            return outer.partner_wait_s
        return 2 * (median(took) if self._open is not None and took else self._step_busy_s)

    # --- the other side ---------------------------------------------------------------------------------------------

    async def serve(self, round: int | None, wait_s: float) -> Snapshot:
        """See ports.Handler.fetch_snapshot."""
        if round is not None:
            longest_s = min(wait_s, self._node.manifest.outer.deadline_s)
            await self._waits.until(
                lambda: any(kept >= round for kept in self._kept),
                "outer round",
                Resource.INNER_STEP,
                longest_s,
                why=ForRound(round, asked=True),
                idle=True,
            )
        if not self._kept:
            raise Declined("this replica has no snapshot yet")
        return self._kept.get(round if round is not None else -1) or self._kept[max(self._kept)]

    async def go_on_from(self, round: int) -> None:
        """This replica's weights have become those of `round`; the snapshots kept are no longer its own."""
        await self.forget()
        self._node.update(outer_round=round)
        self._kept.clear()
        await self.freeze(round)
