"""`noloco doctor`: its findings about this machine and a node's directory, and how it shows them."""

import fcntl
import importlib.metadata
import itertools
import json
import os
import resource
import shutil
import socket
import tempfile
import time
from collections import namedtuple
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import diagnosed
import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from members import Club
from served_nodes import served_nodes

from noloco_p2p.compute.factory import stage_sizes
from noloco_p2p.config import ListenSettings, NodeConfig, RunManifest, SecuritySettings
from noloco_p2p.core.messages import ITEM_BYTES
from noloco_p2p.errors import ConfigError, LocalError, Unreachable
from noloco_p2p.humanize import size_text
from noloco_p2p.io.dht import reach
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import KEY, Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.reach import Reach
from noloco_p2p.launch import run_files, run_key
from noloco_p2p.launch.settings import read
from noloco_p2p.observe.doctor import machine, peers
from noloco_p2p.observe.doctor.doctor_report import DoctorReport, in_time
from noloco_p2p.observe.doctor.examination import run_doctor
from noloco_p2p.observe.doctor.run_requirements import RunRequirements

Usage = namedtuple("Usage", ["total", "used", "free"])
MANY = 4096


def outcome(report: DoctorReport) -> list[tuple[str, str]]:
    return [(finding.severity, finding.name) for _, finding in report.findings]


def sentences(report: DoctorReport) -> str:
    return " | ".join(f"{finding.sentence} → {finding.advice}" for _, finding in report.findings)


# --- report ------------------------------------------------------------------------------------------------------


def test_the_worst_finding_sets_the_exit_code_and_groups_have_one_heading(capsys: pytest.CaptureFixture[str]) -> None:
    report = DoctorReport()
    report.group("machine")
    report.ok("python", "it is here")
    assert report.exit_code == 0
    report.warning("files", "few files", "raise it")
    assert report.exit_code == 1
    report.group("swarm")
    report.error("run", "another run", "leave it", "peer")
    report.ok("clock", "right")
    assert report.end() == 2
    assert capsys.readouterr().out.splitlines() == [
        "machine",
        "  ok       it is here",
        "  warning  few files",
        "           → raise it",
        "swarm",
        "  error    another run",
        "           → leave it",
        "  ok       right",
        "1 error, 1 warning, 2 ok",
    ]


def test_json_is_one_object_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    report = DoctorReport(as_json=True)
    report.group("swarm")
    report.error("clock", "it is wrong", "set it", "12D3")
    assert not capsys.readouterr().out
    report.figures["expected_tokens_per_s"] = 3.0
    assert report.end() == 2
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == 2
    assert found["figures"] == {"expected_tokens_per_s": 3.0}
    finding = {"severity": "error", "name": "clock", "peer": "12D3", "sentence": "it is wrong", "advice": "set it"}
    assert found["findings"] == [{"group": "swarm", **finding}]


def test_work_that_takes_too_long_is_reported_and_does_not_block_the_process() -> None:
    async def late() -> None:
        await in_time("counting sheep", 0.05, lambda: time.sleep(0.5))

    with pytest.raises(Unreachable, match=r"counting sheep took longer than 0\.05 s"):
        uvloop.run(late())

    async def failing() -> None:
        await in_time("failing", 5.0, lambda: (_ for _ in ()).throw(LocalError("no disk")))

    with pytest.raises(LocalError, match="no disk"):
        uvloop.run(failing())


# --- the machine --------------------------------------------------------------------------------------------------


def test_packages_are_compared_with_what_the_project_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    report = DoctorReport()
    machine.check_python(report)
    assert outcome(report) == [("ok", "python")]
    versions = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0" if name == "grpcio" else versions(name))
    report = DoctorReport()
    machine.check_python(report)
    assert outcome(report) == [("error", "packages")]
    assert "grpcio 1.0 is installed, <2,>=1.74 is needed" in sentences(report)
    assert "-m pip install -U 'grpcio" in report.findings[0][1].advice


def test_a_missing_package_and_an_old_python_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = (">=99", ["no_such_package_at_all>=3", 'no_such_thing; python_version < "3"'])
    monkeypatch.setattr(machine, "declared", lambda: wanted)
    report = DoctorReport()
    machine.check_python(report)
    assert outcome(report) == [("error", "python"), ("error", "packages")]
    assert "no_such_package_at_all is not installed (>=3 is needed)" in sentences(report)


def test_an_absent_device_is_an_error_and_too_many_threads_a_warning() -> None:
    report = DoctorReport()
    assert uvloop.run(machine.check_device(report, NodeConfig(device="cpu", threads=1))) == "cpu"
    assert uvloop.run(machine.check_device(report, NodeConfig(device="cpu", threads=MANY))) == "cpu"
    assert uvloop.run(machine.check_device(report, NodeConfig(device="cuda:77"))) is None
    assert outcome(report) == [("ok", "device"), ("warning", "device"), ("error", "device")]
    assert "cuda:77 not found" in sentences(report)


@pytest.mark.parametrize(
    ("soft", "hard", "severity", "sentence"),
    [
        (100, 4096, "ok", "up to 4096 open files"),  # the node raises its own limit
        (1 << 20, 1 << 20, "ok", "up to 1048576 open files"),
        (100, resource.RLIM_INFINITY, "ok", "up to 65536 open files"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", "any number of open files"),  # it said: only -1
        (100, 512, "warning", "only 512 open files"),
        (100, 100, "error", "only 100 open files"),
    ],
)
def test_the_limit_on_open_files_is_the_one_that_a_node_would_have(
    soft: int, hard: int, severity: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: limits.append(wanted))
    report = DoctorReport()
    machine.check_files(report)
    assert outcome(report) == [(severity, "files")]
    assert sentence in sentences(report)


@pytest.mark.parametrize(
    ("idle", "control", "sentence"),
    [
        ("0", "bbr", "keep their speed"),
        ("1", "bbr", "idle period; sysctl -w net.ipv4.tcp_slow_start_after_idle=0, as root"),
        (
            "1",
            "cubic",
            "period and slow down after each loss; sysctl -w net.ipv4.tcp_slow_start_after_idle=0 net.ipv4.",
        ),
        ("0", "cubic", "loss; sysctl -w net.ipv4.tcp_congestion_control=bbr, as root"),
        ("1", None, None),
    ],
)
def test_what_tcp_costs_far_peers_is_reported(
    idle: str, control: str | None, sentence: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tcp_slow_start_after_idle").write_text(f"{idle}\n", encoding="ascii")
    if control is not None:
        (tmp_path / "tcp_congestion_control").write_text(f"{control}\n", encoding="ascii")
    monkeypatch.setattr(machine, "TCP", tmp_path)
    report = DoctorReport()
    machine.check_tcp(report)
    assert outcome(report) == ([("ok", "line")] if sentence else [])
    assert (sentence or "") in sentences(report)


def test_a_clock_before_the_release_of_the_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    report = DoctorReport()
    machine.check_time(report)
    monkeypatch.setattr(time, "time", lambda: 86400.0)
    machine.check_time(report)
    assert outcome(report) == [("ok", "clock"), ("error", "clock")]
    assert "1970-01-02" in sentences(report)


def test_a_port_in_use_is_named_and_replaced_for_the_remaining_checks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        report = DoctorReport()
        left = machine.check_ports(report, ListenSettings(grpc_port=taken), own_node=False)
        assert outcome(report) == [("error", "port"), ("ok", "port")]
        assert f"listen.grpc_port: port {taken} on 127.0.0.1 is in use by another process" in sentences(report)
        assert left.grpc_port == 0
        report = DoctorReport()
        machine.check_ports(report, ListenSettings(grpc_port=taken), own_node=True)
        assert {severity for severity, _ in outcome(report)} == {"ok"}, "the running node itself uses the port"
    report = DoctorReport()
    machine.check_ports(report, ListenSettings(host="192.0.2.77"), own_node=False)
    assert {severity for severity, _ in outcome(report)} == {"error"}
    report = DoctorReport()
    left = machine.check_ports(report, ListenSettings(dht_port=taken, grpc_port=taken), own_node=False)
    assert outcome(report) == [("error", "port"), ("ok", "port")], "a node refuses a port that is given twice"
    assert "are both" in sentences(report)
    assert (left.dht_port, left.grpc_port) == (taken, 0)


# --- requirements of the run --------------------------------------------------------------------------------------


def against(report: DoctorReport) -> RunRequirements:
    """The checks against the default run."""
    return RunRequirements(report, RunManifest(), NodeConfig(), "cpu")


@pytest.mark.parametrize(
    ("free", "severity"), [(10_000_000, "ok"), (2_000_000, "warning"), (999_000, "error"), (0, "error")]
)
def test_room_for_the_checkpoints_is_checked(
    free: int, severity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))
    report = DoctorReport()
    against(report).check_disk(tmp_path / "not" / "there" / "yet", 1_000_000)
    assert outcome(report) == [(severity, "disk")]
    assert str(tmp_path) in sentences(report)
    assert not list(tmp_path.iterdir()), "the check leaves no file behind"


def test_existing_checkpoints_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 1_500_000))
    held = tmp_path / "checkpoints" / "run" / "stage-0-round-000001-0.safetensors"
    held.parent.mkdir(parents=True)
    held.write_bytes(bytes(2_600_000))
    report = DoctorReport()
    against(report).check_disk(tmp_path, 1_000_000)
    assert outcome(report) == [("ok", "disk")]


def test_a_disk_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    report = DoctorReport()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        against(report).check_disk(tmp_path, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome(report) == [("error", "disk")]
    assert "cannot write to" in sentences(report)


def test_a_stage_that_does_not_fit_is_named_with_the_memory_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from noloco_p2p.compute import factory

    report = DoctorReport()
    against(report).check_memory(None)
    assert outcome(report) == [("ok", "memory")]
    monkeypatch.setattr(factory, "free_host_bytes", lambda: 1 << 20)
    report = DoctorReport()
    against(report).check_memory(1)
    assert outcome(report) == [("error", "memory")]
    assert "stage 1 needs" in sentences(report)
    assert "use more stages or a larger machine" in sentences(report)


def test_missing_data_is_named(tmp_path: Path) -> None:
    manifest = RunManifest.model_validate({"data": {"kind": "text"}})
    local = NodeConfig(data_files=(str(tmp_path / "*.txt"),))
    report = DoctorReport()
    uvloop.run(RunRequirements(report, manifest, local, "cpu").check_data())
    assert outcome(report) == [("error", "data")]
    assert "*.txt" in sentences(report)


# --- a node's directory -------------------------------------------------------------------------------------------


def test_a_killed_node_is_a_warning_and_an_unused_directory_is_not(tmp_path: Path) -> None:
    report = DoctorReport()
    assert uvloop.run(machine.check_node_dirs(report, tmp_path / "nowhere")) == []
    assert outcome(report) == [("ok", "node")]
    (tmp_path / "identity.key.lock").touch()
    endpoints = {"peer_id": "12D3", "run_id": "ab", "pid": 1, "join": [], "metrics": "http://127.0.0.1:1/metrics"}
    (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))
    report = DoctorReport()
    assert uvloop.run(machine.check_node_dirs(report, tmp_path)) == []
    assert outcome(report) == [("warning", "node")]
    assert "is gone, and did not exit cleanly" in sentences(report)
    (tmp_path / "summary.json").write_text(json.dumps({"state": "finished"}))
    report = DoctorReport()
    uvloop.run(machine.check_node_dirs(report, tmp_path))
    assert outcome(report) == [("ok", "node")]
    assert "finished" in sentences(report)


def test_a_node_restarted_briefly_without_a_step_has_exited_cleanly(tmp_path: Path) -> None:
    """It took no step, so the summary of the earlier process stays, but it has written new endpoints."""
    (tmp_path / "identity.key.lock").touch()
    summary = tmp_path / "summary.json"
    assert run_files.store_unless_less(summary, {"state": "left", "inner_steps": 5})
    os.utime(summary, (1e9, 1e9))
    endpoints = {"peer_id": "12D3", "run_id": "ab", "pid": 1, "join": [], "metrics": "http://127.0.0.1:1/metrics"}
    (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))
    assert not run_files.store_unless_less(summary, {"state": "left", "inner_steps": 0})
    report = DoctorReport()
    uvloop.run(machine.check_node_dirs(report, tmp_path))
    assert outcome(report) == [("ok", "node")]


@pytest.mark.parametrize(
    ("days", "revoked", "found"),
    [
        (0, None, ""),
        (0, 0, "this node was revoked → to take part again, it needs another --dir and a new invitation"),
        (0, 1, "the node that admitted this one was revoked → ask for a new invitation"),
        (8, None, "this node's certificate has expired → join with a new invitation (noloco invite)"),
    ],
)
def test_a_stopped_node_that_needs_another_invitation_is_an_error(
    tmp_path: Path, days: float, revoked: int | None, found: str
) -> None:
    """The doctor found nothing wrong, and the node refused to start."""
    root, home = Ed25519PrivateKey.generate(), tmp_path / "node"
    manifest = RunManifest(security=SecuritySettings(root_key=run_key.public_half(root)))
    home.mkdir()
    club = Club(tmp_path, manifest.run_id, root, time.time() - days * 86_400)
    with closing(Identity.open(home / KEY)) as identity:
        chain = club.chain(identity.peer_id)
    own = club.trust.membership(chain)
    (home / run_files.MANIFEST).write_bytes(manifest.canonical_json())
    (home / run_key.CERTIFICATE).write_bytes(chain)
    if revoked is not None:
        (home / run_key.REVOKED).write_bytes(club.revoking(1, (own.peer_id, own.issuer)[revoked]))
    report = DoctorReport()
    assert uvloop.run(machine.check_node_dirs(report, home)) == []
    expected = [f"{home}: no node is running here → ", *([f"{home}: {found}"] if found else [])]
    assert sentences(report).split(" | ") == expected
    assert outcome(report) == [("ok", "node"), ("error", "members")][: len(expected)]
    (tmp_path / run_key.KEY).touch()  # noloco swarm gives its nodes new certificates
    report = DoctorReport()
    uvloop.run(machine.check_node_dirs(report, home))
    assert len(report.findings) == (1 if revoked is None else 2)


def test_of_several_nodes_a_healthy_one_is_asked_first(tmp_path: Path) -> None:
    swarm = dict(zip(("0-0", "0-1"), diagnosed.swarm(1, 2).values(), strict=True))
    with served_nodes(swarm) as served, ExitStack() as held:
        served.stop("0-0")
        for name in swarm:
            (tmp_path / name).mkdir()
            lock = held.enter_context((tmp_path / name / "identity.key.lock").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            endpoints = {"peer_id": name, "run_id": "ab", "pid": os.getpid(), "join": [], "metrics": served.urls[name]}
            (tmp_path / name / "endpoints.json").write_text(json.dumps(endpoints))
        report = DoctorReport()
        running = uvloop.run(machine.check_node_dirs(report, tmp_path))
    assert outcome(report) == [("error", "node"), ("ok", "node")]
    assert [one.peer_id for one in running] == ["0-1", "0-0"]


@pytest.mark.parametrize(("own", "severity"), [(True, "ok"), (False, "error")])
def test_the_owner_of_a_members_node_needs_no_invitation(tmp_path: Path, own: bool, severity: str) -> None:
    """With `--dir` the address comes from the node, so there is none that could contain an invitation."""
    manifest = RunManifest(security=SecuritySettings(root_key=run_key.make(tmp_path / "root.key")))
    report = DoctorReport()
    with closing(Identity.open(tmp_path / KEY)) as identity:
        libp2p = cast(Libp2pDaemon, SimpleNamespace(identity=identity, joined=()))
        _, answered = uvloop.run(peers.admission(report, libp2p, manifest, own_node=own))
    assert not answered
    assert outcome(report) == [(severity, "members")]


@pytest.mark.parametrize(("sets", "asks"), [((), True), (("security=open",), False), (("listen.upnp=false",), False)])
def test_the_router_of_an_open_run_is_not_asked_for_a_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], asks: bool
) -> None:
    """As the first node itself would not: an open run within one network is not opened to the internet."""
    routers: list[object] = []

    async def opened(identity: Identity, *, router: object, **others: object) -> Libp2pDaemon:
        routers.append(router)
        raise LocalError("no daemon is needed here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reach, "CONTAINER_MARKS", ())
    monkeypatch.setattr(Libp2pDaemon, "open", opened)
    run_doctor((), read(None, {}, ["listen.host=0.0.0.0", "device=cpu", *sets]), None, as_json=True)
    assert [router is not None for router in routers] == [asks]


def test_nodes_of_the_private_network_that_was_named_are_asked(tmp_path: Path) -> None:
    """Though this machine announces only 127.0.0.1, as it does without listen.host."""
    near = ["192.168.1.9", "192.168.1.4", "127.0.0.1"]
    with closing(Identity.open(tmp_path / KEY)) as identity:
        own, named = (JoinAddress(host, 4101, identity.peer_id) for host in ("127.0.0.1", near[0]))

    async def dial(target: JoinAddress) -> None:
        assert target == named

    async def reached() -> dict[str, str]:
        namespace = SimpleNamespace(joined=(), join_addresses=[str(own)], dial=dial, reach=Reach([own.host]))
        libp2p = cast(Libp2pDaemon, namespace)
        await peers.dial(DoctorReport(), libp2p, [named])
        return await libp2p.reach.addresses([*near, "169.254.1.1"])

    assert uvloop.run(reached()) == {host: host for host in near}


# --- all of it ----------------------------------------------------------------------------------------------------


def test_without_a_swarm_the_machine_is_checked_and_nothing_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    code = run_doctor((), read(None, {}, ["stages=1", "stage=3", "device=cpu"]), None, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert code == found["exit_code"] == 2
    errors = [one for one in found["findings"] if one["severity"] == "error"]
    assert [one["name"] for one in errors] == ["stage"]
    assert errors[0]["sentence"] == "stage 3 is requested, but the run has stages 0 to 0"
    groups = {group: [one["name"] for one in found["findings"] if one["group"] == group] for group in GROUPS}
    assert groups == GROUPS
    assert [path.name for path in tmp_path.rglob("*")] == ["tmp"]


GROUPS = {
    "machine": ["python", "device", "files", *(["line"] if machine.TCP.exists() else []), "clock"],
    "network": ["port", "libp2p"],
    "run": ["run", "stage", "memory", "disk", "data"],
}


def test_a_swarms_directory_says_where_its_data_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`noloco swarm --dir` continued the run, but for the doctor it had no data."""
    text, run = tmp_path / "a.txt", tmp_path / "run"
    text.write_text("some words\n" * 5_000)
    given = read(None, {}, ["stages=1", "data.kind=text", f"data_files={text}", "device=cpu"])
    (run / "0-0").mkdir(parents=True)
    run_files.store_manifest(run / "0-0", given.manifest())
    run_files.store_local_files(run / "0-0", given.node())
    for name in ("swarm.json", "0-0/identity.key.lock"):
        (run / name).touch()
    for sets, severity in (["device=cpu"], "ok"), (["device=cpu", "data_files=nowhere"], "error"):
        run_doctor((), read(None, {}, sets), run, as_json=True)
        found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
        assert found["data"]["severity"] == severity, found["data"]


@pytest.mark.parametrize("kept_bytes", [0, 1_000])
def test_the_checkpoints_of_all_nodes_must_fit_into_the_directory_of_a_swarm(
    kept_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There seemed to be room if the checkpoints of one node fitted, and those there did not count."""
    given = read(None, {}, ["stages=2", "start_replicas=4", "device=cpu", "checkpoint.keep=2"])
    for stage, replica in itertools.product(range(2), range(4)):
        home = tmp_path / f"{stage}-{replica}"
        (home / "checkpoints" / "run-peer").mkdir(parents=True)
        (home / "identity.key.lock").touch()
        (home / "checkpoints" / "run-peer" / "stage-0-round-000001-0.safetensors").write_bytes(bytes(kept_bytes))
        run_files.store_manifest(home, given.manifest())
    (tmp_path / "swarm.json").touch()
    parameters = sum(stage.parameters for stage in stage_sizes(given.manifest()))
    wanted = 3 * 4 * parameters * len(given.manifest().state_kinds) * ITEM_BYTES["float32"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, wanted - 8 * 1_000))
    run_doctor((), read(None, {}, ["device=cpu", "checkpoint.keep=2"]), tmp_path, as_json=True)
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["disk"]["severity"] == ("ok" if kept_bytes else "warning"), found["disk"]
    assert f"; 3 checkpoints of each node need {size_text(wanted)}" in found["disk"]["sentence"]


def test_a_malformed_join_address_is_refused_before_anything_starts(tmp_path: Path) -> None:
    nothing = read(None, {}, [])
    with pytest.raises(ConfigError, match="malformed join address 'nonsense'"):
        run_doctor(("nonsense",), nothing, None, as_json=False)
    with pytest.raises(ConfigError, match="is its node running"):
        run_doctor((f"@{tmp_path / 'address'}",), nothing, None, as_json=False)
