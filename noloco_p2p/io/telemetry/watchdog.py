"""Says in the log when the node is not well. A thread of its own: a stuck event loop is noticed, too."""

import logging
import threading
from collections.abc import Callable

from noloco_p2p.core.health import HealthProblem, problem
from noloco_p2p.core.status import Status

PERIOD_S = 1.0

logger = logging.getLogger("noloco_p2p")


class Watchdog:
    """Looks at a node's status once a second; one line when something goes wrong, one when that is over.

    `status` is called from the watchdog's thread, `say` gets a line: `say(line, well)`.
    """

    def __init__(
        self, status: Callable[[], Status], say: Callable[[str, bool], None], period_s: float = PERIOD_S
    ) -> None:
        self._status = status
        self._say = say
        self._period_s = period_s
        self._problem: HealthProblem | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more; returns when the thread has ended."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Once: say what has changed. The same problem is said once, however long it lasts."""
        found, before = problem(self._status()), self._problem
        self._problem = found
        if found is not None and (before is None or before.key != found.key):
            self._say(found.line, False)
        elif found is None and before is not None:
            self._say("goes on", True)

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            try:
                self.look()
            except Exception:  # an instrument may never stop what it watches
                logger.debug("the watchdog could not look", exc_info=True)
