"""What `DeviceStage` adds to the stage: graphs are freed when nobody waits for them."""

import asyncio
import random
from array import array

import pytest
from elastic import manifest_for

from noloco_p2p.core.messages import HostTensor
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.sim.device import Costs, SimDevice
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.virtual_time import run


@pytest.mark.parametrize("moves", [False, True])
def test_the_graph_of_a_forward_pass_that_nobody_awaits_is_freed(moves: bool) -> None:
    """Also if the node gives the stage up while the device is still at it."""
    stage = LinearStage(manifest_for((1, 1)), 0, "a")
    inputs = HostTensor("input_ids", "int32", (1, 2), memoryview(array("i", [1, 2]).tobytes()))

    async def cancelled() -> None:
        held = DeviceStage(stage, SimDevice(Costs(forward_s=1.0), random.Random(1)))
        task = asyncio.create_task(held.forward(inputs, None))
        await asyncio.sleep(0.5)
        task.cancel()
        if moves:
            held.close()
        await asyncio.sleep(1.0)

    run(cancelled())
    assert (stage.most_graphs, stage.open_graphs) == (1, {})
