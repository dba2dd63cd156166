"""The part of the experiment `codecs` about outer rounds: what each codec costs in loss, and its size."""

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from noloco_p2p.core.lattice_format import chunk_count
from noloco_p2p.lab.experiments.results import Columns, above, group, known, mean_std, table
from noloco_p2p.lab.experiments.spec import Block, Case, Figures, Results, seeded
from noloco_p2p.lab.experiments.training import TrainingPlan, small_manifest

REPLICAS, LAYERS, INNER_STEPS, PEAK_LEARNING_RATE, SEEDS = 8, 2, 10, 5e-3, 3
BASE = "full"


class OuterCase(NamedTuple):
    """How the replicas of a run meet, and the codec of their vectors."""

    pairing: str
    outer_codec: str

    @property
    def base(self) -> "OuterCase":
        """The same case uncompressed."""
        return self._replace(outer_codec=BASE)


def cases(quick: bool) -> list[Case]:
    """Matched pairs in every codec; and random pairs, of which mostly one side merges, in the narrowest."""
    outer = [OuterCase("matched", codec) for codec in (BASE, "bfloat16", "int8", "int4")]
    outer += [] if quick else [OuterCase("random", codec) for codec in (BASE, "int4")]
    sizes = {"hidden_size": 64, "steps": 100} if quick else {"hidden_size": 128, "steps": 200}
    return seeded("outer {pairing} {outer_codec} s{seed}", outer, range(SEEDS), **sizes)


def measure(case: Case) -> Figures:
    """Train one case: its loss, the spread of its replicas, and the size of a pull."""
    from noloco_p2p.lab.experiments.real_swarm import train

    one = OuterCase(*(case.settings[name] for name in OuterCase._fields))
    manifest = small_manifest(
        case.settings["hidden_size"],
        LAYERS,
        microbatch_size=4,
        steps=case.settings["steps"],
        inner={"peak_learning_rate": PEAK_LEARNING_RATE},
        outer={"inner_steps": INNER_STEPS, "pairing": one.pairing, "codec": one.outer_codec},
        evaluation={"microbatches": 32},
    )
    trained = train(TrainingPlan(manifest, (REPLICAS,), case.settings["seed"]))
    (parameters,), pulls = trained.parameters, sum(n for result, n in trained.rounds.items() if result != "alone")
    late = [spread.std for spread in trained.spreads[len(trained.spreads) // 2 :]]
    return trained.figures("validation_loss", "merged_loss") | {
        "parameters": [parameters],
        "spread": statistics.fmean(late),
        "bytes_per_parameter": trained.bytes["snapshot"] / (parameters * pulls),
        "wrong": trained.asked_again / (chunk_count(parameters) * pulls),
    }


# --- the report -----------------------------------------------------------------------------------------------------

Groups = Mapping[OuterCase, Results]
"""The runs of each case, by seed."""


def seed_noise(runs: Results) -> float:
    """Standard deviation of the loss over the seeds; 0 for a single one."""
    losses = known(runs, "validation_loss")
    return statistics.stdev(losses) if len(losses) > 1 else 0.0


def report(results: Results) -> list[Block]:
    """Every codec compared with uncompressed vectors, and whether the difference is within the noise of the seeds."""
    groups = {OuterCase(*key): runs for key, runs in group(results, *OuterCase._fields).items()}
    base = groups[OuterCase("matched", BASE)]
    noise = seed_noise(base)
    seen = [f"Outer rounds: {REPLICAS} replicas of {base[0]['parameters'][0]:,} parameters, {base[0]['steps']} steps."]
    for one in groups:
        found = above(groups[one], groups[one.base], "validation_loss")
        if one != one.base and found:
            verdict = "within" if abs(statistics.fmean(found)) <= noise else "beyond"
            what = f"{one.outer_codec}, {one.pairing} pairs"
            seen.append(f"- {what}: {mean_std(found, 2)} nats above {BASE}, {verdict} the seed noise of {noise:.4f}.")
    return ["\n".join([seen[0], "", *seen[1:]]), _table(groups)]


def _table(groups: Groups) -> Block:
    def wider(one: OuterCase) -> str:
        mine, theirs = (known(groups[case], "spread") for case in (one, one.base))
        return f"{statistics.fmean(mine) / statistics.fmean(theirs):.2f}" if mine and theirs else "–"

    columns: Columns = {
        "pairs": lambda one: one.pairing,
        "codec of vectors": lambda one: one.outer_codec,
        "validation loss": lambda one: mean_std(known(groups[one], "validation_loss")),
        "above full": lambda one: mean_std(above(groups[one], groups[one.base], "validation_loss"), 2),
        "of the mean model": lambda one: mean_std(known(groups[one], "merged_loss")),
        "spread / that of full": wider,
        "bytes per parameter and round": lambda one: mean_std(known(groups[one], "bytes_per_parameter")),
        "chunks requested again": lambda one: f"{statistics.fmean(known(groups[one], 'wrong')):.1%}",
    }
    caption = "Losses in nats per token, mean ± standard deviation over the seeds; bytes include requests."
    return table(columns, groups, caption)
