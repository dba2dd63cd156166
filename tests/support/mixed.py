"""Swarms of every shape and outer rule with every kind of fault, drawn from a seed.

    python tests/support/mixed.py SEED [UNTIL]

replays one seed as `elastic.py` does, or runs all seeds from SEED to UNTIL and prints those that break a law.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from elastic import COSTS, DRAIN_S, config_for, manifest_for, replay
from lawful import Judge, Swarm, broken

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.timeouts import CAPTURE_S
from noloco_p2p.sim import laws
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.links import Access, Geography, Link, MessageSizes
from noloco_p2p.sim.world import SimPlan, peer_id

RULES = (
    {"rule": "noloco", "inner_steps": 4},
    {"rule": "noloco", "inner_steps": 6, "overlap": False},
    {"rule": "averaged", "inner_steps": 3},
    {"rule": "gossip", "inner_steps": 1},
    {"rule": "gossip", "inner_steps": 1, "overlap": False},
    {"rule": "gossip", "inner_steps": 3},
    {"rule": "diloco", "inner_steps": 4},
    {"rule": "dct", "inner_steps": 4},
    {"rule": "sync"},
)
KINDS = {
    "bounce": 20,
    "wipe": 6,
    "crash": 5,
    "depart": 3,
    "arrive": 8,
    "leave": 8,
    "hang": 8,
    "mute": 6,
    "pause": 6,
    "stop": 8,
    "slow": 6,
    "cut": 8,
    "one_way": 8,
    "split": 5,
    "stage": 5,
    "all": 3,
}
"""Kind of fault → its weight; `stage` and `all` restart all nodes of a stage, or all nodes."""
MOST_NODES, SLOWEST = 11, 3.0
BODIES = (20_000, 200_000, 2_000_000)
"""Bytes of an activation, where lines are slow."""


def nodes_of(replicas: tuple[int, ...]) -> list[PeerId]:
    """The nodes with which a swarm starts, in order."""
    return [peer_id(stage, i) for stage, count in enumerate(replicas) for i in range(count)]


def drawn(seed: int) -> FaultySwarm:
    """See `drawn_as`."""
    return drawn_as(FaultySwarm, seed)


def drawn_as(kind: type[Swarm], seed: int) -> Swarm:
    """A swarm with two to nine faults. In one of four, nodes choose their stage; one of four is on slow lines."""
    rng = random.Random(f"mixed {seed}")
    replicas: tuple[int, ...] = ()
    while not 1 < sum(replicas) <= MOST_NODES:
        replicas = tuple(rng.randint(1, 4) for _ in range(rng.choice([1, 2, 2, 3, 3, 4])))
    outer = {"deadline_s": rng.choice([1.0, 3.0, 8.0])} | rng.choice(RULES)
    # Replicas that get unequal numbers of microbatches do not stay together under `sync`.
    routing = "balanced" if outer["rule"] == "sync" else rng.choice(["random", "weighted", "balanced", "fixed"])
    manifest = manifest_for(
        replicas,
        seed=seed,
        steps=rng.randint(8, 30),
        start_replicas=1,
        routing=routing,
        microbatches_per_step=rng.randint(1, 5),
        outer=outer,
        evaluation={"every_steps": rng.choice([None, 12]), "microbatches": 2},
    )
    by, lost = rng.choice([0.5, 1.0, 2.0]), rng.choice([0.0, 0.0, 0.01])
    costs = replace(COSTS, forward_s=by * COSTS.forward_s, backward_s=by * COSTS.backward_s)
    plan = SimPlan(
        manifest,
        replicas,
        seed=seed,
        config=config_for(checkpoint={"every_steps": rng.choice([1, 8, 100])}),
        link=Link(latency_s=rng.choice([0.002, 0.005, 0.05]), spread=0.3, reply_loss=lost, request_loss=lost),
        costs=costs,
        slowness={peer: SLOWEST for peer in nodes_of(replicas) if rng.random() < 0.1},
        view_age_s=rng.choice([0.0, 0.0, 0.5]),
        batches_factory=partial(SimBatches, unequal=True),
        torn_by_crash=rng.random() < 0.5,
    )
    faults = sorted(_faults(rng, replicas), key=lambda fault: fault.at_s)
    # One slow replica may have to serve the microbatches of all origins, and a rule of all replicas waits for the last.
    microbatch_s = 1.3 * SLOWEST * (costs.forward_s + costs.backward_s)
    gap_s = 2 * manifest.microbatches_per_step * replicas[0] * microbatch_s
    if manifest.outer.update.common:  # a replica that must copy another one waits long for an answer that is lost
        gap_s += 3 * manifest.outer.deadline_s + (CAPTURE_S if lost else 0.0)
    if rng.random() < 0.25:
        plan = replace(plan, chooses_stage=True)
    if rng.random() < 0.25:
        plan, lines_s = _on_slow_lines(plan, rng)
        gap_s += lines_s
    swarm = kind(plan, tuple(faults), limit_s=1500.0 + 20.0 * gap_s)
    swarm.gap_s += gap_s
    return swarm


def _on_slow_lines(plan: SimPlan, rng: random.Random) -> tuple[SimPlan, float]:
    """The plan on lines that need some time for a body, and by how much they may delay an inner step, in seconds."""
    nbytes, body_s = rng.choice(BODIES), rng.choice([0.01, 0.05, 0.2, 0.6])
    rate, snapshot = nbytes / body_s, rng.choice([1, 3, 10]) * nbytes
    up, faster_down, capped = rng.choice([rate, rate, None]), rng.choice([1, 2]), rng.random() < 0.15
    link = replace(
        plan.link,
        latency_s=rng.choice([0.002, 0.02, 0.1]),
        bytes_per_s=rng.choice([None, rate]),
        slow_start_after_idle=rng.random() < 0.7,
        loss=rng.choice([0.0, 0.0, 1e-4]),
    )
    geography = Geography(
        link,
        each=Access(up, up and faster_down * up),
        access_spread=rng.choice([0.0, 0.4]),
        seed=plan.seed,
        cap=Access(rate, rate) if capped else Access(),
    )
    stages = plan.manifest.stages
    sizes = MessageSizes(nbytes, nbytes, stages * (snapshot,), stages * (4 * snapshot,), stages * (8 * snapshot,))
    limits = plan.config.limits.model_copy(update={"microbatch_deadline_s": 60.0})
    config, outer = plan.config.model_copy(update={"limits": limits}), plan.manifest.outer
    bodies = 40 * plan.manifest.microbatches_per_step * plan.replicas[0]
    lines_s = bodies * body_s + 100 * snapshot / rate + 3 * outer.deadline_s
    return replace(plan, link=link, geography=geography, sizes=sizes, config=config), lines_s


def _faults(rng: random.Random, replicas: tuple[int, ...]) -> list[Fault]:
    """At most one node of each stage is lost for good, and never the only one."""
    stages = [[peer_id(stage, i) for i in range(count)] for stage, count in enumerate(replicas)]
    everybody = [peer for stage in stages for peer in stage]
    gone, places, faults = set[PeerId](), list(replicas), []
    for _ in range(rng.randint(2, 9)):
        at_s = rng.uniform(*rng.choice([(0.1, 4.0), (1.0, 16.0), (1.0, 16.0), (10.0, 40.0)]))
        stage = rng.choice(stages)
        peer = rng.choice(stage)
        others = [one for one in everybody if one != peer]
        kind, for_s = rng.choices([*KINDS], [*KINDS.values()])[0], rng.uniform(0.5, 14.0)
        match kind:
            case "bounce" | "wipe" | "hang" | "mute" | "pause" | "stop":
                faults.append(Fault(at_s, kind, (peer,), for_s))
            case "slow":
                faults.append(Fault(at_s, kind, (peer,), for_s, rng.choice([2.0, 5.0])))
            case "leave":
                faults.append(Fault(at_s, kind, (peer,), DRAIN_S + for_s))
            case "crash" | "depart" if len(stage) > 1 and not gone & set(stage):
                gone.add(peer)
                faults.append(Fault(max(3.0, at_s), kind, (peer,)))
            case "arrive":
                index = stages.index(stage)
                faults.append(Fault(at_s, kind, (peer_id(index, places[index]),)))
                places[index] += 1
            case "cut":
                faults.append(Fault(at_s, kind, (peer, rng.choice(others)), for_s))
            case "one_way":
                cut_off = rng.sample(others, rng.randint(1, len(others)))
                faults.append(Fault(at_s, kind, (peer, *sorted(cut_off)), for_s))
            case "split":
                part = rng.sample(everybody, rng.randint(1, max(1, len(everybody) // 2)))
                faults.append(Fault(at_s, kind, tuple(sorted(part)), for_s))
            case "stage" | "all":
                lost = 0.3 * (rng.random() < 0.5)
                for each in stage if kind == "stage" else everybody:
                    again = "wipe" if rng.random() < lost else "bounce"
                    faults.append(Fault(at_s, again, (each,), for_s / 2 + rng.uniform(0.0, 2.0)))
    return faults


def main(drawn: Callable[[int], Swarm], judge: Judge[Swarm], seed: int, until: int | None = None) -> int:
    """Replay one seed, or run all up to `until`. Returns 1 if a law is broken."""
    if until is None:
        return replay(drawn(seed), judge)
    sound = True
    for one in range(seed, until):
        if failure := broken(drawn(one), judge):
            sound = False
            sys.stdout.write(f"seed {one}: {failure}\n")
            sys.stdout.flush()
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main(drawn, laws.judge, *map(int, sys.argv[1:])))
