"""What `DeviceStage` adds to the stage: graphs that nobody waits for are freed, and inner steps know their time."""

import asyncio
import random
from array import array

import pytest
from elastic import manifest_for

from noloco_p2p.core.messages import HostTensor
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.core.stage_values import StepLabel
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


def test_the_time_to_take_over_weights_belongs_to_no_inner_step() -> None:
    """Otherwise a newcomer announces too low a speed for many steps, and its device seems busier than it can be."""
    stage = LinearStage(manifest_for((1, 1)), 0, "a")

    async def busy_s() -> list[float]:
        device = SimDevice(Costs(inner_step_s=0.5, outer_s=20.0), random.Random(1))
        held, found = DeviceStage(stage, device), list[float]()
        state, frozen = await held.capture(0, 0.0, 0), await held.snapshot(0, 0)
        request = SnapshotRequest(0, weights=stage.state.weights[0].dtype)
        weights = await held.encode(frozen, request, "b")
        for take_over in (held.restore(state), held.adopt(weights)):
            await take_over
            found.append((await held.inner_step(StepLabel(1, 0, 0.1, {}))).busy_s)
        return found

    assert run(busy_s()) == [0.5, 0.5]
