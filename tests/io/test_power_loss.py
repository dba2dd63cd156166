"""Power that fails at any point while a node writes: its key, its run, its checkpoints, the peers it has admitted.

One process writes for real, once, and every flush, rename and removal is recorded with the contents of the files at
that moment. From this record every disk that a loss of power can leave is built: names and bytes are certain from their
flush on; before that they may be present or absent, and bytes present in part.
"""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from members import Club
from soak import soak

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Checkpoint, HostTensor, ReplicaState
from noloco_p2p.io.dht.identity import Identity, peer_id_of
from noloco_p2p.io.security.invitations import Invitation, UseBook
from noloco_p2p.io.security.revocations import Revocations
from noloco_p2p.io.storage.file_checkpoints import FileCheckpoints
from noloco_p2p.launch import run_files

ROUNDS, KEPT, VALUES = 4, 2, 64
ANN, BOB = (peer_id_of(bytes([i]) * 32) for i in (1, 2))
Tree = dict[str, int]
"""Path below the root of the disk → number of the file."""


@dataclass
class Disk:
    """What has been written below a directory, and how much of it has been flushed."""

    root: Path
    points: list[tuple[Tree, Tree, dict[int, bytes], dict[int, bytes], int]] = field(default_factory=list)
    """At each point: names now, names flushed, bytes now, bytes flushed, and the number of promises made so far."""
    promises: int = 0
    _files: dict[int, int] = field(default_factory=dict)
    """Inode → number of the file, because inodes are reused."""
    _made: int = 0
    _flushed: dict[int, bytes] = field(default_factory=dict)
    _names: Tree = field(default_factory=dict)
    _now: dict[int, bytes] = field(default_factory=dict)

    def look(self) -> Tree:
        names = {}
        for path in sorted(self.root.rglob("*")):
            if path.is_file():
                inode = path.stat().st_ino
                if inode not in self._files:
                    self._made += 1
                    self._files[inode] = self._made
                which = self._files[inode]
                names[str(path.relative_to(self.root))] = which
                self._now[which] = path.read_bytes()
        return names

    def point(self) -> None:
        self.points.append((self.look(), dict(self._names), dict(self._now), dict(self._flushed), self.promises))

    def flush(self, path: Path) -> None:
        names = self.look()
        if path.is_dir():
            inside = str(path.relative_to(self.root))
            for name in {*names, *self._names}:
                if str(Path(name).parent) == inside:
                    self._names.pop(name, None)
                    self._names |= {name: names[name]} if name in names else {}
        else:
            which = names[str(path.relative_to(self.root))]
            self._flushed[which] = self._now[which]
        self.point()

    def forget(self, path: Path) -> None:
        """The inode of this file may soon be reused for another."""
        if path.exists():
            self.look()
            del self._files[path.stat().st_ino]

    def left(self, cuts: int) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Every disk that may be left: the number of promises made before, and the files by name. What has not been
        flushed is cut off after `cuts` different shares of its bytes, after none, and not at all."""
        for now, flushed_names, held, flushed, promises in self.points:
            for names in (now, flushed_names):
                yield promises, {name: held[which] for name, which in names.items()}
                for part in range(cuts + 1):
                    cut = {which: data[: len(data) * part // (cuts + 1)] for which, data in held.items()} | flushed
                    yield promises, {name: cut[which] for name, which in names.items()}


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(tmp_path / "disk")
    made.root.mkdir()
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def flushed(descriptor: int) -> None:
        made.point()
        fsync(descriptor)
        made.flush(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def named(self: Path, target: Path) -> Path:
        made.point()
        made.forget(target)
        found = replace(self, target)
        made.point()
        return found

    def removed(self: Path, missing_ok: bool = False) -> None:
        made.forget(self)
        unlink(self, missing_ok)
        made.point()

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", named)
    monkeypatch.setattr(Path, "unlink", removed)
    return made


def checkpoint(number: int) -> Checkpoint:
    values = memoryview(bytes([number]) * 4 * VALUES)
    state = ReplicaState(
        "12D3KooWme", 0, number, number, number, number, (HostTensor("slow/w", "float32", (VALUES,), values),)
    )
    return Checkpoint(state, None, random.Random(0).getstate())


class Written:
    """Everything that a node writes, in turn; each file is promised to last once its call has returned."""

    def __init__(self, home: Path, club: Club) -> None:
        self.home, self.club, self.key = home, club, ""
        until = club.now + 3600.0
        self.token = Invitation.signed(club.root, club.run_id, uses=9, until=until, stage=None)
        self.lists = [club.revoking(number, ANN) for number in (1, 2)]
        self.manifest = RunManifest(seed=7)

    def things(self) -> list[tuple[str, Callable[[], object]]]:
        book, revoked = UseBook(self.home / "book"), Revocations(self.club.trust, self.home / "revoked")
        saves = FileCheckpoints(self.home, "ab" * 32, "12D3KooWme", KEPT)
        return [
            ("key", self.make_key),
            ("run", lambda: run_files.store_manifest(self.home, self.manifest)),
            ("ann", lambda: book.use(self.token, ANN, self.club.now)),
            ("bob", lambda: book.use(self.token, BOB, self.club.now)),
            *((f"list {i}", lambda one=one: revoked.adopt(one)) for i, one in enumerate(self.lists, 1)),
            *((f"save {i}", lambda i=i: asyncio.run(saves.save(checkpoint(i)))) for i in range(1, ROUNDS + 1)),
        ]

    def make_key(self) -> None:
        identity = Identity.open(self.home / "identity.key")
        self.key = identity.peer_id
        identity.close()

    def check(self, home: Path, promised: list[str]) -> None:
        """Check that, after a loss of power, everything promised is there and nothing is damaged."""
        if (home / "identity.key").exists():
            identity = Identity.open(home / "identity.key")
            identity.close()
            assert identity.peer_id == self.key
        else:
            assert "key" not in promised
        stored = run_files.stored_manifest(home)
        assert stored == self.manifest or (stored is None and "run" not in promised)
        used = [peer for _, peers in UseBook(home / "book")._used.values() for peer in peers]
        assert used in ([], [ANN], [ANN, BOB])
        assert len(used) >= ("ann" in promised) + ("bob" in promised)
        assert Revocations(self.club.trust, home / "revoked").held.number >= sum(one[:4] == "list" for one in promised)
        saves, done = FileCheckpoints(home, "ab" * 32, "12D3KooWme", KEPT), sum(one[:4] == "save" for one in promised)
        held = asyncio.run(saves.held())
        whole = [
            one.round
            for one in held
            if (found := asyncio.run(saves.load(one))) and found.state == checkpoint(one.round).state
        ]
        assert max(whole, default=0) in (done, done + 1)


@pytest.mark.parametrize(("cuts", "disks"), [(6, 100), *soak([(100, 1_000)])])
def test_whatever_a_loss_of_power_leaves_is_whole(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: int, disks: int
) -> None:
    written = Written(disk.root, Club(tmp_path))
    order = []
    for name, write in written.things():
        write()
        order.append(name)
        disk.promises += 1
        disk.point()
    monkeypatch.undo()
    left = {(promises, *sorted(files.items())): (promises, files) for promises, files in disk.left(cuts)}
    for number, (promises, files) in enumerate(left.values()):
        home = tmp_path / f"left-{number}"
        for name, data in files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o600)
        home.mkdir(exist_ok=True)
        written.check(home, order[:promises])
    assert len(left) >= disks, f"{len(left)} disks of {len(disk.points)} points"


def test_the_record_finds_a_missing_flush(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that gets its name before its bytes are flushed is found damaged."""
    fresh, path = disk.root / "fresh", disk.root / "identity.key"
    fresh.write_bytes(b"whole")
    fresh.replace(path)
    disk.flush(disk.root)
    monkeypatch.undo()
    found = {files.get("identity.key") for _, files in disk.left(1)}
    assert {None, b"", b"whole"} <= found
