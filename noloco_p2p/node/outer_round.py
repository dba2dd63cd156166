"""Outer rounds: freeze a snapshot, pull a partner's, merge, train on (ARCHITECTURE.md, "An outer round").

A replica trains on while its partner's snapshot is in transit (`outer.overlap`). Freezing and merging happen between
inner steps, where no graph is open: a round that is due is frozen there, a separate task pulls, and the result is
merged at the first boundary after the pull has ended.

- Until the merge, φ and δ are those from before the round. Any state captured meanwhile says that the round is still
  due, so an open round needs no place in states and checkpoints. To give it up, the replica forgets it; it does so when
  its weights are replaced, when it moves, and when it pauses.
- When the next round is due, the open one merges alone, and the pull continues for the next one, so that no transfer is
  thrown away. Under a `lasting` rule, merging alone would change nothing. There the open round lasts until its vector
  has arrived, and rounds that fall due meanwhile are only frozen for others.
- Under a rule that takes from all replicas (`common`), they are pulled as a group (`node.group_pull`).
- At the end of the run nothing is left to train, so the node waits for the open round, for a bounded time.
"""

import asyncio
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple

from noloco_p2p.core import pairing, schedule
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.outer_rules import OuterRule
from noloco_p2p.core.snapshots import FrozenRound
from noloco_p2p.core.status import ForRound, Resource
from noloco_p2p.node.frozen_rounds import FrozenRounds
from noloco_p2p.node.group_pull import GroupPull
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.vector_pull import Pull, VectorPuller
from noloco_p2p.ports import Transport


class PartnerChoice(NamedTuple):
    """Which replica to pull from in a round, and why."""

    mates: Mapping[PeerId, Advert]
    hidden: Set[PeerId]
    partner: PeerId | None
    reason: str


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A frozen round whose partner's snapshot is in transit while the replica trains on."""

    mine: FrozenRound
    pull: asyncio.Task[Pull]
    pulled_in: int
    """The round in which the pull began; always that of `mine` under a `lasting` rule."""
    frozen_at: float


class OuterRounds:
    """The outer rounds of one replica, and the snapshots that it keeps for others. `close_intake` makes it answer Busy
    and flushes its waiting line."""

    def __init__(
        self, node: NodeState, swarm: Membership, transport: Transport, close_intake: Callable[[], None]
    ) -> None:
        self._node = node
        self._swarm = swarm
        self._close_intake = close_intake
        self._puller = VectorPuller(node, swarm, transport)
        self._group = GroupPull(node, swarm, self._puller)
        self.frozen = FrozenRounds(node)
        self._rule: OuterRule = node.manifest.outer.update
        self._open: OpenRound | None = None
        self._step_busy_s = 0.0
        self.ahead: tuple[PeerId, ...] = ()
        """Under a rule that takes from all: the replicas from which this one differed in the newest round."""

    async def freeze(self, round: int) -> FrozenRound:
        """Freeze what this replica offers in `round`, and keep it for others to pull."""
        with self._node.waits.computing("snapshot"):
            mine = await self._node.stage.snapshot(round, self._node.step)
        mine = replace(mine, fresh_round=self._node.advert.fresh_round)
        if self._rule.common:
            mine = self._group.with_view(mine)
        self.frozen.keep(mine)
        return mine

    def inner_step_took(self, busy_s: float) -> None:
        """Update the average of the device-busy seconds per inner step, which bounds the wait for a partner."""
        self._step_busy_s = busy_s if not self._step_busy_s else 0.8 * self._step_busy_s + 0.2 * busy_s

    async def at_border(self) -> None:
        """Between two inner steps, with nothing in flight: merge what has arrived, and start the round that is due.

        A round without a partner merges at once. The node waits only for the last round of a run, or without
        `outer.overlap` for every round. While it waits, its intake is closed, so that no wait is circular. A node that
        is leaving starts no round.
        """
        node, outer, opened = self._node, self._node.manifest.outer, self._open
        if outer.pairing == "none":
            return
        if self._rule.gradients:
            node.publish(outer_round=node.step)
            return
        done, is_last = node.advert.outer_round, node.step >= node.manifest.steps
        if opened is not None:
            done = max(done, opened.mine.round)
        due = schedule.due_round(node.step, outer.inner_steps, done, node.manifest.steps)
        begins, going_on = not node.draining, None
        if opened is not None and (due is not None or opened.pull.done()):
            useful = due is not None and due - opened.pulled_in <= outer.max_stale_rounds
            if begins and useful and not (self._rule.common or opened.pull.done()):
                going_on = opened
            if self._rule.common and not opened.pull.done():
                self._close_intake()
            if going_on is None or not self._rule.lasting:
                await self.end("late", wait=bool(self._rule.common), cancel=going_on is None)
        if due is not None and begins:
            await self._begin(due, going_on, outer.overlap and not is_last)

    async def before_step(self) -> float:
        """Under a rule of gradients, run the round of the coming inner step, and wait for it. Inner steps that a later
        stage takes after its clock has reached the end have no round. Returns the seconds spent waiting for others."""
        node, run = self._node, self._node.manifest
        if self._rule.gradients and run.outer.pairing != "none" and node.step < run.steps and not node.draining:
            return await self._begin(node.step + 1, None, False)
        return 0.0

    async def _begin(self, due: int, going_on: OpenRound | None, goes_on: bool) -> float:
        """Freeze a round and start its pull. The round stays open while the snapshot is in transit; unless training
        `goes_on`, the node waits for it here. Returns the seconds spent waiting. A pull that is still `going_on` from
        an earlier round serves this one as well."""
        node = self._node
        if not goes_on:
            self._close_intake()
        with node.span("outer"):
            frozen_at, mine = node.now(), await self.freeze(due)
        if self._rule.lasting:
            node.publish(outer_round=due)
        if going_on is not None and not self._rule.lasting:
            self._open = replace(going_on, mine=mine, frozen_at=frozen_at)
        elif going_on is None:
            if mine.view is not None:
                pulled, anybody = self._group.pull(mine, goes_on), bool({*mine.view.peers} - {node.me})
            else:
                choice = self._choose_partner(due)
                pulled, anybody = self._pull(mine, choice, goes_on), choice.partner is not None
            pull = asyncio.create_task(pulled, name=f"outer round {due}")
            pull.add_done_callback(node.task_ended)
            self._open = OpenRound(mine, pull, due, frozen_at)
            goes_on &= anybody
        return 0.0 if goes_on else await self.end("", wait=True)

    async def end(self, reason: str, *, wait: bool = False, cancel: bool = True) -> float:
        """End the open round, if there is one: merge what has arrived, or alone for `reason`; or `wait` for its pull.

        A node that is to leave waits no longer. Without `cancel`, an unfinished pull continues for the next round.
        Returns the seconds counted as idle.
        """
        opened, node, idle_s = self._open, self._node, 0.0
        if opened is None:
            return idle_s
        with node.span("outer"):
            began, is_there, why = node.now(), opened.pull.done(), ForRound(opened.mine.round)
            if wait:
                await node.waits.until(
                    lambda: opened.pull.done() or node.draining, "outer round", Resource.SWARM, why=why
                )
            pull = Pull("leaving" if wait else reason)  # waited for, it is unfinished only if this node leaves
            if cancel:
                await self.forget()
                pull = pull if opened.pull.cancelled() else opened.pull.result()
            if wait and not is_there:
                idle_s = node.now() - began
                node.event("idle", cause="partner", seconds=idle_s)
            # Replicas that each merge alone no longer share φ: after a restart, all but one would become copies.
            if not (opened.pull.cancelled() and self._rule.common and not self._rule.gradients):
                await self._merge(opened, pull)
        return idle_s

    async def forget(self) -> None:
        """Give up the open round, if there is one. It will be due again when training continues."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.pull.cancel()
            with self._node.waits.waiting("outer round", Resource.SWARM):
                await asyncio.wait([opened.pull])

    async def _merge(self, opened: OpenRound, pull: Pull) -> None:
        """Apply N1 to N3."""
        node, mine, self.ahead = self._node, opened.mine, pull.ahead
        if pull.ahead:
            return
        if any(abs(one.round - mine.round) > node.manifest.outer.max_stale_rounds for one in pull.theirs):
            pull = Pull("too old")
        with node.waits.computing("merge"):
            replica_std = await node.stage.merge(mine, pull.theirs, pull.counted)
        if not self._rule.gradients:
            node.publish(outer_round=max(mine.round, node.advert.outer_round))
        trained = node.inner_steps - mine.inner_steps
        found = {"asked_again": pull.asked_again, "trained": trained, "left_out": pull.left_out}
        node.event(
            "outer_round",
            round=mine.round,
            result=pull.result(mine, bool(self._rule.common)),
            partner=pull.theirs[0].peer if pull.theirs and not self._rule.common else None,
            reason=pull.reason,
            seconds=node.now() - opened.frozen_at,
            bytes=pull.nbytes,
            **{name: n for name, n in found.items() if n},
        )
        if replica_std is not None:
            node.event("replica_std", value=replica_std)

    # --- pulling ----------------------------------------------------------------------------------------------------

    def _choose_partner(self, round: int) -> PartnerChoice:
        """Choose the replica to pull from in this round.

        A replica that is new to the stage is nobody's partner until its first complete outer interval is over. Until
        then it draws its own partner at random, because the others' pairing does not include it yet.
        """
        node, outer = self._node, self._node.manifest.outer
        mates = {a.peer_id: a for a in self._swarm.partners(round)}
        is_matched = outer.pairing == "matched" and node.advert.partner_from_round <= round
        kind: Literal["matched", "random"] = "matched" if is_matched else "random"
        hidden = {advert.peer_id for advert in (node.advert, *mates.values()) if advert.is_hidden}
        chosen = pairing.partner(kind, node.manifest.seed, round, sorted(mates), node.me, node.rng, hidden)
        return PartnerChoice(mates, hidden, *chosen)

    async def _pull(self, mine: FrozenRound, choice: PartnerChoice, goes_on: bool) -> Pull:
        """The partner's snapshot of the same round, else its newest, else another replica's, else none."""
        node, members, trials = self._node, self._swarm.members, self._puller.trials
        mates, hidden, chosen, reason = choice
        if chosen is None:
            return Pull(reason)
        failure = "aside"
        if not members.is_aside(chosen, now=node.now()) and chosen in trials.among([*mates]):
            found = await self._puller.try_fetch(mates[chosen], mine, self._partner_wait_s(goes_on), goes_on)
            if found.theirs:
                return replace(found, reason=reason)
            failure = found.reason
        others = [p for p in sorted(mates) if p != chosen and not members.is_aside(p, now=node.now())]
        if not others:
            return Pull(failure)
        # Peers that have answered with a snapshot before exist; others may only be listed.
        likely = pairing.without_relay(trials.among(others, proven=True), node.me, hidden)
        found = await self._puller.try_fetch(mates[node.rng.choice(likely)], mine, 0.0, goes_on)
        return replace(found, reason=failure, other=True) if found.theirs else found

    def _partner_wait_s(self, goes_on: bool) -> float:
        """How long to wait for a partner that has not reached the round, seconds. By default two inner steps: in wall
        time if the replica trains on, otherwise in device-busy time, because the wait would lengthen the wall time of
        the steps by which it is measured."""
        outer, took = self._node.manifest.outer, self._node.step_seconds
        if outer.partner_wait_s is not None:
            return outer.partner_wait_s
        return 2 * (median(took) if goes_on and took else self._step_busy_s)

    def lacks_rounds(self) -> bool:
        """Whether these weights lack more than the last round of the run."""
        run, done = self._node.manifest, self._node.advert.outer_round
        left = schedule.due_round(run.steps, run.outer.inner_steps, done + 1, run.steps)
        return run.outer.pairing != "none" and left is not None

    async def freeze_anew(self) -> None:
        """Continue with other weights: forget the rounds frozen so far, and freeze the round of these weights."""
        await self.forget()
        self.frozen.clear()
        await self.freeze(self._node.advert.outer_round)
