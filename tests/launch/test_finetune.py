"""`noloco finetune`: what it learns, what it writes, and what it refuses before torch is loaded."""

import json
import math
import re
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed import ClosedPipe, exported, make_replica, save, save_swarm, small_run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from noloco_p2p.cli.finetune import finetune_model
from noloco_p2p.cli.main import app
from noloco_p2p.compute.exported_model import ExportedModel
from noloco_p2p.compute.stage import IGNORED
from noloco_p2p.core.schedule import learning_rate
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data.tokenizers import BYTES
from noloco_p2p.launch import finetuning
from noloco_p2p.launch.evaluation import run_eval, run_generate
from noloco_p2p.launch.examples import example, padded, read_examples
from noloco_p2p.launch.export import read_record
from noloco_p2p.launch.finetuning import Recipe, _split, run_finetune

ANSWERS = {"a=": "x1", "b=": "y2", "c=": "z3"}


def written(path: Path, pairs: Sequence[tuple[str, str]] | None = None) -> str:
    """Write a file of JSON lines; returns its path."""
    lines = [json.dumps({"prompt": p, "completion": c, "id": 1}) for p, c in pairs or list(ANSWERS.items()) * 8]
    path.write_text("\n".join([*lines, "", ""]))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model, the mean of two replicas."""
    home = tmp_path_factory.mktemp("model")
    save_swarm(small_run(), home / "run", [2, 2])
    return exported(home / "run", home / "out")


def tuned(model: Path, data: str, out: Path, said: list[str] | None = None, **recipe: Any) -> dict[str, Any]:
    say = (said if said is not None else []).append
    return run_finetune(model, [data], out, Recipe(**recipe), device="cpu", say=say)


def test_fine_tuning_learns_the_completions_and_writes_an_exported_model(tmp_path: Path, model: Path) -> None:
    data, out, said = written(tmp_path / "data.jsonl"), tmp_path / "tuned", list[str]()
    figures = tuned(model, data, out, said, learning_rate=1e-2, batch_size=8, steps=60, held_out=0.25)
    assert figures["held_out_loss"] < 0.05 < 2 < figures["held_out_before"]
    assert (figures["steps"], figures["examples"], figures["too_long"]) == (60, 18, 0)
    for prompt, completion in ANSWERS.items():
        assert "".join(run_generate(out, prompt, tokens=9, temperature=0.0, seed=0, device="cpu")) == completion
    assert read_record(out) == (read_record(model)[0], 0)
    assert run_eval(out, (), held_out=False, microbatches=1, device="cpu")["tokens"] == 32
    tokens = AutoTokenizer.from_pretrained(out)("a=", add_special_tokens=False, return_tensors="pt")
    said_by_it = AutoModelForCausalLM.from_pretrained(out).generate(**tokens, max_new_tokens=9, do_sample=False)
    assert AutoTokenizer.from_pretrained(out).decode(said_by_it[0], skip_special_tokens=True) == "a=x1"
    assert said[0] == "18 examples, 6 held out; 60 steps of 8"
    assert [re.sub(r"\d\.\d{4}", "x", line) for line in said[1:]] == ["step 60/60  loss x  rate 0.001"]


def test_the_model_is_written_although_nobody_reads_what_is_said(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`| head -1` ended the training without a model; so did a full disk with the log."""
    data, out = written(tmp_path / "data.jsonl"), tmp_path / "tuned"
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    with pytest.raises(BrokenPipeError):
        finetune_model(model, [data], out, steps=1)
    assert read_record(out)[1] == 0


def test_equal_seeds_give_equal_bytes(tmp_path: Path, model: Path) -> None:
    data = written(tmp_path / "data.jsonl")

    def made(name: str, seed: int) -> bytes:
        tuned(model, data, tmp_path / name, batch_size=4, epochs=1, seed=seed)
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert made("one", 1) == made("two", 1) != made("three", 2)


def test_a_step_is_adamw_with_the_mean_gradient_of_the_completions(tmp_path: Path, model: Path) -> None:
    """Compared with plain torch, example by example and without padding: two steps with warm-up and clipping."""
    pairs = [("ab=", "x"), ("c=", "yyyy")]
    out = tmp_path / "tuned"
    tuned(model, written(tmp_path / "data.jsonl", pairs), out, learning_rate=0.01, batch_size=2, steps=2, held_out=0.0)
    inner = read_record(model)[0].inner
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adam = torch.optim.AdamW(causal.parameters(), betas=(inner.beta1, inner.beta2), weight_decay=inner.weight_decay)
    for step in (1, 2):
        nats, tokens = torch.zeros(()), 0
        for prompt, completion in pairs:
            ids = torch.tensor([*(b + 3 for b in (prompt + completion).encode()), 1])
            chances = causal(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
            for at in range(len(prompt) - 1, len(ids) - 1):
                nats, tokens = nats - chances[at, ids[at + 1]], tokens + 1
        adam.param_groups[0]["lr"] = learning_rate(step, 2, 0.01, inner.warmup_steps, inner.final_fraction)
        adam.zero_grad()
        torch.autograd.backward(nats / tokens)
        torch.nn.utils.clip_grad_norm_(causal.parameters(), inner.clip_norm)
        adam.step()
    found = load_file(out / "model.safetensors")
    for name, theta in causal.named_parameters():
        torch.testing.assert_close(found[name], theta.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("optimizer", "last"), [("adamw", "0.00005"), ("muon", "0.00001")])
def test_the_default_peak_is_a_tenth_of_the_runs_or_after_muon_of_the_usual_one(
    tmp_path: Path, model: Path, optimizer: str, last: str
) -> None:
    """The last step's rate is a tenth of the peak."""
    start, said = shutil.copytree(model, tmp_path / "start"), list[str]()
    record = json.loads((start / "noloco.json").read_text())
    record["manifest"]["inner"] |= {"optimizer": optimizer, "peak_learning_rate": 5e-3}
    (start / "noloco.json").write_text(json.dumps(record))
    tuned(start, written(tmp_path / "data.jsonl"), tmp_path / "out", said, steps=1)
    assert said[-1].endswith(f"rate {last}")


def test_the_seed_determines_which_examples_are_held_out() -> None:
    examples = [example(BYTES, f"{number}=", "x") for number in range(20)]

    def held_out(seed: int) -> list[bytes]:
        trained, held, too_long = _split(examples, small_run(), Recipe(seed=seed, held_out=0.2))
        everybody = sorted(one.ids.tobytes() for one in trained + held)
        assert everybody == sorted(one.ids.tobytes() for one in examples)
        assert (len(held), too_long) == (4, 0)
        return sorted(one.ids.tobytes() for one in held)

    assert held_out(1) == held_out(1) != held_out(2)


def test_prompts_and_padding_do_not_count() -> None:
    batch = padded([example(BYTES, "ab", "c"), example(BYTES, "", "de")])
    assert np.frombuffer(batch.inputs.data, "<i4").reshape(2, 3).tolist() == [[100, 101, 102], [1, 103, 104]]
    targets = np.frombuffer(batch.targets.data, "<i4").reshape(2, 3).tolist()
    assert targets == [[IGNORED, 102, 1], [103, 104, 1]]


def test_examples_that_are_too_long_are_skipped_and_counted(tmp_path: Path, model: Path) -> None:
    pairs, said = [("a=", "x"), ("b" * 10, "c" * 6), ("b" * 10, "c" * 7)], list[str]()
    data = written(tmp_path / "data.jsonl", pairs)
    figures = tuned(model, data, tmp_path / "out", said, steps=1, held_out=0.0)
    assert (figures["examples"], figures["too_long"]) == (2, 1)
    assert said[0] == "skipped, longer than the run's 16 tokens: 1 example"
    with pytest.raises(ConfigError, match="of 1 example 0 fit into the run's 16 tokens"):
        tuned(model, written(tmp_path / "long.jsonl", pairs[2:]), tmp_path / "none")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"}', "no `completion`"),
        ('{"completion": "a"}', "no `prompt`"),
        ('{"prompt": "a", "completion": 3}', "no `completion`"),
        ('["a"]', "no `prompt`"),
        ('{"prompt"', "Expecting"),
        ("[" * 100_000, "maximum recursion depth"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"data.jsonl, line 3: {message}"):
        read_examples([str(path)], BYTES)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no line has a prompt"):
        read_examples([str(path)], BYTES)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_examples([str(path)], BYTES)


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8-sig")
    assert len(read_examples([str(path)], BYTES)) == 1


def test_a_model_whose_weights_are_a_link_to_nothing_is_refused(tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"model contains no model that can be loaded: .*model\.safetensors"):
        tuned(tmp_path / "model", written(tmp_path / "data.jsonl"), tmp_path / "out")


def test_a_model_with_more_layers_than_a_run_may_have_is_refused_before_it_is_made(tmp_path: Path, model: Path) -> None:
    """It was made layer by layer, which did not end within minutes."""
    shutil.copytree(model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 100_000}))
    with pytest.raises(ConfigError, match="100000 layers; at most 1024"):
        tuned(tmp_path / "model", written(tmp_path / "data.jsonl"), tmp_path / "out")


def test_a_model_that_is_moved_away_during_the_training_costs_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record was read again after the last step, and the result was lost."""
    shutil.copytree(model, tmp_path / "model")
    monkeypatch.setattr(finetuning, "_train", lambda *_: (tmp_path / "model").rename(tmp_path / "moved"))
    tuned(tmp_path / "model", written(tmp_path / "data.jsonl"), tmp_path / "out", steps=1)
    assert read_record(tmp_path / "out") == (read_record(model)[0], 0)


def test_a_model_with_a_damaged_tokenizer_is_refused_before_training(tmp_path: Path, model: Path) -> None:
    """The steps were taken, and their result was lost."""
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("[]")
    said: list[str] = []
    with pytest.raises(ConfigError, match="model contains no tokenizer that can be loaded"):
        tuned(tmp_path / "model", written(tmp_path / "data.jsonl"), tmp_path / "out", said, steps=1)
    assert len(said) == 1


def test_a_disk_without_room_for_the_model_is_reported_before_training(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size - 1))
    said: list[str] = []
    with pytest.raises(
        LocalError, match=rf"{tmp_path} has .* free, the model needs .*: free some space or name another directory"
    ):
        tuned(model, written(tmp_path / "data.jsonl"), tmp_path / "tuned", said)
    assert said == []


def test_a_model_that_does_not_fit_on_the_disk_is_one_line_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    """Whether it is exported or fine-tuned, and whether weights or other files are too large."""
    data = written(tmp_path / "data.jsonl")
    save(small_run(stages=1), tmp_path / "run", make_replica(small_run(stages=1), 0, "a"), "a", 3)
    before = {*tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, 80_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(LocalError, match=r"cannot be written: .*File too large") as exporting:
                exported(tmp_path / "run", tmp_path / "out")
            with pytest.raises(LocalError, match=r"cannot be written: .*File too large") as tuning:
                tuned(model, data, tmp_path / "out", steps=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not any("\n" in str(caught.value) for caught in (exporting, tuning))
        assert {*tmp_path.iterdir()} == before


def test_errors_are_reported_before_torch_is_imported(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "noloco_p2p.compute", None)
    data, full = written(tmp_path / "data.jsonl"), written(tmp_path / "full")
    for directory, file, out, message in [
        (tmp_path / "nowhere", data, tmp_path / "out", "there is no such directory"),
        (tmp_path, data, tmp_path / "out", "holds files that are not an exported model"),
        (model, str(tmp_path / "nowhere.jsonl"), tmp_path / "out", "no data file matches"),
        (model, data, Path(full), "is a file: name"),
    ]:
        with pytest.raises(ConfigError, match=message):
            tuned(directory, file, out)
    with pytest.raises(ImportError):
        tuned(model, data, tmp_path / "out")


def test_a_non_finite_loss_ends_the_training_and_leaves_nothing(tmp_path: Path) -> None:
    manifest = small_run(stages=1)
    replica = make_replica(manifest, 0, "a")
    save(manifest, tmp_path / "a", replica, "a", 3)
    out = exported(tmp_path / "a", tmp_path / "model")
    loaded = ExportedModel.load(out, "cpu")
    with torch.no_grad():
        next(iter(loaded.causal.parameters())).fill_(float("nan"))
    loaded.causal.save_pretrained(out)
    with pytest.raises(LocalError, match="not finite at step 1: try a lower --learning-rate"):
        tuned(out, written(tmp_path / "data.jsonl"), tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


def test_a_last_step_that_breaks_the_weights_is_an_error_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    data, out = written(tmp_path / "data.jsonl"), tmp_path / "tuned"
    for held_out in (0.0, 0.25):
        with pytest.raises(LocalError, match="not finite after step 1: try a lower --learning-rate"):
            tuned(model, data, out, learning_rate=math.inf, steps=1, held_out=held_out)
    assert not out.exists()


def test_the_command_reports_what_it_did(tmp_path: Path, model: Path) -> None:
    options = ["--data", written(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out"), "--epochs", "1"]
    done = CliRunner().invoke(app, ["finetune", str(model), *options, "--device", "cpu"])
    lines = done.output.splitlines()
    assert lines[0] == "23 examples, 1 held out; 1 step of 32"
    # The rate of the last step is a tenth of the peak, which is a tenth of the run's.
    assert "rate 0.00001" in lines[1]
    assert lines[2].startswith("held out: ")
    assert lines[3] == f"wrote {tmp_path / 'out'}"
