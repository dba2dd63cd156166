"""The identity: libp2p's file format, the peer id as public key, signatures, and one process per key."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.errors import LocalError
from noloco_p2p.io.dht import identity
from noloco_p2p.io.dht.identity import Identity, peer_id_of, public_key_of, verify

KEYS = st.binary(min_size=32, max_size=32)


@given(KEYS)
def test_the_peer_id_is_the_public_key(public_key: bytes) -> None:
    peer_id = peer_id_of(public_key)
    assert peer_id.startswith("12D3KooW")
    assert public_key_of(peer_id) == public_key


def test_the_peer_id_matches_the_specification() -> None:
    """A test vector from libp2p's peer id specification (Ed25519 key)."""
    private_key = bytes.fromhex(
        "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
        "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    seed, public_key = private_key[4:36], private_key[36:]
    assert Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw() == public_key
    assert private_key[:4] == bytes.fromhex("08011240")
    assert peer_id_of(public_key) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


@pytest.mark.parametrize(
    "spelling",
    ["", "12D3KooW", "{}x", " {}", "{}\n", "1{}", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"],
)
def test_only_one_spelling_of_a_peer_id_is_accepted(spelling: str) -> None:
    right = peer_id_of(bytes(range(32)))
    assert public_key_of(spelling.format(right)) is None
    assert public_key_of("z" * len(right)) is None
    assert public_key_of(right[:-1] + "0") is None
    other_prefix = base58.b58encode(bytes.fromhex("002408011221") + bytes(range(32))).decode()
    assert len(other_prefix) == len(right)
    assert public_key_of(other_prefix) is None


def test_a_new_key_is_private_and_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "node" / "identity.key"
    first = Identity.open(path)
    data = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert data[:4].hex() == "08011240"
    assert len(data) == 68
    assert public_key_of(first.peer_id) == data[36:]
    first.close()
    second = Identity.open(path)
    assert second.peer_id == first.peer_id
    assert sorted(p.name for p in path.parent.iterdir()) == ["identity.key", "identity.key.lock"]
    second.close()


def test_signatures_bind_message_and_signer(tmp_path: Path) -> None:
    mine, other = Identity.open(tmp_path / "a"), Identity.open(tmp_path / "b")
    signature = mine.sign(b"message")
    assert verify(mine.peer_id, b"message", signature)
    assert not verify(mine.peer_id, b"massage", signature)
    assert not verify(other.peer_id, b"message", signature)
    assert not verify(mine.peer_id, b"message", signature[:-1])
    assert not verify("nobody", b"message", signature)
    mine.close()
    other.close()


def test_a_second_process_with_the_same_identity_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first = Identity.open(path)
    program = (
        "import sys, pathlib; from noloco_p2p.io.dht.identity import Identity; Identity.open(pathlib.Path(sys.argv[1]))"
    )
    second = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert "LocalError: identity" in second.stderr
    assert "in use by another process" in second.stderr
    first.close()
    third = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert third.returncode == 0, third.stderr


def test_a_look_whether_a_node_runs_does_not_keep_it_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tried = tmp_path / "identity.key", list[int]()
    Identity.open(path).close()
    with path.with_name("identity.key.lock").open("rb") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        monkeypatch.setattr(identity, "LOOK_S", 0.0)
        assert Identity.open_if_free(path) is None, "it must end"
        monkeypatch.undo()

        def lock(file: int, kind: int) -> None:
            tried.append(kind)
            if len(tried) == 3:
                looks.close()
            flock(file, kind)

        flock = fcntl.flock
        monkeypatch.setattr(fcntl, "flock", lock)
        Identity.open(path).close()
    assert len(tried) == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-1], "not an Ed25519 key"),
        (lambda data: b"\x08\x00" + data[2:], "not an Ed25519 key"),
        (lambda data: data[:40] + bytes(28), "damaged"),
    ],
)
def test_a_corrupt_key_is_refused_and_the_lock_released(tmp_path: Path, spoil: object, message: str) -> None:
    path = tmp_path / "identity.key"
    Identity.open(path).close()
    good = path.read_bytes()
    assert callable(spoil)
    path.write_bytes(spoil(good))
    with pytest.raises(LocalError, match=message):
        Identity.open(path)
    path.write_bytes(good)
    Identity.open(path).close()


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.open(path).close()
    os.chmod(path, 0o640)
    with pytest.raises(LocalError, match="chmod 600"):
        Identity.open(path)


def test_a_directory_that_cannot_be_created_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="choose another directory") as caught:
        Identity.open(tmp_path / "file" / "identity.key")
    assert "\n" not in str(caught.value)
