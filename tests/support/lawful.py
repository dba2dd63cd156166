"""Runs simulated swarms and checks the laws of `sim/laws.py`."""

from collections.abc import Callable
from typing import TypeVar

from noloco_p2p.errors import NolocoError
from noloco_p2p.sim import laws
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.process import Outcome, SimProcess

Swarm = TypeVar("Swarm", bound=FaultySwarm)
Judge = Callable[[Swarm, Outcome], None]
"""Raises AssertionError if a law does not hold."""


def broken(swarm: Swarm, judge: Judge[Swarm] = laws.judge) -> str | None:
    """Run the swarm. Returns the first law that it breaks; None if all hold."""
    try:
        judge(swarm, swarm.run())
    except (AssertionError, NolocoError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def check(swarm: FaultySwarm) -> Outcome:
    """Run a swarm and check every law. Raises AssertionError, Deadlock, or the error that a node or handler raised."""
    outcome = swarm.run()
    laws.judge(swarm, outcome)
    return outcome


def training(process: SimProcess) -> laws.Spans:
    """Start and end of each period in the state `training`."""
    return [span for period in process.periods(0.0) for span in period.training]
