"""From what the nodes of a simulated swarm told and its stages saw to one report of numbers."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch

from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.messages import ITEM_BYTES, Batch, HostTensor, LossSum
from noloco_p2p.lab.experiments.instrumented_stage import Observed, Watch
from noloco_p2p.lab.experiments.training import Trained, Training
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.telemetry import Trace, TraceEvent
from noloco_p2p.sim.world import peer_id

FIRST_STAGE = peer_id(0, 0)[:-1]
"""How the peer ids of stage 0 begin."""


def told(plan: Training, watch: Watch, outcome: Outcome, held_out: Sequence[Batch]) -> Trained:
    """From what happened to what is reported."""
    stages = [outcome.of_stage(stage) for stage in range(len(plan.replicas))]
    trace = outcome.trace
    outer = trace.of("outer_round")
    lost = [(h.peer, int(_number(h, "round"))) in watch.lost for h in outer]
    rounds = Counter("lost" if gone else str(h.get("result")) for h, gone in zip(outer, lost, strict=True))
    pulled = sum(int(_number(h, "bytes")) for h, gone in zip(outer, lost, strict=True) if not gone)
    idle: dict[str, float] = defaultdict(float)
    for event in trace.of("idle"):
        idle[str(event.get("cause"))] += _number(event, "seconds")
    evaluations = [trace.of("evaluation", node.peer) for node in stages[0]]
    steps = _inner_steps(trace)
    return Trained(
        validation=tuple(
            (int(fmean(_number(h, "step") for h in same) + 0.5), fmean(_number(h, "loss") for h in same))
            for same in zip(*evaluations, strict=True)
        ),
        final_losses=tuple(_number(found[-1], "loss") for found in evaluations),
        merged_loss=merged_loss([[torch_stage(node) for node in nodes] for nodes in stages], held_out),
        training=tuple((step, loss_sum / tokens) for step, (loss_sum, tokens) in sorted(steps.items()) if tokens),
        spreads=tuple(spread for _, spread in sorted(watch.spreads.items())),
        parameters=tuple(torch_stage(nodes[0]).state.parameters for nodes in stages),
        tokens=int(sum(tokens for _, tokens in steps.values())),
        bytes=_bytes(plan, watch, stages, pulled),
        rounds=dict(sorted(rounds.items())),
        load={node.peer: sum(watch.served[node.peer]) for nodes in stages for node in nodes},
        uneven=tuple(_uneven([watch.served[node.peer] for node in nodes]) for nodes in stages),
        waiting=tuple(fmean(_waiting(node, outcome.ended_at_s) for node in nodes) for nodes in stages),
        busy=trace.totals("busy", "direction")["in"],
        rerouted=len(trace.of("reroute")),
        idle_s=dict(sorted(idle.items())),
        virtual_s=outcome.ended_at_s,
    )


def _inner_steps(trace: Trace) -> dict[int, tuple[float, float]]:
    """Summed loss and tokens of all stage-0 replicas by the number of the inner step."""
    sums: dict[int, tuple[float, float]] = {}
    for event in trace.of("inner_step"):
        if event.peer.startswith(FIRST_STAGE):
            number = int(_number(event, "inner_step"))
            loss_sum, tokens = sums.get(number, (0.0, 0.0))
            sums[number] = loss_sum + _number(event, "loss_sum"), tokens + _number(event, "tokens")
    return sums


def _bytes(plan: Training, watch: Watch, stages: Sequence[Sequence[SimProcess]], pulled: int) -> dict[str, int]:
    """What crossed from one stage to the next and back, and what was pulled."""
    hidden = torch_stage(stages[0][0]).state.hidden.nbytes
    targets = ITEM_BYTES["int32"] * plan.manifest.microbatch_size * plan.manifest.sequence_length
    hops = sum(sum(watch.served[node.peer]) for nodes in stages[1:] for node in nodes)
    return {"activation": hops * (hidden + targets), "gradient": hops * hidden, "snapshot": pulled}


def _uneven(served: Sequence[Sequence[int]]) -> float:
    """Largest over mean of what the replicas served."""
    loads = [sum(steps) for steps in served]
    return max(loads) / fmean(loads)


def _waiting(node: SimProcess, ended_at_s: float) -> float:
    """Microbatches at a door, averaged over the time of the run."""
    total, since_s, value = 0.0, 0.0, 0.0
    for event in node.trace.of("gauge"):
        if event.get("name") == "waiting":
            total += value * (event.at_s - since_s)
            since_s, value = event.at_s, _number(event, "value")
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
    assert isinstance(node.model, Observed), "every stage of the run is observed"
    return node.model.stage


def _number(event: TraceEvent, name: str) -> float:
    return float(str(event.get(name)))
