"""`diloco`, `dct` and `sync` between real processes: all replicas of a stage end with the same values, bit for bit."""

from pathlib import Path

import pytest
from processes import NOLOCO, SMALL, node_processes, settings
from soak import soak

from noloco_p2p.io.storage.checkpoint_format import stored_checkpoints

KINDS = {"diloco": ("slow", "momentum"), "dct": ("slow",), "sync": ("fast", "adam_mean", "adam_square")}
STEPS = 40


def of_rule(rule: str) -> list[str]:
    """A swarm of three replicas of one stage; two stages are simulated (test_group_rounds)."""
    run = ["--stages", "1", "--replicas", "3", "--steps", str(STEPS), *SMALL]
    steps = "1" if rule == "sync" else "10"
    return [
        *run,
        *settings(outer__rule=rule, outer__inner_steps=steps, directory__refresh_s="0.5", routing="balanced"),
    ]


def common(node: Path, rule: str) -> tuple[int, dict[str, str]]:
    """Round of a node's newest checkpoint, and digests of what replicas have in common."""
    newest = max(stored_checkpoints(node), key=lambda shard: shard.manifest.round).manifest
    tensors = {tensor.name: tensor.digest for tensor in newest.tensors}
    return newest.round, {name: digest for name, digest in tensors.items() if name.split("/")[0] in KINDS[rule]}


@pytest.mark.parametrize("rule", ["sync", *soak(one for one in sorted(KINDS) if one != "sync")])
def test_all_replicas_end_the_same(tmp_path: Path, rule: str) -> None:
    with node_processes(tmp_path) as nodes:
        swarm = nodes.start(*of_rule(rule), command=(*NOLOCO, "swarm"), own_dir="run")
        assert swarm.end() == 0, swarm.logged() + swarm.printed()
        nodes.nothing_left()
    last = STEPS if rule == "sync" else 4
    found = [common(tmp_path / "run" / f"0-{replica}", rule) for replica in range(3)]
    assert [round for round, _ in found] == [last] * 3
    assert len(found[0][1]) >= 10
    assert found[0] == found[1] == found[2]
