"""Six nodes over the real DHT and gRPC compute the algorithm of the reference, to 1e-9.

They wait for their partners: with overlap, a snapshot that takes longer than three inner steps is merged a round later,
and a busy machine can delay one that long. Overlapped rounds are replayed in test_replay_simulated.py.
"""

import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from audit_writer import MODELS
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from processes import node_processes
from reference import TOLERANCE, replay, require_variety
from soak import soak

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.io.dht.identity import peer_id_of

STAGES, REPLICAS, T, VOCABULARY = 2, 3, 8, 32
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
PATCHED_NODE = Path(__file__).parents[1] / "support" / "patched_node.py"


EXACT = {"forward": "float64", "backward": "float64"}


def settings(family: str, home: Path) -> dict[str, object]:
    """Lockstep: all nodes present before step 1, gradients clipped now and then, microbatches with different token
    counts. GPT-2's hidden states and gradients are sent as codes."""
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
        "outer": {"rule": "noloco", "inner_steps": 3, "overlap": False, "partner_wait_s": 60.0},
        "routing": "balanced",
        "wire": {"forward": "int8", "backward": "int4"} if family == "gpt2" else EXACT,
        "compute_dtype": "float64",
        "evaluation": {"every_steps": None, "microbatches": 1},
        "data_files": [str(home / "*.parquet")],
        "audit": {"dir": str(home / "audit")},
        "limits": {"patience_floor_s": 60.0},  # a slow node is not hung: a second route would break the lockstep
    }


def write_data(home: Path) -> None:
    """Rows of 2 to 9 tokens; the rest of a sample is padding, which is no target."""
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


@pytest.mark.parametrize("family", ["llama", *soak(one for one in sorted(MODELS) if one != "llama")])
def test_a_run_between_processes_computes_the_algorithm(tmp_path: Path, family: str) -> None:
    write_data(tmp_path)
    run = settings(family, tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    manifest = RunManifest.model_validate({k: v for k, v in run.items() if k not in NodeConfig.model_fields})
    stages = {write_identity(tmp_path / str(n), n): n % STAGES for n in range(STAGES * REPLICAS)}
    command = (sys.executable, str(PATCHED_NODE), "--config", str(tmp_path / "run.yaml"))
    with node_processes(tmp_path) as nodes:
        first = nodes.start("--stage", "0", command=command, own_dir="0")
        join = ("--join", first.endpoints().join[0])
        for n in range(1, STAGES * REPLICAS):
            nodes.start("--stage", str(n % STAGES), *join, command=command, own_dir=str(n))
        nodes.all_end_well()
        nodes.nothing_left()
    report = replay(tmp_path / "audit", manifest.model_dump(), stages)
    require_variety(report)
    assert report.deviations.keys() >= {"slow", "fast", "momentum_after", "adam_mean", "adam_square", "loss"}
    assert max(report.deviations.values()) <= TOLERANCE
