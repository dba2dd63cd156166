"""The two kinds of settings: `RunManifest`, equal on all nodes and hashed into the run id, and `NodeConfig`, local.

One flat YAML file may hold both; no key belongs to both. `launch/settings.py` reads files, the environment and the
command line; here are only the values and their checks. A manifest comes from strangers: it names no local path and
is bounded in size.
"""

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from noloco_p2p.core import outer_update as outer_mathematics
from noloco_p2p.core.block_format import WireCodec
from noloco_p2p.core.hours import SPAN, one_or_more
from noloco_p2p.core.lattice_format import OuterCodec

MANIFEST_LIMIT_BYTES = 65_536
"""A manifest in canonical JSON is refused above this size."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
HubName = Annotated[str, Field(pattern=f"^{HUB_NAME.pattern}$")]


class Settings(BaseModel):
    """Frozen values; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class ModelSettings(Settings):
    """The model, in the terms of Hugging Face transformers."""

    family: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")] = "llama"
    """Model type of transformers (llama, gpt2, qwen3, …); it must pass the split self-test at start."""
    config: dict[str, bool | int | float | str | list[bool | int | float | str | None] | None] = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "vocab_size": 384,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    """Fields of the family's configuration class; a field that is left out has the default of that class."""


class DataSettings(Settings):
    """What the swarm trains on. Local paths are in the node's `data_files`."""

    kind: Literal["stdlib", "text", "c4", "parquet"] = "stdlib"
    """`stdlib`: the running Python's own library; `text`: files; `c4`: JSON lines with `text`; `parquet`: token ids."""
    dataset: HubName | None = None
    """Name of a data set on the Hugging Face hub, read as a stream; none: the node reads its `data_files`."""
    subset: HubName | None = None
    """Configuration name of the hub data set (for C4: `en`)."""
    tokenizer: HubName = "bytes"
    """`bytes` (ByT5's 384 ids, no file) or a hub name for AutoTokenizer; the node's `tokenizer_dir` replaces it."""


class InnerSettings(Settings):
    """The inner optimizer, AdamW on the fast weights, and its schedule (METHOD.md, "Inner step")."""

    peak_learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Learning rate at the end of the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    """Length of the linear warm-up in steps, at most a tenth of `steps`."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate of the last step, as a fraction of the peak (cosine in between)."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of Adam's second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's ε."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients of a stage are clipped to this L2 norm."""


class OuterSettings(Settings):
    """The outer round (METHOD.md, "Outer round")."""

    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """α, the outer momentum."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.7
    """β, the outer learning rate."""
    gamma: Finite = 0.7
    """γ, the pull towards the partner's weights; must satisfy S1: 0 < γ < 2(1−α²)."""
    inner_steps: Positive = 10
    """m: clock steps from one outer round to the next."""
    pairing: Literal["matched", "random", "none"] = "matched"
    """How partners are drawn: `matched` in pairs, `random` by each replica for itself; `none`: no outer rounds."""
    max_stale_rounds: Annotated[int, Field(ge=0)] = 2
    """A snapshot from up to this many rounds away is still merged."""
    partner_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Longest wait for a partner behind the round, seconds; none: two inner steps, of device time if training waits."""
    deadline_s: Seconds = 60.0
    """Longest transfer of one snapshot, seconds."""
    codec: OuterCodec = "full"
    """How a vector travels: `full`, `bfloat16`, `int8` or `int4`: 4, 2, 1 or half a byte a parameter (METHOD.md)."""
    overlap: bool = True
    """Train on while the partner's snapshot is on its way; what is trained meanwhile is kept. `false`: wait for it."""
    allow_unstable: bool = False
    """Accept α and γ that violate the stability bound S1 (for experiments)."""


class WireSettings(Settings):
    """How hidden states and gradients travel between stages (`core/block_format`)."""

    forward: WireCodec = "float32"
    """Hidden states: element type, or codes with a scale for each block: `int8` (8.25 bits a value), `int4` (4.5)."""
    backward: WireCodec = "float32"
    """Their gradients, likewise."""


class EvaluationSettings(Settings):
    """Validation on held-out data."""

    every_steps: Positive | None = 250
    """Steps between evaluations; none: only one, at the end."""
    microbatches: Positive = 16
    """Held-out microbatches per evaluation; every node uses the same ones."""


class RunManifest(Settings):
    """The immutable settings of a run: equal on all nodes; their hash is the run id."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "tiny"
    """Name of the run for people; it names the directory of `noloco swarm`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of initial weights, data order, routes and pairs."""
    start_replicas: Positive = 2
    """Replicas that every stage must have before step 1."""
    stages: Positive = 2
    """Pipeline stages; the layers are split over them contiguously and evenly."""
    model: ModelSettings = ModelSettings()
    """The model."""
    data: DataSettings = DataSettings()
    """The data."""
    sequence_length: Positive = 128
    """T: input tokens per sample."""
    microbatch_size: Positive = 4
    """B: samples per microbatch."""
    microbatches_per_step: Positive = 2
    """Microbatches that each stage-0 replica reads per inner step."""
    steps: Positive = 1000
    """Length of the run in clock steps."""
    inner: InnerSettings = InnerSettings()
    """The inner optimizer."""
    outer: OuterSettings = OuterSettings()
    """The outer round."""
    routing: Literal["random", "weighted", "balanced", "fixed"] = "random"
    """Choice of the next replica: at random, also by its speed, in even turns from the seed, or always the same."""
    wire: WireSettings = WireSettings()
    """Hidden states and gradients on the wire."""
    compute_dtype: Literal["float64", "float32"] = "float32"
    """Element type of weights, Adam's moments, φ, δ and what travels for a round."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Validation."""

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, values: Any) -> Any:
        """A manifest of before `wire` has one `wire_dtype` for both directions."""
        if isinstance(values, dict) and "wire_dtype" in values:
            both = dict.fromkeys(WireSettings.model_fields, values["wire_dtype"])
            values = {"wire": both} | {key: value for key, value in values.items() if key != "wire_dtype"}
        return values

    @model_validator(mode="after")
    def _check(self) -> "RunManifest":
        o = self.outer
        reason = outer_mathematics.instability(alpha=o.alpha, gamma=o.gamma)
        if reason is not None and o.pairing != "none" and not o.allow_unstable:
            raise ValueError(f"outer: {reason}; set outer.allow_unstable to run it all the same")
        if len(self.canonical_json()) > MANIFEST_LIMIT_BYTES:
            raise ValueError(f"the manifest is larger than {MANIFEST_LIMIT_BYTES} bytes")
        return self

    def canonical_json(self) -> bytes:
        """Sorted keys, no white space, defaults filled in, ASCII: equal bytes for equal manifests."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def run_id(self) -> str:
        """sha256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.canonical_json()).hexdigest()


class ListenSettings(Settings):
    """Where this node listens, and what it announces."""

    host: str = "127.0.0.1"
    """Address to which the sockets are bound; `0.0.0.0` for all."""
    announce_host: str | None = None
    """Address or name under which others reach this node; none: the address that leads to the peer it joins."""
    dht_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of the libp2p daemon; 0 picks one."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of the gRPC server; 0 picks one."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of /metrics, /sd, /health and /status; 0 picks one."""
    libp2p_metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """TCP port on which the libp2p daemon serves its own /metrics; 0 picks one; none: no such page."""


class DirectorySettings(Settings):
    """How often the node writes to the DHT and reads it."""

    ttl_s: Seconds = 30.0
    """Lifetime of an advert in the DHT, seconds; it is renewed every third of this."""
    refresh_s: Seconds = 5.0
    """Longest time between two readings of the membership, seconds; an outer interval where that is shorter."""


class LimitSettings(Settings):
    """Bounds on what this node holds and how long it waits."""

    max_in_flight: Positive | None = None
    """Most microbatches in flight at once; none: as many as a step has, within what memory holds."""
    evaluations: Positive = 2
    """Largest number of held-out microbatches served at once."""
    microbatch_deadline_s: Seconds = 600.0
    """Longest time without progress for one microbatch on its way through all stages and back, seconds."""
    patience_floor_s: Seconds = 2.0
    """Shortest silence after which a peer that serves a call is taken for gone, seconds."""
    drain_s: Seconds = 20.0
    """Longest time to finish the microbatches in hand when the node has to leave, seconds."""
    upload_mbit_per_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Most that this node sends over gRPC, Mbit/s over any 10 s (the DHT's traffic is not counted); none: no limit."""
    download_mbit_per_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Most that it receives, likewise."""
    hours: Annotated[tuple[Annotated[str, Field(pattern=f"^{SPAN}$")], ...], BeforeValidator(one_or_more)] = ()
    """When the machine is ours, in its local time: `22:00-07:00`, or a list of such spans. Outside of them the node
    pauses, and one that is started joins when they begin; none: always."""
    linger_s: Seconds = 30.0
    """Longest wait for the other nodes at the end of the run, seconds."""


class NodeComputeSettings(Settings):
    """How this node computes."""

    recompute: bool = False
    """Compute activations again in the backward pass: a third more work, far less memory for what is in flight."""


class CheckpointSettings(Settings):
    """The checkpoints that the node writes into its directory."""

    every_rounds: Positive | None = 5
    """Outer rounds between checkpoints; none: no checkpoints."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 3
    """Number of checkpoints kept."""


class AuditSettings(Settings):
    """Files from which anybody can recompute the run (ARCHITECTURE.md, "Files")."""

    dir: str | None = None
    """Directory for the audit files; none: no audit."""
    weights: bool = True
    """Also write weights, momenta and data; otherwise only the inner steps with their microbatches."""


class NodeConfig(Settings):
    """The local settings of one node."""

    listen: ListenSettings = ListenSettings()
    """Addresses and ports."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto`: CUDA if there is any."""
    threads: Positive | None = None
    """CPU threads for compute; none: torch's own choice, OMP_NUM_THREADS."""
    compute: NodeComputeSettings = NodeComputeSettings()
    """Work against memory."""
    stage: Annotated[int, Field(ge=0)] | None = None
    """Stage to hold; none: that of the newest checkpoint, else the one with the least capacity."""
    data_files: tuple[str, ...] = ()
    """Files or globs to read instead of a hub data set."""
    tokenizer_dir: str | None = None
    """Directory with the tokenizer's files, instead of the hub."""
    directory: DirectorySettings = DirectorySettings()
    """The DHT."""
    limits: LimitSettings = LimitSettings()
    """Bounds."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""
    rebalance: bool = True
    """Move to another stage while training, when that one limits the swarm and this one has replicas to spare."""
    audit: AuditSettings = AuditSettings()
    """Audit files."""
