"""The signals by which a launcher is asked to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The numbers of the signals that arrive inside the `with` and ask to stop, in order.

    SIGHUP does not count if it was ignored before, as under nohup. SIGINT always counts, although the background
    processes of a script start with it ignored.
    """
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
