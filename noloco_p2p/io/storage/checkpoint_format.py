"""The file format of checkpoints, which a node writes and reads after a restart, and `noloco export` reads without one.

    <node's directory>/checkpoints/<run>-<peer>/stage-1-round-000010-7.safetensors    the tensors
    <node's directory>/checkpoints/<run>-<peer>/stage-1-round-000010-7.json           the manifest, written last

The last number counts the checkpoints that the node has saved, so none is ever overwritten. A checkpoint exists once
its manifest does, which has a digest of itself and of every tensor.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from noloco_p2p.core.messages import STATE_NUMBERS, Checkpoint, Holding, HostTensor, MicrobatchId, PeerId, ReplicaState
from noloco_p2p.errors import NO_JSON, LocalError
from noloco_p2p.humanize import plain
from noloco_p2p.io.durable_files import MOUNT_POINT, settle

FORMAT, READABLE = 3, (1, 2, 3)
"""The format written, and those that can be read. FORMAT goes up when older programs can no longer read the manifest.
Format 1 had no `returned_norms`, format 2 no `fresh_round`."""
DTYPES = {"float64": "<f8", "float32": "<f4"}
"""Element types that a replica's state may have → numpy's names for them."""
MOST_SHOWN = 200
"""Upper limit on the characters of a file's contents, or of what a library says of them, in an error."""
MANIFEST_LIMIT_BYTES = 64 << 20
"""A larger file is not one of our manifests, which have at most some hundred thousand spent ids."""


class TensorEntry(NamedTuple):
    """A tensor's entry in the manifest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """xxh3-128 of the tensor's values, hexadecimal."""


class CheckpointManifest(BaseModel):
    """The contents of the JSON file, without its own digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    run_id: str
    peer_id: PeerId
    saved: int
    """How many checkpoints this node had saved in this directory before."""
    stage: int
    round: int
    step: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    inner_steps: int
    adam_steps: int
    number: int
    fresh_round: int = 0
    file_bytes: int
    """Size of the tensors' file."""
    tensors: tuple[TensorEntry, ...]
    """In the stage's order."""
    cursor: dict[str, object] | None
    random_state: tuple[int, tuple[int, ...], float | None]
    """`random.Random.getstate()`."""
    origins: tuple[tuple[PeerId, int], ...]
    """(peer, incarnation) of the origins in the spent ids."""
    spent: tuple[tuple[int, int], ...]
    """Spent ids as (index into `origins`, counter), oldest first."""
    returned_norms: tuple[float, ...] = ()
    """As in `ReplicaState`."""

    @model_validator(mode="after")
    def _origins_are_listed(self) -> Self:
        if not all(0 <= origin < len(self.origins) for origin, _ in self.spent):
            raise ValueError("it has spent ids of an origin that it does not list")
        return self


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """One checkpoint on disk."""

    path: Path
    """The manifest's file; the tensors' file is next to it."""
    manifest: CheckpointManifest

    @property
    def tensors_path(self) -> Path:
        """The file with the tensors."""
        return self.path.with_suffix(".safetensors")

    @property
    def holding(self) -> Holding:
        """The checkpoint as a node announces it."""
        m = self.manifest
        return Holding(m.stage, m.round, int(m.step), m.fresh_round)


class DamagedCheckpoint(LocalError):
    """A checkpoint is incomplete or corrupt. The message names the file."""


class ForeignCheckpointFormat(DamagedCheckpoint):
    """A checkpoint was written by another version of this program."""


# --- reading, without a node -----------------------------------------------------------------------------------------


def stored_checkpoints(directory: Path) -> list[CheckpointFiles]:
    """All checkpoints at or below a directory (of a node, or of a swarm) that look complete, of any run and node.

    Sorted by run, peer and the order in which they were saved. Raises LocalError if it, or any folder below it, cannot
    be read.
    """
    try:
        found = [stored for folder in _folders(directory) for stored in complete_checkpoints(folder)]
    except OSError as error:
        raise LocalError(f"checkpoints below {directory}: {error.filename}: {error.strerror}") from error
    return sorted(found, key=lambda one: (one.manifest.run_id, one.manifest.peer_id, one.manifest.saved))


def read_tensors(stored: CheckpointFiles, kinds: Collection[str] | None = None) -> tuple[HostTensor, ...]:
    """The tensors of some kinds (`slow`, `fast`, …; all if None), in the stage's order. Raises DamagedCheckpoint, and
    LocalError if the file belongs to another user.

    Only these tensors are read and verified, and kept in memory.
    """
    path = stored.tensors_path
    try:
        # To safetensors, a file that it may not open is missing.
        with open(path, "rb"), safe_open(path, framework="numpy") as file:
            wanted = [t for t in stored.manifest.tensors if kinds is None or t.name.partition("/")[0] in kinds]
            return tuple(_verified(file.get_tensor(tensor.name), tensor) for tensor in wanted)
    except PermissionError as error:
        raise LocalError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError) as error:  # numpy may lack a type
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {plain(str(error), MOST_SHOWN)}") from error


def read_checkpoint(stored: CheckpointFiles) -> Checkpoint:
    """Read a whole checkpoint. Raises as `read_tensors` does."""
    m = stored.manifest
    spent = tuple(MicrobatchId(*m.origins[origin], counter) for origin, counter in m.spent)
    numbers = {name: getattr(m, name) for name in STATE_NUMBERS}
    state = ReplicaState(
        peer=m.peer_id, tensors=read_tensors(stored), spent=spent, returned_norms=m.returned_norms, **numbers
    )
    return Checkpoint(state, m.cursor, m.random_state)


def _verified(values: npt.NDArray[np.generic], expected: TensorEntry) -> HostTensor:
    if (values.dtype.name, values.shape) != (expected.dtype, expected.shape):
        raise ValueError(f"{expected.name} is {values.dtype.name} {values.shape}, not as the manifest says")
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    if xxhash.xxh3_128_hexdigest(data) != expected.digest:
        raise ValueError(f"the values of {expected.name} do not have the digest in the manifest")
    return HostTensor(expected.name, expected.dtype, expected.shape, data)


def _folders(directory: Path) -> Iterator[Path]:
    """The folders in every `checkpoints` at or below a directory, one for each run and peer. Raises OSError.

    A node's directory may be a link; nothing else below a link is searched, as links can form a circle.
    """
    for path in _listed(directory, "*"):
        if path.name == "checkpoints":
            yield from _listed(path, "*-*")
        elif path.is_symlink():
            yield from _listed(path / "checkpoints", "*-*")
        elif path.name != MOUNT_POINT and path.is_dir():
            yield from _folders(path)


def _listed(folder: Path, pattern: str) -> list[Path]:
    """What `Path.glob` finds in a folder, sorted, but raises PermissionError if the folder may not be read."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(path for path in folder.iterdir() if path.match(pattern))
    return []


def complete_checkpoints(folder: Path) -> Iterator[CheckpointFiles]:
    """The checkpoints in a folder with an undamaged manifest and a tensors' file of the right size. Raises OSError."""
    for path in _listed(folder, "stage-*.json"):
        try:
            stored = CheckpointFiles(path, read_manifest(path))
            if stored.tensors_path.stat().st_size == stored.manifest.file_bytes:
                yield stored
        except (DamagedCheckpoint, FileNotFoundError):
            continue


def read_manifest(path: Path) -> CheckpointManifest:
    """Read a manifest. Raises DamagedCheckpoint, ForeignCheckpointFormat or OSError."""
    with open(path, "rb") as file:
        text = file.read(min(MANIFEST_LIMIT_BYTES, path.stat().st_size))  # read() allocates what it is asked for
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.pop("digest", None) != manifest_digest(content):
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: its digest does not match")
        if content.get("format") not in READABLE:
            raise ForeignCheckpointFormat(
                f"checkpoint {path} has format {plain(str(content.get('format')), MOST_SHOWN)}; "
                f"this program reads {' and '.join(map(str, READABLE))}"
            )
        return CheckpointManifest.model_validate(content)
    except (ValidationError, *NO_JSON) as error:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {plain(str(error), MOST_SHOWN)}") from error


def manifest_digest(content: dict[str, object]) -> str:
    """xxh3-128 (hexadecimal) of a manifest, not including its own digest."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


# --- writing ---------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, checkpoint: Checkpoint, run_id: str, peer_id: PeerId, saved: int) -> CheckpointFiles:
    """Write the tensors first and the manifest last; each file is complete on disk before it gets its name.

    `saved`: see the manifest. If this raises OSError or SafetensorError, it leaves nothing behind.
    """
    state = checkpoint.state
    stem = f"stage-{state.stage}-round-{state.round:06d}-{saved}"
    fresh, tensors_path = folder / "tensors.new", folder / f"{stem}.safetensors"
    try:
        arrays = {each.name: np.ndarray(each.shape, DTYPES[each.dtype], each.data) for each in state.tensors}
        save_file(arrays, fresh)
        manifest = _manifest(checkpoint, run_id, peer_id, saved, fresh.stat().st_size)
        content = manifest.model_dump(mode="json")
        settle(fresh, tensors_path)
        fresh, path = folder / "manifest.new", folder / f"{stem}.json"
        fresh.write_text(json.dumps(content | {"digest": manifest_digest(content)}), encoding="ascii")
        settle(fresh, path)
    except (OSError, SafetensorError):
        fresh.unlink(missing_ok=True)
        tensors_path.unlink(missing_ok=True)
        raise
    return CheckpointFiles(path, manifest)


def _manifest(checkpoint: Checkpoint, run_id: str, peer_id: PeerId, saved: int, file_bytes: int) -> CheckpointManifest:
    state = checkpoint.state
    names = dict.fromkeys((one.peer, one.incarnation) for one in state.spent)
    origins = {origin: index for index, origin in enumerate(names)}
    return CheckpointManifest(
        format=FORMAT,
        run_id=run_id,
        peer_id=peer_id,
        saved=saved,
        file_bytes=file_bytes,
        tensors=tuple(TensorEntry(*tensor.spec, xxhash.xxh3_128_hexdigest(tensor.data)) for tensor in state.tensors),
        cursor=None if checkpoint.cursor is None else dict(checkpoint.cursor),
        random_state=checkpoint.random_state,
        origins=tuple(origins),
        spent=tuple((origins[one.peer, one.incarnation], one.counter) for one in state.spent),
        returned_norms=state.returned_norms,
        **{name: getattr(state, name) for name in STATE_NUMBERS},
    )
