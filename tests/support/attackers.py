"""Replicas that send false data, in runs with real weights: two stages with 8 replicas each, in one process.

An attacker's own node and weights are honest; only what it sends to others is altered. Nodes may also come and go. Run
as a program, it prints the held-out loss of each run, and how many rounds were clipped:

    python tests/support/attackers.py STEPS SEEDS [ATTACK[*COUNT][/RULE][@FAULTS] …]
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.config import NodeConfig
from noloco_p2p.core.messages import HostTensor, PeerId
from noloco_p2p.core.snapshots import Snapshot
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.lab.experiments import real_swarm
from noloco_p2p.lab.experiments.instrumented_stage import InstrumentedStage
from noloco_p2p.lab.experiments.training import CONFIG, TrainingPlan, TrainingSummary, small_manifest
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.telemetry import Trace
from noloco_p2p.sim.world import peer_id

Change = Callable[[Tensor], Tensor]
STEP_S = {"noloco": 0.123, "averaged": 0.123, "gossip": 0.2}
"""Virtual seconds of a step, by outer rule."""


def noise(values: Tensor) -> Tensor:
    """Adds noise as large as the values, in a random direction."""
    return values + values.square().mean().sqrt() * torch.randn_like(values)


def bias(values: Tensor) -> Tensor:
    """Adds a constant offset, as large as the distance between honest replicas at the peak learning rate."""
    generator = torch.Generator().manual_seed(1)
    return values + 0.01 * torch.randn(values.shape, generator=generator, dtype=values.dtype)


CHANGES: dict[str, Change] = {
    "none": lambda values: values,
    "noise": noise,
    "flip": lambda values: -values,
    "x1000": lambda values: 1000 * values,
    "1e38": lambda values: torch.full_like(values, 1e38),
    "nan": lambda values: torch.full_like(values, torch.nan),
    "bias": bias,
    "still": torch.zeros_like,
}


class AttackingStage(InstrumentedStage):
    """The `attackers` alter their vectors (`vector-…`) or the gradients in their replies (`gradient-…`)."""

    attack: ClassVar[str] = "none"
    attackers: ClassVar[Collection[PeerId]] = ()

    def __init__(self, stage: Any, monitor: Any, me: PeerId) -> None:
        super().__init__(stage, monitor, me)
        what, _, change = self.attack.rpartition("-")
        if me not in self.attackers or change == "none":
            return
        if what == "vector":
            self.encode = self._changed_snapshot(CHANGES[change])
        else:
            self.backward = self._changed_reply(stage.backward, CHANGES[change])
            self.loss_backward = self._changed_reply(stage.loss_backward, CHANGES[change])

    def _changed_snapshot(self, change: Change) -> Callable[..., Snapshot]:
        def encode(*arguments: Any) -> Snapshot:
            sent = self.stage.encode(*arguments)
            return replace(sent, tensors=(changed(sent.tensors[0], change), *sent.tensors[1:]))

        return encode

    def _changed_reply(self, right: Callable[..., Contribution], change: Change) -> Callable[..., Contribution]:
        def reply(*arguments: Any) -> Contribution:
            done = right(*arguments)
            return done if done.grad is None else replace(done, grad=changed(done.grad, change))

        return reply


def changed(tensor: HostTensor, change: Change) -> HostTensor:
    """The tensor that is sent instead."""
    return host_tensor.from_torch(tensor.name, change(host_tensor.to_torch(tensor)))


def faults_of(kind: str, replicas: int, length_s: float, seed: int) -> tuple[Fault, ...]:
    """`churn`: eight nodes are killed one by one and come back; `partition`: the swarm is split in half for three
    tenths of the time; `restart`: all nodes are killed at once and continue from their checkpoints."""
    everybody = [peer_id(stage, replica) for stage in (0, 1) for replica in range(replicas)]
    match kind:
        case "churn":
            drawn = enumerate(random.Random(seed).sample(everybody, 8))
            return tuple(Fault(length_s * (0.15 + 0.08 * k), "bounce", (p,), length_s * 0.05) for k, p in drawn)
        case "partition":
            half = tuple(peer_id(stage, replica) for stage in (0, 1) for replica in range(replicas // 2))
            return (Fault(length_s * 0.3, "split", half, length_s * 0.3),)
        case "restart":
            return tuple(Fault(length_s * 0.4, "bounce", (peer,), length_s * 0.03) for peer in everybody)
    return ()


def train(
    attack: str, seed: int, steps: int, attackers: int = 1, replicas: int = 8, rule: str = "noloco", faults: str = ""
) -> tuple[TrainingSummary, Trace]:
    """A run in which the last `attackers` replicas of each stage attack, and its trace."""
    manifest = small_manifest(
        32,
        2,
        sequence_length=32,
        microbatch_size=2,
        microbatches_per_step=1,
        steps=steps,
        routing="random",
        inner={"peak_learning_rate": 4e-3, "warmup_steps": 10**6},
        outer={"rule": rule, "inner_steps": 1 if rule == "gossip" else 5},
        evaluation={"every_steps": None, "microbatches": 32},
    )
    liars = {peer_id(stage, replica) for stage in (0, 1) for replica in range(replicas - attackers, replicas)}
    kind = type("Attacking", (AttackingStage,), {"attack": attack, "attackers": liars})
    happens = faults_of(faults, replicas, steps * STEP_S[rule], seed)
    saves = NodeConfig.model_validate({"checkpoint": {"every_steps": 1}, "rebalance": False})
    with (
        patch.object(real_swarm, "InstrumentedStage", kind),
        patch.object(real_swarm, "SimSwarm", lambda plan: FaultySwarm(plan, happens)),
    ):
        config = saves if faults == "restart" else CONFIG
        done = real_swarm._run(TrainingPlan(manifest, (replicas, replicas), seed, config))
        return done.summary(), done.outcome.trace


def main(steps: int, seeds: int, attacks: list[str]) -> None:
    """Print a line for each attack and seed."""
    for seed in range(1, seeds + 1):
        for attack in attacks:
            rest, _, faults = attack.partition("@")
            rest, _, rule = rest.partition("/")
            name, _, count = rest.partition("*")
            began = time.process_time()
            done, trace = train(name, seed, steps, int(count or 1), rule=rule or "noloco", faults=faults)
            verdicts = Counter(str(event.get("result")) for event in trace.of("distrusted"))
            took = time.process_time() - began
            losses = f"loss {done.validation_loss:.4f} merged {done.merged_loss:.4f}"
            sys.stdout.write(f"{attack} seed {seed} {losses} {dict(done.rounds)} {dict(verdicts)} {took:.0f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or ["vector-none"])
