"""What do outer rounds cost in loss if they are merged some inner steps after they are frozen, because nobody waits?

One stage (a byte-level Llama of one layer, hidden {SIZES[hidden_size]}, on the standard library's text),
{SIZES[replicas]} replicas with real torch weights and the node's own code in the simulator, matched pairs, α = 0.5, β =
γ = 0.7, m = {SIZES[inner_steps]}, peak learning rate {PEAK_LEARNING_RATE:g}. The latency of the links is chosen so that
a snapshot arrives after the given number of inner steps (`outer.overlap`). A delay of 0 means links that take no time
and rounds that are waited for. Runs of the same seed share initial weights, data, and the held-out microbatches.

- *Waits*: as many inner steps as fit into the time of {SIZES[steps]} steps if each round stops training for its
  delay: {SIZES[steps]}·m / (m + delay), with a learning rate schedule of that length.
- *Delays*: inner steps between freezing and merging, as counted by the nodes; the last round is always waited for.

Limits: As in `staleness`, the runs are short, the weights still move fast and the learning rate is high, so that what
outer rounds average away shows: a delay costs more than it does when weights have settled. Few seeds of one tiny model.
"""

from typing import NamedTuple

from noloco_p2p.lab.experiments import staleness
from noloco_p2p.lab.experiments.results import Columns, above, group, known, mean_std, table, total_shares
from noloco_p2p.lab.experiments.spec import Block, Case, Figures, Results, seeded
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.links import Link

SIZES, PEAK_LEARNING_RATE = staleness.SIZES, staleness.PEAK_LEARNING_RATE
DELAYS = (1, 5, 10)
COSTS = Costs()
STEP_S = COSTS.forward_s + COSTS.backward_s + COSTS.inner_step_s
"""Virtual seconds of an inner step with one microbatch."""


class DelayVariant(NamedTuple):
    """How the rounds of a run interact with training."""

    kind: str
    """`overlap`, `waits`, or `none`: no outer rounds."""
    delay: int
    """Inner steps until a snapshot arrives."""


BASELINE = DelayVariant("waits", 0)


def cases(quick: bool) -> list[Case]:
    """Every variant with every seed."""
    variants = [BASELINE, *(DelayVariant("overlap", delay) for delay in DELAYS)]
    variants += [*(DelayVariant("waits", delay) for delay in DELAYS), DelayVariant("none", 0)]
    return seeded("{kind} {delay} s{seed}", variants, range(1 if quick else 3), **SIZES)


def measure(case: Case) -> Figures:
    """Train one variant."""
    from noloco_p2p.lab.experiments.real_swarm import train

    kind, delay, m, steps = (case.settings[name] for name in ("kind", "delay", "inner_steps", "steps"))
    overlap = kind == "overlap"
    steps = steps * m // (m + delay) if kind == "waits" else steps
    outer = {"overlap": overlap, "pairing": "none" if kind == "none" else "matched"}
    # A pull is a round trip; it ends in the middle of the inner step before the boundary at which it is merged.
    link = Link(latency_s=(delay - 0.4) * STEP_S / 2) if overlap else Link()
    trained = train(staleness.plan_of(case.settings, steps, outer, link=link, costs=COSTS))
    figures = trained.figures("validation_loss", "merged_loss", "delays")
    return figures | {"loss": figures.pop("validation_loss"), "steps_taken": steps}


def report(results: Results) -> list[Block]:
    """The answer, and each variant compared with rounds that take no time."""
    groups = {DelayVariant(*key): runs for key, runs in group(results, *DelayVariant._fields).items()}

    def delays(variant: DelayVariant) -> str:
        found = total_shares(groups[variant], lambda one: dict(one["delays"]))
        return ", ".join(f"{delay}: {share:.0%}" for delay, share in found.items()) or "none"

    columns: Columns = {
        "rounds": lambda variant: variant.kind,
        "a snapshot takes, steps": lambda variant: variant.delay,
        "inner steps": lambda variant: groups[variant][0]["steps_taken"],
        "validation loss": lambda variant: mean_std(known(groups[variant], "loss")),
        "above rounds that take no time": lambda variant: mean_std(above(groups[variant], groups[BASELINE], "loss"), 3),
        "loss of the merged model": lambda variant: mean_std(known(groups[variant], "merged_loss")),
        "delays": delays,
    }

    def costs(kind: str) -> str:
        found = [above(groups[DelayVariant(kind, delay)], groups[BASELINE], "loss") for delay in DELAYS]
        return ", ".join(mean_std(values, 2) for values in found)

    answer = (
        f"Rounds that are merged {', '.join(map(str, DELAYS))} inner steps late cost {costs('overlap')} nats per token;"
        f" waiting for them costs {costs('waits')} in equal time."
    )
    caption = "Equal times: a run that waits takes fewer inner steps. Nats per token, mean ± std over the seeds."
    return [answer, table(columns, groups, caption)]
