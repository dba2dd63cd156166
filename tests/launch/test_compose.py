"""What is opened for a node is closed at its end."""

import asyncio
import threading
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.compute import device
from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.line_rate import MeasuredLine
from noloco_p2p.core.messages import NO_STAGE, Advert
from noloco_p2p.errors import LocalError
from noloco_p2p.launch import compose
from noloco_p2p.node.waits import to_the_end
from noloco_p2p.ports import Operation


def test_work_on_a_device_that_does_not_end_is_given_up_when_the_node_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was under way until the loop ended, which logged a traceback for each microbatch of a node that left late."""
    manifest, ended = RunManifest(), threading.Event()
    transport = SimpleNamespace(line=MeasuredLine(), evaluate=None)
    telemetry = SimpleNamespace(event=lambda *_, **__: None, identify=lambda **_: None, measure_memory=lambda _: None)
    advert = Advert("me", manifest.run_id, NO_STAGE, ())
    ports = compose.NodePorts(advert, *cast(Any, (transport, None, telemetry)))
    thread = device.DeviceThread("device")

    async def make_stage(*_: object) -> tuple[Any, device.DeviceThread]:
        return SimpleNamespace(state=SimpleNamespace(parameters=1)), thread

    async def main() -> None:
        imports = asyncio.create_task(asyncio.sleep(0))
        async with AsyncExitStack() as closing:
            node = compose._node(closing, ports, manifest, NodeConfig(), tmp_path, None, imports)
            _, made = await node._world.make_stage(1)
            running = [asyncio.create_task(to_the_end(made.call(Operation.BACKWARD, ended.wait))) for _ in range(2)]
            await asyncio.sleep(0)
            for one in running:
                one.cancel()
        done, _ = await asyncio.wait(running, timeout=60.0)
        assert [type(one.exception()) for one in running if one in done] == [LocalError, LocalError]

    monkeypatch.setattr(device, "make_stage", make_stage)
    try:
        asyncio.run(main())
    finally:
        ended.set()


@pytest.mark.parametrize("failure", [LocalError("the certificate has expired"), asyncio.CancelledError(), None])
def test_a_summary_that_cannot_be_stored_does_not_hide_why_the_node_failed(failure: BaseException | None) -> None:
    """On a full disk a node said only that its summary.json could not be written."""

    def full() -> None:
        raise LocalError("summary.json cannot be written: the disk is full")

    async def life() -> None:
        async with AsyncExitStack() as closing:
            closing.push(partial(compose._store, full))
            if failure is not None:
                raise failure

    with pytest.raises((LocalError, asyncio.CancelledError)) as raised:
        asyncio.run(life())
    assert str(raised.value) == (
        "summary.json cannot be written: the disk is full" if failure is None else str(failure)
    )
