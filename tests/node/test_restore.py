"""A node that continues from its checkpoint draws on where it was (ARCHITECTURE.md, "Checkpoints")."""

from random import Random
from typing import Any

import pytest
from elastic import plan_of

from noloco_p2p.node.restore import WeightRestorer
from noloco_p2p.sim.faults import FaultySwarm


def test_the_generator_of_a_restarted_node_continues_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would repeat the draws of its first process."""
    swarm = FaultySwarm(plan_of((2, 1), steps=40))
    loaded: list[Any] = []
    drawn: list[float] = []
    load, go_on = WeightRestorer._load, WeightRestorer._go_on_at

    async def noted(restorer: WeightRestorer, *given: Any) -> Any:
        found = await load(restorer, *given)
        loaded.append(found)
        return found

    async def compared(restorer: WeightRestorer, *given: Any) -> None:
        if loaded:
            copy = Random()
            copy.setstate(restorer._node.rng.getstate())
            drawn.append(copy.random())
        await go_on(restorer, *given)

    monkeypatch.setattr(WeightRestorer, "_load", noted)
    monkeypatch.setattr(WeightRestorer, "_go_on_at", compared)
    swarm.at(6.0, lambda: swarm.bounce("s0r0", 1.0))
    swarm.run()
    expected = Random()
    expected.setstate(loaded[0].random_state)
    assert drawn == [expected.random()]
