"""What the scenarios with slow lines must reach, of `configs/sim/README.md`: tokens per second, and no waste."""

from pathlib import Path

import pytest
from lawful import check
from soak import soak

from noloco_p2p.lab.scenario_files import load
from noloco_p2p.sim.figures import figures
from noloco_p2p.sim.scenario import Scenario
from noloco_p2p.sim.simulation import build
from noloco_p2p.sim.throughput_bound import throughput_bound

FILES = Path(__file__).parents[2] / "configs" / "sim"
OWN_LINES = (
    "network.link.mbit_per_s=null",
    "network.access.up_mbit_per_s=200",
    "network.access.down_mbit_per_s=200",
)
"""One line for each node in place of one for each pair."""


def tokens_per_s(scenario: Scenario, seed: int) -> float:
    """The speed of a run in which nothing is dropped and less than one byte in a hundred is sent for nothing."""
    swarm = build(scenario, seed)
    outcome = check(swarm)
    counts = [one for kinds in swarm.network.traffic.byte_counts().values() for one in kinds.values()]
    assert sum(process.microbatches["dropped"] for process in outcome.processes) == 0
    assert sum(one.lost for one in counts) < 0.01 * sum(one.sent for one in counts)
    tokens, stages = scenario.tokens_per_microbatch, len(scenario.replicas)
    return figures(outcome, swarm.network.traffic.byte_counts(), tokens, stages).tokens_per_s


@pytest.mark.parametrize(
    ("codec", "lines", "goal"),
    [
        ("bfloat16", (), 9_000),
        ("int8", OWN_LINES, 9_700),
        *soak([("int8", (), 17_500), ("bfloat16", OWN_LINES, 5_000), ("int4", OWN_LINES, 17_500)]),
    ],
)
def test_eight_stages_in_a_row(codec: str, lines: tuple[str, ...], goal: float) -> None:
    wire = (f"workload.wire.forward={codec}", f"workload.wire.backward={codec}")
    assert tokens_per_s(load(FILES / "protocol-nanogpt.yaml", (*wire, *lines)), 0) >= goal


@pytest.mark.soak
def test_homes_reach_their_share_of_the_bound() -> None:
    """Speeds are known after 50 of 660 s. What the steps before that take is chance."""
    scenario = load(FILES / "consumer.yaml", ())
    bounds = [throughput_bound(scenario, seed).tokens_per_s for seed in range(5)]
    shares = sorted(tokens_per_s(scenario, seed) / bound for seed, bound in enumerate(bounds) if bound is not None)
    assert len(shares) == 5
    assert shares[0] >= 0.55
    assert shares[1] >= 0.6
