"""How the state of one node changes as it begins, drains, and moves."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.agreement import NOT_YET
from noloco_p2p.core.line_rate import MeasuredLine
from noloco_p2p.core.messages import Advert, Holding, TensorSpec
from noloco_p2p.core.stage_values import StepResult
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

HIDDEN = TensorSpec("hidden", "float32", (1, 1, 1))


class Place:
    """A node of stage 0 of 3 in training, with 5 places."""

    def __init__(self) -> None:
        manifest = RunManifest(stages=3)
        speeds: Any = {"microbatches_per_s": 2.0, "capacity_per_s": 1.0, "steps_per_s": 3.0}
        me = Advert("me", manifest.run_id, 0, (), state="training", step=9.0, outer_round=2, fresh_round=1, **speeds)
        self.events: list[dict[str, Any]] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.events.append(fields))
        self.node = NodeState(me, manifest, NodeConfig(), cast(Any, telemetry))
        self.closed: list[str] = []
        state = SimpleNamespace(hidden=HIDDEN, gradient=HIDDEN)
        self.node.hold(cast(Any, SimpleNamespace(state=state, places=5, close=lambda: self.closed.append("stage"))))
        self.node.read_from(cast(Any, SimpleNamespace(cursor={"at": 7}, close=lambda: self.closed.append("data"))))


def test_a_move_leaves_behind_what_belongs_to_the_stage() -> None:
    async def scenario() -> None:
        place, node = (place := Place()), place.node
        node.inner_steps = 9
        node.update(moving_to=2, unserved=True, holds=(Holding(1, 2, 8),), partner_from_round=1)
        node.drain("moving", next_stage=2)
        assert (node.draining, node.leaving, node.advert.state) == (True, False, "draining")
        node.move(2)
        assert (node.draining, node.next_stage, node.inner_steps, node.batches) == (False, None, 0, None)
        assert (place.closed, node.cursor) == (["data", "stage"], {"at": 7})
        told = node.advert
        assert (told.stage, told.moving_to, told.unserved, told.holds) == (2, None, False, ())
        assert (told.microbatches_per_s, told.capacity_per_s, told.outer_round, told.fresh_round) == (0.0, 0.0, 0, 0)
        assert (told.partner_from_round, told.step) == (NOT_YET, 9.0), "the clock goes on"
        assert node.last
        node.move(1)
        assert (node.cursor, node.last) == ({"at": 7}, False)
        node.drain("told to leave")
        assert node.leaving

    asyncio.run(scenario())


def test_who_enters_a_state_says_why_and_times_its_steps_only_in_training() -> None:
    async def scenario() -> None:
        place, node = (place := Place()), place.node
        for event, reason, state in (("pause", "the owner", "paused"), ("resume", "", "training")):
            woken = asyncio.create_task(node.waits.until(lambda s=state: node.advert.state == s, "", "me"))  # type: ignore[misc]
            await asyncio.sleep(0)
            node.enter(event, reason)
            assert place.events[-1] == {"state": state, "reason": reason or event}
            assert (node.stepped_at is None) == (state == "paused")
            assert await asyncio.wait_for(woken, 5.0)

    asyncio.run(scenario())


def test_the_time_of_a_copy_is_not_taken_for_that_of_an_inner_step() -> None:
    """It made the node seem slow for dozens of steps."""

    async def scenario() -> None:
        node = Place().node
        node.enter("pause")
        node.enter("resume")
        for copies_s in (0.0, 0.0, 600.0):
            await asyncio.sleep(copies_s)
            if copies_s:
                node.go_on_at(11.0, 40, 4)
            await asyncio.sleep(1.0)
            node.finish_inner_step(StepResult(0, 0.0, 0, 0.0, 0.0), [], MeasuredLine())
        assert list(node.step_seconds) == [1.0, 1.0, 1.0]
        assert 1.0 <= node.advert.steps_per_s <= 3.0, "at first it was said to be 3"

    virtual_time.run(scenario(), limit_s=1000)


def test_as_many_places_as_fit_into_memory_within_the_owners_limit() -> None:
    assert Place().node.places() == 5
    limits: Any = {"max_in_flight": 3}
    place = Place()
    limited = NodeState(place.node.advert, place.node.manifest, NodeConfig(limits=limits), place.node.telemetry)
    assert limited.places() == 3
    limited.hold(place.node.stage)
    assert limited.places() == 3
