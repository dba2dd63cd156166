"""Nodes in the simulator that are honest but for what they say and how they answer."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from noloco_p2p.core.messages import Activation, Advert, PeerId, Progress
from noloco_p2p.errors import Busy, Violation
from noloco_p2p.sim.faults import FaultySwarm

REFUSALS = ("silence", "busy", "violation")
"""Ways not to answer."""


class LiarSwarm(FaultySwarm):
    """The `liars` say false things of themselves and of their work, do not answer, or refuse everything."""

    liars: Collection[PeerId] = ()
    false: Mapping[str, Callable[[Any], Any]] = {}
    """Field → what a liar says instead of the true value, wherever that field occurs in what it sends."""
    refuses: str = ""
    """One of REFUSALS, or nothing."""
    lies_told: int = 0
    """How often a liar has said something false, or has not answered as it should."""

    def start(self, stage: int, replica: int) -> None:
        """As in `FaultySwarm`."""
        super().start(stage, replica)
        process = self.processes[-1]
        transport, directory, *_ = process.ports
        call, submit, announce = transport._call, transport._submit, directory.announce

        async def ask(peer: Advert, invoke: Any, deadline_s: float, what: str, **rest: Any) -> Any:
            if peer.peer_id not in self.liars:
                return await call(peer, invoke, deadline_s, what, **rest)
            answer = await call(peer, self._answer(what) or invoke, deadline_s, what, **rest)
            return [self._told(one) for one in answer] if isinstance(answer, list) else self._told(answer)

        async def send(peer: Advert, sent: Activation, *rest: Any) -> Any:
            header = replace(sent.header, origin=self._told(sent.header.origin))
            return await submit(peer, replace(sent, header=header), *rest)

        async def tell(advert: Advert, ttl_s: float) -> None:
            await announce(self._told(advert), ttl_s)

        transport._call = ask  # type: ignore[method-assign]
        if process.peer in self.liars:
            transport._submit = send  # type: ignore[assignment,method-assign]
            directory.announce = tell  # type: ignore[method-assign]

    def _told(self, truth: Any) -> Any:
        """What a liar says instead. Also a liar says so when it leaves."""
        false = {name: lie(getattr(truth, name)) for name, lie in self.false.items() if hasattr(truth, name)}
        if not false or getattr(truth, "state", "") == "left":
            return truth
        self.lies_told += any(false[name] != getattr(truth, name) for name in false)
        return truth._replace(**false) if isinstance(truth, Progress) else replace(truth, **false)

    def _answer(self, what: str) -> Callable[..., Coroutine[Any, Any, Any]] | None:
        """How a liar handles a call, if not as it should. One that refuses everything does describe itself."""

        async def never(*_: object) -> None:
            self.lies_told += 1
            await asyncio.Event().wait()

        async def refuse(*_: object) -> None:
            self.lies_told += 1
            raise Busy("always") if self.refuses == "busy" else Violation("always")

        if self.refuses == "silence":
            return never
        return refuse if self.refuses and what not in ("describe", "progress") else None
