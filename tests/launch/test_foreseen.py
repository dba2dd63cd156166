"""Foreseeable mistakes are reported before any process starts, in one line that says what to do."""

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizer_files import save_tokenizer
from typer import Typer

from noloco_p2p.cli import main as noloco_main
from noloco_p2p.cli import node as node_main
from noloco_p2p.compute import factory
from noloco_p2p.compute.factory import stage_sizes
from noloco_p2p.config import ModelSettings, NodeConfig, RunManifest
from noloco_p2p.errors import ConfigError, LocalError, NolocoError
from noloco_p2p.io.dht.identity import peer_id_of
from noloco_p2p.launch import compose, foreseen, homes

SWARM, NODE = "swarm", "noloco-node"
PEER = peer_id_of(bytes(32))
MISTAKES = [
    (SWARM, "--stages 5", "stages is 5, but the model has only 4 layers: each stage needs one"),
    (SWARM, "--stages 1000", "stages is 1000, but the model has only 4 layers: each stage needs one"),
    (SWARM, "--set model.config.num_attention_heads=3", "hidden size (128).*multiple.*attention heads (3)"),
    (
        SWARM,
        "--set model.config.num_key_value_heads=3",
        "num_attention_heads 4 is not divisible by num_key_value_heads 3",
    ),
    (SWARM, "--set model.family=lama", "has no causal language model 'lama' (did you mean 'llama'?)"),
    (SWARM, "--set model.config.num_hidden_layer=4", "did you mean 'num_hidden_layers'?"),
    (SWARM, "--set model.config.tie_word_embeddings=true", "tie_word_embeddings is true, which needs one stage"),
    (SWARM, "--set sequence_length=4096", "has 128 positions: raise model.config.max_position_embeddings"),
    (SWARM, "--set model.config.vocab_size=300", "the byte tokenizer has 384 ids, the model's vocab_size is 300"),
    (NODE, "--set model.config.vocab_size=300 --describe", "the byte tokenizer has 384 ids"),
    (
        SWARM,
        "--set data.kind=text --set data.tokenizer=a/b --set tokenizer_dir={tok}",
        "has 501 ids, .* is 384",
    ),
    (SWARM, "--set data.tokenizer=a/b --set tokenizer_dir=nowhere", "tokenizer_dir: there is no directory nowhere"),
    (SWARM, "--set tokenizer_dir={tok}", "data.tokenizer is 'bytes', which has no files; unset one"),
    (SWARM, "--set device=cuda:99", "cuda:99 not found .*; set device to cpu or auto"),
    (NODE, "--set device=cuda:99", "cuda:99 not found .*; set device to cpu or auto"),
    (NODE, f"--join /ip4/127.0.0.1/tcp/1/p2p/{PEER} --set device=cuda:99", "cuda:99 not found"),
    (SWARM, "--set data.kind=text --set data_files=[{tmp}/*.txt]", "no data file matches {tmp}/*.txt"),
    (SWARM, "--set data.kind=text", "this kind of data needs data_files"),
    (SWARM, "--set data.kind=text --set data_files=[{tmp}/small]", "too small: it needs a piece to train on"),
    (SWARM, "--set data_files=[{tmp}/small]", "data.kind 'stdlib' reads Python's own library; set data.kind: text"),
    (
        SWARM,
        "--set checkpoint.every_steps=1",
        "{tmp} has 1.05 MB free, .* needs 27.6 MB: free some",
    ),
    (
        SWARM,
        "--dir {tmp}/small/run",
        "--dir {tmp}/small/run is a file, not the directory of a swarm: name another directory",
    ),
    (SWARM, "--link 200", "--link 200: "),
    (SWARM, "--set outer.gamma=2", "outer: .*; set outer.allow_unstable to run it anyway"),
    (SWARM, "--set outer.rule=adam", "outer.rule must be 'noloco'"),
    (SWARM, "--set outer.codec=int3", "outer.codec must be"),
    (SWARM, "--set inner.optimizer=moun", "inner.optimizer must be 'adamw' or 'muon', not 'moun'"),
    (NODE, "--set listen.dht_port={port}", "port {port} .*in use"),
    (NODE, "--set listen.dht_port=4101 --set listen.grpc_port=4101", "are both 4101: give each its own port"),
    (NODE, "--set listen.host=203.0.113.7", "cannot listen on 203.0.113.7"),
    (NODE, "--join 127.0.0.1:4101", "127.0.0.1:4101"),
    (NODE, "--stage 2", "stage 2: the run has stages 0 to 1"),
    (NODE, "--address-file {tmp}/none/address", "there is no directory {tmp}/none"),
]


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


@pytest.mark.parametrize(("command", "options", "expected"), MISTAKES)
def test_a_mistake_is_reported_before_anything_starts(
    command: str,
    options: str,
    expected: str,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    for what in ("Popen", "run"):
        monkeypatch.setattr(subprocess, what, started)
    monkeypatch.setattr(compose, "run_to_end", started)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").write_text("few words")
    if "every_steps=1" in options:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    names = {"tmp": str(tmp_path), "port": str(port), "tok": str(tmp_path / "tok")}
    if "{tok}" in options:
        save_tokenizer(tmp_path / "tok", {chr(33 + i): i for i in range(90)} | {"<eos>": 500})
    app: Typer = node_main.app if command == NODE else noloco_main.app
    words = [word.format(**names) for word in options.split()]
    with pytest.raises(NolocoError) as told:
        app(args=words if command == NODE else [command, *words], standalone_mode=False)
    line = str(told.value)
    assert len(line.splitlines()) == 1, line
    for part in expected.format(**names).split(".*"):
        assert part in line
    assert {path.name for path in tmp_path.iterdir()} <= {"small", "tok"}, "nothing is left behind"


def test_a_full_disk_is_called_full_if_no_checkpoint_is_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that a checkpoint needed 0 B."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(LocalError, match=f"^{tmp_path} is full: free some space or name another directory$"):
        homes.check_room(tmp_path / "run", 0, "nothing")


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_parameters_of_a_plain_model_need_no_torch(stages: int) -> None:
    manifest = RunManifest(stages=stages)
    sizes = stage_sizes(manifest)
    assert foreseen._plain_parameters(manifest) == sum(stage.parameters for stage in sizes)
    odd = ModelSettings(config={**manifest.model.config, "hidden_size": 124})
    assert foreseen._plain_parameters(manifest.model_copy(update={"model": odd})) is None, "31 values per head"


WIDE = ModelSettings(config=RunManifest().model.config | {"vocab_size": 3_000_000_000})
HUGE = {"rows": RunManifest(microbatch_size=10**9), "weights": RunManifest(model=WIDE)}


@pytest.mark.parametrize("case", HUGE)
def test_a_manifest_that_needs_too_much_memory_is_refused_before_any_is_allocated(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joining node gets the manifest from a peer; doctor and noloco-node use the same check (hole 18)."""
    manifest = HUGE[case]
    monkeypatch.setattr(factory, "make_stage_module", None)
    for index in range(manifest.stages):
        with pytest.raises(LocalError, match=r"needs [0-9.]+ GiB .* but this machine has") as caught:
            factory.make_torch_stage(manifest, index, "me", self_test=False)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 4), ("tie_word_embeddings", True)])
def test_a_model_that_does_not_fit_the_stages_is_refused_without_importing_torch(
    key: str, value: int, tmp_path: Path
) -> None:
    config = RunManifest().model.config | {"num_hidden_layers": 9, key: value}
    manifest = RunManifest(stages=9, model=ModelSettings(config=config))
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"stages is 9, but|which needs one stage, not 9"):
        foreseen.check_swarm(manifest, NodeConfig(), tmp_path, said.append)
    assert said == []


def test_without_a_temporary_directory_no_swarm_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server of its nodes ended with a traceback."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(FileNotFoundError, match="No usable temporary directory"):
        foreseen.check_swarm(RunManifest(), NodeConfig(), tmp_path, print)


def test_a_swarm_that_does_not_fit_the_machine_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, parameters = RunManifest(), sum(stage.parameters for stage in stage_sizes(RunManifest()))
    needed = 4 * parameters * 4 * manifest.start_replicas + 4 * foreseen.PROCESS_BYTES
    for free in (needed, None):
        monkeypatch.setattr(foreseen, "free_host_bytes", lambda free=free: free)
        foreseen.check_swarm(manifest, NodeConfig(), tmp_path, print)
    monkeypatch.setattr(foreseen, "free_host_bytes", lambda: needed - 1)
    with pytest.raises(LocalError, match=r"4 nodes need .* use fewer nodes"):
        foreseen.check_swarm(manifest, NodeConfig(), tmp_path, print)
