"""If a model is pre-trained by replicas that meet only now and then, is anything lost that its loss does not show, but
fine-tuning on tasks does?

Pre-training is that of `convergence`: a byte-level Llama on the text of the standard library, eight replicas of two
stages, equal tokens, and for each method the rate with the lowest held-out loss of the first seed. The mean over the
replicas is exported and fine-tuned in one process, as by `noloco finetune` and in the same way for all: {EXAMPLES:,}
examples of each of the five tasks that `noloco tasks` makes, batches of {BATCH_SIZE}, peak rate {TUNING_RATE:g}, and
the loss on the completions only. {TEST} other items of each task are scored in two ways. *Exact*: greedy decoding gives
the completion and then the end of text. *Choice*: of four texts of equal length the right one is the likeliest;
guessing gives 0.25. *Without pre-training*: the weights have taken one step. *Jensen-Shannon*: the divergence of two
replicas' next-token distributions before the merge, the mean over pairs and over positions of held-out text, from 0 to
ln 2 = 0.693 nats. Weights, data, tasks and the order of examples are determined by the seed. Mean ± standard deviation
over seeds, and differences between runs with the same seed.

Limits: A model of about a million parameters has learnt spelling after a few hundred steps, not skills. So most of what
the tasks need is learnt in fine-tuning; the runs without pre-training show whether it matters at all. Five tasks of a
few bytes are not language, {TEST} items give a share near one half a standard error of 0.035, and one recipe was used
for all. Fine-tuning by the swarm itself is not considered.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from noloco_p2p.lab.experiments import convergence
from noloco_p2p.lab.experiments.convergence import FULL, QUICK, QUICK_SEEDS, SEEDS, first_runs, next_rates
from noloco_p2p.lab.experiments.rate_search import best_rate
from noloco_p2p.lab.experiments.results import Columns, above, known, mean_std, over, select, table
from noloco_p2p.lab.experiments.spec import Block, Case, Cell, Figures, Results, Table

METHODS = ("parallel", "diloco", "noloco", "gossip-int4")
"""The methods of `convergence` that are compared; the differences are to the first."""
RATES = (6.4e-4, 1.6e-3, 4e-3)
"""On the grid of `convergence`, around the best rates that it found. More are added while the best is at an end."""
FRESH = "fresh"
TITLES = {name: method.title for name, method in convergence.METHODS.items()} | {FRESH: "without pre-training"}
EXAMPLES, TEST, BATCH_SIZE, TUNING_RATE = 4000, 200, 16, 2e-3
TUNING_STEPS, QUICK_TUNING_STEPS = 3000, 1500


def cases(quick: bool) -> list[Case]:
    """Every method at every rate with the first seed; and no pre-training, with all seeds."""
    seeds = range(1, 1 + (QUICK_SEEDS if quick else SEEDS))
    fresh = [_case(FRESH, RATES[0], seed, quick) for seed in seeds]
    return [_case(method, rate, 1, quick) for method in METHODS for rate in RATES] + fresh


def _case(method: str, rate: float, seed: int, quick: bool) -> Case:
    settings = {**(QUICK if quick else FULL), "tuning_steps": QUICK_TUNING_STEPS if quick else TUNING_STEPS}
    if method == FRESH:
        settings["steps"] = 1
    return Case.named("{method}-{rate:g}-{seed}", method=method, rate=rate, seed=seed, long=False, **settings)


def further(quick: bool, results: Results) -> list[Case]:
    """See `convergence.next_rates`."""
    return [_case(name, *rate_seed, quick) for name in METHODS for rate_seed in next_rates(results, name, quick)]


def measure(case: Case) -> Figures:
    """Losses before and after fine-tuning, the replicas' divergence, and the tasks."""
    from noloco_p2p.config import NodeConfig
    from noloco_p2p.io.data.threaded_batches import make_batches
    from noloco_p2p.lab.experiments.downstream_scores import replica_divergence, task_scores
    from noloco_p2p.lab.experiments.real_swarm import train_and_export
    from noloco_p2p.lab.made_tasks import TRAIN, write_tasks
    from noloco_p2p.launch import evaluation, export, finetuning

    method, seed, steps = (case.settings[name] for name in ("method", "seed", "tuning_steps"))
    plan = convergence.plan_of({**case.settings, "method": METHODS[0] if method == FRESH else method})
    recipe = finetuning.Recipe(TUNING_RATE, BATCH_SIZE, steps=steps, seed=seed)
    with TemporaryDirectory() as home:
        model, tuned, tasks = (Path(home) / name for name in ("model", "tuned", "tasks"))
        trained = train_and_export(plan, model)
        manifest, replicas = export.read_record(model)
        held_out = list(make_batches(manifest, NodeConfig(), "").validation())
        singles = [model / export.REPLICAS / str(number) for number in range(replicas)]
        items, data = write_tasks(tasks, seed, EXAMPLES, TEST), str(tasks / TRAIN)
        found = finetuning.run_finetune(model, [data], tuned, recipe, device="cpu", say=lambda line: None)
        scores = task_scores(tuned, items)
        text = evaluation.run_eval(tuned, (), held_out=False, microbatches=None, device="cpu")
        return trained.figures("validation_loss", "merged_loss", "tokens") | {
            "parameters": sum(trained.parameters),
            "divergence": replica_divergence(singles, held_out) if singles else None,
            "completion_loss": found["held_out_loss"],
            "text_loss": text["merged"]["loss"],
            "tasks": scores,
            **{kind: fmean(score[kind] for score in scores.values()) for kind in ("exact", "choice")},
        }


# --- the report -----------------------------------------------------------------------------------------------------


def report(results: Results) -> list[Block]:
    """The answer and both tables."""
    runs = {name: select(results, method=name, rate=best_rate(first_runs(results, name))) for name in (*METHODS, FRESH)}
    exact = {name: mean_std(above(runs[name], runs[METHODS[0]], "exact"), 2) for name in runs if name != METHODS[0]}
    answer = (
        f"After the same fine-tuning, the share of exactly right items differs from {TITLES[METHODS[0]]}'s by: "
        f"{'; '.join(f'{TITLES[name]} {gap}' for name, gap in exact.items())}."
    )
    return [answer, _losses(runs), _tasks(runs)]


def _losses(runs: Mapping[str, Results]) -> Table:
    columns: Columns = {
        "pre-training": lambda same: TITLES[same[0]["method"]],
        "peak rate": lambda same: f"{same[0]['rate']:g}",
        "loss, mean over replicas": over("validation_loss"),
        "loss of the merged model": over("merged_loss"),
        "Jensen-Shannon": over("divergence", 3),
        "fine-tuned: loss of completions": over("completion_loss"),
        "fine-tuned: loss of text": over("text_loss"),
    }
    one = runs[METHODS[0]][0]
    caption = f"{one['parameters']:,} parameters, {one['tokens']:,} tokens of pre-training, nats per token; held out."
    return table(columns, runs.values(), caption)


def _tasks(runs: Mapping[str, Results]) -> Table:
    rows: list[list[Cell]] = []
    for name, same in runs.items():
        for kind in ("exact", "choice"):
            each = [mean_std([one["tasks"][task][kind] for one in same], 3) for task in same[0]["tasks"]]
            rows.append([TITLES[name], kind, *each, mean_std(known(same, kind), 3)])
    heads = ("pre-training", "scored by", *runs[METHODS[0]][0]["tasks"], "mean")
    return Table(heads, rows, f"Share of items that the fine-tuned models get right, {len(runs[METHODS[0]])} seeds.")
