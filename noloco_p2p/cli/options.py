"""Options that several commands share, and the help format of commands with arguments."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand

ConfigFile = Annotated[
    Path | None,
    Option(metavar="FILE|NAME", help="YAML file with settings of run and nodes, or one of noloco configs by its name."),
]
NodeDir = Annotated[Path, Option(metavar="DIR", help="Directory of the node, or that of noloco swarm: all its nodes.")]
ExportDir = Annotated[Path, Argument(metavar="MODEL", help="Directory that noloco export wrote.")]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="A setting, such as seed=1; repeatable.")
]
SwarmAddresses = Annotated[
    list[str] | None,
    Option("--join", metavar="ADDR", help="Address of a node, /ip4/…/tcp/…/p2p/…, or @FILE that has it; repeatable."),
]
NodeUrl = Annotated[
    str | None, Option(metavar="URL", help="A node's metrics address, http://HOST:PORT; quicker than --join.")
]
Device = Annotated[str, Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...; auto: CUDA if available.")]
MAX_SEED = 2**63 - 1
"""The largest seed of a run, and of torch."""
Json = Annotated[bool, Option("--json", help="Print one JSON object.")]


class WithArguments(TyperCommand):
    """A command whose help shows arguments by their metavars, like options. Typer alone would add types or brackets,
    depending on its version."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The parts of the usage line: MODEL is required, [NAME] optional, PEER... repeatable."""
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        names = [f"{one.metavar}{'...' if one.nargs != 1 else ''}" for one in arguments]
        named = zip(arguments, names, strict=True)
        return ["[OPTIONS]", *(name if one.required else f"[{name}]" for one, name in named)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the lists of arguments and of options."""
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            found = [(one, one.get_help_record(ctx)) for one in self.get_params(ctx) if one.param_type_name == kind]
            if rows := [(one.metavar if kind == "argument" else row[0], row[1]) for one, row in found if row]:
                with formatter.section(title):
                    formatter.write_dl(rows)
