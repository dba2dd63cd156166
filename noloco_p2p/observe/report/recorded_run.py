"""The figures of a run, from the journals of its nodes: those of `summary.json`, under the same definitions."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.errors import ConfigError
from noloco_p2p.launch import homes
from noloco_p2p.launch.node_probe import ENDPOINTS, SUMMARY, in_use, read_json
from noloco_p2p.launch.run_files import MANIFEST
from noloco_p2p.observe.report.journals import clean, node_dirs, number, read_processes
from noloco_p2p.observe.report.node_history import Incident, NodeHistory, add_process

MOST_INCIDENTS = 100
WORKS = "device works"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The nodes, sorted by stage and name, and what lies beside their journals."""

    nodes: list[NodeHistory]
    manifest: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    """What `noloco swarm` wrote at the end, when it counts the whole run; else empty."""
    running: bool = False
    """A node of it runs on this machine."""

    @property
    def began_at(self) -> float:
        """Unix seconds of the first line of all."""
        return min(process.began_at for node in self.nodes for process in node.processes)

    @property
    def ended_at(self) -> float:
        """Unix seconds of the last line of all."""
        return max(process.ended_at for node in self.nodes for process in node.processes)

    @property
    def training_at(self) -> float:
        """Unix seconds when the first node began to train; where none did, `began_at`."""
        return min((node.training_at for node in self.nodes if node.training_at is not None), default=self.began_at)

    @property
    def wall_s(self) -> float:
        """From the launcher's start to its end where it wrote that; else from the first line to the last."""
        measured = number(self.summary.get("wall_s"))
        return self.ended_at - self.began_at if measured is None else measured

    def of_stage(self, stage: int) -> list[NodeHistory]:
        """The nodes that held this stage last."""
        return [node for node in self.nodes if node.stage == stage]

    @property
    def stages(self) -> list[int]:
        """Stages that a node has held."""
        return sorted({node.stage for node in self.nodes if node.stage is not None})

    @property
    def tokens(self) -> int:
        """Trained on, by all replicas of stage 0."""
        return sum(node.total("tokens") for node in self.nodes)

    @property
    def tokens_per_s(self) -> float | None:
        """While any replica of stage 0 trained: what lies between a stop and the next start does not count, nor do
        evaluations where the launcher measured it."""
        measured = number(self.summary.get("tokens_per_s"))
        if measured is not None:
            return measured
        ended = [each.ended_at for node in self.of_stage(0) for each in node.increments["tokens"]]
        lives = [process.spans for node in self.of_stage(0) for process in node.processes]
        seconds, until = 0.0, self.began_at
        for span in sorted(span for spans in lives for span in spans if span.state == "training" and ended):
            seconds += max(0.0, min(span.ended_at, max(ended)) - max(span.began_at, until))
            until = max(until, span.ended_at)
        return self.tokens / seconds if seconds else None

    def last(self, curve: str, stage: int = 0) -> float | None:
        """The newest value of a curve, mean over the replicas of a stage."""
        known = [value for node in self.of_stage(stage) if (value := node.last(curve)) is not None]
        return fmean(known) if known else None

    def total(self, tally: str, stage: int | None = None) -> Counter[str]:
        """A tally over all nodes, or those of a stage."""
        found: Counter[str] = Counter()
        for node in self.nodes if stage is None else self.of_stage(stage):
            found.update(node.tallies[tally])
        return found

    def time_of(self, stage: int) -> tuple[float, dict[str, float]]:
        """(seconds that the nodes of a stage were training, seconds of WORKS and of each wait, longest first)."""
        nodes = self.of_stage(stage)
        waits = {f"waits: {cause}": seconds for cause, seconds in self.total("idle_s", stage).most_common()}
        return sum(node.trained_s for node in nodes), {WORKS: sum(node.device_s for node in nodes), **waits}

    def incidents(self) -> list[Incident]:
        """The newest of all nodes, newest first."""
        return sorted((incident for node in self.nodes for incident in node.incidents), reverse=True)[:MOST_INCIDENTS]


def read_runs(paths: Sequence[Path]) -> dict[str, RecordedRun]:
    """The runs in these directories, and what to call each.

    All nodes in a directory of `noloco swarm` are of one run; those in other directories are put together by run id.
    Raises ConfigError when there is no journal.
    """
    names, found = node_dirs(paths), defaultdict[str, dict[Path, NodeHistory]](dict)
    for path in paths:
        of_swarm = homes.kind_of(path) is homes.Home.SWARM
        for directory in node_dirs([path]):
            node = _read_node(directory, names[directory])
            if node.processes:
                found[clean(path) if of_swarm else f"{node.run_name} {node.run_id[:8]}".strip()][directory] = node
    if not found:
        raise ConfigError(f"no line of the journals in {', '.join(map(str, paths))} can be read; was the run started?")
    own = {name: [path for path in paths if len(found) == 1 or clean(path) == name] for name in found}
    short = {name: _last_part(name) for name in found}
    times = Counter(short.values())
    return {short[name] if times[short[name]] == 1 else name: _run(nodes, own[name]) for name, nodes in found.items()}


def _last_part(name: str) -> str:
    """The last part of a path; of `.` and `..` the name of that directory."""
    last = Path(name).name
    return clean(Path(name).resolve().name) if name and last in ("", "..") else last


def _read_node(directory: Path, name: str) -> NodeHistory:
    node = NodeHistory(name)
    for events in read_processes(directory):
        add_process(node, events)
    node.peer_id = node.peer_id or clean((read_json(directory / ENDPOINTS) or {}).get("peer_id", ""))
    return node


def _run(found: dict[Path, NodeHistory], paths: Sequence[Path]) -> RecordedRun:
    """Of these nodes, by directory; `paths`: the directories that were named for it."""
    manifest = next((stored for directory in found if (stored := read_json(directory / MANIFEST))), {})
    nodes = sorted(found.values(), key=lambda node: (node.stage is None, node.stage or 0, node.name))
    return RecordedRun(nodes, manifest, _summary(paths, nodes), any(map(in_use, found)))


def _summary(paths: Sequence[Path], nodes: Sequence[NodeHistory]) -> dict[str, Any]:
    """The launcher's, when it is of this run and of nothing but it."""
    found = read_json(paths[0] / SUMMARY) if len(paths) == 1 else None
    if found is None or "nodes" not in found or found.get("resumed_from_step") is not None:
        return {}
    return found if all(len(node.processes) == 1 for node in nodes) else {}
