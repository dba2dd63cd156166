"""What a node in a training simulated swarm answers to a microbatch that is not for it, on the header alone."""

import asyncio
from dataclasses import replace

import pytest
from simulated_parts import linear_stage

from noloco_p2p.config import EvaluationSettings, OuterSettings, RunManifest
from noloco_p2p.core.messages import Activation, Header, MicrobatchId, Origin, TensorSpec
from noloco_p2p.errors import Declined, PeerError, Violation
from noloco_p2p.sim.world import SimPlan, SimSwarm

MANIFEST = RunManifest(
    stages=2,
    start_replicas=1,
    steps=12,
    sequence_length=4,
    microbatch_size=2,
    outer=OuterSettings(rule="noloco", inner_steps=4),
    evaluation=EvaluationSettings(every_steps=None, microbatches=1),
)
HIDDEN, TARGETS = TensorSpec("hidden", "float64", (2, 4, 1)), TensorSpec("targets", "int32", (2, 4))
RIGHT = Header(MANIFEST.run_id, MicrobatchId("stranger", 7, 0), Origin("stranger", 0, 0), 1, 5.0, (HIDDEN, TARGETS), 99)
OTHER_RUN = MANIFEST.model_copy(update={"seed": 1}).run_id
WRONG = {
    "another run": (replace(RIGHT, run_id=OTHER_RUN), Violation, f"not {OTHER_RUN[:12]}"),
    "another stage": (replace(RIGHT, stage=2), Declined, "this node holds stage 1, not 2"),
    "another shape": (
        replace(RIGHT, specs=(HIDDEN._replace(shape=(2, 4, 2)), TARGETS)),
        Violation,
        "an activation of this run is",
    ),
    "another type": (replace(RIGHT, specs=(HIDDEN._replace(dtype="float32"), TARGETS)), Violation, "float32"),
    "no targets": (replace(RIGHT, specs=(HIDDEN,)), Violation, "an activation of this run is"),
    "no time": (replace(RIGHT, time_left_s=0.0), Violation, "a positive time left"),
    "no number": (replace(RIGHT, time_left_s=float("nan")), Violation, "a positive time left"),
}


class NoBody:
    """A body that must not be read, because its microbatch is refused."""

    received = 0

    def reply_soon(self) -> None:
        raise AssertionError("a reply cannot follow soon")

    async def __call__(self) -> Activation:
        raise AssertionError("the body of what is refused is not received")


body = NoBody()


@pytest.mark.parametrize("call", ["propagate", "evaluate"])
@pytest.mark.parametrize("case", WRONG)
def test_a_microbatch_that_is_not_for_this_node_is_refused_and_leaves_no_trace(case: str, call: str) -> None:
    header, kind, expected = WRONG[case]
    swarm = SimSwarm(SimPlan(MANIFEST, (1, 1), seed=2))
    heard: list[BaseException | None] = []

    async def ask() -> None:
        node = swarm.process("s1r0").node
        assert node.state.advert.state == "training"
        serve = node.handler.propagate if call == "propagate" else node.handler.evaluate
        try:
            await serve("s0r0", header, body)  # the calls of an announced peer are accepted
        except PeerError as error:
            heard.append(error)

    tasks: list[asyncio.Task[None]] = []
    swarm.at(1.0, lambda: tasks.append(asyncio.get_running_loop().create_task(ask())))
    outcome = swarm.run(limit_s=600)
    assert not outcome.bugs
    (error,) = heard
    assert type(error) is kind
    assert expected in str(error)
    assert len(str(error).splitlines()) == 1
    assert tasks[0].exception() is None
    last = outcome.nodes["s1r0"]
    assert last.step == MANIFEST.steps
    assert not any(one.microbatch.peer == "stranger" for one in linear_stage(last).counted)


def test_stage_0_accepts_no_activations() -> None:
    swarm = SimSwarm(SimPlan(MANIFEST, (1, 1), seed=2))
    heard: list[str] = []

    async def ask() -> None:
        try:
            await swarm.process("s0r0").node.handler.propagate("stranger", replace(RIGHT, stage=0), body)
        except Declined as error:
            heard.append(str(error))

    tasks: list[asyncio.Task[None]] = []
    swarm.at(1.0, lambda: tasks.append(asyncio.get_running_loop().create_task(ask())))
    swarm.run(limit_s=600)
    assert heard == ["this node holds no stage that takes activations"]
    assert tasks[0].exception() is None
