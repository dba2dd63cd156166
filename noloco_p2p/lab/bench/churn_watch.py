"""Watches a disturbed swarm for nodes that hang or crash, and for the end of the run."""

import time
from collections.abc import Callable

from noloco_p2p.lab.bench.churn_schedule import PAUSE_S
from noloco_p2p.lab.bench.node_fleet import Fleet

HANG_S = 30.0
"""A node counts as hanging if it takes no inner step for this long while every stage is served."""
BEGIN_S = 180.0
"""A node counts as hanging if it has not taken its first inner step this long after its start."""
END_S = 120.0
"""All nodes must have left within this time after the run's last step."""
LAST_STEPS = 5
"""The swarm is about to end once the clock is within this many steps of the last one, which the clock may skip."""
QUIET_S = 15.0
"""Nodes are left alone once the rest of the run is less than this much longer than a node needs to return."""
RECENT = 3
"""Number of latest starts that tell how long a node needs to return. The first ones, all at once, take longer."""
RESTART_S = 2.0
"""A crashed node is restarted after this time."""


class ChurnWatch:
    """Notices nodes that hang or crash, and the end of the run."""

    def __init__(self, fleet: Fleet, steps: int, say: Callable[[str], None]) -> None:
        self.hangs: list[str] = []
        self.crashes: list[str] = []
        self.too_late: list[str] = []
        """Nodes killed so shortly before the end that the others had left by the time they were back."""
        self.over = False
        self._fleet = fleet
        self._steps = steps
        self._say = say
        self._began = self._served_since = time.time()
        self._end_by: float | None = None
        self._reported: set[tuple[str, float]] = set()

    def near_the_end(self, now: float) -> bool:
        """Whether a node killed now might, at the speed so far, not be back before the end."""
        step = self._fleet.step
        if self._end_by is not None or step == 0:
            return self._end_by is not None
        needs = PAUSE_S[1] + max(self._fleet.back_s[-RECENT:], default=0.0)
        return (self._steps - step) * (now - self._began) / step < needs + QUIET_S

    def tick(self, now: float) -> None:
        """Check all nodes once."""
        fleet, nodes = self._fleet, self._fleet.nodes.values()
        for node in fleet.crashed():
            self._report(self.crashes, f"{node.name}: exit code {node.exit_code}: {' '.join(node.last_lines(1))[:200]}")
            fleet.kill(node, RESTART_S)
        left = any(node.exit_code == 0 and not node.killed for node in nodes)
        if self._end_by is None and (left or fleet.step >= self._steps - LAST_STEPS):
            self._end_by = now + END_S
        if not all(fleet.training().values()):
            self._served_since = now
        running = [node.name for node in nodes if node.running or node.restart_at is not None]
        if not running:
            self.over = True
        elif self._end_by is None:
            self._find_hangs(now)
        elif self._only_latecomers():
            self.over = True
        elif now >= self._end_by:
            self.hangs += [f"{name} did not end within {END_S:g} s of the last step" for name in running]
            self.over = True

    def _only_latecomers(self) -> bool:
        """Whether every node that has not left was killed or has not trained since its restart. If so, notes them."""
        nodes = self._fleet.nodes.values()
        late = [node for node in nodes if node.killed or (node.running and not node.trains)]
        if any(node.running and node not in late for node in nodes):
            return False
        self.too_late += [node.name for node in late]
        return True

    def _find_hangs(self, now: float) -> None:
        for node in self._fleet.nodes.values():
            since = max(node.progressed_at, self._served_since) if node.trains else node.started_at
            limit_s, what = (HANG_S, "no inner step") if node.trains else (BEGIN_S, "no first inner step")
            process = (node.name, node.started_at)
            hangs = node.running and node.stopped_until is None and now - since > limit_s
            if hangs and process not in self._reported:
                self._reported.add(process)
                self._report(self.hangs, f"{node.name}: {what} for {limit_s:g} s")
        # No node has taken a step for longer than a start takes.
        if now - max((line.at for line in self._fleet.lines), default=self._began) > BEGIN_S:
            self.hangs.append("the whole swarm makes no progress")
            self.over = True

    def _report(self, found: list[str], line: str) -> None:
        found.append(line)
        self._say(line)
