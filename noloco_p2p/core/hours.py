"""The hours in which a machine may work for the swarm: spans of its local time, such as 22:00-07:00. Pure.

Spans follow the wall clock: where it is put back an hour happens twice, and where it is put forward one is skipped.
A span includes its first minute and excludes its last; a span that ends before it begins crosses midnight.
"""

from collections.abc import Sequence
from datetime import datetime

SPAN = r"(([01][0-9]|2[0-3]):[0-5][0-9])-((([01][0-9]|2[0-3]):[0-5][0-9])|24:00)"
"""A span, as a regular expression."""


def closed_until(spans: Sequence[str], now: datetime) -> str | None:
    """The time of day at which the next span begins; None if one is on now, or if there are no spans (always open).

    `now` is local time, and `spans` match SPAN.
    """
    minute = 60 * now.hour + now.minute
    begins = []
    for span in spans:
        begin, end = (60 * int(text[:2]) + int(text[3:]) for text in span.split("-"))
        if begin <= minute < end or (end <= begin and not end <= minute < begin):
            return None
        begins.append(((begin - minute) % 1440, span[:5]))
    return min(begins)[1] if begins else None
