"""`noloco sim`: simulated swarms. One run with its figures, a range of seeds, or the same run twice to compare.

Runs are made in `sim_runs`, which worker processes import too; here is what is asked and what is told.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_p2p.errors import ConfigError
from noloco_p2p.lab import scenarios, sim_runs, sim_table
from noloco_p2p.lab.sim_runs import Request, Run
from noloco_p2p.sim.figures import flat

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100
"""Columns where there is no terminal."""
OK, FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of the command."""

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


def run_sim(order: Order) -> int:
    """Do what is asked; the exit code. Raises ConfigError for what does not go together or cannot be read."""
    _check(order)
    scenario = scenarios.load(order.path, order.sets)
    if order.nodes is not None:
        try:
            scenario = scenario.of_nodes(order.nodes)
        except ValueError as error:
            raise ConfigError(f"--nodes: {error}") from error
    words = ["noloco", "sim", *([str(order.path)] if order.path else [])]
    words += ["--nodes", str(order.nodes)] if order.nodes is not None else []
    words += [word for one in order.sets for word in ("--set", one)]
    if order.seeds is not None:
        return _many([Request(scenario, seed, tuple(words)) for seed in seeds_of(order.seeds)], order)
    request = Request(scenario, order.seed or 0, tuple(words))
    return _twice(request, order) if order.check else _once(request, order)


def seeds_of(text: str) -> range:
    """`A:B` as a range. Raises ConfigError when it is none, or empty."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise ConfigError(f"--seeds {text}: write it as A:B, the seeds from A up to B, which is left out")
    return range(int(found[1]), int(found[2]))


def _check(order: Order) -> None:
    """Refuse before the first run what would fail after the last."""
    single = {"--seed": order.seed is not None, "--trace": order.trace is not None, "--plots": order.plots is not None}
    if order.seeds is not None:
        for option in [option for option, given in {**single, "--check": order.check}.items() if given]:
            raise ConfigError(f"{option} is for one run: leave out --seeds")
    if order.check and order.plots is not None:
        raise ConfigError("--check makes no plots: leave out --plots")
    for place in (order.trace, order.plots):
        if place is not None and not place.absolute().parent.is_dir():
            raise ConfigError(f"{place}: there is no directory {place.parent}")


# --- one run ----------------------------------------------------------------------------------------------------------


def _once(request: Request, order: Order) -> int:
    run = sim_runs.simulate(request, with_lines=order.trace is not None)
    if order.trace is not None:
        _write(order.trace, run.lines)
    drawn: Sequence[Path] = ()
    if order.plots is not None and run.outcome is not None:
        from noloco_p2p.lab import sim_plots

        drawn = sim_plots.draw(run, order.plots)
    if order.as_json:
        print(json.dumps(as_json(run), allow_nan=False))
    else:
        _print(_told(run))
        for path in drawn:
            print(path)
    _complain(run)
    return OK if run.broken is None else FAILED


def as_json(run: Run) -> dict[str, Any]:
    """A run as one object. Equal runs differ in `machine` only."""
    request = run.request
    head = {"scenario": request.scenario.name, "seed": request.seed, "replicas": list(request.scenario.replicas)}
    told = dataclasses.asdict(run.figures) if run.figures is not None else {}
    machine = {"wall_s": run.wall_s, "peak_bytes": run.peak_bytes}
    return {**head, **told, "broken": run.broken, "replay": request.replay, "machine": machine}


def _told(run: Run) -> "list[RenderableType]":
    """A run for a person."""
    scenario = run.request.scenario
    head = f"{scenario.name}, {' + '.join(map(str, scenario.replicas))} nodes, seed {run.request.seed}"
    found = run.figures
    if found is None:
        return [f"{head}: it did not come to its end"]
    cost = f"simulated in {run.wall_s:.1f} s with {run.peak_bytes / 2**20:,.0f} MiB at most"
    tail = [f"{cost}; all laws hold" if run.broken is None else cost, f"trace_hash {found.trace_hash}"]
    return [head, scenario.description, "", *sim_table.of_run(found), "", *tail]


# --- the same run twice -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event in which two runs differ."""

    event: int
    """Its number, from 0."""
    first: str | None
    """The line of the first run; none: it had ended."""
    second: str | None


def first_difference(first: Sequence[str], second: Sequence[str]) -> Difference | None:
    """Where two traces part; None when they are equal."""
    for number in range(max(len(first), len(second))):
        one, other = (lines[number] if number < len(lines) else None for lines in (first, second))
        if one != other:
            return Difference(number, one, other)
    return None


def _twice(request: Request, order: Order) -> int:
    """Two processes that hash differently: what hangs on the order of a set, or on an address, shows."""
    first, second = sim_runs.simulate_apart(request, ("1", "2"))
    if order.trace is not None:
        _write(order.trace, first.lines)
    found = first_difference(first.lines, second.lines)
    if order.as_json:
        told = {"equal": found is None, "events": len(first.lines), "trace_hash": sim_runs.trace_hash(first.lines)}
        print(json.dumps({**told, "first_difference": None if found is None else dataclasses.asdict(found)}))
    elif found is None:
        print(f"equal: {len(first.lines):,} events in both runs, trace_hash {sim_runs.trace_hash(first.lines)}")
    else:
        print(f"the runs differ from event {found.event:,} on:")
        print(f"  first:  {found.first or 'has ended'}")
        print(f"  second: {found.second or 'has ended'}")
    _complain(first)
    return OK if found is None and first.broken is None else FAILED


# --- many seeds -------------------------------------------------------------------------------------------------------


def _many(requests: Sequence[Request], order: Order) -> int:
    failed: list[Run] = []
    flats: list[dict[str, float]] = []
    wall_s = 0.0
    for run in sim_runs.simulate_all(requests, order.jobs):
        wall_s += run.wall_s
        if run.figures is not None:
            flats.append(flat(run.figures))
        if run.broken is not None:
            failed.append(run)
            _complain(run, whole=False)
    scenario = requests[0].scenario
    if order.as_json:
        head = {"scenario": scenario.name, "replicas": list(scenario.replicas), "seeds": order.seeds}
        told = [{"seed": run.request.seed, "broken": run.broken, "replay": run.request.replay} for run in failed]
        spreads = sim_table.spreads(flats)
        machine = {"wall_s": wall_s}
        print(json.dumps({**head, "runs": len(requests), "failed": told, "figures": spreads, "machine": machine}))
    else:
        head_line = f"{scenario.name}, {' + '.join(map(str, scenario.replicas))} nodes, seeds {order.seeds}"
        _print([head_line, "", *(sim_table.of_seeds(flats) if flats else [])])
        print(f"{len(requests):,} runs, {len(failed):,} in which a law does not hold")
    return FAILED if failed else OK


def _complain(run: Run, *, whole: bool = True) -> None:
    """If a law does not hold in a run: say which one, the whole story or its first line, and how it is had again."""
    if run.broken is not None:
        told = run.broken if whole else run.broken.partition("\n")[0]
        print(f"seed {run.request.seed}: {told}\n  again: {run.request.replay}", file=sys.stderr, flush=True)


def _write(path: Path, lines: Sequence[str]) -> None:
    """A trace; `sha256sum` of the file is the trace_hash."""
    try:
        path.write_text("\n".join(lines), "utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _print(parts: "Iterable[RenderableType]") -> None:
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False) if is_terminal else Console(highlight=False, width=WIDTH)
    for part in parts:
        console.print(part, markup=False)
