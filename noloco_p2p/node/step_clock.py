"""The step is a clock (design.md §4): learning rate, outer rounds and the end of the run follow it."""

from noloco_p2p.core import schedule
from noloco_p2p.node.state import NodeState


class StepClock:
    """Moves one node's clock, and measures the speeds that its advert announces."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._stepped_at: float | None = None

    def move(self, microbatches: int, busy_s: float) -> None:
        """step ← step + 1 + ¼·(median − step − ½), and the speeds that the advert announces.

        The speed is that of inner steps: the clock's own would feed on itself, a slow clock be projected as slow.
        Microbatches count by the seconds that the device worked, `busy_s`: all stages pass equally many in a second of
        wall time, whichever of them holds the others back.
        """
        node, manifest = self._node, self._node.manifest
        now, m = node.now(), manifest.outer.inner_steps
        samples = [schedule.project(*clock, m) for clock in node.members.clocks(now=now)]
        if node.index == 0:
            samples.append(node.advert.step + 0.5)
        median = schedule.clock_median(samples)
        step = schedule.advance(node.advert.step, median, manifest.steps, manifest.routing != "balanced")
        if self._stepped_at is not None and now > self._stepped_at:
            took_s = now - self._stepped_at
            node.update(steps_per_s=_smooth(node.advert.steps_per_s, 1 / took_s))
        if microbatches and busy_s > 0:
            node.update(microbatches_per_s=_smooth(node.advert.microbatches_per_s, microbatches / busy_s))
        self._stepped_at = now
        node.stepped()
        node.update(step=step)


def _smooth(old: float, new: float) -> float:
    """A moving average over about ten inner steps, which begins with the first value."""
    return 0.9 * old + 0.1 * new if old else new
