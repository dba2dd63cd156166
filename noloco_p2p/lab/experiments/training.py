"""Plans of the experiments' simulated swarms, and summaries of those that train real weights. Does not import torch.

`real_swarm.train(TrainingPlan(manifest, replicas=(8, 8), seed=1))` runs a plan: the simulator's nodes over torch stages
and real data, all replicas in one process. Time is the simulator's, so nothing depends on the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from noloco_p2p.config import DirectorySettings, NodeConfig, RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.io.data.corpora import Corpus
from noloco_p2p.sim.world import SimPlan, SimSwarm

CONFIG = NodeConfig.model_validate({"checkpoint": {"every_steps": None}, "rebalance": False})
"""Settings of every node: no checkpoints, no moves between stages."""
FOREVER_S = 1e5
"""More virtual seconds than anything takes."""
STAYS = NodeConfig.model_validate(
    # Constructed, not validated, because settings do not allow adverts to live so long.
    {"directory": DirectorySettings.model_construct(ttl_s=FOREVER_S), "limits": {"linger_s": FOREVER_S}}
    | {"checkpoint": {"every_steps": None}}
)
"""Settings of nodes that have time: one that has finished stays until all others have pulled from it."""
BYTE_VOCABULARY = 384
"""Number of ByT5's ids (arXiv 2105.13626, §3.1)."""


@dataclass(frozen=True, slots=True)
class TrainingPlan(SimPlan):
    """What to train. Together with the data it determines the whole `TrainingSummary`.

    The manifest's `seed`, `stages` and `start_replicas` are set from `seed` and `replicas`: one seed for the world, and
    for initial weights, data order, routes, pairs, and lost partners.
    """

    config: NodeConfig = CONFIG
    gradient_audit: bool = False
    """False: every microbatch is sent once, so that runs with equally many tokens have read the same text."""
    streams: tuple[int, ...] | None = None
    """Data streams, assigned to the stage-0 replicas in turn; None: one per replica. Stream i is what replica i of
    another run with the same seed reads, so one replica with streams 0 to 7 reads what 8 replicas read."""
    corpora: tuple[Corpus, ...] = ()
    """Kinds of text, one for each data stream, with equal parts in the held-out text; empty: the standard library."""
    mixed: bool = False
    """Deal the streams to the stage-0 replicas anew for every microbatch, so that each reads all of them over time."""
    noise: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each stage (inner step, standard deviation): at every step up to that one each replica computes its gradients
    at θ plus noise of its own, Gaussian and of this size. For rules that exchange gradients; empty: no noise."""
    stale_rounds: int = 0
    """A partner's snapshot is from this many rounds before (the initial one if there were fewer)."""
    lost_partner: float = 0.0
    """Probability that a pull is lost and the replica goes alone, drawn for each replica and round."""
    audit_dir: str | None = None
    """Directory for the audit files of every node (ARCHITECTURE.md, "Files")."""


@dataclass(frozen=True, slots=True)
class ReplicaSpread:
    """Exact weight std over the replicas of a stage (METHOD.md, "Measures"), on θ before the merge if there is one."""

    stage: int
    round: int
    """Outer round; without outer rounds: inner steps // m."""
    step: int
    """Inner steps taken, the mean over the replicas, rounded."""
    std: float
    learning_rate: float
    """Learning rate of the last inner step, the mean over the replicas."""


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """Results of a run. Losses are in nats per token."""

    final_losses: tuple[float, ...]
    """The last evaluation of each stage-0 replica, sorted by peer; fixed routes, weights not averaged."""
    merged_loss: float
    """Final held-out loss of the model whose weights are the mean over the replicas of each stage."""
    training: tuple[tuple[int, float], ...]
    """(inner step, mean training loss of the stage-0 replicas)."""
    spreads: tuple[ReplicaSpread, ...]
    """By round, then stage, without rounds that a replica skipped. Empty if every stage has one replica."""
    parameters: tuple[int, ...]
    """Parameters of each stage."""
    tokens: int
    """Tokens trained on by all replicas together."""
    bytes: Mapping[str, int]
    """`activation`, `gradient`, `snapshot`: bytes of the tensors that were used, without evaluation."""
    rounds: Mapping[str, int]
    """Outer rounds of all replicas by result, as the nodes report it; those `lost` by `lost_partner` separately."""
    asked_again: int
    """Chunks of partners' vectors that arrived wrong (METHOD.md, "Codecs of outer rounds"); each time is counted."""
    delays: tuple[tuple[int, int], ...]
    """(inner steps trained while a round was open, how often), over the rounds of all replicas."""
    load: Mapping[PeerId, int]
    """Counted microbatches by replica."""
    uneven: tuple[float, ...]
    """For each stage: the most loaded replica's microbatches over the mean."""
    waiting: tuple[float, ...]
    """For each stage: microbatches waiting for admission at one replica, averaged over time and replicas."""

    @property
    def validation_loss(self) -> float:
        """Final validation loss, the mean over the stage-0 replicas."""
        return sum(self.final_losses) / len(self.final_losses)

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Bytes per token trained on, by kind."""
        return {kind: count / self.tokens for kind, count in self.bytes.items()}

    def finite_spreads(self, stage: int) -> list[ReplicaSpread]:
        """The finite spreads of a stage, by round."""
        return [spread for spread in self.spreads if spread.stage == stage and isfinite(spread.std)]

    def figures(self, *names: str) -> dict[str, Any]:
        """The figures with these names."""
        return {name: getattr(self, name) for name in names}


def small_manifest(hidden_size: int, layers: int, **changes: object) -> RunManifest:
    """A byte-level Llama (FFN four times as wide, heads of 32) on the standard library's text, stage count 1, balanced
    routes, evaluated at the end only.

    `changes` are fields of RunManifest; a mapping replaces only the fields that it names, as in `outer={"gamma": 0.1}`.
    Rounds are waited for, so that only what is varied has an effect.
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
    fields = RunManifest(stages=1).model_dump() | {"model": {"family": "llama", "config": model}}
    fields |= {"sequence_length": 64, "microbatch_size": 8, "microbatches_per_step": 1, "routing": "balanced"}
    # The rest are defaults, but for a warm-up of a tenth of the steps, at which its length is capped.
    fields |= {"inner": {"optimizer": "adamw", "warmup_steps": 10**6}, "outer": {"rule": "noloco", "overlap": False}}
    for name, value in [("evaluation", {"every_steps": None, "microbatches": 16}), *changes.items()]:
        fields[name] = {**fields[name], **value} if isinstance(value, Mapping) else value
    return RunManifest.model_validate(fields)


def sized_manifest(settings: Mapping[str, Any], inner: Mapping[str, Any], **changes: object) -> RunManifest:
    """`small_manifest` for a case with `hidden`, `layers` and `steps`: four samples in a microbatch."""
    size = {"microbatch_size": 4, "steps": settings["steps"], "inner": inner}
    return small_manifest(settings["hidden"], settings["layers"], **size, **changes)


def one_layer_manifest(settings: Mapping[str, Any], **changes: object) -> RunManifest:
    """`small_manifest` of one layer for a case with these sizes among its settings."""
    size = {name: settings[name] for name in ("sequence_length", "microbatch_size")}
    return small_manifest(settings["hidden_size"], 1, **size, **changes)


def timing_swarm(replicas: tuple[int, ...], seed: int, run: Mapping[str, Any], **world: Any) -> SimSwarm:
    """A swarm with as little computation as possible; rounds are waited for. `run`: fields of RunManifest, `outer`
    among them; `world`: fields of SimPlan, by default with STAYS."""
    least = {"sequence_length": 1, "microbatch_size": 1, "microbatches_per_step": 1}
    evaluation = {"every_steps": None, "microbatches": 1}
    fields = {"stages": len(replicas), "start_replicas": min(replicas), "seed": seed, "evaluation": evaluation}
    outer = {"rule": "noloco", "overlap": False} | run["outer"]
    manifest = RunManifest.model_validate({**least, **fields, **run, "outer": outer})
    return SimSwarm(SimPlan(manifest, replicas, seed, **{"config": STAYS, **world}))
