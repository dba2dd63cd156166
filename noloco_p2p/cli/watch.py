"""`noloco top`, `doctor`, `track` and `report`: ways to observe a run. Heavy imports are inside the commands."""

import os
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option

from noloco_p2p.cli.options import ConfigFile, Json, NodeUrl, Settings, SwarmAddresses

Tracker = Literal["tensorboard", "wandb"]
TRACKERS = "tensorboard|wandb"


def write_report(
    dir: Annotated[list[Path], Argument(metavar="DIR", help="Directory of noloco swarm, or of a node; repeatable.")],
    out: Annotated[Path, Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
    csv: Annotated[Path | None, Option(metavar="FILE", help="Write the series as CSV, instead of a page.")] = None,
) -> None:
    """Write a page about a run, or one that compares several. It reads files: also during a run or after kills."""
    from noloco_p2p.observe.report import page, series

    print(f"{csv}: {series.write(dir, csv):,} rows" if csv else f"{out}: {page.make(dir, out):,} bytes")


def diagnose_machine(
    join: SwarmAddresses = None,
    config: ConfigFile = None,
    set: Settings = None,
    dir: Annotated[
        Path | None, Option(metavar="DIR", help="Directory of a node or a swarm: check it and its swarm.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine, and find out what holds the swarm up. Exit code 0: all is well, 1: warnings, 2: errors."""
    from noloco_p2p.launch import settings
    from noloco_p2p.observe.doctor.examination import run_doctor

    raise Exit(run_doctor(join or (), settings.read(config, os.environ, set or ()), dir, as_json=as_json))


def watch(
    join: SwarmAddresses = None,
    url: NodeUrl = None,
    once: Annotated[bool, Option("--once", help="Print the swarm once and exit.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object and exit.")] = False,
    interval: Annotated[float, Option(metavar="X", min=0.2, max=3600, help="Seconds between readings.")] = 2.0,
) -> None:
    """Watch the whole swarm: stages, nodes, what each waits for. The sentence at the top says how it is doing."""
    from noloco_p2p.observe.top import run_top

    run_top(join or (), url, once=once, as_json=as_json, interval_s=interval)


def track_run(
    to: Annotated[Tracker, Option(metavar=TRACKERS, help="Needs its package: pip install tensorboard, or wandb.")],
    join: SwarmAddresses = None,
    url: NodeUrl = None,
    dir: Annotated[Path | None, Option(metavar="DIR", help="Directory; default: noloco-track/NAME-RUN.")] = None,
) -> None:
    """Write a swarm's figures to TensorBoard or Weights & Biases.

    They form one run there, until the swarm ends or Ctrl-C. Any observer can do this; no node knows of it.
    """
    from noloco_p2p.observe.track import run_track

    run_track(join or (), url, to, dir)
