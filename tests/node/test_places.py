"""As many microbatches are in flight as there are places, at all stages, and nothing stalls because of it."""

from collections import Counter
from collections.abc import Callable

import pytest
from soak import soak

from noloco_p2p.config import LimitSettings, NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.messages import Advert, Gradient
from noloco_p2p.io.transport.callers import ACTIVATIONS
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.node.pipeline.dispatch import MOST_AWAITED
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.links import Geography, Link, MessageSizes
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.world import SimPlan, SimSwarm

MICROBATCHES = 8
ROUTINGS = ["random", *soak(["balanced", "fixed"])]


def most_graphs(routing: str, limits: LimitSettings) -> dict[int, int]:
    """Stage → the most graphs that one of its nodes held at once, in a run over links of 50 ms; not the last stage."""
    manifest = RunManifest(
        stages=3,
        start_replicas=2,
        steps=12,
        sequence_length=2,
        microbatch_size=1,
        microbatches_per_step=MICROBATCHES,
        routing=routing,  # type: ignore[arg-type]
        outer=OuterSettings(rule="noloco"),
    )
    sizes = MessageSizes(4 << 20, 4 << 20, (8,) * 3, (8,) * 3, (8,) * 3)  # large: the header goes first
    geography = Geography(Link(0.05, bytes_per_s=50e6))
    outcome = SimSwarm(
        SimPlan(manifest, (2, 2, 2), config=NodeConfig(limits=limits), geography=geography, sizes=sizes)
    ).run(limit_s=10_000)
    for node in outcome.of_stage(0):
        assert node.microbatches["dropped"] == 0
    models = [model for process in outcome.processes for model in process.models if isinstance(model, LinearStage)]
    return {stage: max(m.most_graphs for m in models if m.state.index == stage) for stage in range(2)}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_all_of_a_step_is_in_flight_where_nothing_bounds_it(routing: str) -> None:
    held = most_graphs(routing, LimitSettings())
    assert held[0] == MICROBATCHES
    assert held[1] > MICROBATCHES // 2


@pytest.mark.parametrize("routing", ROUTINGS)
def test_an_owner_may_cap_it(routing: str) -> None:
    held = most_graphs(routing, LimitSettings(max_in_flight=3))
    assert max(held.values()) == 3


@pytest.mark.parametrize("routing", ROUTINGS)
def test_memory_that_comes_and_goes_is_kept_to(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place before the first graph, then four, then two; what is already in flight may end."""
    looks = iter([1] * 10 + [4] * 400 + [2] * 10_000_000)
    given: Callable[[DeviceStage], int] = lambda self: next(looks)  # noqa: E731
    monkeypatch.setattr(DeviceStage, "places", property(given))
    held = most_graphs(routing, LimitSettings())
    assert max(held.values()) <= 4
    monkeypatch.setattr(DeviceStage, "places", property(lambda self: 1))
    assert most_graphs(routing, LimitSettings()) == {0: 1, 1: 1}


@pytest.mark.parametrize("routing", ["random", "balanced"])
def test_no_peer_gets_more_calls_than_it_serves(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer refuses a caller's calls beyond a limit, and slowly: a step of 450 microbatches met it."""
    open_calls, most = Counter[str](), Counter[str]()
    propagate = SimTransport.propagate

    async def counted(self: SimTransport, peer: Advert, *rest: object) -> Gradient:
        caller = self._me
        open_calls[caller] += 1
        most[caller] = max(most[caller], open_calls[caller])
        try:
            return await propagate(self, peer, *rest)  # type: ignore[arg-type]
        finally:
            open_calls[caller] -= 1

    monkeypatch.setattr(SimTransport, "propagate", counted)
    manifest = RunManifest(
        stages=3,
        start_replicas=1,
        steps=2,
        sequence_length=2,
        microbatch_size=1,
        microbatches_per_step=3 * MOST_AWAITED,
        routing=routing,  # type: ignore[arg-type]
        outer=OuterSettings(rule="noloco"),
    )
    outcome = SimSwarm(SimPlan(manifest, (2, 1, 1), geography=Geography(Link(0.5)))).run(limit_s=10_000)
    assert [node.microbatches["dropped"] for node in outcome.of_stage(0)] == [0, 0]
    [*first, second] = [most[node.peer] for stage in (0, 1) for node in outcome.of_stage(stage)]
    assert first == [MOST_AWAITED, MOST_AWAITED]
    # A replica that the policy names may be waiting for exactly the last microbatch that a middle stage holds.
    assert second == MOST_AWAITED if routing == "random" else second > MOST_AWAITED
    assert ACTIVATIONS.of_caller >= 2 * MOST_AWAITED, "its header may be with two replicas"
