"""The Checkpoints port on disk: checkpoints that a node writes for itself and finds again after a restart.

`checkpoint_format` describes the files. Files without a manifest, left by a node that was killed, are removed by the
next save. Two processes never write here at the same time, because the lock of the node's identity prevents it.
"""

import asyncio
import logging
import threading
from pathlib import Path

from safetensors import SafetensorError

from noloco_p2p.core.messages import Checkpoint, Holding, PeerId
from noloco_p2p.errors import LocalError
from noloco_p2p.io.durable_files import make_folders, write_whole
from noloco_p2p.io.storage import checkpoint_format
from noloco_p2p.io.storage.checkpoint_format import CheckpointFiles, DamagedCheckpoint, ForeignCheckpointFormat

PINNED = "pinned"
"""File in the folder with the name of the pinned checkpoint, without its extension."""
log = logging.getLogger("noloco_p2p")


class FileCheckpoints:
    """Implements `ports.Checkpoints` below a node's `directory`. The work is done in threads; one save at a time."""

    def __init__(self, directory: Path, run_id: str, peer_id: PeerId, keep: int) -> None:
        """Opens nothing yet. `keep`: how many checkpoints stay, apart from a pinned one."""
        self._folder = directory / "checkpoints" / f"{run_id[:16]}-{peer_id[-12:]}"
        self._run_id = run_id
        self._peer_id = peer_id
        self._keep = keep
        self._damaged: set[Path] = set()
        """Manifests of the checkpoints that `load` found damaged."""
        self._lock = threading.Lock()

    async def held(self) -> list[Holding]:
        """See `ports.Checkpoints`. Equal holdings are listed once; `load` takes the newest. Raises LocalError."""
        return list(dict.fromkeys(stored.holding for stored in await asyncio.to_thread(self._stored)))

    async def save(self, checkpoint: Checkpoint, *, pin: bool = False) -> None:
        """See `ports.Checkpoints`. On return the checkpoint has been flushed to disk. Raises LocalError."""
        await asyncio.to_thread(self._save, checkpoint, pin)

    async def load(self, held: Holding) -> Checkpoint | None:
        """See `ports.Checkpoints`. A damaged checkpoint is logged, and no longer listed."""
        return await asyncio.to_thread(self._load, held)

    def _stored(self) -> list[CheckpointFiles]:
        """The complete checkpoints of this run and node, oldest first."""
        try:
            found = list(checkpoint_format.complete_checkpoints(self._folder))
        except OSError as error:
            raise LocalError(f"checkpoints in {self._folder}: {error.strerror}; check its permissions") from error
        own = [one for one in found if (one.manifest.run_id, one.manifest.peer_id) == (self._run_id, self._peer_id)]
        return sorted((one for one in own if one.path not in self._damaged), key=lambda one: one.manifest.saved)

    def _load(self, held: Holding) -> Checkpoint | None:
        for stored in reversed([one for one in self._stored() if one.holding == held]):
            try:
                return checkpoint_format.read_checkpoint(stored)
            except DamagedCheckpoint as error:
                self._damaged.add(stored.path)
                log.warning("%s; using the one before it", error)
        return None

    def _save(self, checkpoint: Checkpoint, pin: bool) -> None:
        with self._lock:
            try:
                make_folders(self._folder)
                before = self._stored()
                if pin and (mine := [one for one in before if one.holding.stage == checkpoint.state.stage]):
                    write_whole(self._folder / PINNED, mine[-1].path.stem.encode())
                stored = checkpoint_format.write_checkpoint(
                    self._folder, checkpoint, self._run_id, self._peer_id, self._next_number()
                )
                others = [one for one in before if one.holding[:2] != stored.holding[:2]]
                self._sweep([*others, stored][-self._keep :])
            except (OSError, SafetensorError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise LocalError(
                    f"no checkpoint could be written to {self._folder} ({reason}): free some space, or start the node "
                    "with another --dir; the earlier checkpoints are untouched"
                ) from error

    def _next_number(self) -> int:
        """One more than the largest number in the folder, including those of damaged and foreign checkpoints."""
        numbers = [path.stem.rpartition("-")[2] for path in self._folder.glob("stage-*")]
        return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)

    def _sweep(self, kept: list[CheckpointFiles]) -> None:
        """Remove all other checkpoints, except the pinned one and those of another format, run or node. A manifest is
        removed before its tensors."""
        pinned = self._folder / PINNED
        names = {one.path.stem for one in kept} | ({pinned.read_text(errors="replace")} if pinned.exists() else set())
        names |= {one.stem for one in self._folder.glob("stage-*.json") if one.stem not in names and self._foreign(one)}
        for suffix in (".json", ".safetensors"):
            for path in self._folder.glob(f"stage-*{suffix}"):
                if path.stem not in names:
                    path.unlink(missing_ok=True)

    def _foreign(self, path: Path) -> bool:
        try:
            manifest = checkpoint_format.read_manifest(path)
        except ForeignCheckpointFormat:
            return True
        except DamagedCheckpoint:
            return False
        return (manifest.run_id, manifest.peer_id) != (self._run_id, self._peer_id)
