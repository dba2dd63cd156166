"""The frozen rounds that a replica keeps: one that is being sent stays until it can be requested again."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert, HostTensor, PeerId, TensorSpec
from noloco_p2p.core.snapshots import FrozenRound, Snapshot, SnapshotRequest
from noloco_p2p.errors import Violation
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.node.frozen_rounds import FrozenRounds
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Telemetry
from noloco_p2p.sim.virtual_time import run

HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))
NOTHING = HostTensor("vector", "float32", (0,), memoryview(b""))
ENCODE_S = 1.0


class SlowStage:
    """Encodes slowly, in a codec in which chunks may be requested again."""

    state = SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN, lattice=object())

    async def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        await asyncio.sleep(ENCODE_S)
        if caller == "malformed":
            raise Violation("bounds of no vector")
        return cast(Snapshot, frozen)


def kept_at(first: int) -> FrozenRounds:
    """A replica that has just frozen its `first` round."""
    telemetry = SimpleNamespace(event=lambda kind, **fields: None)
    manifest = RunManifest()
    advert = Advert("me", manifest.run_id, 0, ("127.0.0.1:1",), state="training", step=float(first))
    node = NodeState(advert, manifest, NodeConfig(), cast(Telemetry, telemetry))
    node.hold(cast(DeviceStage, SlowStage()))
    rounds = FrozenRounds(node, lambda round: True)
    rounds.keep(frozen(first))
    return rounds


def frozen(round: int) -> FrozenRound:
    return FrozenRound("me", round, round, NOTHING, NOTHING)


def test_chunks_of_a_round_can_be_asked_for_again_however_many_are_frozen_while_it_is_encoded() -> None:
    async def scenario() -> None:
        rounds = kept_at(5)
        giving = asyncio.create_task(rounds.serve("mate", SnapshotRequest(0, 5)))
        await asyncio.sleep(ENCODE_S / 2)
        for round in (6, 7, 8):
            rounds.keep(frozen(round))
        assert (await giving).round == 5
        rounds.keep(frozen(9))
        assert (await rounds.serve("mate", SnapshotRequest(0, 5))).round == 5

    run(scenario(), limit_s=100)


def test_a_malformed_request_keeps_no_round_once_it_is_refused() -> None:
    async def scenario() -> None:
        rounds = kept_at(5)
        with pytest.raises(Violation):
            await rounds.serve("malformed", SnapshotRequest(0, 5))
        for round in (6, 7):
            rounds.keep(frozen(round))
        assert (await rounds.serve("mate", SnapshotRequest(0, 5))).round == 6
        assert rounds.pullers() == {"mate"}

    run(scenario(), limit_s=100)
