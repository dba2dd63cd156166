"""Is the spread between NoLoCo's replicas a regulariser (arXiv 2506.10911, open question 3)?

A byte-level Llama (full size: about a million parameters) in {STAGES} stages, {REPLICAS} replicas of each, one
microbatch of 4 × 64 tokens per inner step, balanced routes, Muon at a peak rate of {RATE:g}, a tenth of warm-up and a
cosine to a tenth. All replicas read the same {PIECES} pieces of the standard library's text (at most 8 KiB each), each
in an order of its own, again and again, so that overfitting can be seen.

- *Data parallel*: the rule `sync`.
- *Data parallel with noise*: every replica computes the gradients of a step at θ plus independent Gaussian noise. In
  each stage and at each time its standard deviation is that of NoLoCo's replicas with the same seed (before the merge
  that follows; METHOD.md, "Measures"), or half of it. The step itself is taken on θ without noise.
- *NoLoCo* with m = 10, and *gossip* in int4 with m = 1, merged without delay.

Losses are in nats per byte, of the final weights without noise, the mean over the replicas: on the text that was
trained on, and on held-out text of the whole standard library. *Gap*: held-out less training loss. A regulariser makes
the gap smaller and the held-out loss lower than data parallel's. Mean ± standard deviation over seeds, differences
between runs with the same seed.

Limits: A tiny model on a few kilobytes of code. The noise has the replicas' standard deviation, but not its shape:
theirs lies along directions in which they have trained, lasts over several steps, and is larger at the end of a round
than at its start. One learning rate for all methods, which is not each method's best: a method that has learnt less
in as many steps has a smaller gap for that reason alone, so the held-out loss must be compared at equal training loss.
"""

from collections.abc import Mapping
from functools import cache
from math import sqrt
from typing import Any

from noloco_p2p.lab.experiments.markdown_page import Block, Table
from noloco_p2p.lab.experiments.results import Columns, above, group, known, mean_std, over, select, table
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Results, describe
from noloco_p2p.lab.experiments.training import BYTE_VOCABULARY, TrainingPlan, finite, small_manifest

REPLICAS, STAGES, RATE, PIECES = 8, 2, 1e-2, 4
TITLES = {
    "sync": "data parallel",
    "noise": "data parallel, noise as NoLoCo's spread",
    "half": "data parallel, half that noise",
    "noloco": "NoLoCo, m = 10",
    "gossip": "gossip, m = 1, int4",
}
FACTORS = {"noise": 1.0, "half": 0.5}
"""Standard deviation of the noise, in units of that of NoLoCo's replicas."""
FULL: Mapping[str, Any] = {"hidden": 128, "layers": 4}
QUICK: Mapping[str, Any] = {"hidden": 64, "layers": 2}
STEPS, QUICK_STEPS = (80, 240), (40, 160)
"""Lengths of the runs."""
HELD_OUT = 16
"""Microbatches of each of the two texts."""


def cases(quick: bool) -> list[Case]:
    """All that needs no noise, for every length and seed."""
    lengths = QUICK_STEPS if quick else STEPS
    return [_case(method, steps, seed, quick) for seed in (1, 2, 3) for steps in lengths for method in _QUIET]


_QUIET = [method for method in TITLES if method not in FACTORS]


def further(quick: bool, results: Results) -> list[Case]:
    """Data parallel with the noise that NoLoCo's replicas were measured to have."""
    unbiased = sqrt(REPLICAS / (REPLICAS - 1))  # the measure is around the replicas' own mean
    return [
        _case(
            method, one["steps"], one["seed"], quick, [[[at, f * unbiased * std] for at, std in stage] for stage in of]
        )
        for method, f in FACTORS.items()
        for one in results
        if one["method"] == "noloco"
        for of in [one["spread"]]
    ]


def _case(method: str, steps: int, seed: int, quick: bool, noise: Any = ()) -> Case:
    name = "{method}-{steps}-{seed}"
    size = QUICK if quick else FULL
    return Case.named(name, method=method, steps=steps, seed=seed, noise=noise, **size)


@cache
def texts() -> tuple[Any, ...]:
    """Twice the same text to read: one holds out the standard library's held-out part, the other what is read."""
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
    manifest = small_manifest(
        size["hidden"],
        size["layers"],
        microbatch_size=4,
        steps=size["steps"],
        inner={"optimizer": "muon", "peak_learning_rate": RATE, "warmup_steps": 10**6},
        outer=rule,
        evaluation={"every_steps": None, "microbatches": 2 * HELD_OUT},
    )
    noise = tuple(tuple((int(at), float(std)) for at, std in stage) for stage in size["noise"])
    replicas = (REPLICAS,) * STAGES
    trained, losses = train_by_kind(TrainingPlan(manifest, replicas, size["seed"], corpora=texts(), noise=noise))
    held_out, training = zip(*losses, strict=True)
    bytes_read = sum(piece.stop - piece.start for piece in texts()[0].pieces)
    return dict(
        finite(
            {
                "held_out": _mean(held_out),
                "training": _mean(training),
                "gap": None if None in (*held_out, *training) else _mean(held_out) - _mean(training),
                "epochs": trained.tokens / bytes_read,
                "parameters": sum(trained.parameters),
                "tokens": trained.tokens,
                "spread": [[(one.step, one.std) for one in trained.finite_spreads(stage)] for stage in range(STAGES)],
            }
        )
    )


def _mean(losses: Any) -> Any:
    return None if None in losses else sum(losses) / len(losses)


def report(results: Results) -> list[Block]:
    """Every method at every length, against data parallel."""
    return [_table(runs) for runs in group(results, "steps").values()]


def _table(runs: Results) -> Table:
    methods = [same for method in TITLES if (same := select(runs, method=method))]
    parallel = select(runs, method="sync")
    columns: Columns = {
        "method": lambda same: TITLES[same[0]["method"]],
        "training loss": over("training"),
        "held-out loss": over("held_out"),
        "gap": over("gap", 3),
        "training, above data parallel": lambda same: mean_std(above(same, parallel, "training"), 2),
        "held-out, above data parallel": lambda same: mean_std(above(same, parallel, "held_out"), 2),
        "std of stage 0 at the end": over(lambda one: one["spread"][0][-1][1] if one["spread"][0] else None, 2),
    }
    one, epochs = runs[0], mean_std(known(runs, "epochs")[:1], 2)
    size = f"{one['parameters']:,} parameters, {one['tokens']:,} tokens"
    return table(columns, methods, f"{one['steps']} steps, {epochs} passes over the text: {size}.")


EXPERIMENT = Experiment("regularisation", describe(globals()), cases, measure, report, further)
