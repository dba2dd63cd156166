"""What a node answers to calls that are not for it, by their headers alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import NO_STAGE, Advert, Header, MicrobatchId, Origin, TensorSpec
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.errors import Busy, Declined, PeerError, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.rpc_handler import RpcHandler
from noloco_p2p.node.state import NodeState

MANIFEST = RunManifest(stages=3)
ROWS = (MANIFEST.microbatch_size, MANIFEST.sequence_length)
HIDDEN = TensorSpec("hidden", "float32", (*ROWS, 4))
SPECS = (HIDDEN, TensorSpec("targets", "int32", ROWS), TensorSpec("mask", "uint8", ROWS))
HEADER = Header(MANIFEST.run_id, MicrobatchId("a", 1, 1), Origin("a", 0, 0), 1, 10.0, SPECS)


class Place:
    """A node of stage 1 of 3, which has seen `a` in stage 0 and `c` in stage 2, and guards stage 2."""

    def __init__(self, **changes: Any) -> None:
        me = replace(Advert("me", MANIFEST.run_id, 1, (), state="training"), **changes)
        self.node = NodeState(me, MANIFEST, NodeConfig(), cast(Any, SimpleNamespace(event=lambda *_, **__: None)))
        self.node.hold(cast(Any, SimpleNamespace(state=SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN))))
        self.swarm = Membership(self.node)
        peers = [Advert(peer, MANIFEST.run_id, stage, (), state="training") for peer, stage in (("a", 0), ("c", 2))]
        self.swarm.members.update(peers, now=0.0, doubts=True)
        self.answered: list[str] = []
        self.guarded: Any = SimpleNamespace(tensors=(SimpleNamespace(dtype="bfloat16"),))
        guardian = SimpleNamespace(snapshot_of=lambda stage: self.guarded if stage == 2 else None)
        self.handler = RpcHandler(self.node, self.swarm, cast(Any, guardian))
        serves = SimpleNamespace(propagate=self._answers("gradient"), evaluate=self._answers("loss"))
        rounds = SimpleNamespace(frozen=SimpleNamespace(serve=self._answers("own")))
        self.handler.answer_with(cast(Any, serves), cast(Any, rounds), cast(Any, None))

    def _answers(self, what: str) -> Any:
        async def answer(*_: object) -> str:
            return what

        return answer

    def call(self, caller: str = "a", **changes: Any) -> PeerError | None:
        async def made() -> PeerError | None:
            errors: list[PeerError | None] = []
            for method in (self.handler.propagate, self.handler.evaluate):
                try:
                    await method(caller, replace(HEADER, **changes), cast(Any, None))
                    errors.append(None)
                except PeerError as error:
                    errors.append(error)
            assert str(errors[0]) == str(errors[1]), "evaluations are treated alike"
            return errors[0]

        return asyncio.run(made())


def test_a_microbatch_that_is_for_this_node_is_served() -> None:
    assert Place().call() is None
    assert Place().call(specs=SPECS[:2]) is None
    assert Place(state="finished").call() is None


@pytest.mark.parametrize(
    ("caller", "changes", "error", "says"),
    [
        ("a", {"run_id": "another"}, Violation, "works on run"),
        ("a", {"stage": 2, "specs": ()}, Declined, "holds stage 1, not 2"),
        ("c", {}, Busy, "has not seen the caller"),
        ("stranger", {"specs": ()}, Busy, "has not seen the caller"),
        ("a", {"specs": SPECS[:1]}, Violation, "with or without a mask"),
        ("a", {"specs": (*SPECS, HIDDEN)}, Violation, "with or without a mask"),
        ("a", {"specs": (HIDDEN._replace(dtype="float64"), *SPECS[1:])}, Violation, "with or without a mask"),
        ("a", {"time_left_s": 0.0}, Violation, "positive time"),
        ("a", {"time_left_s": -1.0}, Violation, "positive time"),
        ("a", {"time_left_s": inf}, Violation, "positive time"),
        ("a", {"time_left_s": nan}, Violation, "positive time"),
    ],
)
def test_a_microbatch_that_is_not(caller: str, changes: dict[str, Any], error: type[PeerError], says: str) -> None:
    place = Place()
    found = place.call(caller, **changes)
    assert type(found) is error
    assert says in str(found)
    assert place.swarm.unlisted_called == (error is Busy), "one that is not listed yet is looked for"
    assert getattr(found, "late", True), "strangers can provoke it"


@pytest.mark.parametrize(
    ("state", "error"),
    [("starting", Busy), ("waiting", Busy), ("syncing", Busy), ("paused", Declined), ("draining", Declined)],
)
def test_a_node_that_will_soon_train_is_busy_and_one_that_no_longer_does_declines(
    state: str, error: type[PeerError]
) -> None:
    """Whatever it does, what can never be served is said at once."""
    place = Place(state=state)
    assert type(place.call()) is error
    assert type(place.call(run_id="another")) is Violation
    assert type(place.call(stage=2)) is Declined


@pytest.mark.parametrize("stage", [NO_STAGE, 0])
def test_a_node_that_takes_no_activations_declines(stage: int) -> None:
    """One that had not chosen its stage yet said that it held stage 0."""
    error = Place(stage=stage).call()
    assert type(error) is Declined
    assert "holds no stage that takes activations" in str(error)
    assert type(Place(stage=stage).call(run_id="another")) is Declined


def test_a_node_that_is_to_leave_declines() -> None:
    async def drains() -> Place:
        place = Place()
        place.node.drain("told to leave")
        place.node.update(state="training")
        return place

    assert "is leaving" in str(asyncio.run(drains()).call())


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (SnapshotRequest(1), "own"),
        (SnapshotRequest(1, weights="bfloat16"), "own"),
        (SnapshotRequest(2, weights="bfloat16"), "guarded"),
        (SnapshotRequest(2), "as a vector"),
        (SnapshotRequest(2, weights="float32"), "as float32"),
        (SnapshotRequest(0, weights="bfloat16"), "guards no weights of stage 0"),
        (SnapshotRequest(1, wait_s=-1.0), "0 s or more"),
        (SnapshotRequest(1, wait_s=nan), "0 s or more"),
    ],
)
def test_whose_weights_it_gives(request_: SnapshotRequest, answer: str) -> None:
    place = Place()

    async def asked() -> str:
        try:
            found = await place.handler.fetch_snapshot("a", request_)
        except PeerError as error:
            return str(error)
        return "guarded" if found is place.guarded else str(found)

    assert answer in asyncio.run(asked())


def test_who_asks_who_it_is_gets_an_answer_and_is_asked_in_turn() -> None:
    asked: list[Sequence[str]] = []

    async def described() -> Place:
        place = Place(outer_round=4, step=40.5)
        said = place.handler.describe("a")
        assert (said.peer_id, said.stage, said.state, said.step, said.outer_round) == ("me", 1, "training", 40.5, 4)
        asked.append(list(place.swarm.inquiry._to_ask))
        return place

    asyncio.run(described())
    assert "a" in asked[0]
    with pytest.raises(Declined, match="not chosen"):
        Place(stage=NO_STAGE).handler.describe("a")
