"""A swarm whose nodes are killed, restarted and stopped, compared with an undisturbed one with equal seed and steps.

Real `noloco-node` processes on loopback. Everything is observed from outside: in the nodes' steps files (with the time
of each inner step), journals, metrics and summaries.
"""

import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import ConfigError
from noloco_p2p.lab.bench.churn_figures import DEFINITIONS, loss_ratio, result, rounds_lost
from noloco_p2p.lab.bench.churn_schedule import Disturbance, kill_nodes, kill_stages
from noloco_p2p.lab.bench.churn_watch import BEGIN_S, ChurnWatch
from noloco_p2p.lab.bench.node_fleet import ENDLESS_STEPS, TICK_S, Fleet
from noloco_p2p.lab.sample_stats import mean_and_std, quantile
from noloco_p2p.launch.progress_line import ProgressLine
from noloco_p2p.node.guardian import EVERY_STEPS

TARGETS = {"hangs": 0, "duplicates": 0, "stall_p95_s": 5.0, "loss_ratio": 1.02, "rounds_lost": EVERY_STEPS}
"""Of `rounds_lost`: guardians copy weights every EVERY_STEPS steps, and by default a round follows each step."""
COLD_TARGETS_S = {"2x2": 20.0, "3x3": 45.0}
SETTINGS: dict[str, object] = {
    "checkpoint.every_steps": "1",
    "directory.ttl_s": "10",
    "directory.refresh_s": "2",
    "audit.weights": "false",
}
"""A checkpoint every round, so that little is lost; short-lived adverts, so that dead nodes vanish; steps files."""
RATE_S = 10.0
SETTLED_STEPS = 20
HALVES = ("churned", "undisturbed")


@dataclass(frozen=True, slots=True)
class ChurnPlan:
    """What to measure."""

    shape: tuple[int, int]
    kill_every_s: float
    minutes: float
    kill_last: bool
    seed: int
    seeds: int
    steps: int | None
    """Length of each run; None: as many steps as an undisturbed swarm takes in `minutes`."""
    cold: bool
    sets: tuple[str, ...] = ()
    """Settings for all nodes, `key=value`."""

    @property
    def nodes(self) -> str:
        """`3x3`: stages and replicas."""
        return "x".join(map(str, self.shape))

    def check(self) -> None:
        """Raises ConfigError if no node would be killed, or as a Fleet does."""
        stages, replicas = self.shape
        if self.kill_last and stages == 1:
            raise ConfigError(f"--nodes {self.nodes} --kill-last: no other stage has its weights; give two stages")
        if not self.kill_last and replicas == 1:
            raise ConfigError(f"--nodes {self.nodes}: the last replica of a stage is spared; give two, or --kill-last")
        self.fleet(Path(tempfile.gettempdir()), 1, self.seed + self.seeds - 1)

    def fleet(self, run_dir: Path, steps: int, seed: int) -> Fleet:
        """The nodes of one run."""
        own = SETTINGS | {"steps": steps, "seed": seed, "evaluation.every_steps": max(1, steps // 20)}
        own |= {"audit.dir": run_dir / "audit"}
        return Fleet(run_dir, self.shape, [*(f"{key}={value}" for key, value in own.items()), *self.sets])


def shape_of(text: str) -> tuple[int, int]:
    """`3x3` → (stages, replicas). Raises ConfigError if it is malformed."""
    found = re.fullmatch(r"0*([1-9]\d{0,5})x0*([1-9]\d{0,5})", text.lower())
    if found is None:
        raise ConfigError(f"--nodes {text[:20]}: write it as STAGESxREPLICAS, such as 3x3")
    return int(found[1]), int(found[2])


def run(plan: ChurnPlan, line: ProgressLine) -> dict[str, Any]:
    """Measure, and return the figures. Raises LocalError if nodes do not even start."""
    cold, steps, runs = {}, plan.steps, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="noloco-churn-") as home:
        scratch = Path(home)
        if plan.cold or steps is None:
            # The targets are for both shapes on one machine, so both are measured if the plan has one of them.
            for name in COLD_TARGETS_S if plan.cold and plan.nodes in COLD_TARGETS_S else [plan.nodes]:
                line.tell(f"{name}: all nodes are killed at once and started again", 0.0)
                cold[name] = cold_restart(scratch / f"cold-{name}", replace(plan, shape=shape_of(name)))
            steps = steps or max(1, int(cold[plan.nodes]["steps_per_s"] * 60 * plan.minutes))
        for seed in range(plan.seed, plan.seed + plan.seeds):
            churned, calm = (
                one_run(scratch / f"{half}-{seed}", plan, steps, seed, line, disturbed=half == "churned")
                for half in HALVES
            )
            ratio = loss_ratio(churned, calm)
            del churned["curve"], calm["curve"]
            runs.append({"seed": seed, "churned": churned, "undisturbed": calm, "loss_ratio": ratio})
    return figures(plan, steps, runs, cold if plan.cold else {})


def one_run(
    run_dir: Path, plan: ChurnPlan, steps: int, seed: int, line: ProgressLine, *, disturbed: bool
) -> dict[str, Any]:
    """Run a swarm to its end, disturbed or not, and compute its figures."""
    number = 2 * (seed - plan.seed) + (1 if disturbed else 2)
    what = f"run {number} of {2 * plan.seeds}, seed {seed}, {'churned' if disturbed else 'undisturbed'}"
    done: list[Disturbance] = []
    with plan.fleet(run_dir, steps, seed) as fleet:
        fleet.start()
        fleet.wait(lambda: all(node.active for node in fleet.nodes.values()), "all nodes to train", BEGIN_S)
        began = time.time()
        disturb = kill_stages if plan.kill_last else kill_nodes
        schedule = disturb(fleet, generator(seed, "", "churn"), plan.kill_every_s)
        watch = ChurnWatch(fleet, steps, lambda text: line.say(f"{what}: {text}"))
        while not watch.over:
            fleet.tick()
            share = (number - 1 + fleet.step / steps) / (2 * plan.seeds)
            line.tell(f"{what}: step {fleet.step:,} of {steps:,}", share)
            now = time.time()
            if disturbed and now < began + 60 * plan.minutes and not watch.near_the_end(now):
                done += filter(None, [next(schedule)])
            watch.tick(now)
            time.sleep(TICK_S)
        fleet.tick()
        found = result(fleet, watch, done, began)
        if disturbed and plan.kill_last:
            found["rounds_lost"] = [rounds_lost(fleet, one.emptied, one.at) for one in done if one.emptied is not None]
        return found


def cold_restart(run_dir: Path, plan: ChurnPlan) -> dict[str, Any]:
    """Kill all nodes at once and restart them: the seconds until stage 0 trains, and the speed before.

    Only measures the speed if the plan asks for no cold restart.
    """
    with plan.fleet(run_dir, ENDLESS_STEPS, plan.seed) as fleet:
        fleet.start()

        def settled() -> bool:
            saved = list(run_dir.glob("*/checkpoints/*/stage-*.json"))
            return len({path.parts[-4] for path in saved}) == len(fleet.nodes) and fleet.step >= SETTLED_STEPS

        fleet.wait(settled, "training and a checkpoint of every node", BEGIN_S)
        before, until = fleet.step, time.time() + RATE_S
        fleet.wait(lambda: time.time() >= until, "the measurement", 2 * RATE_S)
        reached = fleet.step
        found: dict[str, Any] = {"steps_per_s": (reached - before) / RATE_S}
        if not plan.cold:
            return found
        for node in fleet.nodes.values():
            fleet.kill(node, None)
        fleet.tick()
        again = time.time()
        fleet.start()
        fleet.wait(lambda: any(line.at > again for line in fleet.first_stage_lines()), "training to go on", BEGIN_S)
        first = min((line for line in fleet.first_stage_lines() if line.at > again), key=lambda line: line.at)
        found |= {"seconds": first.at - again, "target_s": COLD_TARGETS_S.get(plan.nodes)}
        return found | {"killed_at_step": reached, "resumed_at_step": first.step}


def figures(plan: ChurnPlan, steps: int, runs: list[dict[str, Any]], cold: dict[str, Any]) -> dict[str, Any]:
    """The figures of all runs together, with their targets."""
    churned = [each["churned"] for each in runs]
    both = [each[half] for each in runs for half in HALVES]
    equal = [ratio for each in runs if (ratio := each["loss_ratio"]["equal_tokens"]) is not None]
    lost = [one["lost"] for each in churned for one in each.get("rounds_lost", [])]
    losses = {half: [loss for each in runs if (loss := each[half]["validation_loss"]) is not None] for half in HALVES}
    return {
        "bench": "churn",
        "ratio": fmean(equal) if equal else None,
        "target": TARGETS["loss_ratio"],
        "targets": TARGETS,
        "nodes": plan.nodes,
        "steps": steps,
        "kill_every_s": plan.kill_every_s,
        **{name: sum(one[name] for one in churned) for name in ("kills", "stops")},
        **{name: _quantiles(churned, name) for name in ("stall_after_kill_s", "stall_after_stop_s", "back_s")},
        "microbatches_done": sum(one["microbatches_done"] for one in churned),
        **{name: sum((Counter(one[name]) for one in churned), Counter()) for name in ("rerouted", "dropped")},
        "duplicates": sum(one["duplicates"] for one in both),
        **{name: sum(len(one[name]) for one in both) for name in ("hangs", "crashes")},
        "rounds_lost": lost if plan.kill_last else None,
        "loss_ratio": mean_and_std(equal),
        "validation_loss": {half: mean_and_std(found) for half, found in losses.items()},
        "cold_restart": cold,
        "settings": SETTINGS,
        "runs": runs,
        "definitions": DEFINITIONS,
    }


def _quantiles(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | None]:
    values = [value for one in runs for value in one[name]]
    return {"p50": quantile(values, 0.5), "p95": quantile(values, 0.95), "max": max(values, default=None)}
