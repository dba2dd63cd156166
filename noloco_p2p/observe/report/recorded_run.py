"""What the nodes of a run say together: its figures, under the definitions of `summary.json`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.errors import ConfigError
from noloco_p2p.launch.node_probe import SUMMARY, read_json
from noloco_p2p.launch.run_files import MANIFEST
from noloco_p2p.observe.report.journals import node_dirs, number
from noloco_p2p.observe.report.node_history import Incident, NodeHistory, read_history

MOST_INCIDENTS = 100


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The nodes, sorted by stage and name, and what lies beside their journals."""

    nodes: list[NodeHistory]
    manifest: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    """What `noloco swarm` wrote at the end, when it counts the whole run; else empty."""

    @property
    def name(self) -> str:
        """What people call the run."""
        return next((node.run_name for node in self.nodes if node.run_name), "run")

    @property
    def run_ids(self) -> list[str]:
        """One, unless directories of several runs were named."""
        return sorted({node.run_id for node in self.nodes if node.run_id})

    @property
    def began_at(self) -> float:
        """Unix seconds of the first line of all."""
        return min(node.began_at for node in self.nodes)

    @property
    def ended_at(self) -> float:
        """Unix seconds of the last line of all."""
        return max(node.ended_at for node in self.nodes)

    @property
    def wall_s(self) -> float:
        """From the launcher's start to its end where it wrote that; else from the first line to the last."""
        measured = number(self.summary.get("wall_s"))
        return self.ended_at - self.began_at if measured is None else measured

    def of_stage(self, stage: int) -> list[NodeHistory]:
        """Those that held it last."""
        return [node for node in self.nodes if node.stage == stage]

    @property
    def stages(self) -> list[int]:
        """Those that somebody held."""
        return sorted({node.stage for node in self.nodes if node.stage is not None})

    @property
    def step(self) -> float:
        """How far the clock came."""
        return max(node.step for node in self.nodes)

    @property
    def tokens(self) -> int:
        """Trained on, by all replicas of stage 0."""
        return sum(node.tokens for node in self.nodes)

    @property
    def tokens_per_s(self) -> float | None:
        """While training. Evaluations do not count where the launcher measured it."""
        measured = number(self.summary.get("tokens_per_s"))
        if measured is not None:
            return measured
        began = [node.training_at for node in self.of_stage(0) if node.training_at is not None]
        ended = [node.stepped_at for node in self.of_stage(0) if node.stepped_at is not None]
        return self.tokens / (max(ended) - min(began)) if began and ended and max(ended) > min(began) else None

    @property
    def final_loss(self) -> float | None:
        """Of the last ten inner steps, mean over the replicas of stage 0, nats per token."""
        return _mean(node.final_loss for node in self.of_stage(0))

    @property
    def validation_loss(self) -> float | None:
        """Of the last evaluation, mean over the replicas of stage 0, nats per token."""
        return _mean(node.validation_loss for node in self.of_stage(0))

    def replica_std(self, stage: int) -> float | None:
        """Of the last outer round, mean over the replicas of the stage."""
        return _mean(node.replica_std for node in self.of_stage(stage))

    def total(self, tally: str, stage: int | None = None) -> Counter[str]:
        """A tally over all nodes, or those of a stage."""
        found: Counter[str] = Counter()
        for node in self.nodes if stage is None else self.of_stage(stage):
            found.update(node.tallies[tally])
        return found

    def incidents(self) -> list[Incident]:
        """The newest of all nodes, newest first."""
        everything = sorted((incident for node in self.nodes for incident in node.incidents), reverse=True)
        return everything[:MOST_INCIDENTS]


def read_run(paths: Sequence[Path]) -> RecordedRun:
    """The run whose directories these are. Raises ConfigError when there is no journal."""
    directories = [directory.resolve() for directory in node_dirs(paths)]
    names = Counter(directory.name for directory in directories)
    nodes: list[NodeHistory] = []
    manifest: dict[str, Any] = {}
    for directory in directories:
        unique = names[directory.name] == 1
        node = read_history(directory, directory.name if unique else f"{directory.parent.name}/{directory.name}")
        if node is not None:
            nodes.append(node)
            manifest = manifest or read_json(directory / MANIFEST) or {}
    if not nodes:
        raise ConfigError(f"no line of the journals in {', '.join(map(str, paths))} can be read; was the run started?")
    nodes.sort(key=lambda node: (node.stage is None, node.stage or 0, node.name))
    return RecordedRun(nodes, manifest, _summary(paths, nodes))


def _summary(paths: Sequence[Path], nodes: Sequence[NodeHistory]) -> dict[str, Any]:
    """The launcher's, when it is of this run and of nothing but it."""
    found = read_json(paths[0] / SUMMARY) if len(paths) == 1 else None
    if found is None or "nodes" not in found or found.get("resumed_from_step") is not None:
        return {}
    return found if all(len(node.processes) == 1 for node in nodes) else {}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
