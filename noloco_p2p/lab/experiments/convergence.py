"""Loss at equal tokens: one process, synchronous data parallel, NoLoCo, and replicas that never meet.

Every method reads the same microbatches in all, and its peak learning rate is chosen by the same rule: the best of
RATES with the first seed, going on by the same factor while the best one is the first or the last of those tried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from noloco_p2p.lab.experiments.convergence_findings import METHODS, REPLICAS, ROUND_STEPS, STAGES, chosen, tell
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Results
from noloco_p2p.lab.experiments.training import Trained, Training, finite, small_manifest, train

RATES = (1.5e-3, 4e-3, 1e-2)
FACTOR = 2.5
"""From one rate to the next beyond RATES."""
MOST_RATES = 5
FLOAT_BYTES = 4
CURVE_POINTS = 50
HELD_OUT = 32
"""Microbatches."""


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained, for how long."""

    hidden: int
    layers: int
    steps: int
    """Optimizer steps of each replica of eight."""
    seeds: int


FULL, QUICK = Size(128, 4, 200, 3), Size(64, 2, 120, 2)


def runs(quick: bool) -> list[Case]:
    """Every method at every rate, with the first seed."""
    return [_case(method, rate, 1, quick) for method in METHODS for rate in RATES]


def further(quick: bool, results: Results) -> list[Case]:
    """Rates beyond the best one while that is the last on its side; then the other seeds at the best."""
    cases = []
    for method in METHODS:
        rates, best = sorted({one["rate"] for one in results if one["method"] == method}), chosen(results, method)
        beyond = {rates[0]: best / FACTOR, rates[-1]: best * FACTOR}
        if best in beyond and len(rates) < MOST_RATES:
            cases.append(_case(method, float(f"{beyond[best]:.2g}"), 1, quick))
        else:
            cases += [_case(method, best, seed, quick) for seed in range(2, 1 + (QUICK if quick else FULL).seeds)]
    known = {one.case.name for one in results}
    return [case for case in cases if case.name not in known]


def _case(method: str, rate: float, seed: int, quick: bool) -> Case:
    size = QUICK if quick else FULL
    settings = {"method": method, "rate": rate, "seed": seed, "steps": size.steps}
    return Case(f"{method}-{rate:g}-{seed}", settings | {"hidden": size.hidden, "layers": size.layers})


def plan(settings: Mapping[str, object]) -> Training:
    """The swarm of a case: `method`, `rate`, `seed`, `steps`, `hidden`, `layers`."""
    told = {name: int(str(settings[name])) for name in ("steps", "hidden", "layers", "seed")}
    method = METHODS[str(settings["method"])]
    manifest = small_manifest(
        told["hidden"],
        told["layers"],
        microbatch_size=4,
        microbatches_per_step=method.share,
        steps=told["steps"] * (REPLICAS if method is METHODS["one"] else 1),
        routing=method.routing,
        # Longer than any run: the warm-up is a tenth of the steps for all methods (method.md §2).
        inner={"peak_learning_rate": settings["rate"], "warmup_steps": 10**6},
        outer={"inner_steps": ROUND_STEPS, "pairing": method.pairing},
        evaluation={"every_steps": None, "microbatches": HELD_OUT},
    )
    return Training(manifest, (method.replicas,) * STAGES, told["seed"], streams=tuple(range(REPLICAS)))


def measure(case: Case) -> Figures:
    """Losses, the curve of the training loss over tokens, and bytes."""
    method = str(case.settings["method"])
    if method == "apart":
        from noloco_p2p.lab.experiments.real_swarm import live_apart

        swarms, merged = live_apart(plan(case.settings), range(REPLICAS))
    else:
        swarms = [train(plan(case.settings))]
        merged = swarms[0].merged_loss
    losses = [loss for swarm in swarms for loss in swarm.final_losses]
    figures = {
        "validation_loss": fmean(losses),
        "merged_loss": merged,
        "final_losses": losses,
        "tokens": sum(swarm.tokens for swarm in swarms),
        "optimizer_steps": len(swarms[0].training),
        "parameters": sum(swarms[0].parameters),
        "rounds": dict(swarms[0].rounds),
        "curve": curve(swarms),
        "between_stages": 0.0 if method == "one" else _between_stages(swarms[0]),
        "between_replicas": _between_replicas(method, swarms[0]),
    }
    return {name: finite(value) for name, value in figures.items()}


def curve(swarms: Sequence[Trained]) -> list[list[float]]:
    """[tokens of all replicas, training loss], the mean over as many stretches of the run as are drawn."""
    losses = [fmean(loss for _, loss in same) for same in zip(*(swarm.training for swarm in swarms), strict=True)]
    tokens, length = sum(swarm.tokens for swarm in swarms) / len(losses), -(-len(losses) // CURVE_POINTS)
    parts = [range(at, min(at + length, len(losses))) for at in range(0, len(losses), length)]
    return [[part.stop * tokens, fmean(losses[index] for index in part)] for part in parts]


def _between_stages(trained: Trained) -> float:
    """Bytes per token, there and back."""
    return trained.bytes_per_token["activation"] + trained.bytes_per_token["gradient"]


def _between_replicas(method: str, trained: Trained) -> float:
    """Bytes per token, all replicas together. Data parallel is modelled as a ring all-reduce of the gradients, in which
    each of N replicas sends 2·(N−1)/N of them at every step (Patarasuk and Yuan 2009, bandwidth-optimal all-reduce)."""
    if method != "parallel":
        return trained.bytes_per_token["snapshot"]
    ring = 2 * (REPLICAS - 1) * FLOAT_BYTES * sum(trained.parameters)
    return ring * len(trained.training) / trained.tokens


EXPERIMENT = Experiment(
    "convergence",
    question="What does it cost in loss that replicas meet one peer now and then, instead of all of them at every "
    "step or nobody at all, when everybody reads the same number of tokens?",
    setting=f"A byte-level Llama (full size: about a million parameters) in {STAGES} stages on the text of the "
    f"standard library; {REPLICAS} replicas of each stage, one microbatch of 4 × 64 tokens for each and inner step; "
    "the node's own code in the simulator over real torch stages. *One process*: a single replica, the same "
    f"microbatches one after the other, {REPLICAS} times the optimizer steps. *Synchronous data parallel*: one replica "
    f"that takes its steps on the microbatches of {REPLICAS}, which is what replicas compute that average "
    "their gradients (order of additions apart); its bytes are those of a ring all-reduce in float32. *NoLoCo*: "
    "matched pairs every "
    f"{ROUND_STEPS} inner steps, α 0.5, β = γ = 0.7, balanced routes. *No communication*: "
    f"{REPLICAS} swarms of one replica that never meet, the weights of all of them averaged at the end for the merged "
    "model. The data streams, the schedule (a tenth warm-up, cosine to a tenth) and the clip over each stage are the "
    "same for all. The learning rate of each method is the best of the same geometric "
    "grid with the first seed, which is continued while the best is at its end; the other seeds use it.",
    limits="A model of this size after a few hundred steps is far from converged, and its batch is far below the size "
    "at which more parallelism stops to pay: the order of the methods can be seen here, and whether the replicas form "
    "one model; the size of the gaps at 25,000 steps and a hundred times the parameters cannot. The one process takes "
    "eight times the optimizer steps, so it shows what small batches give, not what communication costs. Rates were "
    "chosen with one seed on the held-out text that is reported, and other settings (m, α, γ) not at all. Nothing "
    "here is about seconds.",
    runs=runs,
    measure=measure,
    tell=tell,
    further=further,
)
