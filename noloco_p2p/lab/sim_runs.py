"""Simulated runs, one or many, in this process or in others. Light to import: neither torch nor what draws tables."""

import hashlib
import resource
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace

from noloco_p2p.errors import NolocoError
from noloco_p2p.lab.processes import workers
from noloco_p2p.sim import figures, laws
from noloco_p2p.sim.figures import Figures
from noloco_p2p.sim.outcome import Outcome
from noloco_p2p.sim.scenario import Scenario
from noloco_p2p.sim.simulation import build


@dataclass(frozen=True, slots=True)
class Request:
    """One run that is wanted."""

    scenario: Scenario
    seed: int
    words: tuple[str, ...] = ()
    """The command that asks for this scenario, without its seed."""

    @property
    def replay(self) -> str:
        """The command that makes this run again."""
        return shlex.join([*self.words, "--seed", str(self.seed)])


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it."""

    request: Request
    figures: Figures | None
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


def simulate(request: Request, *, with_lines: bool = False) -> Run:
    """Run a swarm to its end, look whether every law holds, and take its figures. Raises ConfigError as `build`."""
    began_at = time.perf_counter()
    simulation = build(request.scenario, request.seed)
    outcome, found, broken = None, None, None
    try:
        outcome = simulation.run()
        laws.judge(simulation, outcome)
    except (AssertionError, NolocoError) as error:
        broken = f"{type(error).__name__}: {error}"
    wall_s = time.perf_counter() - began_at
    if outcome is not None:
        found = figures.figures(
            outcome, simulation.network.ledger, simulation.tokens_per_microbatch, len(request.scenario.replicas)
        )
    lines = tuple(simulation.trace.lines()) if with_lines else ()
    return Run(request, found, broken, wall_s, peak_bytes(), outcome, lines)


def simulate_all(requests: Sequence[Request], jobs: int) -> Iterator[Run]:
    """All of them, in their order, `jobs` at once, each without its trace and its outcome."""
    if jobs == 1 or len(requests) == 1:
        yield from map(_figures_only, requests)
        return
    with workers(min(jobs, len(requests))) as pool:
        yield from pool.map(_figures_only, requests)


def simulate_apart(request: Request, hash_seeds: Sequence[str]) -> list[Run]:
    """The same run in processes of their own, at once, each with another order of its sets of text."""
    with ExitStack() as stack:
        waiting: list[Future[Run]] = []
        for hash_seed in hash_seeds:
            pool = stack.enter_context(workers(1, PYTHONHASHSEED=hash_seed))
            waiting.append(pool.submit(_without_outcome, request))
        return [each.result() for each in waiting]


def trace_hash(lines: Sequence[str]) -> str:
    """As `Trace.trace_hash` has it."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def peak_bytes() -> int:
    """Most memory that this process has held at once."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _without_outcome(request: Request) -> Run:
    return replace(simulate(request, with_lines=True), outcome=None)


def _figures_only(request: Request) -> Run:
    return replace(simulate(request), outcome=None)
