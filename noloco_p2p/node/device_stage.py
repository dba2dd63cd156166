"""The stage as the node sees it: the methods of the Stage port, run on its device."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from noloco_p2p.core.gradient_pairs import GradientLikeness
from noloco_p2p.core.messages import Gradient, HostTensor, LossSum, MicrobatchId, PeerId, ReplicaState
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import Contribution, StepLabel, StepResult
from noloco_p2p.errors import LocalError
from noloco_p2p.ports import DEVICE_CLOSED, Device, Operation, Stage


class DeviceStage:
    """Each method is that of the port `Stage`, awaited. Unless stated otherwise, it runs on the device."""

    def __init__(self, stage: Stage, device: Device) -> None:
        self._stage: Stage | None = stage
        self._device = device
        self.state = stage.state

    @property
    def places(self) -> int | None:
        """As in the port."""
        return None if self._stage is None else self._stage.places

    async def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """As in the port. If the caller is cancelled meanwhile, the graph is freed."""
        device, stage = self._device, self._open_stage()
        work = partial(stage.forward, inputs, mask)
        # Not `self.discard`: this stage may be closed by then.
        return await device.call(Operation.FORWARD, work, lost=lambda one: device.post(partial(stage.discard, one[0])))

    def check(self, gradient: Gradient) -> None:
        """As in the port. Does not use the device."""
        self._open_stage().check(gradient)

    async def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """As in the port."""
        work = partial(self._open_stage().backward, graph, microbatch, gradient)
        return await self._device.call(Operation.BACKWARD, work)

    async def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """As in the port."""
        work = partial(self._open_stage().loss_backward, microbatch, inputs, targets, mask)
        return await self._device.call(Operation.LOSS_BACKWARD, work)

    def discard(self, graph: int) -> None:
        """As in the port. Does nothing after `close`, which frees everything."""
        if self._stage is not None:
            self._device.post(partial(self._stage.discard, graph))

    async def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """As in the port."""
        return await self._device.call(Operation.EVALUATE, partial(self._open_stage().evaluate, inputs, targets, mask))

    async def is_sound(self) -> bool:
        """As in the port."""
        return await self._device.call(Operation.FORWARD, self._open_stage().is_sound)

    async def compare(self, one: Gradient, other: Gradient) -> GradientLikeness:
        """As in the port. Does not occupy the device."""
        return await self._device.on_host(partial(self._open_stage().compare, one, other))

    async def inner_step(self, label: StepLabel) -> StepResult:
        """As in the port. Fills in `busy_s`, the seconds that the device has worked since the previous inner step."""
        take, device = self._open_stage().inner_step, self._device
        return await device.call(Operation.INNER_STEP, lambda: replace(take(label), busy_s=device.take_busy_s()))

    async def snapshot(self, round: int, step: int) -> FrozenRound:
        """As in the port."""
        return await self._device.call(Operation.OUTER, partial(self._open_stage().snapshot, round, step))

    async def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        """As in the port. Does not occupy the device."""
        return await self._device.on_host(partial(self._open_stage().encode, frozen, request, caller))

    async def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None = None
    ) -> PartnerVector:
        """As in the port. Does not occupy the device."""
        return await self._device.on_host(partial(self._open_stage().decode, mine, request, theirs, before))

    async def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector], counted: bool = True) -> float | None:
        """As in the port."""
        return await self._device.call(Operation.OUTER, partial(self._open_stage().merge, mine, theirs, counted))

    async def adopt(self, theirs: Snapshot) -> None:
        """As in the port. Its time belongs to no inner step."""
        await self._device.call(Operation.OUTER, partial(self._open_stage().adopt, theirs))
        self._device.post(self._device.take_busy_s)

    async def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """As in the port."""
        return await self._device.call(Operation.OUTER, partial(self._open_stage().capture, round, step, inner_steps))

    async def restore(self, theirs: ReplicaState) -> None:
        """As in the port. Its time belongs to no inner step."""
        await self._device.call(Operation.OUTER, partial(self._open_stage().restore, theirs))
        self._device.post(self._device.take_busy_s)

    def running_s(self) -> float:
        """For how many seconds the device has been at the running call; 0.0 if it is idle."""
        return self._device.running_s()

    def close(self, *, hung: bool = False) -> None:
        """Close the device after the running call, and release the stage. Idempotent. Waiting and later calls get
        LocalError, and so does the running one if it is `hung`. The stage's memory is freed once that has ended."""
        self._device.close(hung=hung)
        self._stage = None

    def _open_stage(self) -> Stage:
        """The stage. Raises LocalError if it is closed."""
        if self._stage is None:
            raise LocalError(DEVICE_CLOSED)
        return self._stage
