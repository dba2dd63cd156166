"""Model families of transformers: turns the manifest's `model` into a checked configuration and its model class.

In this folder, only this file, `model.py` and `exported_model.py` use transformers. Its modules are imported when
needed, and only those of the family in question.
"""

import copy
import dataclasses
import difflib
import importlib
import itertools
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from noloco_p2p.compute import unused_compiler
from noloco_p2p.config import MAX_LAYERS, ModelSettings, RunManifest
from noloco_p2p.errors import ConfigError

EAGER_FAMILIES = frozenset({"gemma2"})
"""Families whose split is exact only with eager attention."""
FIXED_FIELDS = frozenset({"use_cache", "pretraining_tp", "gradient_checkpointing"})
"""Fields that a training stage sets itself."""
UNUSED_DROPOUT = frozenset({"summary_first_dropout", "classifier_dropout"})
"""Dropout of heads that causal language models lack."""
LEGACY_FIELDS = frozenset({"rope_theta", "partial_rotary_factor"})
"""Fields that belong in `rope_parameters` since transformers 5 and are still accepted at the top level."""
STATE_SPACE_FIELDS = ("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand")
"""Heads of state-space layers, their size, and what both together are as a multiple of the hidden size."""
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
SMALL_VOCABULARY = 64
SMALL_LAYERS = 4
FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""Exceptions that transformers may raise for a configuration that it, or a model class, cannot handle."""


def import_transformers() -> None:
    """Import what every family needs of transformers, which takes seconds, but not what none of them needs."""
    import transformers.utils.import_utils

    unused_compiler.leave_out()
    for module in (transformers.utils, transformers.utils.import_utils):
        # Every model imports the losses of all models, and that of an image model imports scipy: 34 MiB, half a second.
        module.is_scipy_available = lambda: False
        # Sharding over a cluster imports torch.distributed.tensor and with it sympy: 40 MiB, a third of a second.
        module.is_torch_distributed_available = lambda: False
    importlib.import_module("transformers.modeling_utils")


def make_config(settings: ModelSettings) -> Any:
    """The family's configuration object. Raises ConfigError for an unknown family or field, or a rejected value."""
    import_transformers()
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = settings.family
    if family not in _causal_families():
        raise ConfigError(f"model.family: transformers has no causal language model {family!r}{_did_you_mean(family)}")
    config_class = CONFIG_MAPPING[family]
    general = {field.name for field in dataclasses.fields(PretrainedConfig)}
    known = {field.name for field in dataclasses.fields(config_class)} - general - FIXED_FIELDS
    known |= set(config_class.attribute_map)
    if "num_hidden_layers" not in known and f"{family}_text" in _causal_families():
        raise ConfigError(f"model.family: {family} has parts for other things than text; use {family}_text")
    if "rope_parameters" in known:
        known |= LEGACY_FIELDS
    unknown = sorted(set(settings.config) - known)
    if unknown:
        listed = "; ".join(f"{name!r}{_did_you_mean(name, known)}" for name in unknown)
        raise ConfigError(f"model.config: not a field of the family {family}: {listed}")
    try:
        config = config_class(**_without_foreign_ids(config_class, settings.config))
    except FOREIGN_ERRORS as error:
        raise ConfigError(f"model.config: {family} rejects it: {one_line(error)}") from error
    _refuse_randomness(config)
    return config


def _without_foreign_ids(config_class: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given fields, and None for missing special token ids whose default lies beyond the vocabulary."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    vocabulary = given.get("vocab_size", defaults.get("vocab_size"))
    beyond: dict[str, Any] = {}
    for name in SPECIAL_IDS:
        default = defaults.get(name)
        if name not in given and isinstance(default, int) and isinstance(vocabulary, int) and default >= vocabulary:
            beyond[name] = None
    return {**beyond, **given}


def _did_you_mean(name: str, known: set[str] | None = None) -> str:
    """` (did you mean 'x'?)` with the closest known name, or an empty string."""
    near = difflib.get_close_matches(name, sorted(known if known is not None else _causal_families()), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _causal_families() -> set[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return set(_causal_classes()) & set(CONFIG_MAPPING_NAMES)


def _causal_classes() -> Mapping[str, Any]:
    """Family → the name of its causal language model."""
    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def one_line(error: BaseException) -> str:
    """The message of a foreign exception on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _refuse_randomness(config: Any) -> None:
    """Raises ConfigError for dropout or jitter: a forward pass must be repeatable (METHOD.md, "Inner step")."""
    for name, value in sorted(vars(config).items()):
        is_rate = isinstance(value, int | float) and not isinstance(value, bool)
        if ("drop" in name or "jitter" in name) and name not in UNUSED_DROPOUT and is_rate and value != 0:
            what = "dropout" if "drop" in name else "jitter"
            raise ConfigError(f"model.config: {name} is {value}; {what} must be 0: set it in model.config")


def check_split(config: Any, stages: int) -> None:
    """Raises ConfigError for more stages than layers, too many layers, or tied embeddings over several stages."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise ConfigError(f"model.family: {config.model_type} does not say how many layers it has; use another family")
    if layers > MAX_LAYERS:
        raise ConfigError(f"model.config: {layers} layers; at most {MAX_LAYERS} are allowed")
    if stages > layers:
        raise ConfigError(f"stages is {stages}, but the model has only {layers} layers: each stage needs one")
    if stages > 1 and getattr(config, "tie_word_embeddings", False):
        raise ConfigError(
            f"model.config: tie_word_embeddings is true, which needs one stage, not {stages}: the first and the last "
            "stage would hold copies that drift apart; set it to false"
        )


def layer_ranges(layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each stage: contiguous, with sizes within one of each other; earlier stages get the extra ones."""
    size, extra = divmod(layers, stages)
    starts = [stage * size + min(stage, extra) for stage in range(stages + 1)]
    return tuple(range(start, end) for start, end in itertools.pairwise(starts))


def model_class(config: Any) -> Any:
    """The causal language model class of a configuration; imports only that family's module."""
    name: Any = _causal_classes()[config.model_type]
    package = type(config).__module__.rpartition(".")[0]
    family = package.rpartition(".")[2]
    return getattr(importlib.import_module(f"{package}.modeling_{family}"), name)


def attention(config: Any) -> str:
    """The name of the attention implementation with which the split is exact."""
    usable = getattr(model_class(config), "_supports_sdpa", False) and config.model_type not in EAGER_FAMILIES
    return "sdpa" if usable else "eager"


def small_config(config: Any) -> Any:
    """The same architecture, but smaller: fewer layers, heads, channels and tokens, with the same head size.

    Multipliers of 1 become 1.5, because a neutral one would hide where it is applied (granite).
    """
    small = copy.deepcopy(config)
    hidden = config.hidden_size
    heads = getattr(config, "num_attention_heads", max(1, hidden // 64))  # mamba has none
    shared_heads = getattr(config, "num_key_value_heads", None) or heads
    small_heads = min(heads, 2 if shared_heads in (1, heads) else 4)
    small_hidden = max(1, hidden // heads) * small_heads
    sizes = {
        "num_hidden_layers": min(config.num_hidden_layers, SMALL_LAYERS),
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_heads if shared_heads == heads else 1 if shared_heads == 1 else 2,
        "hidden_size": small_hidden,
        "word_embed_proj_dim": small_hidden if getattr(config, "word_embed_proj_dim", 0) == hidden else 16,
        "vocab_size": min(config.vocab_size, SMALL_VOCABULARY),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 2 * small_hidden),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
        "num_experts_per_tok": 2,
        "n_group": min(2, getattr(config, "n_group", None) or 2),  # groups of experts, of which a token uses some
        "topk_group": 1,
        **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
        "sliding_window": 4,
    }
    for name, value in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(small, name, value)
    for count, size, expand in STATE_SPACE_FIELDS:
        if hasattr(config, count) and hasattr(config, expand):
            setattr(small, count, max(1, getattr(config, expand) * small_hidden // getattr(config, size)))
    if vars(config).get("layer_types"):  # in some families (jamba) it follows from other fields
        small.layer_types = config.layer_types[: small.num_hidden_layers]
    for name in SPECIAL_IDS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value >= small.vocab_size:
            # Only a pad changes what a model computes, and some families (cwm) must have the others.
            setattr(small, name, None if name == "pad_token_id" else 0)
    for name, value in vars(config).items():
        if name.endswith("_multiplier") and value == 1:
            setattr(small, name, 1.5)
    return small


def checked_config(manifest: RunManifest) -> Any:
    """The model's configuration. Raises ConfigError if it does not fit the run's stages and sequence length."""
    config = make_config(manifest.model)
    check_split(config, manifest.stages)
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and manifest.sequence_length > longest:
        raise ConfigError(
            f"sequence_length is {manifest.sequence_length}, but the model has {longest} positions: "
            "raise model.config.max_position_embeddings"
        )
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise ConfigError(f"model.config: num_attention_heads {heads} is not divisible by num_key_value_heads {shared}")
    return config
