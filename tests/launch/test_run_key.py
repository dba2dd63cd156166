"""The list of revoked peers: how it is made, and what nodes and observers do about it before they train."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from members import Club

from noloco_p2p.config import RunManifest, SecuritySettings
from noloco_p2p.errors import ConfigError
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import Identity, peer_id_of
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.security import admission, revocations
from noloco_p2p.io.security.revocations import DenyList, Revocations
from noloco_p2p.io.transport.peer_links import Links
from noloco_p2p.launch import run_files, run_key

ANN, BOB = (JoinAddress("127.0.0.1", 1, peer_id_of(bytes([i]) * 32)) for i in (1, 2))


def test_a_revoked_issuer_is_not_asked_to_renew_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would, and the node would then have to stop: a revoked node would have admitted it."""
    club, keep_valid = Club(tmp_path), Mock()
    monkeypatch.setattr(admission, "keep_valid", keep_valid)
    monkeypatch.setattr(revocations, "keep", Mock())
    credentials, revoked = club.credentials("mine"), Revocations(club.trust)
    records = MemberRecords(club.trust, revoked)
    records.issuers = {ANN.peer_id: ANN, BOB.peer_id: BOB}
    run_key.Standing(Links(credentials), records, credentials).keeping(Mock(), print)
    issuers = keep_valid.call_args.args[3]
    assert issuers() == [ANN, BOB]
    revoked.adopt(club.revoking(1, ANN.peer_id))
    assert issuers() == [BOB]


def test_newcomers_and_observers_ask_whom_they_join_who_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that restarts would otherwise train for seconds with a certificate that nobody accepts."""
    root, identity = Ed25519PrivateKey.generate(), Identity.open(tmp_path / "identity.key")
    manifest = RunManifest(security=SecuritySettings(root_key=run_key.public_half(root)))
    club = Club(tmp_path, manifest.run_id, root)
    chain = club.chain(identity.peer_id)
    (tmp_path / run_key.CERTIFICATE).write_bytes(chain)
    gone = club.trust.membership(chain).issuer

    async def ask(libp2p: Libp2pDaemon, held: Revocations, others: Sequence[JoinAddress]) -> None:
        assert others == [ANN]
        held.adopt(club.revoking(1, gone))

    monkeypatch.setattr(revocations, "ask", ask)
    libp2p = cast(Libp2pDaemon, SimpleNamespace(joined=[ANN], peer_id=identity.peer_id))
    records = asyncio.run(run_key.of_observer(identity, manifest, libp2p, calls=False)).records
    assert records is not None
    assert records.revoked.names(gone)
    with pytest.raises(ConfigError, match="no node was joined with an invitation"):
        asyncio.run(run_key.of_node(tmp_path, identity, None, manifest, libp2p))


def test_a_list_made_by_a_clock_that_was_ahead_can_still_be_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunManifest(security=SecuritySettings(root_key=run_key.make(tmp_path / "root.key")))
    run_files.store_manifest(tmp_path, run)
    root, ahead = run_key.read(tmp_path / "root.key"), 1 << 40
    (tmp_path / run_key.REVOKED).write_bytes(DenyList.make(root, run.run_id, ahead, [ANN.peer_id]).signed)
    monkeypatch.setattr(run_key, "sleep", Mock(side_effect=[None]))  # it is made once
    made = run_key.revoke(tmp_path, None, [BOB.peer_id])
    assert (made.number, made.peers) == (ahead + 1, (ANN.peer_id, BOB.peer_id))


def test_the_key_of_another_run_revokes_nobody(tmp_path: Path) -> None:
    run = RunManifest(security=SecuritySettings(root_key=run_key.make(tmp_path / "root.key")))
    run_files.store_manifest(tmp_path, run)
    run_key.make(tmp_path / "other.key")
    with pytest.raises(ConfigError, match=r"^this is not the run's key: name the file given to --key"):
        run_key.revoke(tmp_path, tmp_path / "other.key", [BOB.peer_id])
    assert not (tmp_path / run_key.REVOKED).exists()
