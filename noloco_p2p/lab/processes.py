"""Processes for measurements: started afresh, and ended together with the command, however it ends."""

import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from noloco_p2p.errors import LocalError


class ShieldedProcess(SpawnProcess):
    """A process that never sees Ctrl-C, not even while it is still importing: the command handles it."""

    def start(self) -> None:
        """Start it with interrupts blocked, a setting that it inherits."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class FreshContext(SpawnContext):
    """Starts processes afresh: grpc and torch do not survive a fork, and a measurement must not inherit the state of
    another."""

    Process = ShieldedProcess


FRESH = FreshContext()


@contextmanager
def workers(count: int, **environment: str) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes with these environment variables, started as tasks are submitted.

    They are terminated at once if an exception leaves the `with` block. Raises LocalError if one of them dies.
    """
    before = multiprocessing.active_children()
    pool = ProcessPoolExecutor(count, FRESH, initializer=_as_a_worker)
    own = dict(os.environ)
    os.environ.update(environment)
    try:
        yield pool
    except BaseException as error:
        for child in multiprocessing.active_children():
            if child not in before:
                child.terminate()
        # This waits for the pool's thread, because Python's own end races with it (concurrent.futures.process).
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            what = "a worker process has died (out of memory?): give --jobs 1, fewer --replicas, or a smaller run"
            raise LocalError(what) from error
        raise
    finally:
        for name in environment:
            os.environ.pop(name, None)
        os.environ.update(own)
    pool.shutdown()


def allow_forks() -> None:
    """Let libraries in this worker fork processes, which end together with it. The worker must not use gRPC."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.util.register_after_fork(_as_a_worker, lambda begin: begin())


@contextmanager
def peer_process(serve: Callable[..., Awaitable[None]], *args: Any) -> Iterator[Any]:
    """A second process that runs `serve(ready, *args)` in an event loop. Yields what it passed to `ready`, such as its
    ports.

    Raises LocalError if the process ends before that.
    """
    mine, theirs = FRESH.Pipe()
    process = FRESH.Process(target=_serve, args=(theirs, serve, args), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            ready = mine.recv()
        except EOFError:
            raise LocalError("the second process of the measurement has failed") from None
        yield ready
    finally:
        process.kill()
        process.join()


def peak_bytes() -> int:
    """Peak memory of this process, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _as_a_worker() -> None:
    threading.Thread(target=_end_with_the_command, daemon=True).start()


def _end_with_the_command() -> None:
    command = multiprocessing.parent_process()
    if command is not None:
        command.join()
        os._exit(1)


def _serve(connection: Connection, serve: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
    import uvloop

    from noloco_p2p.io.transport.allocator import tune_allocator

    _as_a_worker()
    tune_allocator()
    uvloop.run(serve(connection.send, *args))
