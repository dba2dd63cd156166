"""A node's identity: its Ed25519 key, its peer id (which *is* the public key), and making and checking signatures.

The key file is in libp2p's own format, because the libp2p daemon reads the same file. Nothing here touches the network.
Formats: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

import fcntl
import functools
import os
import time
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import LocalError
from noloco_p2p.io.durable_files import make_folders, write_whole

KEY = "identity.key"
"""Name of the key file in a node's directory."""
SIGNATURE_BYTES = 64
LOOK_S = 1.0
"""Longest time for which processes that only look whether a node runs can keep it from starting, seconds."""
_KEY_PREFIX = bytes.fromhex("08011240")
"""Start of libp2p's PrivateKey message: type 1 (Ed25519), 64 bytes of data. Seed and public key (32 each) follow."""
_ID_PREFIX = bytes.fromhex("002408011220")
"""Start of an identity multihash of 36 bytes: libp2p's PublicKey message, type 1 (Ed25519), 32 bytes of data."""
_ID_LETTERS = 52
"""Length of every Ed25519 peer id in base58."""


@functools.lru_cache(16_384)
def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of a raw Ed25519 public key (32 bytes): `12D3KooW…` in base58."""
    return base58.b58encode(_ID_PREFIX + public_key).decode("ascii")


@functools.lru_cache(16_384)
def public_key_of(peer_id: str) -> bytes | None:
    """The raw public key (32 bytes) in a peer id; None unless it is the canonical spelling of an Ed25519 peer id."""
    if len(peer_id) != _ID_LETTERS:
        return None
    try:
        public_key = base58.b58decode(peer_id)[len(_ID_PREFIX) :]
    except ValueError:
        return None
    return public_key if peer_id_of(public_key) == peer_id else None


def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
    """Whether the holder of `peer_id` signed `message`. False for malformed ids and signatures."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer_id) or b"").verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """A node's key, used by this process alone: a lock file next to it keeps other processes away until `close`."""

    def __init__(self, path: Path, key: Ed25519PrivateKey, lock: int) -> None:
        self.path = path
        self.peer_id: PeerId = peer_id_of(key.public_key().public_bytes_raw())
        self.key = key
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> "Identity":
        """Load the key at `path`, or create one there (mode 0600, atomically), along with missing directories.

        Raises LocalError if another process uses the key, it is damaged, others may read it, or on a disk error.
        """
        found = cls.open_if_free(path)
        if found is None:
            raise LocalError(f"identity {path} is in use by another process: stop it, or give this node another --dir")
        return found

    @classmethod
    def open_if_free(cls, path: Path) -> "Identity | None":
        """Like `open`, but returns None if another process uses the key."""
        try:
            make_folders(path.parent)
            lock = locked(path.with_name(path.name + ".lock"))
            if lock is None:
                return None
            try:
                if not path.exists():
                    key = Ed25519PrivateKey.generate()
                    whole = key.private_bytes_raw() + key.public_key().public_bytes_raw()
                    write_whole(path, _KEY_PREFIX + whole, 0o600)
                return cls(path, _read(path), lock)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise LocalError(f"identity {path}: {error.strerror}; choose another directory with --dir") from error

    def sign(self, message: bytes) -> bytes:
        """Ed25519 signature over `message`, 64 bytes."""
        return self.key.sign(message)

    def close(self) -> None:
        """Let other processes use the identity. Harmless if called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def locked(path: Path) -> int | None:
    """The descriptor of a file, created if necessary and locked; None if another process holds the lock.

    The lock ends with the process, however that ends, and is not inherited. Raises OSError.
    """
    lock, give_up_at = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), time.monotonic() + LOOK_S
    while not _try_lock(lock, fcntl.LOCK_EX):
        # Whoever only looks whether a node runs (launch/node_probe) holds a shared lock, for a moment.
        if not _try_lock(lock, fcntl.LOCK_SH) or time.monotonic() > give_up_at:
            os.close(lock)
            return None
    return lock


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> Ed25519PrivateKey:
    if path.stat().st_mode & 0o077:
        raise LocalError(f"identity {path} is readable by others: run chmod 600 on it")
    data = path.read_bytes()
    seed, public_key = data[4:36], data[36:]
    if not data.startswith(_KEY_PREFIX) or len(data) != 68:
        raise LocalError(f"identity {path} is not an Ed25519 key in libp2p's format: remove it to get a new one")
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if key.public_key().public_bytes_raw() != public_key:
        raise LocalError(f"identity {path} is damaged (the two halves of the key differ): remove it to get a new one")
    return key
