"""Swarms whose nodes choose their stages and move between them, with faults drawn from a seed.

    python tests/support/choosing.py SEED

replays one seed as `elastic.py` does. Here the id of a node says nothing about its stage. So faults are drawn when they
happen: a stage loses all replicas but one, and a moving node, or a replica of its new stage, is hit during the move.
"""

import asyncio
import random
import sys
from dataclasses import replace
from functools import partial

from elastic import COSTS, DRAIN_S, RULES, config_for, manifest_for, replay

from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import SimProcess
from noloco_p2p.sim.world import SimPlan, peer_id

ON_THE_WAY = ("bounce", "wipe", "pause", "hang", "leave", "mates")
"""What happens to a node that moves; `mates`: it happens to a replica of its new stage."""


class ChoosingSwarm(FaultySwarm):
    """A swarm whose faults are drawn while it runs."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"choosing {seed}")
        plan, faults = self._drawn(seed)
        super().__init__(plan, faults)
        self.at(self._rng.uniform(4.0, 6.0), self._thin_out)
        self.struck: list[str] = []
        """What happened to nodes that moved."""

    def _drawn(self, seed: int) -> tuple[SimPlan, tuple[Fault, ...]]:
        rng = self._rng
        nodes = rng.randint(7, 8)
        manifest = manifest_for(
            (nodes, 0),
            seed=seed,
            steps=32,
            start_replicas=1,
            routing=rng.choice(["random", "weighted", "balanced"]),
            outer={"deadline_s": 3.0} | RULES[seed % len(RULES)],
        )
        costs = tuple(replace(COSTS, forward_s=0.05 * by, backward_s=0.1 * by) for by in (1.0, rng.choice([1.5, 2.0])))
        plan = SimPlan(
            manifest,
            (nodes, 0),
            seed=seed,
            config=config_for(checkpoint={"every_steps": rng.choice([1, 8])}),
            link=Link(latency_s=0.005, spread=0.3),
            costs=costs,
            view_age_s=rng.choice([0.0, 0.5]),
            batches_factory=partial(SimBatches, unequal=True),
            chooses_stage=True,
        )
        arrives = Fault(rng.uniform(5.0, 20.0), "arrive", (peer_id(0, nodes),))
        bounces = Fault(rng.uniform(3.0, 20.0), "bounce", (peer_id(0, rng.randrange(nodes)),), rng.uniform(0.5, 8.0))
        return plan, (arrives, bounces)

    def start(self, stage: int, replica: int) -> None:
        """As in `FaultySwarm`. When the node moves, something may happen to it."""
        super().start(stage, replica)
        process = self.processes[-1]
        record = process.ports.telemetry.event

        def event(kind: str, /, **fields: object) -> None:
            record(kind, **fields)
            if kind == "moved" and not process.crashed and len(self.struck) < 2:
                what, delay_s = self._rng.choice(ON_THE_WAY), self._rng.choice([0.0, self._rng.uniform(0.0, 3.0)])
                self.struck.append(what)
                asyncio.get_running_loop().call_later(delay_s, self._strike_mover, what, process)

        process.ports.telemetry.event = event  # type: ignore[method-assign]

    def _training(self, stage: object) -> list[SimProcess]:
        last = {one.peer: one for one in self.processes}.values()
        return [one for one in last if one.running and one.stage == stage and one.state == "training"]

    def _thin_out(self) -> None:
        """Crash all replicas of a stage but one, for good."""
        fewest = min((self._training(stage) for stage in (0, 1)), key=len)
        for process in fewest[1:]:
            self._hit("crash", process, 0.0)

    def _strike_mover(self, what: str, mover: SimProcess) -> None:
        for_s, stage = self._rng.uniform(0.5, 6.0), mover.trace.of("moved")[-1].get("stage")
        if what != "mates":
            self._hit(what, mover, for_s + (DRAIN_S if what == "leave" else 0.0))
        elif mates := [one for one in self._training(stage) if one is not mover]:
            self._hit("bounce", self._rng.choice(mates), for_s)

    def _hit(self, kind: str, process: SimProcess, for_s: float) -> None:
        if process.running:
            loop = asyncio.get_running_loop()
            fault = Fault(loop.time(), kind, (process.peer,), for_s)
            self._begin(fault)
            loop.call_later(for_s, self._end, fault)


if __name__ == "__main__":
    sys.exit(replay(ChoosingSwarm(int(sys.argv[1]))))
