"""Asks peers who they are, when a decision depends on them (ARCHITECTURE.md, "What a stranger can do").

Other duties say whom they need to know about; one task asks, PROBES at a time. No microbatch ever waits for it.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from math import inf

from noloco_p2p.core import schedule
from noloco_p2p.core.exchanges import LIFETIMES, PROBES, Exchanges
from noloco_p2p.core.members import STAGE_0_AT_WORK, TRAINED, TRAINING, Members
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import PeerError
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Transport


class Inquiry:
    """What peers have answered to one node."""

    def __init__(self, node: NodeState, members: Members) -> None:
        self._node = node
        self._members = members
        self.exchanges = Exchanges(node.config.directory.ttl_s)
        self._to_ask: dict[PeerId, Advert] = {}
        self.batches = 0
        """How many batches of answers have arrived."""

    async def run(self, transport: Transport, changed: Callable[[], None]) -> None:
        """Ask, and note the answers; `changed` is called after every batch. Never ends."""
        while True:
            await self._node.waits.until(lambda: bool(self._to_ask), "peer to ask", Resource.SWARM, idle=True)
            await asyncio.gather(*(self._ask_one(transport, advert) for advert in self._to_ask.values()))
            self._to_ask.clear()
            self.batches += 1
            changed()
            self._node.waits.pulse()

    def forget(self) -> None:
        """What peers have answered is out of date, whatever this node's clock says: it has stood still."""
        self.exchanges = Exchanges(self._node.config.directory.ttl_s)

    async def _ask_one(self, transport: Transport, advert: Advert) -> None:
        said = None
        with suppress(PeerError), self._node.waits.waiting("description", advert.peer_id, idle=True):
            said = await transport.describe(advert)
        self.exchanges.note(advert.peer_id, said, now=self._node.now())

    def unknown(self, adverts: Iterable[Advert], since: float | None = None) -> list[Advert]:
        """Those of whom it has not turned out recently (or since then) whether they answer."""
        return self.exchanges.unknown(adverts, now=self._node.now(), since=since)

    def ask(self, adverts: Iterable[Advert], since: float | None = None) -> None:
        """Have those asked that were not asked recently (or since then), as many as there is room for now."""
        for advert in self.unknown(adverts, since):
            if advert.peer_id not in self._to_ask and len(self._to_ask) < PROBES:
                self._to_ask[advert.peer_id] = advert
                self._node.waits.pulse()

    async def until_asked(self, adverts: Sequence[Advert], *, anew: bool) -> None:
        """Ask them all, at most PROBES, and wait until each has answered or timed out, which takes seconds.

        `anew`: also those that have answered recently.
        """
        since = self._node.now() if anew else None

        def all_asked() -> bool:
            left = self.unknown(adverts, since)
            self.ask(left, since)
            return not left

        await self._node.waits.until(all_asked, "answers", Resource.SWARM)

    async def answering_now(self, adverts: Sequence[Advert], states: Set[str]) -> list[Advert]:
        """Those of a few of them that answer, and are in one of these states, when they are asked anew."""
        asked = self.few(adverts)
        await self.until_asked(asked, anew=True)
        return self.answering(asked, states)

    def few(self, adverts: Sequence[Advert]) -> Sequence[Advert]:
        """PROBES of them, to be asked: first those that have answered, then those whose microbatches arrived, then a
        random order that is the same every time."""
        if len(adverts) <= PROBES:
            return adverts
        node, now = self._node, self._node.now()

        def order(peer: PeerId) -> tuple[bool, bool, float]:
            unknown = self.exchanges.said(peer, now=now) is None
            return unknown, self._members.heard_at(peer) == -inf, generator(node.manifest.seed, node.me, peer).random()

        return sorted(adverts, key=lambda advert: order(advert.peer_id))[:PROBES]

    def were_asked(self, adverts: Iterable[Advert]) -> bool:
        """Whether it is known of each of them if it answers."""
        return all(self.exchanges.was_asked(advert.peer_id) for advert in adverts)

    def answering(self, adverts: Iterable[Advert], states: Set[str]) -> list[Advert]:
        """Those that have recently answered, with the stage of their adverts and one of these states."""
        return self.exchanges.proven(adverts, states, now=self._node.now())

    def is_silent(self, peer: PeerId) -> bool:
        """The peer was asked recently, and gave no answer."""
        return self.exchanges.silent_s(peer, now=self._node.now()) > 0

    def is_gone(self, peer: PeerId) -> bool:
        """The peer has not answered for as long as an answer counts, and none of its microbatches arrived. If one did,
        this node may have been out of reach itself."""
        return self.silent_s(peer) > LIFETIMES * self._node.config.directory.ttl_s

    def silent_s(self, peer: PeerId, since: float = -inf) -> float:
        """For how long, from `since` on, the peer has been asked in vain, and no microbatch of it arrived."""
        now = self._node.now()
        return min(self.exchanges.silent_s(peer, now=now, since=since), now - self._members.heard_at(peer))

    def as_it_says(self, advert: Advert) -> Advert | None:
        """The advert, with what the peer has just said; None: it is silent."""
        said = self.exchanges.said(advert.peer_id, now=self._node.now())
        if said is None:
            return None
        return replace(advert, stage=said.stage, state=said.state, outer_round=said.outer_round, step=said.step)

    # --- the clocks of stage 0 --------------------------------------------------------------------------------------

    def clocks(self) -> list[float]:
        """The clocks of the stage-0 replicas that answer, projected to now: who is only listed moves no clock."""
        node, m = self._node, self._node.manifest.outer.inner_steps
        answering = self.answering(self._members.of_stage(0, TRAINING), TRAINED)
        most = schedule.most_projected(m, len(self._members), node.advert.steps_per_s)
        return [schedule.project(*clock, most) for clock in self._members.clocks(answering, now=node.now())]

    def ask_first_stage(self) -> None:
        """While this node trains: ask a few whose clocks may count, and learn whether they are at work."""
        if self._node.advert.state == "training":
            self.ask(self.few(self._members.of_stage(0, STAGE_0_AT_WORK)))
