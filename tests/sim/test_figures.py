"""The figures of a simulated run: exact on hand-written traces, and equal to what the stages of a run counted."""

from types import SimpleNamespace
from typing import Any

import pytest
from simulated_parts import linear_stage

from noloco_p2p.config import EvaluationSettings, OuterSettings, RunManifest
from noloco_p2p.lab import sim_output
from noloco_p2p.lab.sim_output import spreads
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.figures import RunFigures, figures, flat
from noloco_p2p.sim.payloads import ByteCounts
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.telemetry import Trace, TraceEvent
from noloco_p2p.sim.world import SimPlan, SimSwarm

TOKENS = 1000


def event(at_s: float, kind: str, **fields: object) -> TraceEvent:
    return TraceEvent(at_s, "", kind, dict(sorted(fields.items())))


def process(
    peer: str, stages: list[int], events: list[TraceEvent], ended_at_s: float = 30.0, step: float = 9.0, **changes: Any
) -> SimProcess:
    """A process whose node held these stages and has ended."""
    advert = SimpleNamespace(stage=stages[-1], state="left", step=step)
    leaving = any(one.get("reason") == "told to leave" for one in events)
    node: Any = SimpleNamespace(state=SimpleNamespace(advert=advert, inner_steps=0, leaving=leaving))
    ports: Any = SimpleNamespace(telemetry=SimpleNamespace(own=Trace([one._replace(peer=peer) for one in events])))
    world: Any = None
    held: Any = [(SimpleNamespace(state=SimpleNamespace(index=index)), None) for index in stages]
    return SimProcess(peer, (0, 0), node, world, ports, held, ended_at_s=ended_at_s, **changes)


def outcome_of(*processes: SimProcess) -> Outcome:
    events = sorted((h for one in processes for h in one.trace.events), key=lambda h: h.at_s)
    return Outcome(processes, Trace(events), (), 40.0)


MOVED = [
    event(2.0, "state", state="training", reason="every stage has enough nodes"),
    event(4.0, "microbatch", result="done"),
    event(5.0, "microbatch", result="dropped", reason="busy"),
    event(6.0, "idle", cause="gradients", seconds=1.0),
    event(6.0, "inner_step", busy_s=3.0),
    event(8.0, "outer_round", result="partner", seconds=2.0),
    event(12.0, "state", state="draining", reason="moving to stage 1: wanted"),
    event(13.0, "state", state="syncing", reason="comes to stage 1"),
    event(15.0, "state", state="training", reason="synced"),
    event(16.0, "microbatch", result="done"),
    event(17.0, "idle", cause="microbatches", seconds=1.0),
    event(17.0, "inner_step", busy_s=0.5),
    event(20.0, "state", state="draining", reason="told to leave"),
    event(20.0, "state", state="left", reason="leave"),
]
CRASHED = [
    event(1.0, "state", state="training", reason="every stage has enough nodes"),
    event(3.0, "reroute", reason="unreachable"),
    event(3.5, "busy", direction="out"),
    event(3.5, "busy", direction="in"),
    event(5.0, "microbatch", result="done"),
    event(7.0, "inner_step", busy_s=4.0),
    event(9.0, "outer_round", result="alone", seconds=4.0),
]


def test_a_process_that_moves_counts_for_each_stage_while_it_held_it() -> None:
    outcome = outcome_of(
        process("s0r0", [0, 1], MOVED), process("s0r1", [0], CRASHED, crashed=True, ended_at_s=11.0, step=7.5)
    )
    found = figures(outcome, {}, TOKENS, 2)
    first, second = found.stages
    assert [(one.stage, one.ends_s, len(one.events)) for one in outcome.processes[0].periods(40.0)] == [
        (0, 13.0, 7),
        (1, 30.0, 7),
    ]
    assert (first.lives, first.inner_steps, first.microbatches, first.training_s) == (2, 2, 2, 10.0 + 10.0)
    assert first.utilisation == 7.0 / 20.0
    assert first.idle == {"gradients": 1.0 / 20.0, "other": 12.0 / 20.0}
    assert (second.lives, second.inner_steps, second.microbatches, second.training_s) == (1, 1, 1, 5.0)
    assert (second.utilisation, second.idle) == (0.1, {"microbatches": 0.2, "other": 0.7})
    assert (found.train_s, found.tokens, found.tokens_per_s) == (6.0, 2 * TOKENS, 2 * TOKENS / 6.0)
    assert found.ends == {"crashed": 1, "left early": 1}
    assert (found.nodes, found.step, found.virtual_s) == (2, 7.5, 40.0)
    assert (found.microbatches.dropped, found.microbatches.rerouted) == ({"busy": 1}, {"unreachable": 1})
    assert found.microbatches.busy == 1, "an answer is counted by its receiver, not its sender"
    assert (found.rounds, found.round_s) == ({"alone": 1, "partner": 1}, {"p50": 3.0, "p95": pytest.approx(3.9)})


def test_the_series_agree_with_the_figures() -> None:
    outcome = outcome_of(process("s0r0", [0, 1], MOVED), process("s0r1", [0], CRASHED, crashed=True, ended_at_s=11.0))
    assert sim_output.nodes_training(outcome) == {
        0: [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (11.0, 1.0), (12.0, 0.0)],
        1: [(0.0, 0.0), (15.0, 1.0), (20.0, 0.0)],
    }
    assert sim_output.tokens_per_s(outcome, TOKENS, 4) == [(5.0, 200.0), (15.0, 0.0), (25.0, 0.0), (35.0, 0.0)]
    assert sim_output.round_seconds(outcome) == {"alone": [4.0], "partner": [2.0]}


def test_bytes_are_means_over_all_nodes_including_those_without_any() -> None:
    outcome = outcome_of(process("s0r0", [0], []), process("s0r1", [0], CRASHED))
    byte_counts = {
        "s0r0": {"activation": ByteCounts(sent=10, lost=3, in_flight=1), "state": ByteCounts(0, 6)},
        "s1r0": {"activation": ByteCounts(received=6), "state": ByteCounts(6, 0)},
    }
    traffic = figures(outcome, byte_counts, TOKENS, 1).traffic
    assert traffic.sent_per_node == {"activation": 5.0, "state": 3.0}
    assert traffic.received_per_node == {"activation": 3.0, "state": 3.0}
    assert (traffic.lost, traffic.in_flight) == ({"activation": 3, "state": 0}, {"activation": 1, "state": 0})


def simulated() -> tuple[RunFigures, Outcome]:
    """Stages of two and three nodes, four microbatches of nominally two kilotokens, twelve steps, three rounds."""
    manifest = RunManifest(
        stages=2,
        start_replicas=2,
        sequence_length=4,
        microbatch_size=1,
        microbatches_per_step=4,
        steps=12,
        outer=OuterSettings(rule="noloco", inner_steps=4),
        evaluation=EvaluationSettings(every_steps=None, microbatches=1),
    )
    swarm = SimSwarm(SimPlan(manifest, (2, 3), seed=3, costs=(Costs(), Costs(0.02, 0.03))))
    outcome = swarm.run()
    return figures(outcome, swarm.network.traffic.byte_counts(), 2 * TOKENS, 2), outcome


def test_a_run_has_the_figures_that_its_stages_counted() -> None:
    found, outcome = simulated()
    counted = [sum(len(linear_stage(one).counted) for one in outcome.of_stage(stage)) for stage in (0, 1)]
    assert [one.microbatches for one in found.stages] == counted
    assert found.tokens == 2 * TOKENS * counted[0]
    assert counted[0] >= 2 * 11 * 4
    steps = [sum(linear_stage(one).inner_steps for one in outcome.of_stage(stage)) for stage in (0, 1)]
    assert [one.inner_steps for one in found.stages] == steps
    assert sum(found.rounds.values()) == 5 * 3
    # A microbatch costs 0.03 s at stage 0 and 0.05 s at stage 1, a step 0.005 s; work after the last step is not seen.
    for stage, each_s in ((0, 0.03), (1, 0.05)):
        busy_s = counted[stage] * each_s + steps[stage] * 0.005
        utilisation = found.stages[stage].utilisation
        assert utilisation is not None
        rounds_s = utilisation * found.stages[stage].training_s - busy_s
        longest_s = 0.010 * 3 * 3 + 0.005 * 3
        assert 0 <= rounds_s <= longest_s + 1e-9, "two operations of 0.005 s in each round, and one before the first"
        assert 1.0 - 1e-9 < utilisation + sum(found.stages[stage].idle.values()) < 1.02
    sent, received = found.traffic.sent_per_node, found.traffic.received_per_node
    assert sent["gradient"] == received["gradient"] == counted[1] * 4 * 8 / 5, "four values of eight bytes each"
    pulled = sum(count for result, count in found.rounds.items() if result != "alone")
    guarded = len(outcome.trace.of("guarded"))
    assert sent["weights"] == received["weights"] == guarded * 2 * 8 / 5
    assert sent["snapshot"] == received["snapshot"] == pulled * 4 * 8 / 5
    assert all(sent[kind] * 5 == received[kind] * 5 + found.traffic.lost[kind] for kind in sent)
    assert sim_output.tokens_per_s(outcome, 2 * TOKENS, 7)
    total = sum(rate * outcome.ended_at_s / 7 for _, rate in sim_output.tokens_per_s(outcome, 2 * TOKENS, 7))
    assert total == pytest.approx(found.tokens)


def test_the_figures_of_several_runs_are_aggregated() -> None:
    found = flat(simulated()[0])
    assert {"tokens_per_s", "utilisation.0", "idle.0.gradients", "round_s.p95", "sent_per_node.snapshot"} <= {*found}
    assert found["rounds.other"] == found["rounds.all"] == 0, (
        "a figure that a run lacks counts as 0 in the mean of several runs"
    )
    over = spreads([{"a": 1.0, "b": 2.0}, {"a": 4.0}])
    assert over["a"] == {"mean": 2.5, "std": pytest.approx(4.5**0.5), "least": 1.0, "most": 4.0, "runs": 2}
    assert over["b"] == {"mean": 2.0, "std": 0.0, "least": 2.0, "most": 2.0, "runs": 1}
