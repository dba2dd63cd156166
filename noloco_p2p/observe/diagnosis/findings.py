"""What a diagnosis is made from and what it is made of, with the words that it uses. Pure values."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.status import Status

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


def short(peer: PeerId) -> str:
    """A peer id for people: `12D3…Qx7Qf`. They all begin alike, so the end is what tells them apart."""
    return peer if len(peer) <= 12 else f"{peer[:4]}…{peer[-5:]}"


def line(text: str) -> str:
    """One printable line of bounded length, whatever a stranger put into it."""
    flat = "".join(letter if letter.isprintable() else " " for letter in text[: 2 * LINE_CHARACTERS])
    flat = " ".join(flat.split())
    return flat if len(flat) <= LINE_CHARACTERS else f"{flat[: LINE_CHARACTERS - 1]}…"


def number(value: float | None) -> float:
    """A finite float; 0.0 for what is none."""
    try:
        found = float(value or 0.0)
    except (OverflowError, ValueError, TypeError):
        return 0.0
    return found if isfinite(found) else 0.0


def lasted(seconds: float) -> str:
    """`0.4 s`, `42 s`, `3 min`, `2 h`, `5 d`."""
    seconds = max(0.0, number(seconds))
    if seconds < 10.0:
        return f"{seconds:.1f} s"
    for limit, unit, each in ((100.0, "s", 1.0), (6000.0, "min", 60.0), (360_000.0, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / each:.0f} {unit}"
    return f"{min(seconds / 86_400.0, 99_999.0):.0f} d"


def counted(value: float | None) -> str:
    """`0`, `840`, `12.3k`, `4.1M`, `2.0G`."""
    found = number(value)
    for unit in ("", "k", "M", "G", "T"):
        if abs(found) < 1000.0 or unit == "T":
            break
        found /= 1000.0
    return f"{found:.0f}" if not unit else f"{min(found, 999_999.0):.1f}{unit}"


def many(count: int, noun: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def named(peers: Sequence[PeerId]) -> str:
    """A few peers by their short ids, the others counted."""
    told = [short(peer) for peer in peers[:_NAMED]]
    if len(peers) > _NAMED:
        told.append(f"{len(peers) - _NAMED} more")
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}" if told else "nobody"
