"""The model taken home from checkpoints: its logits, its mean, its files, what is refused, its evaluation, its text."""

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from noloco_p2p.cli.collect import chosen, next_target
from noloco_p2p.cli.collection import Collection, Replica, better, common
from noloco_p2p.cli.evaluation import run_eval, run_generate, tell
from noloco_p2p.cli.export import Order, run_export
from noloco_p2p.compute import export, host
from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import DataSettings, EvaluationSettings, ModelSettings, NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert, Checkpoint, HostTensor, LossSum
from noloco_p2p.errors import ConfigError, LocalError, Violation
from noloco_p2p.io.batches import make_batches
from noloco_p2p.io.checkpoints import FileCheckpoints
from noloco_p2p.io.tokens import ByteTokenizer
from tests.stages import SIZES
from tests.test_batches import save_tokenizer

TEXT = "def f(x):\n    return 'žluťoučký kůň' + x  # 你好\n"
MOE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


def small_run(family: str = "llama", stages: int = 2, model: Mapping[str, Any] | None = None) -> RunManifest:
    """A run on bytes, with microbatches of 2 × 16 tokens."""
    sizes = MOE if family == "qwen3_moe" else SIZES[family]
    config = {**sizes, "vocab_size": 384, "n_positions" if family == "gpt2" else "max_position_embeddings": 32}
    return RunManifest(
        model=ModelSettings(family=family, config={**config, **(model or {})}),
        stages=stages,
        microbatch_size=2,
        sequence_length=16,
        evaluation=EvaluationSettings(microbatches=4),
    )


def make_replica(manifest: RunManifest, stage: int, peer: str) -> TorchStage:
    """A stage whose weights depend on the peer."""
    made = make_torch_stage(manifest, stage, peer, self_test=False)
    generator = torch.Generator().manual_seed(int.from_bytes(f"{stage}{peer}".encode()) % 2**60)
    with torch.no_grad():
        for theta in made.parameters.values():
            theta.add_(0.05 * torch.randn(theta.shape, generator=generator, dtype=theta.dtype))
    return made


def save(manifest: RunManifest, home: Path, stage: TorchStage, peer: str, round: int, step: float = 7.5) -> None:
    """What a node leaves in its directory."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "manifest.json").write_bytes(manifest.canonical_json())
    checkpoint = Checkpoint(stage.capture(round, step, 7), None, random.Random(0).getstate())
    asyncio.run(FileCheckpoints(home, manifest.run_id, peer, 3).save(checkpoint))


def save_swarm(manifest: RunManifest, run: Path, replicas: Sequence[int], round: int = 3) -> list[list[TorchStage]]:
    """Checkpoints of so many replicas of each stage, as `noloco swarm` arranges them; the stages, by stage."""
    swarm = []
    for index, count in enumerate(replicas):
        mine = [make_replica(manifest, index, f"peer-{index}-{number}") for number in range(count)]
        for number, stage in enumerate(mine):
            save(manifest, run / f"{index}-{number}", stage, f"peer-{index}-{number}", round)
        swarm.append(mine)
    return swarm


def exported(run: Path | Sequence[Path], out: Path, *, mean: bool = True, **options: Any) -> Path:
    """`noloco export --from`."""
    directories = (run,) if isinstance(run, Path) else tuple(run)
    run_export(Order((), directories, out, mean, **{"replicas": True, "tokenizer_dir": None, **options}))
    return out


def weights_in(directory: Path) -> dict[str, Tensor]:
    """The weights as AutoModelForCausalLM loads them."""
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


def pipeline_logits(stages: Sequence[TorchStage], tokens_BT: Tensor) -> Tensor:
    """What the stages give, one after the other."""
    flow = host.from_torch("inputs", tokens_BT)
    for stage in stages:
        _, flow = stage.forward(flow, None)
    return host.to_torch(flow)


def pipeline_loss(stages: Sequence[TorchStage], manifest: RunManifest) -> float:
    """The swarm's validation loss of one route: nats per token of the run's own held-out microbatches."""
    nats, tokens = 0.0, 0
    for batch in make_batches(manifest, NodeConfig(), "me").validation():
        flow: HostTensor | LossSum = batch.inputs
        for stage in stages:
            assert isinstance(flow, HostTensor)
            flow = stage.evaluate(flow, batch.targets, batch.mask)
        assert isinstance(flow, LossSum)
        nats, tokens = nats + flow.loss_sum, tokens + flow.tokens
    return nats / tokens


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
def test_logits_are_those_of_the_pipeline(tmp_path: Path, family: str, stages: int, model: dict[str, Any]) -> None:
    manifest = small_run(family, stages, model)
    swarm = save_swarm(manifest, tmp_path / "run", [2] * stages)
    out = exported(tmp_path / "run", tmp_path / "out", mean=False)
    tokens_BT = torch.randint(0, 384, (2, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(out)(input_ids=tokens_BT.long()).logits
    assert torch.equal(found, pipeline_logits([mine[0] for mine in swarm], tokens_BT))
    assert not (out / "replicas").exists()


def test_mean_is_the_mean_and_single_replicas_are_chained(tmp_path: Path) -> None:
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


def test_the_record_says_what_was_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    told = capsys.readouterr().out
    assert "not used: b of stage 0: its newest checkpoint is of round 2" in told
    assert f"run {manifest.run_id}, outer round 4" in told


def test_the_last_checkpoint_of_a_round_counts(tmp_path: Path) -> None:
    """Of a node and an old copy of its directory, say."""
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


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    manifest, run, out = small_run(), tmp_path / "run", tmp_path / "out"
    run.mkdir()
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        exported(run, out)
    with pytest.raises(ConfigError, match="no such directory"):
        exported(tmp_path / "nowhere", out)
    save(manifest, run / "0-0", make_replica(manifest, 0, "a"), "a", 3)
    with pytest.raises(ConfigError, match="no checkpoint of stage 1 "):
        exported(run, out)
    save(manifest, run / "1-0", make_replica(manifest, 1, "b"), "b", 2)
    with pytest.raises(ConfigError, match="stage 0 has 3; stage 1 has 2"):
        exported(run, out)
    save(manifest, run / "1-0", make_replica(manifest, 1, "b"), "b", 3)
    other = small_run(stages=1)
    save(other, tmp_path / "other", make_replica(other, 0, "a"), "a", 3)
    with pytest.raises(ConfigError, match=f"several runs.*{other.run_id[:12]} in {tmp_path / 'other'}"):
        exported([run, tmp_path / "other"], out)
    with pytest.raises(ConfigError, match="either --join ADDR"):
        run_export(Order(("/ip4/127.0.0.1/tcp/1/p2p/x",), (run,), out, True, True, None))
    with pytest.raises(ConfigError, match="tokenizer_dir is set"):
        exported(run, out, tokenizer_dir=str(tmp_path))
    assert sorted(found.name for found in tmp_path.iterdir()) == ["other", "run"]
    out.mkdir()
    (out / "something").touch()
    with pytest.raises(ConfigError, match="not empty"):
        exported(run, out)
    (out / "something").unlink()
    assert exported(run, out).is_dir()


def test_the_manifest_must_be_that_of_the_checkpoints(tmp_path: Path) -> None:
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    path = tmp_path / "a" / "manifest.json"
    path.write_bytes(small_run(stages=1, family="gpt2").canonical_json())
    with pytest.raises(LocalError, match=f"manifest.json is of run .*{manifest.run_id[:12]}"):
        exported(tmp_path, tmp_path / "out")
    path.write_text("{}x")
    with pytest.raises(LocalError, match=r"manifest\.json is damaged"):
        exported(tmp_path, tmp_path / "out")
    path.unlink()
    with pytest.raises(LocalError, match=r"manifest\.json is not there"):
        exported(tmp_path, tmp_path / "out")


def test_the_command_ends_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "noloco_p2p.cli.main", "export", "--from", str(tmp_path), "--out", "x"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"error: --from {tmp_path}: no whole checkpoint lies there or below\n"


def test_the_tokenizer_is_that_of_the_training_data(tmp_path: Path) -> None:
    manifest = small_run()
    save_swarm(manifest, tmp_path / "run", [1, 1])
    out = exported(tmp_path / "run", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == 384
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == ByteTokenizer().encode(TEXT.encode()).tolist()
    assert tokenizer.decode(tokenizer(TEXT).input_ids, skip_special_tokens=True) == TEXT
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == ByteTokenizer.eos
    assert (model.dtype, model.config.architectures) == (torch.float32, ["LlamaForCausalLM"])


def test_a_tokenizer_of_a_directory_goes_along(tmp_path: Path) -> None:
    """Bytes of text are counted, and text is said, by means of the exported tokenizer."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    directory = save_tokenizer(tmp_path / "tokenizer", letters | {"<eos>": len(letters)})
    manifest = small_run(stages=1)
    manifest = manifest.model_copy(update={"data": DataSettings(kind="text", tokenizer="some/name")})
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    out = exported(tmp_path / "a", tmp_path / "out", tokenizer_dir=directory)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(TEXT).input_ids == AutoTokenizer.from_pretrained(directory)(TEXT).input_ids
    (tmp_path / "text.txt").write_text(TEXT)
    figures = run_eval(out, (str(tmp_path / "text.txt"),), held_out=False, microbatches=None, device="cpu")
    assert figures["tokens"] == len(TEXT.encode()) + 1
    (tmp_path / "ascii.txt").write_text("0123456789" * 7)
    figures = run_eval(out, (str(tmp_path / "ascii.txt"),), held_out=False, microbatches=None, device="cpu")
    assert (figures["tokens"], figures["bytes"]) == (71, 70)
    assert run_generate(out, "0", tokens=5, temperature=1.0, seed=1, device="cpu") != ""
    with pytest.raises(ConfigError, match="name them with --data"):
        run_eval(out, (), held_out=False, microbatches=None, device="cpu")


def test_token_ids_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on parquet files of ids does not know what they stand for."""
    manifest = small_run(stages=1).model_copy(update={"data": DataSettings(kind="parquet")})
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    out = exported(tmp_path / "a", tmp_path / "out")
    assert "no tokenizer is written" in capsys.readouterr().out
    ids = [[(7 * row + at) % 384 for at in range(20)] for row in range(200)]
    table = pyarrow.table({"input_ids": ids, "attention_mask": [[1] * 20 for _ in ids]})
    pyarrow.parquet.write_table(table, tmp_path / "ids.parquet")
    figures = run_eval(out, (str(tmp_path / "ids.parquet"),), held_out=True, microbatches=1, device="cpu")
    assert (figures["tokens"], figures["bytes"], figures["merged"]["bits_per_byte"]) == (32, None, None)
    assert tell(figures)[-2].split() == ["bits", "per", "byte", "-"]
    with pytest.raises(ConfigError, match="export once more with --tokenizer-dir"):
        run_generate(out, "x", tokens=1, temperature=0.0, seed=0, device="cpu")


def test_evaluation_is_the_swarms_own(tmp_path: Path) -> None:
    """On the data that the run held out: merged model, and mean over the replicas."""
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
    assert "mean of 2 replicas" in tell(figures)[0]


def test_all_tokens_of_files_are_evaluated(tmp_path: Path) -> None:
    """Also of the last sample, which is shorter; each file is followed by an end of text."""
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


def test_held_out_part_of_files(tmp_path: Path) -> None:
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    out = exported(tmp_path, tmp_path / "out")
    (tmp_path / "long.txt").write_bytes(TEXT.encode() * 2000)
    files = (str(tmp_path / "long.txt"),)
    figures = run_eval(out, files, held_out=True, microbatches=None, device="cpu")
    text = manifest.model_copy(update={"data": manifest.data.model_copy(update={"kind": "text"})})
    batches = list(make_batches(text, NodeConfig(data_files=files), "me").validation())
    assert figures["microbatches"] == len(batches) == 4


def test_generation_follows_from_the_seed(tmp_path: Path) -> None:
    """Past the window as well, which is when gpt2 has no positions left."""
    manifest = small_run("gpt2")
    save_swarm(manifest, tmp_path / "run", [1, 1])
    out = exported(tmp_path / "run", tmp_path / "out")

    def said(seed: int, temperature: float = 1.0) -> str:
        return run_generate(out, "import ", tokens=60, temperature=temperature, seed=seed, device="cpu")

    assert said(1) == said(1) != said(2)
    assert said(1, 0.0) == said(2, 0.0) != said(1)
    assert said(1) != ""
    assert run_generate(out, "", tokens=5, temperature=1.0, seed=1, device="cpu") != ""


def test_greedy_generation_is_that_of_the_whole_context(tmp_path: Path) -> None:
    """What the kept keys and values give is what a forward over all ids gives."""
    from noloco_p2p.compute.trained import TrainedModel

    manifest = small_run()
    save_swarm(manifest, tmp_path / "run", [1, 1])
    out = exported(tmp_path / "run", tmp_path / "out")
    model, ids = AutoModelForCausalLM.from_pretrained(out), [50, 60, 70]
    continuation = TrainedModel.load(out, "cpu").continuation(ids, 16, 0.0, 0)
    seen = list(ids)
    for _ in range(40):
        seen = seen[-8:] if len(seen) > 16 else seen
        with torch.no_grad():
            expected = int(model(input_ids=torch.tensor([seen])).logits[0, -1].argmax())
        assert next(continuation) == expected
        seen.append(expected)


def test_what_is_not_an_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"noloco\.json cannot be read"):
        run_eval(tmp_path, (), held_out=False, microbatches=None, device="cpu")
    manifest = small_run(stages=1)
    save(manifest, tmp_path / "a", make_replica(manifest, 0, "a"), "a", 3)
    out = exported(tmp_path, tmp_path / "out")
    (out / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no model that can be loaded"):
        run_generate(out, "x", tokens=1, temperature=0.0, seed=0, device="cpu")


# --- of a running swarm ----------------------------------------------------------------------------------------------


def test_weights_of_a_snapshot_are_phi_and_delta() -> None:
    stage = make_replica(small_run(), 1, "a")
    parameters = export.stage_specs(small_run(), 1)
    snapshot = stage.snapshot(3, 7)
    assert tuple(tensor.spec for tensor in snapshot.tensors) == export.snapshot_specs(parameters)
    found = export.fast_weights(snapshot, parameters)
    for name, theta in stage.parameters.items():
        torch.testing.assert_close(found[name], theta.detach(), rtol=1e-6, atol=1e-7)
    first = host.to_torch(snapshot.tensors[0]).clone()
    first.view(-1)[0] = torch.nan
    bad = replace(snapshot, tensors=(host.from_torch(parameters[0].name, first), *snapshot.tensors[1:]))
    bad = replace(bad, tensors=(replace(bad.tensors[0], name=snapshot.tensors[0].name), *bad.tensors[1:]))
    with pytest.raises(Violation, match="not finite"):
        export.fast_weights(bad, parameters)


@pytest.mark.parametrize(
    ("target", "rounds", "following"),
    [
        (7, {0: [7, 7], 1: [7, 7]}, 7),
        (7, {0: [7, 9], 1: [8, 7]}, 10),  # the swarm is past it: all are asked to reach the same later round
        (7, {0: [7, 6], 1: [7, 7]}, 6),  # somebody is one behind: the others still keep that round
        (7, {0: [7, 3], 1: [7, 7]}, 7),  # somebody is far behind: it goes without
        (7, {0: [7, 7], 1: [5, 4]}, 5),
    ],
)
def test_the_next_round_that_is_asked_for(target: int, rounds: dict[int, list[int]], following: int) -> None:
    assert next_target(target, rounds) == following


def test_who_is_asked() -> None:
    def advert(peer: str, stage: int, partner_from_round: int = 0) -> Advert:
        return Advert(peer, "run", stage, (), partner_from_round=partner_from_round)

    adverts = [advert("c", 1, 9), advert("b", 0), advert("a", 0, 9), advert("d", 0)]
    assert [one.peer_id for one in chosen(adverts, 8, 2, one=False)] == ["b", "d", "c"]
    assert [one.peer_id for one in chosen(adverts, 9, 2, one=False)] == ["a", "b", "d", "c"]
    assert [one.peer_id for one in chosen(adverts, 8, 2, one=True)] == ["b", "c"]


def test_the_newest_round_that_all_stages_have() -> None:
    manifest = small_run()

    def found(*at: tuple[str, int, int]) -> Collection | None:
        return common(manifest, [Replica(peer, stage, round, 1, {}) for peer, stage, round in at])

    newer = found(("b", 0, 5), ("a", 0, 5), ("c", 1, 5), ("d", 1, 6))
    assert newer is not None
    assert newer.round == 5
    assert [[replica.peer for replica in mine] for mine in newer.stages] == [["a", "b"], ["c"]]
    assert found(("a", 0, 5), ("c", 1, 6)) is None
    older_larger = found(("a", 0, 4), ("b", 0, 4), ("c", 1, 4), ("d", 1, 4))
    assert better(newer, older_larger) is better(older_larger, newer) is older_larger
    assert better(None, newer) is better(newer, None) is newer
