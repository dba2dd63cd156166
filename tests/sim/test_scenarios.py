"""Scenarios: their files, how a swarm follows from a scenario and a seed, and that many seeds of each keep every law.

The runs here are short forms of the files. The full size: `noloco sim configs/sim/churn.yaml --seeds 0:100`.
"""

import functools
import json
import shlex
from pathlib import Path

import pytest
from lawful import check
from noted import noted
from soak import soak

from noloco_p2p.config import InnerSettings, OuterSettings
from noloco_p2p.errors import ConfigError
from noloco_p2p.lab.scenario_files import load
from noloco_p2p.sim.fault_plan import planned_faults
from noloco_p2p.sim.links import Access
from noloco_p2p.sim.payloads import ByteCounts
from noloco_p2p.sim.scenario import ChurnSettings, Scenario, shared_out
from noloco_p2p.sim.simulation import build, sizes_of

FILES = Path(__file__).parents[2] / "configs" / "sim"
NAMES = ("lan", "continents", "consumer", "home-200", "protocol-nanogpt", "stragglers", "churn", "partition")
SEEDS_A_TEST = 2
BLOCKS = [(name, 0) for name in NAMES]
MORE_BLOCKS = soak(
    (name, block) for name in NAMES for block in range(0, 32, SEEDS_A_TEST) if (name, block) not in BLOCKS
)
SHORT = (
    "limit_s=600",
    "run.steps=6",
    "run.outer.inner_steps=2",
    "run.outer.deadline_s=20",
    "run.microbatches_per_step=2",
    "node.directory.refresh_s=2",
    "node.directory.ttl_s=10",
    "node.limits.microbatch_deadline_s=40",
    "node.limits.linger_s=30",
    "node.limits.drain_s=8",
)
"""A run of half a minute, with deadlines shortened in proportion."""
SHORTER = {
    "lan": (),
    "continents": ("workload.parameters_per_stage=25_000_000",),
    "consumer": ("workload.parameters_per_stage=1_000_000", "workload.sequence_length=256"),
    "home-200": ("workload.parameters_per_stage=1_000_000",),
    "protocol-nanogpt": ("run.steps=3", "workload.sequence_length=256", "node.limits.microbatch_deadline_s=160"),
    "stragglers": ("compute.node_spread=0.6",),
    "churn": (
        "workload.parameters_per_stage=5_000_000",
        "node.checkpoint.every_steps=1",
        "churn.from_s=5",
        "churn.arrivals_per_hour=15",
        "churn.departures_per_hour=15",
        "churn.crashes_per_hour=30",
        "churn.faults_per_hour=30",
        "churn.down_s=6",
        "churn.fault_s=6",
    ),
    "partition": (
        "run.steps=8",
        "faults=[{at_s: 6, kind: split, region: europe, for_s: 8},"
        " {at_s: 20, kind: one_way, peers: [s0r0, s1r0], for_s: 4}]",
    ),
}


@functools.cache
def short(name: str) -> Scenario:
    """The short form of a file's scenario."""
    return load(FILES / f"{name}.yaml", (*SHORT, *SHORTER[name]))


def drawn(name: str, seed: int) -> tuple[Scenario, int, str]:
    """The run for a seed: the scenario, its number of nodes, and the command that repeats it."""
    scenario, routing = short(name), ("random", "balanced", "weighted")[seed % 3]
    scenario = scenario.model_copy(update={"run": scenario.run.model_copy(update={"routing": routing})})
    nodes = max((4, 6, 8, 9)[seed % 4], 2 * len(scenario.replicas))
    sets = [f"--set {shlex.quote(one)}" for one in (*SHORT, *SHORTER[name], f"run.routing={routing}")]
    return (
        scenario,
        nodes,
        f"noloco sim configs/sim/{name}.yaml --seeds {seed}:{seed + 1} --nodes {nodes} {' '.join(sets)}",
    )


WASTEFUL = {
    "churn": "nodes stop in the middle of what they send or take",
    "partition": "pulls between the continents are cut off",
}
"""Scenarios that waste more than one byte in a hundred, and why."""


# --- the laws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "block"), [*BLOCKS, *MORE_BLOCKS])
def test_every_seed_of_every_scenario_keeps_the_laws(name: str, block: int) -> None:
    hurt, bytes_sent = 0, ByteCounts()
    for seed in range(block, block + SEEDS_A_TEST):
        scenario, nodes, replay = drawn(name, seed)
        simulation = build(scenario.of_nodes(nodes), seed)
        with noted(f"seed {seed}; replay: {replay}"):
            check(simulation)
        hurt += bool(simulation.begun)
        for kinds in simulation.network.traffic.byte_counts().values():
            for counts in kinds.values():
                bytes_sent.add(counts)
    if name not in WASTEFUL:
        assert bytes_sent.lost < 0.01 * bytes_sent.sent, "too many bytes were wasted"
    if name == "partition":
        assert hurt == SEEDS_A_TEST
    elif name == "churn":
        assert hurt > 0.8 * SEEDS_A_TEST, "too few of the swarms had any fault"


def test_a_run_is_a_function_of_scenario_and_seed() -> None:
    hashes = []
    for seed in (5, 5, 6):
        simulation = build(short("churn"), seed)
        hashes.append(check(simulation).trace.trace_hash)
    assert hashes[0] == hashes[1] != hashes[2]


# --- the files ------------------------------------------------------------------------------------------------------


def test_each_scenario_is_named_like_its_file() -> None:
    assert sorted(path.stem for path in FILES.glob("*.yaml")) == sorted(NAMES)
    for name in NAMES:
        scenario = load(FILES / f"{name}.yaml")
        assert scenario.name == name
        build(scenario, seed=0)


def test_the_default_scenario_is_that_of_the_lan_file() -> None:
    assert load(FILES / "lan.yaml") == Scenario() == load(None)


def test_all_errors_of_a_file_are_reported_at_once_each_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "nmae: y\n"
        "compute:\n"
        "  forward_s: slow\n"
        "  sprad: 1\n"
        "network:\n"
        "  loss: 2\n"
        "faults:\n"
        "  - {at_s: 1, kind: crash, pears: [s0r0]}\n"
        "  - {kind: crash}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path, ["replicas", "run.stepps=3"])
    assert str(caught.value).split("\n") == [
        "--set replicas: write it as --set key=value",
        f"{path}:1: there is no key nmae; the nearest is name",
        f"{path}:4: there is no key compute.sprad; the nearest is compute.spread",
        "--set run.stepps: there is no key run.stepps; the nearest is run.steps",
        f"{path}:3: compute.forward_s must be a number, not 'slow'",
        f"{path}:6: network.loss must be less than 1.0, not 2",
        f"{path}:7: there is no key faults.0.pears; the nearest is peers",
        f"{path}:7: faults.1.at_s is missing",
    ]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["compute.forward_s=[0.1]"], "compute.forward_s must be one number, or 2 numbers, one per stage"),
        (["network.regions={names: [a, b], round_trip_ms: [[1, 2]]}"], "round_trip_ms must have 2 rows of 2 numbers"),
        (["network.regions={names: [a, a], round_trip_ms: [[1, 2], [2, 1]]}"], "names must be unique"),
        (["network.regions={names: [a], round_trip_ms: [[0]]}"], "network.regions.round_trip_ms"),
        (["network.regions={names: [a], round_trip_ms: [[1]], mbit_per_s: [[-5]]}"], "network.regions.mbit_per_s"),
        (["network.regions={names: [a], round_trip_ms: [[1]], mbit_per_s: [[1, 2]]}"], "mbit_per_s must have 1 rows"),
        (["faults=[{at_s: 1, kind: crash}]"], "a fault (crash at 1 s) needs exactly one of peers, region and share"),
        (["faults=[{at_s: 1, kind: crash, region: mars}]"], "region 'mars', but there are no regions"),
        (["run.outer.rule=gossip", "run.outer.alpha=0.3"], "rule gossip has no alpha: leave it out"),
        (["network.loss=1"], "network.loss must be less than 1.0, not 1"),  # it would be retransmitted for ever
    ],
)
def test_incompatible_values_of_a_scenario_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, sets)
    assert message in str(caught.value)


def test_another_outer_rule_has_its_own_defaults() -> None:
    assert load(Path("lan"), ["run.outer.rule=gossip"]).run.outer == OuterSettings(rule="gossip", inner_steps=20)
    assert load(None, ["run.outer.rule=diloco"]).run.outer == OuterSettings(rule="diloco")


def test_another_optimizer_has_its_own_learning_rate() -> None:
    assert load(None, ["run.inner.optimizer=adamw"]).run.inner == InnerSettings(optimizer="adamw")


def test_a_fault_for_a_nonexistent_node_is_refused() -> None:
    scenario = load(None, ["faults=[{at_s: 1, kind: crash, peers: [s0r3]}]"])
    with pytest.raises(ConfigError, match="s0r3, which does not exist"):
        build(scenario.of_nodes(4), seed=0)


def test_a_run_that_could_never_start_is_refused() -> None:
    scenario = load(None, ["run.start_replicas=3", "faults=[{at_s: 9, kind: arrive, peers: [s0r2, s1r2]}]"])
    assert build(scenario.of_nodes(4), seed=0).plan.manifest.start_replicas == 3
    with pytest.raises(ConfigError, match="begins with 3 nodes of each stage, but stage 0 never has more than 2"):
        build(scenario.model_copy(update={"faults": ()}).of_nodes(4), seed=0)


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ("peers: [s0r1]", "the node s0r1 cannot arrive, because the swarm begins with it"),
        ("share: 0.5", "cannot arrive, because the swarm begins with it"),
        ("peers: [s2r4]", "'s2r4' cannot be the id of a new node; the first new node of stage 0 is s0r4"),
        ("peers: [new]", "'new' cannot be the id of a new node; the first new node of stage 0 is s0r4"),
        ("peers: [s0r04]", "'s0r04' cannot be the id of a new node"),
        ("peers: [s1r4, s1r4]", "the node s1r4 arrives more than once"),
    ],
)
def test_a_node_that_cannot_arrive_is_refused(who: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(load(None, [f"faults=[{{at_s: 1, kind: arrive, {who}}}]"]), seed=0)
    assert message in str(caught.value)


def test_every_arriving_node_has_its_own_id() -> None:
    """Whether its arrival is listed, drawn at the rate of arrivals, or drawn among the other faults."""
    churn = ("churn.arrivals_per_hour=9", "churn.faults_per_hour=9", "churn.kinds=[arrive]")
    scenario = load(None, [*churn, "faults=[{at_s: 99, kind: arrive, peers: [s1r5, s0r4]}]"])
    arrive = [peer for fault in planned_faults(scenario, seed=1) if fault.kind == "arrive" for peer in fault.peers]
    names = [f"s{stage}r{n}" for stage in range(2) for n in range(4)]
    assert len({*names, *arrive}) == len(names) + len(arrive)
    assert len(arrive) > 100


def test_costs_can_come_from_a_measurement(tmp_path: Path) -> None:
    costs = {"forward_s": 0.1, "backward_s": 0.2, "inner_step_s": 0.3, "snapshot_s": 0.4, "merge_s": 0.6}
    (tmp_path / "bench.json").write_text(json.dumps({"stages_costs": [costs, costs | {"forward_s": 0.15}]}))
    (tmp_path / "mine.yaml").write_text("compute:\n  measured: bench.json\n")
    found = load(tmp_path / "mine.yaml", ["compute.backward_s=1"]).compute
    assert (found.forward_s, found.backward_s, found.inner_step_s, found.outer_s) == (
        (0.1, 0.15),
        1,
        (0.3,) * 2,
        (0.5,) * 2,
    )
    assert load(tmp_path / "mine.yaml", ["compute.measured=null"]).compute == Scenario().compute
    for text in ("{}", "[" * 100_000):
        (tmp_path / "bench.json").write_text(text)
        with pytest.raises(
            ConfigError, match=r"mine.yaml:2: .*bench.json is not what `noloco bench stage --json` writes"
        ):
            load(tmp_path / "mine.yaml")


# --- swarms from scenarios ------------------------------------------------------------------------------------------


def test_nodes_are_distributed_over_stages_in_proportion() -> None:
    for nodes in range(3, 60):
        for replicas in ((4, 4, 4), (1, 2, 7), (5, 1, 1)):
            shares = shared_out(nodes, replicas)
            assert sum(shares) == nodes
            assert min(shares) >= 1
            exact = [nodes * count / sum(replicas) for count in replicas]
            if min(exact) >= 1:
                assert all(abs(share - each) < 1 for share, each in zip(shares, exact, strict=True))
    with pytest.raises(ConfigError, match="2 nodes are too few for 3 stages"):
        short("churn").of_nodes(2)


def test_message_sizes_follow_from_the_workload() -> None:
    sizes = sizes_of(Scenario())
    assert sizes.gradient_bytes == 8 * 1024 * 2048 * 2
    assert sizes.activation_bytes == sizes.gradient_bytes + 8 * 1024 * 4
    assert sizes.snapshot_bytes == (4 * (300_000_000 + 16_384),) * 2
    assert sizes.weights_bytes == (2 * 300_000_000,) * 2
    assert sizes.state_bytes == (5 * 4 * 300_000_000,) * 2
    assert Scenario().tokens_per_microbatch == 8192
    coded = Scenario.model_validate({"workload": {"wire": {"forward": "int4", "backward": "int8"}}})
    assert sizes_of(coded).activation_bytes == 8 * 1024 * (2048 * 4.5 / 8 + 4) + 2048 * 2
    assert sizes_of(coded).gradient_bytes == 8 * 1024 * 2048 * 8.25 / 8


def test_nodes_are_assigned_to_regions_in_turn_with_the_links_of_the_file() -> None:
    geography = build(load(FILES / "continents.yaml"), seed=0).plan.geography
    assert geography is not None
    far, near = geography.link("s0r1", "s1r2"), geography.link("s0r1", "s1r4")
    assert (far.latency_s, far.bytes_per_s, far.spread) == (0.121, 190e6 / 8, 0.05)
    assert (near.latency_s, near.bytes_per_s) == (0.001, 5e9 / 8)
    assert geography.access("s0r0") == Access(5e9 / 8, 5e9 / 8)


def test_home_lines_differ_and_calls_are_lost_as_the_scenario_says() -> None:
    geography = build(load(FILES / "consumer.yaml", ["network.call_loss=0.01"]), seed=3).plan.geography
    assert geography is not None
    link, ups = geography.link("s0r0", "s1r0"), [geography.access(f"s0r{i}").up_bytes_per_s or 0.0 for i in range(400)]
    assert (link.request_loss, link.reply_loss, link.loss, link.latency_s) == (0.01, 0.01, 0.0002, 0.02)
    assert sorted(ups)[200] == pytest.approx(21.6e6 / 8, rel=0.15)


def test_random_faults_occur_at_the_configured_rates() -> None:
    hours, nodes = 10.0, 40
    rates = ChurnSettings(
        from_s=100, arrivals_per_hour=3, departures_per_hour=1, crashes_per_hour=4, faults_per_hour=2, kinds=("hang",)
    )
    scenario = Scenario(replicas=(20, 20), churn=rates, limit_s=100 + hours * 3600)
    found = planned_faults(scenario, seed=1)
    kinds = [fault.kind for fault in found]
    for kind, rate in (("arrive", 3), ("depart", 1), ("bounce", 4), ("hang", 2)):
        assert kinds.count(kind) == pytest.approx(rate * hours * nodes, rel=0.2)
    assert min(fault.at_s for fault in found) > 100
    downs = [fault.for_s for fault in found if fault.kind == "bounce"]
    assert sum(downs) / len(downs) == pytest.approx(60, rel=0.1)
    gone: set[str] = set()
    for fault in found:
        assert gone.isdisjoint(fault.peers), "a node that has left for good has no further faults"
        gone |= set(fault.peers) if fault.kind == "depart" else set()


@pytest.mark.parametrize("rate", ["1e5", "1e300", "1.7e308"])
def test_random_faults_that_would_never_all_be_drawn_are_refused(rate: str) -> None:
    """With 1e300 an hour no time passed between two of them."""
    rates = [f"churn.{what}_per_hour={rate}" for what in ("arrivals", "departures", "crashes", "faults")]
    with pytest.raises(ConfigError, match=r"churn: about .* events until limit_s are too many: at most 1,000,000"):
        build(load(None, rates), seed=0)
    assert planned_faults(load(None, [*rates, "churn.from_s=36000"]), seed=0) == ()


def test_a_stage_keeps_one_node_however_many_leave_for_good() -> None:
    rates = ChurnSettings(departures_per_hour=50, crashes_per_hour=50, down_s=None)
    found = planned_faults(Scenario(replicas=(3, 5), churn=rates), seed=1)
    assert {fault.kind for fault in found} == {"crash", "depart"}
    assert [sum(fault.peers[0].startswith(stage) for fault in found) for stage in ("s0", "s1")] == [2, 4]


def test_a_fault_lasts_until_its_own_end() -> None:
    """Whatever other faults begin and end at the same nodes meanwhile."""
    faults = [
        "{at_s: 4, kind: slow, peers: [s1r0], for_s: 5, factor: 4}",
        "{at_s: 5, kind: slow, peers: [s1r0], for_s: 2, factor: 2}",
        "{at_s: 4, kind: hang, peers: [s1r1], for_s: 5}",
        "{at_s: 5, kind: mute, peers: [s1r1], for_s: 2}",
        "{at_s: 4, kind: cut, peers: [s0r0, s1r2], for_s: 5}",
        "{at_s: 5, kind: one_way, peers: [s0r0, s1r2], for_s: 2}",
        "{at_s: 4, kind: split, peers: [s0r1], for_s: 5}",
        "{at_s: 5, kind: split, peers: [s1r2], for_s: 2}",
        "{at_s: 4, kind: pause, peers: [s0r2], for_s: 12}",
        "{at_s: 5, kind: pause, peers: [s0r2], for_s: 2}",
    ]
    light = ("replicas=[3, 3]", "run.steps=12", "workload.parameters_per_stage=1_000_000")
    swarm = build(load(None, (*SHORT, *light, f"faults=[{', '.join(faults)}]")), seed=0)
    pairs, seen = (("s1r1", "s0r0"), ("s0r0", "s1r2"), ("s0r1", "s1r0"), ("s1r2", "s1r0")), dict[float, list[object]]()

    def look(at_s: float) -> None:
        device, cut = swarm.process("s1r0").device, [swarm.network.cut(*pair) for pair in pairs]
        hangs, views = "s1r1" in swarm.registry.failing, len(swarm.registry._of_group)
        seen[at_s] = [device and device.slowness, *cut, hangs, views, swarm.process("s0r2").node.state.pausing]

    for at_s in (4.5, 6.0, 8.0, 10.0):
        swarm.at(at_s, lambda at_s=at_s: look(at_s))  # type: ignore[misc]
    check(swarm)
    assert seen[4.5] == [4.0, True, True, True, False, True, 2, True]
    assert seen[6.0] == [2.0, True, True, True, True, True, 3, True]
    assert seen[8.0] == seen[4.5]
    assert seen[10.0] == [1.0, False, False, False, False, False, 0, True]


def test_a_node_that_arrives_during_a_split_is_on_one_side_of_it() -> None:
    faults = (
        "{at_s: 4, kind: split, peers: [s0r0, s1r0], for_s: 10}",
        "{at_s: 5, kind: arrive, peers: [s1r2]}",
    )
    light = ("replicas=[2, 2]", "run.steps=24", "workload.parameters_per_stage=1_000_000")
    swarm, seen = build(load(None, (*SHORT, *light, f"faults=[{', '.join(faults)}]")), seed=0), list[object]()

    def look() -> None:
        listed = [{a.peer_id for a in swarm.registry.view(now=12.0, reader=reader)} for reader in ("s0r0", "s0r1")]
        cut = [swarm.network.cut("s1r2", peer) for peer in ("s0r0", "s0r1")]
        seen.extend([*cut, *("s1r2" in one for one in listed)])
        seen.append({a.peer_id for a in swarm.registry.view(now=12.0, reader="s1r2") if a.announced_at > 8.0})

    swarm.at(12.0, look)
    check(swarm)
    assert seen == [True, False, False, True, {"s0r1", "s1r1", "s1r2"}]


@pytest.mark.parametrize("for_s", [0, 1, 8])
def test_a_node_that_was_asked_to_leave_is_restarted(for_s: float) -> None:
    """Even if leaving takes longer than the absence was to last, and only once if it was asked to leave twice."""
    light = ("replicas=[2, 2]", "run.steps=16", "workload.parameters_per_stage=1_000_000")
    fault = f"{{at_s: 5, kind: leave, peers: [s0r1], for_s: {for_s}}}"
    outcome = check(build(load(None, (*SHORT, *light, f"faults=[{fault}, {fault}]")), seed=0))
    first, second = (one for one in outcome.processes if one.peer == "s0r1")
    assert first.told_to_leave
    assert first.ended_at_s is not None
    started_at = second.trace.events[0].at_s
    assert first.ended_at_s <= started_at < max(first.ended_at_s, 5.0 + for_s) + 1
    assert second.step == 16


def test_the_faults_of_a_file_take_effect_and_end() -> None:
    faults = [
        "{at_s: 5, kind: slow, peers: [s1r0], for_s: 10, factor: 4}",
        "{at_s: 6, kind: one_way, peers: [s0r0, s1r1, s1r2], for_s: 5}",
        "{at_s: 8, kind: depart, peers: [s0r1]}",
        "{at_s: 9, kind: arrive, peers: [s1r3]}",
    ]
    light = ("replicas=[3, 3]", "run.steps=12", "workload.parameters_per_stage=1_000_000")
    simulation = build(load(None, (*SHORT, *light, f"faults=[{', '.join(faults)}]")), seed=0)
    seen: list[float] = []
    for at_s in (4.0, 7.0, 17.0):
        simulation.at(at_s, lambda: seen.append(getattr(simulation.process("s1r0").device, "slowness", 0.0)))
    outcome = check(simulation)
    assert seen == [1.0, 4.0, 1.0]
    unheard = [h for h in outcome.trace.of("reroute", "s0r0") if h.get("reason") in ("unreachable", "stalled")]
    assert {h.get("peer") for h in unheard} <= {"s1r1", "s1r2"}
    assert unheard
    assert outcome.nodes["s0r1"].trace.of("state")[-2].get("reason") == "told to leave"
    assert outcome.nodes["s0r1"].step < 12 == outcome.nodes["s0r0"].step
    assert outcome.nodes["s1r3"].trace.of("inner_step")
