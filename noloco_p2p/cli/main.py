"""`noloco`: every command except `noloco-node`. Heavy imports are inside the commands."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option, Typer

from noloco_p2p import __version__, humanize
from noloco_p2p.cli.admit import invite_others, keys, revoke_peers
from noloco_p2p.cli.bench import bench
from noloco_p2p.cli.exits import DEBUG, ended_by_signals, run_app, say
from noloco_p2p.cli.finetune import finetune_model, make_tasks
from noloco_p2p.cli.options import (
    MAX_SEED,
    ConfigFile,
    Device,
    ExportDir,
    Json,
    NodeDir,
    Settings,
    SwarmAddresses,
    WithArguments,
)
from noloco_p2p.cli.watch import TRACKERS, Tracker, diagnose_machine, track_run, watch, write_report

app = Typer(rich_markup_mode=None, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise Exit


@app.callback()
def noloco(
    debug: Annotated[bool, Option(DEBUG, help="Show a traceback on errors.")] = False,
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train a language model on a swarm of peers (NoLoCo)."""


@app.command()
def swarm(
    config: ConfigFile = None,
    stages: Annotated[int | None, Option(metavar="N", min=1, help="Pipeline stages.")] = None,
    replicas: Annotated[int | None, Option(metavar="N", min=1, help="Nodes per stage.")] = None,
    steps: Annotated[int | None, Option(metavar="N", min=1, help="Length of the run in steps.")] = None,
    dir: Annotated[Path | None, Option(metavar="DIR", help="Directory; default: a fresh noloco-runs/NAME-N.")] = None,
    set: Settings = None,
    link: Annotated[
        str | None,
        Option(
            metavar="SPEED[,MS[,JITTER]]",
            help="Put every node behind its own emulated line, such as 200mbit,25ms or 200/20mbit,25ms,3ms: megabits"
            " per second down and up, one-way latency between two nodes, its standard deviation.",
        ),
    ] = None,
    members: Annotated[
        bool, Option("--members", help="Make the run members-only: noloco invite admits others.")
    ] = False,
    plain: Annotated[bool, Option("--plain", help="Print lines instead of a live table.")] = False,
    sample: Annotated[bool, Option("--sample/--no-sample", help="Let the model write a sample at the end.")] = True,
    track: Annotated[
        Tracker | None, Option(metavar=TRACKERS, help="Also write the swarm's figures there, as one run.")
    ] = None,
) -> None:
    """Run a swarm on this machine.

    It has STAGES x REPLICAS node processes on loopback. The final figures are in summary.json of its directory. With
    the --dir of an unfinished run, that run continues with its own settings; only --link must be given again.
    """
    print(f"noloco {__version__}: a swarm on this machine, in {dir or 'a fresh noloco-runs/NAME-N'}", flush=True)
    from noloco_p2p.launch import settings
    from noloco_p2p.launch.swarm import run_swarm

    options = {"--stages": ("stages", stages), "--replicas": ("start_replicas", replicas), "--steps": ("steps", steps)}
    given = settings.read(config, os.environ, set or (), options)
    start_tracking = None
    if track is not None:
        from noloco_p2p.observe import track as tracking

        tracking.check("--track", track)
        start_tracking = partial(tracking.tracked, track)
    raise Exit(run_swarm(given, dir, link, members=members, plain=plain, sample=sample, start_tracking=start_tracking))


@app.command()
def pause(dir: NodeDir) -> None:
    """Pause a running node. It keeps its state but takes no microbatches, so that its device is free for other use."""
    from noloco_p2p.launch import node_probe

    print("\n".join(f"asked to pause: {node}" for node in node_probe.send_signal(dir, node_probe.PAUSE)))


@app.command()
def resume(dir: NodeDir) -> None:
    """Let a paused node continue. It catches up with the others first."""
    from noloco_p2p.launch import node_probe

    print("\n".join(f"asked to resume: {node}" for node in node_probe.send_signal(dir, node_probe.RESUME)))


@app.command(cls=WithArguments)
def configs(
    name: Annotated[str | None, Argument(metavar="NAME", help="Which one to print; default: list them all.")] = None,
) -> None:
    """List the configurations of the package, or print one. --config and noloco sim accept their names."""
    from noloco_p2p.launch import named_configs

    print(named_configs.text(name) if name is not None else "\n".join(named_configs.listing()))


@app.command("export")
def export_model(
    out: Annotated[Path, Option("--out", metavar="DIR", help="Directory to write; it must be new, or empty.")],
    join: SwarmAddresses = None,
    from_: Annotated[
        list[Path] | None,
        Option("--from", metavar="DIR", help="Directory of a run or of a node, with checkpoints; repeatable."),
    ] = None,
    merge: Annotated[
        Literal["mean", "trimmed", "one"],
        Option(
            metavar="mean|trimmed|one",
            help="For each stage: the mean of all replicas, the mean without the outermost quarters, or one replica.",
        ),
    ] = "mean",
    replicas: Annotated[
        bool, Option("--replicas/--no-replicas", help="With a mean, also write each replica, for noloco eval.")
    ] = True,
    tokenizer_dir: Annotated[
        str | None, Option(metavar="DIR", help="Directory with the tokenizer's files, to use instead of the hub.")
    ] = None,
) -> None:
    """Write the model as a Hugging Face directory.

    It is taken from the newest outer round that every stage has. From directories: the weights after that round's
    merge. From a running swarm: the weights with which the replicas entered the round, before the merge.
    """
    from noloco_p2p.launch.export import run_export

    run_export(join or (), from_ or (), out, merge=merge, replicas=replicas, tokenizer_dir=tokenizer_dir, say=say)


@app.command("eval", cls=WithArguments)
def evaluate_model(
    out: ExportDir,
    data: Annotated[
        list[str] | None,
        Option(metavar="DATA", help="stdlib, text files or globs; repeatable. Default: the run's held-out data."),
    ] = None,
    held_out: Annotated[
        bool, Option("--held-out", help="With files: only the part that a run on them would hold out.")
    ] = False,
    microbatches: Annotated[int | None, Option(metavar="N", min=1, help="Evaluate at most N microbatches.")] = None,
    tasks: Annotated[
        str | None, Option(metavar="A,B", help="Instead of the loss: tasks of lm-evaluation-harness (extra eval).")
    ] = None,
    task_dir: Annotated[Path, Option(metavar="DIR", help="With --tasks: where their YAML files are.")] = Path("tasks"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Evaluate an exported model: loss, perplexity, bits per byte. Also the mean over its individual replicas."""
    if tasks is not None:
        from noloco_p2p.launch import task_evaluation

        scores = task_evaluation.run_tasks(out, tasks.split(","), task_dir, device=device)
        print("\n".join([json.dumps(scores, allow_nan=False)] if as_json else task_evaluation.task_lines(scores)))
        return
    from noloco_p2p.launch import evaluation

    figures = evaluation.run_eval(out, data or (), held_out=held_out, microbatches=microbatches, device=device)
    for line in [json.dumps(figures, allow_nan=False)] if as_json else evaluation.table_lines(figures):
        print(line)


@app.command("generate", cls=WithArguments)
def generate_text(
    out: ExportDir,
    prompt: Annotated[str, Option(metavar="TEXT", help="The text to continue.")],
    chat: Annotated[bool, Option("--chat", help="Answer the prompt, with the tokenizer's chat template.")] = False,
    tokens: Annotated[int, Option(metavar="N", min=1, max=sys.maxsize, help="Longest continuation in tokens.")] = 200,
    temperature: Annotated[float, Option(metavar="X", min=0, help="0 always takes the likeliest token.")] = 0.8,
    seed: Annotated[int, Option(metavar="N", min=0, max=MAX_SEED, help="Seed of the sampling.")] = 0,
    device: Device = "auto",
) -> None:
    """Continue a prompt with an exported model. Text appears as it is made; a terminal gets only printable text."""
    from noloco_p2p.launch.evaluation import run_generate

    text = run_generate(out, prompt, tokens=tokens, temperature=temperature, seed=seed, device=device, chat=chat)
    for piece in text:
        print(humanize.plain_lines(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    print()


@app.command("sim", cls=WithArguments)
def simulate(
    scenario: Annotated[
        Path | None,
        Argument(metavar="FILE|NAME", help="YAML file, or one of noloco configs by its name; default: lan."),
    ] = None,
    nodes: Annotated[int | None, Option(min=1, metavar="N", help="Number of nodes, spread over the stages.")] = None,
    seed: Annotated[int | None, Option(metavar="N", min=0, max=MAX_SEED, help="Seed of the run; default: 0.")] = None,
    seeds: Annotated[str | None, Option(metavar="A:B", help="One run per seed from A up to, not including, B.")] = None,
    set: Settings = None,
    as_json: Json = False,
    trace: Annotated[
        Path | None, Option(metavar="FILE", help="Write every event; sha256sum of the file is the trace_hash.")
    ] = None,
    check: Annotated[bool, Option("--check", help="Run twice, in two processes; show the first difference.")] = False,
    plots: Annotated[Path | None, Option(metavar="DIR", help="Draw the run as SVG files.")] = None,
    jobs: Annotated[int, Option(metavar="N", min=1, help="With --seeds: parallel runs.")] = 2,
) -> None:
    """Simulate a swarm.

    Real nodes run in one process under virtual time, with a network, faults, and a seed. Exit code 1 if a law that must
    hold in every run is broken, or if the two runs of --check differ.
    """
    from noloco_p2p.lab.sim_command import SimOptions, run_sim

    options = SimOptions(scenario, nodes, tuple(set or ()), seed, seeds, as_json, trace, check, plots, jobs)
    raise Exit(run_sim(options))


@app.command(cls=WithArguments)
def experiment(
    name: Annotated[str | None, Argument(metavar="NAME", help="Which one; default: list them all.")] = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Where to write; default: noloco-experiments/NAME[-quick].")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="A smaller version that takes minutes.")] = False,
    jobs: Annotated[int, Option(metavar="N", min=1, help="Parallel cases, each with one thread.")] = 2,
) -> None:
    """Answer one of the questions about the method.

    The result is a report with figures, plots, and every run with its seed. If it is stopped, the same command
    continues where it left off.
    """
    from noloco_p2p.lab.experiments import EXPERIMENTS, find, runner

    if name is None:
        width = max(map(len, EXPERIMENTS))
        print("\n".join(f"{one:<{width}}  {about}" for one, (_, about) in EXPERIMENTS.items()))
    else:
        place = out or Path("noloco-experiments") / f"{name}{'-quick' if quick else ''}"
        print(runner.run(find(name), place, partial(print, flush=True), quick=quick, jobs=jobs))


app.add_typer(bench, name="bench")
app.add_typer(keys, name="key")
app.command("invite")(invite_others)
app.command("revoke", cls=WithArguments)(revoke_peers)
app.command("report", cls=WithArguments)(write_report)
app.command("doctor")(diagnose_machine)
app.command("top")(watch)
app.command("track")(track_run)
app.command("finetune", cls=WithArguments)(finetune_model)
app.command("tasks", cls=WithArguments)(make_tasks)


def main() -> None:
    """The command `noloco`."""
    with ended_by_signals():
        run_app(app, "noloco")


if __name__ == "__main__":
    main()
