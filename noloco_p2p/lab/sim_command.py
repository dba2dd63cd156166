"""`noloco sim`: simulated swarms. One run with its figures, a range of seeds, or the same run twice for comparison.

Worker processes import this module, so it does not load torch.
"""

import dataclasses
import json
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from traceback import format_tb
from typing import Any

from rich.console import RenderableType

from noloco_p2p.errors import ConfigError, NolocoError
from noloco_p2p.lab import scenario_files, sim_output
from noloco_p2p.lab.processes import peak_bytes, workers
from noloco_p2p.lab.sim_output import SwarmPosition
from noloco_p2p.launch import homes
from noloco_p2p.launch.progress_line import ProgressLine
from noloco_p2p.observe import terminal
from noloco_p2p.sim import figures, laws
from noloco_p2p.sim.figures import RunFigures
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.scenario import Scenario
from noloco_p2p.sim.simulation import build
from noloco_p2p.sim.telemetry import hash_of
from noloco_p2p.sim.throughput_bound import throughput_bound

OK, FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class SimOptions:
    """The options of the command."""

    path: Path | None = None
    """The scenario's file; None: the default scenario."""
    nodes: int | None = None
    sets: tuple[str, ...] = ()
    seed: int | None = None
    """None: 0, unless there are `seeds`."""
    seeds: str | None = None
    """`A:B`: from A up to but not including B."""
    as_json: bool = False
    trace: Path | None = None
    check: bool = False
    plots: Path | None = None
    jobs: int = 1


def run_sim(options: SimOptions) -> int:
    """Run the command and return its exit code. Raises ConfigError if options conflict or a file cannot be read."""
    _check(options)
    scenario = scenario_files.load(options.path, options.sets)
    words = ["noloco", "sim", *([str(options.path)] if options.path else [])]
    if options.nodes is not None:
        try:
            scenario = scenario.of_nodes(options.nodes)
        except ConfigError as error:
            raise ConfigError(f"--nodes: {error}") from error
        words += ["--nodes", str(options.nodes)]
    words += [word for one in options.sets for word in ("--set", one)]
    if not options.as_json:
        print(f"simulating {_headline(scenario)}, {scenario.run.steps} steps", file=sys.stderr, flush=True)
    if options.seeds is not None:
        return _many([SimRequest(scenario, seed, tuple(words)) for seed in seeds_of(options.seeds)], options)
    return (_twice if options.check else _once)(SimRequest(scenario, options.seed or 0, tuple(words)), options)


def seeds_of(text: str) -> range:
    """`A:B` as a range. Raises ConfigError if it is malformed, empty or too long, or if a seed is too large."""
    found = re.fullmatch(r"(\d{1,19}):(\d{1,19})", text)
    if not found or not int(found[1]) < int(found[2]) <= min(2**63, int(found[1]) + 100_000):
        raise ConfigError(f"--seeds {text}: write it as A:B, at most 100,000 seeds from A to B - 1")
    return range(int(found[1]), int(found[2]))


def _check(options: SimOptions) -> None:
    """Reject before the first run what would only fail after the last."""
    if options.seeds is not None:
        seeds_of(options.seeds)
        for name in ("seed", "trace", "plots", "check"):
            if getattr(options, name) is not getattr(SimOptions(), name):
                raise ConfigError(f"--{name} is for a single run: leave out --seeds")
    if options.check and options.plots is not None:
        raise ConfigError("--check makes no plots: leave out --plots")
    if options.trace is not None and options.trace == options.plots:
        raise ConfigError(f"--trace and --plots are both {options.trace}: name two")
    for path in filter(None, (options.trace, options.plots)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no directory {path.parent}")
        homes.check_room(path if path.is_dir() else path.parent, 0, "")
    if options.plots is not None:
        homes.require("--plots ", options.plots, homes.Home.PLOTS, homes.Home.EMPTY)
    if options.trace is not None:
        homes.require_page("--trace ", options.trace, sim_output.TRACE_MARK, "trace")


# --- the runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A run to simulate."""

    scenario: Scenario
    seed: int
    words: tuple[str, ...] = ()
    """The command for this scenario, without its seed."""

    @property
    def replay(self) -> str:
        """The command that repeats this run."""
        return shlex.join([*self.words, "--seed", str(self.seed)])


@dataclass(frozen=True, slots=True)
class SimRun:
    """The result of one run."""

    request: SimRequest
    figures: RunFigures | None
    """None if the run did not reach its end."""
    broken: str | None
    """Which law is broken, or why the run did not reach its end; None if all is well."""
    wall_s: float
    """Wall-clock seconds of the simulation."""
    peak_bytes: int
    """Peak memory of its process."""
    outcome: Outcome | None = None
    """Only if requested, and only in the process that simulated the run."""
    lines: tuple[str, ...] = ()
    """The trace, if requested."""


def simulate(
    request: SimRequest, *, with_lines: bool = False, with_outcome: bool = False, position: SwarmPosition | None = None
) -> SimRun:
    """Run a swarm to its end, check every law, and compute its figures. Raises ConfigError as `build` does."""
    began_at = time.perf_counter()
    swarm, bound = build(request.scenario, request.seed), throughput_bound(request.scenario, request.seed)
    if position is not None:
        position.swarm = swarm
    outcome, found, broken = None, None, None
    try:
        outcome = swarm.run()
        laws.judge(swarm, outcome)
    except Exception as error:  # noqa: BLE001 - a bug must not keep other seeds from running
        where = [] if isinstance(error, (AssertionError, NolocoError)) else format_tb(error.__traceback__)
        broken = "\n".join([f"{type(error).__name__}: {error}", *where])
    wall_s = time.perf_counter() - began_at
    if outcome is not None:
        tokens, stages = request.scenario.tokens_per_microbatch, len(request.scenario.replicas)
        found = figures.figures(outcome, swarm.network.traffic.byte_counts(), tokens, stages, bound)
    lines = tuple(swarm.trace.lines()) if with_lines else ()
    return SimRun(request, found, broken, wall_s, peak_bytes(), outcome if with_outcome else None, lines)


def simulate_all(requests: Sequence[SimRequest], jobs: int) -> Iterator[SimRun]:
    """Run all requests, `jobs` at a time, without traces and outcomes. Yields results in the order of the requests."""
    if jobs == 1 or len(requests) == 1:
        yield from map(simulate, requests)
        return
    with workers(min(jobs, len(requests))) as pool:
        yield from pool.map(simulate, requests)


def simulate_apart(request: SimRequest, hash_seeds: Sequence[str]) -> list[SimRun]:
    """The same run in separate concurrent processes, each with a different hash seed for text."""
    with ExitStack() as stack:
        waiting = []
        for hash_seed in hash_seeds:
            # The process starts at the first `submit`, with the environment of that moment.
            pool = stack.enter_context(workers(1, PYTHONHASHSEED=hash_seed))
            waiting.append(pool.submit(simulate, request, with_lines=True))
        return [each.result() for each in waiting]


# --- one run ----------------------------------------------------------------------------------------------------------


def _once(request: SimRequest, options: SimOptions) -> int:
    position = SwarmPosition()
    with ProgressLine(position, terminal_only=options.as_json):
        run = simulate(request, with_lines=options.trace is not None, with_outcome=True, position=position)
    if options.trace is not None:
        sim_output.write_trace(options.trace, run.lines)
    drawn: Sequence[Path] = ()
    if options.plots is not None and run.outcome is not None and run.figures is not None:
        drawn = sim_output.draw(run.figures, run.outcome, request.scenario.tokens_per_microbatch, options.plots)
    if options.as_json:
        print(json.dumps(as_json(run), allow_nan=False))
    else:
        _print(_described(run))
        for path in drawn:
            print(path)
    return _exit_code(run)


def as_json(run: SimRun) -> dict[str, Any]:
    """A run as one JSON object. Identical runs differ only in `machine`."""
    request = run.request
    head = {"scenario": request.scenario.name, "seed": request.seed, "replicas": list(request.scenario.replicas)}
    found = dataclasses.asdict(run.figures) if run.figures is not None else {}
    machine = {"wall_s": run.wall_s, "peak_bytes": run.peak_bytes}
    return {**head, **found, "broken": run.broken, "replay": request.replay, "machine": machine}


def _described(run: SimRun) -> list[RenderableType]:
    """A run as text."""
    head, found = f"{_headline(run.request.scenario)}, seed {run.request.seed}", run.figures
    if found is None:
        return [f"{head}: the run did not reach its end"]
    cost = f"simulated in {run.wall_s:.1f} s with {run.peak_bytes / 2**20:,.0f} MiB of peak memory"
    tail = [f"{cost}; all laws hold" if run.broken is None else cost, f"trace_hash {found.trace_hash}"]
    return [head, run.request.scenario.description, "", *sim_output.of_run(found), "", *tail]


# --- the same run twice -----------------------------------------------------------------------------------------------


def first_difference(first: Sequence[str], second: Sequence[str]) -> dict[str, Any] | None:
    """The first `event`, counted from 0, in which two traces differ, and its line in each: None where the run had
    ended. None if the traces are equal."""
    pairs = enumerate(zip_longest(first, second))
    return next(({"event": i, "first": a, "second": b} for i, (a, b) in pairs if a != b), None)


def _twice(request: SimRequest, options: SimOptions) -> int:
    """Compare runs under two hash seeds, which reveals any dependence on set order or memory addresses."""
    with ProgressLine(lambda: ("the same run twice", 0.0), terminal_only=options.as_json):
        first, second = simulate_apart(request, ("1", "2"))
    if options.trace is not None:
        sim_output.write_trace(options.trace, first.lines)
    found, events, trace_hash = first_difference(first.lines, second.lines), len(first.lines), hash_of(first.lines)
    if options.as_json:
        whole = {"equal": found is None, "events": events, "trace_hash": trace_hash, "first_difference": found}
        print(json.dumps(whole))
    elif found is None:
        print(f"equal: {events:,} events in both runs, trace_hash {trace_hash}")
    else:
        print(f"the runs differ from event {found['event']:,} on:")
        print(f"  first:  {found['first'] or 'has ended'}\n  second: {found['second'] or 'has ended'}")
    return max(_exit_code(first), OK if found is None else FAILED)


# --- many seeds -------------------------------------------------------------------------------------------------------


def _many(requests: Sequence[SimRequest], options: SimOptions) -> int:
    failed, flats = list[dict[str, Any]](), list[dict[str, float]]()
    wall_s, done, count = 0.0, 0, len(requests)
    with ProgressLine(lambda: (f"{done} of {count} runs", done / count), terminal_only=options.as_json) as line:
        for run in simulate_all(requests, options.jobs):
            wall_s, done = wall_s + run.wall_s, done + 1
            line.clear()
            if run.figures is not None:
                flats.append(figures.flat(run.figures))
            if _exit_code(run, whole=False) != OK:
                failed.append({"seed": run.request.seed, "broken": run.broken, "replay": run.request.replay})
    scenario = requests[0].scenario
    if options.as_json:
        head = {"scenario": scenario.name, "replicas": list(scenario.replicas), "seeds": options.seeds}
        tail = {"figures": sim_output.spreads(flats), "machine": {"wall_s": wall_s}}
        print(json.dumps({**head, "runs": len(requests), "failed": failed, **tail}, allow_nan=False))
    else:
        _print([f"{_headline(scenario)}, seeds {options.seeds}", "", *(sim_output.of_seeds(flats) if flats else [])])
        print(f"{len(requests):,} runs, {len(failed):,} of which broke a law")
    return FAILED if failed else OK


def _headline(scenario: Scenario) -> str:
    return f"{scenario.name}, {' + '.join(map(str, scenario.replicas))} nodes"


def _exit_code(run: SimRun, *, whole: bool = True) -> int:
    """If a run broke a law, print which one (in full, or its first line) and the command that repeats the run."""
    if run.broken is None:
        return OK
    law = run.broken if whole else run.broken.partition("\n")[0]
    print(f"seed {run.request.seed}: {law}\n  to repeat: {run.request.replay}", file=sys.stderr, flush=True)
    return FAILED


def _print(parts: Iterable[RenderableType]) -> None:
    console = terminal.console()
    for part in parts:
        console.print(part, markup=False)
