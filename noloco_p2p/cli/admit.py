"""`noloco key`, `noloco invite` and `noloco revoke`: decide who may take part in a members-only run."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from noloco_p2p.cli.options import WithArguments
from noloco_p2p.errors import ConfigError

keys = Typer(help="The key of a members-only run.", rich_markup_mode=None, no_args_is_help=True)
KeyFile = Annotated[Path | None, Option(metavar="FILE", help="The run's key; default: root.key in or above --dir.")]
UNITS_S = {"m": 60.0, "h": 3_600.0, "d": 86_400.0}


@keys.callback()
def key() -> None:
    """The key of a members-only run."""


@keys.command("new", cls=WithArguments)
def new_key(file: Annotated[Path, Argument(metavar="FILE", help="File to write; it must not exist yet.")]) -> None:
    """Make the key of a members-only run. Keep the file: whoever has it can admit others."""
    from noloco_p2p.launch import run_key

    print(f"wrote {file}; its public half is {run_key.make(file)}")
    print(f"start the run with: noloco-node --key {shlex.quote(str(file))}")


def invite_others(
    dir: Annotated[
        Path,
        Option(
            metavar="DIR", help="Directory of the node that others will join and that has the key, or of noloco swarm."
        ),
    ],
    uses: Annotated[int, Option(min=1, metavar="N", help="How many peers the invitation admits.")] = 1,
    lasts: Annotated[
        str, Option("--for", metavar="TIME", help="Valid for minutes (m), hours (h) or days (d).")
    ] = "24h",
    stage: Annotated[
        int | None, Option(metavar="N", min=0, help="Stage for them to hold; default: the neediest.")
    ] = None,
    key: KeyFile = None,
) -> None:
    """Invite others to a members-only run. Prints the command with which they join; its address has the invitation."""
    from noloco_p2p.launch import run_key

    found = re.fullmatch(r"([1-9][0-9]{0,3})([mhd])", lasts)
    if found is None:
        raise ConfigError(f"--for {lasts}: give 1 to 9999 minutes, hours or days, such as 24h")
    seconds = int(found[1]) * UNITS_S[found[2]]
    print(f"noloco-node --join {run_key.invite(dir, key, uses=uses, seconds=seconds, stage=stage)}")
    if not _is_running(dir):
        print(f"the node in {dir} is not running: start it before others join", file=sys.stderr)


def revoke_peers(
    peers: Annotated[list[str], Argument(metavar="PEER", help="Peer ids, as noloco top --json has them.")],
    dir: Annotated[
        Path,
        Option(metavar="DIR", help="Directory of a node of the run, best one that is running, or of noloco swarm."),
    ],
    key: KeyFile = None,
) -> None:
    """Expel peers from a members-only run, with all whose certificates they issued. Their calls end within a minute."""
    from noloco_p2p.launch import run_key

    made, start = run_key.revoke(dir, key, peers), f"start the node in {dir}: nobody else knows it yet"
    told = f"the node in {dir} tells the others" if _is_running(dir) else start
    print(f"{len(made.peers)} revoked in total (list {made.number}); {told}")


def _is_running(directory: Path) -> bool:
    """Whether the node of a directory is running; of noloco swarm's, its first node."""
    from noloco_p2p.launch import node_probe

    return node_probe.in_use(next(node_probe.node_dirs(directory), directory))
