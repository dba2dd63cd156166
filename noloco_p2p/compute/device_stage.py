"""The Stage port over a synchronous stage on its device thread. torch is imported on that thread."""

import asyncio
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from noloco_p2p.compute.device import CLOSED, IDLE, NORMAL, URGENT, Device
from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.gradient_pairs import GradientLikeness
from noloco_p2p.core.messages import Gradient, HostTensor, LossSum, MicrobatchId, PeerId, ReplicaState
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import Contribution, MergeResult, StepLabel, StepResult
from noloco_p2p.errors import LocalError

if TYPE_CHECKING:
    from noloco_p2p.compute.stage import TorchStage


class DeviceStage:
    """The Stage port over a synchronous stage on its device thread."""

    def __init__(self, stage: "TorchStage", device: Device) -> None:
        self._stage: TorchStage | None = stage
        self._device = device
        self.state = stage.state

    @property
    def places(self) -> int | None:
        """As in the port."""
        return None if self._stage is None else self._stage.memory.places

    async def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """As in the port. A graph whose waiter is gone is freed."""
        work = partial(self._open_stage().forward, inputs, mask)
        return await self._device.call(NORMAL, work, lost=lambda result: self.discard(result[0]))

    async def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """As in the port."""
        return await self._device.call(URGENT, partial(self._open_stage().backward, graph, microbatch, gradient))

    async def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """As in the port."""
        work = partial(self._open_stage().loss_backward, microbatch, inputs, targets, mask)
        return await self._device.call(URGENT, work)

    def discard(self, graph: int) -> None:
        """As in the port. Freed on the device thread, and after `close` with everything else."""
        if self._stage is not None:
            self._device.post(partial(self._stage.discard, graph))

    async def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """As in the port."""
        return await self._device.call(IDLE, partial(self._open_stage().evaluate, inputs, targets, mask))

    async def is_sound(self) -> bool:
        """As in the port."""
        return await self._device.call(NORMAL, self._open_stage().is_sound)

    async def compare(self, one: Gradient, other: Gradient) -> GradientLikeness:
        """As in the port. Runs beside the device."""
        return await asyncio.to_thread(self._open_stage().compare, one, other)

    async def inner_step(self, label: StepLabel) -> StepResult:
        """As in the port, with the seconds that the device worked from the start of the previous inner step to now."""
        take = self._open_stage().inner_step

        def work() -> StepResult:
            return dataclasses.replace(take(label), busy_s=self._device.take_busy_s())

        return await self._device.call(URGENT, work)

    async def snapshot(self, round: int, step: int) -> FrozenRound:
        """As in the port."""
        return await self._device.call(URGENT, partial(self._open_stage().snapshot, round, step))

    async def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        """As in the port. Runs beside the device."""
        return await asyncio.to_thread(self._open_stage().encode, frozen, request, caller)

    async def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None = None
    ) -> PartnerVector:
        """As in the port. Runs beside the device."""
        return await asyncio.to_thread(self._open_stage().decode, mine, request, theirs, before)

    async def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> MergeResult:
        """As in the port."""
        return await self._device.call(URGENT, partial(self._open_stage().merge, mine, theirs, counted))

    async def adopt(self, theirs: Snapshot) -> None:
        """As in the port."""
        await self._device.call(URGENT, partial(self._open_stage().adopt, theirs))

    async def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """As in the port."""
        return await self._device.call(URGENT, partial(self._open_stage().capture, round, step, inner_steps))

    async def restore(self, theirs: ReplicaState) -> None:
        """As in the port."""
        await self._device.call(URGENT, partial(self._open_stage().restore, theirs))

    def close(self) -> None:
        """End the device thread after the running call and release the stage. May be called again. Waiting and later
        calls get LocalError. The stage's memory is free once the running call has ended."""
        self._device.close()
        self._stage = None

    def _open_stage(self) -> "TorchStage":
        """The stage. Raises LocalError: closed."""
        if self._stage is None:
            raise LocalError(CLOSED)
        return self._stage


async def make_stage(manifest: RunManifest, node: NodeConfig, index: int, peer_id: PeerId) -> DeviceStage:
    """Make stage `index` with its initial weights on its own device thread, without blocking the loop.

    Raises ConfigError: the model cannot be split like this; LocalError: no such device, no memory, no audit directory.
    """
    device = Device(f"device-{index}")

    def make() -> "TorchStage":
        from noloco_p2p.compute.factory import make_torch_stage
        from noloco_p2p.compute.hardware import set_threads

        set_threads(node.threads)
        return make_torch_stage(
            manifest,
            index,
            peer_id,
            device=node.device,
            audit_dir=node.audit.dir,
            audit_weights=node.audit.weights,
            recompute=node.compute.recompute,
        )

    try:
        stage = await device.call(URGENT, make)
        await device.call(URGENT, device.take_busy_s)  # making it belongs to no inner step
        return DeviceStage(stage, device)
    except BaseException:
        device.close()
        raise
