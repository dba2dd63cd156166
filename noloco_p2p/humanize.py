"""Formats numbers, sizes and times for people to read. Pure functions that every layer may import."""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from math import isfinite

DASH = "–"
"""Placeholder for an unknown value."""
_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_TIME_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def finite(value: float | None) -> float:
    """The value as a finite float; 0.0 for None and for anything that is not a finite number."""
    try:
        found = float(value or 0.0)
    except (OverflowError, ValueError, TypeError):
        return 0.0
    return found if isfinite(found) else 0.0


def plain(text: str, most: int = 10_000) -> str:
    """One line that is safe to show on a terminal, even if a stranger wrote it: unprintable characters become spaces,
    and the text is cut to `most` characters."""
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


def plain_lines(text: str) -> str:
    """Text that is safe to show on a terminal, even if a stranger wrote it; line ends and tabs are kept."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)


def count(value: float) -> str:
    """`12,345`."""
    return f"{value:,.0f}"


def figure(value: float | None, digits: int = 3) -> str:
    """`0.0123`, `12,345`: `digits` significant digits, but large numbers in full; a dash for None.

    From a millionth up to a million, there is no exponent.
    """
    if value is None:
        return DASH
    if min(10.0**digits - 0.5, 1e3) <= abs(value) < 1e6:
        return f"{value:,.0f}"
    short = f"{value:.{digits}g}"
    return f"{Decimal(short):f}" if 1e-6 <= abs(value) < 1 else short


def compact(value: float | None, digits: int = 3) -> str:
    """`0`, `840`, `12.3k`, `4.1M`: for axes and narrow columns. Anything that is not a finite number counts as 0."""
    number, prefix = _scaled(value, digits)
    return f"{number}{prefix}"


def size_text(value: float | None) -> str:
    """Bytes in decimal units: `840 B`, `1.2 MB`."""
    number, prefix = _scaled(value, 3)
    return f"{number} {prefix}B"


def _scaled(value: float | None, digits: int) -> tuple[str, str]:
    found = finite(value)
    for prefix, unit in _PREFIXES:
        # A value that rounds up to the unit is written in it: 999.9 is 1k, not 1e+03.
        if abs(found) >= (1 - 0.5 * 10.0**-digits) * unit:
            return f"{found / unit:.{digits}g}", prefix
    return f"{found:.{digits}g}", ""


def loss(value: float | None) -> str:
    """Nats per token with four decimals; a dash for None."""
    return DASH if value is None else f"{value:.4f}"


def percent(share: float | None) -> str:
    """A share from 0 to 1 as `12.3 %`; a dash for None."""
    return DASH if share is None else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """`0.0123 s`, `3 min 20 s`, `2 h`: the two largest units, the second one only if it is not 0."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    left = round(seconds)
    larger = next(n for n, (unit_s, _) in enumerate(_TIME_UNITS) if left >= unit_s)
    words = []
    for unit_s, unit in _TIME_UNITS[larger : larger + 2]:
        number, left = divmod(left, unit_s)
        words.append(f"{number} {unit}" if number else "")
    return " ".join(filter(None, words))


def elapsed(seconds: float | None) -> str:
    """`0.4 s`, `42 s`, `3 min`, `2 h`, `5 d`: how long something has lasted, in one unit only."""
    seconds = max(0.0, finite(seconds))
    if seconds < 10.0:
        return f"{seconds:.1f} s"
    for limit, unit, each in ((100.0, "s", 1.0), (6000.0, "min", 60.0), (360_000.0, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / each:.0f} {unit}"
    return f"{min(seconds / 86_400.0, 99_999.0):.0f} d"


def stopwatch(seconds: float) -> str:
    """`1:12`, `1:02:03`."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def progress(step: float, steps: int, tokens_per_s: float | None, loss: float | None) -> tuple[str, str, str]:
    """`step 230/1,000`, `2.6k tok/s`, `loss 2.41`: how far a run is; empty strings for what is unknown."""
    speed = f"{compact(tokens_per_s)} tok/s" if tokens_per_s else ""
    return f"step {int(step):,}/{steps:,}", speed, "" if loss is None else f"loss {loss:.2f}"


def clock(at: float) -> str:
    """A Unix time as `2026-01-31 12:00:00`, in UTC; a dash if it is out of range."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return DASH


def plural(number: int, noun: str) -> str:
    """`1 node`, `3 nodes`, `1,000 nodes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def tally(counts: Mapping[str, int]) -> str:
    """`3 alone, 117 partner`, without zero counts; a dash if nothing is left."""
    return ", ".join(f"{number:,} {name}" for name, number in counts.items() if number) or DASH


def short_id(peer_id: str) -> str:
    """A peer id as `12D3…Qx7Qf`: all peer ids begin alike, so the end tells them apart."""
    return peer_id if len(peer_id) <= 12 else f"{peer_id[:4]}…{peer_id[-5:]}"
