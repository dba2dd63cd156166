"""Bytes from a peer or a file never cause anything but the one-line error of whoever reads them."""

import atexit
import json
import re
import shutil
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from checkpointed import make_replica, save, small_run
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from damage import NESTED, damaged
from hypothesis import example, given
from hypothesis import strategies as st
from members import Club

from noloco_p2p.config import ListenSettings, RunManifest
from noloco_p2p.errors import ConfigError, NolocoError
from noloco_p2p.io.dht.addresses import JoinAddress, KnownPeers
from noloco_p2p.io.dht.identity import peer_id_of
from noloco_p2p.io.security import admission, certificates
from noloco_p2p.io.security.invitations import Invitation, UseBook
from noloco_p2p.io.security.revocations import DenyList, Revocations
from noloco_p2p.io.storage import checkpoint_format
from noloco_p2p.io.storage.checkpoint_format import manifest_digest
from noloco_p2p.launch import export, homes, join_file, node_probe, run_files, run_key, settings, swarm_plan
from noloco_p2p.launch.settings import Overrides
from noloco_p2p.observe import health_check

HOME = Path(tempfile.mkdtemp(prefix="noloco-test-"))
atexit.register(shutil.rmtree, HOME)  # every worker imports this file, but only one runs its tests
CLUB = Club(HOME, is_open=True)
"""Of an open run, because everybody has the key of its root, and so can sign anything."""
PEER = peer_id_of(bytes(range(32)))
INVITATION = Invitation.signed(CLUB.root, CLUB.run_id, uses=3, until=CLUB.now + 9, stage=1)


@contextmanager
def one_line() -> Iterator[None]:
    """Allows nothing but an error of the package, in one line; mistakes in settings take one each."""
    said = ""
    try:
        yield
    except NolocoError as error:
        said = str(error)
        assert said
    lines = said.split("\n")
    assert len(lines) == 1 or all(re.match(r"\S+(:\d+)?: ", line) for line in lines)
    assert all(line.isprintable() and len(line) < 1000 for line in lines), said


# --- from peers -------------------------------------------------------------------------------------------------------


@example(NESTED)
@given(damaged(CLUB.revoking(7, PEER, peer_id_of(bytes(32)))))
def test_a_list_of_revoked_peers(data: bytes) -> None:
    with one_line():
        DenyList.read(data, CLUB.trust)


@example(NESTED.decode())
@given(damaged(INVITATION.text.encode()).map(lambda data: data.decode(errors="replace")) | st.text(max_size=200))
def test_an_invitation(text: str) -> None:
    with one_line():
        Invitation.parse(text).check(CLUB.trust, CLUB.now)


@example(NESTED)
@given(damaged(b'{"role": "member", "invitation": "%s"}' % INVITATION.text.encode()))
def test_a_request_for_a_certificate(data: bytes) -> None:
    with one_line():
        admission._parsed(data)


@example(NESTED)
@given(damaged(CLUB.chain(PEER)))
def test_certificates(chain: bytes) -> None:
    with one_line():
        certificates.read(chain)
    with one_line():
        CLUB.trust.membership(chain)


def signed_anew(cert: bytes, key: Ed25519PrivateKey, change: Callable[[bytes], bytes]) -> bytes:
    """A certificate (PEM) whose content is changed, but which is signed by the right key."""

    def coded(kind: int, content: bytes) -> bytes:
        size = len(content)
        length = bytes([size]) if size < 128 else b"\x82" + size.to_bytes(2, "big")
        return bytes([kind]) + length + content

    content = change(x509.load_pem_x509_certificate(cert).tbs_certificate_bytes)
    ed25519 = bytes.fromhex("300506032b6570")
    whole = coded(0x30, content + ed25519 + coded(0x03, b"\x00" + key.sign(content)))
    return ssl.DER_cert_to_PEM_cert(whole).encode()


@example(0, [(8, b"\x01")])
@example(1, [(8, b"\x01")])
@given(st.sampled_from([0, 1]), st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=5)), max_size=3))
def test_certificates_that_are_signed_by_the_right_key(which: int, patches: list[tuple[int, bytes]]) -> None:
    """Anybody can sign as the root of an open run, and an issuer whatever it likes."""

    def change(content: bytes) -> bytes:
        for at, put in patches:
            content = content[:at] + put + content[at + len(put) :]
        return content[: len(x509.load_pem_x509_certificate(certs[which]).tbs_certificate_bytes)]

    certs = [one.public_bytes(Encoding.PEM) for one in x509.load_pem_x509_certificates(CLUB.chain(PEER))]
    certs[which] = signed_anew(certs[which], [CLUB.door, CLUB.root][which], change)
    with one_line():
        CLUB.trust.membership(b"".join(certs))
    with one_line():
        certificates.read(b"".join(certs))


@given(st.text(max_size=90) | st.from_regex(r"/(ip4|ip6|dns4)/[^/]{0,30}/tcp/\d{1,6}/p2p/\w{0,60}(/invite/\w{0,40})?"))
def test_a_join_address(text: str) -> None:
    with one_line():
        JoinAddress.parse(text)


@example(NESTED)
@given(damaged(RunManifest().canonical_json()))
def test_the_manifest_of_a_run(data: bytes) -> None:
    with one_line():
        settings.manifest_from_json(data)


# --- files ------------------------------------------------------------------------------------------------------------

ADDRESS = f"/ip4/127.0.0.1/tcp/4101/p2p/{PEER}"


def readers() -> dict[str, tuple[bytes, Callable[[Path], object]]]:
    """By file: a valid content, and who reads it."""
    run, key = RunManifest(), HOME / "made.key"
    run_key.make(key)
    files = {"tokenizer_dir": "/a/b", "data_files": ["/c/*.txt"]}
    endpoints = {"peer_id": PEER, "run_id": run.run_id, "pid": 1, "join": [ADDRESS], "metrics": "http://a:1/metrics"}
    endpoints |= {"health": "http://a:1/health", "grpc": "127.0.0.1:5"}
    manifest = json.loads(run.canonical_json())
    book = {INVITATION.number.hex(): [9, [PEER]]}

    def root(path: Path) -> object:
        path.chmod(0o600)
        return run_key.read(path)

    def ends(path: Path) -> object:
        (path.parent / node_probe.KEY_LOCK).touch()
        node_probe.running(path.parent)
        run_files.same_ports(path.parent, ListenSettings())
        with patch.object(health_check, "_answer", lambda at: at):
            found: tuple[object, object] = health_check.ask(path.parent, None)
        if found[0] is False:
            raise ConfigError(str(found[1]))
        return found

    def summary(path: Path) -> object:
        homes.refuse_finished("", path.parent)
        run_files.store_unless_less(path, {"completed": True})
        return run_files.run_summary([path], "x")

    def local(path: Path) -> object:
        found = run_files.local_files([path.parent])
        return None if found.tokenizer_dir is None else Path(found.tokenizer_dir), [
            Path(one) for one in found.data_files
        ]

    def swarm(path: Path) -> object:
        return swarm_plan.make_plan(Overrides(()), path.parent)

    def record(path: Path) -> object:
        return export.read_record(path.parent), export.recorded_data(path.parent)

    return {
        "invitations.json": (json.dumps(book).encode(), UseBook),
        "revoked": (CLUB.revoking(7, PEER), lambda path: Revocations(CLUB.trust, path)),
        "root.key": (key.read_bytes(), root),
        "known-peers.json": (json.dumps([ADDRESS]).encode(), KnownPeers),
        "join-address": (f"{ADDRESS}\n".encode(), join_file.read),
        "swarm.json": (json.dumps(manifest | {"data_files": []}).encode(), swarm),
        "manifest.json": (run.canonical_json(), lambda path: run_files.stored_manifest(path.parent)),
        "local.json": (json.dumps(files).encode(), local),
        "endpoints.json": (json.dumps(endpoints).encode(), ends),
        "summary.json": (b'{"completed": false, "inner_steps": 4}', summary),
        export.RECORD: (json.dumps({"manifest": manifest, "replicas": 0, "data_files": []}).encode(), record),
        "run.yaml": (b"stages: 2\ninner:\n  eps: 1e-8\n", lambda path: settings.read(path, {}, ()).manifest()),
    }


READERS = readers()


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_file(name: str) -> None:
    valid, read = READERS[name]

    @example(NESTED)
    @example(valid)
    @given(damaged(valid))
    def holds(data: bytes) -> None:
        with tempfile.TemporaryDirectory(dir=HOME) as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            with one_line():
                read(path)

    holds()
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        (Path(folder) / name).write_bytes(valid)
        read(Path(folder) / name)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """The manifest of a small checkpoint."""
    run = small_run(stages=1)
    save(run, HOME / "saved", make_replica(run, 0, "peer"), "peer", 3)
    (manifest,) = (HOME / "saved").rglob("stage-*.json")
    return manifest


def test_the_manifest_of_a_checkpoint(checkpoint: Path) -> None:
    """With the right digest, which is no secret, and without."""
    valid = json.loads(checkpoint.read_bytes())
    del valid["digest"], valid["random_state"]
    short = json.dumps(valid | {"random_state": [3, [1], None], "tensors": valid["tensors"][:2]}).encode()

    @example(data=NESTED, digest=False)
    @given(data=damaged(short), digest=st.booleans())
    def holds(data: bytes, digest: bool) -> None:
        with suppress(ValueError, RecursionError, TypeError):
            found = json.loads(data)
            data = json.dumps(found | {"digest": manifest_digest(found)}).encode() if digest else data
        with tempfile.TemporaryDirectory(dir=HOME) as folder:
            (Path(folder) / "checkpoints" / "a-b").mkdir(parents=True)
            path = Path(folder) / "checkpoints" / "a-b" / checkpoint.name
            path.write_bytes(data)
            shutil.copy(checkpoint.with_suffix(".safetensors"), path.with_suffix(".safetensors"))
            with one_line():
                checkpoint_format.read_manifest(path)
            for stored in checkpoint_format.stored_checkpoints(Path(folder)):
                with one_line():
                    checkpoint_format.read_checkpoint(stored)
                with one_line():
                    swarm_plan.common_point([stored.holding])

    holds()


def test_the_tensors_of_a_checkpoint(checkpoint: Path) -> None:
    [stored] = checkpoint_format.stored_checkpoints(HOME / "saved")
    valid = stored.tensors_path.read_bytes()[:3000]

    @given(damaged(valid))
    def holds(data: bytes) -> None:
        with tempfile.TemporaryDirectory(dir=HOME) as folder:
            path = Path(folder) / checkpoint.name
            path.with_suffix(".safetensors").write_bytes(data)
            with one_line():
                checkpoint_format.read_checkpoint(replace(stored, path=path))

    holds()


@pytest.mark.parametrize(("dtype", "size"), [("BF16", 2), ("F8_E5M2", 1)])
def test_tensors_of_a_type_that_numpy_lacks(dtype: str, size: int, checkpoint: Path) -> None:
    [stored] = checkpoint_format.stored_checkpoints(HOME / "saved")
    path, whole = HOME / checkpoint.name, stored.tensors_path.read_bytes()
    head_bytes = int.from_bytes(whole[:8], "little")
    head = json.loads(whole[8 : 8 + head_bytes])
    for tensor in head.values():
        begin, end = tensor["data_offsets"]
        tensor |= {"dtype": dtype, "shape": [(end - begin) // size]}
    changed = json.dumps(head).encode()
    path.with_suffix(".safetensors").write_bytes(len(changed).to_bytes(8, "little") + changed + whole[8 + head_bytes :])
    with one_line():
        checkpoint_format.read_checkpoint(replace(stored, path=path))


@pytest.mark.parametrize("port", ["²", "9" * 5000, "0", "65536", "-1", ""])
def test_an_earlier_port_that_is_none(port: str, tmp_path: Path) -> None:
    (tmp_path / node_probe.ENDPOINTS).write_text(json.dumps({"grpc": f"127.0.0.1:{port}"}))
    assert run_files.same_ports(tmp_path, ListenSettings(grpc_port=0)) == ListenSettings(grpc_port=0)


@pytest.mark.parametrize("host", ["a" * 70 + ".org", "a..b", "é" * 70, "a b"])
def test_a_host_that_cannot_be_looked_up(host: str) -> None:
    well, said = health_check.ask(None, f"http://{host}:80")
    assert not well
    assert said.startswith("no node answers at http://")
    assert said.isprintable()


@example(NESTED)
@given(damaged(x509.load_pem_x509_certificates(CLUB.chain(PEER))[0].public_bytes(Encoding.PEM)))
def test_a_leaf(certificate: bytes) -> None:
    certificates.is_signed_by(PEER, certificate)
