"""Numbers and times as people read them."""

from datetime import UTC, datetime

DASH = "–"


def count(value: float) -> str:
    """`12,345`."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """`12.3k`, for the ticks of an axis."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.3g}"


def size(value: float) -> str:
    """`1.2 MB`, decimal units."""
    for unit_bytes, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit_bytes:
            return f"{value / unit_bytes:.3g} {unit}"
    return f"{value:.0f} B"


def loss(value: float | None) -> str:
    """Nats per token, four digits."""
    return DASH if value is None else f"{value:.4f}"


def figure(value: float | None) -> str:
    """Three digits that count."""
    return DASH if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def share(part: float, whole: float) -> str:
    """`12.3 %`."""
    return f"{100 * part / whole:.1f} %" if whole else DASH


def duration(seconds: float) -> str:
    """`3 min 20 s`, the two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    left = round(seconds)
    told: list[str] = []
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if left >= unit_s or told:
            told.append(f"{left // unit_s} {unit}")
            left %= unit_s
    return " ".join(told[:2])


def clock(at: float) -> str:
    """A Unix time as `2026-01-31 12:00:00` UTC."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return DASH


def peer(peer_id: str) -> str:
    """The end of a peer id, which tells them apart."""
    return peer_id if len(peer_id) <= 12 else f"…{peer_id[-8:]}"
