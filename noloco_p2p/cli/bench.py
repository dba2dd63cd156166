"""`noloco bench`: measurements that users can repeat. Heavy imports are inside the commands."""

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from noloco_p2p import humanize
from noloco_p2p.cli.options import MAX_SEED, ConfigFile, Device, Json, Settings
from noloco_p2p.core.block_format import WireCodec
from noloco_p2p.errors import ConfigError
from noloco_p2p.launch.progress_line import ProgressLine

bench = typer.Typer(help="Measure this machine.", rich_markup_mode=None, no_args_is_help=True)

MAX_S = 86_400.0
"""The longest measurement: a day."""
STEP_S, MESSAGES_PER_S = 0.1, 2_000
"""Limits for announcing long measurements: least time of a step of a swarm and its baseline, most messages a second."""
Measure = Callable[[ProgressLine], Mapping[str, Any]]
"""A measurement; returns its figures, and may tell the line how far it is."""


@bench.command("pipeline")
def bench_pipeline(
    microbatches: Annotated[int, typer.Option(metavar="N", min=1, help="Microbatches per step of a stage-0 node.")] = 4,
    seconds: Annotated[float, typer.Option(metavar="X", min=1, max=MAX_S, help="Length of the measurement.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Measure a 2 x 2 swarm against single processes. The figure is its tokens/s over twice those of one process with
    one thread."""
    from noloco_p2p.lab.bench import pipeline

    least_s = seconds + 2 * pipeline.BASELINE_S
    _report("a 2 x 2 swarm and single processes", lambda _: pipeline.run(microbatches, seconds), as_json, least_s)


@bench.command("transport")
def bench_transport(as_json: Json = False) -> None:
    """Measure the transport against raw TCP. The figures are MiB/s, and the latency of a small call."""
    from noloco_p2p.lab.bench import transport

    _report("the transport and raw TCP", transport.run, as_json)


@bench.command("baseline")
def bench_baseline(
    kind: Annotated[
        Literal["ddp", "fsdp", "diloco", "opendiloco"],
        typer.Option(metavar="KIND", help="ddp, fsdp, diloco or opendiloco."),
    ] = "ddp",
    replicas: Annotated[int, typer.Option(metavar="N", min=1, help="Processes, and nodes in the swarm.")] = 4,
    config: ConfigFile = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Steps; default: the run's.")] = None,
    set: Settings = None,
    as_json: Json = False,
) -> None:
    """Compare a swarm with what you would otherwise run.

    The baseline has as many processes: data parallel, sharded data parallel, or DiLoCo with an outer step every
    outer.inner_steps, by an all-reduce or, as in OpenDiLoCo, by hivemind's averager. The figures are tokens/s, and the
    loss at equal steps and data. Both sides train with AdamW, and the swarm uses the rule noloco, unless
    inner.optimizer or outer.rule is set.
    """
    from noloco_p2p.lab.bench import baseline
    from noloco_p2p.launch import settings

    given = settings.read(config, os.environ, set or (), {"--steps": ("steps", steps)})
    given = given.above(baseline.DEFAULTS)
    plan = baseline.make_plan(kind, replicas, given.manifest(), given.node())
    what = f"{plan.processes} nodes, then {plan.processes} processes: {plan.manifest.steps:,} steps"
    _report(what, lambda line: baseline.run(plan, line), as_json, STEP_S * plan.manifest.steps)


@bench.command("stage")
def bench_stage(
    device: Device = "auto", config: ConfigFile = None, set: Settings = None, as_json: Json = False
) -> None:
    """Measure the stages of a run on one device.

    Seconds per microbatch, deviation from the CPU's results, peak memory. Default: the run of noloco swarm.
    `compute.measured` of a scenario may name a file with the JSON object.
    """
    from noloco_p2p.lab.bench import stage
    from noloco_p2p.launch import settings

    manifest = settings.read(config, os.environ, set or ()).manifest()
    what = f"{humanize.plural(manifest.stages, 'stage')} on {device}"
    _report(what, lambda line: stage.run(device, manifest, line), as_json)


@bench.command("outer")
def bench_outer(as_json: Json = False) -> None:
    """Measure an outer round: seconds and bytes. The stages have 1M and 50M parameters."""
    from noloco_p2p.lab.bench import outer

    _report("outer rounds of stages with 1M and 50M parameters", outer.run, as_json)


@bench.command("monitoring")
def bench_monitoring(
    seconds: Annotated[float, typer.Option(metavar="X", min=5, max=MAX_S, help="Length of the swarm's run.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Measure what share of the cores a node's instruments take."""
    from noloco_p2p.lab.bench import monitoring

    _report("instruments, then a 2 x 2 swarm", lambda _: monitoring.run(seconds), as_json, seconds)


@bench.command("fuzz")
def bench_fuzz(
    messages: Annotated[int, typer.Option(metavar="N", min=100, help="Total number of messages.")] = 10_000,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the messages.")] = 0,
    as_json: Json = False,
) -> None:
    """Send random and mutated messages to a node. They go to whatever strangers can reach of it; counts crashes, stalls
    and memory growth."""
    from noloco_p2p.lab.bench import fuzz

    _report(f"{messages:,} messages", lambda line: fuzz.run(line, messages, seed), as_json, messages / MESSAGES_PER_S)


@bench.command("flood")
def bench_flood(
    pairs: Annotated[
        int, typer.Option(metavar="N", min=1, help="How often each kind of flood is compared with no flood.")
    ] = 3,
    seconds: Annotated[float, typer.Option(metavar="X", min=1, max=MAX_S, help="Length of a window.")] = 20.0,
    kinds: Annotated[
        str, typer.Option(metavar="KIND,...", help="silent, handshakes, connections, streams, bodies.")
    ] = ("silent,handshakes,connections,streams,bodies"),
    as_json: Json = False,
) -> None:
    """Measure what flooding one node costs the swarm. Kinds: connections, handshakes, calls, slow bodies."""
    from noloco_p2p.lab.bench import flood, floods

    named = _names("--kinds", kinds, floods.KINDS)
    least_s = 2 * pairs * len(named) * (seconds + flood.SETTLE_S)
    _report(f"floods of a 2 x 2 swarm: {kinds}", lambda _: flood.run(named, pairs, seconds), as_json, least_s)


@bench.command("churn")
def bench_churn(
    kill_every: Annotated[float, typer.Option(min=1, max=MAX_S, metavar="S", help="Seconds between kills.")] = 10.0,
    minutes: Annotated[
        float, typer.Option(min=0.05, max=MAX_S / 60, metavar="M", help="Minutes during which nodes are killed.")
    ] = 5.0,
    nodes: Annotated[str, typer.Option(metavar="PxD", help="Stages x replicas.")] = "3x3",
    kill_last: Annotated[bool, typer.Option("--kill-last", help="Kill all replicas of a stage for good.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=MAX_SEED, help="Seed of the run and of the kills.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, metavar="K", help="Repeat with K consecutive seeds.")] = 1,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Length of the runs in steps; default: what a swarm does in M minutes."),
    ] = None,
    cold: Annotated[bool, typer.Option(help="Also measure restarts of all nodes, with 2x2 and 3x3.")] = True,
    set: Settings = None,
    as_json: Json = False,
) -> None:
    """Measure what killing and stopping nodes costs a real swarm. The figures are stalls, lost work, and the loss
    against an undisturbed run."""
    from noloco_p2p.lab.bench import churn

    sets = tuple(set or ())
    plan = churn.ChurnPlan(churn.shape_of(nodes), kill_every, minutes, kill_last, seed, seeds, steps, cold, sets)
    plan.check()
    least_s = 0.0 if steps else 2 * seeds * minutes * 60
    _report(f"{nodes} nodes with and without kills", lambda line: churn.run(plan, line), as_json, least_s)


@bench.command("links")
def bench_links(
    rates: Annotated[str | None, typer.Option(metavar="MBIT,...", help="Line rates, Mbit/s each way.")] = None,
    delays: Annotated[str | None, typer.Option(metavar="MS,...", help="One-way latencies, milliseconds.")] = None,
    codecs: Annotated[
        str, typer.Option(metavar="CODEC,...", help="Codecs of hidden states and gradients to measure.")
    ] = "bfloat16",
    nodes: Annotated[str, typer.Option(metavar="PxD", help="Stages x replicas.")] = "2x2",
    seconds: Annotated[float, typer.Option(metavar="X", min=1, max=MAX_S, help="Length of each measurement.")] = 30.0,
    quick: Annotated[bool, typer.Option("--quick", help="Only 50 Mbit/s with 10 and 50 ms, unless given.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="New directory for the page.")] = Path("noloco-links"),
    set: Settings = None,
    as_json: Json = False,
) -> None:
    """Compare swarms behind emulated lines with the simulator.

    Tokens/s and bytes per token of real swarms, and of simulated ones on the same lines. Default: 50, 200 and 1,000
    Mbit/s, 10, 50 and 100 ms.
    """
    from noloco_p2p.lab.bench import links
    from noloco_p2p.lab.bench.churn import shape_of
    from noloco_p2p.launch import homes

    homes.refuse_existing(out)
    lines = links.QUICK_LINES if quick else links.LINES
    mbit = lines[0] if rates is None else links.numbers("--rates", rates)
    ms = lines[1] if delays is None else links.numbers("--delays", delays)
    named = _names("--codecs", codecs, get_args(WireCodec))
    plan = links.LinksPlan(mbit, ms, named, shape_of(nodes), seconds, out, tuple(set or ()))
    plan.check()
    cases = len(mbit) * len(ms) * len(named)
    what = f"{nodes} nodes behind lines: {humanize.plural(cases, 'case')}"
    _report(what, lambda line: links.run(plan, line), as_json, seconds * cases)


def _names(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Parse names separated by commas. Raises ConfigError if one is not known."""
    found = tuple(dict.fromkeys(text.split(",")))
    if not set(found) <= set(known):
        raise ConfigError(f"{option} {text}: name some of {', '.join(known)}")
    return found


def _report(what: str, measure: Measure, as_json: bool, least_s: float = 0.0) -> None:
    """Say what is measured, measure it, and print the figures.

    `least_s`: the least seconds that this takes, if known. More than a minute is announced, and the time left follows
    from it if the measurement does not tell how far it is.
    """
    takes = f"; this takes more than {humanize.duration(least_s)}" if least_s > 60 else ""
    if takes or not as_json:
        print(f"measuring {what}{takes}", file=sys.stderr, flush=True)
    with ProgressLine(terminal_only=as_json, least_s=least_s) as shown:
        figures = measure(shown)
    for line in [json.dumps(figures, allow_nan=False)] if as_json else _lines(figures, ""):
        print(line)


def _lines(figures: Mapping[str, Any], indent: str) -> list[str]:
    """The figures as lines to read, nested ones indented."""
    lines: list[str] = []
    for name, value in figures.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}:", *_lines(value, f"{indent}  ")]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, each in enumerate(value):
                lines += [f"{indent}{name} {number}:", *_lines(each, f"{indent}  ")]
        else:
            lines.append(f"{indent}{name}: {_text(value)}")
    return lines


def _text(value: Any) -> str:
    """A single figure, or a list of them; a dash if there is none."""
    if isinstance(value, float):
        return f"{value:,.5g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or humanize.DASH
    return humanize.DASH if value is None or value == {} else str(value)
