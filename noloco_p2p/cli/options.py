"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

ConfigFile = Annotated[
    Path | None,
    Option(metavar="FILE|NAME", help="YAML file with settings of run and nodes, or one of noloco configs by its name."),
]
NodeDir = Annotated[Path, Option(metavar="DIR", help="Directory of the node, or that of noloco swarm: all its nodes.")]
ExportDir = Annotated[Path, Argument(metavar="OUT", help="Directory that noloco export wrote.")]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="A setting, such as seed=1; repeatable.")
]
SwarmAddresses = Annotated[
    list[str] | None,
    Option("--join", metavar="ADDR", help="Address of a node, /ip4/…/tcp/…/p2p/…, or @FILE with it; repeatable."),
]
NodeUrl = Annotated[
    str | None, Option(metavar="URL", help="A node's metrics address, http://HOST:PORT; quicker than --join.")
]
Device = Annotated[str, Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...; auto: CUDA if there is any.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
