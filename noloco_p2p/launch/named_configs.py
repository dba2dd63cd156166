"""Finds the configurations that come with the package: `--config tiny` is configs/tiny.yaml, and `noloco sim lan` is
configs/sim/lan.yaml.

The folder is inside the package in a wheel, and next to it in a checkout.
"""

import textwrap
from pathlib import Path

from noloco_p2p.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
SCENARIOS = "sim"
"""Folder of the scenarios of `noloco sim`."""
ABOUT_WIDTH = 60


def folder() -> Path:
    """The folder of the configurations."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def named(path: Path | None, kind: str = "") -> Path | None:
    """The file itself if it exists; otherwise the configuration with this name, a single word, in the folder `kind`.

    Raises ConfigError if a single word is neither.
    """
    if path is None or path.is_file() or path.name != str(path) or path.suffix:
        return path
    return _found(str(path), f"no file and no {'scenario' if kind else 'configuration'}", kind)


def text(name: str) -> str:
    """The text of the configuration or, if there is none, the scenario of this name. Raises ConfigError."""
    return _found(name, "no configuration", "", SCENARIOS).read_text("utf-8").rstrip()


def _found(name: str, nothing: str, *kinds: str) -> Path:
    found = (path for kind in kinds if (path := folder() / kind / f"{name}.yaml").is_file())
    if (first := next(found, None)) is None:
        raise ConfigError(f"{name}: {nothing} has that name; noloco configs lists them")
    return first


def listing() -> list[str]:
    """A line for each configuration and scenario: its name, and the first sentence of the comment at its top."""
    lines = []
    for kind, title in (("", "for --config:"), (SCENARIOS, "for noloco sim:")):
        files = sorted((folder() / kind).glob("*.yaml"))
        lines += [title, *(f"  {path.stem:16}  {_about(path)}" for path in files)]
    return lines


def _about(path: Path) -> str:
    comment = path.read_text("utf-8").split("\n#\n")[0].splitlines()
    words = " ".join(line.removeprefix("#").strip() for line in comment if line.startswith("#"))
    return textwrap.shorten(words.split(". ")[0], ABOUT_WIDTH, placeholder=" …").rstrip(".")
