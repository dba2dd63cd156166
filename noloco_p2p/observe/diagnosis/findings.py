"""Input and output of a diagnosis. Pure values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.status import AnyReplica, Status
from noloco_p2p.humanize import plain, short_id

Severity = Literal["ok", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "warning", "error")
"""From good to bad."""
LINE_CHARACTERS = 400
"""Longest sentence. It may quote strangers, so it is cut off."""
_NAMED = 3
"""Number of peers named in a list; the others are counted."""


@dataclass(frozen=True, slots=True)
class Report:
    """One node as found by an observer."""

    peer: PeerId
    advert: Advert | None
    """Its advert from the directory; None: the directory has none, or was not asked."""
    status: Status | None
    """Its own status; None: it did not answer."""
    failure: str = ""
    """Why there is no status, one line."""
    clock_ahead_s: float | None = None
    """Its wall clock minus the observer's, seconds."""
    age_s: float = 0.0
    """How old the advert is, seconds."""

    @property
    def newest(self) -> Advert | None:
        """Its own advert if known, else the directory's copy."""
        return self.advert if self.status is None else self.status.advert


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that an observer should know, and what to do about it."""

    severity: Severity
    name: str
    """A short slug: `stage-empty`, `slow-node`, `half-open-link`, `clock`, `disk`, …"""
    peer: PeerId | None
    """The node that is the cause, if it is a node."""
    sentence: str
    advice: str


@dataclass(frozen=True, order=True, slots=True)
class CallLink:
    """The link from one node to another that it calls."""

    caller: PeerId
    callee: PeerId


Place = PeerId | AnyReplica | CallLink
"""Where in a swarm something is wrong: at a node, a stage, or a link."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A finding, and the place in the swarm at which waits for it end."""

    finding: Finding
    at: Place | None
    """None: nobody can wait for it."""


def at_node(severity: Severity, name: str, peer: PeerId | None, sentence: str, advice: str) -> Cause:
    """A finding about a node, located at that node; without a node nobody can wait for it."""
    return Cause(Finding(severity, name, peer, sentence, advice), peer)


def line(text: str) -> str:
    """One printable line of bounded length, from any text of a stranger."""
    return plain(" ".join(plain(text, 2 * LINE_CHARACTERS).split()), LINE_CHARACTERS)


def named(peers: Sequence[PeerId]) -> str:
    """A few peers by their short ids; the others are counted."""
    words = [short_id(peer) for peer in peers[:_NAMED]]
    if len(peers) > _NAMED:
        words.append(f"{len(peers) - _NAMED} more")
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
