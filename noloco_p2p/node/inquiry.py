"""Asks peers who they are when a decision depends on them (ARCHITECTURE.md, "What a stranger can do").

The other duties say which peers they need to know about; one task asks, PROBES at a time. No microbatch ever waits for
this.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from math import inf

from noloco_p2p.core import schedule
from noloco_p2p.core.exchanges import LIFETIMES, PROBES, Exchanges
from noloco_p2p.core.members import HOLDING, STAGE_0_AT_WORK, TRAINED, Members
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import PeerError
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Transport


class Inquiry:
    """Asks peers on behalf of one node, and keeps their answers."""

    def __init__(self, node: NodeState, members: Members) -> None:
        self._node = node
        self._members = members
        self.exchanges = Exchanges(node.config.directory.ttl_s)
        self._to_ask: dict[PeerId, tuple[Advert, bool]] = {}
        """Peers that are or will be asked, and whether a decision depends on it."""
        self.answers = 0
        """Number of peers asked so far on which a decision depended."""

    async def run(self, transport: Transport, changed: Callable[[], None]) -> None:
        """Ask peers and record their answers; `changed` is called after each. Never ends."""
        asked: set[PeerId] = set()

        async def ask(advert: Advert) -> None:
            await self._ask_one(transport, advert)
            self.answers += self._to_ask.pop(advert.peer_id)[1]
            asked.remove(advert.peer_id)
            changed()
            self.meet()
            self._node.waits.pulse()

        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._node.waits.until(
                    lambda: len(self._to_ask) > len(asked), "peer to ask", Resource.SWARM, idle=True
                )
                for peer in [one for one in self._to_ask if one not in asked]:
                    asked.add(peer)
                    tasks.create_task(ask(self._to_ask[peer][0]))

    def forget(self) -> None:
        """Forget all answers. They are out of date after a standstill, even if this node's clock does not show it."""
        self.exchanges = Exchanges(self._node.config.directory.ttl_s)

    async def _ask_one(self, transport: Transport, advert: Advert) -> None:
        peer, said, exchanges = advert.peer_id, None, self.exchanges  # an answer to a question before `forget` is lost
        with suppress(PeerError), self._node.waits.waiting("description", peer, idle=True):
            said = await transport.describe(advert)
        exchanges.note(peer, said, now=self._node.now())
        if said is not None and peer not in self._members.met:
            self._members.answered(peer)
        elif peer not in self._members.met:
            self._members.failed(peer, now=self._node.now())

    def unknown(self, adverts: Iterable[Advert], since: float | None = None) -> list[Advert]:
        """The peers that have not been asked recently (or since `since`)."""
        return self.exchanges.unknown(adverts, now=self._node.now(), since=since)

    def ask(self, adverts: Iterable[Advert], since: float | None = None) -> None:
        """Queue the peers that have not been asked recently (or since `since`), up to PROBES at a time."""
        for advert in self.unknown(adverts, since):
            asked, decides = self._to_ask.get(advert.peer_id, (advert, False))
            if not decides and self._asking(deciding=True) < PROBES:
                self._to_ask[advert.peer_id] = asked, True
                self._node.waits.pulse()

    def meet(self, caller: PeerId | None = None) -> None:
        """Ask peers that have never answered, PROBES at a time: any of those that were asked in vain least often, so
        that a newcomer does not wait behind silent ones, and a `caller` even if PROBES others are being asked."""
        due = {p: n for p, n in self._members.to_meet(now=self._node.now()).items() if p not in self._to_ask}
        fewest, free = min(due.values(), default=0), PROBES - self._asking(deciding=False)
        least = [peer for peer, count in due.items() if count == fewest]
        chosen = self._node.rng.sample(least, min(max(0, free), len(least)))
        if caller in due and caller not in chosen and free > -PROBES:
            chosen.append(caller)
        for advert in filter(None, map(self._members.get, chosen)):
            self._to_ask[advert.peer_id] = advert, False
            self._node.waits.pulse()

    def _asking(self, *, deciding: bool) -> int:
        return sum(decides == deciding for _, decides in self._to_ask.values())

    async def until_asked(self, adverts: Sequence[Advert], *, anew: bool) -> None:
        """Ask these peers, at most PROBES, and wait until each has answered or timed out, which takes seconds.

        `anew`: ask even the peers that have answered recently.
        """
        since = self._node.now() if anew else None

        def all_asked() -> bool:
            left = self.unknown(adverts, since)
            self.ask(left, since)
            return not left

        await self._node.waits.until(all_asked, "answers", Resource.SWARM)

    async def answering_now(self, adverts: Sequence[Advert], states: Set[str]) -> list[Advert]:
        """Ask up to PROBES of these peers anew. Returns those that answer and are in one of these states."""
        asked = self.few(adverts)
        await self.until_asked(asked, anew=True)
        return self.answering(asked, states)

    def few(self, adverts: Sequence[Advert]) -> Sequence[Advert]:
        """Choose up to PROBES peers to ask: first those that have answered before, then those whose microbatches have
        arrived, then the others in a random order that is the same every time, and last those that are doubted."""
        if len(adverts) <= PROBES:
            return adverts
        node, now, doubted = self._node, self._node.now(), self._members.doubted()

        def order(peer: PeerId) -> tuple[bool, bool, bool, bytes]:
            unknown, unheard = self.exchanges.said(peer, now=now) is None, self._members.heard_at(peer) == -inf
            draw = blake2b(f"{node.manifest.seed} {node.me} {peer}".encode()).digest()
            return unknown, unheard and peer in doubted, unheard, draw

        return sorted(adverts, key=lambda advert: order(advert.peer_id))[:PROBES]

    def answering(self, adverts: Iterable[Advert], states: Set[str]) -> list[Advert]:
        """The peers that have recently answered that they hold the stage in their advert and are in one of `states`."""
        return self.exchanges.proven(adverts, states, now=self._node.now())

    def is_silent(self, peer: PeerId) -> bool:
        """Whether the peer was asked recently and did not answer."""
        return self.exchanges.silent_s(peer, now=self._node.now()) > 0

    def is_gone(self, peer: PeerId) -> bool:
        """Whether the peer has not answered for as long as an answer counts, and no microbatch of it has arrived in
        that time. If one has, it may be this node that was out of reach."""
        return self.silent_s(peer) > LIFETIMES * self._node.config.directory.ttl_s

    def silent_s(self, peer: PeerId, since: float = -inf) -> float:
        """For how many seconds since `since` requests to the peer went unanswered, and no microbatch of it arrived."""
        now = self._node.now()
        return min(self.exchanges.silent_s(peer, now=now, since=since), now - self._members.heard_at(peer))

    def with_answer(self, advert: Advert) -> Advert | None:
        """The advert, updated with the peer's recent answer; None if the peer is silent."""
        if (said := self.exchanges.said(advert.peer_id, now=self._node.now())) is None:
            return None
        answered = replace(advert, stage=said.stage, state=said.state, step=said.step)
        return replace(answered, outer_round=said.outer_round, fresh_round=said.fresh_round)

    # --- the clocks of stage 0 --------------------------------------------------------------------------------------

    def clocks(self) -> list[float]:
        """The clocks of the stage-0 replicas that answer, projected to now: those that train, and those that have
        finished, or the slowest would take the run's last steps one by one. Peers that are only listed do not count."""
        node, m = self._node, self._node.manifest.outer.inner_steps
        answering = self.answering(self._members.of_stage(0, HOLDING), TRAINED)
        most = schedule.most_projected(m, len(self._members), node.advert.steps_per_s)
        return [schedule.project(*clock, most) for clock in self._members.clocks(answering, now=node.now())]

    def ask_first_stage(self) -> None:
        """While this node trains, ask a few stage-0 replicas if they are at work, so that their clocks may count."""
        if self._node.advert.state == "training":
            self.ask(self.few(self._members.of_stage(0, STAGE_0_AT_WORK)))
