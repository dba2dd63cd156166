"""Where the weights of an export come from when nobody trains any more: the checkpoints that nodes left on disk."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, LocalError, Violation
from noloco_p2p.io.storage.checkpoint_format import (
    DamagedCheckpoint,
    StoredCheckpoint,
    read_tensors,
    stored_checkpoints,
)
from noloco_p2p.launch import run_files, settings
from noloco_p2p.launch.collection import CollectedWeights, ReplicaWeights, Say
from noloco_p2p.launch.progress import bar

ATTEMPTS = 3
"""A node that still runs may remove a checkpoint before it is read; then the newer ones are looked at."""


def from_directories(directories: Sequence[Path], *, one: bool, say: Say) -> CollectedWeights:
    """The weights of the newest common outer round among the checkpoints at or below the directories.

    Of all replicas that have that round, or of the lowest peer id of each stage. Raises ConfigError (no checkpoints,
    several runs, a stage without any), LocalError (unreadable, damaged: the message names the file).
    """
    for attempt in range(ATTEMPTS):
        shards = _found(directories)
        manifest = _manifest(shards)
        round = newest_common(shards, manifest.stages)
        used = chosen(shards, round, manifest.stages, one=one)
        try:
            stages = _read(manifest, used)
            break
        except DamagedCheckpoint:  # gone meanwhile
            if attempt == ATTEMPTS - 1:
                raise
    for line in _left_out(shards, used, one=one):
        say(line)
    return CollectedWeights(manifest, round, stages)


def newest_common(shards: Iterable[StoredCheckpoint], stages: int) -> int:
    """The newest outer round of which every stage has a checkpoint. Raises ConfigError that says what is missing."""
    rounds: dict[int, set[int]] = {stage: set() for stage in range(stages)}
    for shard in shards:
        if shard.manifest.stage in rounds:
            rounds[shard.manifest.stage].add(shard.manifest.round)
    empty = [str(stage) for stage, held in rounds.items() if not held]
    if empty:
        raise ConfigError(f"no checkpoint of stage {', '.join(empty)} is there: give the directories of its nodes too")
    common = set.intersection(*rounds.values())
    if not common:
        told = "; ".join(f"stage {s} has {', '.join(map(str, sorted(held)))}" for s, held in rounds.items())
        raise ConfigError(f"no outer round of which every stage has a checkpoint: {told}; give more nodes' directories")
    return max(common)


def chosen(shards: Iterable[StoredCheckpoint], round: int, stages: int, *, one: bool) -> list[list[StoredCheckpoint]]:
    """By stage, sorted by peer id: each peer's last checkpoint of that round, or only that of the lowest peer id."""
    last: dict[tuple[int, PeerId], StoredCheckpoint] = {}
    for shard in shards:  # in the order in which they were saved
        if shard.manifest.round == round:
            last[shard.manifest.stage, shard.manifest.peer_id] = shard
    used = [[last[at, peer] for at, peer in sorted(last) if at == stage] for stage in range(stages)]
    return [mine[:1] for mine in used] if one else used


def _found(directories: Sequence[Path]) -> list[StoredCheckpoint]:
    """All checkpoints, each once. Raises ConfigError when a directory has none or they are of several runs."""
    found: dict[Path, StoredCheckpoint] = {}
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"--from {directory}: there is no such directory")
        here = stored_checkpoints(directory)
        if not here:
            raise ConfigError(f"--from {directory}: no whole checkpoint lies there or below")
        found.update({shard.path.resolve(): shard for shard in here})
    runs = {shard.manifest.run_id: shard for shard in found.values()}
    if len(runs) > 1:
        told = "; ".join(f"{run[:12]} in {_home(shard)}" for run, shard in sorted(runs.items()))
        raise ConfigError(f"the checkpoints are of several runs ({told}): give the directories of one")
    return sorted(found.values(), key=lambda shard: (shard.manifest.peer_id, shard.manifest.saved))


def _manifest(shards: Sequence[StoredCheckpoint]) -> RunManifest:
    """The run's manifest, from any of the nodes' directories. Raises LocalError."""
    run_id = shards[0].manifest.run_id
    for home in dict.fromkeys(_home(shard) for shard in shards):
        try:
            manifest = settings.manifest_from_json((home / run_files.MANIFEST).read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise LocalError(f"{home / run_files.MANIFEST} cannot be read: {error.strerror}") from error
        except Violation as error:
            raise LocalError(f"{home / run_files.MANIFEST} is damaged: {error}") from error
        if manifest.run_id != run_id:
            told = f"is of run {manifest.run_id[:12]}, the checkpoints beside it are of {run_id[:12]}"
            raise LocalError(f"{home / run_files.MANIFEST} {told}")
        return manifest
    told = "is not there, nor in the other directories: without it the model is not known"
    raise LocalError(f"{_home(shards[0]) / run_files.MANIFEST} {told}")


def _home(shard: StoredCheckpoint) -> Path:
    """The directory of the node that wrote it."""
    return shard.path.parents[2]


def _read(manifest: RunManifest, used: Sequence[Sequence[StoredCheckpoint]]) -> tuple[tuple[ReplicaWeights, ...], ...]:
    """θ of every shard, verified. Raises DamagedCheckpoint, LocalError for tensors that are not those of the stage."""
    from noloco_p2p.compute import export

    stages = []
    with bar("reading checkpoints", sum(len(mine) for mine in used)) as done:
        for stage, mine in enumerate(used):
            parameters = export.stage_specs(manifest, stage)
            replicas = []
            for shard in mine:
                try:
                    tensors = read_tensors(shard, {"fast"})
                except DamagedCheckpoint as error:
                    if not shard.path.exists():
                        raise
                    raise LocalError(f"{error}; remove {shard.path} to use what else there is") from error
                names = [tensor.name for tensor in tensors]
                if names != [f"fast/{spec.name}" for spec in parameters]:
                    raise LocalError(f"{shard.tensors_path} does not hold the parameters of stage {stage}")
                try:
                    weights = export.checked(tensors, parameters)
                except Violation as error:
                    raise LocalError(f"{shard.tensors_path}: {error}") from error
                m = shard.manifest
                replicas.append(ReplicaWeights(m.peer_id, stage, m.round, int(m.step), weights))
                done()
            stages.append(tuple(replicas))
    return tuple(stages)


def _left_out(
    shards: Sequence[StoredCheckpoint], used: Sequence[Sequence[StoredCheckpoint]], *, one: bool
) -> list[str]:
    """A line for each node that could have given a replica and gave none."""
    lines = []
    taken = {(shard.manifest.stage, shard.manifest.peer_id) for mine in used for shard in mine}
    newest = {(shard.manifest.stage, shard.manifest.peer_id): shard.manifest.round for shard in shards}
    for (stage, peer), round in sorted(newest.items()):
        if (stage, peer) not in taken:
            why = "one replica of the stage is enough" if one else f"its newest checkpoint is of round {round}"
            lines.append(f"not used: {peer} of stage {stage}: {why}")
    return lines
