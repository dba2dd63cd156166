"""Simulated runs, one or many, in this process or in others. Light to import: neither torch nor what draws tables."""

import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace

from noloco_p2p.errors import NolocoError
from noloco_p2p.lab.processes import workers
from noloco_p2p.sim import figures, laws
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.figures import RunFigures
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.scenario import Scenario
from noloco_p2p.sim.simulation import build
from noloco_p2p.sim.throughput_bound import throughput_bound


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A run to be made."""

    scenario: Scenario
    seed: int
    words: tuple[str, ...] = ()
    """The command that asks for this scenario, without its seed."""

    @property
    def replay(self) -> str:
        """The command that makes this run again."""
        return shlex.join([*self.words, "--seed", str(self.seed)])


@dataclass(frozen=True, slots=True)
class SimRun:
    """The result of one run."""

    request: SimRequest
    figures: RunFigures | None
    """None: the run did not come to its end."""
    broken: str | None
    """The first law that does not hold, in words."""
    wall_s: float
    """Seconds that the simulation took."""
    peak_bytes: int
    """Most memory that its process ever held."""
    outcome: Outcome | None = None
    """Only where the run was made in this process."""
    lines: tuple[str, ...] = ()
    """The trace, where it was asked for."""


def simulate(
    request: SimRequest, *, with_lines: bool = False, on_start: Callable[[FaultySwarm], object] = lambda swarm: None
) -> SimRun:
    """Run a swarm to its end, look whether every law holds, and take its figures. Raises ConfigError as `build`.

    `on_start` gets the swarm before it runs, to watch it from another thread.
    """
    began_at = time.perf_counter()
    scenario = request.scenario
    swarm = build(scenario, request.seed)
    bound = throughput_bound(scenario, request.seed)
    on_start(swarm)
    outcome, found, broken = None, None, None
    try:
        outcome = swarm.run()
        laws.judge(swarm, outcome)
    except (AssertionError, NolocoError) as error:
        broken = f"{type(error).__name__}: {error}"
    wall_s = time.perf_counter() - began_at
    if outcome is not None:
        tokens, stages = scenario.tokens_per_microbatch, len(scenario.replicas)
        found = figures.figures(outcome, swarm.network.byte_counts, tokens, stages, bound)
    lines = tuple(swarm.trace.lines()) if with_lines else ()
    return SimRun(request, found, broken, wall_s, peak_bytes(), outcome, lines)


def simulate_all(requests: Sequence[SimRequest], jobs: int) -> Iterator[SimRun]:
    """All of them, in their order, `jobs` at once, each without its trace and its outcome."""
    if jobs == 1 or len(requests) == 1:
        yield from map(_figures_only, requests)
        return
    with workers(min(jobs, len(requests))) as pool:
        yield from pool.map(_figures_only, requests)


def simulate_apart(request: SimRequest, hash_seeds: Sequence[str]) -> list[SimRun]:
    """The same run in processes of their own, at once, each with another order of its sets of text."""
    with ExitStack() as stack:
        waiting: list[Future[SimRun]] = []
        for hash_seed in hash_seeds:
            pool = stack.enter_context(workers(1, PYTHONHASHSEED=hash_seed))
            waiting.append(pool.submit(_without_outcome, request))
        return [each.result() for each in waiting]


def peak_bytes() -> int:
    """Most memory that this process has held at once."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _without_outcome(request: SimRequest) -> SimRun:
    return replace(simulate(request, with_lines=True), outcome=None)


def _figures_only(request: SimRequest) -> SimRun:
    return replace(simulate(request), outcome=None)
