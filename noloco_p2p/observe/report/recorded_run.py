"""The figures of a run from the journals of its nodes: those of `summary.json`, with the same definitions."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.errors import ConfigError
from noloco_p2p.launch import homes
from noloco_p2p.launch.node_probe import ENDPOINTS, SUMMARY, in_use, read_json
from noloco_p2p.launch.progress_line import counted
from noloco_p2p.launch.run_files import MANIFEST
from noloco_p2p.launch.swarm_summary import covered_s, newest_validation
from noloco_p2p.observe.report.journals import clean, node_dirs, number, read_processes
from noloco_p2p.observe.report.node_history import TRAINED, WORKS, Incident, NodeHistory, add_process

MAX_INCIDENTS = 100


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The nodes, sorted by stage and name, and the files found next to their journals."""

    nodes: list[NodeHistory]
    manifest: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    """The summary that `noloco swarm` wrote at the end, if it covers the whole run; otherwise empty."""
    running: bool = False
    """Whether one of its nodes is running on this machine."""

    @property
    def began_at(self) -> float:
        """Unix seconds of the first line in any journal."""
        return min(process.began_at for node in self.nodes for process in node.processes)

    @property
    def ended_at(self) -> float:
        """Unix seconds of the last line in any journal."""
        return max(process.ended_at for node in self.nodes for process in node.processes)

    @property
    def training_at(self) -> float:
        """Unix seconds when the first node began to train; `began_at` if none did."""
        spans = (span for node in self.nodes for process in node.processes for span in process.spans)
        return min((span.began_at for span in spans if span.state == "training"), default=self.began_at)

    @property
    def wall_s(self) -> float:
        """The launcher's own measurement if it wrote one; otherwise the time from the first line to the last."""
        measured = number(self.summary.get("wall_s"))
        return self.ended_at - self.began_at if measured is None else measured

    def of_stage(self, stage: int) -> list[NodeHistory]:
        """The nodes whose last stage was this one."""
        return [node for node in self.nodes if node.stage == stage]

    @property
    def stages(self) -> list[int]:
        """The stages that nodes held last."""
        return sorted({node.stage for node in self.nodes if node.stage is not None})

    @property
    def tokens(self) -> int:
        """Tokens trained on, by all replicas of stage 0."""
        return sum(node.total("tokens") for node in self.nodes)

    @property
    def tokens_per_s(self) -> float | None:
        """Over the time in which any replica of stage 0 trained. The time between a stop and the next start does not
        count; if the launcher measured the rate, neither do evaluations."""
        measured = number(self.summary.get("tokens_per_s"))
        if measured is not None:
            return measured
        end = max((each.ended_at for node in self.nodes for each in node.increments["tokens"]), default=0.0)
        lives = [span for node in self.nodes for process in node.processes for span in process.spans if span.stage == 0]
        seconds = covered_s([(span.began_at, span.ended_at) for span in lives if span.state == "training"], end)
        return self.tokens / seconds if seconds else None

    def last(self, curve: str, stage: int = 0) -> float | None:
        """The newest value of a curve, as the mean over the replicas of a stage that have one."""
        known = [value for node in self.of_stage(stage) if (value := node.last(curve, stage)) is not None]
        return fmean(known) if known else None

    @property
    def validation_loss(self) -> float | None:
        """The mean of the newest evaluations (`newest_validation`), in nats per token."""
        last = [point for node in self.of_stage(0) for point in [*chain(*node.curves["validation", 0])][-1:]]
        steps, evaluation = number(self.manifest.get("steps")), self.manifest.get("evaluation")
        every = number(evaluation.get("every_steps")) if isinstance(evaluation, dict) else None
        return newest_validation(last, inf if steps is None else steps, every)

    def total(self, tally: str) -> Counter[str]:
        """The sum of a tally over all nodes."""
        return sum((node.tallies[tally] for node in self.nodes), Counter[str]())

    def times(self) -> dict[int, tuple[float, dict[str, float]]]:
        """Stage → (seconds that nodes were training there, seconds of WORKS and then of each wait, longest first)."""
        stages = sorted({stage for node in self.nodes for stage in node.times if stage is not None})
        found = {stage: sum((node.times[stage] for node in self.nodes), Counter[str]()) for stage in stages}
        return {
            stage: (spent.pop(TRAINED, 0.0), {WORKS: spent.pop(WORKS, 0.0), **dict(spent.most_common())})
            for stage, spent in found.items()
        }

    def incidents(self) -> list[Incident]:
        """The newest incidents of all nodes, newest first, MAX_INCIDENTS at most."""
        return sorted((incident for node in self.nodes for incident in node.incidents), reverse=True)[:MAX_INCIDENTS]


def read_runs(paths: Sequence[Path]) -> dict[str, RecordedRun]:
    """The runs in these directories, by the name to show for each.

    The nodes in a directory of `noloco swarm` form one run; nodes in other directories are grouped by run id. Raises
    ConfigError if there is no readable journal.
    """
    names, found = node_dirs(paths), defaultdict[str, dict[Path, NodeHistory]](dict)
    with counted("reading journals", len(names)) as advance:
        for path in paths:
            of_swarm = homes.kind_of(path) is homes.Home.SWARM
            for directory in node_dirs([path]):
                node = _read_node(directory, names[directory])
                if node.processes:
                    found[clean(path) if of_swarm else f"{node.run_name} {node.run_id[:8]}".strip()][directory] = node
                advance()
    if not found:
        raise ConfigError(f"the journals in {', '.join(map(str, paths))} have no readable line; was the run started?")
    own = {name: [path for path in paths if len(found) == 1 or clean(path) == name] for name in found}
    short = {name: _last_part(name) for name in found}
    times = Counter(short.values())
    return {short[name] if times[short[name]] == 1 else name: _run(nodes, own[name]) for name, nodes in found.items()}


def _last_part(name: str) -> str:
    """The last part of a path; for `.` and `..`, the name of that directory."""
    last = Path(name).name
    return clean(Path(name).resolve().name) if name and last in ("", "..") else last


def _read_node(directory: Path, name: str) -> NodeHistory:
    stored = (read_json(directory / ENDPOINTS) or {}) | (read_json(directory / MANIFEST) or {})
    peer_id, run_id, run_name = (clean(stored.get(known, "")) for known in ("peer_id", "run_id", "name"))
    node = NodeHistory(name, peer_id, run_id, run_name)
    for events in read_processes(directory):
        add_process(node, events)
    return node


def _run(found: dict[Path, NodeHistory], paths: Sequence[Path]) -> RecordedRun:
    """The run of these nodes, given by directory. `paths`: the directories that the user named for it."""
    manifest = next((stored for directory in found if (stored := read_json(directory / MANIFEST))), {})
    nodes = sorted(found.values(), key=lambda node: (node.stage is None, node.stage or 0, node.name))
    return RecordedRun(nodes, manifest, _summary(paths, nodes), any(map(in_use, found)))


def _summary(paths: Sequence[Path], nodes: Sequence[NodeHistory]) -> dict[str, Any]:
    """The launcher's summary, if it covers exactly this run: one directory, not resumed, each node started once."""
    found = (read_json(paths[0] / SUMMARY) if len(paths) == 1 else None) or {}
    whole = "nodes" in found and found.get("resumed_from_step") is None
    return found if whole and all(len(node.processes) == 1 for node in nodes) else {}
