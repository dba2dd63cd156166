"""The immutable settings of a run. A manifest comes from strangers: it names no local path and is bounded in size."""

import hashlib
import json
from collections.abc import Mapping
from math import inf, sqrt
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from noloco_p2p.config.base import Positive, Settings, matching
from noloco_p2p.config.outer_settings import OuterSettings
from noloco_p2p.core.block_format import WireCodec
from noloco_p2p.core.outer_rules import state_kinds

MANIFEST_LIMIT_BYTES = 65_536
"""Largest size of a manifest in canonical JSON; a larger one is refused."""
MAX_LAYERS = 1024
"""Upper limit on layers and on stages. A manifest comes from strangers, and each costs memory even without weights."""
MAX_REPLICAS = 2_048
"""Upper limit on the replicas that a run waits for: a node sees no more nodes of a stage."""
MAX_MICROBATCHES = 65_536
"""Upper limit on the microbatches of a step, for each of which a node draws a route before the step begins."""
HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?"
HubName = Annotated[str, matching(HUB_NAME, "NAME or OWNER/NAME on the hub")]
TokenizerName = Annotated[
    str, matching(HUB_NAME, "bytes, or NAME or OWNER/NAME on the hub (for a folder set tokenizer_dir)")
]
RunName = Annotated[str, matching("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "up to 64 letters, digits, '.', '_' or '-'")]

ModelConfig = dict[str, bool | int | float | str | list[bool | int | float | str | None] | None]
TINY_LLAMA: ModelConfig = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 384,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


class ModelSettings(Settings):
    """The model, in the terms of Hugging Face transformers."""

    family: Annotated[str, matching("[a-z0-9_-]{1,40}", "a model family of transformers, such as llama")] = "llama"
    """Model type in transformers (llama, gpt2, qwen3, …); it must pass the split self-test at start-up."""
    config: ModelConfig = Field(default=TINY_LLAMA)
    """Fields of the family's configuration class; a field that is left out has that class's default."""


class DataSettings(Settings):
    """What the swarm trains on. Local paths are in the node's `data_files`."""

    kind: Literal["stdlib", "text", "c4", "parquet"] = "stdlib"
    """`stdlib`: Python's own standard library; `text`: text files; `c4`: rows of text; `parquet`: rows of token ids."""
    dataset: HubName | None = None
    """Name of a data set on the Hugging Face hub, read as a stream; none: the node reads its `data_files`."""
    subset: HubName | None = None
    """Configuration name of the hub data set (for C4: `en`)."""
    tokenizer: TokenizerName = "bytes"
    """`bytes` (ByT5's 384 ids, no file) or a hub name for AutoTokenizer; the node's `tokenizer_dir` overrides it."""


class InnerSettings(Settings):
    """The inner optimizer, which moves the fast weights, and its schedule (METHOD.md, "Inner step")."""

    optimizer: Literal["adamw", "muon"] = "muon"
    """`muon` for the matrices of the layers and AdamW for the rest, or `adamw` for all."""
    peak_learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-2
    """Learning rate at the end of the warm-up; if unset, 1e-2 with `muon` and 1e-3 with `adamw`."""
    adamw_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.5
    """With `muon`: factor on the learning rate for the parameters that AdamW trains."""
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    """Length of the linear warm-up in steps, capped at a tenth of `steps`."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate of the last step, as a fraction of the peak (cosine in between)."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of Adam's second moment; must be greater than the square of `beta1`."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's ε."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients of a stage are clipped to this L2 norm."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fill in the default peak learning rate of `adamw`."""
        if isinstance(values, Mapping) and values.get("optimizer") == "adamw":
            return {"peak_learning_rate": 1e-3, **values}
        return values

    @model_validator(mode="after")
    def _check(self) -> "InnerSettings":
        """Check that Adam's steps are bounded. Otherwise the mean of gradients that come and go, such as an
        embedding's, would be divided by almost nothing."""
        if self.beta1 and self.beta2 <= self.beta1**2:
            least = f"beta1 squared, {self.beta1**2:.4g}"
            raise ValueError(f"beta2 {self.beta2:g} leaves AdamW's steps unbounded: it must be greater than {least}")
        return self

    @property
    def most_mean(self) -> float:
        """Largest ratio of Adam's mean to the root of its mean square (by Cauchy–Schwarz): 1.2 with the default β."""
        gap = (1 - self.beta2) * (1 - self.beta1**2 / self.beta2) if self.beta2 else 0.0
        return (1 - self.beta1) / sqrt(gap) if gap > 0 else inf


class WireSettings(Settings):
    """How hidden states and gradients are encoded between stages (`core/block_format`)."""

    forward: WireCodec = "float32"
    """Hidden states: element type, or codes with one scale per block: `int8` (8.25 bits per value), `int4` (4.5)."""
    backward: WireCodec = "float32"
    """Gradients of the hidden states; same choices."""


class EvaluationSettings(Settings):
    """Validation on held-out data."""

    every_steps: Positive | None = 250
    """Inner steps between evaluations; none: only one evaluation, at the end."""
    microbatches: Positive = 16
    """Held-out microbatches per evaluation; they are the same on every node."""


class SecuritySettings(Settings):
    """Who may take part (ARCHITECTURE.md, "Members")."""

    root_key: Annotated[str, matching("[0-9a-f]{64}", "64 hexadecimal digits")] | None = None
    """Public key of the root of a members-only run, set by `--key FILE` on the first node; none: the run is open to
    everybody. A first node that others can reach creates its own key, unless `security: open` is set."""


class RunManifest(Settings):
    """The immutable settings of a run: equal on all nodes; their hash is the run id."""

    name: RunName = "tiny"
    """Name of the run, and of its directory under `noloco swarm`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of initial weights, data order, routes and pairs."""
    start_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 2
    """Replicas that every stage must have before step 1."""
    stages: Annotated[int, Field(ge=1, le=MAX_LAYERS)] = 2
    """Pipeline stages; the layers are split over them contiguously and evenly."""
    model: ModelSettings = ModelSettings()
    """The model."""
    data: DataSettings = DataSettings()
    """The data."""
    sequence_length: Positive = 128
    """T: input tokens per sample."""
    microbatch_size: Positive = 4
    """B: samples per microbatch."""
    microbatches_per_step: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)] = 2
    """Microbatches that each stage-0 replica reads per inner step."""
    steps: Positive = 1000
    """Length of the run in clock steps."""
    inner: InnerSettings = InnerSettings()
    """The inner optimizer."""
    outer: OuterSettings = OuterSettings()
    """The outer round."""
    routing: Literal["random", "weighted", "balanced", "fixed"] = "random"
    """Choice of the next replica: uniformly at random, randomly by speed, evenly from the seed, or always the same."""
    wire: WireSettings = WireSettings()
    """Hidden states and gradients on the wire."""
    compute_dtype: Literal["float64", "float32"] = "float32"
    """Element type of weights, the optimizer's moments, φ, δ, and vectors under `outer.codec` `full`."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Validation."""
    security: SecuritySettings = SecuritySettings()
    """Who may take part."""

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, values: Any) -> Any:
        """Accept an older manifest, which has one `wire_dtype` for both directions instead of `wire`."""
        if isinstance(values, dict) and "wire_dtype" in values:
            both = dict.fromkeys(WireSettings.model_fields, values["wire_dtype"])
            values = {"wire": both} | {key: value for key, value in values.items() if key != "wire_dtype"}
        return values

    @model_validator(mode="after")
    def _check(self) -> "RunManifest":
        self.outer.check_known()
        reason = self.outer.update.instability
        if reason is not None and self.outer.pairing != "none" and not self.outer.allow_unstable:
            raise ValueError(f"outer: {reason}; set outer.allow_unstable to run it anyway")
        if len(self.canonical_json()) > MANIFEST_LIMIT_BYTES:
            raise ValueError(f"the manifest is larger than {MANIFEST_LIMIT_BYTES} bytes")
        return self

    def canonical_json(self) -> bytes:
        """Sorted keys, no white space, defaults filled in, ASCII: equal bytes for equal manifests.

        An open run leaves out `security`, so that its run id is the same as before there was such a key.
        """
        values = self.model_dump(mode="json", exclude={"security"} if self.security.root_key is None else None)
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The tensors that a replica's state has for every parameter, in order."""
        return state_kinds(self.outer.update)

    @property
    def in_step(self) -> bool:
        """Whether the stages go in step: a microbatch takes a place only in the inner step that its label names. The
        policy `balanced` needs it, and so do rules under which each replica waits for all others at every step."""
        joint = bool(self.outer.update.common) and self.outer.inner_steps == 1 and self.outer.pairing != "none"
        return joint or self.routing == "balanced"

    @property
    def run_id(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.canonical_json()).hexdigest()
