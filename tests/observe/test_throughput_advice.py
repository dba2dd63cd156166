"""The throughput estimate, compared with the simulator's idealised pipeline, and the advice that follows from it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from diagnosed import swarm, with_advert, with_figures, with_status
from hypothesis import given
from hypothesis import strategies as st
from soak import soak

from noloco_p2p.core.line_cap import BYTES_PER_MBIT
from noloco_p2p.core.status import MicrobatchSize
from noloco_p2p.lab import scenario_files
from noloco_p2p.lab.sim_command import SimRequest, simulate
from noloco_p2p.observe.diagnosis.diagnose import diagnose
from noloco_p2p.observe.diagnosis.findings import Finding, Report
from noloco_p2p.observe.diagnosis.throughput_advice import StageMedian, estimated_step
from noloco_p2p.observe.overview import overview
from noloco_p2p.sim.scenario import Scenario
from noloco_p2p.sim.simulation import costs_of, sizes_of
from noloco_p2p.sim.throughput_bound import throughput_bound

SCENARIOS = Path(__file__).parents[2] / "configs" / "sim"
ALIKE = ("network.access.spread=0", "compute.node_spread=0", "network.loss=0", "network.spread=0")
SHARED = ("network.link.mbit_per_s=null", "network.access.up_mbit_per_s=200", "network.access.down_mbit_per_s=200")

SLOW_UP, SLOW_DOWN = (("replicas=[4,4,4]", f"network.access.{way}_mbit_per_s=20") for way in ("up", "down"))


def medians_of(scenario: Scenario) -> list[StageMedian]:
    """The medians that identical nodes would measure."""
    access, link = scenario.network.access, scenario.network.link
    up, down = (
        min(rate or 1e9, link.mbit_per_s or 1e9) * BYTES_PER_MBIT
        for rate in (access.up_mbit_per_s, access.down_mbit_per_s)
    )
    return [
        StageMedian(replicas, cost.forward_s + cost.backward_s, up, down, 2 * link.latency_s, 0.0)
        for replicas, cost in zip(scenario.replicas, costs_of(scenario), strict=True)
    ]


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize("per_step", [4, 16, *soak([2, 64])])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("protocol-nanogpt", SHARED),
        ("home-200", ()),
        ("home-200", SLOW_UP),
        ("home-200", SLOW_DOWN),
        ("lan", ()),
        ("consumer", ()),
    ],
)
def test_the_estimate_is_near_the_simulators_bound(
    name: str, changes: tuple[str, ...], per_step: int, codec: str
) -> None:
    codecs = (f"workload.wire.forward={codec}", f"workload.wire.backward={codec}")
    sets = [*ALIKE, *changes, *codecs, f"run.microbatches_per_step={per_step}"]
    scenario = scenario_files.load(SCENARIOS / f"{name}.yaml", sets)
    sizes = sizes_of(scenario)
    size = MicrobatchSize(per_step, sizes.activation_bytes, sizes.gradient_bytes, codec, codec)
    estimate, bound = estimated_step(medians_of(scenario), size), throughput_bound(scenario, 0)
    tokens = per_step * scenario.replicas[0] * scenario.tokens_per_microbatch
    assert bound.tokens_per_s is not None
    assert tokens / estimate.seconds == pytest.approx(bound.tokens_per_s, rel=0.15)
    assert estimate.in_use == pytest.approx(max(bound.utilisation), rel=0.16, abs=0.01)


# --- advice -----------------------------------------------------------------------------------------------------------

Nodes = dict[str, Report]
MBIT = 1e6 / 8


def measured(
    nodes: Nodes, size: MicrobatchSize, *, device_s: float, mbit_per_s: float, in_use: float, round_trip_s: float
) -> Nodes:
    """The same swarm, with equal measurements at all nodes."""
    figures = {
        "upload_bytes_per_s": mbit_per_s * MBIT,
        "download_bytes_per_s": mbit_per_s * MBIT,
        "round_trip_s": round_trip_s,
        "device_s": 100 * in_use,
        "idle_s": {"gradients": 100 * (1 - in_use)},
    }
    for name, report in nodes.items():
        changed = with_advert(with_figures(report, **figures), microbatches_per_s=1 / device_s)
        nodes[name] = with_status(changed, microbatch=size)
    return nodes


def homes(in_use: float = 0.12, per_step: int = 4) -> Nodes:
    """Two stages of four homes at 200 Mbit/s, 0.3 s per microbatch, and 27 MB of float32 in each direction."""
    size = MicrobatchSize(per_step, 27_000_000, 27_000_000, "float32", "float32")
    return measured(swarm(2, 4), size, device_s=0.3, mbit_per_s=200.0, in_use=in_use, round_trip_s=0.05)


def advice(nodes: Nodes) -> list[Finding]:
    return [f for f in diagnose(list(nodes.values())).findings if f.name == "throughput"]


def test_for_a_full_line_better_settings_are_advised() -> None:
    [found] = advice(homes(in_use=0.2))
    assert found.severity == "ok"
    assert found.sentence == (
        "the line is full: devices are busy 20 % of the time; "
        "int8 and 16 microbatches per step would raise that to about 84 %"
    )
    assert found.advice == (
        "in the configuration of the next run: wire.forward: int8, wire.backward: int8, microbatches_per_step: 16"
    )


@pytest.mark.parametrize("per_step", [40, 100])
def test_a_step_is_not_advised_to_grow_beyond_its_limit(per_step: int) -> None:
    [found] = advice(homes(in_use=0.2, per_step=per_step))
    assert "int8 would raise that" in found.sentence
    assert found.advice == "in the configuration of the next run: wire.forward: int8, wire.backward: int8"


def test_each_direction_gets_the_next_smaller_codec() -> None:
    size = MicrobatchSize(32, 18_000_000, 36_000_000, "int8", "float32")
    [found] = advice(measured(swarm(2, 4), size, device_s=0.3, mbit_per_s=200.0, in_use=0.15, round_trip_s=0.05))
    assert "; int4 forward, int8 backward would raise that to about 52 %" in found.sentence
    assert found.advice == "in the configuration of the next run: wire.forward: int4, wire.backward: int8"


def test_a_direction_that_has_the_smallest_codec_keeps_it() -> None:
    size = MicrobatchSize(32, 9_000_000, 36_000_000, "int4", "float32")
    [found] = advice(measured(swarm(2, 4), size, device_s=0.3, mbit_per_s=200.0, in_use=0.15, round_trip_s=0.05))
    assert found.advice.startswith("in the configuration of the next run: wire.forward: int4, wire.backward: int8")


def test_the_promise_is_scaled_by_the_present_share_of_the_estimate() -> None:
    """If the swarm reaches two thirds of the estimate, two thirds are promised."""
    whole, part = advice(homes(in_use=0.2))[0].sentence, advice(homes(in_use=0.16))[0].sentence
    promised = [int(sentence.removesuffix(" %").rpartition(" ")[2]) for sentence in (whole, part)]
    assert promised[1] < promised[0]
    assert promised[1] / promised[0] == pytest.approx(0.16 / 0.2, abs=0.05)


def simulated_use(scenario: Scenario) -> float:
    """The share of time during which the devices of the busiest stage work, in a simulated run of real nodes."""
    found = simulate(SimRequest(scenario, 0))
    assert found.broken is None
    assert found.figures is not None
    return max(stage.utilisation or 0.0 for stage in found.figures.stages)


@pytest.mark.soak
def test_a_simulated_swarm_with_the_advised_settings_keeps_the_promise() -> None:
    """A simulated run of real nodes on home lines, the advice on its figures, and a run with the advised settings.

    The result is rather better, because longer steps lose less at their borders.
    """
    sets = ["run.steps=12", "run.microbatches_per_step=4", "run.outer.pairing=none"]
    scenario = scenario_files.load(SCENARIOS / "home-200.yaml", sets)
    sizes, [first, _] = sizes_of(scenario), medians_of(scenario)
    size = MicrobatchSize(4, sizes.activation_bytes, sizes.gradient_bytes, "bfloat16", "bfloat16")
    in_use = simulated_use(scenario)
    nodes = measured(swarm(2, 4), size, device_s=first.device_s, mbit_per_s=200.0, in_use=in_use, round_trip_s=0.05)
    [found] = advice(nodes)
    assert found.sentence.startswith("the line is full")
    promised = int(found.sentence.removesuffix(" %").rpartition(" ")[2]) / 100
    changes = [each.replace(": ", "=") for each in found.advice.partition(": ")[2].split(", ")]
    sets = [*sets, *(f"{'workload' if each.startswith('wire') else 'run'}.{each}" for each in changes)]
    had = simulated_use(scenario_files.load(SCENARIOS / "home-200.yaml", sets))
    assert had > 2 * in_use
    assert 0.8 * had < promised < 1.1 * had


def test_for_long_round_trips_more_microbatches_and_no_codec_are_advised() -> None:
    size = MicrobatchSize(2, 1_000_000, 1_000_000, "int8", "int8")
    nodes = measured(swarm(3, 2), size, device_s=0.05, mbit_per_s=10_000.0, in_use=0.2, round_trip_s=0.2)
    [found] = advice(nodes)
    assert found.sentence.startswith(
        "round trips are long: devices are busy 20 % of the time; 16 microbatches per step would raise that to about"
    )


def test_for_steps_that_end_before_the_pipeline_is_full_neither_the_line_nor_round_trips_are_blamed() -> None:
    """Eight stages on a LAN: four microbatches take 11 device times, of which each device works for 4."""
    size = MicrobatchSize(4, 1_000_000, 1_000_000, "int8", "int8")
    nodes = measured(swarm(8, 1), size, device_s=0.3, mbit_per_s=10_000.0, in_use=0.36, round_trip_s=0.0002)
    [found] = advice(nodes)
    assert found.sentence == (
        "steps are short: devices are busy 36 % of the time; 32 microbatches per step would raise that to about 81 %"
    )


NO_ADVICE: dict[str, Callable[[Nodes], Nodes]] = {
    "devices at work": lambda nodes: homes(in_use=0.7),
    "devices at work for half of the time": lambda nodes: homes(in_use=0.55),
    "the devices of one stage at work": lambda nodes: nodes | {k: v for k, v in homes(0.7).items() if k[1] == "1"},
    "no better settings": lambda nodes: {
        name: with_status(report, microbatch=MicrobatchSize(64, 27_000_000, 27_000_000, "int4", "int4"))
        for name, report in nodes.items()
    },
    "another bottleneck": lambda nodes: homes(in_use=0.02),
    "lines that have not been measured": lambda nodes: {
        name: with_figures(report, upload_bytes_per_s=None) for name, report in nodes.items()
    },
    "a stage without nodes": lambda nodes: {k: v for k, v in nodes.items() if k.startswith("S0")},
    "a run of one stage": lambda nodes: {
        name: with_status(report, stages=1) for name, report in nodes.items() if name.startswith("S0")
    },
    "too early": lambda nodes: {name: with_status(report, inner_steps=2) for name, report in nodes.items()},
    "no sizes": lambda nodes: {name: with_status(report, microbatch=None) for name, report in nodes.items()},
    "an unknown codec": lambda nodes: {
        name: with_status(report, microbatch=MicrobatchSize(4, 27_000_000, 27_000_000, "int3", "int8"))
        for name, report in nodes.items()
    },
    "a negative size": lambda nodes: {
        name: with_status(report, microbatch=MicrobatchSize(4, 27_000_000, -1, "float32", "float32"))
        for name, report in nodes.items()
    },
    "impossible sizes": lambda nodes: {
        name: with_status(report, microbatch=MicrobatchSize(0, -1, 0, "int8", "int8")) for name, report in nodes.items()
    },
    "a negative line rate": lambda nodes: {
        name: with_figures(report, upload_bytes_per_s=-5.0) for name, report in nodes.items()
    },
    "negative idle time": lambda nodes: {
        name: with_figures(report, device_s=5.0, idle_s={"gradients": -5.0}) for name, report in nodes.items()
    },
    "a blocked event loop": lambda nodes: nodes | {"S1R0": with_figures(nodes["S1R0"], loop_silent_s=42.0)},
}


@pytest.mark.parametrize("case", NO_ADVICE)
def test_cases_without_advice(case: str) -> None:
    assert advice(homes(in_use=0.2))
    assert not advice(NO_ADVICE[case](homes(in_use=0.2)))


def test_nodes_that_do_not_train_or_lack_weights_do_not_count() -> None:
    nodes = homes(in_use=0.2)
    expected = advice(nodes)
    nodes["S0R0"] = with_status(nodes["S0R0"], microbatch=None)
    for name in ("S1R0", "S1R1", "S1R2"):
        nodes[name] = with_advert(homes(in_use=0.9)[name], state="paused")
    assert [found.sentence[:50] for found in advice(nodes)] == [found.sentence[:50] for found in expected]


claims = st.floats(0, allow_infinity=False) | st.sampled_from((5e-324, 1e-310, 1.0, 1e308, 0.0, -1.0))
whole = st.integers(0, 2**62)
LINE_FIGURES = ("upload_bytes_per_s", "download_bytes_per_s", "round_trip_s")


@given(
    size=st.builds(MicrobatchSize, whole, whole, whole, st.just("int8"), st.just("float32")),
    figures=st.fixed_dictionaries(dict.fromkeys(LINE_FIGURES, claims)),
    speed=claims,
    in_use=st.floats(0, 1),
)
def test_no_claim_of_a_stranger_breaks_the_diagnosis(
    size: MicrobatchSize, figures: dict[str, float], speed: float, in_use: float
) -> None:
    nodes = homes(in_use=in_use)
    for name, report in nodes.items():
        nodes[name] = with_advert(
            with_figures(with_status(report, microbatch=size), **figures), microbatches_per_s=speed
        )
    assert all(found.sentence for found in advice(nodes))


def test_a_node_that_lacks_memory_takes_precedence() -> None:
    """With four microbatches per step and equally many replicas in both stages, four places suffice, three do not."""
    nodes = homes(in_use=0.2)
    nodes["S0R1"] = with_status(nodes["S0R1"], places=4)
    assert advice(nodes)
    nodes["S0R1"] = with_status(nodes["S0R1"], places=3)
    [found] = diagnose(list(nodes.values())).findings
    assert (found.name, found.peer) == ("places", nodes["S0R1"].peer)
    assert found.sentence.endswith("of stage 0 has room for 3 of the 4 microbatches of a step")
    assert found.advice.startswith("set compute.recompute there")


def test_no_more_microbatches_are_advised_than_the_nodes_have_places_for() -> None:
    """In a simulated run of home-200 with limits.max_in_flight 4, 16 of them reach 51 % in int8, where 4 reach 45 %."""
    nodes = {name: with_status(report, places=4) for name, report in homes(in_use=0.2).items()}
    [found] = advice(nodes)
    assert found.advice == "in the configuration of the next run: wire.forward: int8, wire.backward: int8"
    [found] = advice({name: with_status(report, places=8) for name, report in nodes.items()})
    assert found.advice.endswith(", microbatches_per_step: 8")


def test_the_places_of_a_node_are_compared_with_its_share_of_a_step() -> None:
    """The only replica of a middle stage needs places for the microbatches of both origins; the last stage is not
    asked, because what it lacks holds up nobody but its callers."""
    size = MicrobatchSize(4, 27_000_000, 27_000_000, "float32", "float32")
    nodes = measured(swarm(3, 2), size, device_s=0.3, mbit_per_s=200.0, in_use=0.2, round_trip_s=0.05)
    del nodes["S1R1"]
    for name, places in ("S0R0", 4), ("S1R0", 7), ("S2R0", 1):
        nodes[name] = with_status(nodes[name], places=places)
    found = [f for f in diagnose(list(nodes.values())).findings if f.name == "places"]
    assert [f.peer for f in found] == [nodes["S1R0"].peer]
    assert "has room for 7 of the 8 microbatches" in found[0].sentence


def test_top_shows_the_advice_below_the_progress() -> None:
    found = overview(list(homes(in_use=0.2).values()))
    assert found.sentence == found.progress
    assert found.severity == "ok"
    assert [f.name for f in found.findings] == ["throughput"]
