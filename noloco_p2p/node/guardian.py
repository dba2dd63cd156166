"""Guards the weights of stages that have few replicas: pulls them now and then, keeps the newest, and gives them back.

core/guardians.py decides which node guards which stage. Nothing here makes a ward wait, and no failure here stops the
node. The cost of guarding is bounded twice: weights are pulled again only after some steps or seconds, and after a pull
the guardian rests until guarding has used neither its own line nor a ward's for more than a twentieth of the time.
"""

from collections.abc import Sequence
from math import floor, inf

from noloco_p2p.core import members as membership
from noloco_p2p.core.guardians import GUARDED_REPLICAS, WITH_WEIGHTS, guardians_of, holders
from noloco_p2p.core.messages import Advert, Holding
from noloco_p2p.core.resume import age
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.core.status import ForGuarding, Resource
from noloco_p2p.errors import Declined, PeerError, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Transport

WAIT_S = 3.0
"""How long a ward may delay its answer, until it has reached the round that this node has, seconds. Replicas reach a
round within a few steps of each other."""
AGAIN_S = 2.0
"""Seconds between two pulls from a leaving ward until its last weights have arrived, and the longest wait for them."""
REST = 20.0
"""A pull of t seconds starts at least t·REST before the next, times the number of guardians per replica of the ward."""
LONGER = 4.0
"""Longest pull, in multiples of `outer.deadline_s`: bfloat16 is four times what a round sends in the smallest codec."""
NEVER = (-inf, -inf)
EVERY_STEPS, EVERY_S = 25, 60.0
"""Weights are pulled again after EVERY_STEPS of this node's clock, or after EVERY_S seconds if the steps take longer. A
stage that dies loses no more than that, as far as the line allows. Without this limit, rounds at every step doubled the
bytes of a swarm on one machine, where a pull takes milliseconds."""


class Guardian:
    """Guards other stages for one node. What it holds outlives `run`, which continues from it when called again."""

    def __init__(self, node: NodeState, swarm: Membership, transport: Transport) -> None:
        self._node = node
        self._swarm = swarm
        self._transport = transport
        self._held: dict[int, Snapshot] = {}
        self._last_asked: dict[int, tuple[int, int, float | None]] = {}
        """Stage → what `_signs` was when it last answered."""
        self._pulled: dict[int, tuple[float, float]] = {}
        """Wards that have been asked → when weights last arrived, and this node's step at that time. The first pull is
        made at once, because it matters most."""
        self._rests_until = 0.0

    def snapshot_of(self, stage: int) -> Snapshot | None:
        """The newest weights of another stage that are held here."""
        return self._held.get(stage)

    def holding(self, stage: int) -> Holding | None:
        """What is held of another stage, as adverts list it."""
        held = self._held.get(stage)
        return None if held is None else Holding(stage, held.round, held.step, held.fresh_round)

    async def run(self) -> None:
        """Once this node trains, look after each outer round and reading of the membership what to pull. Never ends."""
        node, swarm = self._node, self._swarm
        await node.waits.until(lambda: node.advert.state == "training", "training", Resource.INNER_STEP, idle=True)
        if node.manifest.stages == 1 or node.manifest.outer.pairing == "none":
            await node.waits.until(lambda: False, "stage to guard", Resource.SWARM, idle=True)

        def news() -> tuple[int, int, int]:
            return node.advert.outer_round, swarm.readings, swarm.inquiry.answers

        while True:
            seen = news()
            self._drop()
            # The stage that has waited longest comes first, because the rest after its pull delays the others.
            for stage in sorted(self._wards(), key=lambda stage: self._pulled.get(stage, NEVER)):
                await self._look_after(stage)
            leaving = any(self._leaving(self._replicas(stage)) for stage in self._wards())
            rest_s = self._rests_until - node.now()
            await node.waits.until(
                lambda seen=seen: news() != seen,  # type: ignore[misc]
                "stage to guard",
                Resource.SWARM,
                AGAIN_S if leaving else rest_s if rest_s > 0 else None,
                idle=True,
            )

    # --- which stages -----------------------------------------------------------------------------------------------

    def _guardians(self, stage: int) -> tuple[str, ...]:
        """The guardians of a stage. Adverts alone never end guarding: more than GUARDED_REPLICAS must answer."""
        node, listed = self._node, self._swarm.members.of_stage(stage, membership.TRAINED)
        found = guardians_of(stage, self._swarm.everybody(), node.manifest.seed)
        return found if len(listed) <= GUARDED_REPLICAS or (node.me in found and self._has_few(listed)) else ()

    def _has_few(self, listed: Sequence[Advert]) -> bool:
        """Whether these replicas have been asked, and at most GUARDED_REPLICAS answer."""
        inquiry = self._swarm.inquiry
        asked = inquiry.few(listed)
        inquiry.ask(asked)
        were_asked = all(inquiry.exchanges.was_asked(advert.peer_id) for advert in asked)
        return were_asked and len(inquiry.answering(asked, membership.TRAINED)) <= GUARDED_REPLICAS

    def _wards(self) -> list[int]:
        """The stages that this node guards now."""
        node = self._node
        return [s for s in range(node.manifest.stages) if s != node.index and node.me in self._guardians(s)]

    def _replicas(self, stage: int) -> Sequence[Advert]:
        """The replicas of a stage that have weights and are not silent."""
        found = self._swarm.members.of_stage(stage, WITH_WEIGHTS)
        return [a for a in found if not self._swarm.inquiry.is_silent(a.peer_id)]

    @staticmethod
    def _leaving(replicas: Sequence[Advert]) -> bool:
        """Whether none of these replicas keeps training. The last one to stop has frozen its weights."""
        return bool(replicas) and all(a.state not in membership.HOLDING for a in replicas)

    # --- pulling ----------------------------------------------------------------------------------------------------

    async def _look_after(self, stage: int) -> None:
        """Pull the ward's weights if there may be newer ones: from one replica, or from another if that fails."""
        node, replicas = self._node, self._replicas(stage)
        if not replicas:
            await self._copy(stage)
            return
        staying = [a for a in replicas if a.state != "draining"]
        if len(staying) < len(replicas):
            # They may have died since they answered, and then the last weights are those of a replica that leaves.
            self._swarm.inquiry.ask(staying, node.now() - AGAIN_S)
        round = self._due(stage, replicas)
        if round is None or node.stood_still:  # after a standstill the others would seem too far ahead
            return
        signs = self._signs(replicas)
        wait_s = AGAIN_S if self._leaving(replicas) else WAIT_S
        for donor in self._in_turn(stage, replicas, round):
            try:
                theirs = await self._fetch(donor, stage, round, wait_s)
            except PeerError as error:
                if isinstance(error, Violation):
                    self._swarm.members.failed(donor.peer_id, now=node.now(), answered=True)
                node.event("warning", message=f"no weights of stage {stage} from {donor.peer_id} to guard: {error}")
                continue
            self._last_asked[stage] = signs
            self._pulled[stage] = node.now(), node.advert.step
            self._keep(stage, theirs)
            return

    async def _copy(self, stage: int) -> None:
        """Copy the weights of a stage that nobody holds any more from another guardian, which may leave or die."""
        node, mine = self._node, self.holding(stage)
        for guardian, theirs in holders(stage, self._swarm.members.all()):
            if mine and ((theirs.age, theirs.step) <= (mine.age, mine.step) or node.now() < self._rests_until):
                return
            if guardian.stage == stage or not node.is_possible(theirs.round, theirs.step):
                continue
            try:
                self._keep(stage, await self._fetch(guardian, stage, theirs.round, 0.0))
                return
            except PeerError as error:
                node.event("warning", message=f"no copy of stage {stage} from {guardian.peer_id}: {error}")

    def _signs(self, replicas: Sequence[Advert]) -> tuple[int, int, float | None]:
        """This node's outer round, the newest that the replicas announced, and if all pause, how far they have trained.
        A change: look again."""
        paused_at = max(a.step for a in replicas) if all(a.state == "paused" for a in replicas) else None
        return self._node.advert.outer_round, max(a.outer_round for a in replicas), paused_at

    def _due(self, stage: int, replicas: Sequence[Advert]) -> int | None:
        """The round to ask for; None if there can be nothing new, or nothing is left to train.

        Round 0 is never asked for: anybody can make it from the seed.
        """
        if all(a.state == "finished" for a in replicas):
            return None
        mine, newest, paused_at = signs = self._signs(replicas)
        held = self._held.get(stage)
        have = held.round if held else 0
        if self._leaving(replicas):
            # The last snapshot of a replica that leaves has its last step, and the number of the next round.
            if held and have > newest and held.step >= max(floor(a.step) for a in replicas):
                return None
            # A replica that leaves is asked until it is gone; one that pauses, only once.
            return None if paused_at is not None and self._last_asked.get(stage) == signs else max(have, newest) + 1
        if stage in self._pulled and (self._node.now() < self._rests_until or (held and self._is_fresh(stage))):
            return None
        goal = max(mine, newest)
        return goal if goal > have and self._last_asked.get(stage) != signs else None

    def _in_turn(self, stage: int, replicas: Sequence[Advert], round: int) -> list[Advert]:
        """The order in which to ask: first replicas that train and are not set aside. Rounds and guardians take turns.

        If no replica keeps training, the one that got furthest comes first, because it has the last weights.
        """
        node = self._node
        guardians = self._guardians(stage)
        turn = round + (guardians.index(node.me) if node.me in guardians else 0)
        turned = [replicas[(turn + i) % len(replicas)] for i in range(len(replicas))]
        now, leaving = node.now(), self._leaving(replicas)

        def order(a: Advert) -> tuple[bool, float, bool]:
            last = -a.step if leaving else a.state not in membership.HOLDING
            return self._swarm.members.is_aside(a.peer_id, now=now), last, node.advert.needs_relay(a)

        return sorted(turned, key=order)

    async def _fetch(self, donor: Advert, stage: int, round: int, wait_s: float) -> Snapshot:
        """Fetch weights. Raises the errors of Transport.fetch_snapshot, Violation if they are not the donor's own, and
        Declined if they are further than the run can be."""
        node = self._node
        expected, round_s = node.stage.state.weights[stage], node.manifest.outer.deadline_s
        request, deadline_s = SnapshotRequest(stage, round, wait_s, expected.dtype), LONGER * round_s
        self._pulled.setdefault(stage, NEVER)
        began = node.now()
        try:
            with node.waits.waiting("weights", donor.peer_id, wait_s + deadline_s, ForGuarding(stage), idle=True):
                theirs = await self._transport.fetch_snapshot(donor, request, deadline_s, (expected,))
        except PeerError:
            if (took_s := node.now() - began) >= round_s:
                self._rest(stage, took_s)  # a transfer that was too slow used the line all the same
            raise
        self._rest(stage, theirs.took_s)
        if donor.stage == stage and theirs.peer != donor.peer_id:
            raise Violation(f"{donor.peer_id} sent the weights of {theirs.peer}")
        if not node.is_possible(theirs.round, theirs.step):
            raise Declined(f"{donor.peer_id} claims an impossible round {theirs.round}, step {theirs.step}")
        return theirs

    def _is_fresh(self, stage: int) -> bool:
        """Whether the last pull is too recent to be repeated."""
        at, step = self._pulled[stage]
        return self._node.now() < at + EVERY_S and self._node.advert.step < step + EVERY_STEPS

    def _rest(self, stage: int, took_s: float) -> None:
        """Set when the next pull may start, depending on how long this one took."""
        shared = len(self._guardians(stage)) / max(1, len(self._replicas(stage)))
        self._rests_until = max(self._rests_until, self._node.now() - took_s) + REST * max(1.0, shared) * took_s

    def _keep(self, stage: int, theirs: Snapshot) -> None:
        held = self.holding(stage)
        # The age decides, not the round (`core.resume`). Anybody can make weights of age 0 from the seed.
        best = (held.age, held.step) if held else (0, inf)
        if stage == self._node.index or (theirs.round - theirs.fresh_round, theirs.step) <= best:
            return
        self._held[stage] = theirs
        self._node.event("guarded", stage=stage, round=theirs.round, bytes=theirs.nbytes)
        self._list_holdings()

    # --- what is held -----------------------------------------------------------------------------------------------

    def _list_holdings(self) -> None:
        """Make the advert list what is held, and while the node moves also its own checkpoints of its new stage."""
        advert, held = self._node.advert, tuple(filter(None, map(self.holding, sorted(self._held))))
        own = [one for one in advert.holds if one.stage == advert.stage and advert.state == "syncing"]
        if (listed := tuple(dict.fromkeys([*own, *held]))) != advert.holds:
            self._node.publish(holds=listed)
            self._node.event("guards", rounds={one.stage: one.round for one in held})

    def _drop(self) -> None:
        """Forget weights that are safe with others, and those of this node's own stage once it has trained ones."""
        node = self._node
        for stage in sorted(self._held):
            is_own, trains = stage == node.index, node.advert.state in membership.HOLDING
            if (is_own and trains) or (not is_own and self._is_safe(stage)):
                del self._held[stage]
                self._last_asked.pop(stage, None)
        self._list_holdings()

    def _is_safe(self, stage: int) -> bool:
        """Whether others keep weights of a stage of at least this node's age: more than GUARDED_REPLICAS replicas have
        them, or all present guardians list them. In both cases they must have answered."""
        held, inquiry = self.holding(stage), self._swarm.inquiry
        assert held is not None, "it is held"
        asked = inquiry.few(self._swarm.members.of_stage(stage, membership.TRAINING))
        if len(asked) > GUARDED_REPLICAS:
            inquiry.ask(asked)
            said = filter(None, map(inquiry.with_answer, inquiry.answering(asked, membership.TRAINING)))
            return sum(age(replica) >= held.age for replica in said) > GUARDED_REPLICAS
        guardians = self._guardians(stage)
        found, mine = holders(stage, self._swarm.members.all()), (held.age, held.step)
        listed = [a for a, theirs in found if a.peer_id in guardians and (theirs.age, theirs.step) >= mine]
        # Never if this node is one of them, because its own advert is not among those listed.
        if not guardians or {guardian.peer_id for guardian in listed} != set(guardians):
            return False
        inquiry.ask(listed)
        return {a.peer_id for a in inquiry.answering(listed, membership.HOLDING)} == set(guardians)
