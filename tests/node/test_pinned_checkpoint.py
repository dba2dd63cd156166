"""The checkpoint from before an alarm stays (ARCHITECTURE.md, "Checkpoints")."""

import pytest
from elastic import plan_of

from noloco_p2p.sim.world import SimSwarm


@pytest.mark.parametrize(
    ("alarms", "kept"),
    [
        ([], [8, 9, 10]),
        ([("refused", 3)], [3, 8, 9, 10]),
        ([("clipped", 3), ("gradient", 4)], [8, 9, 10]),
        ([("dissenter", 3), ("refused", 4), ("outlier", 5)], [3, 8, 9, 10]),
        ([("not_finite", 2), ("refused", 5)], [5, 8, 9, 10]),
    ],
)
def test_the_last_one_from_before_an_alarm_or_a_row_of_alarms_stays(
    alarms: list[tuple[str, int]], kept: list[int]
) -> None:
    """`alarms`: (kind, round after whose checkpoint it occurs). Each round has a checkpoint, and three are kept."""
    swarm = SimSwarm(plan_of((2, 1), steps=40))
    left = list(alarms)

    def look() -> None:
        node = swarm.process("s0r0").node.state
        held = swarm.disks["s0r0"].held()
        if left and held and held[-1].round == left[0][1]:
            node.distrust(left.pop(0)[0], peer="s1r0")

    for tenths in range(1000):
        swarm.at(tenths / 10, look)
    swarm.run()
    assert not left
    assert [held.round for held in swarm.disks["s0r0"].held()] == kept
