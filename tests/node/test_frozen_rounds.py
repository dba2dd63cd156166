"""The frozen rounds that a replica keeps: one that is being sent stays until it can be requested again."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.agreement import NOT_YET
from noloco_p2p.core.messages import Advert, HostTensor, PeerId, TensorSpec
from noloco_p2p.core.outer_rules import RuleName
from noloco_p2p.core.snapshots import FrozenRound, Snapshot, SnapshotRequest
from noloco_p2p.errors import Declined, Violation
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.node.frozen_rounds import FrozenRounds
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Telemetry
from noloco_p2p.sim.virtual_time import run

HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))
NOTHING = HostTensor("vector", "float32", (0,), memoryview(b""))
ENCODE_S = 1.0
ROUND = 5


class SlowStage:
    """Encodes slowly; in a codec with `bounds` chunks may be requested again."""

    def __init__(self, bounds: bool) -> None:
        self.state = SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN, lattice=object() if bounds else None)

    async def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        await asyncio.sleep(ENCODE_S)
        if caller == "malformed":
            raise Violation("bounds of no vector")
        return Snapshot("me", frozen.round, frozen.step, ())


def kept_at(
    first: int, rule: RuleName = "gossip", *, freezes: bool = True, bounds: bool = True, **outer: Any
) -> FrozenRounds:
    """A replica that has just frozen its `first` round. `freezes`: whether it will freeze others."""
    telemetry = SimpleNamespace(event=lambda kind, **fields: None)
    manifest = RunManifest(outer=OuterSettings(rule=rule, **outer))
    advert = Advert("me", manifest.run_id, 0, ("127.0.0.1:1",), state="training", step=float(first))
    advert = replace(advert, partner_from_round=0 if freezes else NOT_YET)
    node = NodeState(advert, manifest, NodeConfig(), cast(Telemetry, telemetry))
    node.hold(cast(DeviceStage, SlowStage(bounds)))
    rounds = FrozenRounds(node)
    rounds.keep(frozen(first))
    return rounds


def frozen(round: int) -> FrozenRound:
    return FrozenRound("me", round, round, NOTHING, NOTHING, fresh_round=round - 3)


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
        await asyncio.sleep(RunManifest().outer.deadline_s)
        assert rounds.pullers() == set(), "it has all of it, or never will"

    run(scenario(), limit_s=100)


def test_the_last_two_rounds_stay_and_of_those_that_were_pulled_before_them_the_last_three() -> None:
    async def scenario() -> None:
        rounds = kept_at(1, max_stale_rounds=100)
        for round in range(1, 11):
            rounds.keep(frozen(round))
            given = await rounds.serve(f"mate {round}", SnapshotRequest(0, round))
            assert (given.round, given.fresh_round) == (round, round - 3)
        for round, given_round in (1, 6), (6, 6), (7, 7), (8, 8), (9, 9):
            assert (await rounds.serve("late", SnapshotRequest(0, round))).round == given_round
        await asyncio.sleep(RunManifest().outer.deadline_s)
        await rounds.serve("late", SnapshotRequest(0, 10))
        rounds.keep(frozen(11))
        assert (await rounds.serve("late", SnapshotRequest(0, 1))).round == 10, "the others have them, or never will"

    run(scenario(), limit_s=1000)


@pytest.mark.parametrize("bounds", [True, False])
def test_a_round_that_was_pulled_is_dropped_once_nobody_would_merge_it(bounds: bool) -> None:
    """The peer that pulled it may have died, and no other may have pulled since. Without bounds, nobody asks again."""

    async def scenario() -> None:
        rounds = kept_at(5, "noloco", bounds=bounds)
        await rounds.serve("mate", SnapshotRequest(0, 5))
        for round, given in (6, 5), (7, 5 if bounds else 7), (8, 8):
            rounds.keep(frozen(round))
            assert (await rounds.serve("mate", SnapshotRequest(0, 5))).round == given

    run(scenario(), limit_s=100)


@pytest.mark.parametrize(
    ("rule", "wanted", "given"),
    [
        ("noloco", None, 9),
        ("noloco", 8, 8),
        ("noloco", 5, 9),
        ("noloco", 12, 9),
        ("gossip", 5, 8),
        ("gossip", 12, 9),
        ("gossip", None, 9),
        ("diloco", 8, 8),
        ("diloco", 5, None),
        ("diloco", 12, None),
        ("diloco", None, None),
        ("sync", 6, 6),
        ("sync", 5, None),
    ],
)
def test_the_round_that_is_given(rule: RuleName, wanted: int | None, given: int | None) -> None:
    async def scenario() -> None:
        rounds = kept_at(4, rule, freezes=False)
        for round in range(5, 10):
            rounds.keep(frozen(round))
        if given is not None:
            assert (await rounds.serve("mate", SnapshotRequest(0, wanted))).round == given
        else:
            with pytest.raises(Declined):
                await rounds.serve("mate", SnapshotRequest(0, wanted))
        weights = await rounds.serve("guardian", SnapshotRequest(0, 12, weights="bfloat16"))
        assert weights.round == 9, "a guardian takes what there is"
        rounds.clear()
        with pytest.raises(Declined, match="no snapshot yet"):
            await rounds.serve("guardian", SnapshotRequest(0, None, weights="bfloat16"))

    run(scenario(), limit_s=100)


@pytest.mark.parametrize(
    ("state", "from_round", "freezes"),
    [
        ("training", ROUND, True),
        ("syncing", ROUND, True),
        ("training", ROUND + 1, False),
        ("training", NOT_YET, False),
        ("paused", 0, False),
        ("finished", 0, False),
        ("draining", 0, False),
    ],
)
def test_whether_others_need_not_wait_for_its_round(state: str, from_round: int, freezes: bool) -> None:
    async def scenario() -> None:
        rounds = kept_at(4, "diloco")
        rounds._node.update(partner_from_round=from_round)
        if state == "draining":
            rounds._node.drain("told to leave")
        rounds._node.update(state=state)
        assert rounds._will_freeze(ROUND) == freezes

    run(scenario(), limit_s=100)


@pytest.mark.parametrize(
    ("rule", "freezes", "waits_s"),
    [("noloco", False, 20.0), ("gossip", False, 20.0), ("diloco", True, 20.0), ("diloco", False, 0.0)],
)
def test_how_long_a_caller_waits_for_a_round(rule: RuleName, freezes: bool, waits_s: float) -> None:
    """A replica that will not freeze it says so at once to one that needs it of all."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        rounds = kept_at(5, rule, freezes=freezes)
        asking = asyncio.create_task(rounds.serve("mate", SnapshotRequest(0, 6, wait_s=20.0)))
        await asyncio.wait([asking])
        assert loop.time() == pytest.approx(waits_s, abs=2 * ENCODE_S)
        assert (asking.exception() is None) == (rule != "diloco")
        began = loop.time()
        asking = asyncio.create_task(rounds.serve("mate", SnapshotRequest(0, 7, wait_s=1e9)))
        await asyncio.sleep(10.0)
        rounds.keep(frozen(7))
        if freezes or rule != "diloco":
            assert (await asking).round == 7
            assert loop.time() == pytest.approx(began + 10.0 + ENCODE_S)
            asking = asyncio.create_task(rounds.serve("mate", SnapshotRequest(0, 8, wait_s=1e9)))
        await asyncio.wait([asking])
        assert loop.time() < began + 20.0 + RunManifest().outer.deadline_s, "but not longer than its own round may take"

    run(scenario(), limit_s=10_000)
