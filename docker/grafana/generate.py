"""Writes dashboards/*.json from boards_*.py. With --check it writes nothing, and fails if a file would change.

    python docker/grafana/generate.py [--check]

Standard library only.
"""

import json
import sys
from pathlib import Path

from boards_node import node, outer_rounds
from boards_swarm import swarm, training

OUT = Path(__file__).parent / "dashboards"


def files() -> dict[Path, str]:
    """The path and text of every dashboard."""
    boards = {"swarm": swarm(), "training": training(), "outer-rounds": outer_rounds(), "node": node()}
    return {
        OUT / f"{name}.json": json.dumps(board, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        for name, board in boards.items()
    }


def main(arguments: list[str]) -> int:
    """Returns 0 on success, 1 if --check finds a file that is not as generated, 2 for wrong arguments."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: generate.py [--check]\n")
        return 2
    made = files()
    if not arguments:
        OUT.mkdir(exist_ok=True)
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
        return 0
    there = {path: path.read_text(encoding="utf-8") for path in OUT.glob("*.json")}
    wrong = sorted(path for path in there.keys() | made.keys() if there.get(path) != made.get(path))
    for path in wrong:
        sys.stderr.write(f"{path} is not as generated: run {Path(__file__).name} and commit what it writes\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
