"""A swarm that trains real weights, all replicas in one process: the simulator's nodes over torch stages and real data.

`train(Training(manifest, replicas=(8, 8), seed=1))` runs it and says what came of it. Time is the simulator's, so that
nothing here depends on the machine; torch is imported by `train` only.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.stage import Costs

CONFIG = NodeConfig.model_validate({"checkpoint": {"every_rounds": None}, "rebalance": False})
"""Of every node: no checkpoints, no moves between stages."""
BYTE_VOCABULARY = 384
"""ByT5's ids (arXiv 2105.13626, §3.1)."""


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained. Everything in `Trained` follows from it and from the data."""

    manifest: RunManifest
    """Its `seed`, `stages` and `start_replicas` are set from `seed` and `replicas`."""
    replicas: tuple[int, ...]
    """Replicas of each stage."""
    seed: int = 0
    """Of initial weights, data order, routes, pairs, device times, and lost partners."""
    streams: tuple[int, ...] | None = None
    """Data streams, dealt to the stage-0 replicas in turn; none: one for each replica. Stream i is what replica i of
    another run with the same seed reads, so that one replica with streams 0 to 7 reads what 8 replicas read."""
    stale_rounds: int = 0
    """A partner's snapshot is that of so many rounds before (of the start, when there were fewer)."""
    lost_partner: float = 0.0
    """Chance that what was pulled is lost, drawn for each replica and round: it goes alone."""
    costs: Costs = field(default_factory=Costs)
    """Virtual device seconds of every node."""
    slowness: Mapping[PeerId, float] = field(default_factory=dict)
    """Factor on a node's device seconds by peer (`s1r0`), 1.0 where it is not named."""
    link: Link = field(default_factory=Link)
    """Every link."""
    audit_dir: str | None = None
    """Where every node writes its audit files (design.md §5)."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Weight std over the replicas of a stage, exact (method.md §5), on θ before the merge where there is one."""

    stage: int
    round: int
    """Outer round; without outer rounds: inner steps // m."""
    step: int
    """Inner steps taken, the mean over the replicas, rounded."""
    std: float
    learning_rate: float
    """Of the last inner step, the mean over the replicas."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of it. Losses are nats per token."""

    validation: tuple[tuple[int, float], ...]
    """(step, mean over the stage-0 replicas) of every evaluation; fixed routes, weights not averaged."""
    final_losses: tuple[float, ...]
    """The last evaluation of each stage-0 replica, sorted by peer."""
    merged_loss: float
    """Held-out loss of the one model whose weights are the mean over the replicas of each stage, at the end."""
    training: tuple[tuple[int, float], ...]
    """(inner step, mean training loss of the stage-0 replicas)."""
    spreads: tuple[Spread, ...]
    """By round, then stage; rounds that a replica skipped are left out. Empty where every stage has one replica."""
    parameters: tuple[int, ...]
    """Of each stage's model."""
    tokens: int
    """Tokens trained on, all replicas together."""
    bytes: Mapping[str, int]
    """`activation`, `gradient`, `snapshot`: of the tensors that were used, evaluation not counted."""
    rounds: Mapping[str, int]
    """Outer rounds of all replicas by result, as the nodes tell it; those `lost` by `lost_partner` apart."""
    load: Mapping[PeerId, int]
    """Microbatches that were counted, by replica."""
    uneven: tuple[float, ...]
    """Of each stage: the most loaded replica's microbatches over the mean."""
    waiting: tuple[float, ...]
    """Of each stage: microbatches that wait at one replica's door, averaged over time and replicas."""
    busy: int
    """How often a replica refused a microbatch because it had no place."""
    rerouted: int
    """Microbatches that were sent to another replica than first chosen."""
    idle_s: Mapping[str, float]
    """Virtual seconds that replicas idled, by cause."""
    virtual_s: float
    """Virtual length of the run."""

    @property
    def validation_loss(self) -> float:
        """At the end, the mean over the stage-0 replicas."""
        return sum(self.final_losses) / len(self.final_losses)

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """By kind, per token trained on."""
        return {kind: count / self.tokens for kind, count in self.bytes.items()}

    def final_std(self, stage: int) -> float:
        """Of the last round before its merge. Raises IndexError where a stage has one replica."""
        return [spread.std for spread in self.spreads if spread.stage == stage][-1]

    def json(self) -> dict[str, Any]:
        """Everything, and `validation_loss` and `bytes_per_token`, ready for JSON: what is not finite is None."""
        told = {"validation_loss": self.validation_loss, "bytes_per_token": self.bytes_per_token}
        return {name: finite(value) for name, value in (asdict(self) | told).items()}


def small_manifest(hidden_size: int, layers: int, **changes: object) -> RunManifest:
    """A byte-level Llama (FFN four times as wide, heads of 32) on the standard library's text, stage count 1.

    `changes` are fields of RunManifest; a mapping replaces single fields of a part, `outer={"gamma": 0.1}`.
    """
    model = {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "intermediate_size": 4 * hidden_size,
        "num_attention_heads": max(1, hidden_size // 32),
        "vocab_size": BYTE_VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    told = RunManifest(stages=1).model_dump() | {"model": {"family": "llama", "config": model}}
    told |= {"sequence_length": 64, "microbatch_size": 8, "microbatches_per_step": 1}
    for name, value in changes.items():
        told[name] = {**told[name], **value} if isinstance(value, Mapping) else value
    return RunManifest.model_validate(told)


def train(plan: Training) -> Trained:
    """Run it to its end. Deterministic on one machine.

    Raises ConfigError for a model or data that do not fit, LocalError when a node stops because ten results in a row
    were not finite, Deadlock when the run hangs.
    """
    from noloco_p2p.lab.experiments.real_swarm import live

    return live(plan).told()


def finite(value: Any) -> Any:
    """The same in JSON's kinds, None where a number is not finite."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
