"""What the NoLoCo paper reports (arXiv 2506.10911), for the experiments to stand beside: `paper.json`."""

import json
from importlib import resources
from typing import Any


def published() -> dict[str, Any]:
    """The paper's figures by name; its `source` says of which tables."""
    figures: dict[str, Any] = json.loads(resources.files(__package__).joinpath("paper.json").read_text())
    return figures
