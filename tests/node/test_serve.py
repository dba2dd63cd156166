"""One replica of a later stage: what becomes of a call, whichever of those that take part in it fails first."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import (
    Activation,
    Advert,
    Gradient,
    Header,
    HostTensor,
    LossSum,
    MicrobatchId,
    Origin,
    PeerId,
)
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.errors import Busy, Declined, PeerError, Unreachable, Violation
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.finite_watch import LONGEST_STREAK
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.pipeline.task import StageInput, StageResult
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

NOTHING = HostTensor("hidden", "float32", (0,), memoryview(b""))
PER_STEP = 2
LEFT_S = 40.0


class SentBody:
    """A body that takes `takes_s` to come, and then may fail."""

    received = 7

    def __init__(self, header: Header, takes_s: float, error: PeerError | None = None) -> None:
        self.header, self.takes_s, self.error = header, takes_s, error
        self.asked_at: float | None = None

    def reply_soon(self) -> None:
        """Nothing is warmed up."""

    async def __call__(self) -> Activation:
        self.asked_at = asyncio.get_running_loop().time()
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return Activation(self.header, NOTHING, NOTHING)


class Place:
    """A node of stage 1 of 3 with an open step of some microbatches, and what is computed of them."""

    def __init__(self, routing: str = "random", per_step: int = PER_STEP) -> None:
        manifest = RunManifest(stages=3, microbatches_per_step=per_step, routing=routing)  # type: ignore[arg-type]
        me = Advert("me", manifest.run_id, 1, (), state="training")
        self.events: list[tuple[str, dict[str, Any]]] = []
        telemetry = SimpleNamespace(event=lambda kind, **fields: self.events.append((kind, fields)), span=self._span)
        self.node = NodeState(me, manifest, NodeConfig(), cast(Any, telemetry))
        self.swarm = Membership(self.node)
        self.members = self.swarm.members
        self.members.update([Advert("a", manifest.run_id, 0, (), state="training")], now=0.0)
        self.members.answered("a")
        self.takes_s = 1.0
        self.computed: list[MicrobatchId] = []
        self.error: Exception | None = None
        self.finite, self.further, self.counted, self.sound = True, True, True, True
        self.server = MicrobatchServer(self.node, self.swarm, cast(Any, self))
        self.liveness = SimpleNamespace(events=lambda id: 100)

    def _span(self, _: str) -> Any:
        return self.node.waits.waiting("span", "me")

    def prepare(self, origin: Origin) -> None:
        """As in `Dispatcher`."""

    async def train(self, task: StageInput, left_s: float) -> StageResult:
        """As in `Dispatcher`."""
        assert left_s == LEFT_S
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        self.computed.append(task.microbatch)
        reply = Gradient(task.microbatch, NOTHING, 3.0, 5, ("whatever it says", "last"), self.further)
        done = Contribution(NOTHING, 3.0, 5, self.counted, self.finite)
        return StageResult(done, "next", reply)

    async def evaluate(self, task: StageInput, left_s: float) -> LossSum:
        """As in `Dispatcher`."""
        await asyncio.sleep(self.takes_s)
        return LossSum(3.0, 5)

    def call(
        self,
        number: int,
        *,
        step: int = 0,
        digest: int = 1,
        takes_s: float = 1.0,
        error: PeerError | None = None,
        caller: PeerId = "a",
    ) -> "Call":
        id, origin = MicrobatchId("a", 1, number), Origin("a", step, number)
        header = Header("run", id, origin, 1, LEFT_S, digest=digest, patient=True)
        return Call(self, header, SentBody(header, takes_s, error), caller)

    def results(self) -> list[str]:
        return [str(fields["result"]) for kind, fields in self.events if kind == "microbatch"]


class Call:
    """A call of the origin, and how it ends."""

    def __init__(self, place: Place, header: Header, body: SentBody, caller: PeerId) -> None:
        self.body = body
        self.task = asyncio.create_task(place.server.propagate(caller, header, body))

    async def end(self) -> object:
        """What it returns or raises."""
        await asyncio.wait([self.task])
        return "cancelled" if self.task.cancelled() else self.task.exception() or self.task.result()


def at(scenario: Callable[[Place], Awaitable[None]], routing: str = "random", per_step: int = PER_STEP) -> None:
    async def main() -> None:
        place = Place(routing, per_step)
        place.swarm.fix_view()
        place.server.open()
        await scenario(place)
        assert place.server.intake.in_flight == place.server.intake.waiting == 0, "it leaves no place taken"
        assert not place.server._calls
        assert len(place.node.waits.current(place.node.now())) == 0

    virtual_time.run(main(), limit_s=1000)


def test_a_reply_names_who_served_it_and_is_computed_again_for_whoever_lost_it() -> None:
    async def scenario(place: Place) -> None:
        reply = await place.call(0).end()
        assert isinstance(reply, Gradient)
        assert reply.served == ("me", "next", "last"), "this node knows whom it called"
        assert (reply.loss_sum, reply.tokens, reply.finite) == (3.0, 5, True)
        place.counted = False
        assert await place.call(0).end() == reply
        assert place.computed == [MicrobatchId("a", 1, 0)] * 2
        assert place.results() == ["done"]
        assert place.node.routes == {MicrobatchId("a", 1, 0): ("a", "next")}

    at(scenario)


def test_what_does_not_count_here_is_no_part_of_the_step() -> None:
    async def scenario(place: Place) -> None:
        place.counted = False
        for number in range(PER_STEP):
            assert isinstance(await place.call(number).end(), Gradient)
        assert (place.results(), place.node.routes) == ([], {})
        assert not place.server.intake.ready

    at(scenario)


@pytest.mark.parametrize("gone", [0, 1])
def test_two_callers_share_one_attempt_and_either_may_go_while_it_is_computed(gone: int) -> None:
    async def scenario(place: Place) -> None:
        calls = [place.call(0, takes_s=0.1)]
        await asyncio.sleep(0.5)
        calls.append(place.call(0))
        await asyncio.sleep(0.1)
        calls[gone].task.cancel()
        assert isinstance(await calls[1 - gone].end(), Gradient)
        assert len(place.computed) == 1

    at(scenario)


def test_an_attempt_without_callers_is_cancelled() -> None:
    async def scenario(place: Place) -> None:
        calls = [place.call(0, takes_s=0.1)]
        await asyncio.sleep(0.5)
        calls.append(place.call(0))
        await asyncio.sleep(0.1)
        for call in calls:
            call.task.cancel()
        await asyncio.sleep(10.0)
        assert place.computed == []

    at(scenario)


@pytest.mark.parametrize("goes", ["nobody", "first", "joined"])
def test_one_that_joins_while_the_body_comes_depends_on_the_caller_that_sends_it(goes: str) -> None:
    async def scenario(place: Place) -> None:
        first = place.call(0)
        await asyncio.sleep(0.5)
        joined, other = place.call(0, caller="b"), place.call(0, digest=2)
        await asyncio.sleep(0.1)
        for name, call, stays in (("first", first, joined), ("joined", joined, first)):
            if goes == name:
                call.task.cancel()
                assert isinstance(await stays.end(), Busy if name == "first" else Gradient)
        if goes == "nobody":
            assert await first.end() is await joined.end()
        assert isinstance(await other.end(), Gradient), "another digest is another attempt"
        assert len(place.computed) == 2 - (goes == "first")

    at(scenario)


@pytest.mark.parametrize("error", [Violation("wrong digest"), Unreachable("gone"), PeerError("it does not read")])
def test_one_that_has_joined_does_not_answer_for_the_body_of_another_caller(error: PeerError) -> None:
    """Replicas of the stage before that have equal weights send the same microbatch with the same digest."""

    async def scenario(place: Place) -> None:
        first = place.call(0, error=error)
        await asyncio.sleep(0.5)
        joined = place.call(0, caller="b")
        assert await first.end() is error, "it is the sender's fault"
        assert isinstance(await joined.end(), Busy), "it may send its own"
        assert isinstance(await place.call(0, caller="b").end(), Gradient)

    at(scenario)


@pytest.mark.parametrize("received", [True, False])
def test_one_that_has_joined_hears_why_the_attempt_itself_has_failed(received: bool) -> None:
    """The later stages refuse what both callers offer, or an outer round begins before the body is asked for."""

    async def scenario(place: Place) -> None:
        place.error = Violation("not finite")
        number = 0 if received else 4 * PER_STEP
        first = [place.call(one, takes_s=0.1) for one in range(number + 1)][-1]
        await asyncio.sleep(0.05)
        joined = place.call(number, caller="b")
        await asyncio.sleep(0.0)
        if not received:
            place.server.close()
        assert (ends := [await first.end(), await joined.end()])[0] == ends[1]
        assert ("not finite" if received else "outer round") in str(ends[1])
        await place.server.until_empty()

    at(scenario)


def test_a_caller_whose_body_broke_off_is_asked_for_it_again() -> None:
    async def scenario(place: Place) -> None:
        first = place.call(0, takes_s=1e6)
        await asyncio.sleep(0.5)
        assert [type(await call.end()) for call in (place.call(0), first)] == [Busy, Busy]
        assert isinstance(await place.call(0).end(), Gradient)

    at(scenario)


def test_bodies_beyond_those_that_wait_for_the_next_step_are_not_asked_for_yet() -> None:
    async def scenario(place: Place) -> None:
        calls = [place.call(number, takes_s=0.1) for number in range(4 * PER_STEP)]
        await asyncio.sleep(0.5)
        asked = [call.body.asked_at is not None for call in calls]
        assert PER_STEP < sum(asked) < len(calls)
        for _ in range(3):
            await asyncio.sleep(2.0)
            place.node.inner_steps += 1
            place.server.open()
        assert [type(await call.end()) for call in calls] == [Gradient] * len(calls)

    at(scenario)


def test_a_queued_call_that_is_admitted_at_once_is_asked_for_its_body() -> None:
    """There are fewer waiting places than places in the next step."""

    async def scenario(place: Place) -> None:
        calls = [place.call(number, takes_s=0.1) for number in range(2 * 5)]
        await asyncio.sleep(2.0)
        place.node.inner_steps += 1
        place.server.open()
        assert [type(await call.end()) for call in calls] == [Gradient] * len(calls)
        assert place.node.now() < LEFT_S / 2, "none has waited in vain"

    at(scenario, per_step=5)


def test_a_call_that_ends_before_its_first_line_has_run_hears_busy_and_leaves_nothing() -> None:
    async def scenario(place: Place) -> None:
        calls = [place.call(number) for number in range(PER_STEP + 1)]
        await asyncio.sleep(0.0)
        calls[0].task.cancel()
        place.server.close()
        assert [type(await call.end()) for call in calls[1:]] == [Gradient] * (PER_STEP - 1) + [Busy]

    at(scenario)


@pytest.mark.parametrize(
    ("error", "answer", "result"),
    [
        (Violation("bad gradient"), Violation, ["violation"]),
        (Declined("nobody is there"), Declined, []),
        (Busy("all are busy"), Busy, []),
    ],
)
def test_what_the_later_stages_answer_is_passed_on(
    error: PeerError, answer: type[PeerError], result: list[str]
) -> None:
    async def scenario(place: Place) -> None:
        place.error = error
        assert type(await place.call(0).end()) is answer
        assert place.results() == result
        assert place.node.error is None
        place.error = None
        assert isinstance(await place.call(0).end(), Gradient), "it may be tried again"

    at(scenario)


def test_a_body_that_is_wrong_is_the_fault_of_its_sender() -> None:
    async def scenario(place: Place) -> None:
        assert isinstance(await place.call(0, error=Violation("wrong digest")).end(), Violation)
        assert place.results() == ["violation"]
        assert place.computed == []

    at(scenario)


def test_a_bug_ends_the_node_and_its_callers_hear_declined() -> None:
    async def scenario(place: Place) -> None:
        place.error = ZeroDivisionError()
        assert isinstance(await place.call(0).end(), Declined)
        assert place.node.error is place.error

    at(scenario)


def test_calls_beyond_the_step_wait_and_hear_busy_when_an_outer_round_begins() -> None:
    async def scenario(place: Place) -> None:
        calls = [place.call(number, takes_s=0.1) for number in range(PER_STEP + 1)]
        await asyncio.sleep(0.5)
        assert place.server.intake.in_flight == PER_STEP
        place.server.close()
        await place.server.until_empty()
        assert place.server.intake.in_flight == 0
        found = [await call.end() for call in calls]
        assert [type(one) for one in found] == [Gradient] * PER_STEP + [Busy]
        assert "outer round" in str(found[-1])
        assert isinstance(await place.call(9).end(), Busy)
        assert ("busy", {"direction": "in"}) in place.events

    at(scenario)


def test_a_call_that_waits_runs_when_a_place_is_free() -> None:
    async def scenario(place: Place) -> None:
        place.error = Declined("nobody is there")
        failing = [place.call(number) for number in range(PER_STEP)]
        waiting = place.call(PER_STEP, takes_s=0.1)
        await asyncio.sleep(1.5)
        assert waiting.body.asked_at is not None, "its body may come, because there is place for it in the line"
        for call in failing:
            await call.end()
        place.error = None
        assert isinstance(await waiting.end(), Gradient)

    at(scenario)


@pytest.mark.parametrize("works", [True, False])
def test_a_call_waits_for_a_place_as_long_as_the_device_works(works: bool) -> None:
    async def scenario(place: Place) -> None:
        place.takes_s = 10 * LEFT_S
        running = [place.call(number, takes_s=0.1) for number in range(PER_STEP)]
        waiting, ended = place.call(PER_STEP, takes_s=0.0), list[float]()
        waiting.task.add_done_callback(lambda _: ended.append(place.node.now()))
        for _ in range(5 * int(LEFT_S)):
            await asyncio.sleep(1.0)
            place.node.waits.operations += works
        if works:
            assert not waiting.task.done()
        else:
            assert "has not reached this step" in str(await waiting.end())
            assert ended[0] < LEFT_S, "before its caller considers this node hung"
        for call in (*running, waiting):
            call.task.cancel()
            await call.end()
        await asyncio.sleep(1.0)

    at(scenario)


@pytest.mark.parametrize(
    ("finite", "further", "stops"),
    [(False, True, True), (False, False, False), (True, False, False), (True, True, False)],
)
def test_a_stage_answers_for_its_own_values_only(finite: bool, further: bool, stops: bool) -> None:
    """`further`: whether they were finite at the later stages."""

    async def scenario(place: Place) -> None:
        place.finite, place.further, tests = finite, further, list[bool]()

        async def is_sound() -> bool:
            tests.append(True)
            return False

        place.node.stage = cast(Any, SimpleNamespace(is_sound=is_sound))
        for number in range(LONGEST_STREAK):
            place.server.open()
            await place.call(number).end()
        assert bool(tests) == (place.node.error is not None) == stops
        assert place.results() == ["done" if finite and further else "nonfinite"] * LONGEST_STREAK

    at(scenario)


def test_an_id_that_comes_again_while_the_stage_tests_itself_is_served_again() -> None:
    async def scenario(place: Place) -> None:
        async def is_sound() -> bool:
            await asyncio.sleep(1.0)
            return True

        place.node.stage = cast(Any, SimpleNamespace(is_sound=is_sound))
        place.finite = False
        for number in range(LONGEST_STREAK - 1):
            place.server.open()
            await place.call(number).end()
        calls = [place.call(LONGEST_STREAK)]
        await asyncio.sleep(2.5)
        assert place.results() == ["nonfinite"] * LONGEST_STREAK
        calls.append(place.call(LONGEST_STREAK))
        assert [type(await call.end()) for call in calls] == [Gradient] * 2

    at(scenario)


def test_how_far_it_is_with_each_microbatch() -> None:
    async def scenario(place: Place) -> None:
        call = place.call(0)
        await asyncio.sleep(0.1)
        place.node.waits.operations = 1000
        ids = [MicrobatchId("a", 1, number) for number in range(2)]
        with place.node.waits.computing("forward"):
            await asyncio.sleep(0.5)
            known, unknown = place.server.progress(ids)
        assert known is not None
        assert (known.events, unknown) == (1000 + 7 + 100, None)
        assert known.stuck_s == pytest.approx(0.5)
        await call.end()
        assert place.server.progress(ids) == [None, None]

    at(scenario)


def test_evaluations_are_served_within_a_limit() -> None:
    async def scenario(place: Place) -> None:
        limit = place.node.config.limits.evaluations

        def evaluation(number: int) -> asyncio.Task[LossSum]:
            header = Header("run", MicrobatchId("a", 0, number), Origin("a", 0, 0), 1, LEFT_S)
            return asyncio.create_task(place.server.evaluate("a", header, SentBody(header, 1.0)))

        tasks = [evaluation(number) for number in range(limit + 1)]
        await asyncio.sleep(0.1)
        assert [one is not None for one in place.server.progress([MicrobatchId("a", 0, 0)])] == [True]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [LossSum] * limit + [Busy]
        assert await evaluation(0) == LossSum(3.0, 5)

    at(scenario)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    ("state", "step", "leaves"),
    [
        ("training", 0.0, False),
        ("training", 0.9, False),
        ("training", 1.0, True),
        ("waiting", 0.0, False),
        ("syncing", 0.0, False),
        ("draining", 0.0, False),
        ("paused", 0.0, True),
        ("finished", 0.0, True),
        ("left", 0.0, True),
    ],
)
def test_under_balanced_nobody_waits_for_an_origin_that_has_left_the_step(
    state: str, step: float, leaves: bool, opened: bool
) -> None:
    """`opened`: whether that is known only once the step has begun."""

    async def scenario(place: Place) -> None:
        place.server.close()
        if opened:
            place.server.open()
            assert place.server.intake.missing_origins == ["a"]
        ready = asyncio.create_task(place.server.until_ready(lambda: False))
        await asyncio.sleep(1.0)
        now = place.node.now()
        place.members.update([Advert("a", "run", 0, (), state=state, step=step, announced_at=now)], now=now)
        if opened:
            place.server.drop_departed()
        else:
            place.server.open()
            place.node.waits.pulse()
        await asyncio.sleep(0.1)
        assert (place.server.intake.missing_origins == []) == leaves
        assert ready.done() == leaves
        ready.cancel()
        await asyncio.wait([ready])

    at(scenario, "balanced")


def test_under_balanced_an_origin_has_left_the_step_if_its_labels_say_so() -> None:
    async def scenario(place: Place) -> None:
        assert place.server.intake.missing_origins == ["a"]
        call = place.call(0, step=1)
        await asyncio.sleep(0.5)
        assert place.server.intake.missing_origins == []
        call.task.cancel()
        await call.end()
        await asyncio.sleep(0.1)

    at(scenario, "balanced")


@pytest.mark.parametrize("routing", ["random", "balanced"])
def test_only_under_balanced_a_step_is_not_begun_while_all_origins_are_silent(routing: str) -> None:
    async def scenario(place: Place) -> None:
        assert place.server.may_open()
        place.members.update([Advert("b", "run", 0, (), state="training")], now=place.node.now(), doubts=True)
        place.members.update([Advert("a", "run", 0, (), state="left")], now=place.node.now())
        assert place.server.may_open() == (routing == "random")

    at(scenario, routing)


def test_beyond_the_last_step_late_origins_are_served_as_they_come() -> None:
    async def scenario(place: Place) -> None:
        place.node.update(step=float(place.node.manifest.steps))
        place.server.close()
        place.server.open()
        assert place.server.intake.missing_origins == []

    at(scenario, "balanced")
