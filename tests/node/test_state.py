"""State has owners: what a node knows about itself and the swarm is changed only by its owner's methods."""

import ast
from pathlib import Path

import pytest

import noloco_p2p

NODE = Path(noloco_p2p.__file__).parent / "node"
OWNED = ("node", "swarm", "waits", "state")
"""Names under which duties hold a NodeState, a Membership, and Waits."""


def written_from_outside(source: str) -> list[str]:
    """Assignments to an attribute, or to an item of an attribute, of an owned object."""
    found = []
    for statement in ast.walk(ast.parse(source)):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AugAssign | ast.AnnAssign):
            targets = [statement.target]
        for target in (part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])):
            inner = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(inner, ast.Attribute):
                owner = ast.unparse(inner.value).removeprefix("self.").lstrip("_")
                found += [ast.unparse(target)] if owner.split(".")[0] in OWNED else []
    return found


def test_nobody_writes_to_another_ones_state() -> None:
    found = {path.name: written_from_outside(path.read_text("utf-8")) for path in sorted(NODE.rglob("*.py"))}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "node.inner_steps += 1",
        "self._node.routes[microbatch] = (None, None)",
        "self.state.stage = stage",
        "a, self._swarm.deserted = 1, {}",
        "self._swarm.view.origins = ()",
    ],
)
def test_a_foreign_write_is_found(line: str) -> None:
    assert len(written_from_outside(line)) == 1
    assert not written_from_outside("self._swarm = swarm\nnow = node.now()\nself.routes[1] = 2")
