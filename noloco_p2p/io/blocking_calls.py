"""Threads for calls that may block for as long as somebody else likes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any


class BlockingCalls(ThreadPoolExecutor):
    """Runs calls in threads that do not keep the process alive, unlike those of a ThreadPoolExecutor, and that last as
    long as the process does. Belongs to one event loop. It is a ThreadPoolExecutor by name only, because a loop accepts
    nothing else as its default executor."""

    def __init__(self, name: str, most: int = 1) -> None:
        """`most`: how many calls run at once, in their order."""
        self._name, self._to_start, self._calls = name, most, SimpleQueue[tuple[Future[Any], Callable[[], Any]]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor`."""
        done = Future[Any]()
        self._calls.put((done, partial(fn, *args, **kwargs)))
        if self._to_start:
            self._to_start -= 1
            Thread(target=self._run, name=self._name, daemon=True).start()
        return done

    def shutdown(self, *_: object, **__: object) -> None:
        """Wait for nothing."""

    def _run(self) -> None:
        while True:
            done, call = self._calls.get()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(call())
                except BaseException as error:  # noqa: BLE001  raised again by whoever awaits the future
                    done.set_exception(error)
