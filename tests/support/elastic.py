"""Swarms with faults drawn from a seed, and the replay of one of them.

    python tests/support/elastic.py SEED

replays one seed, and prints the faults, the outcome, and which law the swarm broke, if any. The laws are in
`noloco_p2p/sim/laws.py`.
"""

import random
import sys
from functools import partial

from lawful import Judge, Swarm, broken

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim import laws
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.faults import BARRIERS, Fault, FaultySwarm
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.world import SimPlan, peer_id

DRAIN_S, TTL_S = 5.0, 6.0

# --- what is drawn ----------------------------------------------------------------------------------------------------

SHAPES = ((3, 3, 3), (3, 3, 3), (2, 2), (3, 2, 3), (1, 2, 3), (2, 2, 2), (3, 1, 2), (2, 3), (3, 3, 1), (2, 1, 3))
RULES = (
    {"rule": "noloco", "inner_steps": 4},
    {"rule": "averaged", "inner_steps": 4},
    {"rule": "gossip", "inner_steps": 1},
    {"rule": "gossip", "inner_steps": 2},
)
"""Each of these is used for as many consecutive seeds as there are shapes."""
COSTS = Costs(forward_s=0.05, backward_s=0.1, inner_step_s=0.02, outer_s=0.02, spread=0.2)


def manifest_for(replicas: tuple[int, ...], **changes: object) -> RunManifest:
    """A tiny run with as many stages as `replicas` has entries."""
    settings = {
        "stages": len(replicas),
        "start_replicas": min(replicas),
        "steps": 20,
        "sequence_length": 2,
        "microbatch_size": 1,
        "microbatches_per_step": 2,
        "outer": {"rule": "noloco", "inner_steps": 4, "deadline_s": 3.0},
        "evaluation": {"every_steps": None, "microbatches": 2},
    }
    return RunManifest.model_validate(settings | changes)


def config_for(**changes: object) -> NodeConfig:
    """The local settings of every node."""
    settings = {
        "checkpoint": {"every_steps": 1},
        "directory": {"ttl_s": TTL_S, "refresh_s": 1.0},
        "limits": {"microbatch_deadline_s": 6.0, "patience_floor_s": 1.0, "linger_s": 12.0, "drain_s": DRAIN_S},
    }
    return NodeConfig.model_validate(settings | changes)


def drawn(seed: int) -> tuple[SimPlan, tuple[Fault, ...]]:
    """A swarm and its faults."""
    rng = random.Random(seed)
    replicas = SHAPES[seed % len(SHAPES)]
    manifest = manifest_for(
        replicas,
        seed=seed,
        steps=rng.randint(14, 20),
        routing=rng.choice(["random", "weighted", "balanced"]),
        outer={"deadline_s": 3.0} | RULES[seed // len(SHAPES) % len(RULES)],
    )
    plan = SimPlan(
        manifest,
        replicas,
        seed=seed,
        config=config_for(checkpoint={"every_steps": rng.choice([1, 8])}),
        link=Link(latency_s=0.005, spread=0.3, reply_loss=rng.choice([0.0, 0.0, 0.01])),
        costs=COSTS,
        view_age_s=rng.choice([0.0, 0.0, 0.5]),
        batches_factory=partial(SimBatches, unequal=True),
        torn_by_crash=rng.random() < 0.5,
    )
    return plan, tuple(sorted(_faults(rng, replicas), key=lambda fault: fault.at_s))


def _faults(rng: random.Random, replicas: tuple[int, ...]) -> list[Fault]:
    """Three to eight faults. At most one node of each stage crashes for good, and never the only one."""
    stages = [[peer_id(stage, i) for i in range(count)] for stage, count in enumerate(replicas)]
    everybody = [peer for stage in stages for peer in stage]
    gone: set[PeerId] = set()
    faults = []
    for _ in range(rng.randint(3, 8)):
        at_s, peer = rng.uniform(1.0, 14.0), rng.choice(everybody)
        stage = stages[int(peer[1])]
        kind = rng.choices(
            ["bounce", "wipe", "crash", "hang", "mute", "cut", "split", "pause", "leave", "stage", "all"],
            [20, 8, 8, 10, 6, 8, 5, 8, 8, 8, 3],
        )[0]
        match kind:
            case "bounce" | "wipe":
                faults.append(Fault(at_s, kind, (peer,), rng.uniform(0.5, 10.0)))
            case "crash" if len(stage) > 1 and not gone & set(stage):
                gone.add(peer)
                faults.append(Fault(max(3.0, at_s), kind, (peer,)))
            case "hang" | "mute" | "pause":
                faults.append(Fault(at_s, kind, (peer,), rng.uniform(1.0, 10.0)))
            case "cut":
                faults.append(
                    Fault(at_s, kind, (peer, rng.choice([p for p in everybody if p != peer])), rng.uniform(2, 15))
                )
            case "split":
                part = rng.sample(everybody, rng.randint(1, len(everybody) // 2))
                faults.append(Fault(at_s, kind, tuple(sorted(part)), rng.uniform(2.0, 15.0)))
            case "leave":
                faults.append(Fault(at_s, kind, (peer,), DRAIN_S + rng.uniform(0.5, 6.0)))
            case "stage" | "all":
                whom, down_s = stage if kind == "stage" else everybody, rng.uniform(0.5, 6.0)
                lost = rng.random() < 0.4
                for each in whom:
                    wiped = lost if kind == "stage" else rng.random() < 0.15
                    faults.append(Fault(at_s, "wipe" if wiped else "bounce", (each,), down_s + rng.uniform(0.0, 1.0)))
    return faults


UNDONE = (*BARRIERS, "pause", "slow", "stop")
"""Kinds of faults whose end is an event of its own."""
KINDS = ("state", "resumed", "deserted", "guarded", "checkpoint", "outer_round", "evaluation", "warning", "moved")


def words(fault: Fault) -> str:
    """A fault in words."""
    return f"{fault.kind} {' '.join(fault.peers)} for {fault.for_s:.2f} s"


def timeline(swarm: FaultySwarm) -> list[str]:
    """The faults and what the nodes recorded, in order of time, without the microbatches."""
    history = [(fault.at_s, words(fault)) for fault in swarm.begun]
    history += [(fault.ends_s, f"end of {words(fault)}") for fault in swarm.begun if fault.kind in UNDONE]
    lines = [(at_s, f"{at_s:8.3f} ----- {what}") for at_s, what in history]
    for event in swarm.trace.events:
        if event.kind in KINDS or (event.kind == "microbatch" and event.get("result") == "dropped"):
            fields = " ".join(f"{name}={value}" for name, value in event.fields.items() if value not in ("", None))
            lines.append((event.at_s, f"{event.at_s:8.3f} {event.peer} {event.kind} {fields}"))
    return [line for _, line in sorted(lines, key=lambda entry: entry[0])]


def replay(swarm: Swarm, judge: Judge[Swarm] = laws.judge) -> int:
    """Run a swarm and print the outcome. Returns 1 if it breaks a law."""
    failure, run = broken(swarm, judge), swarm.plan.manifest
    what = f"{swarm.plan.replicas}, {run.routing}, {run.outer.rule} every {run.outer.inner_steps}, {run.steps} steps"
    lines = [*timeline(swarm), f"seed {swarm.plan.seed}: {what}: {failure or 'all laws hold'}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failure else 0


def main(seed: int) -> int:
    """Replay one seed. Returns 1 if it breaks a law."""
    plan, faults = drawn(seed)
    sys.stdout.writelines(f"{fault.at_s:8.3f} planned: {words(fault)}\n" for fault in faults)
    return replay(FaultySwarm(plan, faults))


def plan_of(replicas: tuple[int, ...], *, every_steps: int = 1, **changes: object) -> SimPlan:
    """A swarm whose inner steps take about 0.7 s."""
    return SimPlan(
        manifest_for(replicas, **changes),
        replicas,
        config=config_for(checkpoint={"every_steps": every_steps}),
        link=Link(latency_s=0.005, spread=0.3),
        costs=COSTS,
        batches_factory=partial(SimBatches, unequal=True),
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
