"""Local wall-clock time, for `limits.hours`."""

import time
from datetime import datetime


def local_time() -> datetime:
    """The time in the machine's time zone, which changes when a laptop travels: a process looks it up only once."""
    time.tzset()
    return datetime.now()
