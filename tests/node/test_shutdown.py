"""How one node evaluates, stays at the end of a run, and gives up what it cannot finish."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from elastic import config_for, manifest_for

from noloco_p2p.config import EvaluationSettings, NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.line_rate import MeasuredLine
from noloco_p2p.core.messages import Advert, HostTensor, LossSum, NodeDescription, Origin, PeerId
from noloco_p2p.core.stage_values import StepResult
from noloco_p2p.errors import Declined, LocalError, NolocoError, Unreachable
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.launch import run_files
from noloco_p2p.launch.node_probe import read_json
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.task import StageInput
from noloco_p2p.node.shutdown import EVALUATIONS_AT_ONCE, Shutdown, watch_failure
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time
from noloco_p2p.sim.world import SimPlan, SimSwarm

LINGER_S, DEADLINE_S, DRAIN_S, TRANSFER_S, STEPS, EVERY = 10.0, 45.0, 6.0, 20.0, 40, 5
NOTHING = HostTensor("tokens", "int32", (0,), memoryview(b""))


class Place:
    """The node b of some stage of 2, which has finished, and its peers: a and c of stage 0, x and y of stage 1."""

    def __init__(self, stage: int = 0, linger_s: float = LINGER_S) -> None:
        outer = OuterSettings(rule="noloco", deadline_s=TRANSFER_S)
        evaluation = EvaluationSettings(every_steps=EVERY, microbatches=5)
        manifest = RunManifest(stages=2, steps=STEPS, outer=outer, evaluation=evaluation)
        limits: Any = {"linger_s": linger_s, "microbatch_deadline_s": DEADLINE_S, "drain_s": DRAIN_S}
        me = Advert("b", manifest.run_id, stage, (), state="finished", step=float(STEPS))
        self.events: list[tuple[str, dict[str, Any]]] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.events.append((kind, fields)))
        self.node = NodeState(me, manifest, NodeConfig(limits=limits), cast(Any, telemetry))
        batch = SimpleNamespace(inputs=NOTHING, targets=NOTHING, mask=None)
        self.node.batches = cast(Any, SimpleNamespace(validation=lambda: [batch] * 5))
        self.swarm = Membership(self.node)
        self.silent: set[PeerId] = set()
        self.pulling: set[PeerId] = set()
        self.evaluated = self.open = self.most = 0
        self.tokens = 4
        self.fails_at: int | None = None
        self.failure: NolocoError = Declined("nobody is there")
        self.sent: list[tuple[int, int, Origin]] = []
        rounds = SimpleNamespace(frozen=SimpleNamespace(pullers=lambda: self.pulling))
        self.shutdown = Shutdown(self.node, self.swarm, cast(Any, self), cast(Any, rounds))
        self.sees(a="training", c="training", x="training", y="training")

    async def describe(self, peer: Advert) -> NodeDescription:
        await asyncio.sleep(0.1)
        if peer.peer_id in self.silent:
            raise Unreachable("nobody is there")
        return NodeDescription(peer.peer_id, peer.run_id, peer.stage, peer.state, peer.step, 0, "")

    async def evaluate(self, task: StageInput) -> LossSum:
        """As in `Dispatcher`."""
        self.sent.append((task.microbatch.incarnation, task.microbatch.counter, task.origin))
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(1.0)
        self.open -= 1
        if task.microbatch.counter == self.fails_at:
            raise self.failure
        return LossSum(2.0 * task.microbatch.counter, self.tokens)

    def sees(self, *, evaluated: str = "", **states: str) -> None:
        """Read the membership, with these states by peer."""
        found = [
            Advert(
                peer,
                self.node.run_id,
                int(peer in "xy"),
                (),
                state=state,
                announced_at=self.node.now(),
                evaluated=peer in evaluated,
            )
            for peer, state in states.items()
        ]
        self.swarm.members.update(found, now=self.node.now())
        for advert in found:
            self.swarm.members.answered(advert.peer_id)
        self.node.waits.pulse()

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [fields for of, fields in self.events if of == kind]


def at(scenario: Callable[[Place], Awaitable[None]], stage: int = 0, linger_s: float = LINGER_S) -> None:
    async def main() -> None:
        place = Place(stage, linger_s)
        asking = asyncio.create_task(place.swarm.inquiry.run(cast(Any, place), lambda: None))
        await scenario(place)
        asking.cancel()
        await asyncio.wait([asking])

    virtual_time.run(main(), limit_s=10_000)


def test_an_evaluation_covers_all_over_fixed_routes_a_few_at_a_time() -> None:
    async def scenario(place: Place) -> None:
        await place.shutdown.evaluate()
        assert place.told("evaluation") == [{"step": STEPS, "loss": 1.0, "tokens": 20}]
        assert sorted(place.sent) == [(0, number, Origin("b", STEPS, 1)) for number in range(5)], "b is the second of 3"
        assert place.most == EVALUATIONS_AT_ONCE

    at(scenario)


def test_an_evaluation_without_a_token_that_counts_has_no_loss() -> None:
    async def scenario(place: Place) -> None:
        place.tokens = 0
        await place.shutdown.evaluate()
        assert (len(place.sent), place.told("evaluation")) == (5, [])

    at(scenario)


def test_an_error_of_this_machine_ends_an_evaluation_and_whatever_is_under_way() -> None:
    """The main loop raises it. The other microbatches went on, to a device that had failed."""

    async def scenario(place: Place) -> None:
        place.fails_at, place.failure = 0, LocalError("the device is gone")
        with pytest.raises(ExceptionGroup) as raised:
            await place.shutdown.evaluate()
        assert raised.value.exceptions == (place.failure,)
        sent = len(place.sent)
        await asyncio.sleep(10.0)
        assert (len(place.sent), place.told("evaluation"), place.told("warning")) == (sent, [], [])

    at(scenario)


def test_an_evaluation_that_misses_a_microbatch_ends_and_does_not_count() -> None:
    async def scenario(place: Place) -> None:
        place.fails_at = 1
        await place.shutdown.evaluate()
        assert (place.told("evaluation"), len(place.told("warning"))) == ([], 1)
        assert len(place.sent) <= 1 + EVALUATIONS_AT_ONCE

    at(scenario)


def test_a_node_that_is_told_to_leave_ends_its_evaluation() -> None:
    """If stage 0 is the only one, nobody else ends it: a long one took all the time for leaving, and nothing was
    saved."""

    async def scenario(place: Place) -> None:
        evaluating = asyncio.create_task(place.shutdown.evaluate())
        await asyncio.sleep(0.5)
        place.node.drain("told to leave")
        await evaluating
        assert len(place.sent) == EVALUATIONS_AT_ONCE
        assert (place.told("evaluation"), place.told("warning")) == ([], [])

    at(scenario)


def test_an_evaluation_after_the_last_inner_step_is_not_part_of_the_time_between_the_steps(tmp_path: Path) -> None:
    """If a node was paused at an evaluation and then told to leave, its run had a negative number of tokens per
    second."""

    async def scenario(place: Place) -> None:
        def summarised_s() -> object:
            run_files.store_summary(
                tmp_path, cast(Any, SimpleNamespace(state=place.node, finished=False)), PrometheusTelemetry(2)
            )
            return (read_json(tmp_path / "summary.json") or {})["evaluation_s"]

        place.node.update(step=1.0, state="training")
        await place.shutdown.evaluate()
        assert (place.node.evaluated_s, summarised_s()) == (3.0, 0.0)
        place.node.finish_inner_step(StepResult(0, 0.0, 0, 0.0, 0.0), [], MeasuredLine())
        assert summarised_s() == 3.0

    at(scenario)


@pytest.mark.parametrize("state", ["training", "finished"])
def test_a_pause_ends_an_evaluation_between_inner_steps(state: str) -> None:
    """The owner of the device waited for all of it. At the end of the run nothing pauses any more."""

    async def scenario(place: Place) -> None:
        place.node.update(state=state)
        evaluating = asyncio.create_task(place.shutdown.evaluate())
        await asyncio.sleep(0.5)
        place.node.pause(True)
        await evaluating
        ended = state == "training"
        assert len(place.sent) == (EVALUATIONS_AT_ONCE if ended else 5)
        assert (len(place.told("evaluation")), len(place.told("warning"))) == (not ended, ended)

    at(scenario)


@pytest.mark.parametrize(
    ("step", "inner_steps", "due"),
    [(10, EVERY, True), (10, 2 * EVERY, True), (10, EVERY + 1, False), (STEPS, EVERY, False)],
)
def test_when_it_evaluates_in_training(step: int, inner_steps: int, due: bool) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(step=float(step), state="training")
        place.node.inner_steps = inner_steps
        await asyncio.sleep(10.0)
        await place.shutdown.evaluate_if_due()
        assert bool(place.sent) == due
        assert place.node.evaluated_s == pytest.approx(3.0 * due)
        place.sent.clear()
        place.node.drain("told to leave")
        await place.shutdown.evaluate_if_due()
        assert place.sent == [], "nobody would evaluate anything for a node that leaves"

    at(scenario)


@pytest.mark.parametrize("at_s", [1.0, 1.57])
def test_a_node_that_leaves_does_not_complain_that_nobody_evaluates_for_it(at_s: float) -> None:
    """It is told so before an evaluation is due, or during one."""
    manifest = manifest_for((2, 2), steps=20, evaluation={"every_steps": 1, "microbatches": 4})
    swarm = SimSwarm(SimPlan(manifest, (2, 2), config=config_for()))
    swarm.at(at_s, lambda: swarm.process("s0r1").node.drain())
    outcome = swarm.run(limit_s=1000)
    assert [one.get("message") for one in outcome.trace.of("warning") if one.peer == "s0r1"] == []


def test_the_first_stage_evaluates_when_the_later_ones_have_ended_and_stays_for_its_mates() -> None:
    async def scenario(place: Place) -> None:
        staying = asyncio.create_task(place.shutdown.finish())
        await asyncio.sleep(5.0)
        for state in ("training", "waiting"):
            place.sees(x="finished", y=state)
            await asyncio.sleep(1.0)
            assert place.sent == []
        place.sees(x="finished", y="paused")
        await asyncio.sleep(4.0)
        assert (len(place.told("evaluation")), place.node.advert.evaluated) == (1, True)
        place.sees(a="finished", c="draining")
        await asyncio.sleep(1.0)
        assert not staying.done()
        place.sees(a="finished", c="finished")
        await asyncio.sleep(1.0)
        assert staying.done()
        assert place.told("warning") == []

    at(scenario)


def test_nobody_is_waited_for_longer_than_the_owner_allows() -> None:
    async def scenario(place: Place) -> None:
        began = place.node.now()
        await place.shutdown.finish()
        assert place.node.now() - began == pytest.approx(2 * LINGER_S + 3.0)
        assert [str(one["message"]) for one in place.told("warning")] == [
            "evaluating although a later stage has not finished"
        ]

    at(scenario)


@pytest.mark.parametrize(("stage", "mate", "before_s"), [(0, "c", 3.0 + LINGER_S), (1, "y", 0.0)])
def test_a_replica_that_pulls_gets_the_time_that_a_transfer_may_take(stage: int, mate: str, before_s: float) -> None:
    async def scenario(place: Place) -> None:
        if mate == "c":
            place.sees(y="finished")
        place.sees(evaluated="ac", **{peer: "draining" if peer == mate == "c" else "finished" for peer in "acx"})
        place.pulling = {mate}
        began = place.node.now()
        await place.shutdown.finish()
        assert place.node.now() - began == pytest.approx(before_s + TRANSFER_S)

    at(scenario, stage)


def test_a_node_that_is_told_to_leave_stays_no_longer() -> None:
    async def scenario(place: Place) -> None:
        staying = asyncio.create_task(place.shutdown.finish())
        await asyncio.sleep(1.0)
        place.node.drain("told to leave")
        await asyncio.sleep(4.0)
        assert staying.done()

    at(scenario)


@pytest.mark.parametrize(("stage", "stays_s"), [(0, 10.0 + 3.0 + 10.0), (1, 10.0)])
def test_peers_that_have_fallen_silent_are_not_waited_for(stage: int, stays_s: float) -> None:
    """Their last advert may not have come. It is renewed every 10 s; the first stage waits twice, and evaluates."""

    async def scenario(place: Place) -> None:
        everybody = dict.fromkeys("acxy", "training")
        place.silent = {*everybody}
        began = place.node.now()
        staying = asyncio.create_task(place.shutdown.finish())
        while not staying.done():
            place.sees(**everybody)
            await asyncio.sleep(1.0)
        assert stays_s <= place.node.now() - began <= stays_s + 4.0

    at(scenario, stage, linger_s=100.0)


def test_a_later_stage_stays_while_held_out_microbatches_come() -> None:
    async def scenario(place: Place) -> None:
        place.sees(a="finished", c="finished", y="finished")
        staying = asyncio.create_task(place.shutdown.finish())
        for _ in range(4):
            place.evaluated += 1
            await asyncio.sleep(LINGER_S - 1.0)
            assert not staying.done()
        place.sees(a="finished", c="finished", evaluated="a")
        await asyncio.sleep(0.5)
        assert not staying.done()
        place.sees(a="finished", c="finished", evaluated="ac")
        await asyncio.sleep(0.5)
        assert staying.done()

    at(scenario, 1)


@pytest.mark.parametrize(("come", "stays_s"), [(False, 2 * LINGER_S), (True, 5 * LINGER_S)])
def test_a_later_stage_does_not_stay_for_ever(come: bool, stays_s: float) -> None:
    """The first time counts in any case, because none may have come by then. Later ones only as long as any come, and
    as a microbatch may take."""

    async def scenario(place: Place) -> None:
        place.sees(a="finished", c="finished", y="finished")
        staying, began = asyncio.create_task(place.shutdown.finish()), place.node.now()
        if not come:
            await asyncio.sleep(1.0)
            place.evaluated += 1
        while not staying.done():
            place.sees(a="finished", c="finished", y="finished")
            await asyncio.sleep(1.0)
            place.evaluated += come
        assert place.node.now() - began == pytest.approx(stays_s, abs=1.5)

    at(scenario, 1)


@pytest.mark.parametrize("next_stage", [None, 1])
def test_leaving_takes_only_so_long_and_moving_as_long_as_it_takes(next_stage: int | None) -> None:
    async def scenario(place: Place) -> None:
        watching = asyncio.create_task(watch_failure(place.node))
        await asyncio.sleep(100.0)
        place.node.drain("told to leave", next_stage=next_stage)
        await asyncio.sleep(DRAIN_S - 0.1)
        assert not watching.done()
        await asyncio.sleep(0.2)
        assert watching.done() == (next_stage is None)
        if next_stage is None:
            assert (watching.exception(), len(place.told("warning"))) == (None, 1)
        watching.cancel()
        await asyncio.wait([watching])

    at(scenario)


@pytest.mark.parametrize("leaves", [False, True])
def test_what_made_the_node_fail_is_raised(leaves: bool) -> None:
    async def scenario(place: Place) -> None:
        watching = asyncio.create_task(watch_failure(place.node))
        await asyncio.sleep(1.0)
        if leaves:
            place.node.drain("told to leave")
            await asyncio.sleep(1.0)
        error = ZeroDivisionError()
        place.node.fail(error)
        await asyncio.sleep(0.1)
        assert watching.exception() is error

    at(scenario)
