"""`noloco-node`: runs one node of a swarm. Heavy imports wait until the options have been checked."""

import gc
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Exit, Option, Typer

from noloco_p2p import __version__
from noloco_p2p.cli.exits import DEBUG, finish_output, run_app
from noloco_p2p.cli.options import ConfigFile, Settings, SwarmAddresses
from noloco_p2p.errors import OtherRun
from noloco_p2p.humanize import plural
from noloco_p2p.launch.stop_signals import handled

if TYPE_CHECKING:
    from noloco_p2p.launch.bootstrap import NodeOptions
    from noloco_p2p.launch.settings import Overrides

app = Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def node(
    context: Context,
    config: ConfigFile = None,
    join: SwarmAddresses = None,
    address_file: Annotated[
        Path | None, Option(metavar="FILE", help="Write the --join address there once others can join.")
    ] = None,
    run: Annotated[str | None, Option(metavar="ID", help="Refuse any run but the one with this id.")] = None,
    key: Annotated[
        Path | None, Option(metavar="FILE", help="Key of a members-only run, made if missing; this node admits others.")
    ] = None,
    stage: Annotated[int | None, Option(metavar="N", min=0, help="Stage; default: as before, or the neediest.")] = None,
    dir: Annotated[
        Path | None, Option(metavar="DIR", help="This node's directory: identity, peers, checkpoints, run.")
    ] = None,
    set: Settings = None,
    log_json: Annotated[bool, Option("--log-json", help="Log as JSON lines.")] = False,
    describe: Annotated[bool, Option("--describe", help="Print the sizes of all stages and exit.")] = False,
    debug: Annotated[bool, Option(DEBUG, help="Show a traceback on errors.")] = False,
    watch_stdin: Annotated[bool, Option("--watch-stdin", hidden=True)] = False,
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Run one node: train a language model together with others.

    Without --join it starts a new swarm, and prints the command with which others join it.
    """
    if context.invoked_subcommand is not None:
        return
    if version:
        print(__version__)
        return
    if sys.stderr.isatty() and not (log_json or describe):
        print(f"noloco-node {__version__}: reading the settings, importing torch and hivemind …", file=sys.stderr)
    from noloco_p2p.launch import foreseen, run_files, settings

    overrides = settings.read(config, os.environ, set or (), {"--stage": ("stage", stage)})
    foreseen.check_node(overrides, join or (), address_file, runs=not describe)
    if describe:
        _describe(overrides)
        return
    for identity in run_files.own_identities(dir):
        with closing(identity):
            from noloco_p2p.launch.bootstrap import NodeOptions
            from noloco_p2p.observe.web_page import pages

            made = NodeOptions(tuple(join or ()), run, identity, watch_stdin, overrides, address_file, key, pages)
            if _ran(made.with_key(), log_json, first=dir is None):
                return


def _ran(options: "NodeOptions", json_lines: bool, *, first: bool) -> bool:
    """Run the node until it ends. Returns False if its directory belongs to another run, and was merely the `first`
    that was free."""
    from noloco_p2p.launch import run_files
    from noloco_p2p.launch.compose import run_to_end

    try:
        if not options.join and options.overrides.names_the_run:
            run_files.refuse_other_run(options.dir, options.overrides.manifest())
        run_to_end(options, json_lines=json_lines)
    except OtherRun:
        if not first:
            raise
        return False
    return True


@app.command()
def health(
    context: Context,
    dir: Annotated[
        Path | None, Option(metavar="DIR", help="Directory of the node; default: the newest in noloco-runs.")
    ] = None,
    url: Annotated[str | None, Option(metavar="URL", help="A node's metrics address, instead of --dir.")] = None,
) -> None:
    """Ask a running node whether it is healthy.

    Prints ok, or what is wrong, with exit code 1.
    """
    from noloco_p2p.observe.health_check import ask

    before: Path | None = context.parent.params["dir"] if context.parent is not None else None
    well, line = ask(dir or before, url)
    print(line)
    raise Exit(0 if well else 1)


def _describe(overrides: "Overrides") -> None:
    """Print the sizes of the model and its stages, without allocating the weights."""
    from noloco_p2p.compute.factory import stage_sizes

    manifest = overrides.manifest()
    sizes = stage_sizes(manifest)
    parameters = sum(stage.parameters for stage in sizes)
    print(f"{manifest.model.family}: {parameters:,} parameters in {plural(len(sizes), 'stage')}")
    for stage in sizes:
        device, host = stage.device_bytes / 2**30, stage.host_bytes / 2**30
        print(
            f"stage {stage.index}: {plural(stage.layers, 'layer')}, {stage.parameters:,} parameters, "
            f"{device:.2f} GiB on the device, {host:.2f} GiB on the host"
        )


def main() -> None:
    """The command `noloco-node`."""
    # Imports create hardly any garbage, but collecting took a fifth of their time. `bootstrap.check_model` enables it.
    gc.disable()
    # The first process of a container ignores signals for which it has no handler. While the node is still importing,
    # nothing has begun, so there is nothing to report, nor anything to pause.
    with handled(lambda *_: sys.exit(0), signal.SIGTERM), handled(lambda *_: None, signal.SIGUSR1, signal.SIGUSR2):
        try:
            run_app(app, "noloco-node")
        except SystemExit as end:
            if "torch" not in sys.modules:
                raise
            # Everything is closed and written. An orderly exit of the interpreter and its libraries would take seconds.
            finish_output()
            os._exit(end.code if isinstance(end.code, int) else 0)


if __name__ == "__main__":
    main()
