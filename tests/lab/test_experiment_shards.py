"""Experiment shards: which replica reads which kind, the losses on each kind, and a robust report."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from experiment_answer import answer

from noloco_p2p.core.messages import Batch
from noloco_p2p.io.data.samples import SampleStream, StreamPosition
from noloco_p2p.lab.experiments import shards
from noloco_p2p.lab.experiments.real_swarm import DealtStreams
from noloco_p2p.lab.experiments.results import markdown
from noloco_p2p.lab.experiments.shards import ALONE, KINDS, cases, corpora, measure, report
from noloco_p2p.lab.experiments.spec import Case, Figures, Result
from noloco_p2p.lab.experiments.training import TrainingPlan, small_manifest

COUNT = len(KINDS)
STRIPPED = {"distutils", "ensurepip", "idlelib", "lib2to3", "test", "tkinter", "turtledemo", "venv"}
"""Parts of the standard library that distributions package separately, or leave out."""


def read(replicas: int, mixed: bool, numbers: range) -> list[list[bytes]]:
    """The microbatches of each replica with these numbers."""
    manifest = small_manifest(16, 1, microbatch_size=1)
    plan = TrainingPlan(manifest, (replicas,), 1, corpora=corpora(), mixed=mixed)
    dealt = DealtStreams(plan, [SampleStream(text, manifest, f"s0r{kind}") for kind, text in enumerate(corpora())])
    return [[content(dealt.at(replica, number)) for number in numbers] for replica in range(replicas)]


def content(batch: Batch) -> bytes:
    return bytes(batch.inputs.data)


def test_every_installation_has_all_kinds_in_similar_amounts() -> None:
    parts = {one.split("/")[0] for where, *globs in KINDS.values() if where == "stdlib" for one in globs}
    assert not parts & STRIPPED
    sizes = [sum(piece.stop - piece.start for piece in (*text.pieces, *text.held_out_pieces)) for text in corpora()]
    assert max(sizes) < 8 * min(sizes)


def test_both_swarms_read_the_same_data_distributed_differently() -> None:
    manifest = small_manifest(16, 1, microbatch_size=1)
    streams = [
        SampleStream(text, manifest, f"s0r{kind}").batches(StreamPosition()) for kind, text in enumerate(corpora())
    ]
    expected = [[content(next(stream)[0]) for _ in range(4)] for stream in streams]
    own, mixed = read(COUNT, False, range(4)), read(COUNT, True, range(4))
    assert own == expected
    assert [sorted(same) for same in zip(*mixed, strict=True)] == [sorted(same) for same in zip(*own, strict=True)]
    assert mixed != own
    # A single replica reads all streams in turn.
    assert read(1, False, range(2 * COUNT))[0] == [
        one for same in zip(*(row[:2] for row in own), strict=True) for one in same
    ]


@pytest.mark.soak
def test_a_case_measures_the_loss_of_every_replica_on_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "QUICK", {"hidden": 16, "layers": 2, "steps": 2})
    monkeypatch.setattr(shards, "HELD_OUT", COUNT)
    wanted = [("noloco", "own"), ("noloco", "mixed"), ("gossip-fixed", "own"), (ALONE, "YAML")]
    found = {}
    for case in cases(quick=True):
        if (key := (case.settings["rule"], case.settings["kind"])) in wanted and case.settings["seed"] == 1:
            found[key] = measure(case)
    assert set(found) == set(wanted)
    for (rule, _), figures in found.items():
        losses = figures["losses"]
        assert [len(row) for row in losses] == [COUNT] * (1 if rule == ALONE else COUNT)
        mean = sum(map(sum, losses)) / sum(map(len, losses))
        assert figures["validation_loss"] == pytest.approx(mean, rel=1e-6), "evaluation uses fixed routes"
    assert found["noloco", "own"]["tokens"] == COUNT * found[ALONE, "YAML"]["tokens"]


def figures_of(settings: Mapping[str, Any]) -> Figures:
    """Invented figures: separate kinds cost 0.1, and a replica is better by 0.5 on its own kind."""
    own = settings["kind"] == "own"
    loss = 2.0 + 0.1 * own + 0.01 * settings["seed"]
    losses = [[loss - 0.5 * (own and row == kind) for kind in range(COUNT)] for row in range(COUNT)]
    losses = losses[: 1 if settings["rule"] == ALONE else COUNT]
    return {"validation_loss": loss, "merged_loss": loss, "tokens": 100, "parameters": 10, "losses": losses}


def test_the_report_handles_missing_results() -> None:
    results = [Result(case, figures_of(case.settings), 1.0) for case in cases(quick=False)]
    assert "in nats: data parallel (`sync`) 0.1 ±" in answer(report(results))
    page = markdown(report(results))
    assert "| NoLoCo, m = 10 | 2.02 ± 0.01 | 2.12 ± 0.01 | 0.1 ±" in page
    assert shards.foreign(results[0]) == pytest.approx(0.5)
    assert "| YAML | 2.01 |" in page
    lost = [dataclasses.replace(one, figures=_lost(one)) for one in results]
    assert "| NoLoCo, m = 10 | – | – | – |" in markdown(report(lost))


def _lost(one: Result) -> Figures:
    losses = [[None for _ in row] for row in one["losses"]]
    return one.figures | {"validation_loss": None, "merged_loss": None, "losses": losses}


def test_there_is_a_case_for_every_rule_distribution_and_seed() -> None:
    def key(case: Case) -> tuple[Any, ...]:
        return tuple(case.settings[name] for name in ("rule", "kind", "seed"))

    swarms = {(rule, kind, seed) for rule in shards.RULES for kind in ("own", "mixed") for seed in (1, 2, 3)}
    assert set(map(key, cases(quick=True))) == swarms | {(ALONE, kind, 1) for kind in KINDS}
