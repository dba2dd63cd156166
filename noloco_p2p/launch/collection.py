"""Collects the weights for an export, replicas of every stage at one outer round, from checkpoints on disk.

`live_collection.py` collects them from a running swarm.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from noloco_p2p.compute import exported_model, replica_tensors
from noloco_p2p.compute.exported_model import Weights
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import PeerId, TensorSpec
from noloco_p2p.errors import ConfigError, LocalError, Violation
from noloco_p2p.io.storage.checkpoint_format import CheckpointFiles, DamagedCheckpoint, read_tensors, stored_checkpoints
from noloco_p2p.launch import homes, run_files
from noloco_p2p.launch.progress_line import counted
from noloco_p2p.launch.run_files import LocalFiles

ATTEMPTS = 3
"""Attempts to read a set of checkpoints: a running node may remove one before it is read, and then newer ones exist."""

Say = Callable[[str], None]
"""Accepts a line to show to the user."""


@dataclass(frozen=True, slots=True)
class CollectedReplica:
    """The weights of one replica at one outer round."""

    peer: PeerId
    stage: int
    round: int
    step: int
    """Its step clock, rounded down."""
    weights: Weights
    """θ, by the parameters' names in the whole model."""


@dataclass(frozen=True, slots=True)
class CollectedWeights:
    """The input of an export: replicas of every stage, all at the same outer round."""

    run_id: str
    """Differs from that of `manifest` if an earlier version wrote the manifest."""
    manifest: RunManifest
    round: int
    stages: tuple[tuple[CollectedReplica, ...], ...]
    """At least one replica for each stage, sorted by peer id."""
    local: LocalFiles = field(default_factory=LocalFiles)
    """The run's files on this machine, if its nodes ran here."""
    summary: Mapping[str, object] = field(default_factory=dict)
    """The summary of the swarm; empty if it is not known."""


def from_directories(directories: Sequence[Path], *, one: bool, say: Say) -> CollectedWeights:
    """The weights at the newest outer round that all stages have, from the checkpoints at or below the directories.

    All replicas that have that round are used; with `one`, only the lowest peer id of each stage. Raises ConfigError
    (no checkpoints, several runs, a stage without any), LocalError (unreadable or damaged; the message names the file).
    """
    for attempt in range(ATTEMPTS):
        checkpoints = _found(directories)
        manifest = _manifest(checkpoints)
        round = newest_common(checkpoints, manifest.stages)
        used = chosen_checkpoints(checkpoints, round, manifest.stages, one=one)
        try:
            stages = _read(manifest, used)
            break
        except DamagedCheckpoint:  # it was removed in the meantime
            if attempt == ATTEMPTS - 1:
                raise
    taken = {(found.manifest.stage, found.manifest.peer_id) for mine in used for found in mine}
    newest = {(found.manifest.stage, found.manifest.peer_id): found.manifest.round for found in checkpoints}
    for (stage, peer), held in sorted(newest.items()):
        if (stage, peer) not in taken:
            why = "its weights began afresh later" if held == round else f"its newest checkpoint is of round {held}"
            say(f"not used: {peer} of stage {stage}: {'one replica of the stage is enough' if one else why}")
    if (last := max(newest.values())) > round:
        say(f"there are checkpoints up to outer round {last}; round {round} is the last that every stage has")
    run_id, nodes = checkpoints[0].manifest.run_id, list(dict.fromkeys(map(_home, checkpoints)))
    local, summary = run_files.local_files(nodes), run_files.run_summary(nodes, run_id)
    return CollectedWeights(run_id, manifest, round, stages, local, summary)


def newest_common(checkpoints: Sequence[CheckpointFiles], stages: int) -> int:
    """The newest outer round of which every stage has a checkpoint. Raises ConfigError, saying what is missing."""
    rounds = {s: {c.manifest.round for c in checkpoints if c.manifest.stage == s} for s in range(stages)}
    empty = [str(stage) for stage, held in rounds.items() if not held]
    if empty:
        raise ConfigError(f"no checkpoint of stage {', '.join(empty)}: give the directories of its nodes too")
    common = set.intersection(*rounds.values())
    if not common:
        held = "; ".join(f"stage {s} has {', '.join(map(str, sorted(held)))}" for s, held in rounds.items())
        # Nodes that were stopped one by one have saved at different rounds.
        advice = "give the directories of more nodes, or let the run continue to its next checkpoint"
        raise ConfigError(f"no outer round has a checkpoint of every stage: {held}; {advice}")
    return max(common)


def chosen_checkpoints(
    checkpoints: Iterable[CheckpointFiles], round: int, stages: int, *, one: bool
) -> list[list[CheckpointFiles]]:
    """For each stage, the last checkpoint of that round of each peer, by peer id; with `one`, only of the lowest id.

    Only those of the earliest lineage (`Advert.fresh_round`) are used.
    """
    # The checkpoints of a peer are in the order in which they were saved, so later ones replace earlier ones.
    last = {(c.manifest.stage, c.manifest.peer_id): c for c in checkpoints if c.manifest.round == round}
    used = []
    for stage in range(stages):
        mine = [last[at, peer] for at, peer in sorted(last) if at == stage]
        oldest = min(checkpoint.manifest.fresh_round for checkpoint in mine)
        mine = [checkpoint for checkpoint in mine if checkpoint.manifest.fresh_round == oldest]
        used.append(mine[:1] if one else mine)
    return used


def _found(directories: Sequence[Path]) -> list[CheckpointFiles]:
    """All checkpoints, each once. Raises ConfigError if a directory has none, or if they are from several runs."""
    found: dict[Path, CheckpointFiles] = {}
    for directory in directories:
        homes.require_run("--from ", directory)
        here = stored_checkpoints(directory)
        if not here:
            raise ConfigError(f"--from {directory}: there is no complete checkpoint in it or below it")
        found.update({checkpoint.path.resolve(): checkpoint for checkpoint in here})
    runs = {checkpoint.manifest.run_id: checkpoint for checkpoint in found.values()}
    if len(runs) > 1:
        places = "; ".join(f"{run[:12]} in {_home(checkpoint)}" for run, checkpoint in sorted(runs.items()))
        raise ConfigError(f"the checkpoints are from several runs ({places}): give the directories of one run")
    return sorted(found.values(), key=lambda checkpoint: (checkpoint.manifest.peer_id, checkpoint.manifest.saved))


def _manifest(checkpoints: Sequence[CheckpointFiles]) -> RunManifest:
    """The run's manifest, from the first of the nodes' directories that has it. Raises LocalError."""
    run_id = checkpoints[0].manifest.run_id
    for home in dict.fromkeys(map(_home, checkpoints)):
        found = run_files.stored_run(home)
        if found is not None and found[0] != run_id:
            where = f"{home / run_files.MANIFEST} is of run {found[0][:12]}"
            raise LocalError(f"{where}, but the checkpoints next to it are of run {run_id[:12]}")
        if found is not None:
            return found[1]
    missing = _home(checkpoints[0]) / run_files.MANIFEST
    raise LocalError(f"{missing} is missing, as it is in the other directories: it describes the model")


def _home(checkpoint: CheckpointFiles) -> Path:
    """The directory of the node that wrote the checkpoint."""
    return checkpoint.path.parents[2]


def _read(manifest: RunManifest, used: Sequence[Sequence[CheckpointFiles]]) -> tuple[tuple[CollectedReplica, ...], ...]:
    """θ of every checkpoint, verified. Raises DamagedCheckpoint, and LocalError if tensors do not fit the model."""
    stages: list[list[CollectedReplica]] = [[] for _ in used]
    with counted("reading checkpoints", sum(map(len, used))) as done:
        for stage, mine in enumerate(used):
            parameters = exported_model.stage_specs(manifest, stage)
            for checkpoint in mine:
                m, weights = checkpoint.manifest, _weights(checkpoint, parameters)
                stages[stage].append(CollectedReplica(m.peer_id, stage, m.round, int(m.step), weights))
                done()
    return tuple(map(tuple, stages))


def _weights(checkpoint: CheckpointFiles, parameters: tuple[TensorSpec, ...]) -> Weights:
    expected = replica_tensors.specs(("fast",), parameters)
    try:
        values = replica_tensors.checked(read_tensors(checkpoint, {"fast"}), expected, str(checkpoint.tensors_path))
        return {spec.name: value for spec, value in zip(parameters, values, strict=True)}
    except DamagedCheckpoint as error:
        if not checkpoint.path.exists():
            raise
        raise LocalError(f"{error}; remove {checkpoint.path} to export from the other checkpoints") from error
    except Violation as error:
        raise LocalError(str(error)) from error
