"""Watches a swarm that is disturbed: nodes that hang, nodes that crash, and the end of the run."""

import itertools
import time
from collections.abc import Callable

from noloco_p2p.lab.bench.churn_schedule import PAUSE_S
from noloco_p2p.lab.bench.node_fleet import Fleet

HANG_S = 30.0
"""A node hangs when it takes no inner step for this long while every stage is served."""
BEGIN_S = 180.0
"""A node hangs when it takes no first inner step for this long after its start."""
END_S = 120.0
"""All nodes must have left this long after the run's last step."""
LAST_STEPS = 5
"""A swarm is about to end when a replica opens one of its last steps; the clock may jump over the very last."""
QUIET_S = 15.0
"""No node is disturbed any more when the rest of the run is hardly this much longer than a node needs to return."""
RECENT = 3
"""Latest starts that show how long a node needs to return; the first ones, of all nodes at once, take longer."""
READ_EVERY_S = 0.5
SAY_EVERY_S = 20.0

Say = Callable[[str], None]


class ChurnWatch:
    """Notices nodes that hang, nodes that crash, and the end of the run."""

    def __init__(self, fleet: Fleet, steps: int, say: Say) -> None:
        self.hangs: list[str] = []
        self.crashes: list[str] = []
        self.too_late: list[str] = []
        """Killed so shortly before the end that the others had left when they were back."""
        self.over = False
        self._fleet = fleet
        self._steps = steps
        self._say = say
        self._began = self._said_at = self._read_at = self._served_since = time.time()
        self._end_by: float | None = None
        self._reported: set[tuple[str, float]] = set()
        self._booked: set[str] = set()
        self._turns = itertools.cycle(fleet.nodes.values())

    def near_the_end(self, now: float) -> bool:
        """At the speed so far a node that is killed now would hardly be back before the end."""
        step = self._fleet.step
        if self._end_by is not None or step == 0:
            return self._end_by is not None
        needs = PAUSE_S[1] + max(self._fleet.back_s[-RECENT:], default=0.0)
        return (self._steps - step) * (now - self._began) / step < needs + QUIET_S

    def tick(self, now: float) -> None:
        """Look at all nodes once."""
        fleet = self._fleet
        self._restart_crashed(now)
        left = any(node.child.exit_code == 0 and not node.killed for node in fleet.nodes.values())
        if self._end_by is None and (left or fleet.step >= self._steps - LAST_STEPS):
            self._end_by = now + END_S
        if not all(fleet.training().values()):
            self._served_since = now
        if self._end_by is None:
            self._find_hangs(now)
        self._book_ended()
        running = [n.name for n in fleet.nodes.values() if n.child.running or n.restart_at is not None]
        if not running or self._only_latecomers():
            self.over = True
        elif self._end_by is not None and now >= self._end_by:
            self.hangs += [f"{name} did not end within {END_S:g} s of the last step" for name in running]
            self.over = True
        elif now - self._began > HANG_S and self._end_by is None and self._at_a_standstill(now):
            self.hangs.append("the whole swarm makes no progress")
            self.over = True
        self._read_and_say(now)

    def _only_latecomers(self) -> bool:
        """All others have left at the run's end, and these have not trained since they were started again."""
        nodes = self._fleet.nodes.values()
        late = [node for node in nodes if node.killed or (node.child.running and not node.trains)]
        if self._end_by is None or any(node.child.running and node not in late for node in nodes):
            return False
        self.too_late += [node.name for node in late]
        return True

    def _at_a_standstill(self, now: float) -> bool:
        """No node has taken a step for longer than a start takes."""
        return now - max((line.at for line in self._fleet.lines), default=self._began) > BEGIN_S

    def _find_hangs(self, now: float) -> None:
        for node in self._fleet.nodes.values():
            if not node.child.running or node.stopped_until is not None:
                continue
            since = max(node.progressed_at, self._served_since) if node.trains else node.started_at
            limit = HANG_S if node.trains else BEGIN_S
            if now - since > limit and (node.name, node.started_at) not in self._reported:
                self._reported.add((node.name, node.started_at))
                what = "no inner step" if node.trains else "no first inner step"
                self.hangs.append(f"{node.name}: {what} for {limit:g} s")
                self._say(self.hangs[-1])

    def _restart_crashed(self, now: float) -> None:
        for node in self._fleet.crashed():
            last = node.child.last_lines(1)
            self.crashes.append(f"{node.name}: exit code {node.child.exit_code}: {' '.join(last)[:200]}")
            self._say(self.crashes[-1])
            self._fleet.kill(node, 2.0)

    def _book_ended(self) -> None:
        for node in self._fleet.nodes.values():
            if node.child.exit_code == 0 and not node.killed and node.name not in self._booked:
                self._booked.add(node.name)
                node.book()

    def _read_and_say(self, now: float) -> None:
        """One node's metrics at a time, so that reading disturbs none of them."""
        if now - self._read_at >= READ_EVERY_S:
            self._read_at = now
            next(self._turns).read_metrics()
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            training = sum(map(len, self._fleet.training().values()))
            self._say(f"{now - self._began:.0f} s, step {self._fleet.step} of {self._steps}, {training} nodes train")
