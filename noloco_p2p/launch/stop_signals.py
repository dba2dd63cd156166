"""The requests to stop that a launcher hears."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The requests to stop that arrive inside the `with`: the numbers of the signals. What is ignored stays so."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        if number != signal.SIGHUP or not heard:  # a closed terminal may send several
            heard.append(number)

    minded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in minded}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
