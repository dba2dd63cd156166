"""What a diagnosis is made from and what it is made of, with the words that it uses. Pure values."""

from dataclasses import dataclass
from typing import Literal

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.status import Status

Severity = Literal["ok", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "warning", "error")
"""From good to bad."""


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


def short(peer: PeerId) -> str:
    """A peer id for people: `12D3…x7Qf`. They all begin alike, so the end is what tells them apart."""
    return peer if len(peer) <= 12 else f"{peer[:4]}…{peer[-5:]}"
