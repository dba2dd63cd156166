"""Is the spread between NoLoCo's replicas a regulariser (arXiv 2506.10911, open question 3)?

A byte-level Llama (full size: about a million parameters) in {STAGES} stages, {REPLICAS} replicas of each, one
microbatch of 4 × 64 tokens per inner step, balanced routes, Muon at a peak rate of {RATE:g}, a tenth of warm-up and a
cosine to a tenth. All replicas read the same {PIECES} pieces of the standard library's text (at most 8 KiB each) again
and again, each replica in its own order, so that overfitting can be seen.

- *Data parallel*: the rule `sync`.
- *Data parallel with noise*: every replica computes the gradients of a step at θ plus independent Gaussian noise. In
  each stage and at each time its standard deviation is that of NoLoCo's replicas with the same seed (before the merge
  that follows; METHOD.md, "Measures"), or half of it. The step itself is taken on θ without noise.
- *NoLoCo* with m = 10, and *gossip* in int4 with m = 1, merged without delay.

Losses are in nats per byte, of the final weights without noise, the mean over the replicas: on the text that was
trained on, and on held-out text of the whole standard library. *Gap*: held-out less training loss. A method that
learns less in as many steps has a smaller gap for that reason alone. So held-out losses are also compared at *equal
training loss*: with that of data parallel between its two runs, of other lengths, whose training losses are nearest
(linear; a dash outside of them). A regulariser ends below it. Mean ± standard deviation over seeds, differences between
runs with the same seed.

Limits: A tiny model on a few kilobytes of code. The noise has the replicas' standard deviation, but not its shape:
theirs lies along directions in which they have trained, lasts over several steps, and is larger at the end of a round
than at its start. One learning rate for all methods, which is not each method's best. Data parallel's runs of other
lengths have schedules of their own, and the line between two of them is not the curve.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise, product
from math import sqrt
from statistics import fmean
from typing import Any

from noloco_p2p.lab.experiments.results import Columns, above, mean_std, over, select, table
from noloco_p2p.lab.experiments.spec import Block, Case, Figures, Result, Results
from noloco_p2p.lab.experiments.training import BYTE_VOCABULARY, TrainingPlan, sized_manifest

REPLICAS, STAGES, RATE, PIECES = 8, 2, 1e-2, 4
TITLES = {
    "sync": "data parallel",
    "noise": "data parallel, noise as NoLoCo's spread",
    "half": "data parallel, half that noise",
    "noloco": "NoLoCo, m = 10",
    "gossip": "gossip, m = 1, int4",
}
FACTORS = {"noise": 1.0, "half": 0.5}
"""Standard deviation of the noise as a multiple of that of NoLoCo's replicas."""
FULL: Mapping[str, Any] = {"hidden": 128, "layers": 4}
QUICK: Mapping[str, Any] = {"hidden": 64, "layers": 2}
STEPS, QUICK_STEPS = (80, 240), (40, 160)
"""Lengths of the runs, inner steps."""
STOPPED, QUICK_STOPPED = (40, 120, 160), (60, 80, 120)
"""Other lengths of data parallel, which show its held-out loss at other training losses."""
HELD_OUT = 16
"""Number of held-out microbatches from each of the two texts."""


def cases(quick: bool) -> list[Case]:
    """All runs that need no noise, for every length and seed."""
    lengths, stopped = (QUICK_STEPS, QUICK_STOPPED) if quick else (STEPS, STOPPED)
    runs = [(method, steps) for steps in lengths for method in _QUIET] + [("sync", steps) for steps in stopped]
    return [_case(method, steps, seed, quick) for seed in (1, 2, 3) for method, steps in runs]


_QUIET = [method for method in TITLES if method not in FACTORS]


def further(quick: bool, results: Results) -> list[Case]:
    """Data parallel with the noise that NoLoCo's replicas were measured to have."""
    unbiased = sqrt(REPLICAS / (REPLICAS - 1))  # the spread is measured around the replicas' own mean
    cases, noloco = [], [one for one in results if one["method"] == "noloco"]
    for (method, factor), one in product(FACTORS.items(), noloco):
        noise = [[[at, factor * unbiased * std] for at, std in stage] for stage in one["spread"]]
        cases.append(_case(method, one["steps"], one["seed"], quick, noise))
    return cases


def _case(method: str, steps: int, seed: int, quick: bool, noise: Any = ()) -> Case:
    name = "{method}-{steps}-{seed}"
    return Case.named(name, method=method, steps=steps, seed=seed, noise=noise, **(QUICK if quick else FULL))


@cache
def texts() -> tuple[Any, ...]:
    """Two corpora with one training text: one holds out the library's held-out part, the other the training text."""
    from noloco_p2p.io.data.corpora import FileCorpus, stdlib_corpus
    from noloco_p2p.io.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer("bytes", None, BYTE_VOCABULARY)
    whole = stdlib_corpus(tokenizer)
    read = whole.pieces[:: -(-whole.units // PIECES)]
    return FileCorpus(read, whole.held_out_pieces, tokenizer), FileCorpus(read, read, tokenizer)


def measure(case: Case) -> Figures:
    """Both losses, the spread by stage as (inner step, std), and how often the text was read."""
    from noloco_p2p.lab.experiments.real_swarm import train_by_kind

    method, size = case.settings["method"], case.settings
    rule = {"rule": method} if method in _QUIET else {"rule": "sync"}
    inner = {"optimizer": "muon", "peak_learning_rate": RATE}
    manifest = sized_manifest(size, inner, outer=rule, evaluation={"microbatches": 2 * HELD_OUT})
    plan = TrainingPlan(manifest, (REPLICAS,) * STAGES, size["seed"], corpora=texts(), noise=size["noise"])
    trained, losses = train_by_kind(plan)
    held_out, training = map(fmean, zip(*losses, strict=True))
    bytes_read = sum(piece.stop - piece.start for piece in texts()[0].pieces)
    return {
        "held_out": held_out,
        "training": training,
        "gap": held_out - training,
        "epochs": trained.tokens / bytes_read,
        "parameters": sum(trained.parameters),
        "tokens": trained.tokens,
        "spread": [[(one.step, one.std) for one in trained.finite_spreads(stage)] for stage in range(STAGES)],
    }


def at_training_loss(points: Iterable[tuple[float, float]], loss: float) -> float | None:
    """The held-out loss at a training loss, interpolated between points of (training, held-out); None outside them."""
    for (low, first), (high, second) in pairwise(sorted(points)):
        if low <= loss <= high:
            return first + (second - first) * (loss - low) / (high - low or 1.0)
    return None


def report(results: Results) -> list[Block]:
    """The answer; every method at every length, against data parallel with as many steps or the same training loss."""
    parallel = [one for one in select(results, method="sync") if None not in (one["training"], one["held_out"])]
    keys = sorted({(one["steps"], list(TITLES).index(one["method"])) for one in results})
    runs = [select(results, steps=steps, method=list(TITLES)[at]) for steps, at in keys]

    def equal(one: Result) -> float | None:
        points = [(other["training"], other["held_out"]) for other in parallel if other["seed"] == one["seed"]]
        there = None if one["gap"] is None else at_training_loss(points, one["training"])
        return None if there is None else float(one["held_out"]) - there

    def above_parallel(same: Results) -> str:
        base = select(results, method="sync", steps=same[0]["steps"])
        return mean_std(above(same, base, "held_out"), 2)

    columns: Columns = {
        "steps": "steps",
        "passes": lambda same: f"{same[0]['epochs']:.2g}",
        "method": lambda same: TITLES[same[0]["method"]],
        "training loss": over("training"),
        "held-out loss": over("held_out"),
        "gap": over("gap", 3),
        "held-out, above data parallel of equal length": above_parallel,
        "of equal training loss": over(equal, 2),
        "std of stage 0 at the end": over(lambda one: one["spread"][0][-1][1] if one["spread"][0] else None, 2),
    }
    lengths = sorted({steps for steps, _ in keys if select(results, steps=steps, method="noise")})
    noise = (f"{over(equal, 2)(select(results, steps=s, method='noise'))} after {s} steps" for s in lengths)
    answer = (
        "At equal training loss, noise of the size of NoLoCo's spread changes data parallel's held-out loss, in nats,"
        f" by {' and '.join(noise)}."
    )
    return [answer, table(columns, runs, f"{results[0]['parameters']:,} parameters, {len(runs[0])} seeds.")]
