"""Checkpoints read back bitwise; torn, corrupt and foreign ones are skipped; older ones survive a failed save."""

import asyncio
import errno
import json
import logging
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from simulated_parts import tear

from noloco_p2p.config import OuterSettings, RunManifest
from noloco_p2p.core.messages import (
    Checkpoint,
    Holding,
    HostTensor,
    MicrobatchId,
    PeerId,
    ReplicaState,
)
from noloco_p2p.errors import LocalError
from noloco_p2p.io.storage import checkpoint_format
from noloco_p2p.io.storage.checkpoint_format import DamagedCheckpoint, read_checkpoint, read_tensors, stored_checkpoints
from noloco_p2p.io.storage.file_checkpoints import FileCheckpoints
from noloco_p2p.ports import Checkpoints
from noloco_p2p.sim.checkpoints import Disk, SimCheckpoints
from noloco_p2p.sim.virtual_time import run as run_virtually

RUN, PEER = "ab" * 32, "12D3KooWaaaabbbbccccme"
KINDS = RunManifest(outer=OuterSettings(rule="noloco")).state_kinds


def _tensor(name: str, dtype: str, shape: tuple[int, ...], chance: random.Random) -> HostTensor:
    values = np.array([chance.gauss(0, 1) for _ in range(int(np.prod(shape)))], dtype)
    return HostTensor(name, dtype, shape, memoryview(values.tobytes()))


def _checkpoint(round: int, stage: int = 1, *, dtype: str = "float32", peer: PeerId = PEER) -> Checkpoint:
    """Every field has a value that is easily lost: odd shapes, 64-bit numbers, a clock between two steps."""
    chance = random.Random(f"{round} {stage}")
    shapes = {"a.weight": (3, 5), "a.bias": (1,), "none": (0, 4), "b": (2, 2, 2)}
    tensors = [_tensor(f"{kind}/{name}", dtype, shapes[name], chance) for kind in KINDS for name in shapes]
    spent = [MicrobatchId(p, 2**63 + n, c) for c in range(20) for p, n in (("z", 1), ("a", 5), ("z", 2)) if c % 3 or n]
    chance.gauss(0, 1)  # leaves the second value of a pair behind, which is part of the state
    state = ReplicaState(
        peer=peer,
        stage=stage,
        round=round,
        step=round * 10 + 0.1,
        inner_steps=round * 10 - 1,
        adam_steps=round * 10 - 2,
        tensors=tuple(tensors),
        number=2**64 - 1,
        spent=tuple(spent),
    )
    cursor = None if stage else {"units": 3, "pass_number": 2**40, "place": [1, 2.5, "é"]}
    return Checkpoint(state, cursor, chance.getstate())


def _holding(checkpoint: Checkpoint) -> Holding:
    return Holding(checkpoint.state.stage, checkpoint.state.round, int(checkpoint.state.step))


def _save(store: Checkpoints, *all_of_them: Checkpoint) -> None:
    async def save() -> None:
        for one in all_of_them:
            await store.save(one)

    run_virtually(save(), limit_s=60.0) if isinstance(store, SimCheckpoints) else asyncio.run(save())


def _held(store: Checkpoints) -> list[Holding]:
    return asyncio.run(store.held())


def _load(store: Checkpoints, held: Holding) -> Checkpoint | None:
    if isinstance(store, SimCheckpoints):
        return run_virtually(store.load(held), limit_s=60.0)
    return asyncio.run(store.load(held))


def _newest(store: Checkpoints) -> Checkpoint | None:
    """The newest readable checkpoint, as a restarting node loads it."""
    for held in reversed(_held(store)):
        found = _load(store, held)
        if found is not None:
            return found
    return None


def _rewrite(path: Path, content: dict[str, object]) -> None:
    """Replace a manifest by one with other content and the right digest."""
    content.pop("digest", None)
    path.write_text(json.dumps(content | {"digest": checkpoint_format.manifest_digest(content)}))


# --- the contract of the port, real and simulated ---------------------------------------------------------------------

Open = Callable[[], Checkpoints]
"""Opens the same store again, as another process of the node would; the store keeps 3 checkpoints."""


@pytest.fixture(params=["files", "simulated"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    disk = Disk()
    if request.param == "files":
        return lambda: FileCheckpoints(tmp_path, RUN, PEER, 3)
    return lambda: SimCheckpoints(disk, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_checkpoint_comes_back_bitwise_in_another_process(reopen: Open, dtype: str, stage: int) -> None:
    assert _held(reopen()) == []
    saved = _checkpoint(10, stage, dtype=dtype)
    _save(reopen(), saved)
    assert _held(reopen()) == [Holding(stage, 10, 100)]
    found = _load(reopen(), Holding(stage, 10, 100))
    assert found == saved
    chance, restored = random.Random(f"10 {stage}"), random.Random()
    chance.setstate(saved.random_state)
    restored.setstate(found.random_state)
    assert [chance.gauss(0, 1) for _ in range(9)] == [restored.gauss(0, 1) for _ in range(9)]
    assert _load(reopen(), Holding(stage, 11, 100)) is None


def test_the_lineage_of_the_weights_is_kept_and_listed(reopen: Open) -> None:
    made = _checkpoint(5)
    _save(reopen(), replace(made, state=replace(made.state, fresh_round=4)))
    assert _held(reopen()) == [Holding(1, 5, 50, 4)]
    found = _load(reopen(), Holding(1, 5, 50, 4))
    assert found is not None
    assert found.state.fresh_round == 4


def test_a_pinned_checkpoint_stays_until_another_is_pinned(reopen: Open) -> None:
    """In later processes too, even if it is the oldest, or another checkpoint of its round is written."""

    def rounds_after(*numbers: int, pin: bool = False) -> list[int]:
        for number in numbers:
            save = reopen().save(_checkpoint(number), pin=pin)
            run_virtually(save, limit_s=60.0) if isinstance(reopen(), SimCheckpoints) else asyncio.run(save)
        return [held.round for held in _held(reopen())]

    assert rounds_after(5, pin=True) == [5], "there was no earlier checkpoint"
    assert rounds_after(10, pin=True) == [5, 10]
    assert rounds_after(15, 20, 25) == [5, 15, 20, 25]
    assert rounds_after(5, 30) == [5, 25, 30]
    assert rounds_after(35, pin=True) == [5, 30, 35]
    assert rounds_after(40, 45, 50) == [30, 40, 45, 50]


def test_only_a_checkpoint_of_the_same_stage_is_pinned(reopen: Open) -> None:
    """After a move, the first checkpoint has none before it. The last one of the stage before was pinned in place of
    that from before an alarm there."""

    def save(checkpoint: Checkpoint, *, pin: bool = False) -> list[tuple[int, int]]:
        saving = reopen().save(checkpoint, pin=pin)
        run_virtually(saving, limit_s=60.0) if isinstance(reopen(), SimCheckpoints) else asyncio.run(saving)
        return [(held.stage, held.round) for held in _held(reopen())]

    for round in (5, 10, 15):
        save(_checkpoint(round), pin=round == 10)
    for round in (20, 25, 30):
        found = save(_checkpoint(round, stage=2), pin=round == 20)
    assert found == [(1, 5), (2, 20), (2, 25), (2, 30)]


def test_the_most_recently_saved_are_kept_even_after_a_step_back(reopen: Open) -> None:
    saved = {round: _checkpoint(round) for round in (5, 10, 15, 20)}
    _save(reopen(), *saved.values())
    assert [held.round for held in _held(reopen())] == [10, 15, 20]
    again = _checkpoint(7, 2)
    _save(reopen(), again)
    assert [(held.stage, held.round) for held in _held(reopen())] == [(1, 15), (1, 20), (2, 7)]
    assert _newest(reopen()) == again
    assert _load(reopen(), Holding(1, 15, 150)) == saved[15]


def test_a_round_saved_again_replaces_its_former_checkpoint(reopen: Open) -> None:
    first, other = _checkpoint(5), _checkpoint(10)
    later = replace(first, state=replace(first.state, step=55.5, adam_steps=54))
    same_name = replace(later, state=replace(later.state, adam_steps=53))
    _save(reopen(), first, other, later)
    assert _held(reopen()) == [Holding(1, 10, 100), Holding(1, 5, 55)]
    assert _newest(reopen()) == later
    _save(reopen(), same_name)
    assert _held(reopen()) == [Holding(1, 10, 100), Holding(1, 5, 55)]
    assert _newest(reopen()) == same_name


def test_of_two_checkpoints_of_one_round_the_newer_is_loaded(reopen: Open) -> None:
    """The older one has been pinned."""
    first, other = _checkpoint(5), _checkpoint(10)
    later = replace(first, state=replace(first.state, adam_steps=54))
    _save(reopen(), first)
    saving = reopen().save(other, pin=True)
    run_virtually(saving, limit_s=60.0) if isinstance(reopen(), SimCheckpoints) else asyncio.run(saving)
    _save(reopen(), later)
    assert _held(reopen()) == [_holding(first), _holding(other)]
    assert _load(reopen(), _holding(first)) == later


# --- torn and corrupt -------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[Checkpoint, Path, Path]:
    """A directory with the checkpoints of rounds 5 and 10: (that of 5, manifest of 10, tensors of 10)."""
    older = _checkpoint(5)
    _save(FileCheckpoints(tmp_path, RUN, PEER, 3), older, _checkpoint(10))
    (path,) = tmp_path.glob("checkpoints/*/stage-1-round-000010-*.json")
    assert _newest(FileCheckpoints(tmp_path, RUN, PEER, 3)) == _checkpoint(10)
    return older, path, path.with_suffix(".safetensors")


def _swept(tmp_path: Path) -> list[str]:
    """Save one more checkpoint, and list the files that are there afterwards."""
    _save(FileCheckpoints(tmp_path, RUN, PEER, 3), _checkpoint(15))
    return sorted(path.name[:20] for path in tmp_path.glob("checkpoints/*/*"))


ONLY_5_AND_15 = ["stage-1-round-000005"] * 2 + ["stage-1-round-000015"] * 2


@pytest.mark.parametrize("what", ["manifest", "tensors"])
@pytest.mark.parametrize("left", [None, 0.0, 0.5, 0.999])
def test_a_torn_file_is_detected_and_the_previous_checkpoint_is_used(
    two: tuple[Checkpoint, Path, Path], tmp_path: Path, what: str, left: float | None
) -> None:
    older, *files = two
    path = files[what == "tensors"]
    whole = path.read_bytes()
    path.unlink() if left is None else path.write_bytes(whole[: int(left * len(whole))])
    store = FileCheckpoints(tmp_path, RUN, PEER, 3)
    assert _held(store) == [Holding(1, 5, 50)]
    assert _newest(store) == older
    assert [shard.manifest.round for shard in stored_checkpoints(tmp_path)] == [5]
    assert _swept(tmp_path) == ONLY_5_AND_15


@pytest.mark.parametrize("what", ["manifest", "tensors"])
def test_a_flipped_bit_anywhere_is_detected_and_the_previous_checkpoint_is_used(
    two: tuple[Checkpoint, Path, Path], tmp_path: Path, what: str
) -> None:
    older, *files = two
    path = files[what == "tensors"]
    whole = path.read_bytes()
    for place in (*range(8), *random.Random(0).sample(range(8, len(whole)), 150), len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        store = FileCheckpoints(tmp_path, RUN, PEER, 3)
        assert _newest(store) == older, f"byte {place}: {whole[place : place + 1]!r}"
        assert _held(store) == [Holding(1, 5, 50)], "a checkpoint found damaged is no longer announced"


def test_a_damaged_checkpoint_does_not_count_towards_those_kept(
    two: tuple[Checkpoint, Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, _, path = two
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store = FileCheckpoints(tmp_path, RUN, PEER, 2)
    assert _newest(store) == older
    assert [(record.levelno, str(path) in record.message) for record in caplog.records] == [(logging.WARNING, True)]
    _save(store, _checkpoint(15))
    assert [held.round for held in _held(store)] == [5, 15]
    assert not path.exists()


def test_a_torn_pin_and_files_with_other_names_keep_no_checkpoint_from_being_saved(
    two: tuple[Checkpoint, Path, Path], tmp_path: Path
) -> None:
    (two[1].parent / "pinned").write_bytes(b"stage-1-\xff")
    two[1].with_name("stage-1-round-000010-of-before.txt").touch()
    store = FileCheckpoints(tmp_path, RUN, PEER, 3)
    _save(store, _checkpoint(15))
    assert [held.round for held in _held(store)] == [5, 10, 15]


class _Killed(BaseException):
    """Stands for the end of the process."""


def _failing_at(call: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail all flushes and renames from number `call` on; a save does 4 flushes and 2 renames."""
    done: Iterator[int] = iter(range(100))

    def step(real: Callable[..., object]) -> Callable[..., object]:
        def stepped(*arguments: object) -> object:
            if next(done) >= call:
                raise error
            return real(*arguments)

        return stepped

    monkeypatch.setattr(os, "fsync", step(os.fsync))
    monkeypatch.setattr(Path, "replace", step(Path.replace))


@pytest.mark.parametrize("call", range(7))
def test_a_node_killed_while_it_saves_has_the_whole_new_checkpoint_or_the_previous_one(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = _checkpoint(5), _checkpoint(10)
    _save(FileCheckpoints(tmp_path, RUN, PEER, 3), older)
    with monkeypatch.context() as patch:
        _failing_at(call, _Killed(), patch)
        if call < 6:
            with pytest.raises(_Killed):
                _save(FileCheckpoints(tmp_path, RUN, PEER, 3), newer)
        else:
            _save(FileCheckpoints(tmp_path, RUN, PEER, 3), newer)
    store = FileCheckpoints(tmp_path, RUN, PEER, 3)
    assert _newest(store) == (newer if call >= 5 else older)
    _save(store, _checkpoint(15))
    rounds = [5, 10, 15] if call >= 5 else [5, 15]
    assert [held.round for held in _held(store)] == rounds
    names = sorted(path.name[:20] for path in tmp_path.glob("checkpoints/*/*"))
    assert names == sorted(2 * [f"stage-1-round-{round:06d}" for round in rounds]), "leftovers are swept"


# --- full disks, other nodes ------------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_and_older_checkpoints_stay(tmp_path: Path) -> None:
    store, older = FileCheckpoints(tmp_path, RUN, PEER, 3), _checkpoint(5)
    _save(store, older)
    before = sorted(tmp_path.glob("checkpoints/*/*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = before[1].stat().st_size
    for largest in (100, room // 2, room + 1):  # the manifest is larger than the tensors here
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
        try:
            with pytest.raises(LocalError, match=f"{before[0].parent} .*: free some space") as raised:
                _save(store, _checkpoint(10))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "\n" not in str(raised.value)
        assert sorted(tmp_path.glob("checkpoints/*/*")) == before
    assert _newest(store) == older
    _save(store, _checkpoint(10))
    assert _newest(store) == _checkpoint(10)


@pytest.mark.parametrize("call", range(6))
def test_a_disk_that_fails_during_a_save_leaves_older_checkpoints(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, older = FileCheckpoints(tmp_path, RUN, PEER, 3), _checkpoint(5)
    _save(store, older)
    with monkeypatch.context() as patch:
        _failing_at(call, OSError(errno.ENOSPC, "No space left on device"), patch)
        with pytest.raises(LocalError, match=r"\(No space left on device\): free"):
            _save(store, _checkpoint(10))
    assert _load(store, _holding(older)) == older
    assert _swept(tmp_path)[:2] == ONLY_5_AND_15[:2]
    assert not list(tmp_path.glob("checkpoints/*/*.new"))


def test_a_directory_that_cannot_be_created_or_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    store = FileCheckpoints(tmp_path, RUN, PEER, 3)
    with pytest.raises(LocalError, match=f"{tmp_path}/checkpoints/.*Not a directory"):
        _save(store, _checkpoint(5))
    assert _held(store) == []
    assert stored_checkpoints(tmp_path / "absent") == []


def test_a_node_folder_may_be_a_link(two: tuple[Checkpoint, Path, Path], tmp_path: Path) -> None:
    """An export left out a node whose folder had been moved to another disk. Links cannot form a circle."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "0-0").symlink_to(tmp_path)
    (run / "self").symlink_to(run)
    (run / "gone").symlink_to("nowhere")
    assert [one.holding.round for one in stored_checkpoints(run)] == [5, 10]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Directories that may not be listed, not even by root, whom permissions do not stop."""
    those: set[Path] = set()

    def listing(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def listed(path: Any) -> Any:
            if not isinstance(path, int) and Path(path) in those:  # from Python 3.13 on, `Path` passes a string
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path)

        return listed

    monkeypatch.setattr(os, "listdir", listing(os.listdir))
    monkeypatch.setattr(os, "scandir", listing(os.scandir))
    return those


def test_a_folder_that_may_not_be_listed_does_not_pass_for_an_empty_one(
    two: tuple[Checkpoint, Path, Path], tmp_path: Path, refused: set[Path]
) -> None:
    """Otherwise a run would begin again with initial weights, or an export would leave out a node without a word. The
    `lost+found` of a volume is none of ours."""
    run, node = tmp_path, tmp_path / "0-0"
    node.mkdir()
    folder = two[1].parent.parent.rename(node / "checkpoints") / two[1].parent.name
    store = FileCheckpoints(node, RUN, PEER, 3)
    for volume in (run, folder.parent):
        (volume / "lost+found").mkdir()
        refused.add(volume / "lost+found")
    assert [one.holding.round for one in stored_checkpoints(run)] == [5, 10]
    for each in (folder, folder.parent, node):
        refused.add(each)
        with pytest.raises(LocalError, match=f"checkpoints below {run}: {each}: Permission denied"):
            stored_checkpoints(run)
    for call in (store.held(), store.save(_checkpoint(15))):
        with pytest.raises(LocalError, match=f"checkpoints in {folder}: Permission denied; check its permissions"):
            asyncio.run(call)


def test_a_checkpoint_of_another_user_is_not_skipped_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of tensors have mode 0600. To safetensors, one that cannot be opened is missing."""

    def refuse(path: Path, mode: str) -> object:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open(path, mode)

    store = FileCheckpoints(tmp_path, RUN, PEER, 3)
    _save(store, _checkpoint(5), _checkpoint(10))
    monkeypatch.setattr(checkpoint_format, "open", refuse, raising=False)
    with pytest.raises(LocalError, match=r"round-000010-1.safetensors cannot be read: Permission denied") as end:
        _newest(store)
    assert not isinstance(end.value, DamagedCheckpoint)


def test_a_checkpoint_in_the_previous_format_is_read(tmp_path: Path) -> None:
    store = FileCheckpoints(tmp_path, RUN, PEER, 3)
    _save(store, _checkpoint(5))
    (path,) = (shard.path for shard in stored_checkpoints(tmp_path))
    content = json.loads(path.read_text())
    del content["returned_norms"], content["fresh_round"]
    _rewrite(path, content | {"format": 1})
    again = _load(store, Holding(1, 5, 50))
    assert again is not None
    assert (again.state.returned_norms, again.state.fresh_round) == ((), 0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest: manifest.update(step=float("inf")),
        lambda manifest: manifest.update(step=float("nan")),
        lambda manifest: manifest.update(step=-1.0),
        lambda manifest: manifest["spent"].append([len(manifest["origins"]), 0]),
        lambda manifest: manifest["spent"].append([-1, 0]),
        lambda manifest: manifest["tensors"][0][2].reverse(),  # as many values, so the same digest
    ],
)
def test_a_checkpoint_with_an_impossible_manifest_is_skipped(
    two: tuple[Checkpoint, Path, Path], tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    older, path, _ = two
    content = json.loads(path.read_text())
    spoil(content)
    _rewrite(path, content)
    store = FileCheckpoints(tmp_path, RUN, PEER, 3)
    assert _newest(store) == older
    assert _held(store) == [Holding(1, 5, 50)]


@pytest.mark.parametrize("text", ["[]", "null", '"a"'])
def test_a_manifest_that_is_no_object_is_skipped(two: tuple[Checkpoint, Path, Path], tmp_path: Path, text: str) -> None:
    two[1].write_text(text)
    assert _held(FileCheckpoints(tmp_path, RUN, PEER, 3)) == [Holding(1, 5, 50)]


def test_the_digest_of_a_manifest_stays_as_it_is() -> None:
    """Otherwise a newer program would take all earlier checkpoints for damaged ones."""
    assert (
        checkpoint_format.manifest_digest({"b": [1, 2.5], "a": {"d": None, "c": "é"}})
        == "b814719d17e32de44a94bee39b2d2d8d"
    )


def test_other_runs_nodes_and_formats_are_skipped_and_left_alone(tmp_path: Path) -> None:
    """All in one folder: the ids of runs and peers share prefixes and suffixes."""
    foreign = [FileCheckpoints(tmp_path, RUN[:-1] + "c", PEER, 3), FileCheckpoints(tmp_path, RUN, "Q" + PEER[-12:], 3)]
    for store in foreign:
        _save(store, _checkpoint(5))
    own = FileCheckpoints(tmp_path, RUN, PEER, 2)
    assert _held(own) == []
    assert _load(own, Holding(1, 5, 50)) is None
    _save(own, _checkpoint(1))
    (path,) = (shard.path for shard in stored_checkpoints(tmp_path) if shard.holding.round == 1)
    _rewrite(path, json.loads(path.read_text()) | {"format": checkpoint_format.FORMAT + 1})
    assert _held(own) == []
    _save(own, _checkpoint(5), _checkpoint(10), _checkpoint(15))
    assert [held.round for held in _held(own)] == [10, 15]
    assert [_held(store) for store in foreign] == [[Holding(1, 5, 50)]] * 2
    assert path.exists()
    assert path.with_suffix(".safetensors").exists()
    assert len(list(tmp_path.glob("checkpoints/*"))) == 1


# --- without a node ---------------------------------------------------------------------------------------------------


def test_the_shards_of_a_whole_swarm_can_be_read_without_a_node(tmp_path: Path) -> None:
    peers = ("12D3KooWonex", "12D3KooWtwox")
    for node, peer in enumerate(peers):
        store = FileCheckpoints(tmp_path / f"node-{node}", RUN, peer, 3)
        _save(store, *(_checkpoint(round, node, peer=peer) for round in (10, 5)))
    found = stored_checkpoints(tmp_path)
    assert [(one.manifest.peer_id, one.holding) for one in found] == [
        (peers[0], Holding(0, 10, 100)),
        (peers[0], Holding(0, 5, 50)),
        (peers[1], Holding(1, 10, 100)),
        (peers[1], Holding(1, 5, 50)),
    ]
    assert [one.holding for one in stored_checkpoints(tmp_path / "node-1")] == [one.holding for one in found[2:]]
    saved = _checkpoint(5, 1, peer=peers[1])
    assert read_checkpoint(found[3]) == saved
    slow = read_tensors(found[3], {"slow", "momentum"})
    assert slow == tuple(t for t in saved.state.tensors if t.name.startswith(("slow/", "momentum/")))
    theirs = safetensors.numpy.load_file(found[3].tensors_path)
    assert {name: values.tobytes() for name, values in theirs.items()} == {
        tensor.name: bytes(tensor.data) for tensor in saved.state.tensors
    }
    whole = found[3].tensors_path.read_bytes()
    found[3].tensors_path.write_bytes(whole[:-1] + b"?")
    with pytest.raises(DamagedCheckpoint, match=f"{found[3].tensors_path} is damaged: the values of .* the digest"):
        read_tensors(found[3])


def test_checkpoints_do_not_import_torch() -> None:
    code = "import noloco_p2p.io.storage.file_checkpoints, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- the simulated disk -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_during_a_simulated_save_leaves_nothing_or_a_torn_one(torn: bool) -> None:
    disk = Disk(torn_by_crash=torn)
    older = _checkpoint(5)

    async def main() -> None:
        store = SimCheckpoints(disk, 3, save_s=1.0)
        await store.save(older)
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)
        saving = asyncio.create_task(store.save(_checkpoint(10)))
        await asyncio.sleep(0.5)
        store.crash()
        await asyncio.wait([saving])
        assert asyncio.get_running_loop().time() == pytest.approx(1.5)
        with pytest.raises(asyncio.CancelledError):
            await store.save(_checkpoint(15))

    run_virtually(main(), limit_s=60.0)
    store = SimCheckpoints(disk, 3)
    assert [held.round for held in _held(store)] == ([5, 10] if torn else [5])
    assert _newest(store) == older
    assert [held.round for held in _held(store)] == [5]


def test_a_simulated_disk_can_be_torn_and_lost() -> None:
    disk, older = Disk(), _checkpoint(5)
    store = SimCheckpoints(disk, 3)
    tear(disk)
    _save(store, older, _checkpoint(10))
    tear(disk)
    assert _newest(store) == older
    disk.wipe()
    assert _held(store) == []
