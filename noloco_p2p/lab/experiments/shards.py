"""What does it cost if every replica reads its own kind of data, instead of a share of all of it?

DiLoCo (arXiv 2311.08105) reports that its outer rounds are robust to that. Here a byte-level Llama (full size: about a
million parameters) in {STAGES} stages reads eight kinds of text that exist wherever the package is installed: {TEXTS}.
Each stage has eight replicas, with one microbatch of 4 × 64 tokens per inner step. *Own kind*: each replica of stage 0
reads one kind. *Mixed*: the eight kinds are dealt to the replicas anew for every microbatch. Both read equally much of
each kind. Routes are balanced: a replica of stage 1 sees all kinds in both. With *fixed routes* it sees only one kind,
like the replica of stage 0 that it serves.

The outer rules have their defaults, but DiLoCo has H = {DILOCO_STEPS} (its default, 500, is longer than the run). All
use Muon at a peak rate of {RATE:g}, the product's default, a tenth of warm-up and a cosine to a tenth. Losses are in
nats per byte, the mean over the replicas on held-out text with equal parts of all kinds; mean ± standard deviation over
seeds, and differences between runs with the same seed. *Foreign kinds*: by how much the other replicas' loss on a kind
is above that of the replica that reads it, the mean over kinds; 0 if no replica knows a kind better. *One kind alone*:
a single replica of each stage that reads only one kind, tested on all, which shows how different the kinds are.

Limits: A model that has learnt spelling, at one learning rate, and eight replicas that meet often in comparison with
what they learn in between. The kinds differ more than web pages of different topics do, but the model is too small to
use what they have in common. Every kind is read by exactly one replica: the loss of kinds when nodes leave, and kinds
of unequal size, are not considered.
"""

import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.lab.experiments.results import Columns, above, mean_std, over, select, table
from noloco_p2p.lab.experiments.spec import Block, Case, Cell, Figures, Result, Results, Table
from noloco_p2p.lab.experiments.training import BYTE_VOCABULARY, TrainingPlan, sized_manifest

KINDS = {
    "character tables": ("stdlib", "encodings/*.py"),
    "reference documentation": ("stdlib", "pydoc_data/*.py"),
    "documentation of tensors": ("torch", "_torch_docs.py", "_tensor_docs.py", "_storage_docs.py"),
    "code of algebra": ("sympy", "polys/*.py"),
    "code of the network": ("stdlib", "asyncio/*.py", "http/*.py", "urllib/*.py", "xmlrpc/*.py"),
    "C++ headers": ("torch", "include/c10/**/*.h"),
    "type stubs": ("torch", "**/*.pyi"),
    "YAML": ("torchgen", "packaged/**/*.yaml"),
}
"""For each kind, where it is found (in the part of the standard library that every distribution has, or in a package
that comes with torch), and the globs there."""
TEXTS = ", ".join(KINDS)
STAGES, RATE, DILOCO_STEPS = 2, 1e-2, 20
RULES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "sync": ("data parallel (`sync`)", {"rule": "sync"}),
    "noloco": ("NoLoCo, m = 10", {"rule": "noloco", "overlap": True}),
    "averaged": ("averaged φ and δ, m = 10", {"rule": "averaged", "overlap": True}),
    "diloco": ("DiLoCo, H = 20", {"rule": "diloco", "inner_steps": DILOCO_STEPS}),
    "gossip": ("gossip, m = 1, int4", {"rule": "gossip", "overlap": True}),
    "gossip-fixed": ("gossip, fixed routes", {"rule": "gossip", "overlap": True}),
    "none": ("no outer rounds", {"pairing": "none"}),
}
"""By name: (title, settings of the outer round)."""
ALONE = "alone"
FULL, QUICK = {"hidden": 128, "layers": 4, "steps": 200}, {"hidden": 64, "layers": 2, "steps": 120}
HELD_OUT = 32
"""Number of held-out microbatches of all kinds together."""


def cases(quick: bool) -> list[Case]:
    """Every rule with own and with mixed kinds and every seed; and each kind alone, with the first seed."""
    size = QUICK if quick else FULL
    seeds = range(1, 4)
    swarms = [
        Case.named("{rule}-{kind}-{seed}", rule=rule, kind=kind, seed=seed, **size)
        for seed, rule, kind in product(seeds, RULES, ("own", "mixed"))
    ]
    return swarms + [Case.named("{rule}-{kind}", rule=ALONE, kind=kind, seed=1, **size) for kind in KINDS]


@cache
def corpora() -> tuple[Any, ...]:
    """The kinds of text. Raises ConfigError if this machine lacks one of them."""
    from noloco_p2p.io.data.corpora import file_corpus, matching_files
    from noloco_p2p.io.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer("bytes", None, BYTE_VOCABULARY)
    found = []
    for where, *globs in KINDS.values():
        spec = None if where == "stdlib" else find_spec(where)
        root = Path(sysconfig.get_path("stdlib") if spec is None else str(spec.origin).removesuffix("/__init__.py"))
        found.append(file_corpus(matching_files(tuple(f"{root}/{one}" for one in globs)), tokenizer))
    return tuple(found)


def measure(case: Case) -> Figures:
    """Losses over all kinds, and of every replica on each of them."""
    from noloco_p2p.lab.experiments.real_swarm import train_by_kind

    rule, kind, size = case.settings["rule"], case.settings["kind"], case.settings
    alone = rule == ALONE
    manifest = sized_manifest(
        size,
        {"optimizer": "muon", "peak_learning_rate": RATE},
        routing="fixed" if alone or rule == "gossip-fixed" else "balanced",
        outer={"pairing": "none"} if alone else RULES[rule][1],
        evaluation={"microbatches": HELD_OUT},
    )
    count, streams = (1, (list(KINDS).index(kind),)) if alone else (len(KINDS), None)
    replicas, seed = (count,) * STAGES, case.settings["seed"]
    plan = TrainingPlan(manifest, replicas, seed, streams=streams, corpora=corpora(), mixed=kind == "mixed")
    trained, losses = train_by_kind(plan)
    figures = trained.figures("validation_loss", "merged_loss", "tokens")
    return figures | {"losses": losses, "parameters": sum(trained.parameters)}


# --- the report -----------------------------------------------------------------------------------------------------


def foreign(result: Result) -> float | None:
    """How much lower a replica's loss on its own kind is than the other replicas' loss on it, the mean over kinds."""
    losses = result["losses"]
    if any(loss is None for row in losses for loss in row):
        return None
    kinds = range(len(losses))
    return fmean(fmean(losses[other][kind] for other in kinds if other != kind) - losses[kind][kind] for kind in kinds)


def report(results: Results) -> list[Block]:
    """The costs in words, the rules with own and mixed kinds, and how different the kinds are."""
    runs = {(rule, kind): select(results, rule=rule, kind=kind) for rule in RULES for kind in ("own", "mixed")}
    costs = {rule: above(runs[rule, "own"], runs[rule, "mixed"], "validation_loss") for rule in RULES}
    merged = {rule: above(runs[rule, "own"], runs[rule, "mixed"], "merged_loss") for rule in RULES}

    def part(kind: str, figure: Any, digits: int = 4) -> Any:
        return lambda rule: over(figure, digits)(runs[rule, kind])

    columns: Columns = {
        "rule": lambda rule: RULES[rule][0],
        "mixed: loss": part("mixed", "validation_loss"),
        "own kind: loss": part("own", "validation_loss"),
        "own kind costs": lambda rule: mean_std(costs[rule], 2),
        "merged model: own kind costs": lambda rule: mean_std(merged[rule], 2),
        "own kind: foreign kinds": part("own", foreign, 2),
        "mixed: foreign kinds": part("mixed", foreign, 2),
    }
    same = runs["sync", "own"]
    caption = f"{same[0]['parameters']:,} parameters, {same[0]['tokens']:,} tokens in each run, {len(same)} seeds."
    words = "; ".join(f"{RULES[rule][0]} {mean_std(cost, 2)}" for rule, cost in costs.items())
    answer = f"If every replica reads its own kind of data instead of all kinds, it costs, in nats: {words}."
    return [answer, table(columns, RULES, caption), _alone(results)]


def _alone(results: Results) -> Table:
    """The loss on each kind of a model that has read one of them."""
    rows: list[Sequence[Cell]] = []
    for kind in KINDS:
        rows += [[kind, *one["losses"][0]] for one in select(results, rule=ALONE, kind=kind)]
    caption = "One kind alone, first seed: held-out loss by what was read (row) and what was tested (column)."
    return Table(("read", *KINDS), rows, caption)
