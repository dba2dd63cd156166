"""What a diagnosis is made from and what it is made of, with the words that it uses. Pure values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.status import Status
from noloco_p2p.humanize import short_id

Severity = Literal["ok", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "warning", "error")
"""From good to bad."""
LINE_CHARACTERS = 400
"""A sentence is cut after so many: what it quotes comes from strangers."""
_NAMED = 3
"""So many of a list are named, the others counted."""


@dataclass(frozen=True, slots=True)
class Report:
    """One node, as an observer found it."""

    peer: PeerId
    advert: Advert | None
    """What the directory says of it; None when the directory has nothing, or was not asked."""
    status: Status | None
    """What it says itself; None: it could not be had."""
    failure: str = ""
    """Why there is no status, one line."""
    clock_ahead_s: float | None = None
    """Its wall clock minus the observer's, seconds."""
    age_s: float = 0.0
    """How old the advert is, seconds."""

    @property
    def newest(self) -> Advert | None:
        """The newest that is known of where it stands: its own word before the directory's."""
        return self.advert if self.status is None else self.status.advert


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that an observer should know, and what to do about it."""

    severity: Severity
    name: str
    """A short slug: `stage-empty`, `slow-node`, `half-open-link`, `clock`, `disk`, …"""
    peer: PeerId | None
    """The node that is the cause, where it is one."""
    sentence: str
    advice: str


# --- words ------------------------------------------------------------------------------------------------------------


def line(text: str) -> str:
    """One printable line of bounded length, whatever a stranger put into it."""
    flat = "".join(letter if letter.isprintable() else " " for letter in text[: 2 * LINE_CHARACTERS])
    flat = " ".join(flat.split())
    return flat if len(flat) <= LINE_CHARACTERS else f"{flat[: LINE_CHARACTERS - 1]}…"


def named(peers: Sequence[PeerId]) -> str:
    """A few peers by their short ids, the others counted."""
    told = [short_id(peer) for peer in peers[:_NAMED]]
    if len(peers) > _NAMED:
        told.append(f"{len(peers) - _NAMED} more")
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}" if told else "nobody"
