"""The Telemetry port: records events in order, with their virtual times, in one trace for the whole swarm."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from noloco_p2p.core.messages import PeerId


class TraceEvent(NamedTuple):
    """One event of one node."""

    at_s: float
    peer: PeerId
    kind: str
    fields: Mapping[str, object]
    """Sorted by name."""

    def get(self, name: str) -> object:
        """A field's value; None if there is no such field."""
        return self.fields.get(name)

    def number(self, name: str) -> float:
        """A field's value as a number. Raises TypeError if it is not a number."""
        value = self.fields.get(name)
        if not isinstance(value, int | float):
            raise TypeError(f"{self.kind} of {self.peer}: {name} is {value!r}, not a number")
        return float(value)


@dataclass(slots=True)
class Trace:
    """The events of all nodes or of one node, in order."""

    events: list[TraceEvent] = field(default_factory=list)

    def of(self, kind: str, peer: PeerId | None = None) -> list[TraceEvent]:
        """All events of a kind, of one node or of all nodes."""
        return [event for event in self.events if event.kind == kind and peer in (None, event.peer)]

    def totals(self, kind: str, by: str, peer: PeerId | None = None) -> Counter[str]:
        """The number of events of a kind for each value of a field."""
        return Counter(str(event.get(by)) for event in self.of(kind, peer))

    def lines(self) -> list[str]:
        """One line per event. Identical runs have identical lines: no memory addresses, and sets are sorted."""
        return [
            f"{at_s!r} {peer} {kind} " + " ".join([f"{name}={_stable(value)}" for name, value in fields.items()])
            for at_s, peer, kind, fields in self.events
        ]

    @property
    def trace_hash(self) -> str:
        """See `hash_of`."""
        return hash_of(self.lines())


def hash_of(lines: Sequence[str]) -> str:
    """SHA-256 of the lines of a trace, in hexadecimal."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _stable(value: object) -> str:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({value})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_stable, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_stable(key)}: {_stable(value[key])}' for key in sorted(value))}}}"
    return repr(value)


class SimTelemetry:
    """The Telemetry port of one node."""

    def __init__(self, trace: Trace, me: PeerId) -> None:
        self.dead = False
        """The node's process has crashed; nothing more is recorded."""
        self.own = Trace()
        """The events of this node only."""
        self._trace = trace
        self._me = me
        self._time = asyncio.get_running_loop().time

    def event(self, kind: str, /, **fields: object) -> None:
        """See `ports.Telemetry`."""
        if self.dead:
            return
        event = TraceEvent(self._time(), self._me, kind, dict(sorted(fields.items())))
        self._trace.events.append(event)
        self.own.events.append(event)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """See `ports.Telemetry`. The seconds are virtual."""
        began_at = self._time()
        try:
            yield
        finally:
            self.event("span", name=name, seconds=self._time() - began_at)
