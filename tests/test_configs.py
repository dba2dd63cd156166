"""The files under configs/: each loads, and agrees with its comments and with the paper."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from noloco_p2p.compute.factory import stage_sizes
from noloco_p2p.config import InnerSettings, NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.outer_rules import DEFAULTS
from noloco_p2p.errors import ConfigError
from noloco_p2p.lab import scenario_files
from noloco_p2p.launch import named_configs, settings
from noloco_p2p.launch.yaml_entries import KnownKeys

CONFIGS = Path(__file__).parent.parent / "configs"
PAPER = sorted(path.name for path in CONFIGS.glob("*-*.yaml"))

SIZES = {
    # arXiv 2506.10911, table 1 (small: 12 heads as in its code), and the rates and batches of table 2
    "small": (768, 12, 3072, 12, 6e-4, 524_288),
    "medium": (2048, 24, 8192, 32, 2e-4, 1_048_576),
    "large": (4096, 32, 16384, 32, 1.2e-4, 2_097_152),
}


def loaded(name: str) -> tuple[RunManifest, NodeConfig]:
    given = settings.read(CONFIGS / name, {}, [])
    return given.manifest(), given.node()


def test_the_set_of_configuration_files() -> None:
    files = sorted(path.name for path in CONFIGS.iterdir() if path.is_file())
    assert files == sorted([*PAPER, "README.md", "tiny.yaml"])
    assert sorted(f"{size}-{data}.yaml" for size in SIZES for data in ("c4", "reddit")) == PAPER


def test_tiny_spells_out_the_defaults() -> None:
    manifest, node = loaded("tiny.yaml")
    assert manifest.run_id == RunManifest().run_id
    assert node == NodeConfig()
    given = {entry.key for entry in settings.read(CONFIGS / "tiny.yaml", {}, []).entries}
    of_the_rule = {key for defaults in DEFAULTS.values() for key in defaults}
    left_out = set(KnownKeys.of(RunManifest).keys) - given
    settled = {("inner", "peak_learning_rate"), ("security", "root_key")}
    """Keys that depend on the optimizer, or that say nothing as their default."""
    assert left_out == settled | {("outer", key) for key in of_the_rule}, "only these keys may be left out"
    for optimizer, rate in (("adamw", 1e-3), ("muon", 1e-2)):
        chosen = settings.read(CONFIGS / "tiny.yaml", {}, [f"inner.optimizer={optimizer}"]).manifest()
        assert chosen.inner == InnerSettings(optimizer=optimizer)  # type: ignore[arg-type]
        assert chosen.inner.peak_learning_rate == rate
    for rule in DEFAULTS:
        chosen = settings.read(CONFIGS / "tiny.yaml", {}, [f"outer.rule={rule}"]).manifest()
        assert chosen.outer == OuterSettings(rule=rule), "with the defaults of that rule"
    commented = (CONFIGS / "tiny.yaml").read_text("utf-8").partition("Those of gossip:\n")[2].partition("  pairing")[0]
    written = yaml.safe_load(re.sub("^  # ", "", commented, flags=re.MULTILINE))
    assert written == {key: getattr(OuterSettings(), key) for key in of_the_rule}
    assert sum(stage.parameters for stage in stage_sizes(manifest)) == 1_148_032


def test_the_local_settings_in_tinys_comments_are_the_defaults() -> None:
    text = (CONFIGS / "tiny.yaml").read_text("utf-8").partition("# Local settings, with their defaults:\n")[2]
    local = yaml.safe_load(re.sub("^# ", "", text, flags=re.MULTILINE))
    assert NodeConfig.model_validate_json(json.dumps(local)) == NodeConfig()
    defaults = NodeConfig().model_dump(mode="json")
    assert all(local[key] == defaults[key] for key in local)
    assert len(local) == 3


@pytest.mark.parametrize("name", PAPER)
def test_the_settings_are_those_of_the_paper(name: str) -> None:
    manifest, _ = loaded(name)
    size, _, data = name.removesuffix(".yaml").partition("-")
    hidden, layers, ffn, heads, rate, batch_tokens = SIZES[size]
    config = manifest.model.config
    shape = (config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"])
    assert (*shape, config["num_attention_heads"], config["vocab_size"]) == (hidden, layers, ffn, heads, 128_002)
    assert manifest.name == f"{size}-{data}"
    assert manifest.model.family == "llama"
    assert manifest.data.kind == {"c4": "c4", "reddit": "parquet"}[data]
    assert manifest.sequence_length == config["max_position_embeddings"] == 1024
    per_replica = manifest.microbatches_per_step * manifest.microbatch_size * manifest.sequence_length
    assert manifest.start_replicas * per_replica == batch_tokens
    inner, outer = manifest.inner, manifest.outer
    assert (manifest.steps, inner.warmup_steps, inner.peak_learning_rate) == (25_000, 1_000, rate)
    assert (inner.final_fraction, inner.clip_norm, inner.weight_decay) == (0.1, 1.0, 0.0)
    assert (inner.beta1, inner.beta2, inner.eps) == (0.9, 0.95, 1e-8)
    assert (outer.alpha, outer.beta, outer.gamma, outer.inner_steps) == (0.5, 0.7, 0.7, 50)
    assert (outer.pairing, manifest.routing) == ("matched", "balanced")
    assert (manifest.wire.forward, manifest.wire.backward, manifest.compute_dtype) == (
        "bfloat16",
        "bfloat16",
        "float32",
    )


@pytest.mark.parametrize("name", PAPER)
def test_the_parameter_counts_in_the_comments_are_right(name: str) -> None:
    """Llama without biases: 4D² + 3DF + 2D per layer, D for the last norm, and two matrices of vocabulary × D."""
    hidden, layers, ffn, *_ = SIZES[name.partition("-")[0]]
    body = layers * (4 * hidden**2 + 3 * hidden * ffn + 2 * hidden) + hidden
    total = body + 2 * 128_002 * hidden
    assert sum(stage.parameters for stage in stage_sizes(loaded(name)[0])) == total
    text = (CONFIGS / name).read_text("utf-8")
    assert f"# Parameters: {total:,} in all, {body:,} without the two embedding matrices" in text
    assert f"{layers * (4 * hidden**2 + 2 * hidden * ffn):,}" in text


@pytest.mark.parametrize("size", sorted(SIZES))
def test_c4_and_reddit_differ_only_in_their_data(size: str) -> None:
    c4, reddit = (loaded(f"{size}-{data}.yaml")[0].model_dump() for data in ("c4", "reddit"))
    assert {key for key in c4 if c4[key] != reddit[key]} == {"name", "data"}


@pytest.mark.parametrize(
    ("outer", "least", "most"),
    [
        ({"rule": "noloco"}, 4.0, 4.1),
        ({"rule": "noloco", "codec": "int4"}, 0.5, 0.56),
        ({"rule": "averaged"}, 8.0, 8.1),
        ({}, 0.5, 0.56),
        ({"rule": "dct"}, 0.04, 0.1),  # 32 of 4096 values, each with its index, and the sample
        ({"rule": "sync"}, 4.0, 4.1),
    ],
)
def test_the_bytes_per_parameter_of_an_outer_round(outer: dict[str, Any], least: float, most: float) -> None:
    count = 1_000_000
    given = OuterSettings(**outer).vector_bytes(count, "float32") / count
    assert least <= given <= most


def test_configurations_are_found_by_name_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for path in CONFIGS.rglob("*.yaml"):
        assert named_configs.text(path.stem) == path.read_text("utf-8").rstrip()
        assert any(line.split()[:1] == [path.stem] and len(line) <= 80 for line in named_configs.listing())
    assert settings.read(Path("small-c4"), {}, []).manifest() == loaded("small-c4.yaml")[0]
    assert scenario_files.load(Path("home-200")) == scenario_files.load(CONFIGS / "sim" / "home-200.yaml")
    for wrong in ("tiny.yaml", "sim/nosuch", "."):
        with pytest.raises(ConfigError, match=f"^{wrong}: no configuration has that name; noloco configs lists them"):
            named_configs.text(wrong)
    with pytest.raises(ConfigError, match="home-200: no file and no configuration has that name"):
        settings.read(Path("home-200"), {}, [])
    with pytest.raises(ConfigError, match="tiny: no file and no scenario has that name; noloco configs lists them"):
        scenario_files.load(Path("tiny"))
    (tmp_path / "small-c4").write_text("name: mine")
    assert settings.read(Path("small-c4"), {}, []).manifest().name == "mine", "a file takes precedence over a name"
