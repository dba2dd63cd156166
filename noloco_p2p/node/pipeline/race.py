"""Offers a microbatch to several replicas at once; the first to grant a place gets it."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import PeerError
from noloco_p2p.ports import Claim

R = TypeVar("R")


async def first_granted(
    calls: Mapping[PeerId, Callable[[Claim], Coroutine[Any, Any, R]]],
    note: Callable[[PeerId, PeerError], None],
    left: Callable[[], None],
    replying: Callable[[], None] = lambda: None,
) -> tuple[PeerId, R] | None:
    """The reply of the replica that was first to ask for the body, or that had a reply at once; None if all failed.

    Once one call has claimed the body, the others are cancelled. `note` is called with every failure, `left` once the
    body has been sent, `replying` when a reply begins to arrive.
    """
    if len(calls) == 1:
        [(peer, call)] = calls.items()
        try:
            return peer, await call(Claim(lambda: True, left, replying))
        except PeerError as error:
            note(peer, error)
            return None
    tasks: dict[PeerId, asyncio.Task[R]] = {}
    winner: list[PeerId] = []

    def claim(peer: PeerId) -> bool:
        if not winner:
            winner.append(peer)
            for other, task in tasks.items():
                if other != peer:
                    task.cancel()
        return winner[0] == peer

    try:
        for peer, call in calls.items():
            tasks[peer] = asyncio.create_task(call(Claim(partial(claim, peer), left, replying)))
        open = dict(tasks)
        while open:
            await asyncio.wait(open.values(), return_when=asyncio.FIRST_COMPLETED)
            for peer, task in list(open.items()):
                if not task.done():
                    continue
                del open[peer]
                if task.cancelled():
                    continue
                try:
                    return peer, task.result()
                except PeerError as error:
                    note(peer, error)
        return None
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
