"""The Checkpoints port without files: a disk that outlives its node's processes and can be torn or lost."""

import asyncio
from dataclasses import dataclass, replace

from noloco_p2p.core.messages import Checkpoint, Holding


@dataclass(slots=True)
class _DiskEntry:
    checkpoint: Checkpoint
    torn: bool = False
    noticed: bool = False
    """It has been read, and found to be torn."""

    @property
    def holding(self) -> Holding:
        state = self.checkpoint.state
        return Holding(state.stage, state.round, int(state.step), state.fresh_round)


class Disk:
    """What one node has written. It survives crashes and belongs to the swarm.

    With `torn_by_crash`, a crash in the middle of a save leaves a checkpoint that looks complete but is not; otherwise
    it leaves nothing.
    """

    def __init__(self, *, torn_by_crash: bool = False) -> None:
        self.torn_by_crash = torn_by_crash
        self._entries: list[_DiskEntry] = []
        self._pinned: _DiskEntry | None = None

    def held(self, *, intact: bool = False) -> list[Holding]:
        """The checkpoints that look complete, or those that are, oldest first."""
        return list(dict.fromkeys(one.holding for one in self._entries if not (one.torn if intact else one.noticed)))

    def put(self, checkpoint: Checkpoint, keep: int, *, pin: bool = False, torn: bool = False) -> None:
        """Add a checkpoint in place of one of the same stage and round, and delete the oldest beyond `keep`."""
        before = [one for one in self._entries if one.holding.stage == checkpoint.state.stage]
        self._pinned, fresh = before[-1] if pin and before else self._pinned, _DiskEntry(checkpoint, torn)
        stays = [one for one in self._entries if one.holding[:2] != fresh.holding[:2] or one is self._pinned]
        others = [one for one in stays if not one.noticed]
        forgotten, kept = [*others, fresh][:-keep], [*others, fresh][-keep:]
        self._entries = [*(one for one in forgotten if one is self._pinned), *kept]

    def get(self, held: Holding) -> Checkpoint | None:
        """A complete checkpoint; None if it is missing, or torn, which `held` then takes into account."""
        for entry in reversed(self._entries):
            if entry.holding == held:
                entry.noticed = entry.torn
                return None if entry.torn else entry.checkpoint
        return None

    def wipe(self) -> None:
        """Delete everything."""
        self._entries.clear()


class SimCheckpoints:
    """The Checkpoints port of one process. A save takes `save_s` virtual seconds, and so does a load."""

    def __init__(self, disk: Disk, keep: int, save_s: float = 0.05) -> None:
        self.dead = False
        """The process has crashed; nothing that its tasks still do has any effect."""
        self._disk = disk
        self._keep = keep
        self._save_s = save_s
        self._saving: dict[asyncio.Task[object], None] = {}

    def crash(self) -> None:
        """The process dies, possibly in the middle of a save."""
        self.dead = True
        for task in self._saving:
            task.cancel()

    async def held(self) -> list[Holding]:
        """See `ports.Checkpoints`."""
        return self._disk.held()

    async def save(self, checkpoint: Checkpoint, *, pin: bool = False) -> None:
        """See `ports.Checkpoints`. Writes the values as they are at the time of the call."""
        frozen, task = _copy(checkpoint), asyncio.current_task()
        if self.dead or task is None:
            raise asyncio.CancelledError
        self._saving[task] = None
        try:
            await asyncio.sleep(self._save_s)
        finally:
            del self._saving[task]
            if self.dead and self._disk.torn_by_crash:
                self._disk.put(frozen, self._keep, torn=True)
        self._disk.put(frozen, self._keep, pin=pin)

    async def load(self, held: Holding) -> Checkpoint | None:
        """See `ports.Checkpoints`."""
        await asyncio.sleep(self._save_s)
        found = None if self.dead else self._disk.get(held)
        return None if found is None else _copy(found)


def _copy(checkpoint: Checkpoint) -> Checkpoint:
    state = checkpoint.state
    tensors = tuple(replace(tensor, data=memoryview(bytes(tensor.data))) for tensor in state.tensors)
    cursor = None if checkpoint.cursor is None else dict(checkpoint.cursor)
    return replace(checkpoint, state=replace(state, tensors=tensors), cursor=cursor)
