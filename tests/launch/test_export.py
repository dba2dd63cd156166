"""Export from checkpoints: the logits, the mean over replicas, the files, and what is refused."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed import TEXT, ClosedPipe, exported, make_replica, save, save_swarm, small_run
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from noloco_p2p.cli.main import export_model
from noloco_p2p.compute import exported_model, host_tensor
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import HostTensor
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data.tokenizers import BYTES
from noloco_p2p.io.storage.checkpoint_format import CheckpointFiles, read_tensors
from noloco_p2p.launch import collection, homes
from noloco_p2p.launch.export import read_record, recorded_data, replaced, run_export
from noloco_p2p.launch.run_files import LOCAL, local_files, stored_manifest


def weights_in(directory: Path) -> dict[str, Tensor]:
    """The weights, as AutoModelForCausalLM loads them."""
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


def pipeline_logits(stages: Sequence[TorchStage], tokens_BT: Tensor) -> Tensor:
    """The output of the stages, run in sequence."""
    flow = host_tensor.from_torch("inputs", tokens_BT)
    for stage in stages:
        _, flow = stage.forward(flow, None)
    return host_tensor.to_torch(flow)


@pytest.mark.parametrize(
    ("family", "stages", "model"),
    [
        ("llama", 1, {}),
        ("llama", 2, {}),
        ("llama", 3, {}),
        ("gpt2", 1, {"tie_word_embeddings": True}),
        ("gpt2", 2, {}),
        ("gpt2", 3, {}),
        ("qwen3_moe", 2, {}),
    ],
)
def test_logits_equal_those_of_the_pipeline(tmp_path: Path, family: str, stages: int, model: dict[str, Any]) -> None:
    manifest = small_run(family, stages, model)
    swarm = save_swarm(manifest, tmp_path / "run", [2] * stages)
    out = exported(tmp_path / "run", tmp_path / "out", mean=False)
    tokens_BT = torch.randint(0, 384, (2, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(out)(input_ids=tokens_BT.long()).logits
    assert torch.equal(found, pipeline_logits([mine[0] for mine in swarm], tokens_BT))
    assert not (out / "replicas").exists()


def test_the_merge_is_the_mean_and_single_replicas_form_whole_models(tmp_path: Path) -> None:
    manifest = small_run()
    swarm = save_swarm(manifest, tmp_path / "run", [3, 2])
    out = exported(tmp_path / "run", tmp_path / "out")
    merged, chains = weights_in(out), [weights_in(out / "replicas" / str(i)) for i in range(3)]
    assert not (out / "replicas" / "3").exists()
    for mine in swarm:
        for name in mine[0].parameters:
            values = [stage.parameters[name].detach() for stage in mine]
            mean = torch.stack([value.double() for value in values]).mean(dim=0).float()
            assert torch.equal(merged[name], mean)
            assert not torch.equal(merged[name], values[0])
            for i, chain in enumerate(chains):
                assert torch.equal(chain[name], values[i % len(values)])


@pytest.mark.parametrize(("replicas", "cut"), [(3, 1), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_the_trimmed_mean_equals_that_of_numpy(replicas: int, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported_model, "TRIMMED_AT_ONCE", 7)
    drawn = np.random.default_rng(replicas).normal(size=(replicas, 5, 6)).astype(np.float32)
    drawn[0, 1, 2], drawn[1, 1, 2], drawn[2, 3, 3] = np.nan, -1e38, np.inf
    found = exported_model.trimmed_mean([{"w": torch.tensor(one)} for one in drawn])["w"].numpy()
    expected = np.sort(drawn.astype(np.float64), axis=0)[cut:-cut].mean(0).astype(np.float32)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_only_a_complete_model_is_written(tmp_path: Path) -> None:
    manifest = small_run()
    first, last = (dict(make_replica(manifest, index, "a").parameters) for index in (0, 1))
    for stages in ([first], [first, last | {"lm_head.bias": last["lm_head.weight"]}]):
        with pytest.raises(ConfigError, match=r"the stages do not form a complete model: lm_head\."):
            exported_model.write_model(manifest, stages, tmp_path)
    assert not [*tmp_path.iterdir()]
    exported_model.write_model(manifest, [first, last], tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_a_wrong_replica_keeps_the_trimmed_mean_within_the_range_of_the_others(tmp_path: Path) -> None:
    [mine] = save_swarm(small_run(stages=1), tmp_path / "run", [4])
    with torch.no_grad():
        for parameter in mine[2].parameters.values():
            parameter.mul_(-1000)
    save(small_run(stages=1), tmp_path / "run" / "0-2", mine[2], "peer-0-2", 3)
    merged = weights_in(exported(tmp_path / "run", tmp_path / "out", merge="trimmed"))
    for name, value in merged.items():
        right = torch.stack([mine[at].parameters[name].detach() for at in (0, 1, 3)])
        assert bool(((right.amin(0) <= value) & (value <= right.amax(0))).all())
    assert "without the outermost values of each stage" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "replicas" / "3").is_dir()


def test_two_replicas_have_no_trimmed_mean(tmp_path: Path) -> None:
    save_swarm(small_run(), tmp_path / "run", [3, 2])
    with pytest.raises(ConfigError, match="stage 1 has 2"):
        exported(tmp_path / "run", tmp_path / "out", merge="trimmed")


def test_the_record_lists_the_checkpoints_that_were_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest round that both stages have is 4; one node of stage 0 has only an older one, and is named."""
    manifest = small_run()
    for peer, stage, rounds in (("a", 0, (2, 4, 6)), ("b", 0, (2,)), ("c", 1, (2, 4))):
        replica = make_replica(manifest, stage, peer)
        for round in rounds:
            save(manifest, tmp_path / peer, replica, peer, round, step=10.0 * round + 0.5)
    out = exported([tmp_path / peer for peer in "abc"], tmp_path / "out")
    record = json.loads((out / "noloco.json").read_text())
    assert record["run_id"] == manifest.run_id
    assert (record["round"], record["step"], record["replicas"]) == (4, 40, 0)
    assert record["stages"] == [[{"peer_id": "a", "step": 40}], [{"peer_id": "c", "step": 40}]]
    output = capsys.readouterr().out
    assert "not used: b of stage 0: its newest checkpoint is of round 2" in output
    assert "checkpoints up to outer round 6; round 4 is the last that every stage has" in output
    assert f"run {manifest.run_id}, outer round 4" in output


def test_of_two_checkpoints_of_one_round_the_later_one_is_used(tmp_path: Path) -> None:
    """For example, of a node's directory and an old copy of it."""
    manifest = small_run(stages=1)
    stage = make_replica(manifest, 0, "a")
    save(manifest, tmp_path / "a", stage, "a", 3)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with torch.no_grad():
        for theta in stage.parameters.values():
            theta.add_(1)
    save(manifest, tmp_path / "a", stage, "a", 3, step=9.0)
    found = weights_in(exported(tmp_path, tmp_path / "out"))
    assert all(torch.equal(found[name], theta) for name, theta in stage.parameters.items())


def test_of_two_lineages_in_a_stage_the_earlier_one_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean of trained weights and of others that began as initial ones later would be worthless."""
    manifest = small_run(stages=1)
    fresh, trained = (make_replica(manifest, 0, peer) for peer in "ab")
    save(manifest, tmp_path / "a", fresh, "a", 3, fresh_round=2)
    save(manifest, tmp_path / "b", trained, "b", 3)
    found = weights_in(exported(tmp_path, tmp_path / "out"))
    assert all(torch.equal(found[name], theta) for name, theta in trained.parameters.items())
    assert "not used: a of stage 0: its weights began afresh later" in capsys.readouterr().out


def test_a_corrupt_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    manifest = small_run()
    save_swarm(manifest, tmp_path / "run", [2, 2])
    (path,) = (tmp_path / "run" / "1-0").glob("**/*.safetensors")
    data = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    data[length + header["fast/lm_head.weight"]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    with pytest.raises(LocalError) as error:
        exported(tmp_path / "run", tmp_path / "out")
    assert str(path) in str(error.value)
    assert str(path.with_suffix(".json")) in str(error.value)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["run"]


def test_weights_of_another_model_or_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    manifest = small_run(stages=1)
    broken = make_replica(manifest, 0, "a")
    broken.parameters["lm_head.weight"].data.fill_(torch.nan)
    save(manifest, tmp_path / "run", broken, "a", 3)
    with pytest.raises(LocalError, match=r"safetensors is not finite in fast/lm_head\.weight$"):
        exported(tmp_path / "run", tmp_path / "out")
    other = make_replica(small_run(stages=1, model={"intermediate_size": 32}), 0, "a")
    save(manifest, tmp_path / "run", other, "a", 4)
    with pytest.raises(LocalError, match=r"safetensors does not fit this stage: fast/.* is out of place$"):
        exported(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(("removed", "enough"), [(2, True), (3, False)])
def test_a_running_node_may_remove_a_checkpoint_before_it_is_read(
    removed: int, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one is there by then."""
    manifest = small_run(stages=1)
    stage = make_replica(manifest, 0, "a")
    save(manifest, tmp_path / "a", stage, "a", 3)
    left = [*range(removed)]

    def read_late(checkpoint: CheckpointFiles, kinds: set[str]) -> tuple[HostTensor, ...]:
        if left:
            save(manifest, tmp_path / "a", stage, "a", 6 - left.pop())
            for path in (checkpoint.path, checkpoint.tensors_path):
                path.unlink(missing_ok=True)
        return read_tensors(checkpoint, kinds)

    monkeypatch.setattr(collection, "read_tensors", read_late)
    if enough:
        record = json.loads((exported(tmp_path, tmp_path / "out") / "noloco.json").read_text())
        assert record["round"] == 6
    else:
        with pytest.raises(LocalError):
            exported(tmp_path, tmp_path / "out")


def test_each_reason_against_an_export_has_its_message(tmp_path: Path) -> None:
    manifest, run, out = small_run(), tmp_path / "run", tmp_path / "out"
    run.mkdir()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        exported(run, out)
    with pytest.raises(ConfigError, match="no such directory"):
        exported(tmp_path / "nowhere", out)
    save(manifest, run / "0-0", make_replica(manifest, 0, "a"), "a", 3)
    with pytest.raises(ConfigError, match="no checkpoint of stage 1: give"):
        exported(run, out)
    save(manifest, run / "1-0", make_replica(manifest, 1, "b"), "b", 2)
    with pytest.raises(ConfigError, match=r"stage 0 has 3; stage 1 has 2; .* let the run continue"):
        exported(run, out)
    save(manifest, run / "1-0", make_replica(manifest, 1, "b"), "b", 3)
    other = small_run(stages=1)
    save(other, tmp_path / "other", make_replica(other, 0, "a"), "a", 3)
    with pytest.raises(ConfigError, match=f"several runs.*{other.run_id[:12]} in {tmp_path / 'other'}"):
        exported([run, tmp_path / "other"], out)
    join = ["/ip4/127.0.0.1/tcp/1/p2p/x"]
    with pytest.raises(ConfigError, match="either --join ADDR"):
        run_export(join, [run], out, merge="mean", replicas=True, tokenizer_dir=None)
    with pytest.raises(ConfigError, match="tokenizer_dir is set"):
        exported(run, out, tokenizer_dir=str(tmp_path))
    assert sorted(found.name for found in tmp_path.iterdir()) == ["other", "run"]
    out.mkdir()
    (out / "something").touch()
    with pytest.raises(ConfigError, match="is not empty: name"):
        exported(run, out)
    (out / "something").unlink()
    assert exported(run, out).is_dir()


def test_the_manifest_must_match_the_checkpoints(tmp_path: Path) -> None:
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    path = tmp_path / "a" / "manifest.json"
    path.write_bytes(small_run(stages=1, family="gpt2").canonical_json())
    with pytest.raises(LocalError, match=f"manifest.json is of run .*{manifest.run_id[:12]}"):
        exported(tmp_path, tmp_path / "out")
    path.write_text("{}x")
    with pytest.raises(
        LocalError, match=r"manifest\.json is damaged, or another version wrote it: name another directory$"
    ):
        exported(tmp_path, tmp_path / "out")
    path.unlink()
    with pytest.raises(LocalError, match=r"manifest\.json is missing"):
        exported(tmp_path, tmp_path / "out")


def test_an_existing_empty_directory_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a link to an empty directory, the current directory, and one with hidden files only, like a fresh clone."""
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    clone, linked, here = (tmp_path / name for name in ("clone", "linked", "here"))
    for directory in (clone, linked, here):
        directory.mkdir()
    (clone / ".gitattributes").write_text("theirs")
    (tmp_path / "link").symlink_to(linked)
    monkeypatch.chdir(here)
    for out in (clone, tmp_path / "link", Path()):
        run_export((), [tmp_path / "a"], out, merge="mean", replicas=True, tokenizer_dir=None)
        assert read_record(out)[0] == manifest
        assert not list(out.glob("*.new")), "no temporary directory is left"
    assert (clone / ".gitattributes").read_text() == "theirs"
    assert (linked / "model.safetensors").read_bytes() == (clone / "model.safetensors").read_bytes()


def test_the_card_has_the_figures_of_the_swarm_also_from_within_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had those of the node."""
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "0-0", make_replica(manifest, 0, "a"), "a", 3)
    for place, tokens in ((tmp_path, 8_000), (tmp_path / "0-0", 4_000)):
        (place / "summary.json").write_text(json.dumps({"run_id": manifest.run_id, "tokens": tokens}))
    monkeypatch.chdir(tmp_path / "0-0")
    run_export((), [Path()], tmp_path / "out", merge="mean", replicas=True, tokenizer_dir=None)
    assert "| tokens | 8,000 |" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_is_written_although_nobody_reads_which_weights_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PYTHONUNBUFFERED, as in the containers, `| head -1` ended the command before it wrote anything."""
    manifest = small_run(stages=1)
    for name, round in ("a", 3), ("b", 2):
        save(manifest, tmp_path / name, make_replica(manifest, 0, name), name, round)
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    export_model(tmp_path / "out", from_=[tmp_path])
    assert read_record(tmp_path / "out") == (manifest, 0)


def test_the_command_fails_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "noloco_p2p.cli.main", "export", "--from", str(tmp_path), "--out", "x"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"error: --from {tmp_path}: there is no complete checkpoint in it or below it\n"


def test_the_tokenizer_matches_the_training_data(tmp_path: Path) -> None:
    manifest = small_run()
    save_swarm(manifest, tmp_path / "run", [1, 1])
    out = exported(tmp_path / "run", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == 384
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == BYTES.encode(TEXT.encode()).tolist()
    assert tokenizer.decode(tokenizer(TEXT).input_ids, skip_special_tokens=True) == TEXT
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == BYTES.eos
    assert (model.dtype, model.config.architectures) == (torch.float32, ["LlamaForCausalLM"])


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_the_byte_tokenizer_is_loaded_even_if_the_family_has_its_own(tmp_path: Path, family: str) -> None:
    """AutoTokenizer would use the family's tokenizer, which fails or decodes nonsense."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    exported_model.write_tokenizer(None, tmp_path)
    assert exported_model.load_decoder(tmp_path)(BYTES.encode(TEXT.encode()).tolist()) == TEXT
    exported_model.write_tokenizer(str(tmp_path), tmp_path / "copy")
    assert exported_model.load_decoder(tmp_path / "copy")(BYTES.encode(TEXT.encode()).tolist()) == TEXT


def test_ids_beyond_the_tokenizer_decode_to_nothing(tmp_path: Path) -> None:
    """With a vocab_size of 512 for the 384 ids of the byte tokenizer."""
    exported_model.write_tokenizer(None, tmp_path)
    assert exported_model.load_decoder(tmp_path)([*BYTES.encode(b"ab"), 384, 511]) == "ab"


def test_a_run_from_before_the_wire_settings_can_be_exported_but_not_continued(tmp_path: Path) -> None:
    fields = small_run(stages=1).model_dump(mode="json")
    del fields["wire"]
    older = json.dumps(fields | {"wire_dtype": "bfloat16"}, sort_keys=True, separators=(",", ":")).encode()
    run_id = hashlib.sha256(older).hexdigest()
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3, run_id=run_id)
    (tmp_path / "a" / "manifest.json").write_bytes(older)
    out = exported(tmp_path, tmp_path / "out")
    record = json.loads((out / "noloco.json").read_text())
    assert record["run_id"] == run_id
    assert record["manifest"]["wire"] == {"forward": "bfloat16", "backward": "bfloat16"}
    assert RunManifest.model_validate_json(older).wire.backward == "bfloat16"
    with pytest.raises(LocalError, match="written by another version"):
        stored_manifest(tmp_path / "a")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"manifest": {}, "replicas": 1e999}', '{"manifest": 3}', "[]"])
def test_an_unreadable_record_is_reported(tmp_path: Path, text: str) -> None:
    for name in ("config.json", "noloco.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="is not what `noloco export` writes"):
        read_record(tmp_path)
    assert recorded_data(tmp_path) == ()


@pytest.mark.parametrize("size", [None, "x", 1e300, True, "9" * 5000])
def test_a_record_without_the_size_of_the_vocabulary_is_reported(tmp_path: Path, size: object) -> None:
    manifest = RunManifest().model_dump(mode="json")
    manifest["model"]["config"] |= {"vocab_size": size}
    (tmp_path / "noloco.json").write_text(json.dumps({"manifest": manifest, "replicas": 0}))
    with pytest.raises(ConfigError, match="is not what `noloco export` writes"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("written", "files"), [("null", ()), ("3", ()), ('"a.txt"', ()), ('["a.txt", 3, "b.txt"]', ("a.txt", "b.txt"))]
)
def test_only_text_values_of_data_files_in_a_record_are_used(
    tmp_path: Path, written: str, files: tuple[str, ...]
) -> None:
    for name in ("noloco.json", LOCAL):
        (tmp_path / name).write_text(f'{{"data_files": {written}}}')
    assert recorded_data(tmp_path) == local_files([tmp_path]).data_files == files


def test_an_unwritable_target_is_reported_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes.refuse_existing(tmp_path / "new" / "model")
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path), mode) != (tmp_path, os.W_OK))
    with pytest.raises(LocalError, match=rf"^cannot write to {tmp_path} \(Permission denied\): name"):
        homes.refuse_existing(tmp_path / "new" / "model")


def test_what_a_killed_process_left_does_not_stop_the_next_one(tmp_path: Path) -> None:
    """In a container both have the same process id: a fine-tuning failed when it had done all its steps."""
    (tmp_path / "there").mkdir()
    for left in (tmp_path / f".model.{os.getpid()}.new", tmp_path / "there" / f".{os.getpid()}.new"):
        left.mkdir()
        (left / "model.safetensors").touch()
    for name in ("model", "there"):
        with replaced(tmp_path / name) as fresh:
            (fresh / "noloco.json").touch()
        assert [path.name for path in (tmp_path / name).glob("[!.]*")] == ["noloco.json"]


def test_of_two_commands_that_write_to_one_directory_the_first_to_end_wins(tmp_path: Path) -> None:
    """The later one replaced some of its files: the weights were of one run, and the replicas of another."""
    later = ExitStack()
    (later.enter_context(replaced(tmp_path)) / "model.safetensors").write_text("slow")
    with replaced(tmp_path) as fast:
        (fast / "model.safetensors").write_text("fast")
        (fast / "noloco.json").touch()
    with pytest.raises(ConfigError, match=f"^--out {tmp_path} is an exported model: name"):
        later.close()
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "noloco.json"}
    assert (tmp_path / "model.safetensors").read_text() == "fast"


SLOW = """
import time
from noloco_p2p.cli import main
from noloco_p2p.launch import export
def slow(join, from_, out, **_):
    with export.replaced(out) as fresh:
        (fresh / "model.safetensors").touch()
        print("writing", flush=True)
        time.sleep(1000)
export.run_export = slow
main.main()
"""


@pytest.mark.usefixtures("minds_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_export_interrupted_by_a_signal_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", SLOW, "export", "--from", "run", "--out", str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as export:
        assert export.stdout is not None
        assert export.stdout.readline() == "writing\n"
        export.send_signal(number)
        assert export.communicate() == ("", "")
    assert export.returncode == 128 + number
    assert [*tmp_path.iterdir()] == []
