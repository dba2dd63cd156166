"""The hours in which a machine may work for the swarm: spans of its local time, such as 22:00-07:00. Pure.

Hours are what the clock on the wall shows: one that is put back shows an hour twice, and one that is put forward leaves
one out. A span begins at its first minute and ends before its last; one that ends before it begins goes over midnight.
"""

from collections.abc import Sequence
from datetime import datetime

SPAN = r"(([01][0-9]|2[0-3]):[0-5][0-9])-((([01][0-9]|2[0-3]):[0-5][0-9])|24:00)"
"""A span, as a regular expression."""


def closed_until(spans: Sequence[str], now: datetime) -> str | None:
    """The time of day at which the next span begins; None: one is on, or there are none, which is always.

    `now` is local time, `spans` match SPAN.
    """
    minute = 60 * now.hour + now.minute
    begins = []
    for span in spans:
        begin, end = (60 * int(text[:2]) + int(text[3:]) for text in span.split("-"))
        if begin <= minute < end or (end <= begin and not end <= minute < begin):
            return None
        begins.append(((begin - minute) % 1440, span[:5]))
    return min(begins)[1] if begins else None
