"""Proof 3 between processes: six nodes over the real DHT and gRPC compute the algorithm of the reference, to 1e-9."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from audit_writer import MODELS
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from reference import TOLERANCE, replay, require_variety

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.io.identity import peer_id_of

STAGES, REPLICAS, T, VOCABULARY = 2, 3, 8, 32
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
WAIT_S = 120.0
PATCHED_NODE = Path(__file__).with_name("patched_node.py")


def settings(family: str, home: Path) -> dict[str, object]:
    """Lockstep: everybody there before step 1, the clip binding now and then, microbatches of unequal tokens."""
    return {
        "name": "proof",
        "seed": 5,
        "start_replicas": REPLICAS,
        "stages": STAGES,
        "model": {"family": family, "config": MODELS[family] | (NO_DROPOUT if family == "gpt2" else {})},
        "data": {"kind": "parquet"},
        "sequence_length": T,
        "microbatch_size": 2,
        "microbatches_per_step": 3,
        "steps": 9,
        "inner": {"peak_learning_rate": 1e-2, "clip_norm": 0.76 if family == "gpt2" else 0.7},
        "outer": {"inner_steps": 3, "partner_wait_s": 60.0},
        "routing": "balanced",
        "wire_dtype": "float64",
        "compute_dtype": "float64",
        "evaluation": {"every_steps": None, "microbatches": 1},
        "data_files": [str(home / "*.parquet")],
        "audit": {"dir": str(home / "audit")},
    }


def write_data(home: Path) -> None:
    """Rows of 2 to 9 tokens: the rest of a sample is padding that counts as no target."""
    rng = random.Random(1)
    for name in ("train.parquet", "validation.parquet"):
        rows = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(2, T + 1))] for _ in range(400)]
        table = pyarrow.table({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
        pyarrow.parquet.write_table(table, home / name)


def write_identity(directory: Path, number: int) -> str:
    """A key that is a function of its number, so that routes and pairs are the same in every run."""
    seed = number.to_bytes(32, "big")
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    directory.mkdir(parents=True)
    path = directory / "identity.key"
    path.touch(mode=0o600)
    path.write_bytes(b"\x08\x01\x12\x40" + seed + public)
    return peer_id_of(public)


def start(home: Path, number: int, stage: int, *extra: str) -> subprocess.Popen[bytes]:
    arguments = ["--config", str(home / "run.yaml"), "--stage", str(stage), "--dir", str(home / str(number)), *extra]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (home / f"{number}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(PATCHED_NODE), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=home,
        )


def join_address(home: Path, first: subprocess.Popen[bytes]) -> str:
    path, give_up_at = home / "0" / "endpoints.json", time.monotonic() + WAIT_S
    while not path.exists():
        assert first.poll() is None, (home / "0.log").read_text()
        assert time.monotonic() < give_up_at, f"no {path} within {WAIT_S} s"
        time.sleep(0.05)
    return str(json.loads(path.read_text())["join"][0])


@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_run_between_processes_computes_the_algorithm(tmp_path: Path, family: str) -> None:
    write_data(tmp_path)
    run = settings(family, tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    manifest = RunManifest.model_validate({k: v for k, v in run.items() if k not in NodeConfig.model_fields})
    stages = {write_identity(tmp_path / str(n), n): n % STAGES for n in range(STAGES * REPLICAS)}
    nodes = [start(tmp_path, 0, 0)]
    try:
        address = join_address(tmp_path, nodes[0])
        nodes += [start(tmp_path, n, n % STAGES, "--join", address) for n in range(1, STAGES * REPLICAS)]
        for number, node in enumerate(nodes):
            assert node.wait(WAIT_S) == 0, (tmp_path / f"{number}.log").read_text()
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    report = replay(tmp_path / "audit", manifest.model_dump(), stages)
    require_variety(report)
    assert report.deviations.keys() >= {"slow", "fast", "momentum", "adam_mean", "adam_square", "loss"}
    assert max(report.deviations.values()) <= TOLERANCE
