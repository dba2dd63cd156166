"""Slices of Hugging Face models: the split, the initial weights, what is refused, and sizes without memory."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from stages import SIZES, make_batch, make_manifest, make_stages, weights

from noloco_p2p.compute import factory, model, model_family
from noloco_p2p.compute.factory import (
    DEVICE_COPIES,
    HOST_COPIES,
    StageSize,
    check_architecture,
    check_fits,
    check_model,
    make_torch_stage,
    stage_sizes,
)
from noloco_p2p.compute.hardware import pick_device
from noloco_p2p.config import ModelSettings, RunManifest
from noloco_p2p.errors import ConfigError, LocalError


def test_layers_are_split_evenly_and_earlier_stages_take_the_extra() -> None:
    assert [len(part) for part in model_family.layer_ranges(4, 3)] == [2, 1, 1]
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            parts = model_family.layer_ranges(layers, stages)
            assert [layer for part in parts for layer in part] == list(range(layers))
            counts = [len(part) for part in parts]
            assert counts == sorted(counts, reverse=True)
            assert counts[0] - counts[-1] <= 1


@pytest.mark.parametrize("name", sorted(SIZES))
def test_initial_weights_do_not_depend_on_the_split(name: str) -> None:
    whole = weights(make_stages(make_manifest(name, 1)))
    for count in (2, 3, 4):
        stages = make_stages(make_manifest(name, count))
        names = [parameter for stage in stages for parameter in stage.parameters]
        assert sorted(names) == sorted(whole)
        assert all(torch.equal(value, whole[key]) for key, value in weights(stages).items())


def test_initial_weights_follow_the_seed_and_look_like_the_family() -> None:
    first, second = (weights(make_stages(make_manifest("llama", 1, seed=seed))) for seed in (1, 2))
    key = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[key], second[key])
    assert float(first[key].std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first["model.norm.weight"], torch.ones(32, dtype=torch.float64))


def test_making_a_stage_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_stages(make_manifest("llama", 2))
    assert torch.equal(torch.rand(3), expected)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("lama", {}, 2, "no causal language model 'lama' .*'llama'"),
    ("t5", {}, 2, "no causal language model 't5'"),
    ("llama", {"hiden_size": 32}, 2, "not a field of the family llama: 'hiden_size' .*'hidden_size'"),
    ("llama", {"dtype": "float16"}, 2, "not a field of the family llama: 'dtype'"),
    ("llama", {"hidden_size": "many"}, 2, "hidden_size.*expected int"),
    ("llama", {"hidden_size": 33, "num_attention_heads": 4}, 2, "not a multiple"),
    ("llama", {"attention_dropout": 0.1, "num_hidden_layers": 2}, 2, "attention_dropout is 0.1; dropout must be 0"),
    ("gpt2", {"tie_word_embeddings": False}, 2, "pdrop is 0.1; dropout must be 0"),
    ("mixtral", {"router_jitter_noise": 0.01}, 2, "router_jitter_noise is 0.01; jitter must be 0"),
    ("gemma3", dict(RunManifest().model.config), 2, "gemma3 has parts for other things than text; use gemma3_text"),
    ("mllama", {}, 2, "mllama does not say how many layers it has; use another family"),
    ("gpt2", {"rope_theta": 5e5}, 1, "not a field of the family gpt2: 'rope_theta'"),
    ("nanochat", {**RunManifest().model.config, "num_hidden_layers": 2}, 2, "nanochat cannot be split over 2 stages"),
    ("llama", {"num_hidden_layers": 4}, 7, "stages is 7, but the model has only 4 layers"),
    ("llama", {"tie_word_embeddings": True}, 2, "tie_word_embeddings is true, which needs one stage, not 2"),
    ("llama", {"num_key_value_heads": 0}, 1, "num_attention_heads 32 is not divisible by num_key_value_heads 0"),
    ("llama", {"max_position_embeddings": 4}, 2, "sequence_length is 8, but the model has 4 positions"),
]


@pytest.mark.parametrize(("name", "fields", "stages", "message"), REFUSED)
def test_bad_models_are_refused_in_one_line(name: str, fields: dict[str, Any], stages: int, message: str) -> None:
    settings = ModelSettings(family=name, config=fields)
    manifest = RunManifest(model=settings, stages=stages, sequence_length=8)
    with pytest.raises(ConfigError, match=message) as caught:
        make_torch_stage(manifest, 0, "me")
    assert "\n" not in str(caught.value)


def test_a_foreign_message_is_one_line_and_never_empty() -> None:
    assert model_family.one_line(AssertionError()) == "AssertionError"
    assert model_family.one_line(ValueError("two\n  lines ")) == "two lines"


def test_a_field_that_moved_is_still_accepted() -> None:
    """`rope_theta` is what older configurations and most papers say."""
    config = model_family.make_config(ModelSettings(config={"rope_theta": 5e5}))
    assert config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("gpt2", {"vocab_size": 50256}, (None, None)),
        ("gpt2", {"vocab_size": 50257}, (50256, 50256)),
        ("gpt2", {}, (50256, 50256)),
        ("gpt2", {"vocab_size": 61, "eos_token_id": 60}, (None, 60)),
        ("llama", {"vocab_size": 2}, (1, None)),
    ],
)
def test_special_ids_that_the_vocabulary_lacks_are_left_out(
    family: str, fields: dict[str, int], expected: tuple[int | None, int | None]
) -> None:
    """Those are defaults of the family, which nobody gave."""
    no_dropout = {} if family == "llama" else dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = model_family.make_config(ModelSettings(family=family, config={**fields, **no_dropout}))
    assert (config.bos_token_id, config.eos_token_id) == expected


def test_a_family_whose_fields_do_not_take_the_values_of_the_trial_is_refused() -> None:
    """The pad of `modernbert-decoder` cannot be None, and its default is beyond the small vocabulary."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    settings = ModelSettings(family="modernbert-decoder", config={**sizes, "tie_word_embeddings": False})
    with pytest.raises(ConfigError, match=r"cannot be split over 2 stages: .* expected int, got NoneType") as caught:
        check_model(RunManifest(model=settings, sequence_length=8))
    assert "\n" not in str(caught.value)


def test_ids_beyond_the_vocabulary_of_the_trial_do_not_matter_to_it() -> None:
    """The first token of `cwm` must have an id."""
    config = {**make_manifest().model.config, "vocab_size": 128256}
    check_model(RunManifest(model=ModelSettings(family="cwm", config=config), sequence_length=8))


def test_a_stage_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage is 2, but the run has stages 0 to 1"):
        make_torch_stage(make_manifest(), 2, "me")


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"hidden_size": 12}, "fails with RuntimeError"), ({"rms_norm_eps": -1.0}, "its output is not finite")],
)
def test_a_stage_that_cannot_compute_is_refused(fields: dict[str, Any], message: str) -> None:
    """A single stage is not compared with anything; a head of three values cannot be rotated in pairs."""
    manifest = make_manifest("llama", 1)
    config = {**manifest.model.config, **fields}
    manifest = manifest.model_copy(update={"model": ModelSettings(family="llama", config=config)})
    with pytest.raises(ConfigError, match=f"a stage of llama cannot compute: .*{message}.*; check model.config"):
        make_torch_stage(manifest, 0, "me")


@pytest.mark.parametrize("stages", [1, 2])
def test_a_lack_of_memory_is_not_blamed_on_the_model(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said: a stage of llama cannot compute: it fails with OutOfMemoryError: …; check model.config."""

    def full(part: model.StageModule, inputs: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(model.StageModule, "__call__", full)
    with pytest.raises(LocalError, match="not enough memory on the device"):
        make_torch_stage(make_manifest("llama", stages), 0, "me")


def test_a_model_of_few_positions_is_split() -> None:
    manifest = make_manifest("gpt2", 2)
    config = {**manifest.model.config, "n_positions": 3}
    update = {"model": ModelSettings(family="gpt2", config=config), "sequence_length": 3}
    check_model(manifest.model_copy(update=update))


def test_sizes_are_known_of_a_model_that_no_machine_can_hold() -> None:
    experts = {"num_local_experts": 2**10, "hidden_size": 2**14, "intermediate_size": 2**16, "head_dim": 2**7}
    settings = ModelSettings(family="llama4_text", config={"num_hidden_layers": 1, "moe_layers": [0], **experts})
    (size,) = stage_sizes(RunManifest(model=settings, stages=1))
    assert size.parameters > 3 * 2**40  # three matrices of each expert


@pytest.mark.parametrize(
    ("heads", "shared", "fewer"),
    [(8, 8, (2, 2)), (8, 1, (2, 1)), (8, 2, (4, 2)), (8, 4, (4, 2)), (1, 1, (1, 1)), (6, 6, (2, 2))],
)
def test_the_trial_is_of_a_small_model_of_the_same_kind(heads: int, shared: int, fewer: tuple[int, int]) -> None:
    """Queries share keys in the same way: all of them, in groups, or none."""
    fields: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "hidden_size": 16 * heads,
        "head_dim": 16,
    }
    fields |= {"num_hidden_layers": 40, "vocab_size": 10**6, "eos_token_id": 10**6 - 1, "bos_token_id": 1}
    for family in ("gemma3_text", "llama"):
        config = model_family.make_config(ModelSettings(family=family, config=fields))
        small = model_family.small_config(config)
        assert (small.num_attention_heads, small.num_key_value_heads) == fewer
        assert small.hidden_size == 16 * small.num_attention_heads
        assert (small.num_hidden_layers, small.vocab_size) == (4, 64)
        assert (small.bos_token_id, small.eos_token_id) == (1, 0)
        assert getattr(small, "layer_types", None) == (config.layer_types[:4] if family == "gemma3_text" else None)
        assert (config.num_hidden_layers, config.vocab_size) == (40, 10**6), "the given one does not change"


@pytest.mark.parametrize("width", [32, 64])
def test_the_trial_has_projections_around_the_layers_if_the_model_has(width: int) -> None:
    fields: dict[str, Any] = {"hidden_size": 64, "word_embed_proj_dim": width, "num_attention_heads": 4, "dropout": 0.0}
    small = model_family.small_config(model_family.make_config(ModelSettings(family="opt", config=fields)))
    assert (small.word_embed_proj_dim == small.hidden_size) == (width == 64)


SPLITTABLE = [
    "llama",
    "gpt2",
    "opt",
    "gpt_neox",
    "qwen3",
    "qwen3_moe",
    "olmo",
    "gemma2",
    "gemma3_text",
    "phi3",
    "jamba",
    "deepseek_v3",
    "granite",
    "lfm2",
    "llama4_text",
    "mamba",
    "mamba2",
    "granitemoehybrid",
    "nemotron_h",
    "afmoe",
]


def small(name: str) -> Any:
    """A small configuration of the family, without dropout and without tied embeddings."""
    fields: dict[str, Any] = {"vocab_size": 61, "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    zero: dict[str, dict[str, Any]] = {
        "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "opt": {"dropout": 0.0},
        "gpt_neox": {"num_hidden_layers": 3},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
        "deepseek_v3": {"num_key_value_heads": 4},
        "mamba2": {"num_heads": 2},
        "granitemoehybrid": {"mamba_n_heads": 2, "mamba_d_head": 64},
        "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "bloom": {"n_layer": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    }
    if name == "bloom":
        fields = {"vocab_size": 61, "hidden_size": 64, "n_head": 4}
    if name.startswith("mamba"):
        del fields["num_attention_heads"]
    if name == "nemotron_h":
        del fields["num_hidden_layers"]
        fields |= {"layers_block_type": ["mamba", "moe", "mamba", "moe"], "num_key_value_heads": 2}
        fields |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 64}
    return model_family.make_config(
        ModelSettings(family=name, config={**fields, "tie_word_embeddings": False, **zero.get(name, {})})
    )


@pytest.mark.parametrize("name", SPLITTABLE)
def test_self_test_accepts_what_splits_exactly(name: str) -> None:
    check_architecture(small(name), 2, torch.float32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nanochat", "cannot be split over 2 stages: its logits differ from those of the unsplit model"),
        ("bloom", "cannot be split over 2 stages: it fails with ValueError"),
        ("bert", "the layers of bert are not one list next to its embedding"),
    ],
)
def test_self_test_refuses_what_does_not(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_architecture(small(name), 2, torch.float32)
    check_architecture(small(name), 1, torch.float32)


def test_self_test_notices_a_stage_that_adds_positions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_one(_: model.ZeroPositions, positions: torch.Tensor, *__: object) -> torch.Tensor:
        return positions.new_ones((), dtype=torch.float32)

    monkeypatch.setattr(model.ZeroPositions, "forward", add_one)
    with pytest.raises(ConfigError, match="gpt2 cannot be split over 2 stages"):
        check_architecture(small("gpt2"), 2, torch.float32)


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every stage of a split wrong in one way."""
    make, call = model.make_stage_module, model.StageModule.__call__

    def made(config: Any, index: int, stages: int, **options: Any) -> model.StageModule:
        part = make(config, index, stages, **options)
        if stages > 1 and fault == "value":
            with torch.no_grad():
                next(iter(part.parameters.values())).add_(1)
        if stages > 1 and fault == "parameter":
            return replace(part, parameters=dict(list(part.parameters.items())[1:]))
        return part

    def without_gradient(_: model.PassthroughLayer, hidden_states: torch.Tensor, *__: object, **___: object) -> Any:
        return hidden_states.detach() if fault == "gradient" else hidden_states

    def called(part: model.StageModule, inputs: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return call(part, inputs, None if fault == "mask" and part.index > 0 else mask)

    monkeypatch.setattr(factory, "make_stage_module", made)
    monkeypatch.setattr(model.PassthroughLayer, "forward", without_gradient)
    monkeypatch.setattr(model.StageModule, "__call__", called)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("value", r"the initial value of model\.embed_tokens\.weight depends on the split"),
        ("parameter", "its parameters are not divided among the stages exactly once"),
        ("gradient", r"the gradient of model\.\S+ differs from that of the unsplit model"),
        ("mask", "its logits differ from those of the unsplit model"),
        ("not finite", "its logits differ from those of the unsplit model"),
    ],
)
def test_self_test_notices_every_planted_fault(fault: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("llama")
    if fault == "not finite":
        config.rms_norm_eps = -1.0
    plant(fault, monkeypatch)
    with pytest.raises(ConfigError, match=f"the family llama cannot be split over 2 stages: {reason}"):
        check_architecture(config, 2, torch.float32)


@pytest.mark.parametrize("found", [1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("expected", [math.inf, math.nan])
def test_nothing_is_near_to_what_is_not_finite(found: float, expected: float) -> None:
    assert not factory._near(torch.tensor([found, 1.0]), torch.tensor([expected, 1.0]))
    assert not factory._near(torch.tensor([expected, 1.0]), torch.tensor([1.0, 1.0]))


def test_sizes_are_those_of_the_real_stages() -> None:
    manifest = make_manifest("opt", 3)
    sizes = stage_sizes(manifest)
    stages = make_stages(manifest)
    assert [one.parameters for one in sizes] == [stage.state.parameters for stage in stages]
    assert [one.layers for one in sizes] == [2, 1, 1]
    _, hidden = stages[0].forward(make_batch(0).inputs, None)
    logits_bytes = hidden.data.nbytes // 32 * 61
    for one, values in zip(sizes, (hidden.data.nbytes,) * 2 + (hidden.data.nbytes + logits_bytes,), strict=True):
        assert one.host_bytes == HOST_COPIES * 8 * one.parameters
        assert one.device_bytes == DEVICE_COPIES * 8 * one.parameters + 2 * values, "values and their gradients"


def test_an_embedding_that_is_also_the_head_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "llama", SIZES["llama"] | {"tie_word_embeddings": True})
    manifest = make_manifest("llama", 1)
    ((size,), (stage,)) = stage_sizes(manifest), make_stages(manifest)
    held = sum(parameter.numel() for parameter in stage.parameters.values())
    assert size.parameters == stage.state.parameters == held
    assert "lm_head.weight" not in stage.parameters


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_stage_fits_into_exactly_what_it_needs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is a part of the host's memory and another one of its own. Unknown memory is enough."""
    manifest = make_manifest()
    size = stage_sizes(manifest)[1]
    needs = {"host": size.host_bytes + (size.device_bytes if device == "cpu" else 0), "gpu": size.device_bytes}

    def fits(host: int | None, gpu: int) -> StageSize:
        monkeypatch.setattr(factory, "free_host_bytes", lambda: host)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gpu, 1 << 40))
        return check_fits(manifest, 1, torch.device(device))

    assert fits(needs["host"], needs["gpu"]) == fits(None, needs["gpu"]) == size
    with pytest.raises(LocalError, match=r"stage 1 needs .* GiB of free memory: use more stages"):
        fits(needs["host"] - 1, needs["gpu"])
    if device == "cpu":
        assert fits(needs["host"], 0) == size
        return
    with pytest.raises(LocalError, match=r"stage 1 needs .* GiB of free memory on cuda: use more stages"):
        fits(needs["host"], needs["gpu"] - 1)


def test_the_default_run_has_about_a_million_parameters() -> None:
    assert sum(stage.parameters for stage in stage_sizes(RunManifest())) == 1_148_032


def test_a_stage_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    fields = {"hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 2, "num_attention_heads": 64}
    manifest = RunManifest(model=ModelSettings(config={**fields, "vocab_size": 2**17}), stages=2)
    assert sum(stage.parameters for stage in stage_sizes(manifest)) > 10**13
    with pytest.raises(
        LocalError, match=r"stage 1 needs .* GiB for weights, optimizer, snapshots and a microbatch, but this"
    ):
        make_torch_stage(manifest, 1, "me")


def test_a_strangers_manifest_cannot_fill_memory_before_a_stage_is_chosen() -> None:
    wide = {"hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 2, "num_attention_heads": 64}
    with pytest.raises(ConfigError, match="its heads are too wide for a trial"):
        check_model(RunManifest(model=ModelSettings(config={**wide, "vocab_size": 2**17}), stages=2))
    deep = RunManifest().model.config | {"num_hidden_layers": 10**8}
    with pytest.raises(ConfigError, match="100000000 layers; at most 1024 are allowed"):
        check_model(RunManifest(model=ModelSettings(config=deep)))


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LocalError, match="device: cuda:1 not found"):
        pick_device("cuda:1")
    for name in ("gpu", "cpu:x", "meta"):
        with pytest.raises(ConfigError, match=f"device: '{name}' is not one of"):
            pick_device(name)
    assert pick_device("auto") == torch.device("cpu")


def test_a_device_is_named_by_its_number_the_first_one_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, expected in (("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")):
        assert str(pick_device(name)) == expected
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(LocalError, match=r"device: cuda:2 not found \(torch sees 2 CUDA devices\)"):
        pick_device("cuda:2")
