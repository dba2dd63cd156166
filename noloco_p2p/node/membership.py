"""What a node knows about the others, and the one task that uses the directory (ARCHITECTURE.md, "Membership")."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from noloco_p2p.core import members, routing, schedule
from noloco_p2p.core.messages import Advert, Origin, PeerId
from noloco_p2p.core.status import AnyReplica, Resource
from noloco_p2p.errors import PeerError
from noloco_p2p.node.inquiry import Inquiry
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.waits import Waits
from noloco_p2p.ports import Directory

BRISK_S = 0.5
"""Seconds between two readings of the membership while the node does not train."""
ADVERTS_PER_S = 200
"""Most adverts read per second, on average: each has a signature to check, and a swarm can have thousands."""
FIRST_S = 2.0
"""Seconds between two readings at stage 0 until the first inner steps have been timed."""
QUIET_S = 1.0
"""A node in training reads the membership again if no microbatch or gradient has arrived for this long, and for longer
than an inner step with its outer round takes."""
RENEWALS_PER_TTL = 3


@dataclass(frozen=True, slots=True)
class StepView:
    """The membership that an inner step started with, each group sorted by id, this node included where it belongs."""

    origins: tuple[PeerId, ...] = ()
    mates: tuple[PeerId, ...] = ()
    following: tuple[PeerId, ...] = ()
    shares: Mapping[PeerId, float] = field(default_factory=dict)
    """Under `weighted`, the share of each of `following` in the speed of its stage."""
    my_share: float | None = None
    """My share in the speed of my stage; None under the other policies."""


class Membership:
    """The swarm as one node knows it. The node's duties read it; only the methods here change it.

    `members` holds the others' adverts, and the peers not to call for a while. A duty may report the outcome of its own
    calls to it (`failed`, `answered`); everything else in it is changed here.
    """

    def __init__(self, node: NodeState, waits: Waits) -> None:
        self._node = node
        self._waits = waits
        self.members = members.Members(node.me, node.config.directory.ttl_s)
        self.inquiry = Inquiry(node, waits, self.members)
        self.view = StepView()
        self.heard_at = float("-inf")
        """When the last microbatch arrived, or at stage 0 the last gradient."""
        self.deserted: dict[int, float] = {}
        """Stages that nobody serves, as far as this node knows, and since when, on the loop's clock."""
        self.run_ended = False
        """Some node of stage 0 has finished; it may have left since."""

    def read(self, adverts: Sequence[Advert]) -> None:
        """Take over a reading of the directory."""
        node = self._node
        joined, departed = self.members.update(adverts, now=node.now())
        own, counts = (node.advert.stage, node.advert.state), self.members.counts()
        counts[own] = counts.get(own, 0) + 1
        node.event("membership", counts=counts, joined=joined, departed=departed)
        self.look_for_the_end()
        self.inquiry.ask_first_stage()

    def look_for_the_end(self) -> None:
        """The run has ended if a finished node of stage 0 answers so itself. It has also ended if one is or was listed
        and either my clock agrees or nobody has served some stage for longer than adverts outlive their nodes."""
        node, finished, now = self._node, self.members.of_stage(0, {"finished"}), self._node.now()
        if self.run_ended or not (finished or self.members.left_at_step >= node.manifest.steps):
            return
        empty = [since for stage, since in self.deserted.items() if not self.members.anybody(stage)]
        near = node.furthest_step() >= node.manifest.steps
        stands_still = any(now - since > 3 * node.config.directory.ttl_s for since in empty)
        self.run_ended = near or stands_still or bool(self.inquiry.answering(finished, {"finished"}))
        if not self.run_ended:
            self.inquiry.ask(finished)

    def everybody(self) -> list[Advert]:
        """All adverts, mine included."""
        return [*self.members.all(), self._node.advert]

    def fix_view(self) -> None:
        """Fix the membership that the coming inner step starts with."""
        node = self._node

        def ids(stage: int) -> tuple[PeerId, ...]:
            found = self.members.ids(stage, members.READY)
            return tuple(sorted([*found, node.me]) if stage == node.index else found)

        def speeds(stage: int) -> dict[PeerId, float]:
            found = {advert.peer_id: advert.capacity_per_s for advert in self.members.of_stage(stage, members.READY)}
            return found | ({node.me: node.advert.capacity_per_s} if stage == node.index else {})

        self.view = StepView(ids(0), ids(node.index), ids(node.index + 1))
        if node.manifest.routing == "weighted":
            shares, mine = routing.odds(speeds(node.index + 1)), routing.odds(speeds(node.index))[node.me]
            self.view = replace(self.view, shares=shares, my_share=mine)

    def heard(self, origin: Origin | None = None) -> None:
        """A microbatch of `origin` was accepted, or at stage 0 a gradient arrived. Its label counts only as far as its
        origin can have got since it announced itself."""
        self.heard_at = self._node.now()
        if origin is None or (advert := self.members.get(origin.peer)) is None:
            return
        age_s, m = self.heard_at - advert.announced_at, self._node.manifest.outer.inner_steps
        limit = schedule.furthest(advert.step, age_s, self._node.advert.steps_per_s, m)
        self.members.heard(replace(origin, step=min(origin.step, int(limit))), now=self.heard_at)

    def first_stage_is_done(self) -> bool:
        """Some node of stage 0 has finished, and all that are listed as at work have fallen silent."""
        at_work = self.inquiry.few(self.members.of_stage(0, members.STAGE_0_AT_WORK)) if self.run_ended else ()
        return self.run_ended and all(self.inquiry.is_gone(advert.peer_id) for advert in at_work)

    # --- calls to the next stage, and stages without anybody --------------------------------------------------------

    def answered(self, peer: PeerId) -> None:
        """A replica of the next stage has answered, no matter what."""
        self.members.answered(peer)
        if self.deserted:
            self.update_deserted()

    def failed(self, peer: PeerId) -> None:
        """A call to a replica of the next stage has failed."""
        self.members.failed(peer, now=self._node.now())
        self.update_deserted()

    def update_deserted(self, *, reading: bool = False) -> None:
        """Keep `deserted` up to date; report it when it changes, and at each `reading` while it is not empty."""
        node, now = self._node, self._node.now()
        found = self.members.deserted(node.manifest.stages, node.index) if node.advert.state == "training" else []
        changed = found != sorted(self.deserted)
        self.deserted = {stage: self.deserted.get(stage, now) for stage in found}
        if changed or (reading and found):
            node.event("deserted", stages={stage: now - since for stage, since in self.deserted.items()})
        if changed:
            self._waits.pulse()

    def nobody_there(self) -> bool:
        """A later stage has no replica at all, so nothing that stage 0 sends could come back.

        False once some node of stage 0 has finished: then none is needed.
        """
        if not self.deserted or self.run_ended:
            return False
        return any(not self.members.anybody(stage) for stage in self._later_deserted())

    async def until_served(self) -> bool:
        """Wait while a later stage is deserted and has no replica. False: none was deserted, or this node leaves."""
        deserted = self._later_deserted()
        if self.run_ended or not deserted:
            return False
        node = self._node
        await self._waits.until(lambda: node.draining or not self.nobody_there(), "replica", AnyReplica(min(deserted)))
        return not node.draining

    def _later_deserted(self) -> list[int]:
        return [stage for stage in self.deserted if stage > self._node.index]


class MembershipLoop:
    """Announces this node and reads the membership, on a schedule and whenever this node's state changes.

    `changed` is called after every reading.
    """

    def __init__(
        self, node: NodeState, swarm: Membership, waits: Waits, directory: Directory, changed: Callable[[], None]
    ) -> None:
        self._node = node
        self._swarm = swarm
        self._waits = waits
        self._directory = directory
        self._changed = changed
        self._announced: tuple[object, ...] = ()
        self._announced_at = float("-inf")
        self._read_at = float("-inf")
        self._readings = 0

    async def run(self) -> None:
        """The one task that uses the directory; everything else works with what it has read."""
        while True:
            reading = self._reading_is_due()
            if self._has_news() or (self._node.chosen_stage is not None and self._renewal_is_due(reading)):
                await self._announce()
            if reading:
                await self._read()
            calm = not self._swarm.deserted
            await self._waits.until(
                lambda calm=calm: self._has_news() or (calm and bool(self._swarm.deserted)),  # type: ignore[misc]
                "time to look",
                Resource.DIRECTORY,
                self._sleep_s(),
                idle=True,
            )

    async def withdraw(self) -> None:
        """Tell the others that this node has left."""
        try:
            with self._waits.waiting("withdrawal", Resource.DIRECTORY, self._node.config.directory.ttl_s):
                await self._directory.withdraw()
        except PeerError as error:
            self._node.event("warning", message=f"could not tell the others that this node leaves: {error}")

    async def next_reading(self) -> None:
        """Wait for the next reading of the membership."""
        before = self._readings
        await self._waits.until(
            lambda: self._readings > before or self._node.draining, "next reading of the membership", Resource.DIRECTORY
        )

    # --- when -------------------------------------------------------------------------------------------------------

    def _reading_is_due(self) -> bool:
        """Every `refresh_s` in training, and at stage 0 every outer interval. More often if nobody calls any more, or
        while a stage is deserted, to notice soon that a node takes it.

        Clocks are projected by at most two outer intervals, and may be one interval old when they are announced; older
        ones would hold everybody back. Later stages learn the clocks from the labels of their microbatches.
        """
        now = self._node.now()
        if self._is_brisk or now - self._swarm.heard_at > self._quiet_s():
            return now - self._read_at >= self._tick_s
        return now - self._read_at >= self._refresh_s()

    @property
    def _is_brisk(self) -> bool:
        return bool(self._swarm.deserted) or self._node.advert.state != "training"

    @property
    def _tick_s(self) -> float:
        """Shortest time between two readings."""
        return max(min(BRISK_S, self._node.config.directory.refresh_s), len(self._swarm.members) / ADVERTS_PER_S)

    def _quiet_s(self) -> float:
        # Two of them may have been unusual: an evaluation, a stall.
        usual = sorted(self._node.step_seconds)[:-2]
        return max(QUIET_S, usual[-1]) if usual else QUIET_S

    def _refresh_s(self) -> float:
        """Time between two readings in training."""
        node = self._node
        due_s = node.config.directory.refresh_s
        if node.index == 0:
            speed = node.advert.steps_per_s
            due_s = min(due_s, node.manifest.outer.inner_steps / speed if speed else FIRST_S)
        return max(due_s, self._tick_s)

    @property
    def _renewal_s(self) -> float:
        return self._node.config.directory.ttl_s / RENEWALS_PER_TTL

    def _sleep_s(self) -> float:
        """Seconds until something may be due. News, or a stage that becomes deserted, end the sleep."""
        if self._is_brisk:
            return self._tick_s
        quiet_at, read_at = self._swarm.heard_at + self._quiet_s(), self._read_at + self._refresh_s()
        return max(self._tick_s, min(quiet_at, read_at, self._announced_at + self._renewal_s) - self._node.now())

    def _renewal_is_due(self, reading: bool) -> bool:
        """Adverts of stage 0 carry its clocks; those of other stages only have to stay alive."""
        carries_the_clock = self._node.index == 0 and self._node.advert.state == "training"
        return (carries_the_clock and reading) or self._node.now() - self._announced_at >= self._renewal_s

    def _has_news(self) -> bool:
        """Something that others should know at once has changed since the last announcement."""
        return self._node.chosen_stage is not None and self._shown() != self._announced

    def _shown(self) -> tuple[object, ...]:
        a = self._node.advert
        return a.stage, a.state, a.settled, a.evaluated, a.partner_from_round, a.moving_to, a.holds

    # --- the directory ----------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        node, ttl_s = self._node, self._node.config.directory.ttl_s
        self._announced, self._announced_at = self._shown(), node.now()
        try:
            with self._waits.waiting("announcement", Resource.DIRECTORY, ttl_s, idle=True):
                await self._directory.announce(node.advert, ttl_s)
        except PeerError as error:
            self._announced_at = float("-inf")
            node.event("warning", message=f"this node could not be announced: {error}")

    async def _read(self) -> None:
        self._read_at = self._node.now()
        try:
            with self._waits.waiting("membership", Resource.DIRECTORY, self._node.config.directory.ttl_s, idle=True):
                adverts = await self._directory.peers()
        except PeerError as error:
            self._node.event("warning", message=f"the membership could not be read: {error}")
            return
        self._swarm.read(adverts)
        self._readings += 1
        self._changed()
        self._waits.pulse()
