"""Local wall-clock time, for `limits.hours`."""

import time
from datetime import datetime


def local_time() -> datetime:
    """The time in the machine's current time zone, which changes when a laptop travels. Without `tzset` a process would
    keep the zone that it started with."""
    time.tzset()
    return datetime.now()
