"""Handlers for signals, and the signals by which a launcher is asked to stop."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Let `handler` handle these signals inside the `with`.

    A signal that is ignored, such as SIGHUP under nohup, stays ignored; except SIGINT, which the background processes
    of a script ignore.
    """
    minded = [one for one in numbers if one == signal.SIGINT or signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in minded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The numbers of the signals that arrive inside the `with` and ask to stop, in order."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        if number != signal.SIGHUP or not heard:  # a closed terminal may send several
            heard.append(number)

    with handled(hear, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield heard
