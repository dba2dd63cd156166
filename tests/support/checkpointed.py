"""Checkpoints of small runs on disk, and their export; shared by the tests of export and evaluation."""

import asyncio
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from stages import SIZES

from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import EvaluationSettings, InnerSettings, ModelSettings, OuterSettings, RunManifest
from noloco_p2p.core.messages import Checkpoint
from noloco_p2p.io.storage.file_checkpoints import FileCheckpoints
from noloco_p2p.launch.export import run_export

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
        inner=InnerSettings(optimizer="adamw"),
        outer=OuterSettings(rule="noloco"),
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


def save(
    manifest: RunManifest,
    home: Path,
    stage: TorchStage,
    peer: str,
    round: int,
    step: float = 7.5,
    run_id: str = "",
    fresh_round: int = 0,
) -> None:
    """Write what a node leaves in its directory. `run_id`: the run id in the checkpoint, if not the manifest's."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "manifest.json").write_bytes(manifest.canonical_json())
    state = replace(stage.capture(round, step, 7), fresh_round=fresh_round)
    checkpoint = Checkpoint(state, None, random.Random(0).getstate())
    asyncio.run(FileCheckpoints(home, run_id or manifest.run_id, peer, 3).save(checkpoint))


def save_swarm(manifest: RunManifest, run: Path, replicas: Sequence[int], round: int = 3) -> list[list[TorchStage]]:
    """Write checkpoints of `replicas` replicas per stage, laid out as `noloco swarm` does. Returns the stages."""
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
    options = {"merge": "mean" if mean else "one", "replicas": True, "tokenizer_dir": None, **options}
    run_export((), directories, out, **options)
    return out


class ClosedPipe(io.StringIO):
    """A standard output that nobody reads any more."""

    def write(self, text: str) -> int:
        """Fail, as a write to such a pipe does."""
        raise BrokenPipeError
