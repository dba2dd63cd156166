"""Experiment 6: what do one-sided pulls, stale snapshots and lost partners cost? Real training, loss and spread."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from noloco_p2p.lab.experiments import bounds
from noloco_p2p.lab.experiments.markdown_page import Block, Table, mean_std
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Result, Results
from noloco_p2p.lab.experiments.training import Training, small_manifest, train
from noloco_p2p.observe.plotting.plots import Curve, Plot

ALPHA, BETA, GAMMA = 0.5, 0.7, 0.7
PAIRINGS = ("matched", "random")
STALE_ROUNDS = (0, 1, 2, 3)
LOST = (0.1, 0.25, 0.5)
SIZES = {"replicas": 8, "steps": 300, "inner_steps": 10, "hidden_size": 32}
SIZES |= {"sequence_length": 32, "microbatch_size": 2, "held_out_microbatches": 32}
PEAK_LEARNING_RATE = 2e-2
"""High enough for the replicas' own noise to matter: near the best for matched pairs, too much for a replica alone."""
Row = list[str | int | float | None]


class Variant(NamedTuple):
    """How the replicas of a run meet."""

    pairing: str
    """`matched`, `random`, or `none`: no outer rounds."""
    stale_rounds: int = 0
    lost: float = 0.0


BASELINE, APART = Variant("matched"), Variant("none")


def runs(quick: bool) -> list[Case]:
    """Every variant with every seed."""
    if quick:
        variants = [Variant("matched"), Variant("random"), Variant("matched", 1), Variant("matched", 3)]
        variants += [Variant("matched", 0, 0.5), APART]
    else:
        variants = [Variant("matched", stale) for stale in STALE_ROUNDS]
        variants += [Variant("random", stale) for stale in STALE_ROUNDS]
        variants += [Variant(pairing, 0, lost) for pairing in PAIRINGS for lost in LOST]
        variants.append(APART)
    return [
        Case(
            f"{variant.pairing} stale{variant.stale_rounds} lost{variant.lost:g} s{seed}",
            {**variant._asdict(), "seed": seed, **SIZES},
        )
        for variant in variants
        for seed in range(1 if quick else 3)
    ]


def measure(case: Case) -> Figures:
    """Train one variant: losses by step and at the end, the spread by round, the rounds by result."""
    told = case.settings
    manifest = small_manifest(
        told["hidden_size"],
        1,
        sequence_length=told["sequence_length"],
        microbatch_size=told["microbatch_size"],
        steps=told["steps"],
        inner={"peak_learning_rate": PEAK_LEARNING_RATE, "warmup_steps": told["steps"] // 10},
        outer={
            "alpha": ALPHA,
            "beta": BETA,
            "gamma": GAMMA,
            "inner_steps": told["inner_steps"],
            "pairing": told["pairing"],
        },
        routing="balanced",
        evaluation={"every_steps": told["steps"] // 3, "microbatches": told["held_out_microbatches"]},
    )
    plan = Training(
        manifest,
        (told["replicas"],),
        told["seed"],
        stale_rounds=told["stale_rounds"],
        lost_partner=told["lost"],
    )
    trained = train(plan)
    found = trained.json()
    noise: list[float] = []
    if told["pairing"] != APART.pairing:
        noise = bounds.noise_spreads(
            (ALPHA, BETA, GAMMA),
            bounds.meetings(told["pairing"], told["lost"], seed=told["seed"], replicas=told["replicas"]),
            [spread.learning_rate for spread in trained.spreads],
            replicas=told["replicas"],
            seed=told["seed"],
            stale_rounds=told["stale_rounds"],
        )
    return {
        "loss": found["validation_loss"],
        "merged_loss": found["merged_loss"],
        "validation": found["validation"],
        "spreads": [spread.std for spread in trained.spreads],
        "noise_spreads": noise,
        "rounds": found["rounds"],
    }


# --- the report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of one variant, and those of the baseline with the same seeds."""

    variant: Variant
    results: Sequence[Result]
    baseline: Sequence[Result]

    def losses(self, name: str = "loss") -> list[float]:
        """One for each seed; those that were not finite are left out."""
        return [one[name] for one in self.results if one[name] is not None]

    def against(self, of: Callable[[Result], float | None]) -> list[tuple[float, float]]:
        """(mine, the baseline's) of a figure for each seed in which both are finite."""
        pairs = [(of(mine), of(other)) for mine, other in zip(self.results, self.baseline, strict=True)]
        return [(mine, other) for mine, other in pairs if mine is not None and other is not None]

    @property
    def lost_loss(self) -> list[float]:
        """Validation loss above the baseline's, by seed."""
        return [mine - other for mine, other in self.against(lambda one: one["loss"])]

    @property
    def wider(self) -> list[float]:
        """Spread as a multiple of the baseline's, by seed."""
        return [mine / other for mine, other in self.against(spread)]

    @property
    def noise_wider(self) -> list[float]:
        """The same if training did nothing but add noise."""
        return [mine / other for mine, other in self.against(lambda one: spread(one, "noise_spreads"))]

    @property
    def outer_step(self) -> float | None:
        """How far the replicas' mean moves for a steady Δ, in units of that of fresh pulls."""
        if self.variant == APART:
            return None
        return (1 - ALPHA) / (1 - ALPHA + 0.5 * GAMMA * self.variant.stale_rounds)


def spread(result: Result, name: str = "spreads") -> float | None:
    """The mean weight std over the second half of the rounds, before each merge."""
    stds: list[float] = result[name]
    return statistics.fmean(stds[len(stds) // 2 :]) if stds else None


def tell(results: Results) -> list[Block]:
    """Each variant beside the baseline, and how loss and spread follow staleness and loss."""
    by_variant: dict[Variant, list[Result]] = {}
    for one in results:
        by_variant.setdefault(Variant(one["pairing"], one["stale_rounds"], one["lost"]), []).append(one)
    baseline = by_variant[BASELINE]
    groups = {variant: Group(variant, mine, baseline) for variant, mine in by_variant.items()}
    return [
        _summary(groups),
        _table(groups),
        *_plots(groups),
        _learning(groups),
    ]


def _summary(groups: dict[Variant, Group]) -> str:
    """One line for each kind of trouble."""
    names = {
        "One-sided random pulls": Variant("random"),
        "Every snapshot one round old": Variant("matched", 1),
        "Every snapshot three rounds old": Variant("matched", 3),
        "Half of the partners lost": Variant("matched", 0, 0.5),
        "No outer rounds at all": APART,
    }
    lines = [
        f"- {name}: validation loss {_signed(groups[variant].lost_loss)} nats, weight spread"
        f" × {mean_std(groups[variant].wider, 3)}."
        for name, variant in names.items()
        if variant in groups
    ]
    base = groups[BASELINE]
    head = (
        f"Against matched pairs with fresh snapshots (validation loss {mean_std(base.losses())}, replicas' mean;"
        " differences between runs of the same seed, mean ± standard deviation over the seeds):"
    )
    return "\n".join([head, "", *lines])


def _signed(values: Sequence[float]) -> str:
    if not values:
        return "not finite"
    return f"{'+' if statistics.fmean(values) >= 0 else ''}{mean_std(values, 3)}"


def _table(groups: dict[Variant, Group]) -> Table:
    rows: list[Row] = []
    for variant, group in groups.items():
        losses = [mean_std(group.losses()), _signed(group.lost_loss), mean_std(group.losses("merged_loss"))]
        place: Row = [variant.pairing, variant.stale_rounds, f"{variant.lost:.0%}"]
        rows.append([*place, *losses, mean_std(group.wider, 3), mean_std(group.noise_wider, 3), group.outer_step])
        rows[-1].append(_results(group))
    columns = ("pairing", "stale by", "lost", "validation loss", "above the baseline", "loss of the merged model")
    more = ("spread / baseline's", "with noise alone", "outer step", "rounds by result")
    return Table((*columns, *more), rows, "All variants.")


def _results(group: Group) -> str:
    totals: dict[str, int] = {}
    for one in group.results:
        for result, count in one["rounds"].items():
            totals[result] = totals.get(result, 0) + count
    every = sum(totals.values())
    return ", ".join(f"{result} {count / every:.0%}" for result, count in sorted(totals.items())) or "none"


def _plots(groups: dict[Variant, Group]) -> list[Block]:
    """Loss and spread over staleness and over lost partners, a curve for each pairing."""
    blocks: list[Block] = []
    whats: list[tuple[str, str, Callable[[Group], list[float]]]] = [
        ("loss", "validation loss, nats per token", lambda group: group.losses()),
        ("spread", "weight std / that of matched and fresh", lambda group: group.wider),
    ]
    for name, label, of in whats:
        stale = [_curve(groups, lambda one: one.lost == 0, "stale_rounds", pairing, of) for pairing in PAIRINGS]
        lost = [_curve(groups, lambda one: one.stale_rounds == 0, "lost", pairing, of) for pairing in PAIRINGS]
        axes = (("stale", "age of every snapshot, rounds", stale), ("lost", "chance that a partner is lost", lost))
        for against, x_label, curves in axes:
            title = f"{name.capitalize()} and {'staleness' if against == 'stale' else 'lost partners'}"
            blocks.append(Plot(f"{name}-{against}", title, (x_label, label), [one for one in curves if one.x]))
    return blocks


def _curve(
    groups: dict[Variant, Group],
    keep: Callable[[Variant], bool],
    along: str,
    pairing: str,
    of: Callable[[Group], list[float]],
) -> Curve:
    points = sorted(
        (float(getattr(variant, along)), of(group))
        for variant, group in groups.items()
        if variant.pairing == pairing and keep(variant) and of(group)
    )
    errors = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in points]
    return Curve(pairing, [x for x, _ in points], [statistics.fmean(values) for _, values in points], errors)


def _learning(groups: dict[Variant, Group]) -> Plot:
    """Validation loss by step of what differs most."""
    curves = []
    for variant, group in groups.items():
        plain = variant.pairing != "random" and variant.lost in (0.0, 0.5)
        found = [one["validation"] for one in group.results]
        if plain and all(loss is not None for validation in found for _, loss in validation):
            steps = [step for step, _ in found[0]]
            means = [statistics.fmean(loss for _, loss in same) for same in zip(*found, strict=True)]
            what = "lost 50%" if variant.lost else f"stale {variant.stale_rounds}"
            label = "no outer rounds" if variant == APART else f"matched, {what}"
            curves.append(Curve(label, steps, means))
    axes = ("step", "validation loss, nats per token")
    return Plot("validation", "Validation loss, mean over replicas and seeds", axes, curves)


SETTING = f"""One stage (a byte-level Llama of one layer, hidden {SIZES["hidden_size"]}, on the standard library's
text), {SIZES["replicas"]} replicas with real torch weights and the node's own code in the simulator, α = {ALPHA:g},
β = {BETA:g}, γ = {GAMMA:g}, m = {SIZES["inner_steps"]}, {SIZES["steps"]} steps, so
{SIZES["steps"] // SIZES["inner_steps"]} outer rounds; {SIZES["microbatch_size"]} × {SIZES["sequence_length"]} tokens a
step and replica, peak learning rate {PEAK_LEARNING_RATE:g} for all: near the best for matched pairs, and too much for a
replica on its own noise, so that what the outer rounds average away shows in the loss. Runs of the same seed share
initial weights, data, and the held-out microbatches.

- *Pairing*: `matched` (both of a pair take each other's snapshot) or `random` (each pulls from whom it draws).
- *Stale by s*: **every** snapshot merged is the one that the partner froze s rounds before (in the first s rounds: its
  initial weights).
- *Lost*: with this chance, drawn for each replica and round, what was pulled is thrown away and the replica goes alone.
- *Spread*: the mean of the weight std over the replicas before each merge, second half of the rounds. *With noise
  alone*: the same outer rounds, with white noise of the learning rate's size in the place of training.
- *Outer step* (derived): a stale φ_j lies behind by s rounds of the common motion, so that N1's consensus pull brakes
  it. For a steady Δ the mean moves by β·Δ / (1 − α + γ·s/2) a round; the column has that against s = 0."""

LIMITS = """In a real swarm few snapshots are stale, and of mixed age; all of them equally old is the worst case.
The runs are short, in the phase in which the weights still move fast: where they have settled the brake of staleness
has nothing to hold. Lost partners are independent of one another; a partition is not. One stage: what routing mixes
between stages is experiment 4. β is not retuned for stale snapshots. Few seeds of one tiny model: differences smaller
than their standard deviation say nothing."""

EXPERIMENT = Experiment(
    "staleness",
    "What do one-sided pulls, stale snapshots and lost partners cost in loss and in the spread of the replicas?",
    SETTING,
    LIMITS,
    runs,
    measure,
    tell,
)
