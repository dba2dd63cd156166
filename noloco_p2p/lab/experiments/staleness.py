"""What do one-sided pulls, stale snapshots and lost partners cost in loss and in the spread of the replicas?

One stage (a byte-level Llama of one layer, hidden {SIZES[hidden_size]}, on the standard library's text),
{SIZES[replicas]} replicas with real torch weights and the node's own code in the simulator, α = {ALPHA:g}, β =
{BETA:g}, γ = {GAMMA:g}, m = {SIZES[inner_steps]}, {SIZES[steps]} steps, so {OUTER_ROUNDS} outer rounds;
{SIZES[microbatch_size]} × {SIZES[sequence_length]} tokens per step and replica, peak learning rate
{PEAK_LEARNING_RATE:g} for all: near the best for matched pairs, and too much for a replica with only its own noise, so
that what the outer rounds average away shows in the loss. Runs of the same seed share initial weights, data, and the
held-out microbatches.

- *Pairing*: `matched` (the two of a pair pull each other's snapshot) or `random` (each pulls from a peer that it
  draws).
- *Stale by s*: **every** merged snapshot is the one that the partner froze s rounds earlier (in the first s rounds: its
  initial weights).
- *Lost*: with this probability, drawn for each replica and round, what was pulled is discarded and the replica goes
  alone.
- *Spread*: the mean of the weight std over the replicas before each merge, second half of the rounds.
- *Outer step* (derived): a stale φ_j is behind by s rounds of the common motion, so N1's consensus pull slows it
  down. For a steady Δ the mean moves by β·Δ / (1 − α + γ·s/2) per round; the column compares that with s = 0.

Limits: In a real swarm few snapshots are stale, and of mixed age; all of them equally old is the worst case. The runs
are short, in the phase in which the weights still move fast; once they have settled, staleness slows nothing down. Lost
partners are independent of one another; a partition is not. One stage: `routing` shows what routing mixes between
stages. β is not retuned for stale snapshots. Few seeds of one tiny model: differences smaller than their standard
deviation mean nothing.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from noloco_p2p.lab.experiments.results import Columns, above, group, known, mean_std, table, total_shares
from noloco_p2p.lab.experiments.spec import Block, Case, Figures, Result, Results, Table, seeded
from noloco_p2p.lab.experiments.training import TrainingPlan, one_layer_manifest
from noloco_p2p.observe.plotting.plots import Curve, Plot

ALPHA, BETA, GAMMA = 0.5, 0.7, 0.7
PAIRINGS = ("matched", "random")
STALE_ROUNDS = (0, 1, 2, 3)
LOST = (0.1, 0.25, 0.5)
SIZES = {"replicas": 8, "steps": 300, "inner_steps": 10, "hidden_size": 32}
SIZES |= {"sequence_length": 32, "microbatch_size": 2, "held_out_microbatches": 32}
OUTER_ROUNDS = SIZES["steps"] // SIZES["inner_steps"]
PEAK_LEARNING_RATE = 2e-2
"""High enough for the replicas' own noise to matter: near the best for matched pairs, too much for a replica alone."""


class Variant(NamedTuple):
    """How the replicas of a run meet."""

    pairing: str
    """`matched`, `random`, or `none`: no outer rounds."""
    stale_rounds: int = 0
    lost: float = 0.0


BASELINE, APART = Variant("matched"), Variant("none")


def cases(quick: bool) -> list[Case]:
    """Every variant with every seed."""
    variants = [BASELINE, Variant("random"), Variant("matched", 1), Variant("matched", 3), Variant("matched", 0, 0.5)]
    if not quick:
        variants = [Variant(pairing, stale) for pairing in PAIRINGS for stale in STALE_ROUNDS]
        variants += [Variant(pairing, 0, lost) for pairing in PAIRINGS for lost in LOST]
    name, seeds = "{pairing} stale{stale_rounds} lost{lost:g} s{seed}", range(1 if quick else 3)
    return seeded(name, [*variants, APART], seeds, **SIZES)


def plan_of(settings: Mapping[str, Any], steps: int, outer: Mapping[str, object], **world: Any) -> TrainingPlan:
    """A run of this many steps for a case with SIZES; `world`: other fields of the plan."""
    factors = {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA, "inner_steps": settings["inner_steps"]}
    manifest = one_layer_manifest(
        settings,
        steps=steps,
        inner={"peak_learning_rate": PEAK_LEARNING_RATE},
        outer={**factors, **outer},
        evaluation={"microbatches": settings["held_out_microbatches"]},
    )
    return TrainingPlan(manifest, (settings["replicas"],), settings["seed"], **world)


def measure(case: Case) -> Figures:
    """Train one variant: losses at the end, the spread by round, the rounds by result."""
    from noloco_p2p.lab.experiments.real_swarm import train

    one = case.settings
    losses = {"stale_rounds": one["stale_rounds"], "lost_partner": one["lost"]}
    trained = train(plan_of(one, one["steps"], {"pairing": one["pairing"]}, **losses))
    figures = trained.figures("validation_loss", "merged_loss", "rounds")
    return figures | {"loss": figures.pop("validation_loss"), "spreads": [spread.std for spread in trained.spreads]}


# --- the report -----------------------------------------------------------------------------------------------------

Groups = Mapping[Variant, Results]
"""The runs of each variant, by seed as those of the baseline."""


def report(results: Results) -> list[Block]:
    """The answer, each variant against the baseline, and how loss and spread depend on staleness and lost partners."""
    groups = {Variant(*key): runs for key, runs in group(results, *Variant._fields).items()}
    return [_answer(groups), _table(groups), *_plots(groups)]


def outer_step(variant: Variant) -> float | None:
    """How far the replicas' mean moves for a steady Δ, relative to fresh pulls."""
    return None if variant == APART else (1 - ALPHA) / (1 - ALPHA + 0.5 * GAMMA * variant.stale_rounds)


def wider(groups: Groups, variant: Variant) -> list[float]:
    """Spread as a multiple of the baseline's, by seed."""
    stds = [[spread(one) for one in groups[which]] for which in (variant, BASELINE)]
    return [mine / base for mine, base in zip(*stds, strict=True) if mine is not None and base is not None]


def spread(result: Result) -> float | None:
    """The mean weight std over the second half of the rounds, before each merge."""
    stds: list[float] = result["spreads"]
    return statistics.fmean(stds[len(stds) // 2 :]) if stds else None


def _answer(groups: Groups) -> str:
    names = {
        "snapshots that are all one round old": Variant("matched", 1),
        "random pairs": Variant("random"),
        "losing half of the partners": Variant("matched", 0, 0.5),
        "no outer rounds at all": APART,
    }
    costs = [
        f"{name} {mean_std(above(groups[variant], groups[BASELINE], 'loss'), 3)}"
        for name, variant in names.items()
        if variant in groups
    ]
    return f"Against fresh snapshots of matched pairs, in nats per token: {', '.join(costs)}."


def _table(groups: Groups) -> Table:
    def rounds(variant: Variant) -> str:
        found = total_shares(groups[variant], lambda one: one["rounds"])
        return ", ".join(f"{result} {share:.0%}" for result, share in found.items()) or "none"

    columns: Columns = {
        "pairing": lambda variant: variant.pairing,
        "stale by": lambda variant: variant.stale_rounds,
        "lost": lambda variant: f"{variant.lost:.0%}",
        "validation loss": lambda variant: mean_std(known(groups[variant], "loss")),
        "above the baseline": lambda variant: mean_std(above(groups[variant], groups[BASELINE], "loss"), 3),
        "loss of the merged model": lambda variant: mean_std(known(groups[variant], "merged_loss")),
        "spread / baseline's": lambda variant: mean_std(wider(groups, variant), 3),
        "outer step": outer_step,
        "rounds by result": rounds,
    }
    return table(columns, groups, "All variants.")


def _plots(groups: Groups) -> list[Block]:
    """Loss and spread over staleness and over lost partners, a curve for each pairing."""
    figures: dict[str, tuple[str, Callable[[Variant], list[float]]]] = {
        "loss": ("validation loss, nats per token", lambda variant: known(groups[variant], "loss")),
        "spread": ("weight std / that of matched and fresh", lambda variant: wider(groups, variant)),
    }
    settings = {
        "stale": ("staleness", "age of every snapshot, rounds", "stale_rounds", "lost"),
        "lost": ("lost partners", "probability that a partner is lost", "lost", "stale_rounds"),
    }
    blocks: list[Block] = []
    for name, (label, figure) in figures.items():
        for against, (what, x_label, along, fixed) in settings.items():
            some = [variant for variant in groups if getattr(variant, fixed) == 0]
            curves = []
            for pairing in PAIRINGS:
                found = sorted((getattr(one, along), figure(one)) for one in some if one.pairing == pairing)
                points = [(x, statistics.fmean(values)) for x, values in found if values]
                curves += [Curve(pairing, points)] if points else []
            blocks.append(Plot(f"{name}-{against}", f"{name.capitalize()} and {what}", (x_label, label), curves))
    return blocks
