"""The open waits of a node: everything that it waits for has a name, and is listed here while it lasts.

The node awaits a port, a lock or a condition only inside `Waits.waiting`; tests/node/test_waits.py reads its source.
"""

import asyncio
from types import TracebackType

from noloco_p2p.core.status import Purpose, Wait, WaitTarget


class Waits:
    """The waits of one node. Changed by its event loop only, read from any thread."""

    def __init__(self) -> None:
        self._open: dict[Waiting, None] = {}

    def waiting(
        self,
        what: str,
        whom: WaitTarget,
        deadline_s: float | None = None,
        why: Purpose | None = None,
        *,
        idle: bool = False,
    ) -> "Waiting":
        """A `with` around an await; the arguments are those of core.status.Wait."""
        return Waiting(self._open, (what, whom, deadline_s, why, idle))

    def current(self, now: float) -> tuple[Wait, ...]:
        """All of them, longest first; `now` is on the loop's clock."""
        waits = [wait.as_wait(now) for wait in tuple(self._open)]
        return tuple(sorted(waits, key=lambda wait: (-wait.since_s, wait.what, str(wait.whom), str(wait.why or ""))))


class Waiting:
    """One wait, from the beginning of its `with` to the end."""

    __slots__ = ("_began", "_named", "_open")

    def __init__(
        self, open: "dict[Waiting, None]", named: tuple[str, WaitTarget, float | None, Purpose | None, bool]
    ) -> None:
        self._open = open
        self._named = named
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = asyncio.get_running_loop().time()
        self._open[self] = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._open[self]

    def as_wait(self, now: float) -> Wait:
        """This wait as others read it."""
        what, whom, deadline_s, why, idle = self._named
        return Wait(what, whom, max(0.0, now - self._began), deadline_s, why, idle)
