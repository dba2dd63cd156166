"""A swarm whose nodes are killed, restarted and stopped, against an undisturbed one of the same seed and steps.

Real `noloco-node` processes on loopback. Everything is learned from outside: from the nodes' steps files (with the time
of each inner step), logs, metrics and summaries.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import ConfigError
from noloco_p2p.lab.bench import churn_stats
from noloco_p2p.lab.bench.churn_result import DEFINITIONS, loss_ratio, outcome
from noloco_p2p.lab.bench.churn_schedule import Disturber, StageKiller
from noloco_p2p.lab.bench.churn_watch import BEGIN_S, Say, Watch
from noloco_p2p.lab.bench.node_fleet import TICK_S, Fleet, ended_by_signals
from noloco_p2p.launch import cpu_seconds

TARGETS = {"hangs": 0, "duplicates": 0, "stall_p95_s": 5.0, "loss_ratio": 1.02, "rounds_lost": 1}
COLD_TARGETS_S = {"2x2": 20.0, "3x3": 45.0}
SETTINGS = {
    "checkpoint.every_rounds": "1",
    "directory.ttl_s": "10",
    "directory.refresh_s": "2",
    "audit.weights": "false",
    "listen.host": "127.0.0.1",
    "listen.announce_host": "null",
}
"""A checkpoint every round, so that little is lost; a short advert, so that who died is soon forgotten; steps files."""
ENDLESS_STEPS = 1_000_000
RATE_S = 10.0
SETTLED_STEPS = 20


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be measured."""

    shape: tuple[int, int]
    kill_every_s: float
    minutes: float
    kill_last: bool
    seed: int
    seeds: int
    steps: int | None
    """None: as many as an undisturbed swarm takes in `minutes`."""
    cold: bool
    sets: tuple[str, ...] = ()
    """Settings for all nodes, `key=value`."""


def shape_of(text: str) -> tuple[int, int]:
    """`3x3` → (stages, replicas). Raises ConfigError."""
    stages, cross, replicas = text.lower().partition("x")
    if not (cross and stages.isdigit() and replicas.isdigit() and int(stages) and int(replicas)):
        raise ConfigError(f"--nodes {text}: write it as STAGESxREPLICAS, such as 3x3")
    return int(stages), int(replicas)


def run(wish: Wish) -> dict[str, Any]:
    """The figures. Raises LocalError when nodes do not even start."""
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="noloco-churn-") as scratch:
        return _measured(wish, Path(scratch), lambda line: print(line, file=sys.stderr, flush=True))


def _measured(wish: Wish, scratch: Path, say: Say) -> dict[str, Any]:
    own, cold, steps = "x".join(map(str, wish.shape)), {}, wish.steps
    shapes = sorted({*COLD_TARGETS_S, own} if wish.cold and own in COLD_TARGETS_S else {own})
    for name in shapes:
        if wish.cold or steps is None:
            say(f"{name}: all at once")
            found = cold_restart(scratch / f"cold-{name}", shape_of(name), wish, restart=wish.cold)
            if wish.cold:
                cold[name] = found
            if name == own and steps is None:
                steps = max(1, int(found["steps_per_s"] * 60 * wish.minutes))
    assert steps is not None, "it was given or measured"
    runs: list[dict[str, Any]] = []
    for seed in range(wish.seed, wish.seed + wish.seeds):
        churned = one_run(scratch / f"churned-{seed}", wish, steps, seed, say, disturbed=True)
        calm = one_run(scratch / f"calm-{seed}", wish, steps, seed, say, disturbed=False)
        runs.append({"seed": seed, "churned": churned, "undisturbed": calm, "loss_ratio": loss_ratio(churned, calm)})
    for each in runs:
        for half in ("churned", "undisturbed"):
            each[half].pop("curve")
    return figures(wish, steps, runs, cold)


# --- one run ---------------------------------------------------------------------------------------------------------


def arguments(run_dir: Path, shape: tuple[int, int], steps: int, seed: int, sets: Sequence[str]) -> list[str]:
    """The settings of all nodes of a run."""
    values = {
        "stages": str(shape[0]),
        "start_replicas": str(shape[1]),
        "steps": str(steps),
        "seed": str(seed),
        "evaluation.every_steps": str(max(1, steps // 20)),
        "audit.dir": str(run_dir / "audit"),
        **SETTINGS,
    }
    told = [f"{key}={value}" for key, value in values.items()]
    return [part for value in (*told, *sets) for part in ("--set", value)]


def one_run(run_dir: Path, wish: Wish, steps: int, seed: int, say: Say, *, disturbed: bool) -> dict[str, Any]:
    """Run a swarm to its end, disturbed or not, and work out what it did."""
    what = f"seed {seed}, {'churned' if disturbed else 'undisturbed'}"
    given = arguments(run_dir, wish.shape, steps, seed, wish.sets)
    threads = max(1, cpu_seconds.cores() // (wish.shape[0] * wish.shape[1]))
    with Fleet(run_dir, wish.shape, given, threads) as fleet:
        fleet.start()
        fleet.wait(lambda: all(node.active for node in fleet.nodes.values()), "all nodes train", BEGIN_S)
        began = time.time()
        disturber: Disturber | StageKiller | None = None
        if disturbed:
            kind = StageKiller if wish.kill_last else Disturber
            disturber = kind(fleet, generator(seed, "", "churn"), wish.kill_every_s, began + wish.kill_every_s)
        watch = Watch(fleet, steps, lambda line: say(f"{what}: {line}"))
        while not watch.over:
            fleet.tick()
            now = time.time()
            if disturber is not None and now < began + 60 * wish.minutes and not watch.near_the_end(now):
                disturber.tick(now)
            watch.tick(now)
            time.sleep(TICK_S)
        fleet.tick()
        return outcome(fleet, watch, disturber, began)


# --- the cold restart ------------------------------------------------------------------------------------------------


def cold_restart(run_dir: Path, shape: tuple[int, int], wish: Wish, *, restart: bool) -> dict[str, Any]:
    """Seconds from the start of nodes that were all killed at once until stage 0 trains again; speed before that."""
    given = arguments(run_dir, shape, ENDLESS_STEPS, wish.seed, wish.sets)
    nodes = shape[0] * shape[1]
    with Fleet(run_dir, shape, given, max(1, cpu_seconds.cores() // nodes)) as fleet:
        fleet.start()

        def settled() -> bool:
            saved = list(run_dir.glob("*/checkpoints/*/stage-*.json"))
            return len({path.parts[-4] for path in saved}) == nodes and fleet.step >= SETTLED_STEPS

        fleet.wait(settled, "training and a checkpoint of every node", BEGIN_S)
        before = fleet.step
        began = time.time()
        fleet.wait(lambda: time.time() - began >= RATE_S, "the speed", 2 * RATE_S)
        reached = fleet.step
        told: dict[str, Any] = {"steps_per_s": (reached - before) / RATE_S}
        if not restart:
            return told
        for node in fleet.nodes.values():
            fleet.kill(node, None)
        fleet.tick()
        again = time.time()
        fleet.start()

        def trains() -> bool:
            return any(line.at > again for line in fleet.first_stage_lines())

        fleet.wait(trains, "training after the restart", BEGIN_S)
        first = min((line for line in fleet.first_stage_lines() if line.at > again), key=lambda line: line.at)
        own = "x".join(map(str, shape))
        told |= {"seconds": first.at - again, "target_s": COLD_TARGETS_S.get(own)}
        return told | {"killed_at_step": reached, "resumed_at_step": first.step}


# --- all runs --------------------------------------------------------------------------------------------------------


def figures(wish: Wish, steps: int, runs: list[dict[str, Any]], cold: dict[str, Any]) -> dict[str, Any]:
    """All runs together, beside their targets."""
    churned = [each["churned"] for each in runs]
    kills = [s for one in churned for s in one["stall_after_kill_s"]]
    stops = [s for one in churned for s in one["stall_after_stop_s"]]
    back = [s for one in churned for s in one["back_s"]]
    equal = [each["loss_ratio"]["equal_tokens"] for each in runs if each["loss_ratio"]["equal_tokens"] is not None]
    lost = [one["lost"] for each in churned for one in each.get("rounds_lost", [])]
    dropped: Counter[str] = Counter()
    rerouted: Counter[str] = Counter()
    for one in churned:
        dropped.update(one["dropped"])
        rerouted.update(one["rerouted"])
    return {
        "bench": "churn",
        "ratio": fmean(equal) if equal else None,
        "target": TARGETS["loss_ratio"],
        "targets": TARGETS,
        "nodes": "x".join(map(str, wish.shape)),
        "steps": steps,
        "kill_every_s": wish.kill_every_s,
        "kills": sum(one["kills"] for one in churned),
        "stops": sum(one["stops"] for one in churned),
        "stall_after_kill_s": _quantiles(kills),
        "stall_after_stop_s": _quantiles(stops),
        "back_s": _quantiles(back),
        "microbatches_done": sum(one["microbatches_done"] for one in churned),
        "rerouted": dict(rerouted),
        "dropped": dict(dropped),
        "duplicates": sum(each[half]["duplicates"] for each in runs for half in ("churned", "undisturbed")),
        "hangs": sum(len(each[half]["hangs"]) for each in runs for half in ("churned", "undisturbed")),
        "crashes": sum(len(each[half]["crashes"]) for each in runs for half in ("churned", "undisturbed")),
        "rounds_lost": lost if wish.kill_last else None,
        "loss_ratio": churn_stats.spread(equal),
        "validation_loss": {
            half: churn_stats.spread([one for each in runs if (one := each[half]["validation_loss"]) is not None])
            for half in ("churned", "undisturbed")
        },
        "cold_restart": cold,
        "settings": SETTINGS,
        "runs": runs,
        "definitions": DEFINITIONS,
    }


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "p50": churn_stats.quantile(values, 0.5),
        "p95": churn_stats.quantile(values, 0.95),
        "max": max(values, default=None),
    }
