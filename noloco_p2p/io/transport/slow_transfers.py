"""Waits for bytes that a peer owes or has to take: how far it may fall behind before it is given up."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from noloco_p2p.core.messages import TensorSpec
from noloco_p2p.errors import PeerError, Unreachable

RESERVE_S = 20.0
"""How far a caller may fall behind with bytes that are due, seconds: enough for a message of 1 MiB at 0.5 Mbit/s."""
STATE_RESERVE_S = 60.0
"""The same for a state, whose bytes are due at an even rate until its deadline."""
RESTART = 0.05
"""Share of its reserve that a peer has again once everything that it owed has been given up: a second, in which what it
sends next can begin to arrive and to earn time."""
MIN_BYTES_PER_S = 8192.0
"""A slower transfer uses up its reserve, and is then aborted."""
LONGEST_REQUEST = 1 << 20
"""Most bytes of a request. The longest asks for a vector, with a byte for each chunk: up to four billion weights."""

T = TypeVar("T")


class Silent(Unreachable):
    """A peer was too slow. Its call accepts no further read or write, because gRPC still has one in progress."""


class Unread(PeerError):
    """The peer does not read what is written. gRPC can no longer end the call, so only the connection can be closed."""


def least_rate(nbytes: int, seconds: float) -> float:
    """The rate at which `nbytes` arrive within `seconds`, but at least MIN_BYTES_PER_S."""
    return max(MIN_BYTES_PER_S, nbytes / seconds)


class Patience:
    """Waits for peers to send or to accept bytes, and lets them fall at most `RESERVE_S` behind `MIN_BYTES_PER_S`.

    Concurrent waits share the allowance. Delays by this node do not count.
    """

    def __init__(self, reserve_s: float | None = None) -> None:
        """`reserve_s` replaces `RESERVE_S`."""
        self._reserve_s = self._left_s = reserve_s or RESERVE_S
        self._at = 0.0
        """When `_left_s` was last updated."""
        self._waits: set[asyncio.Timeout] = set()

    async def wait(
        self,
        transfer: Awaitable[T],
        nbytes: int = 0,
        least_bytes_per_s: float = MIN_BYTES_PER_S,
        error: type[PeerError] = Silent,
    ) -> T:
        """The result of `transfer`. It counts as `nbytes` moved, or as its length if it is bytes. Raises `error`."""
        given_up, came_s = True, 0.0
        self._settle(0.0)
        try:
            async with asyncio.timeout(self._left_s) as timeout:
                self._waits.add(timeout)
                result = await transfer
                given_up, came_s = False, (len(result) if isinstance(result, bytes) else nbytes) / least_bytes_per_s
                return result
        except TimeoutError:
            raise error(f"the peer moved next to no data for {self._reserve_s:g} s") from None
        finally:
            self._settle(came_s)
            self._waits.discard(timeout)
            if given_up and not self._waits:
                self._left_s = max(self._left_s, RESTART * self._reserve_s)
            for other in self._waits if came_s else ():
                if not other.expired():
                    other.reschedule(self._at + self._left_s)

    def reading(
        self, read: Callable[[], Awaitable[T]], least_bytes_per_s: float = MIN_BYTES_PER_S
    ) -> Callable[[], Awaitable[T]]:
        """`read` with this patience. Raises Silent."""
        return lambda: self.wait(read(), 0, least_bytes_per_s)

    def writing(
        self, write: Callable[[bytes], Awaitable[object]], least_bytes_per_s: float = MIN_BYTES_PER_S
    ) -> Callable[[bytes], Awaitable[object]]:
        """`write` with this patience. Raises Unread."""
        return lambda message: self.wait(write(message), len(message), least_bytes_per_s, Unread)

    def _settle(self, came_s: float) -> None:
        now = asyncio.get_running_loop().time()
        spent_s = now - self._at if self._waits else 0.0
        self._at, self._left_s = now, min(self._reserve_s, self._left_s - spent_s + came_s)


def steady_reading(expected: Iterable[TensorSpec], seconds: float) -> Callable[[Callable[[], Awaitable[T]]], Any]:
    """The `Patience.reading` of tensors whose bytes are due at an even rate."""
    rate = least_rate(sum(spec.nbytes for spec in expected), seconds)
    return partial(Patience(STATE_RESERVE_S).reading, least_bytes_per_s=rate)


async def read_request(context: Any, most_bytes: int = LONGEST_REQUEST) -> bytes:
    """The only message of a call with one request. Raises Silent, or DecodeError if there is none or it is longer."""
    message: Any = await Patience().reading(context.read)()
    if message is grpc.aio.EOF or len(message) > most_bytes:
        raise DecodeError
    return bytes(message)
