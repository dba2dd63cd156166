"""`noloco bench links`: the figures of real nodes, the equivalent simulated run, and the page that compares them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from processes import SMALL
from typer.testing import CliRunner
from warm_start import SharedServer

from noloco_p2p.cli.main import app
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.lab.bench import links, links_page, node_fleet
from noloco_p2p.lab.bench.links import LinksPlan
from noloco_p2p.lab.bench.node_fleet import Fleet, InnerStepLine
from noloco_p2p.lab.bench.pipeline import NodeSample
from noloco_p2p.launch.cpu_seconds import CpuSeconds
from noloco_p2p.launch.line_spec import LineSpec
from noloco_p2p.launch.node_probe import MetricsReading, NodeEndpoints
from noloco_p2p.launch.progress_line import ProgressLine
from noloco_p2p.sim.scenario import Scenario

COSTS = {
    "forward_s": 0.02,
    "backward_s": 0.04,
    "inner_step_s": 0.01,
    "snapshot_s": 0.01,
    "merge_s": 0.03,
    "parameters": 200_000,
}


def step(peer: str, at: float, tokens: int = 100) -> InnerStepLine:
    return InnerStepLine(peer, at, 1, 1, tokens, ())


def test_the_rate_is_measured_between_the_first_and_last_step_of_each_peer() -> None:
    """Tokens of the first step do not count, because they were trained before it ended."""
    lines = [step("A", 10.0, 999), step("A", 12.0), step("B", 10.5, 999), step("A", 14.0), step("B", 14.5, 600)]
    assert links.rate_of(lines) == pytest.approx(200 / 4 + 600 / 4)


@pytest.mark.parametrize("lines", [[], [step("A", 1.0), step("A", 2.0), step("B", 1.0)]])
def test_a_measurement_that_is_too_short_is_an_error(lines: list[InnerStepLine]) -> None:
    with pytest.raises(LocalError, match="--seconds"):
        links.rate_of(lines)


def sample(at: float, **counts: float) -> NodeSample:
    """A sample of one node; `sent_<kind>` are bytes."""
    samples: list[tuple[str, Mapping[str, str], float]] = []
    for name, value in counts.items():
        if name.startswith("sent_"):
            labels = {"direction": "out", "kind": name.removeprefix("sent_")}
            samples.append(("noloco_bytes_total", labels, value))
        else:
            samples.append((f"noloco_{name}_total", {}, value))
    return NodeSample(NodeEndpoints("P", "R", 1, (), ""), MetricsReading(at, tuple(samples)), CpuSeconds({}, 0.0), None)


def test_figures_follow_from_the_counts_of_nodes_and_relay() -> None:
    before = {"0-0": sample(100.0, sent_activation=500), "1-0": sample(100.0, microbatches=3)}
    after = {
        "0-0": sample(110.0, sent_activation=10_500, sent_snapshot=2_000, microbatches=4, device_seconds=1.5),
        "1-0": sample(110.0, sent_gradient=8_000, microbatches=7, inner_steps=2, device_seconds=3.0),
    }
    idle = {"sent": 0, "received": 0}
    carried = (
        {"lines": {"0-0": idle, "1-0": idle}, "cpu_s": 1.0},
        {
            "lines": {"0-0": {"sent": 12_500, "received": 8_500}, "1-0": {"sent": 8_500, "received": 12_500}},
            "cpu_s": 1.5,
        },
    )
    found = links.real_figures(
        [step("A", 1.0), step("A", 5.0, 400)], (before, after), carried, LineSpec.parse("0.02/0.1mbit,5ms")
    )
    assert (found["tokens"], found["bytes"]) == (100.0, pytest.approx(20.0))
    assert found["by_kind"] == pytest.approx({"activation": 10.0, "gradient": 8.0, "snapshot": 2.0})
    assert found["line_bytes"] == pytest.approx(21.0)
    assert found["line_use"] == pytest.approx(0.5), "that of the last stage's line down: 1,250 of 2,500 bytes/s"
    assert [one["microbatches"] for one in found["work"]] == [4, 4]
    factors = links.device_factors(found["work"], [COSTS, COSTS])
    assert factors == pytest.approx([1.5 / (4 * 0.06), 3.0 / (4 * 0.06 + 2 * 0.01)])
    silent = tuple({name: sample(at, microbatches=at) for name in before} for at in (100.0, 110.0))
    with pytest.raises(LocalError, match="--nodes or --seconds"):
        links.real_figures(
            [step("A", 1.0), step("A", 5.0)], (silent[0], silent[1]), carried, LineSpec.parse("1mbit,5ms")
        )
    with pytest.raises(LocalError, match="--seconds"):
        links.device_factors([dict.fromkeys(links.WORK, 0.0)], [COSTS])


def scenario_of(link: str, factor: float = 1.0, *sets: str) -> Scenario:
    plan = LinksPlan((), (), sets=sets).fleet("int8", Path("run")).plan
    return links.scenario(plan, LineSpec.parse(link), [COSTS] * 2, [factor] * 2)


def test_the_simulator_gets_the_run_and_the_line() -> None:
    found = scenario_of("200/20mbit,50ms,5ms", 1.5, "outer.inner_steps=7", "limits.max_in_flight=9")
    assert found.replicas == (2, 2)
    assert (found.run.microbatches_per_step, found.run.outer.inner_steps) == (8, 7)
    assert found.node.limits.max_in_flight == 9
    assert found.node.checkpoint.every_steps is None
    assert (found.workload.hidden_size, found.workload.wire.forward) == (256, "int8")
    assert found.compute.forward_s == pytest.approx((0.03, 0.03))
    assert found.compute.outer_s == pytest.approx((0.03, 0.03))
    access = found.network.access
    assert (access.down_mbit_per_s, access.up_mbit_per_s) == pytest.approx((200, 20))
    assert (found.network.link.latency_s, found.network.spread) == pytest.approx((0.05, 0.1))


def test_a_simulated_run_over_a_slower_line_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SIM_STEPS", 20)
    fast, slow = (links.simulate(scenario_of(link)) for link in ("1000mbit,1ms", "5mbit,1ms"))
    assert fast["tokens"] > 3 * slow["tokens"] > 0
    bytes_per_token = 256 * 33 / 32 + 4, 256 * 33 / 32
    assert (slow["by_kind"]["activation"], slow["by_kind"]["gradient"]) == pytest.approx(bytes_per_token, rel=0.1)


def test_gains_over_bfloat16_and_the_page(tmp_path: Path) -> None:
    def case(codec: str, delay: float, tokens: float) -> dict[str, object]:
        real = {"tokens": tokens, "bytes": 10.0, "line_bytes": 11.0, "line_use": 0.9}
        simulated = {"tokens": 1.1 * tokens, "bytes": 9.0}
        return {
            "mbit_per_s": 50.0,
            "delay_ms": delay,
            "codec": codec,
            "real": real,
            "simulated": simulated,
            "tokens_off": 0.1,
            "bytes_off": -0.1,
        }

    cases = [case("bfloat16", 25.0, 100.0), case("int4", 25.0, 320.0), case("int4", 50.0, 300.0)]
    links_page.add_gains(cases)
    assert [one.get("over_bfloat16") for one in cases] == [None, {"real": 3.2, "simulated": pytest.approx(3.2)}, None]
    links_page.write_page(tmp_path / "out", "3x1", cases)
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| 50 | 25 | int4 | 320 | 352 | +10.0% | 10 | 9 | -10.0% | 11 | 90% | 3.2 |" in page
    assert "50 Mbit/s, int4, real" in (tmp_path / "out" / "tokens.svg").read_text()


@pytest.mark.parametrize("text", ["", "fast", "50,", "0", "-5", "50;200", "nan"])
def test_malformed_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rates"):
        links.numbers("--rates", text)


def test_bad_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for options in (["--delays", "x"], ["--nodes", "2"], ["--codecs", "int3"]):
        result = CliRunner().invoke(app, ["bench", "links", "--out", str(tmp_path / "out"), *options])
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).startswith(" ".join(options)), "the message names the given option"
    with pytest.raises(ConfigError, match="give --nodes instead"):
        LinksPlan((50.0,), (10.0,), out=tmp_path / "out", sets=("start_replicas=3",)).check()
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
def test_a_real_swarm_is_compared_with_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_fleet, "ForkServerProcess", SharedServer)
    monkeypatch.setattr(links, "WARM_STEPS", 2)
    monkeypatch.setattr(links, "SIM_STEPS", 12)
    fleets: list[Fleet] = []

    class Recorded(Fleet):
        def __enter__(self) -> Fleet:
            fleets.append(self)
            return super().__enter__()

    monkeypatch.setattr(links, "Fleet", Recorded)
    plan = LinksPlan((20.0,), (5.0,), shape=(2, 1), seconds=4.0, out=tmp_path / "out", sets=tuple(SMALL[1::2]))
    found = links.run(plan, ProgressLine())
    (case,) = found["cases"]
    real, simulated = case["real"], case["simulated"]
    assert real["tokens"] > 0
    assert simulated["tokens"] > 0
    # Per token 32 values in bfloat16 and a target of 4 bytes, plus frames and control messages.
    assert real["by_kind"]["activation"] == pytest.approx(68, rel=0.25)
    assert simulated["by_kind"]["activation"] == pytest.approx(68, rel=0.25)
    assert real["line_bytes"] > 0.7 * real["bytes"]
    assert 0 < real["line_use"] < 1
    assert all(factor > 0 for factor in case["device_factor"])
    assert found["ratio"] == max(abs(case["tokens_off"]), abs(case["bytes_off"]))
    assert "bfloat16" in (tmp_path / "out" / "report.md").read_text()
    (fleet,) = fleets
    assert fleet.relay is not None
    assert not fleet.relay.running
    assert not any(node.running for node in fleet.nodes.values())
