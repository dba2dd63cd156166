"""The audit files record what the stage really did, in the format of ARCHITECTURE.md, "Files"."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from stages import make_batch, make_manifest, make_stages, microbatch, run_microbatch, vector_of, weights

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.config import AuditSettings
from noloco_p2p.core.stage_values import StepLabel
from noloco_p2p.errors import LocalError

KEY = "origin-0000000000000007-"


def test_a_round_is_on_record(tmp_path: Path) -> None:
    manifest = make_manifest()
    stage, last = (
        make_torch_stage(manifest, index, peer, audit=AuditSettings(dir=str(tmp_path / "audit")), self_test=False)
        for index, peer in enumerate(("me", "next"))
    )
    other = make_stages(manifest, "other")
    stages, names = [stage, last], list(stage.parameters)
    initial = weights([stage])
    run_microbatch(stages, make_batch(1), microbatch(1))
    stage.inner_step(StepLabel(1, 0, 1e-2, {}))
    fast = weights([stage])
    theirs = vector_of(other[0], other[0].snapshot(1, 10))
    stage.merge(stage.snapshot(1, 10), [theirs])
    directory = tmp_path / "audit"
    kinds = ["slow", "frozen", "fast", "momentum", "slow_after", "momentum_after", "adam_mean", "adam_square"]
    kinds += ["partner_vector"]
    record = load_file(directory / "round-000001-me.safetensors")
    assert set(record) == {f"{kind}/{name}" for kind in kinds for name in names}
    for name in names:
        assert torch.equal(record[f"slow/{name}"], initial[name])
        assert torch.equal(record[f"fast/{name}"], fast[name])
        assert torch.equal(record[f"slow_after/{name}"], weights([stage])[name])
        assert torch.allclose(record[f"momentum_after/{name}"], record[f"slow_after/{name}"] - record[f"slow/{name}"])
        adam = stage._optimizer._optimizers[0].state[stage.parameters[name]]
        assert torch.equal(record[f"adam_mean/{name}"], adam["exp_avg"])
        assert torch.equal(record[f"adam_square/{name}"], adam["exp_avg_sq"])
    assert any(record[f"adam_mean/{name}"].any() for name in names)
    recorded = torch.cat([record[f"partner_vector/{name}"].flatten() for name in names])
    assert torch.equal(recorded, host_tensor.to_torch(theirs.vector))
    with safe_open(directory / "round-000001-me.safetensors", "pt") as file:
        assert file.metadata() == {
            "round": "1",
            "peer_id": "me",
            "partner_id": "other",
            "partner_round": "1",
            "partner_step": "10",
            "rule": "noloco",
            "frozen_after": "1",
            "merged_after": "1",
            "alpha": "0.5",
            "beta": "0.7",
            "gamma": "0.7",
        }
    frozen = stage.snapshot(2, 20)
    run_microbatch(stages, make_batch(2), microbatch(2))
    stage.inner_step(StepLabel(2, 1, 1e-2, {}))
    stage.merge(frozen)
    with safe_open(directory / "round-000002-me.safetensors", "pt") as file:
        found = file.metadata()
    about = ("partner_id", "partner_round", "frozen_after", "merged_after")
    assert [found[name] for name in about] == ["", "", "1", "2"]


def test_initial_weights_are_on_record(tmp_path: Path) -> None:
    stage = make_torch_stage(make_manifest(), 1, "me", audit=AuditSettings(dir=str(tmp_path)), self_test=False)
    initial = weights([stage])
    record = load_file(tmp_path / "initial-me.safetensors")
    assert record.keys() == initial.keys()
    assert all(torch.equal(record[name], initial[name]) for name in initial)


def test_a_node_that_moves_does_not_overwrite_its_first_weights(tmp_path: Path) -> None:
    began, _ = [
        make_torch_stage(make_manifest(), index, "me", audit=AuditSettings(dir=str(tmp_path)), self_test=False)
        for index in (1, 0)
    ]
    assert load_file(tmp_path / "initial-me.safetensors").keys() == weights([began]).keys()


def test_inner_steps_and_batches_are_on_record(tmp_path: Path) -> None:
    stages = [
        make_torch_stage(
            make_manifest(), index, f"peer{index}", audit=AuditSettings(dir=str(tmp_path)), self_test=False
        )
        for index in range(2)
    ]
    batches = {microbatch(3): make_batch(3), microbatch(1): make_batch(1, padded=2)}
    losses = {identity: run_microbatch(stages, batch, identity)[0].loss_sum for identity, batch in batches.items()}
    run_microbatch(stages, make_batch(3), microbatch(3))
    routes = dict.fromkeys(batches, (None, "peer1"))
    began_at = time.time()
    stages[0].inner_step(StepLabel(1, 0, 0.25, routes, batches))
    stages[0].inner_step(StepLabel(2, 2, 0.5, {}))
    stages[1].inner_step(StepLabel(1, 0, 0.25, {microbatch(3): ("peer0", None)}))
    lines = [json.loads(line) for line in (tmp_path / "steps-peer0.jsonl").read_text().splitlines()]
    expected = [
        {"id": f"{KEY}{n}", "previous": None, "next": "peer1", "tokens": 13, "loss_sum": losses[microbatch(n)]}
        for n in (3, 1)
    ]
    inner_at = [line.pop("at") for line in lines]
    assert began_at <= inner_at[0] <= inner_at[1] <= time.time()
    assert lines[0] == {"inner_step": 1, "step": 0, "learning_rate": 0.25, "microbatches": expected}
    assert lines[1] == {"inner_step": 2, "step": 2, "learning_rate": 0.5, "microbatches": []}
    record = load_file(tmp_path / "batches-peer0-000001.safetensors")
    assert sorted(record) == sorted(
        [f"{kind}/{KEY}{n}" for kind in ("inputs", "targets") for n in (1, 3)] + [f"mask/{KEY}1"]
    )
    assert torch.equal(record[f"targets/{KEY}3"], host_tensor.to_torch(make_batch(3).targets))
    assert (tmp_path / "batches-peer0-000002.safetensors").exists()
    assert not (tmp_path / "batches-peer1-000001.safetensors").exists()
    later = json.loads((tmp_path / "steps-peer1.jsonl").read_text())
    assert [(one["previous"], one["next"]) for one in later["microbatches"]] == [("peer0", None), (None, None)]


def test_without_weights_there_are_inner_steps_only(tmp_path: Path) -> None:
    stages = make_stages(make_manifest(), audit=AuditSettings(dir=str(tmp_path), weights=False))
    run_microbatch(stages, make_batch(1), microbatch(1))
    stages[0].inner_step(StepLabel(1, 0, 0.25, {}, {microbatch(1): make_batch(1)}))
    stages[0].merge(stages[0].snapshot(1, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["steps-me.jsonl"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    stages = make_stages(make_manifest(), audit=AuditSettings(dir=str(tmp_path)))
    os.symlink("/dev/full", tmp_path / "steps-me.jsonl")
    with pytest.raises(LocalError, match=r"the audit cannot write .*steps-me.jsonl: No space left on device; free"):
        stages[0].inner_step(StepLabel(1, 0, 0.25, {}))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(LocalError, match=r"audit.dir: cannot create .*file"):
        make_torch_stage(make_manifest(), 0, "me", audit=AuditSettings(dir=str(blocked)), self_test=False)


def test_an_unfinished_line_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    """A full disk cuts a line short. Once there was space again, the first line of the restarted node continued it, so
    that neither could be read."""
    stages, file = make_stages(make_manifest(), audit=AuditSettings(dir=str(tmp_path))), tmp_path / "steps-me.jsonl"
    stages[0].inner_step(StepLabel(1, 0, 0.25, {}))
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:-20])
    for step in (2, 3):
        stages[0].inner_step(StepLabel(step, step - 1, 0.25, {}))
    first, cut, *others = file.read_text().split("\n")
    assert [first, cut] == [whole.decode().rstrip(), whole[:-20].decode()]
    assert [json.loads(line)["inner_step"] for line in others[:-1]] == [2, 3]
    assert others[-1] == ""


def test_a_directory_that_vanishes_is_one_line(tmp_path: Path) -> None:
    stages = make_stages(make_manifest(), audit=AuditSettings(dir=str(tmp_path / "audit")))
    for path in (tmp_path / "audit").iterdir():
        path.unlink()
    (tmp_path / "audit").rmdir()
    with pytest.raises(LocalError, match=r"round-000001-me\.safetensors: .*No such file .*; free") as caught:
        stages[0].merge(stages[0].snapshot(1, 10))
    assert "\n" not in str(caught.value)
