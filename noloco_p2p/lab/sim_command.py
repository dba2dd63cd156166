"""`noloco sim`: simulated swarms. One run with its figures, a range of seeds, or the same run twice to compare.

Runs are made in `sim_runs`, which worker processes import too; here the options are read and the results printed.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_p2p.errors import ConfigError
from noloco_p2p.lab import scenario_files, sim_runs, sim_table
from noloco_p2p.lab.sim_progress import ProgressLine, SwarmPosition
from noloco_p2p.lab.sim_runs import SimRequest, SimRun
from noloco_p2p.observe import terminal
from noloco_p2p.sim.figures import flat
from noloco_p2p.sim.scenario import Scenario
from noloco_p2p.sim.telemetry import hash_of

if TYPE_CHECKING:
    from rich.console import RenderableType

OK, FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class SimOptions:
    """The options of the command."""

    path: Path | None = None
    """The scenario's file; none: the default scenario."""
    nodes: int | None = None
    sets: tuple[str, ...] = ()
    seed: int | None = None
    """None: 0, where there are no `seeds`."""
    seeds: str | None = None
    """`A:B`: from A up to B, which is left out."""
    as_json: bool = False
    trace: Path | None = None
    check: bool = False
    plots: Path | None = None
    jobs: int = 1


def run_sim(options: SimOptions) -> int:
    """Run the command; its exit code. Raises ConfigError for what does not go together or cannot be read."""
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
    if options.seeds is not None:
        return _many([SimRequest(scenario, seed, tuple(words)) for seed in seeds_of(options.seeds)], options)
    request = SimRequest(scenario, options.seed or 0, tuple(words))
    return _twice(request, options) if options.check else _once(request, options)


def seeds_of(text: str) -> range:
    """`A:B` as a range. Raises ConfigError when it is none, or empty."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise ConfigError(f"--seeds {text}: write it as A:B, the seeds from A up to B, which is left out")
    return range(int(found[1]), int(found[2]))


def _check(options: SimOptions) -> None:
    """Refuse before the first run what would fail after the last."""
    if options.seeds is not None:
        for name in ("seed", "trace", "plots", "check"):
            if getattr(options, name) is not getattr(SimOptions(), name):
                raise ConfigError(f"--{name} is for one run: leave out --seeds")
    if options.check and options.plots is not None:
        raise ConfigError("--check makes no plots: leave out --plots")
    for path in (options.trace, options.plots):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no directory {path.parent}")


# --- one run ----------------------------------------------------------------------------------------------------------


def _once(request: SimRequest, options: SimOptions) -> int:
    position = SwarmPosition()
    with ProgressLine(position, terminal_only=options.as_json):
        run = sim_runs.simulate(request, with_lines=options.trace is not None, on_start=position.follow)
    if options.trace is not None:
        _write(options.trace, run.lines)
    drawn: Sequence[Path] = ()
    if options.plots is not None and run.outcome is not None:
        from noloco_p2p.lab import sim_plots

        drawn = sim_plots.draw(run, options.plots)
    if options.as_json:
        _print_json(as_json(run))
    else:
        _print(_described(run))
        for path in drawn:
            print(path)
    _complain(run)
    return OK if run.broken is None else FAILED


def as_json(run: SimRun) -> dict[str, Any]:
    """A run as one object. Equal runs differ in `machine` only."""
    request = run.request
    head = {"scenario": request.scenario.name, "seed": request.seed, "replicas": list(request.scenario.replicas)}
    figures = dataclasses.asdict(run.figures) if run.figures is not None else {}
    machine = {"wall_s": run.wall_s, "peak_bytes": run.peak_bytes}
    return {**head, **figures, "broken": run.broken, "replay": request.replay, "machine": machine}


def _described(run: SimRun) -> "list[RenderableType]":
    """A run for a person."""
    head, found = f"{_headline(run.request.scenario)}, seed {run.request.seed}", run.figures
    if found is None:
        return [f"{head}: it did not come to its end"]
    cost = f"simulated in {run.wall_s:.1f} s with {run.peak_bytes / 2**20:,.0f} MiB at most"
    tail = [f"{cost}; all laws hold" if run.broken is None else cost, f"trace_hash {found.trace_hash}"]
    return [head, run.request.scenario.description, "", *sim_table.of_run(found), "", *tail]


# --- the same run twice -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """The first event in which two runs differ."""

    event: int
    """Its number, from 0."""
    first: str | None
    """The line of the first run; none: it had ended."""
    second: str | None


def first_difference(first: Sequence[str], second: Sequence[str]) -> TraceDifference | None:
    """Where two traces part; None when they are equal."""
    pairs = enumerate(zip_longest(first, second))
    return next((TraceDifference(number, one, other) for number, (one, other) in pairs if one != other), None)


def _twice(request: SimRequest, options: SimOptions) -> int:
    """Two processes that hash differently: a dependence on the order of a set, or on an address, shows."""
    with ProgressLine(lambda: ("the same run twice", 0.0), terminal_only=options.as_json):
        first, second = sim_runs.simulate_apart(request, ("1", "2"))
    if options.trace is not None:
        _write(options.trace, first.lines)
    found, trace_hash = first_difference(first.lines, second.lines), hash_of(first.lines)
    if options.as_json:
        difference = None if found is None else dataclasses.asdict(found)
        events = len(first.lines)
        _print_json(
            {"equal": found is None, "events": events, "trace_hash": trace_hash, "first_difference": difference}
        )
    elif found is None:
        print(f"equal: {len(first.lines):,} events in both runs, trace_hash {trace_hash}")
    else:
        print(f"the runs differ from event {found.event:,} on:")
        print(f"  first:  {found.first or 'has ended'}")
        print(f"  second: {found.second or 'has ended'}")
    _complain(first)
    return OK if found is None and first.broken is None else FAILED


# --- many seeds -------------------------------------------------------------------------------------------------------


def _many(requests: Sequence[SimRequest], options: SimOptions) -> int:
    failed: list[SimRun] = []
    flats: list[dict[str, float]] = []
    wall_s, done = 0.0, 0
    count = len(requests)
    with ProgressLine(lambda: (f"{done} of {count} runs", done / count), terminal_only=options.as_json) as line:
        for run in sim_runs.simulate_all(requests, options.jobs):
            wall_s, done = wall_s + run.wall_s, done + 1
            if run.figures is not None:
                flats.append(flat(run.figures))
            if run.broken is not None:
                failed.append(run)
                line.clear()
                _complain(run, whole=False)
    scenario = requests[0].scenario
    if options.as_json:
        head = {"scenario": scenario.name, "replicas": list(scenario.replicas), "seeds": options.seeds}
        broken = [{"seed": run.request.seed, "broken": run.broken, "replay": run.request.replay} for run in failed]
        tail = {"figures": sim_table.spreads(flats), "machine": {"wall_s": wall_s}}
        _print_json({**head, "runs": len(requests), "failed": broken, **tail})
    else:
        head_line = f"{_headline(scenario)}, seeds {options.seeds}"
        _print([head_line, "", *(sim_table.of_seeds(flats) if flats else [])])
        print(f"{len(requests):,} runs, {len(failed):,} in which a law does not hold")
    return FAILED if failed else OK


def _headline(scenario: Scenario) -> str:
    return f"{scenario.name}, {' + '.join(map(str, scenario.replicas))} nodes"


def _complain(run: SimRun, *, whole: bool = True) -> None:
    """If a law does not hold in a run: print which one, in full or its first line, and the command that replays it."""
    if run.broken is not None:
        law = run.broken if whole else run.broken.partition("\n")[0]
        print(f"seed {run.request.seed}: {law}\n  again: {run.request.replay}", file=sys.stderr, flush=True)


def _write(path: Path, lines: Sequence[str]) -> None:
    """A trace; `sha256sum` of the file is the trace_hash."""
    try:
        path.write_text("\n".join(lines), "utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False))


def _print(parts: "Iterable[RenderableType]") -> None:
    console = terminal.console()
    for part in parts:
        console.print(part, markup=False)
