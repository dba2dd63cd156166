"""Replicas that lie, in runs with real weights: two stages with 8 replicas each, in one process.

An attacker's own node and weights are honest; only what it tells others is altered. Nodes may also come and go. Run as
a program, it prints for each run the held-out loss of the honest replicas and of their mean weights, what all nodes say
it is, the inner steps of stage 0, when the last one ended, and how many rounds were clipped:

    python tests/support/attackers.py STEPS SEEDS [ATTACK[*COUNT][/RULE][%ROUTING][+long][@FAULTS] …]

An attack is `none`, `silence`, `busy`, or WHAT-CHANGE: what is altered (TENSORS or FIELDS), and how (CHANGES). Several
are joined by commas.
"""

import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from liars import REFUSALS, LiarSwarm
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.config import NodeConfig
from noloco_p2p.core.messages import HostTensor, PeerId
from noloco_p2p.core.snapshots import FrozenRound, Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import Contribution
from noloco_p2p.lab.experiments import real_swarm
from noloco_p2p.lab.experiments.instrumented_stage import InstrumentedStage
from noloco_p2p.lab.experiments.real_swarm import FinishedTraining
from noloco_p2p.lab.experiments.training import CONFIG, TrainingPlan, small_manifest
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.faults import Fault
from noloco_p2p.sim.telemetry import Trace
from noloco_p2p.sim.world import SimPlan, peer_id

Change = Callable[[Any], Any]
STEP_S = {"noloco": 0.123, "averaged": 0.123, "gossip": 0.16}
"""Virtual seconds of a step, by outer rule."""


def noise(values: Tensor) -> Tensor:
    """Adds noise as large as the values, in a random direction."""
    return values + values.square().mean().sqrt() * torch.randn_like(values)


def bias(values: Tensor) -> Tensor:
    """Adds a constant offset, as large as the distance between honest replicas at the peak learning rate."""
    generator = torch.Generator().manual_seed(1)
    return values + 0.01 * torch.randn(values.shape, generator=generator, dtype=values.dtype)


CHANGES: dict[str, Change] = {
    "noise": noise,
    "flip": lambda values: -values,
    "x1000": lambda values: 1000 * values,
    "x0.001": lambda values: 0.001 * values,
    "1e38": lambda values: torch.full_like(values, 1e38),
    "nan": lambda values: torch.full_like(values, torch.nan),
    "bias": bias,
    "still": lambda values: 0 * values,
}
"""What becomes of a tensor, or of a number."""


def spikes(values: Tensor) -> Tensor:
    """One value in 4,096, at a random place."""
    return torch.zeros_like(values).index_fill_(0, torch.randint(len(values), (1 + len(values) // 4096,)), 1.0)


FAR: dict[str, Change] = {"far": torch.randn_like, "spikes": spikes}
"""Directions in which a vector is moved as far as it may."""
TENSORS = {"vector": ("encode",), "hidden": ("forward",), "gradient": ("backward", "loss_backward")}
"""Methods of a stage whose results are sent to others."""
FIELDS = {
    "labels": ("step",),
    "rounds": ("outer_round", "round"),
    "speeds": ("microbatches_per_s", "capacity_per_s", "steps_per_s"),
    "holds": ("holds",),
    "losses": ("loss_sum",),
    "tokens": ("tokens",),
}
"""Fields that are altered wherever they occur: in adverts, descriptions, labels, snapshots, states and replies."""


@dataclass(frozen=True, slots=True)
class Attack:
    """Who lies, and how, in what kind of run."""

    name: str
    count: int = 1
    """How many replicas of each stage lie: the last ones."""
    rule: str = "noloco"
    routing: str = "random"
    long: bool = False
    """Whether a step takes 2 s and not 0.08 s, and replicas train on while a partner's vector is in transit."""
    faults: str = ""
    """See `faults_of`."""

    @classmethod
    def of(cls, text: str) -> "Attack":
        """From `ATTACK[*COUNT][/RULE][%ROUTING][+long][@FAULTS]`."""
        parts = re.fullmatch(r"([^*/%+@]+)(?:\*(\d+))?(?:/(\w+))?(?:%(\w+))?(\+long)?(?:@(\w+))?", text)
        assert parts is not None, f"{text!r} is no attack"
        name, count, rule, routing, long, faults = parts.groups()
        return cls(name, int(count or 1), rule or "noloco", routing or "random", bool(long), faults or "")

    @property
    def lies(self) -> list[str]:
        """What the liars do."""
        return self.name.split(",")

    def changes(self, kinds: dict[str, tuple[str, ...]]) -> dict[str, Change]:
        """The methods or fields of these `kinds` that the liars alter, and how."""
        lies = [lie.partition("-") for lie in self.lies]
        changed = [(what, CHANGES[how]) for what, _, how in lies if how not in FAR and what in kinds]
        return {name: change for what, change in changed for name in kinds[what]}


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended. Losses are on held-out text, in nats per token, of the replicas that do not lie."""

    done: FinishedTraining
    loss: float
    """Of replica i of each stage together, the mean over all i."""
    merged: float
    """Of their mean weights."""

    @classmethod
    def of(cls, done: FinishedTraining, liars: Collection[PeerId]) -> "Result":
        """The losses of a run, computed here, because a liar's replies to evaluations may be false."""
        honest = [[node for node in nodes if node.peer not in liars] for nodes in done.stages]
        replicas = [[real_swarm._torch_stage(node) for node in nodes] for nodes in zip(*honest, strict=True)]
        losses = [real_swarm._held_out_loss(stages, done.held_out) for stages in replicas]
        return cls(done, fmean(losses), real_swarm._merged_loss(honest, done.held_out))

    @property
    def trace(self) -> Trace:
        """What happened."""
        return self.done.outcome.trace

    @property
    def said(self) -> list[float]:
        """The held-out losses that the nodes of stage 0 report, sorted."""
        return sorted(event.number("loss") for event in self.trace.of("evaluation"))

    def __str__(self) -> str:
        steps = [event.at_s for event in self.trace.of("inner_step") if event.peer.startswith("s0")]
        rounds, verdicts = (
            dict(Counter(str(event.get("result")) for event in self.trace.of(kind)))
            for kind in ("outer_round", "distrusted")
        )
        said = f"said {fmean(self.said):.4f} median {median(self.said):.4f}"
        losses, times = f"loss {self.loss:.4f} merged {self.merged:.4f} {said}", f"{len(steps)} in {max(steps):.1f} s"
        return f"{losses} {times} {rounds} {verdicts}"


class AttackingStage(InstrumentedStage):
    """The `liars` alter the tensors that they send."""

    attack: ClassVar[Attack]
    liars: ClassVar[Collection[PeerId]]

    def __init__(self, stage: Any, monitor: Any, me: PeerId) -> None:
        super().__init__(stage, monitor, me)
        for name, change in self.attack.changes(TENSORS).items() if me in self.liars else ():
            setattr(self, name, self._lying(getattr(stage, name), change))
        for direction in (FAR[how] for lie in self.attack.lies if (how := lie.partition("-")[2]) in FAR):
            if me in self.liars:
                self.encode = self._far_snapshot(direction)

    def _lying(self, right: Callable[..., Any], change: Change) -> Callable[..., Any]:
        return lambda *arguments: with_tensor(right(*arguments), change)

    def _far_snapshot(self, direction: Change) -> Callable[..., Snapshot]:
        """Its own vector is moved in this direction, by 0.9 times as much as its guard accepts without clipping.
        Unlike the other changes this works in every codec."""

        def encode(frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
            if request.weights is not None or not frozen.radii:
                return self.stage.encode(frozen, request, caller)
            vector = host_tensor.to_torch(frozen.vector).clone()
            for group, radius in enumerate(frozen.radii):
                places = [values for one, values in self.stage._codec._guard._tensors if one == group]
                moved = direction(torch.cat([vector[one] for one in places]))
                moved *= 0.9 * radius / moved.norm()
                for one, part in zip(places, torch.split(moved, [one.stop - one.start for one in places]), strict=True):
                    vector[one] += part
            return self.stage.encode(replace(frozen, vector=host_tensor.from_torch("vector", vector)), request, caller)

        return encode


def with_tensor(sent: Any, change: Change) -> Any:
    """The result of a stage's method with another tensor."""
    match sent:
        case HostTensor():
            return host_tensor.from_torch(sent.name, change(host_tensor.to_torch(sent)))
        case Snapshot():
            return replace(sent, tensors=(with_tensor(sent.tensors[0], change), *sent.tensors[1:]))
        case Contribution():
            return sent if sent.grad is None else replace(sent, grad=with_tensor(sent.grad, change))
    graph, hidden = sent
    return graph, with_tensor(hidden, change)


def altered(value: Any, change: Change) -> Any:
    """Another number, or a list of weights held with other rounds and steps."""
    if isinstance(value, tuple):
        return tuple(held._replace(round=change(held.round), step=change(held.step)) for held in value)
    return change(value)


class LyingSwarm(LiarSwarm):
    """The liars of an attack."""

    def __init__(self, plan: SimPlan, faults: tuple[Fault, ...], attack: Attack, liars: Collection[PeerId]) -> None:
        super().__init__(plan, faults)
        self.liars, self.refuses = liars, next((lie for lie in attack.lies if lie in REFUSALS), "")
        self.false = {name: partial(altered, change=change) for name, change in attack.changes(FIELDS).items()}


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


def train(attack: str, seed: int, steps: int, replicas: int = 8) -> Result:
    """A run with liars. `attack`: see `Attack.of`."""
    torch.manual_seed(seed)  # for the noise
    lies = Attack.of(attack)
    rule, slower = lies.rule, 25 if lies.long else 1
    manifest = small_manifest(
        32,
        2,
        sequence_length=32,
        microbatch_size=2,
        microbatches_per_step=1,
        steps=steps,
        routing=lies.routing,
        inner={"peak_learning_rate": 4e-3, "warmup_steps": 10**6},
        outer={"rule": rule, "inner_steps": 1 if rule == "gossip" else 5, "overlap": lies.long},
        evaluation={"every_steps": None, "microbatches": 32},
    )
    liars = {peer_id(stage, replica) for stage in (0, 1) for replica in range(replicas - lies.count, replicas)}
    kind = type("Attacking", (AttackingStage,), {"attack": lies, "liars": liars})
    happens = faults_of(lies.faults, replicas, steps * STEP_S[rule] * slower, seed)
    saves = NodeConfig.model_validate({"checkpoint": {"every_steps": 1}, "rebalance": False})
    costs = Costs(*(slower * seconds for seconds in (0.01, 0.02, 0.005, 0.005)))
    with (
        patch.object(real_swarm, "InstrumentedStage", kind),
        patch.object(real_swarm, "SimSwarm", lambda plan: LyingSwarm(plan, happens, lies, liars)),
    ):
        config = saves if lies.faults == "restart" else CONFIG
        plan = TrainingPlan(manifest, (replicas, replicas), seed, config, costs=costs)
        return Result.of(real_swarm._run(plan), liars)


def main(steps: int, seeds: int, attacks: list[str]) -> None:
    """Print a line for each attack and seed."""
    for seed in range(1, seeds + 1):
        for attack in attacks:
            began = time.process_time()
            sys.stdout.write(f"{attack} seed {seed} {train(attack, seed, steps)}")
            sys.stdout.write(f" {time.process_time() - began:.0f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or ["none"])
