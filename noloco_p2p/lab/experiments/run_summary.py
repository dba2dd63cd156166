"""From the trace of a simulated swarm that trained, and what its stages measured, to one summary."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch

from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.messages import ITEM_BYTES, Batch, HostTensor, LossSum, PeerId
from noloco_p2p.lab.experiments.instrumented_stage import InstrumentedStage, TrainingMonitor
from noloco_p2p.lab.experiments.training import TrainingPlan, TrainingSummary, largest_over_mean
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.telemetry import Trace
from noloco_p2p.sim.world import peer_id

FIRST_STAGE = peer_id(0, 0)[:-1]
"""How the peer ids of stage 0 begin."""


def summarise(
    plan: TrainingPlan, monitor: TrainingMonitor, outcome: Outcome, held_out: Sequence[Batch]
) -> TrainingSummary:
    """What is reported of a run that has ended."""
    stages = [outcome.of_stage(stage) for stage in range(len(plan.replicas))]
    loads = {node.peer: sum(monitor.served[node.peer]) for nodes in stages for node in nodes}
    trace, steps = outcome.trace, _inner_steps(outcome.trace)
    rounds = [(event, (event.peer, int(event.number("round"))) in monitor.lost) for event in trace.of("outer_round")]
    results = Counter("lost" if lost else str(event.get("result")) for event, lost in rounds)
    evaluations = [trace.of("evaluation", node.peer) for node in stages[0]]
    return TrainingSummary(
        validation=tuple(
            (int(fmean(e.number("step") for e in same) + 0.5), fmean(e.number("loss") for e in same))
            for same in zip(*evaluations, strict=True)
        ),
        final_losses=tuple(found[-1].number("loss") for found in evaluations),
        merged_loss=merged_loss([[torch_stage(node) for node in nodes] for nodes in stages], held_out),
        training=tuple((step, loss_sum / tokens) for step, (loss_sum, tokens) in sorted(steps.items()) if tokens),
        spreads=tuple(spread for _, spread in sorted(monitor.spreads.items())),
        parameters=tuple(torch_stage(nodes[0]).state.parameters for nodes in stages),
        tokens=int(sum(tokens for _, tokens in steps.values())),
        bytes={
            **_bytes_between_stages(plan, stages, loads),
            "snapshot": sum(int(event.number("bytes")) for event, lost in rounds if not lost),
        },
        rounds=dict(sorted(results.items())),
        load=loads,
        uneven=tuple(largest_over_mean([loads[node.peer] for node in nodes]) for nodes in stages),
        waiting=tuple(fmean(_waiting(node, outcome.ended_at_s) for node in nodes) for nodes in stages),
        busy=trace.totals("busy", "direction")["in"],
        virtual_s=outcome.ended_at_s,
    )


def _inner_steps(trace: Trace) -> dict[int, tuple[float, float]]:
    """Summed loss and tokens of all stage-0 replicas by the number of the inner step."""
    sums: dict[int, tuple[float, float]] = {}
    for event in trace.of("inner_step"):
        if event.peer.startswith(FIRST_STAGE):
            step = int(event.number("inner_step"))
            loss_sum, tokens = sums.get(step, (0.0, 0.0))
            sums[step] = loss_sum + event.number("loss_sum"), tokens + event.number("tokens")
    return sums


def _bytes_between_stages(
    plan: TrainingPlan, stages: Sequence[Sequence[SimProcess]], loads: Mapping[PeerId, int]
) -> dict[str, int]:
    hidden = torch_stage(stages[0][0]).state.hidden.nbytes
    targets = ITEM_BYTES["int32"] * plan.manifest.microbatch_size * plan.manifest.sequence_length
    hops = sum(loads[node.peer] for nodes in stages[1:] for node in nodes)
    return {"activation": hops * (hidden + targets), "gradient": hops * hidden}


def _waiting(node: SimProcess, ended_at_s: float) -> float:
    """Microbatches that wait to be admitted, averaged over the time of the run."""
    total, since_s, value = 0.0, 0.0, 0.0
    for event in node.trace.of("gauge"):
        if event.get("name") == "waiting":
            total += value * (event.at_s - since_s)
            since_s, value = event.at_s, event.number("value")
    return (total + value * (ended_at_s - since_s)) / ended_at_s


@torch.no_grad()
def merged_loss(stages: Sequence[Sequence[TorchStage]], held_out: Sequence[Batch]) -> float:
    """Held-out loss with the mean over the replicas of each stage, which the first replica of each then keeps."""
    for replicas in stages:
        for name, theta in replicas[0].parameters.items():
            theta.copy_(torch.stack([replica.parameters[name].double() for replica in replicas]).mean(0))
    loss_sum, tokens = 0.0, 0
    for batch in held_out:
        value: HostTensor | LossSum = batch.inputs
        for replicas in stages:
            assert isinstance(value, HostTensor), "only the last stage has a loss"
            value = replicas[0].evaluate(value, batch.targets, batch.mask)
        assert isinstance(value, LossSum), "the last stage has the loss"
        loss_sum, tokens = loss_sum + value.loss_sum, tokens + value.tokens
    return loss_sum / tokens


def torch_stage(node: SimProcess) -> TorchStage:
    """The real stage of a node, as it was left."""
    assert isinstance(node.model, InstrumentedStage), "every stage of the run is instrumented"
    return node.model.stage
