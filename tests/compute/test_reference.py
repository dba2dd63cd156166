"""The reference accepts a run that is simulated another way (stage by stage, torch's AdamW), but no planted fault."""

import ast
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from audit_writer import MODELS, STAGES, Simulation, run_manifest
from reference import TOLERANCE, Report, float64_llama, replay, require_variety
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from soak import soak
from transformers.models.llama.modeling_llama import LlamaRMSNorm

KINDS = {"slow", "frozen", "fast", "momentum", "slow_after", "momentum_after", "adam_mean", "adam_square", "loss"}
KINDS |= {"partner_vector"}


def simulate(audit: Path, family: str, fault: str = "", delays: tuple[int, ...] = (0,)) -> Report:
    """Simulate with `fault` and replay it."""
    manifest = run_manifest(family, overlap=delays != (0,))
    with float64_llama():
        Simulation(audit, manifest, fault, delays).run()
    return replay(audit, manifest.model_dump(), STAGES)


@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_faithful_run_is_accepted(tmp_path: Path, family: str) -> None:
    report = simulate(tmp_path, family)
    require_variety(report)
    assert report.deviations.keys() == KINDS
    assert 0 < max(report.deviations.values()) < 1e-10
    assert report.delays == {0}


@pytest.mark.parametrize("delays", [(0, 1, 2), *soak([((1,),), ((2,),)])])
def test_a_run_that_trains_on_during_its_rounds_is_accepted(tmp_path: Path, delays: tuple[int, ...]) -> None:
    """Over all of an interval of two steps, half of it, or none; the last round is waited for."""
    report = simulate(tmp_path, "llama", delays=delays)
    assert report.deviations.keys() == KINDS
    assert 0 < max(report.deviations.values()) < 1e-10
    assert report.delays == {0, *delays} | ({1} if 2 in delays else set())


@pytest.mark.parametrize("fault", ["progress lost", "progress counted twice"])
def test_progress_during_a_round_that_is_lost_or_counted_twice_is_rejected(tmp_path: Path, fault: str) -> None:
    with pytest.raises(AssertionError, match=r"inner step 4, s0r0 \(stage 0\), \S+: loss: deviates"):
        simulate(tmp_path, "gpt2", fault, delays=(1,))


def test_a_round_merged_late_needs_a_run_that_allows_it(tmp_path: Path) -> None:
    simulate(tmp_path, "gpt2", delays=(1,))
    with pytest.raises(AssertionError, match=r"round 1, s0r0 \(stage 0\): merged after 3, due after 2"):
        replay(tmp_path, run_manifest("gpt2").model_dump(), STAGES)


FAULTS = {
    "sign of beta": r"round 1, s0r0 \(stage 0\): slow_after/\S+: deviates",
    "gamma 0": r"round 1, s0r0 \(stage 0\): partner_vector/\S+: deviates",
    "gradient came back another path": r"inner step 4, s0r1 \(stage 0\), s0r1-0{15}b-6: loss: deviates",
    "lost": r"inner step 4, s0r\d \(stage 0\), \S+: loss: deviates",
    "lost in the record": r"inner step 3: s0r1-\S+ was lost, not counted at stages \[1\]",
    "counted twice": r"inner step 4, s0r\d \(stage 0\), \S+: loss: deviates",
    "counted twice in the record": r"inner step 3: s0r1-\S+ was counted twice at stage 1",
    "clip over the whole model": r"inner step 2, s0r0 \(stage 0\), \S+: loss: deviates",
    "Adam reset at an outer round": r"inner step 4, s0r0 \(stage 0\), \S+: loss: deviates",
    "division by microbatches": r"inner step 2, s0r0 \(stage 0\), \S+: loss: deviates",
    "mean of means": r"inner step 2, s0r0 \(stage 0\), \S+: loss: deviates",
    "learning rate of the next step": r"inner step 1, s0r0 \(stage 0\): learning rate 0.0068\d+, expected 0.0091",
    "one permutation for ever": r"stage 1: the same permutation in 10 blocks",
    "uneven load": r"inner step 1, stage 1, slots from 0: not balanced",
    "one-sided pull": r"round 1, stage 1: s1r\d took s1r\d, which is no matching",
}
"""Each planted fault, and a pattern of what the reference reports."""


@pytest.mark.parametrize("fault", [*list(FAULTS)[::2], *soak(list(FAULTS)[1::2])])
def test_a_planted_fault_is_rejected(tmp_path: Path, fault: str) -> None:
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        simulate(tmp_path, "gpt2", fault)


def test_no_tensor_may_deviate_by_more_than_the_tolerance(tmp_path: Path) -> None:
    simulate(tmp_path, "gpt2")
    path = tmp_path / "round-000003-s1r2.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    name = "adam_square/lm_head.weight"
    tensors[name] += 2 * TOLERANCE * tensors[name].max()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(AssertionError, match=r"round 3, s1r2 \(stage 1\): adam_square/lm_head.weight: deviates by 2"):
        replay(tmp_path, run_manifest("gpt2").model_dump(), STAGES)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    simulate(tmp_path, "gpt2")
    (tmp_path / "round-000002-s0r1.safetensors").unlink()
    with pytest.raises(AssertionError, match=r"missing files.*round-000002-s0r1\.safetensors"):
        replay(tmp_path, run_manifest("gpt2").model_dump(), STAGES)


def test_a_run_without_variety_proves_too_little() -> None:
    pairs: dict[int, list[dict[str, str | None]]] = {0: [{"a": "b", "b": "a", "c": None}] * 2}
    with pytest.raises(AssertionError, match="of stage 1 and not in others"):
        require_variety(Report(clip_norm=1.0, grad_norms={0: [0.5, 2.0], 1: [0.5, 0.9]}, tokens={3, 4}))
    with pytest.raises(AssertionError, match="all microbatches had"):
        require_variety(Report(clip_norm=1.0, grad_norms={0: [0.5, 2.0]}, tokens={3}))
    with pytest.raises(AssertionError, match="the pairs never changed"):
        require_variety(Report(clip_norm=1.0, grad_norms={0: [0.5, 2.0]}, tokens={3, 4}, pairs=pairs))


@pytest.mark.parametrize(
    "module", ["reference", "audit_record", "lattice_reference", "outer_reference", "wire_reference"]
)
def test_the_reference_imports_nothing_of_the_package(module: str) -> None:
    tree = ast.parse((Path(__file__).parents[1] / "support" / f"{module}.py").read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    allowed = {
        "numpy",
        "torch",
        "transformers",
        "safetensors",
        "audit_record",
        "lattice_reference",
        "outer_reference",
        "wire_reference",
        *sys.stdlib_module_names,
    }
    assert {name.partition(".")[0] for name in names} <= allowed


def test_the_patched_node_runs_the_node_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = LlamaRMSNorm.forward
    node = ModuleType("noloco_p2p.cli.node")

    def main() -> None:
        norm = LlamaRMSNorm(4).double()
        row = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)
        expected = row / torch.sqrt(row.square().mean() + 1e-6)
        sys.exit(0 if torch.allclose(norm(row), expected, rtol=1e-14, atol=0.0) else 1)

    vars(node)["main"] = main
    monkeypatch.setitem(sys.modules, "noloco_p2p.cli.node", node)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(__file__).parents[1] / "support" / "patched_node.py"), run_name="__main__")
    assert ended.value.code == 0
    assert LlamaRMSNorm.forward is stock
