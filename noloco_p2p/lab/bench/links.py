"""Real swarms behind emulated lines, compared with the simulator: tokens per second, and bytes per token.

In each case all nodes have the same line, equally fast in both directions. The swarm's nodes are real processes (as
with `noloco swarm --link`), observed through their steps files and metrics. The simulator gets their manifest, message
sizes and device seconds: the proportions from the stages measured alone, the level from the run itself, where several
nodes share a core. It knows nothing else about the run.

The model has hidden states that are large compared with its arithmetic: it is wide, with one layer of one narrow head
per stage.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from noloco_p2p.config import RunManifest
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.lab.bench.links_page import PAGE, add_gains, row_text, write_page
from noloco_p2p.lab.bench.node_fleet import ENDLESS_STEPS, START_S, Fleet, InnerStepLine
from noloco_p2p.lab.bench.pipeline import Samples, growth, sample_nodes
from noloco_p2p.lab.processes import workers
from noloco_p2p.lab.scenario_files import StageCosts, compute_costs
from noloco_p2p.launch.line_spec import LineSpec
from noloco_p2p.launch.progress_line import ProgressLine
from noloco_p2p.launch.swarm_plan import SwarmPlan
from noloco_p2p.sim import figures
from noloco_p2p.sim.scenario import LocalSettings, RunSettings, Scenario
from noloco_p2p.sim.simulation import build

TARGET = 0.15
"""Largest allowed deviation of the simulator, in tokens per second and bytes per token."""
LINES = (50.0, 200.0, 1_000.0), (10.0, 50.0, 100.0)
QUICK_LINES = (50.0,), (10.0, 50.0)
"""Megabits per second, and milliseconds one way."""
WARM_STEPS = 6
"""Inner steps of every stage-0 node before the measurement starts."""
SIM_STEPS = 60
WORK = ("microbatches", "inner_steps", "outer_rounds", "device_seconds")
"""Counters of a node. The last one is the time that the work counted by the first three takes."""
KINDS = ("activation", "gradient", "snapshot")
MODEL = (
    "{hidden_size: 256, num_hidden_layers: %d, num_attention_heads: 1, num_key_value_heads: 1, head_dim: 8,"
    " intermediate_size: 8, vocab_size: 384, max_position_embeddings: 256, tie_word_embeddings: false}"
)
SETTINGS = (
    f"steps={ENDLESS_STEPS}",
    *("microbatch_size=8", "sequence_length=256", "microbatches_per_step=8"),
    *("outer.rule=noloco", "outer.inner_steps=20", "audit.weights=false"),
    *("evaluation.every_steps=null", "evaluation.microbatches=1", "checkpoint.every_steps=null"),
)


@dataclass(frozen=True, slots=True)
class LinksPlan:
    """What to measure."""

    rates: tuple[float, ...]
    """Megabits per second in each direction."""
    delays: tuple[float, ...]
    """One-way latency between two nodes, milliseconds."""
    codecs: tuple[str, ...] = ("bfloat16",)
    """Codecs of hidden states and gradients."""
    shape: tuple[int, int] = (2, 2)
    """Stages and replicas."""
    seconds: float = 30.0
    out: Path = Path("noloco-links")
    sets: tuple[str, ...] = ()
    """Settings of all nodes, `key=value`."""

    def fleet(self, codec: str, run_dir: Path, link: str | None = None) -> Fleet:
        """A swarm with this codec. Raises ConfigError or LocalError as a Fleet does."""
        wire = (f"wire.forward={codec}", f"wire.backward={codec}", f"audit.dir={run_dir / 'audit'}")
        model = f"model.config={MODEL % self.shape[0]}"
        return Fleet(run_dir, self.shape, (model, *SETTINGS, *wire, *self.sets), link)

    def check(self) -> None:
        """Raises ConfigError or LocalError if a swarm cannot have these settings, or if the machine has no room."""
        for codec in self.codecs:
            self.fleet(codec, self.out)


def numbers(option: str, text: str) -> tuple[float, ...]:
    """`50,200` → (50.0, 200.0). Raises ConfigError unless all are numbers above 0."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < number < 1e6 for number in found):
        raise ConfigError(f"{option} {text}: write it as numbers above 0, such as 50,200")
    return found


def run(plan: LinksPlan, line: ProgressLine) -> dict[str, Any]:
    """Measure, and return the figures. Also write a page and a plot to `plan.out` after each case.

    Raises ConfigError if settings are invalid, and LocalError if a swarm fails or the page cannot be written.
    """
    nodes, cases = "x".join(map(str, plan.shape)), list[dict[str, Any]]()
    whole = len(plan.codecs) * len(plan.rates) * len(plan.delays)
    for codec in plan.codecs:
        swarm = plan.fleet(codec, plan.out).plan
        with workers(1, OMP_NUM_THREADS="1") as pool:
            stages = pool.submit(measure_stages, swarm.manifest).result()
        for rate, delay in product(plan.rates, plan.delays):
            line.tell(f"{len(cases)} of {whole} cases", len(cases) / whole)
            link = f"{rate:g}mbit,{delay:g}ms"
            real = measure(plan, codec, link)
            factors = device_factors(real.pop("work"), stages)
            simulated = simulate(scenario(swarm, LineSpec.parse(link), stages, factors))
            off = {f"{name}_off": simulated[name] / real[name] - 1 for name in ("tokens", "bytes")}
            found = {"real": real, "simulated": simulated, "device_factor": factors, **off}
            cases.append({"mbit_per_s": rate, "delay_ms": delay, "codec": codec, **found})
            add_gains(cases)
            write_page(plan.out, nodes, cases)
            line.say(row_text(cases[-1]))
    worst = max(abs(case[name]) for case in cases for name in ("tokens_off", "bytes_off"))
    found = {"bench": "links", "ratio": worst, "target": TARGET, "nodes": nodes}
    return {**found, "cases": cases, "page": str(plan.out / PAGE), "definitions": DEFINITIONS}


DEFINITIONS = {
    "ratio": "the largest of all tokens_off and bytes_off",
    "tokens_off": "simulated over real `tokens` (per second), minus 1",
    "bytes_off": "simulated over real `bytes`, minus 1",
    "bytes": "of tensors that all nodes sent, for each token that stage 0 trained on",
    "line_bytes": "the same as the relay carried it: with what gRPC adds, and with control messages",
    "line_use": "of the busiest direction of a line: bytes per second over its rate",
    "device_factor": "by stage: seconds that devices worked over what the same work takes alone on a core",
    "over_bfloat16": "tokens per second over those with bfloat16 on the same line, real and simulated",
}


# --- the real swarm ---------------------------------------------------------------------------------------------------


def measure(plan: LinksPlan, codec: str, link: str) -> dict[str, Any]:
    """Measure a real swarm behind lines in its steady state. Raises LocalError if it does not get there."""
    with (
        tempfile.TemporaryDirectory(prefix="noloco-links-") as scratch,
        plan.fleet(codec, Path(scratch) / "run", link) as fleet,
    ):
        assert fleet.relay is not None
        fleet.start()
        fleet.wait(lambda: _steps(fleet) >= WARM_STEPS, f"{WARM_STEPS} inner steps behind {link}", START_S)
        carried, nodes = fleet.relay.counts(), sample_nodes(fleet)  # on a busy machine this takes seconds
        began, until = time.time(), time.monotonic() + plan.seconds
        fleet.wait(lambda: time.monotonic() >= until, "the measurement", plan.seconds + START_S)
        now, ended = fleet.relay.counts(), sample_nodes(fleet)
        lines = [line for line in fleet.first_stage_lines() if line.at >= began]
        return real_figures(lines, (nodes, ended), (carried, now), LineSpec.parse(link))


def _steps(fleet: Fleet) -> int:
    """Inner steps of the stage-0 node that has the fewest."""
    lines = fleet.first_stage_lines()
    return min(sum(line.peer == node.peer for line in lines) for node in fleet.of_stage(0))


def real_figures(
    lines: Sequence[InnerStepLine],
    nodes: tuple[Samples, Samples],
    carried: tuple[Mapping[str, Any], ...],
    spec: LineSpec,
) -> dict[str, Any]:
    """Figures from stage 0's inner steps and the counters of nodes and relay before and after. Raises LocalError."""
    begin, end = nodes
    tokens_per_s = rate_of(lines)
    seconds = min(end[name].metrics.at - begin[name].metrics.at for name in begin)

    kinds = {kind: growth(begin, end, begin, "bytes_total", direction="out", kind=kind) for kind in KINDS}
    if not any(kinds.values()):
        raise LocalError("nothing was sent during the measurement: give more --nodes or --seconds")
    by_stage = [[*names] for _, names in groupby(begin, lambda name: name.partition("-")[0])]
    work = [{metric: growth(begin, end, names, f"{metric}_total") for metric in WORK} for names in by_stage]
    before, after = (counts["lines"] for counts in carried)
    moved = {(name, way): after[name][way] - before[name][way] for name in begin for way in ("sent", "received")}
    rates = {"sent": spec.up_bytes_per_s, "received": spec.down_bytes_per_s}
    sent = sum(count for (_, way), count in moved.items() if way == "sent")
    return {
        "tokens": tokens_per_s,
        "bytes": sum(kinds.values()) / seconds / tokens_per_s,
        "by_kind": {kind: count / seconds / tokens_per_s for kind, count in kinds.items()},
        "line_bytes": sent / seconds / tokens_per_s,
        "line_use": max(count / seconds / rates[way] for (_, way), count in moved.items()),
        "work": work,
    }


def rate_of(lines: Sequence[InnerStepLine]) -> float:
    """Tokens per second of all peers, each from its first to its last inner step in these lines.

    Raises LocalError if a peer has fewer than two.
    """
    total = 0.0
    for peer in sorted({line.peer for line in lines}):
        own = sorted((line for line in lines if line.peer == peer), key=lambda line: line.at)
        if len(own) < 2:
            raise LocalError("too few inner steps during the measurement: give more --seconds")
        total += sum(line.tokens for line in own[1:]) / (own[-1].at - own[0].at)
    if not total:
        raise LocalError("no inner step during the measurement: give more --seconds")
    return total


# --- the simulated one ------------------------------------------------------------------------------------------------


def measure_stages(manifest: RunManifest) -> StageCosts:
    """For each stage, alone on the CPU with one thread: seconds of its operations, and `parameters`."""
    from noloco_p2p.compute.factory import stage_sizes
    from noloco_p2p.lab.bench import stage

    costs = stage.run("cpu", manifest, ProgressLine())["stages_costs"]
    return [{**each, "parameters": one.parameters} for each, one in zip(costs, stage_sizes(manifest), strict=True)]


def device_factors(work: Sequence[Mapping[str, float]], stages: StageCosts) -> list[float]:
    """By stage: the time that its devices worked, divided by the time that the same work takes on idle cores.

    Raises LocalError if a stage did nothing.
    """
    factors = []
    for done, costs in zip(work, stages, strict=True):
        each = costs["forward_s"] + costs["backward_s"], costs["inner_step_s"], costs["snapshot_s"] + costs["merge_s"]
        alone_s = sum(done[metric] * cost_s for metric, cost_s in zip(WORK, each, strict=False))
        if not alone_s:
            raise LocalError("a stage took no inner step during the measurement: give more --seconds")
        factors.append(done["device_seconds"] / alone_s)
    return factors


def scenario(plan: SwarmPlan, line: LineSpec, stages: StageCosts, factors: Sequence[float]) -> Scenario:
    """The same swarm as a scenario. The device seconds of each stage are `factors` times those measured alone."""
    manifest = plan.manifest
    run = manifest.model_dump(mode="json", include=set(RunSettings.model_fields))
    slowed = [{name: cost * by for name, cost in each.items()} for each, by in zip(stages, factors, strict=True)]
    config = manifest.model.config
    workload = manifest.model_dump(mode="json", include={"microbatch_size", "sequence_length", "wire"}) | {
        "hidden_size": config["hidden_size"],
        "parameters_per_stage": [each["parameters"] for each in stages],
    }
    access = {"up_mbit_per_s": line.up_bytes_per_s * 8e-6, "down_mbit_per_s": line.down_bytes_per_s * 8e-6}
    values = {
        "name": "links",
        "replicas": [manifest.start_replicas] * manifest.stages,
        "run": {**run, "steps": SIM_STEPS},
        "node": plan.local.model_dump(mode="json", include=set(LocalSettings.model_fields)),
        "workload": workload,
        "compute": compute_costs(slowed),
        "network": {"link": {"latency_s": line.latency_s}, "access": access, "spread": line.spread},
    }
    return Scenario.model_validate_json(json.dumps(values), strict=True)


def simulate(scenario: Scenario) -> dict[str, Any]:
    """Tokens per second and bytes per token of a simulated run of SIM_STEPS steps."""
    swarm = build(scenario, seed=0)
    outcome, stages = swarm.run(), len(scenario.replicas)
    found = figures.figures(outcome, swarm.network.traffic.byte_counts(), scenario.tokens_per_microbatch, stages)
    kinds = {kind: found.traffic.sent_per_node[kind] * found.nodes / found.tokens for kind in KINDS}
    return {"tokens": found.tokens_per_s, "bytes": sum(kinds.values()), "by_kind": kinds}
