"""The configurations that come with the package: `--config tiny` is configs/tiny.yaml, `noloco sim lan` its neighbour.

A wheel has the folder inside the package, a checkout beside it.
"""

import textwrap
from pathlib import Path

from noloco_p2p.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
SCENARIOS = "sim"
"""Folder of those that `noloco sim` takes."""
ABOUT_WIDTH = 60


def folder() -> Path:
    """The folder that holds them."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def named(path: Path | None, kind: str = "") -> Path | None:
    """The file itself, or the configuration of the folder `kind` that has this name, a single word.

    Raises ConfigError when there is neither.
    """
    if path is None or path.is_file() or path.name != str(path) or path.suffix:
        return path
    return _found(str(path), kind)


def text(name: str) -> str:
    """What is in the configuration, or else the scenario, of this name. Raises ConfigError."""
    return _found(name, "", SCENARIOS).read_text("utf-8").rstrip()


def _found(name: str, *kinds: str) -> Path:
    found = (path for kind in kinds if (path := folder() / kind / f"{name}.yaml").is_file())
    if (first := next(found, None)) is None:
        raise ConfigError(f"{name}: no file and no configuration has that name; noloco configs lists them")
    return first


def listing() -> list[str]:
    """A line for each: its name, and the first sentence of the comment at its top."""
    lines = []
    for kind, title in (("", "for --config:"), (SCENARIOS, "for noloco sim:")):
        files = sorted((folder() / kind).glob("*.yaml"))
        lines += [title, *(f"  {path.stem:16}  {_about(path)}" for path in files)]
    return lines


def _about(path: Path) -> str:
    comment = path.read_text("utf-8").split("\n#\n")[0].splitlines()
    words = " ".join(line.removeprefix("#").strip() for line in comment if line.startswith("#"))
    return textwrap.shorten(words.split(". ")[0], ABOUT_WIDTH, placeholder=" …").rstrip(".")
