"""`noloco-node`: one node of a swarm (design.md §8). Heavy imports happen once the options are right."""

import logging
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p import __version__
from noloco_p2p.cli.exits import DEBUG, run_app
from noloco_p2p.launch.node_probe import HOME

if TYPE_CHECKING:
    from noloco_p2p.io.dht.identity import Identity
    from noloco_p2p.launch.compose import NodeOptions
    from noloco_p2p.launch.settings import Overrides

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def node(  # as long as it has options
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file with settings of the run and of this node.")
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Address of a node of the swarm, /ip4/…/tcp/…/p2p/…, or @FILE: waits for a file with it; repeatable.",
        ),
    ] = None,
    address_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the address for --join there, as soon as others can join."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="ID", help="Insist on this run id (sha256 of the manifest).")
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, help="Pipeline stage to hold; default: that of before, else the neediest.")
    ] = None,
    dir: Annotated[
        Path | None, typer.Option(help="Directory of this node: identity, peers, checkpoints; its run goes on there.")
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting, such as device=cpu; repeatable.")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
    describe: Annotated[
        bool, typer.Option("--describe", help="Print the sizes of the model and its stages, and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show a traceback with an error.")] = False,
    watch_stdin: Annotated[bool, typer.Option("--watch-stdin", hidden=True)] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version, and stop.")] = False,
) -> None:
    """Run one node: train a language model together with others.

    Without --join it begins a swarm, and prints the command with which others join it.
    """
    if context.invoked_subcommand is not None:
        return
    if version:
        print(__version__)
        return
    from noloco_p2p.launch import settings

    given = settings.read(config, os.environ, [*(set or []), *([] if stage is None else [f"stage={stage}"])])
    if describe:
        _describe(given)
        return
    from noloco_p2p.launch import join_file

    given.node()
    join_file.check(join or ())
    if not join:
        given.manifest()
    with closing(_own_identity(dir)) as identity:
        from noloco_p2p.launch.compose import NodeOptions

        _live(NodeOptions(tuple(join or ()), run, identity, watch_stdin, given, address_file), log_json)


@app.command()
def health(
    context: typer.Context,
    dir: Annotated[
        Path | None, typer.Option(help="Directory of the node; default: the one below noloco-runs that came last.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Where a node serves its metrics, instead of --dir.")] = None,
) -> None:
    """Ask a running node whether it is well: prints ok, or what is wrong and ends with exit code 1."""
    from noloco_p2p.observe.health_check import ask

    before: Path | None = context.parent.params["dir"] if context.parent is not None else None
    well, line = ask(dir or before, url)
    print(line)
    raise typer.Exit(0 if well else 1)


def _own_identity(home: Path | None) -> "Identity":
    """That of a node's directory; without one, the first `node-<n>` is taken that no running node holds."""
    from noloco_p2p.io.dht.identity import KEY, Identity

    if home is not None:
        return Identity.open(home / KEY)
    number = 1
    while (identity := Identity.open_if_free(HOME / f"node-{number}" / KEY)) is None:
        number += 1
    return identity


def _live(order: "NodeOptions", log_json: bool) -> None:
    """Run the node on uvloop until it has left. gRPC and hivemind are quiet; our own lines go to stderr."""
    import asyncio

    import uvloop

    from noloco_p2p.io.telemetry import log
    from noloco_p2p.launch import compose

    stop_log = log.start(sys.stderr, json_lines=log_json)
    for noisy in ("hivemind", "transformers", "datasets", "grpc"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        uvloop.run(compose.run(order))
    except asyncio.CancelledError:
        logging.getLogger("noloco_p2p").info("stopped at once")
    finally:
        stop_log()


def _describe(given: "Overrides") -> None:
    """Sizes of the model and its stages, without allocating the weights."""
    from noloco_p2p.compute.model_size import describe

    size = describe(given.manifest())
    print(f"{size.family}: {size.parameters:,} parameters in {len(size.stages)} stages")
    for stage in size.stages:
        device, host = stage.device_bytes / 2**30, stage.host_bytes / 2**30
        print(
            f"stage {stage.index}: {stage.layers} layers, {stage.parameters:,} parameters, "
            f"{device:.2f} GiB on the device, {host:.2f} GiB on the host"
        )


def _stopped(number: int, frame: FrameType | None) -> None:
    """SIGTERM while the node still imports what it needs: nothing is begun, nothing is to be told."""
    raise SystemExit(0)


def main() -> None:
    """The command `noloco-node`."""
    # The first process of a container ignores a signal that it has not asked for.
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        run_app(app, "noloco-node")
    except SystemExit as end:
        if "torch" not in sys.modules:
            raise
        # All is closed and written. Taking the interpreter and its libraries apart would cost seconds more.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
