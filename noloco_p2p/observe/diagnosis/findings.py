"""Input and output of a diagnosis: reports about nodes, and findings about the swarm. Pure values."""

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
"""Upper limit on the length of a sentence, because it may quote strangers; the rest is cut off."""
_NAMED = 3
"""Number of peers named in a list; the others are counted."""


@dataclass(frozen=True, slots=True)
class Report:
    """One node as found by an observer."""

    peer: PeerId
    advert: Advert
    """Its advert from the directory; if that was not asked, the one in its status."""
    status: Status | None
    """Its own status; None if it did not answer."""
    failure: str = ""
    """Why there is no status, as one line."""
    clock_ahead_s: float | None = None
    """Its wall clock minus the observer's, seconds."""
    age_s: float = 0.0
    """Age of the advert, seconds."""

    @property
    def newest(self) -> Advert:
        """The advert in its own status if it answered, otherwise the directory's copy."""
        return self.advert if self.status is None else self.status.advert


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that an observer should know, and what to do about it."""

    severity: Severity
    name: str
    """A short slug: `stage-empty`, `slow-node`, `half-open-link`, `clock`, `disk`, …"""
    peer: PeerId | None
    """The node that is the cause; None if no single node is."""
    sentence: str
    advice: str


@dataclass(frozen=True, order=True, slots=True)
class CallLink:
    """The link from a node to another node that it calls."""

    caller: PeerId
    callee: PeerId


Place = PeerId | AnyReplica | CallLink
"""The place of a problem in a swarm: a node, a stage, or a link."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A finding, and the place in the swarm at which the waits that it causes end."""

    finding: Finding
    at: Place | None
    """None if it is nothing that a node can wait for."""


def at_node(severity: Severity, name: str, peer: PeerId | None, sentence: str, advice: str) -> Cause:
    """A finding about a node, located at that node; with `peer` None, a finding without a place."""
    return Cause(Finding(severity, name, peer, sentence, advice), peer)


def line(text: str) -> str:
    """One printable line of bounded length, made from any text, even a stranger's."""
    return plain(" ".join(plain(text, 2 * LINE_CHARACTERS).split()), LINE_CHARACTERS)


def named(peers: Sequence[PeerId]) -> str:
    """The short ids of up to three peers, and the number of the others: `A, B, C and 4 more`."""
    words = [short_id(peer) for peer in peers[:_NAMED]]
    if len(peers) > _NAMED:
        words.append(f"{len(peers) - _NAMED} more")
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
