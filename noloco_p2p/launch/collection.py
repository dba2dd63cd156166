"""The weights of an export: replicas of every stage at one outer round. Here from checkpoints that nodes left on disk.

`live_collection.py` has the other source, a running swarm.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from noloco_p2p.compute import exported_model
from noloco_p2p.compute.exported_model import Weights
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import PeerId, TensorSpec
from noloco_p2p.errors import ConfigError, LocalError, Violation
from noloco_p2p.io.storage.checkpoint_format import CheckpointFiles, DamagedCheckpoint, read_tensors, stored_checkpoints
from noloco_p2p.launch import homes, run_files
from noloco_p2p.launch.progress_line import counted
from noloco_p2p.launch.run_files import LocalFiles

ATTEMPTS = 3
"""A running node may remove a checkpoint before it is read; then the newer ones are tried."""

Say = Callable[[str], None]
"""Takes a line for the user."""


@dataclass(frozen=True, slots=True)
class CollectedReplica:
    """The weights of one replica at one outer round."""

    peer: PeerId
    stage: int
    round: int
    step: int
    """Floor of its clock."""
    weights: Weights
    """θ by global name."""


@dataclass(frozen=True, slots=True)
class CollectedWeights:
    """What an export is made from: replicas of every stage, all at the same outer round."""

    run_id: str
    """Not that of `manifest` where an earlier version wrote it."""
    manifest: RunManifest
    round: int
    stages: tuple[tuple[CollectedReplica, ...], ...]
    """By stage, each sorted by peer id, at least one."""
    local: LocalFiles = field(default_factory=LocalFiles)
    """Of the run's nodes, where they are on this machine."""
    summary: Mapping[str, object] = field(default_factory=dict)
    """Of the run, where it is known."""


def from_directories(directories: Sequence[Path], *, one: bool, say: Say) -> CollectedWeights:
    """The weights of the newest common outer round among the checkpoints at or below the directories.

    Of all replicas that have that round, or of the lowest peer id of each stage. Raises ConfigError (no checkpoints,
    several runs, a stage without any), LocalError (unreadable, damaged: the message names the file).
    """
    for attempt in range(ATTEMPTS):
        checkpoints = _found(directories)
        manifest = _manifest(checkpoints)
        round = newest_common(checkpoints, manifest.stages)
        used = chosen_checkpoints(checkpoints, round, manifest.stages, one=one)
        try:
            stages = _read(manifest, used)
            break
        except DamagedCheckpoint:  # removed meanwhile
            if attempt == ATTEMPTS - 1:
                raise
    taken = {(found.manifest.stage, found.manifest.peer_id) for mine in used for found in mine}
    newest = {(found.manifest.stage, found.manifest.peer_id): found.manifest.round for found in checkpoints}
    for (stage, peer), held in sorted(newest.items()):
        if (stage, peer) not in taken:
            why = "one replica of the stage is enough" if one else f"its newest checkpoint is of round {held}"
            say(f"not used: {peer} of stage {stage}: {why}")
    if (last := max(newest.values())) > round:
        say(f"there are checkpoints up to outer round {last}; round {round} is the last that every stage has")
    run_id, nodes = checkpoints[0].manifest.run_id, list(dict.fromkeys(map(_home, checkpoints)))
    local, summary = run_files.local_files(nodes), run_files.run_summary(nodes, run_id)
    return CollectedWeights(run_id, manifest, round, stages, local, summary)


def newest_common(checkpoints: Sequence[CheckpointFiles], stages: int) -> int:
    """The newest outer round of which every stage has a checkpoint. Raises ConfigError that says what is missing."""
    rounds = {s: {c.manifest.round for c in checkpoints if c.manifest.stage == s} for s in range(stages)}
    empty = [str(stage) for stage, held in rounds.items() if not held]
    if empty:
        raise ConfigError(f"no checkpoint of stage {', '.join(empty)}: give the directories of its nodes too")
    common = set.intersection(*rounds.values())
    if not common:
        held = "; ".join(f"stage {s} has {', '.join(map(str, sorted(held)))}" for s, held in rounds.items())
        # Nodes that are stopped save at rounds of their own.
        advice = "give more nodes' directories, or let the run go on to its next checkpoint"
        raise ConfigError(f"no outer round has a checkpoint of every stage: {held}; {advice}")
    return max(common)


def chosen_checkpoints(
    checkpoints: Iterable[CheckpointFiles], round: int, stages: int, *, one: bool
) -> list[list[CheckpointFiles]]:
    """By stage, sorted by peer id: each peer's last checkpoint of that round, or only that of the lowest peer id."""
    # They are in the order in which they were saved, so the last one of a peer counts.
    last = {(c.manifest.stage, c.manifest.peer_id): c for c in checkpoints if c.manifest.round == round}
    used = [[last[at, peer] for at, peer in sorted(last) if at == stage] for stage in range(stages)]
    return [mine[:1] for mine in used] if one else used


def _found(directories: Sequence[Path]) -> list[CheckpointFiles]:
    """All checkpoints, each once. Raises ConfigError when a directory has none or they are of several runs."""
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
        raise ConfigError(f"the checkpoints are of several runs ({places}): give the directories of one")
    return sorted(found.values(), key=lambda checkpoint: (checkpoint.manifest.peer_id, checkpoint.manifest.saved))


def _manifest(checkpoints: Sequence[CheckpointFiles]) -> RunManifest:
    """The run's manifest, from any of the nodes' directories. Raises LocalError."""
    run_id = checkpoints[0].manifest.run_id
    for home in dict.fromkeys(map(_home, checkpoints)):
        found = run_files.stored_run(home)
        if found is not None and found[0] != run_id:
            where = f"{home / run_files.MANIFEST} is of run {found[0][:12]}"
            raise LocalError(f"{where}, the checkpoints beside it are of {run_id[:12]}")
        if found is not None:
            return found[1]
    missing = _home(checkpoints[0]) / run_files.MANIFEST
    raise LocalError(f"{missing} is missing, here and in the other directories: it says what the model is")


def _home(checkpoint: CheckpointFiles) -> Path:
    """The directory of the node that wrote it."""
    return checkpoint.path.parents[2]


def _read(manifest: RunManifest, used: Sequence[Sequence[CheckpointFiles]]) -> tuple[tuple[CollectedReplica, ...], ...]:
    """θ of every checkpoint, verified. Raises DamagedCheckpoint, LocalError for tensors of something else."""
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
    path, stage = checkpoint.tensors_path, checkpoint.manifest.stage
    try:
        tensors = read_tensors(checkpoint, {"fast"})
        if [tensor.name for tensor in tensors] != [f"fast/{spec.name}" for spec in parameters]:
            raise LocalError(f"{path} does not hold the parameters of stage {stage}")
        return exported_model.check_weights(tensors, parameters)
    except DamagedCheckpoint as error:
        if not checkpoint.path.exists():
            raise
        raise LocalError(f"{error}; remove {checkpoint.path} to export from the other checkpoints") from error
    except Violation as error:
        raise LocalError(f"{path}: {error}") from error
