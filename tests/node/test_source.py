"""How a node of stage 0 sends the microbatches of an inner step."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert, MicrobatchId, Origin, PeerId
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.errors import Busy, Declined, PeerError, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.source import MicrobatchSource
from noloco_p2p.node.pipeline.task import StageInput, StageResult
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

PER_STEP, PLACES, INCARNATION = 4, 3, 7


class Place:
    """A node of stage 0 of 2, at step 5. A microbatch takes a second, the number of its batch is its data."""

    def __init__(self, secret: int | None = None, replicas: str = "x") -> None:
        manifest = RunManifest(stages=2, microbatches_per_step=PER_STEP)
        me = Advert("me", manifest.run_id, 0, (), state="training", step=5.0)
        self.events: list[dict[str, Any]] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.events.append({"kind": kind, **fields}))
        limits: Any = {"max_in_flight": PLACES}
        self.node = NodeState(me, manifest, NodeConfig(limits=limits), cast(Any, telemetry))
        self.node.batches = cast(Any, self)
        self.read = 0
        self.swarm = Membership(self.node)
        self.sees(*replicas)
        self.source = MicrobatchSource(self.node, self.swarm, cast(Any, self), secret, INCARNATION)
        self.sent: list[tuple[int, int]] = []
        self.labels: set[tuple[PeerId, int, PeerId, int, int]] = set()
        self.prepared: list[int] = []
        self.under_way = self.most = 0
        self.fails: dict[int, PeerError] = {}
        self.meanwhile: Callable[[], None] = lambda: None

    def sees(self, *replicas: str) -> None:
        adverts = [Advert(peer, self.node.run_id, 1, (), state="training") for peer in replicas]
        self.swarm.members.update(adverts, now=self.node.now() if replicas == () else 0.0)
        self.swarm.fix_view()

    async def next(self) -> Any:
        """As in `Batches`."""
        self.read += 1
        return SimpleNamespace(inputs=self.read, targets=0, mask=None)

    def prepare(self, origin: Origin) -> None:
        """As in `Dispatcher`."""
        self.prepared.append(origin.index)

    async def train(self, task: StageInput) -> StageResult:
        """As in `Dispatcher`."""
        number, origin = task.microbatch.counter, task.origin
        self.sent.append((number, cast(int, task.inputs)))
        self.labels.add((task.microbatch.peer, task.microbatch.incarnation, origin.peer, origin.step, origin.index))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(1.0)
        self.under_way -= 1
        self.meanwhile()
        if number in self.fails:
            raise self.fails[number]
        return StageResult(
            Contribution(None, 1.0, 1, True, True), "x", cast(Any, SimpleNamespace(finite=True, served=("x",)))
        )

    async def step(self) -> list[int]:
        """The microbatches of an inner step that count as its data."""
        return [microbatch.counter for microbatch in await self.source.read_and_send()]

    def dropped(self) -> list[str]:
        return [event["reason"] for event in self.events if event.get("result") == "dropped"]


def at(scenario: Callable[[Place], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        await scenario(Place(**options))

    virtual_time.run(main(), limit_s=1000)


def test_a_step_has_its_microbatches_and_only_so_many_are_under_way_at_once() -> None:
    async def scenario(place: Place) -> None:
        began = place.node.now()
        assert await place.step() == [0, 1, 2, 3]
        assert (place.sent, place.most) == ([(0, 1), (1, 2), (2, 3), (3, 4)], PLACES)
        assert place.node.now() - began == pytest.approx(2.0)
        assert place.labels == {("me", INCARNATION, "me", 5, index) for index in range(PER_STEP)}
        assert place.node.routes == {MicrobatchId("me", INCARNATION, number): (None, "x") for number in range(4)}
        assert place.swarm.heard_at == place.node.now()
        assert place.prepared == [0, 1, 2, 3]
        assert [event["result"] for event in place.events if event["kind"] == "microbatch"] == ["done"] * PER_STEP
        assert await place.step() == [4, 5, 6, 7]

    at(scenario)


@pytest.mark.parametrize(
    ("error", "reason"), [(Violation("no"), "violation"), (Busy("no"), "busy"), (Declined("no"), "declined")]
)
def test_one_that_is_dropped_does_not_count(error: PeerError, reason: str) -> None:
    async def scenario(place: Place) -> None:
        place.fails = {1: error}
        await place.step()
        assert sorted(one.counter for one in place.node.routes) == [0, 2, 3]
        assert place.dropped() == [reason]
        await place.step()
        assert [number for number, _ in place.sent[4:]] == [4, 5, 6, 7], "it is not sent again"

    at(scenario)


def test_what_a_pause_cuts_short_is_sent_first_after_it_under_the_same_id_with_the_same_data() -> None:
    async def scenario(place: Place) -> None:
        def pauses() -> None:
            place.node.pause(True)
            place.swarm.deserted = {1: 0.0}
            place.swarm.members.update([], now=10_000.0)

        place.meanwhile, place.fails = pauses, {0: Declined("nobody"), 2: Declined("nobody")}
        assert await place.step() == [1], "it starts no more, and what it has put off is no data of this step"
        assert place.dropped() == ["paused", "paused"]
        place.node.pause(False)
        place.meanwhile, place.fails = lambda: None, {}
        assert await place.step() == [0, 2, 3, 4]
        assert sorted(place.sent[3:]) == [(0, 1), (2, 3), (3, 4), (4, 5)]

    at(scenario)


def test_a_node_that_leaves_starts_no_more_and_drops_what_fails() -> None:
    async def scenario(place: Place) -> None:
        place.meanwhile, place.fails = lambda: place.node.drain("told to leave"), {2: Declined("nobody")}
        assert await place.step() == [0, 1, 2]
        assert place.dropped() == ["leaving"]

    at(scenario)


def test_the_data_of_a_pair_are_sent_twice_in_a_row() -> None:
    async def scenario(place: Place) -> None:
        for _ in range(100):
            await place.step()
        pairs = [one for one, other in zip(place.sent, place.sent[1:], strict=False) if one[1] == other[1]]
        assert pairs
        assert place.read == len(place.sent) - len(pairs)
        assert max(Counter(data for _, data in place.sent).values()) == 2, "and no more often"

    at(scenario, secret=3, replicas="wxyz")
