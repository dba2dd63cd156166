"""`noloco eval` and `noloco generate` on exported models."""

import io
import json
import os
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from math import log
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from checkpointed import TEXT, exported, make_replica, save, save_swarm, small_run
from safetensors.torch import load_file, save_file
from tokenizer_files import save_tokenizer
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from noloco_p2p.cli import main
from noloco_p2p.compute.exported_model import ExportedModel, chat_ids, load_decoder, write_tokenizer
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import DataSettings, NodeConfig, RunManifest
from noloco_p2p.core.messages import HostTensor, LossSum
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data.threaded_batches import make_batches
from noloco_p2p.io.data.tokenizers import BYTES
from noloco_p2p.launch import evaluation, run_files, swarm_end
from noloco_p2p.launch.evaluation import pieces, run_eval, run_generate, table_lines
from noloco_p2p.launch.export import exported_tokenizer
from noloco_p2p.launch.model_card import model_card
from noloco_p2p.launch.swarm_end import sample_lines, say_what_next

TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
"""A chat template: the message, and `=` where the answer starts."""


def byte_tokenizer(directory: Path) -> str:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return save_tokenizer(directory / "tokenizer", letters | {"<eos>": len(letters)})


def generated(out: Path, prompt: str, **options: Any) -> str:
    return "".join(run_generate(out, prompt, **options))


def text_run(node_dir: Path) -> RunManifest:
    """A checkpoint of a one-stage run over text, whose tokenizer exists only in a directory."""
    data = DataSettings(kind="text", tokenizer="some/name")
    manifest = small_run(stages=1).model_copy(update={"data": data, "steps": 3})
    save(manifest, node_dir, make_replica(manifest, 0, "a"), "a", 3)
    return manifest


def exported_with_tokenizer(directory: Path) -> tuple[Path, str]:
    """An exported model of such a run, and the directory of the tokenizer."""
    tokenizer = byte_tokenizer(directory)
    text_run(directory / "a")
    return exported(directory / "a", directory / "out", tokenizer_dir=tokenizer), tokenizer


def pipeline_loss(stages: Sequence[TorchStage], manifest: RunManifest) -> float:
    """The swarm's validation loss over one route: nats per token on the run's own held-out microbatches."""
    nats, tokens = 0.0, 0
    for batch in make_batches(manifest, NodeConfig(), "me").validation():
        flow: HostTensor | LossSum = batch.inputs
        for stage in stages:
            assert isinstance(flow, HostTensor)
            flow = stage.evaluate(flow, batch.targets, batch.mask)
        assert isinstance(flow, LossSum)
        nats, tokens = nats + flow.loss_sum, tokens + flow.tokens
    return nats / tokens


def test_evaluation_matches_the_swarms_own(tmp_path: Path) -> None:
    """On the data that the run held out: for the merged model, and for the mean over the replicas."""
    manifest = small_run()
    swarm = save_swarm(manifest, tmp_path / "run", [2, 2])
    out = exported(tmp_path / "run", tmp_path / "out")
    figures = run_eval(out, (), held_out=False, microbatches=None, device="cpu")
    routes = [pipeline_loss([mine[i] for mine in swarm], manifest) for i in range(2)]
    assert figures["replica_losses"] == pytest.approx(routes, rel=1e-6)
    assert figures["replica_mean"]["loss"] == pytest.approx(sum(routes) / 2, rel=1e-6)
    assert (figures["microbatches"], figures["tokens"]) == (4, 4 * 2 * 16)
    for mine in swarm:
        with torch.no_grad():
            for name, theta in mine[0].parameters.items():
                theta.copy_((theta + mine[1].parameters[name]) / 2)
    assert figures["merged"]["loss"] == pytest.approx(pipeline_loss([mine[0] for mine in swarm], manifest), rel=1e-6)
    assert figures["merged"]["loss"] != pytest.approx(figures["replica_mean"]["loss"], rel=1e-4)
    assert run_eval(out, ("stdlib",), held_out=False, microbatches=None, device="cpu") == figures
    assert run_eval(out, (), held_out=False, microbatches=3, device="cpu")["tokens"] == 3 * 2 * 16
    assert "mean of 2 replicas" in table_lines(figures)[0]


def test_all_tokens_of_files_are_evaluated(tmp_path: Path) -> None:
    """Including those of the last, shorter sample; each file is followed by an end of text."""
    manifest = small_run(stages=1)
    stage = make_replica(manifest, 0, "a")
    save(manifest, tmp_path / "a", stage, "a", 3)
    out = exported(tmp_path, tmp_path / "out")
    texts = [b"0123456789" * 7, TEXT.encode()]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    figures = run_eval(out, (str(tmp_path / "*.txt"),), held_out=False, microbatches=None, device="cpu")
    size = len(b"".join(texts))
    assert (figures["tokens"], figures["bytes"]) == (size + 2, size)
    assert "replica_mean" not in figures
    ids = torch.tensor([1, *(byte + 3 for byte in texts[0]), 1, *(byte + 3 for byte in texts[1]), 1])
    nats = 0.0
    model = AutoModelForCausalLM.from_pretrained(out)
    for at in range(0, size + 2, 16):
        inputs, targets = ids[at : at + 16][: size + 2 - at], ids[at + 1 : at + 17]
        with torch.no_grad():
            logits = model(input_ids=inputs[None]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    assert figures["merged"]["loss"] == pytest.approx(nats / (size + 2), rel=1e-6)
    assert figures["merged"]["bits_per_byte"] == pytest.approx(nats / log(2) / size, rel=1e-6)
    part = run_eval(out, (str(tmp_path / "*.txt"),), held_out=False, microbatches=2, device="cpu")
    assert part["tokens"] == 2 * 2 * 16
    (tmp_path / "2.txt").touch()
    assert run_eval(out, (str(tmp_path / "*.txt"),), held_out=False, microbatches=None, device="cpu") == figures
    none = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(none, tmp_path / "none.parquet")
    for name in ("none.parquet", "2.txt"):
        with pytest.raises(ConfigError, match=f"{name}: no text to evaluate on"):
            run_eval(out, (str(tmp_path / name),), held_out=False, microbatches=None, device="cpu")


def test_only_the_held_out_part_of_files_is_evaluated(tmp_path: Path) -> None:
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    out = exported(tmp_path, tmp_path / "out")
    (tmp_path / "long.txt").write_bytes(TEXT.encode() * 2000)
    files = (str(tmp_path / "long.txt"),)
    figures = run_eval(out, files, held_out=True, microbatches=None, device="cpu")
    text = manifest.model_copy(update={"data": manifest.data.model_copy(update={"kind": "text"})})
    batches = list(make_batches(text, NodeConfig(data_files=files), "me").validation())
    assert figures["microbatches"] == len(batches) == 4


def test_generation_is_determined_by_the_seed(tmp_path: Path) -> None:
    """Also beyond the context window, where gpt2 has no positions left."""
    manifest = small_run("gpt2")
    save_swarm(manifest, tmp_path / "run", [1, 1])
    out = exported(tmp_path / "run", tmp_path / "out")

    def said(seed: int, temperature: float = 1.0) -> str:
        return generated(out, "import ", tokens=60, temperature=temperature, seed=seed, device="cpu")

    assert said(1) == said(1) != said(2)
    assert said(1, 0.0) == said(2, 0.0) != said(1)
    for tiny in (1e-20, 1e-40, 1e-320):
        assert said(1, tiny) == said(1, 0.0), "at such a temperature only the best token is possible"
    assert said(1) != ""
    assert generated(out, "", tokens=5, temperature=1.0, seed=1, device="cpu") != ""
    latin = os.fsdecode("é".encode("latin-1"))
    assert generated(out, latin, tokens=5, temperature=1.0, seed=1, device="cpu") != ""


def test_a_sample_cannot_control_the_terminal(tmp_path: Path) -> None:
    """An untrained model writes any byte, including escapes and backspaces."""
    save_swarm(small_run(), tmp_path, [1, 1])
    title, *lines = sample_lines(tmp_path)
    assert title == "the model writes:"
    assert len(lines) > 1
    assert all(line.isprintable() and line.strip() for line in lines)


def test_a_model_is_large_only_if_one_checkpoint_of_each_stage_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are not read, however many there are."""
    save_swarm(small_run(), tmp_path, [2, 2])
    read_bytes = sum(path.stat().st_size for path in tmp_path.glob("*-0/checkpoints/*/*.safetensors"))
    monkeypatch.setattr(swarm_end, "MAX_BYTES", read_bytes)
    assert sample_lines(tmp_path)[0] == "the model writes:"
    monkeypatch.setattr(swarm_end, "MAX_BYTES", read_bytes - 1)
    assert sample_lines(tmp_path) == ["no sample: the model is large; noloco generate loads it"]


def test_a_run_on_token_ids_has_no_sample_and_says_why(tmp_path: Path) -> None:
    save_swarm(small_run().model_copy(update={"data": DataSettings(kind="parquet")}), tmp_path, [1, 1])
    [line] = sample_lines(tmp_path)
    assert line == "no sample: the run read token ids: noloco export --tokenizer-dir DIR adds their tokenizer"


def test_a_run_without_checkpoints_has_no_sample_and_says_why(tmp_path: Path) -> None:
    assert sample_lines(tmp_path) == ["no sample: the run has no checkpoints (checkpoint.every_steps)"]


def test_only_possible_commands_are_suggested_next(tmp_path: Path) -> None:
    said: list[str] = []
    say_what_next(tmp_path, said.append)
    assert [line.split()[0] for line in said] == ["report"], "a run without checkpoints has no model"
    save_swarm(small_run(), tmp_path, [1, 1])
    say_what_next(tmp_path, said.append)
    assert [line.split()[0] for line in said[1:]] == ["report", "export", "generate"]


@pytest.mark.parametrize("name", ["-x", "a b", "a\nb"])
def test_the_commands_suggested_next_can_be_pasted_whatever_the_directory_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`noloco report -x` was refused: there is no option -x."""
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    said: list[str] = []
    say_what_next(Path(name), said.append)
    _, *words = shlex.split(said[0])
    assert words[:2] == ["noloco", "report"]
    assert words[3:] == ["--out", f"{words[2]}/report.html"]
    assert not words[2].startswith("-")
    assert Path(words[2]).samefile(name)


@pytest.mark.parametrize("errors", ["replace", "ignore"])
def test_text_is_emitted_with_the_token_that_completes_it(errors: str) -> None:
    """In total it equals decoding everything at once, also for bytes that are not text."""

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors=errors)

    ids, taken = iter("aé🙂b".encode()), 0

    def come() -> Iterator[int]:
        nonlocal taken
        for one in ids:
            taken += 1
            yield one

    assert [(piece, taken) for piece in pieces(decode, b"> ", come())] == [("a", 1), ("é", 3), ("🙂", 7), ("b", 8)]
    draws = random.Random(0)
    for _ in range(200):
        given, noise = "é>".encode(), draws.choices("aé🙂".encode() + b"\xff", k=30)
        assert "".join(pieces(decode, given, noise)) == decode([*given, *noise])[2:]


def test_generate_streams_and_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = exported_with_tokenizer(tmp_path)
    options: dict[str, Any] = {"tokens": 40, "temperature": 1.0, "seed": 1, "device": "cpu"}
    said = list(run_generate(out, "3+4=", **options))
    assert len(said) > 10
    plain = "".join(said)
    with pytest.raises(ConfigError, match="has no chat template; leave out --chat"):
        generated(out, "3+4", chat=True, **options)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    assert generated(out, "3+4", chat=True, **options) == plain
    capsys.readouterr()
    main.generate_text(out, "3+4", chat=True, tokens=40, temperature=1.0, seed=1, device="cpu")
    assert capsys.readouterr().out == f"{plain}\n"
    (out / "chat_template.jinja").write_text("{{ raise_exception('only in verse') }}")
    with pytest.raises(ConfigError, match="the chat template fails: only in verse"):
        generated(out, "3+4", chat=True, **options)


def test_a_prompt_that_the_model_cannot_read_is_one_line(tmp_path: Path) -> None:
    """A token that was added to the tokenizer, beyond the model's vocabulary, was a traceback."""
    out, _ = exported_with_tokenizer(tmp_path)
    changed = AutoTokenizer.from_pretrained(out)
    changed.add_tokens([f"<{number}>" for number in range(384 - len(changed) + 1)])
    changed.save_pretrained(out)
    with pytest.raises(LocalError, match=r"^the prompt cannot be encoded: .* id 384, but .* vocab_size is 384"):
        generated(out, "<126>", tokens=1, temperature=0, seed=0, device="cpu")


def test_a_chat_prompt_is_the_template_alone(tmp_path: Path) -> None:
    """ByT5's tokenizer would end it with its token for the end of a text."""
    write_tokenizer(None, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert chat_ids(tmp_path, "ab") == BYTES.encode(b"ab=").tolist()


@pytest.mark.parametrize("text", ["{", '{"tokenizer_class": 3}', '{"tokenizer_class": "Unknown"}', "[]"])
def test_a_tokenizer_that_cannot_be_loaded_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"contains no tokenizer that can be loaded: .") as caught:
        load_decoder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("terminal", "shown"), [(True, "a\n [2Jb"), (False, "a\n\x1b[2Jb")])
def test_generated_control_characters_do_not_reach_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: str
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(evaluation, "run_generate", lambda *_, **__: iter(["a\n\x1b[2J", "b"]))
    monkeypatch.setattr(sys, "stdout", screen)
    main.generate_text(tmp_path, "x")
    assert screen.getvalue() == f"{shown}\n"


@pytest.mark.filterwarnings("error::FutureWarning")
def test_greedy_generation_with_a_cache_equals_full_forward_passes(tmp_path: Path) -> None:
    """The cached keys and values give the same tokens as a full forward pass, without deprecated argument names; also
    after a prompt that is longer than the context, and with a context of a single token."""
    manifest = small_run()
    save_swarm(manifest, tmp_path / "run", [1, 1])
    out = exported(tmp_path / "run", tmp_path / "out")
    model, loaded = AutoModelForCausalLM.from_pretrained(out), ExportedModel.load(out, "cpu")
    for prompt, window, half in ([50, 60, 70], 16, 8), ([*range(50, 70)], 16, 8), ([50, 60], 1, 1):
        continuation, seen = loaded.continuation(prompt, window, 0.0, 0), prompt[-window:]
        for _ in range(40):
            seen = seen[-half:] if len(seen) > window else seen
            with torch.no_grad():
                expected = int(model(input_ids=torch.tensor([seen])).logits[0, -1].argmax())
            assert next(continuation) == expected
            seen.append(expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_weights_are_reported(tmp_path: Path, temperature: float) -> None:
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    weights = load_file((out := exported(tmp_path, tmp_path / "out")) / "model.safetensors")
    save_file({name: weight * torch.inf for name, weight in weights.items()}, out / "model.safetensors")
    with pytest.raises(LocalError, match="its weights are broken"):
        generated(out, "x", tokens=1, temperature=temperature, seed=0, device="cpu")
    with pytest.raises(LocalError, match="its weights are broken"):
        run_eval(out, ["stdlib"], held_out=False, microbatches=1, device="cpu")  # JSON has no number for the loss


def test_a_directory_that_is_not_an_export_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "noloco.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"noloco\.json cannot be read"):
        run_eval(tmp_path / "odd", (), held_out=False, microbatches=None, device="cpu")
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    out = exported(tmp_path, tmp_path / "out")
    record = json.loads((out / "noloco.json").read_text()) | {"replicas": 2}
    (out / "noloco.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="replicas/0: there is no such directory"):
        run_eval(out, (), held_out=False, microbatches=1, device="cpu")
    # Copies, because loaded weights are the file's own pages in memory, and the file is about to be overwritten.
    whole = {name: value.clone() for name, value in load_file(out / "model.safetensors").items()}
    part = {name: value for name, value in whole.items() if name != "lm_head.weight"}
    for wrong in (part, {**whole, "lm_head.bias": whole["model.norm.weight"].clone()}):
        save_file(wrong, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"the weights do not fit config\.json \(lm_head\."):
            generated(out, "x", tokens=1, temperature=0.0, seed=0, device="cpu")
    torch.save(whole, out / "pytorch_model.bin")
    (out / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no model that can be loaded"):
        generated(out, "x", tokens=1, temperature=0.0, seed=0, device="cpu")  # pickled weights are not loaded
    (out / "pytorch_model.bin").unlink()
    (out / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no model that can be loaded"):
        generated(out, "x", tokens=1, temperature=0.0, seed=0, device="cpu")
    config = json.loads((out / "config.json").read_text()) | {"hidden_size": "many"}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"no model that can be loaded: .* expected int, got str"):
        generated(out, "x", tokens=1, temperature=0.0, seed=0, device="cpu")


@pytest.mark.parametrize(
    "raised",
    [
        MemoryError("Cannot allocate memory (os error 12)"),
        RuntimeError("unable to mmap 167008520 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16777216 bytes."),
    ],
)
def test_a_model_for_which_memory_is_lacking_is_not_taken_for_a_broken_one(
    raised: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    out = exported(tmp_path, tmp_path / "out")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(LocalError, match=f"^{out}: not enough memory to load the model on cpu: free some$"):
        ExportedModel.load(out, "cpu")


def test_local_files_of_the_run_need_not_be_named_again(tmp_path: Path) -> None:
    directory = byte_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT * 4000)
    manifest = text_run(tmp_path / "run" / "0-0")
    with pytest.raises(ConfigError, match=r"some/name cannot be loaded: .*; --tokenizer-dir DIR names"):
        exported(tmp_path / "run", tmp_path / "out")
    files = NodeConfig(tokenizer_dir=os.path.relpath(directory), data_files=(f"{tmp_path}/*.txt",))
    run_files.store_local_files(tmp_path / "run" / "0-0", files)
    summary = {"run_id": manifest.run_id, "completed": True, "tokens": 12_345, "validation_loss": 2.5}
    run_files.write_json(tmp_path / "run" / "summary.json", summary)
    out = exported(tmp_path / "run", tmp_path / "out")
    assert run_eval(out, (), held_out=False, microbatches=2, device="cpu")["microbatches"] == 2
    generated(out, "x", tokens=3, temperature=0.0, seed=0, device="cpu")
    card = (out / "README.md").read_text()
    for part in ("12,345", "2.5000 nats", manifest.run_id, "outer round 3", "local text files", "from_pretrained"):
        assert part in card, part
    plain = out.stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()} == {plain}


def test_the_model_card_has_no_figures_of_only_a_part_of_the_run(tmp_path: Path) -> None:
    """A resumed run counts only the tokens of its last part; a stopped run may have continued since."""
    summary = {"completed": True, "tokens": 12_345, "validation_loss": 2.5, "resumed_from_step": 40}
    manifest = text_run(tmp_path / "0-0")
    record = {"manifest": manifest.model_dump(mode="json"), "merge": "one", "round": 50, "stages": [[{}]]}
    record |= {"step": manifest.steps}
    card = model_card(record | {"run_id": manifest.run_id, "version": "1.0"}, summary)
    assert "12,345" not in card
    assert "2.5000 nats" in card
    card = model_card(record | {"run_id": manifest.run_id, "version": "1.0"}, summary | {"completed": False})
    assert "2.5000 nats" not in card
    earlier = {"run_id": manifest.run_id, "version": "1.0", "step": manifest.steps - 1}
    card = model_card(record | earlier, summary | {"resumed_from_step": None})
    assert "2.5000 nats" not in card, "the loss of later weights"
    assert "12,345" not in card


@pytest.mark.parametrize(
    ("data", "named", "loader"),
    [
        (DataSettings(), "the source text of Python's standard library", "ByT5Tokenizer"),
        (DataSettings(kind="text", tokenizer="some/name"), "local text files", "AutoTokenizer"),
        (DataSettings(kind="parquet", dataset="some/set"), "some/set", "AutoTokenizer"),
    ],
)
def test_the_model_card_says_what_the_model_is_and_how_to_load_it(data: DataSettings, named: str, loader: str) -> None:
    manifest = small_run().model_copy(update={"data": data, "steps": 3_000})
    record = {"manifest": manifest.model_dump(mode="json"), "merge": "mean", "round": 50, "stages": [[{}, {}], [{}]]}
    record |= {"step": 1_500, "run_id": "r", "version": "1.0"}
    card = model_card(record, {"completed": False, "tokens": 12_345, "validation_loss": 2.5})
    assert f"| data | {named} |" in card
    assert f"import AutoModelForCausalLM, {loader}\n" in card
    assert f"tokenizer = {loader}.from_pretrained" in card
    assert "| steps | 1,500 of 3,000, outer round 50 |" in card
    assert "| tokens | 12,345 |" in card, "those that it was trained on before it was stopped"
    assert "validation loss" not in card
    assert "| weights | the mean of the replicas of each stage that had this round, 3 nodes in all |" in card
    assert "| tokens |" not in model_card(record, {})
    stopped = {"completed": False, "tokens": 12_345, "resumed_from_step": None}
    assert "| tokens | 12,345 |" in model_card(record, stopped | {"inner_steps": 1_499})
    assert "| tokens |" not in model_card(record, stopped | {"inner_steps": 100}), "it was resumed, and is running"


def test_a_directory_called_bytes_is_not_the_byte_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that read token ids: the prompt was encoded as bytes, which are other ids there."""
    monkeypatch.chdir(tmp_path)
    manifest = small_run(stages=1).model_copy(update={"data": DataSettings(kind="parquet")})
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    Path(byte_tokenizer(tmp_path)).rename("bytes")
    exported(Path("a"), Path("model"), tokenizer_dir="bytes")
    Path("bytes").rename("tokenizer")
    Path("model").rename("bytes")
    expected = AutoTokenizer.from_pretrained("tokenizer")(TEXT).input_ids
    assert exported_tokenizer(manifest, Path("bytes")).encode(TEXT.encode()).tolist() == expected


def test_a_tokenizer_from_a_directory_is_exported(tmp_path: Path) -> None:
    """Bytes are counted and text is generated with the exported tokenizer."""
    out, directory = exported_with_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(TEXT).input_ids == AutoTokenizer.from_pretrained(directory)(TEXT).input_ids
    (tmp_path / "text.txt").write_text(TEXT)
    figures = run_eval(out, (str(tmp_path / "text.txt"),), held_out=False, microbatches=None, device="cpu")
    assert figures["tokens"] == len(TEXT.encode()) + 1
    (tmp_path / "czech.txt").write_text(czech := "kůň žluťoučký " * 20)
    figures = run_eval(out, (str(tmp_path / "czech.txt"),), held_out=False, microbatches=None, device="cpu")
    assert figures["bytes"] == len(czech.encode()), "each half of a character in two samples was counted as three bytes"
    (tmp_path / "ascii.txt").write_text("0123456789" * 7)
    figures = run_eval(out, (str(tmp_path / "ascii.txt"),), held_out=False, microbatches=None, device="cpu")
    assert (figures["tokens"], figures["bytes"]) == (71, 70)
    assert generated(out, "0", tokens=5, temperature=1.0, seed=1, device="cpu") != ""
    with pytest.raises(ConfigError, match="name them with --data"):
        run_eval(out, (), held_out=False, microbatches=None, device="cpu")


def test_a_model_of_token_ids_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on parquet files of ids does not know which text they stand for."""
    manifest = small_run(stages=1).model_copy(update={"data": DataSettings(kind="parquet")})
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    out = exported(tmp_path / "a", tmp_path / "out")
    assert "no tokenizer written" in capsys.readouterr().out
    ids = [[(7 * row + at) % 384 for at in range(20)] for row in range(200)]
    table = pyarrow.table({"input_ids": ids, "attention_mask": [[1] * 20 for _ in ids]})
    pyarrow.parquet.write_table(table, tmp_path / "ids.parquet")
    figures = run_eval(out, (str(tmp_path / "ids.parquet"),), held_out=True, microbatches=1, device="cpu")
    assert (figures["tokens"], figures["bytes"], figures["merged"]["bits_per_byte"]) == (32, None, None)
    assert table_lines(figures)[-2].split() == ["bits", "per", "byte", "-"]
    with pytest.raises(ConfigError, match="export again with --tokenizer-dir"):
        generated(out, "x", tokens=1, temperature=0.0, seed=0, device="cpu")
