"""A members-only run with real processes: invited nodes train, others are refused, and observers may watch."""

import asyncio
import errno
import json
import os
import re
import shlex
import signal
import sys
import threading
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import NOLOCO, PACED, SMALL, NodeProcess, Nodes, node_processes, settings

from noloco_p2p.cli.admit import invite_others, new_key, revoke_peers
from noloco_p2p.config import RunManifest, SecuritySettings
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io import durable_files
from noloco_p2p.io.dht import reach
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.dht.identity import KEY, Identity, peer_id_of
from noloco_p2p.io.security import certificates
from noloco_p2p.io.security.invitations import Invitation
from noloco_p2p.io.security.revocations import DenyList, Revocations
from noloco_p2p.launch import node_probe, run_files, run_key
from noloco_p2p.launch.bootstrap import NodeOptions
from noloco_p2p.launch.export import read_record
from noloco_p2p.launch.settings import read as read_settings
from noloco_p2p.observe import top

HOUR_S = 3600.0
SUPPORT = Path(__file__).parents[1] / "support"
WITH_CLOCK, OF_BEFORE, OF_OTHER_PROTOCOL = (
    (sys.executable, str(SUPPORT / f"{name}.py"))
    for name in ("node_with_clock", "node_of_before", "node_of_other_protocol")
)
ENDLESS = settings(steps="100000", start_replicas="1")


@pytest.fixture(autouse=True)
def _no_node_writes_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_key, "SETTLED_S", 0.0)


def said(nodes: Nodes, *words: str, code: int = 0) -> str:
    """The output of a command, including errors."""
    asked = nodes.start(*words, command=NOLOCO)
    assert asked.end() == code, asked.printed() + asked.logged()
    return asked.printed() + asked.logged()


def refused(node: NodeProcess) -> str:
    """The one line with which a node fails."""
    assert node.end() == 2, node.logged()
    [line] = [line for line in node.logged().splitlines() if line.startswith("error: ")]
    return line


def test_members_train_and_refused_nodes_learn_what_to_do(tmp_path: Path) -> None:
    """An invited newcomer pastes the printed command, and sees its first microbatches trained."""
    with node_processes(tmp_path) as nodes:
        key = tmp_path / "root.key"
        assert str(key) in said(nodes, "key", "new", str(key))
        assert key.stat().st_mode & 0o777 == 0o600
        first = nodes.start(*SMALL, *ENDLESS, "--key", str(key), "--stage", "0", command=PACED, own_dir="first")
        address = first.endpoints().join[0]
        printed = said(nodes, "invite", "--dir", str(first.dir), "--uses", "1", "--for", "2h", "--stage", "1")
        words = shlex.split(printed)
        assert words[:2] == ["noloco-node", "--join"]
        assert len(words) == 3
        assert words[2].startswith(f"{address}/invite/")
        [shown] = re.findall("^join +noloco-node --join (\\S+)$", first.printed(), re.MULTILINE)
        assert shown.startswith(f"{address}/invite/"), "the address alone admits newcomers"
        assert "/invite/" not in (first.dir / "endpoints.json").read_text()
        invited = nodes.start(*words[1:], command=PACED, own_dir="invited")
        first.wait_for_steps(2)
        assert invited.total("microbatches_total", result="done") > 0
        endpoints = invited.endpoints()
        assert json.loads((first.dir / "invitations.json").read_bytes()).popitem()[1][1] == [endpoints.peer_id]

        assert "no node was joined with an invitation" in refused(nodes.start("--join", address, own_dir="stranger"))
        assert "used up (1 of 1)" in refused(nodes.start("--join", words[2], own_dir="late"))
        expired = run_key.invite(first.dir, key, uses=1, seconds=-1.0, stage=None)
        assert "expired" in refused(nodes.start("--join", expired, own_dir="later"))
        (clock := tmp_path / "clock").write_text("120")
        off = nodes.start(str(clock), *words[1:], command=WITH_CLOCK, own_dir="tomorrow")
        assert re.search(r"clock is 1[12]\d\.\d s ahead of that of the joined peer.*: set the clock", refused(off))
        earlier = refused(nodes.start(*words[1:], command=OF_BEFORE, own_dir="before"))
        assert earlier.endswith(
            "(of_a_later_version Extra inputs are not permitted): does the peer run another version?"
        )
        other = refused(nodes.start(*words[1:], command=OF_OTHER_PROTOCOL, own_dir="other"))
        assert other.endswith("it is still starting, or runs another version of noloco: use equal versions")

        found = json.loads(said(nodes, "top", "--join", words[2], "--json"))
        assert {node["peer"] for node in found["nodes"]} == {first.endpoints().peer_id, endpoints.peer_id}
        report = said(nodes, "doctor", "--join", words[2], code=1)
        assert "2 of 2 nodes can be reached over gRPC" in report
        assert "reaches this machine at" in report
        said(nodes, "export", "--join", words[2], "--out", str(tmp_path / "model"))
        assert (tmp_path / "model" / "noloco.json").exists()
        assert "no node was joined with an invitation" in said(
            nodes, "export", "--join", address, "--out", str(tmp_path / "no-model"), code=2
        )

        read = top.from_url(endpoints.metrics)
        assert all(report.status is not None for report in asyncio.run(read()))
        invited.process.send_signal(signal.SIGKILL)
        invited.process.wait()
        seen = {report.peer: report.status is not None for report in asyncio.run(read())}
        assert seen == {endpoints.peer_id: False, first.endpoints().peer_id: True}, "top switches to another node"
        again = nodes.start("--join", address, command=PACED, own_dir="invited")
        again.wait_for_steps(1)
        assert again.endpoints().peer_id == endpoints.peer_id, "its certificate is valid for days"
        for home in (first.dir, again.dir):
            refusal = said(nodes, "revoke", first.endpoints().peer_id, "--dir", str(home), code=2)
            assert f"is the node of {home} or has admitted it" in refusal, "all would be expelled, and for good"
            assert not (home / "revoked").exists()
        printed = said(nodes, "revoke", endpoints.peer_id, "--dir", str(first.dir))
        assert "1 revoked in total" in printed
        assert "this node was revoked: to take part again, it needs another --dir" in refused(again)
        assert "was revoked" in refused(nodes.start("--join", words[2], own_dir="invited"))


def test_a_swarm_of_members_trains_to_its_end(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        small = [*SMALL, *settings(steps="8", start_replicas="1")]
        said(nodes, "swarm", "--members", "--plain", "--no-sample", "--dir", str(tmp_path / "swarm"), *small)
        nodes.nothing_left()
    home = tmp_path / "swarm"
    root = run_key.public_half(run_key.read(home / "root.key"))
    assert json.loads((home / "swarm.json").read_bytes())["security"]["root_key"] == root
    assert json.loads((home / "summary.json").read_bytes())["completed"] is True
    assert (home / "0-0" / "issuer.pem").exists()
    assert (home / "1-0" / "certificate.pem").exists()
    assert not (home / "1-0" / "issuer.pem").exists()
    files = [path for path in home.rglob("*") if path.is_file()]
    telling = {path.name: path.stat().st_mode & 0o077 for path in files if b"/invite/" in path.read_bytes()}
    assert telling == {"0-0.log": 0, "join-address": 0}, "others on this machine could join"


def options_of(
    home: Path, *sets: str, config: Path | None = None, key: Path | None = None, join: tuple[str, ...] = ()
) -> NodeOptions:
    identity = Identity.open(home / KEY)
    identity.close()
    given = read_settings(config, {}, sets)
    return NodeOptions(join, None, identity, False, given, key=key).with_key()


@pytest.mark.parametrize("contained", [False, True])
@pytest.mark.parametrize(("sets", "kept"), [
    ((), "never"),
    (("listen.host=127.0.0.9",), "never"),
    (("listen.host=localhost",), "never"),
    (("listen.host=0.0.0.0",), "outside of containers"),
    (("listen.host=10.1.2.3",), "outside of containers"),
    (("listen.host=0.0.0.0", "listen.announce_host=10.1.2.3"), "outside of containers"),
    (("listen.host=0.0.0.0", "listen.announce_host=8.8.8.8"), "always"),
    (("listen.host=0.0.0.0", "listen.announce_host=run.example"), "always"),
    (("listen.host=8.8.8.8",), "always"),
    (("listen.host=8.8.8.8", "security=open"), "never"),
])  # fmt: skip
def test_a_reachable_first_node_makes_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], kept: str, contained: bool
) -> None:
    monkeypatch.setattr(reach, "CONTAINER_MARKS", (str(tmp_path),) if contained else ())
    made = options_of(tmp_path, *sets)
    wanted = kept == "always" or (kept == "outside of containers" and not contained)
    assert (made.key is not None) is wanted is (tmp_path / "root.key").exists()
    manifest = made.overrides.manifest()
    assert (manifest.security.root_key is not None) is wanted
    assert options_of(tmp_path, *sets, join=("@somebody",)).key is None, "a joining node makes no key"
    run_files.store_manifest(tmp_path, manifest)
    again = options_of(tmp_path, *sets)
    assert (again.key, again.overrides.manifest()) == (made.key, manifest), "a run keeps its key"
    assert again.overrides.names_the_run is False


@pytest.mark.parametrize(("sets", "is_open"), [
    ((), False),
    (("security.root_key=null",), False),
    (("security=open",), True),
    (("security=open", "security.root_key=null"), False),
])  # fmt: skip
def test_only_security_open_opens_a_run_that_others_can_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], is_open: bool
) -> None:
    """configs/tiny.yaml writes out every default, a root key of null among them."""
    monkeypatch.setattr(reach, "CONTAINER_MARKS", ())
    made = options_of(tmp_path, "listen.host=0.0.0.0", *sets, config=Path("tiny"))
    assert (made.key is None) is is_open
    read_settings(Path("tiny"), {}, []).check_agrees(made.overrides.manifest())


def test_a_named_key_is_created_if_it_does_not_exist(tmp_path: Path) -> None:
    made = options_of(tmp_path, key=tmp_path / "mine.key")
    assert made.overrides.manifest().security.root_key == run_key.public_half(run_key.read(tmp_path / "mine.key"))
    with pytest.raises(ConfigError, match="cannot be read"):
        options_of(tmp_path, key=tmp_path / "another.key", join=("@somebody",))


def test_a_members_only_run_needs_its_key(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        root = settings(security__root_key="ab" * 32)
        assert "with the run's key (--key FILE) needs none" in refused(nodes.start(*SMALL, *root, own_dir="first"))


def test_of_two_keys_made_at_once_the_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second replaced the first, whose node had begun a run with it: nobody could admit anybody to that run."""
    path, made, make_folders = tmp_path / "root.key", list[str](), durable_files.make_folders

    def another_is_first(folder: Path) -> None:
        monkeypatch.setattr(run_key, "make_folders", make_folders)
        made.append(run_key.make(path))

    monkeypatch.setattr(run_key, "make_folders", another_is_first)
    with pytest.raises(LocalError, match=r"root\.key cannot be written: File exists$"):
        run_key.make(path)
    assert [run_key.public_half(run_key.read(path))] == made


def test_a_key_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LocalError, match="No space left on device"):
        run_key.make(tmp_path / "root.key")
    assert not [*tmp_path.iterdir()]


def test_a_key_is_created_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "root.key"
    assert re.fullmatch("[0-9a-f]{64}", run_key.make(path))
    assert run_key.public_half(run_key.read(path)) == run_key.public_half(run_key.read(path))
    with pytest.raises(ConfigError, match="already exists"):
        run_key.make(path)
    for no_file in (Path("-"), tmp_path):
        with pytest.raises(ConfigError, match=f"^{no_file} is not a regular file: name another one$"):
            run_key.make(no_file)
    for readable in (0o640, 0o604):
        path.chmod(readable)
        with pytest.raises(ConfigError, match="chmod 600"):
            run_key.read(path)
    path.chmod(0o600)
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        run_key.read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        run_key.read(tmp_path / "absent")


def test_a_key_of_an_unknown_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    """Found by the test of damaged files: `cryptography` has an error of its own for it."""
    unknown = b"MC4CAQAwBQYD+/U/BCI++++////////////////////////////AAAAAAAAAAAAA"
    (tmp_path / "root.key").write_bytes(b"-----BEGIN PRIVATE KEY-----\n" + unknown + b"\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match=r"root\.key cannot be read: it was not written by noloco key new$"):
        run_key.read(tmp_path / "root.key")


def test_commands_that_are_printed_can_be_pasted_whatever_the_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_key(tmp_path / "my key")
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[-2:] == ["--key", str(tmp_path / "my key")]
    given: Any = object()
    words = shlex.split(run_key.Standing(given, given, given, given).how_to_join(Path("my node"), []))
    assert words[-2:] == ["--dir", "my node"]
    home = tmp_path / "my run"
    home.mkdir()
    (home / "swarm.json").touch()
    with pytest.raises(ConfigError) as error:
        read_record(home)
    assert f"noloco export --from '{home}' --out DIR" in str(error.value)


def test_an_invitation_needs_a_node_that_admits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no node has run"):
        run_key.invite(tmp_path, None, uses=1, seconds=HOUR_S, stage=None)
    manifest = RunManifest(security=SecuritySettings(root_key=run_key.make(tmp_path / "my.key")))
    (tmp_path / "node").mkdir()
    run_files.store_manifest(tmp_path / "node", manifest)
    (tmp_path / "node" / run_key.ISSUER).touch()
    reached = {"peer_id": "a", "run_id": "b", "pid": 1, "metrics": "", "join": ["/ip4/192.168.0.2/tcp/1/p2p/a"]}
    for said, why in (
        (reached | {"join": []}, "no node has run"),
        (reached | {"dialled": False}, "others cannot dial"),
    ):
        run_files.write_json(tmp_path / "node" / "endpoints.json", said)
        with pytest.raises(ConfigError, match=why):
            run_key.invite(tmp_path / "node", None, uses=1, seconds=HOUR_S, stage=None)
    with pytest.raises(ConfigError, match=r"the run's key is not at \S+root.key or .*: name it with --key"):
        run_key.revoke(tmp_path / "node", None, ["peer"])


def test_an_invitation_names_a_stage_that_its_form_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = run_key.make(tmp_path / "root.key")
    run = SimpleNamespace(run_id="ab" * 32, stages=300, security=SimpleNamespace(root_key=public))
    monkeypatch.setattr(run_key, "_members_run", lambda _: (tmp_path, run, None))
    monkeypatch.setattr(node_probe, "read_endpoints", lambda _: SimpleNamespace(join=["address"], dialled=True))
    (tmp_path / "issuer.pem").touch()
    text = run_key.invite(tmp_path, None, uses=1, seconds=HOUR_S, stage=254).removeprefix("address/invite/")
    assert Invitation.parse(text).stage == 254
    for stage in (255, 299):
        with pytest.raises(ConfigError, match=f"stage {stage}: an invitation to this run can name stages 0 to 254"):
            run_key.invite(tmp_path, None, uses=1, seconds=HOUR_S, stage=stage)


def test_two_commands_at_once_revoke_the_peers_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read the same list, and the later one to write replaced what the other had added."""
    run = RunManifest(security=SecuritySettings(root_key=run_key.make(tmp_path / "root.key")))
    run_files.store_manifest(tmp_path, run)
    first, second = peer_id_of(bytes(32)), peer_id_of(bytes([1] * 32))
    other = threading.Thread(target=run_key.revoke, args=(tmp_path, None, [second]))
    root = run_key._root

    def meanwhile(*given: Any) -> Any:
        if threading.current_thread() is not other:
            other.start()
            other.join(0.5)  # it ends only if it does not wait for its turn
        return root(*given)

    monkeypatch.setattr(run_key, "_root", meanwhile)
    run_key.revoke(tmp_path, None, [first])
    other.join()
    trust = run_key.trust_in(run)
    assert trust is not None
    assert set(Revocations(trust, tmp_path / "revoked").held.peers) == {first, second}


def test_a_list_that_the_node_replaces_at_the_same_time_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node had read the file before the command wrote to it, and then wrote the list that it got from another."""
    run = RunManifest(security=SecuritySettings(root_key=run_key.make(tmp_path / "root.key")))
    run_files.store_manifest(tmp_path, run)
    first, second = peer_id_of(bytes(32)), peer_id_of(bytes([1] * 32))
    root = run_key.read(tmp_path / "root.key")
    theirs = [DenyList.make(root, run.run_id, 1, [first]).signed]

    def meanwhile(seconds: float) -> None:
        if theirs:
            (tmp_path / "revoked").write_bytes(theirs.pop())

    monkeypatch.setattr(run_key, "sleep", meanwhile)
    made = run_key.revoke(tmp_path, None, [second])
    meanwhile(0.0)  # if the command has not waited
    trust = run_key.trust_in(run)
    assert trust is not None
    assert Revocations(trust, tmp_path / "revoked").held == made
    assert made.peers == (first, second)


@pytest.mark.parametrize("expelled", ["the node", "its issuer"])
def test_the_directory_of_an_expelled_node_can_neither_invite_nor_revoke(expelled: str, tmp_path: Path) -> None:
    """Its invitation led to a node that ends as it starts, and nobody ever read the list of revoked peers there."""
    run = RunManifest(security=SecuritySettings(root_key=run_key.make(tmp_path / "root.key")))
    root, trust = run_key.read(tmp_path / "root.key"), run_key.trust_in(run)
    assert trust is not None
    node, door = (Identity.open(tmp_path / name / KEY) for name in ("node", "door"))
    home = tmp_path / "node"
    run_files.store_manifest(home, run)
    certificate = certificates.issuer_certificate(root, trust, door.peer_id, dht_time())
    chain = certificates.member_chain(certificate, door.key, trust, node.peer_id, "member", dht_time())
    (home / run_key.CERTIFICATE).write_bytes(chain)
    gone = node if expelled == "the node" else door
    (home / run_key.REVOKED).write_bytes(DenyList.make(root, run.run_id, 1, [gone.peer_id]).signed)
    for ask in (
        lambda: run_key.invite(home, None, uses=1, seconds=HOUR_S, stage=None),
        lambda: run_key.revoke(home, None, [peer_id_of(bytes(32))]),
    ):
        with pytest.raises(ConfigError, match=r"the node of .* was revoked"):
            ask()
    for identity in (node, door):
        identity.close()


@pytest.mark.parametrize("running", [True, False])
def test_who_revokes_learns_whether_anybody_is_told(
    running: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command said that the node tells the others even if it did not run, so that the peers stayed."""
    run = RunManifest(security=SecuritySettings(root_key=run_key.make(tmp_path / "root.key")))
    run_files.store_manifest(tmp_path, run)
    identity = Identity.open(tmp_path / KEY)
    if not running:
        identity.close()
    revoke_peers([peer_id_of(bytes(32))], tmp_path)
    identity.close()
    said = capsys.readouterr().out
    assert said.startswith("1 revoked in total")
    assert ("tells the others\n" in said, "start the node" in said) == (running, not running)


@pytest.mark.parametrize("running", [True, False])
def test_who_invites_learns_that_nobody_is_there_to_join(
    running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command printed the address of a node that had ended without a word."""
    monkeypatch.setattr(run_key, "invite", lambda *_, **__: "ADDRESS")
    with closing(Identity.open(tmp_path / KEY)) if running else nullcontext():
        invite_others(tmp_path)
    said = capsys.readouterr()
    assert said.out == "noloco-node --join ADDRESS\n"
    assert said.err == ("" if running else f"the node in {tmp_path} is not running: start it before others join\n")


def test_the_directory_of_a_swarm_means_its_first_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunManifest(security=SecuritySettings(root_key=run_key.make(tmp_path / "root.key")))
    (tmp_path / "swarm.json").touch()
    with pytest.raises(ConfigError, match="no node has run"):
        run_key.revoke(tmp_path, None, ["peer"])
    peers = []
    for name in ("0-1", "0-0"):
        identity = Identity.open(tmp_path / name / KEY)
        identity.close()
        peers.append(identity.peer_id)
        run_files.store_manifest(tmp_path / name, run)
    made = run_key.revoke(tmp_path, None, peers[:1])
    assert (tmp_path / "0-0" / "revoked").read_bytes() == made.signed
    with monkeypatch.context() as inside:
        inside.chdir(tmp_path / "0-0")
        assert run_key.revoke(Path(), None, peers[:1]).peers == made.peers, "the key is above this directory too"
    with pytest.raises(ConfigError, match=r"no node has run in \S+/0-0: "):
        run_key.invite(tmp_path, None, uses=1, seconds=HOUR_S, stage=None)
