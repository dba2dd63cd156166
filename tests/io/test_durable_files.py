"""The order of flushes and renames when files are written and directories created."""

import asyncio
import errno
import os
import random
from pathlib import Path

import pytest

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Checkpoint, HostTensor, ReplicaState
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.durable_files import write_whole
from noloco_p2p.io.storage.file_checkpoints import FileCheckpoints
from noloco_p2p.launch import run_files

Steps = list[tuple[str, Path]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Records flushes and renames, in order."""
    seen: Steps = []
    fsync, replace = os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        seen.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def named(self: Path, target: Path) -> Path:
        seen.append(("name", target))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", named)
    return seen


def lasts(steps: Steps, path: Path) -> bool:
    """Whether the bytes were flushed before the file got its name, and its directory afterwards."""
    at = steps.index(("name", path))
    before, after = steps[:at], steps[at + 1 :]
    fresh = [one for what, one in before if what == "flush" and one.parent == path.parent and one != path.parent]
    return bool(fresh) and ("flush", path.parent) in after


def test_a_written_file_and_its_name_are_on_the_disk(tmp_path: Path, steps: Steps) -> None:
    write_whole(tmp_path / "a", b"1")
    assert lasts(steps, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("failing", "error"), [("open", FULL), ("fsync", FULL), ("fsync", KeyboardInterrupt())])
def test_a_failed_write_is_reported_and_leaves_the_file_as_it_was(
    failing: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    (tmp_path / f"a.{os.getpid()}.new").write_bytes(b"left by a killed process with this id, as in a container")
    write_whole(path, b"old")

    def fail(*_: object) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(type(error)):
            write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
    opened = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
    assert not [one for one in opened if one.startswith(str(tmp_path))], "nothing stays open"


def test_a_key_and_its_new_directories_outlive_a_loss_of_power(tmp_path: Path, steps: Steps) -> None:
    home = tmp_path / "runs" / "node-1"
    Identity.open(home / "identity.key").close()
    assert lasts(steps, home / "identity.key")
    assert ("flush", tmp_path) in steps, "the directory with the entry `runs`"
    assert ("flush", tmp_path / "runs") in steps, "the directory with the entry `node-1`"


def test_run_files_outlive_a_loss_of_power(tmp_path: Path, steps: Steps) -> None:
    run_files.store_manifest(tmp_path, RunManifest())
    assert lasts(steps, tmp_path / run_files.MANIFEST)


def test_the_folders_of_a_first_checkpoint_outlive_a_loss_of_power(tmp_path: Path, steps: Steps) -> None:
    tensor = HostTensor("slow/w", "float32", (1,), memoryview(bytes(4)))
    state = ReplicaState("12D3KooWme", 0, 1, 1.0, 1, 1, (tensor,))
    checkpoint = Checkpoint(state, None, random.Random(0).getstate())
    asyncio.run(FileCheckpoints(tmp_path, "ab" * 32, "12D3KooWme", 3).save(checkpoint))
    assert ("flush", tmp_path) in steps
    assert ("flush", tmp_path / "checkpoints") in steps
    names = [path for what, path in steps if what == "name"]
    assert [path.suffix for path in names] == [".safetensors", ".json"]
    assert all(lasts(steps, path) for path in names)
