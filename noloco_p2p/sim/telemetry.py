"""The Telemetry port into one trace for the whole swarm: what happened, in order, at which virtual time."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from noloco_p2p.core.messages import PeerId


class Happening(NamedTuple):
    """One event of one node."""

    at_s: float
    peer: PeerId
    kind: str
    fields: tuple[tuple[str, object], ...]
    """Sorted by name."""

    def get(self, name: str) -> object:
        """A field's value, None where it has none of that name."""
        return dict(self.fields).get(name)


@dataclass(slots=True)
class Trace:
    """What all nodes told, in order."""

    happenings: list[Happening] = field(default_factory=list)

    def of(self, kind: str, peer: PeerId | None = None) -> list[Happening]:
        """All events of a kind, of one node or of all."""
        return [h for h in self.happenings if h.kind == kind and peer in (None, h.peer)]

    def totals(self, kind: str, by: str, peer: PeerId | None = None) -> Counter[str]:
        """How many events of a kind there were, by the value of a field."""
        return Counter(str(h.get(by)) for h in self.of(kind, peer))

    def lines(self) -> list[str]:
        """One line for each event, equal for equal runs: no address, no order of a set."""
        return [
            f"{h.at_s!r} {h.peer} {h.kind} " + " ".join(f"{name}={_stable(value)}" for name, value in h.fields)
            for h in self.happenings
        ]

    @property
    def trace_hash(self) -> str:
        """sha256 over the lines, in hexadecimal."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()


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
        """The process of this node has crashed: it tells nothing any more."""
        self.own = Trace()
        """What this node told, apart from the others."""
        self._trace = trace
        self._me = me

    def event(self, kind: str, /, **fields: object) -> None:
        """See `ports.Telemetry`."""
        if self.dead:
            return
        now = asyncio.get_running_loop().time()
        happening = Happening(now, self._me, kind, tuple(sorted(fields.items())))
        self._trace.happenings.append(happening)
        self.own.happenings.append(happening)

    def span(self, name: str) -> "_Span":
        """See `ports.Telemetry`. The seconds are virtual."""
        return _Span(self, name)


class _Span:
    __slots__ = ("_began", "_name", "_telemetry")

    def __init__(self, telemetry: SimTelemetry, name: str) -> None:
        self._telemetry = telemetry
        self._name = name
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = asyncio.get_running_loop().time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._telemetry.event("span", name=self._name, seconds=asyncio.get_running_loop().time() - self._began)
