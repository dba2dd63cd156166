"""The requests to stop that a launcher hears."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The requests to stop that arrive inside the `with`: the numbers of the signals. A hangup that nohup ignores is
    none; in the background of a script Ctrl-C is ignored, too, and counts."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        if number != signal.SIGHUP or not heard:  # a closed terminal may send several
            heard.append(number)

    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    minded = (signal.SIGINT, signal.SIGTERM, *(() if nohup else (signal.SIGHUP,)))
    before = {number: signal.signal(number, hear) for number in minded}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
