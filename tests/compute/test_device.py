"""The device thread: order, cancellation, failures, and the Stage port over the real stage."""

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stages import SIZES, as_gradient, make_batch, make_label, make_manifest, make_stages, microbatch, run_microbatch

from noloco_p2p.compute import hardware
from noloco_p2p.compute.device import DeviceThread, make_stage
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import ModelSettings, NodeConfig, RunManifest
from noloco_p2p.core.messages import HostTensor, LossSum
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.errors import ConfigError, LocalError, Violation
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.ports import Operation

FORWARD, BACKWARD, EVALUATE = Operation.FORWARD, Operation.BACKWARD, Operation.EVALUATE


class Gate:
    """A job that occupies the device until the gate is opened."""

    def __init__(self, device: DeviceThread) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self._device = device
        self.task: asyncio.Task[str] | None = None

    async def hold(self, lost: Callable[[str], None] | None = None) -> asyncio.Task[str]:
        """Begin the job; returns once it is running."""

        def work() -> str:
            self.entered.set()
            assert self.opened.wait(10)
            return "held"

        self.task = asyncio.create_task(self._device.call(FORWARD, work, lost=lost))
        await asyncio.to_thread(self.entered.wait, 10)
        return self.task


def test_the_most_urgent_goes_first_and_equals_in_order() -> None:
    async def run() -> list[str]:
        device, order = DeviceThread("test"), list[str]()
        gate = Gate(device)
        held = await gate.hold()
        wanted = [
            (EVALUATE, "e1"),
            (FORWARD, "f1"),
            (BACKWARD, "b1"),
            (FORWARD, "f2"),
            (BACKWARD, "b2"),
            (EVALUATE, "e2"),
        ]
        tasks = [asyncio.create_task(device.call(p, partial(order.append, name))) for p, name in wanted]
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(held, *tasks)
        device.close()
        device._thread.join()
        return order

    assert asyncio.run(run()) == ["b1", "b2", "f1", "f2", "e1", "e2"]


def test_cancelled_before_it_began_it_is_not_run() -> None:
    async def run() -> list[str]:
        device, ran = DeviceThread("test"), list[str]()
        gate = Gate(device)
        held = await gate.hold()
        task = asyncio.create_task(device.call(BACKWARD, lambda: ran.append("cancelled")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.opened.set()
        await held
        await device.call(FORWARD, lambda: ran.append("after"))
        device.close()
        device._thread.join()
        return ran

    assert asyncio.run(run()) == ["after"]


def test_an_idle_device_keeps_nothing_of_a_cancelled_call() -> None:
    """It may hold the weights of a whole stage."""

    async def run() -> None:
        device = DeviceThread("test")
        gate = Gate(device)
        held = await gate.hold()
        weights, freed = {1.0}, threading.Event()
        weakref.finalize(weights, freed.set)
        task = asyncio.create_task(device.call(BACKWARD, partial(len, weights)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task, weights
        gate.opened.set()
        await held
        assert await asyncio.to_thread(freed.wait, 10)
        device.close()
        device._thread.join()

    asyncio.run(run())


def test_cancelled_after_it_began_it_runs_to_its_end_and_the_result_is_handed_back() -> None:
    async def run() -> str:
        device = DeviceThread("test")
        gate = Gate(device)
        handed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        held = await gate.hold(lost=handed.set_result)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        gate.opened.set()
        device_result = await asyncio.wait_for(handed, 10)
        device.close()
        device._thread.join()
        return device_result

    assert asyncio.run(run()) == "held"


def test_a_result_that_comes_together_with_a_cancellation_is_handed_over() -> None:
    async def run() -> list[str]:
        device, lost, over = DeviceThread("test"), list[str](), threading.Event()
        gate = Gate(device)
        held = await gate.hold(lost=lost.append)
        device.post(over.set)
        gate.opened.set()
        assert over.wait(10)  # now the loop has the result, but has not looked at it yet
        asyncio.get_running_loop().call_soon(held.cancel)
        with pytest.raises(asyncio.CancelledError):
            await held
        device.close()
        device._thread.join()
        return lost

    assert asyncio.run(run()) == ["held"]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_cancelled_call_that_has_nothing_to_hand_over_ends_quietly(fails: bool, together: bool) -> None:
    """Because it fails, or because nobody wants the result; whether it ends later or together with the cancellation."""

    async def run() -> tuple[list[str], list[dict[str, Any]]]:
        device, lost, errors = DeviceThread("test"), list[str](), list[dict[str, Any]]()
        entered, opened, over = threading.Event(), threading.Event(), threading.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

        def work() -> str:
            entered.set()
            assert opened.wait(10)
            if fails:
                raise RuntimeError("shape")
            return "held"

        task = asyncio.create_task(device.call(FORWARD, work, lost=lost.append if fails else None))
        await asyncio.to_thread(entered.wait, 10)
        if together:
            device.post(over.set)
            opened.set()
            assert over.wait(10)
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        opened.set()
        await device.call(FORWARD, lambda: None)
        device.close()
        device._thread.join()
        return lost, errors

    assert asyncio.run(run()) == ([], [])


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_failures_reach_the_waiter_and_the_thread_lives_on() -> None:
    async def run() -> None:
        device = DeviceThread("test")
        with pytest.raises(Violation, match="bad"):
            await device.call(FORWARD, raising(Violation("bad")))
        with pytest.raises(RuntimeError, match="shape"):
            await device.call(FORWARD, raising(RuntimeError("shape")))
        for lack in (
            MemoryError(),
            RuntimeError("CUDA out of memory. Tried"),
            RuntimeError("can't allocate memory"),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ):
            with pytest.raises(LocalError, match="not enough memory on the device") as caught:
                await device.call(FORWARD, raising(lack))
            assert caught.value.__cause__ is lack
        assert await device.call(FORWARD, lambda: 5) == 5
        device.close()
        device._thread.join()

    asyncio.run(run())


def test_close_ends_what_waits_and_refuses_what_comes() -> None:
    async def run() -> None:
        device = DeviceThread("test")
        gate = Gate(device)
        held = await gate.hold()
        waiting = asyncio.create_task(device.call(BACKWARD, lambda: 1))
        await asyncio.sleep(0)
        device.close()
        device.close()
        gate.opened.set()
        assert await held == "held"
        with pytest.raises(LocalError, match="closed"):
            await waiting
        with pytest.raises(LocalError, match="closed"):
            await device.call(BACKWARD, lambda: 1)
        device.post(lambda: 1)
        device._thread.join()

    asyncio.run(run())


def test_close_ends_the_running_call_too_if_it_hangs() -> None:
    """Whatever comes of the call later is dropped."""

    async def run() -> None:
        device, errors = DeviceThread("test"), list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        assert device.running_s() == 0.0
        gate, before = Gate(device), time.perf_counter()
        held = await gate.hold()
        assert 0.0 < device.running_s() <= time.perf_counter() - before
        device.close(hung=True)
        with pytest.raises(LocalError, match="closed"):
            await held
        assert device.running_s() == 0.0
        gate.opened.set()
        device._thread.join()
        await asyncio.sleep(0)
        assert errors == []

    asyncio.run(run())


def test_a_call_that_ends_just_before_the_device_is_closed_as_hung_is_no_trouble() -> None:
    device = DeviceThread("test")
    device.close(hung=True)
    assert device.running_s() == 0.0
    device._thread.join()
    assert not device._thread.is_alive()


def test_a_waiter_whose_loop_has_ended_does_not_end_the_thread() -> None:
    device = DeviceThread("test")
    gate = Gate(device)

    async def leave() -> None:
        await gate.hold()

    asyncio.run(leave())
    gate.opened.set()

    async def call() -> int:
        return await device.call(FORWARD, lambda: 7)

    assert asyncio.run(call()) == 7
    device.close()
    device._thread.join()


def on_devices(stages: list[TorchStage]) -> list[DeviceStage]:
    return [DeviceStage(stage, DeviceThread(f"test-{index}")) for index, stage in enumerate(stages)]


def test_the_port_over_real_stages_gives_what_the_stages_give() -> None:
    manifest, batch = make_manifest(), make_batch(1)
    plain = make_stages(manifest)
    expected = run_microbatch(plain, batch, microbatch(1))
    steps = [stage.inner_step(make_label()) for stage in plain]

    async def run() -> None:
        wrapped = on_devices(make_stages(manifest))
        first, last = wrapped
        graph, flow = await first.forward(batch.inputs, None)
        below = await last.loss_backward(microbatch(1), flow, batch.targets, None)
        above = await first.backward(graph, microbatch(1), as_gradient(below, microbatch(1)))
        assert (above.loss_sum, above.tokens) == (expected[0].loss_sum, expected[0].tokens)
        for stage, step in zip((first, last), steps, strict=True):
            result = await stage.inner_step(make_label())
            assert (result.tokens, result.grad_norm) == (step.tokens, step.grad_norm)
            assert 0 < result.busy_s < 60
            mine = await stage.snapshot(1, 10)
            request = SnapshotRequest(stage.state.index)
            theirs = await stage.decode(mine, request, await stage.encode(mine, request, "partner"))
            assert (await stage.merge(mine, [theirs])) == 0.0
            request = SnapshotRequest(stage.state.index, weights="bfloat16")
            await stage.adopt(await stage.encode(mine, request, "guardian"))
        sent = await first.evaluate(batch.inputs, batch.targets, None)
        assert isinstance(sent, HostTensor)
        assert isinstance(await last.evaluate(sent, batch.targets, None), LossSum)
        for one in wrapped:
            one.close()

    asyncio.run(run())


def test_busy_seconds_count_work_and_start_again() -> None:
    async def run() -> list[float]:
        device = DeviceThread("test")
        stage = DeviceStage(make_stages(make_manifest())[0], device)
        await device.call(FORWARD, lambda: time.sleep(0.2))
        busy = [(await stage.inner_step(make_label(step))).busy_s for step in (1, 2)]
        stage.close()
        device._thread.join()
        return busy

    first, second = asyncio.run(run())
    assert first >= 0.2
    assert second < 0.2


def test_a_graph_whose_waiter_is_gone_is_freed() -> None:
    stage = make_stages(make_manifest())[0]
    entered, opened = threading.Event(), threading.Event()
    forward = stage.forward

    def slow(inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        entered.set()
        assert opened.wait(10)
        return forward(inputs, mask)

    stage.forward = slow  # type: ignore[method-assign]

    async def run() -> None:
        device = DeviceThread("test")
        wrapped = DeviceStage(stage, device)
        task = asyncio.create_task(wrapped.forward(make_batch(1).inputs, None))
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        opened.set()
        await device.call(EVALUATE, entered.is_set)
        assert await device.call(EVALUATE, lambda: dict(stage._graphs._open)) == {}
        wrapped.close()
        device._thread.join()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_make_stage_keeps_the_loop_alive_and_gives_the_initial_weights() -> None:
    manifest = make_manifest(dtype="float32")

    async def run() -> int:
        turns, done = 0, asyncio.Event()

        async def turn() -> None:
            nonlocal turns
            while not done.is_set():
                turns += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(turn())
        stage = DeviceStage(*await make_stage(manifest, NodeConfig(device="cpu", threads=1), 1, "me"))
        done.set()
        await ticking
        expected = make_stages(manifest)[1].snapshot(0, 0)
        mine = await stage.snapshot(0, 0)
        assert bytes(mine.vector.data) == bytes(expected.vector.data)
        assert bytes(mine.weights.data) == bytes(expected.weights.data)
        stage.close()
        return turns

    assert asyncio.run(run()) > 5


def test_the_device_thread_gives_way_to_others_and_begins_with_no_busy_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the system forbids that it gives way. The time to make the stage belongs to no inner step."""
    clock, made, before, asked = SimpleNamespace(now=0.0), object(), torch.get_num_threads(), list[tuple[str, int]]()

    def schedule(process: int, policy: int, parameters: object) -> None:
        asked.append((threading.current_thread().name, policy))
        raise PermissionError(process, parameters)

    def make(*_: object, **__: object) -> object:
        clock.now += 100
        return made

    async def run() -> tuple[object, int, float]:
        stage, device = await make_stage(make_manifest(), NodeConfig(device="cpu", threads=before + 1), 1, "me")
        threads, busy_s = await device.call(FORWARD, torch.get_num_threads), device.take_busy_s()
        device.close()
        return stage, threads, busy_s

    monkeypatch.setattr(os, "sched_setscheduler", schedule)
    monkeypatch.setattr("noloco_p2p.compute.device.time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr("noloco_p2p.compute.factory.make_torch_stage", make)
    try:
        assert asyncio.run(run()) == (made, before + 1, 0.0)
    finally:
        torch.set_num_threads(before)
    assert asked == [("device-1", os.SCHED_BATCH)]


def test_make_stage_that_fails_leaves_no_thread() -> None:
    manifest = RunManifest(model=ModelSettings(config={**SIZES["llama"], "num_hidden_layers": 1}), sequence_length=8)

    async def run() -> None:
        with pytest.raises(ConfigError, match="stages is 2, but the model has only 1 layers"):
            await make_stage(manifest, NodeConfig(device="cpu"), 0, "me")

    asyncio.run(run())
    for thread in [thread for thread in threading.enumerate() if thread.name == "device-0"]:
        thread.join(10)
        assert not thread.is_alive()


def test_the_used_memory_of_the_device_is_that_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.memory_meter("cpu") is None
    monkeypatch.setattr(hardware, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {1: (30, 100)}[device.index])
    measure = hardware.memory_meter("cuda:1")
    assert measure is not None
    assert measure() == (70, 100)
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with pytest.raises(LocalError, match="cuda not found"):
            hardware.memory_meter("cuda")
