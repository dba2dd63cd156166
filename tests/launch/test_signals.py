"""Signals: `noloco pause` and `noloco resume` reach the right process and no other, and the first signal that ends a
node makes it leave cleanly."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.launch import node_probe
from noloco_p2p.launch.signal_handler import SignalHandler
from noloco_p2p.node.loop import Node
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Telemetry

NODE = """
import os, signal, sys
from pathlib import Path
from noloco_p2p.io.dht.identity import KEY, Identity
def say(line):
    os.write(1, line.encode() + b"\\n")  # unlike print, also while another line is being written
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda n, _: say(signal.Signals(n).name))
identity = Identity.open(Path(sys.argv[1]) / KEY)
say("ready")
while True:
    signal.pause()
"""
"""Stands in for a node: holds its identity and reports signals."""


@contextmanager
def running(node_dir: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", NODE, str(node_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert heard(process) == "ready"
        introduce(node_dir, process.pid)
        yield process
    finally:
        process.kill()
        process.communicate()


def heard(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def introduce(node_dir: Path, pid: int) -> None:
    endpoints = {"peer_id": "P", "run_id": "r", "pid": pid, "join": [], "metrics": ""}
    (node_dir / "endpoints.json").write_text(json.dumps(endpoints))


def noloco(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "noloco_p2p.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_node_gets_the_signal(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        paused = noloco("pause", "--dir", str(tmp_path))
        assert (paused.returncode, heard(process)) == (0, "SIGUSR1")
        assert paused.stdout == f"asked to pause: {tmp_path} (process {process.pid})\n"
        resumed = noloco("resume", "--dir", str(tmp_path))
        assert (resumed.returncode, heard(process)) == (0, "SIGUSR2")
        assert resumed.stdout == f"asked to resume: {tmp_path} (process {process.pid})\n"


def test_all_nodes_of_a_swarm_get_the_signal(tmp_path: Path) -> None:
    (tmp_path / "0-1.log").write_text("")
    with running(tmp_path / "0-0") as first, running(tmp_path / "1-0") as second:
        assert len(node_probe.send_signal(tmp_path, node_probe.PAUSE)) == 2
        assert (heard(first), heard(second)) == ("SIGUSR1", "SIGUSR1")


def test_without_a_node_the_command_fails_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for directory, endpoints in ((tmp_path / "nowhere", "there is no directory"), (tmp_path, "no node is running in")):
        done = noloco("pause", "--dir", str(directory))
        assert done.returncode == 2
        assert endpoints in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_process_that_reuses_a_nodes_id_gets_no_signal(tmp_path: Path) -> None:
    """A killed node's process id may belong to another program now, and SIGUSR1 would end most programs."""
    with running(tmp_path):
        pass
    somebody = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        introduce(tmp_path, somebody.pid)
        with pytest.raises(ConfigError, match="no node is running in"):
            node_probe.send_signal(tmp_path, node_probe.PAUSE)
        with running(tmp_path):  # the node was restarted, and has not written its endpoints yet
            introduce(tmp_path, somebody.pid)
            with pytest.raises(ConfigError, match="no node is running in"):
                node_probe.send_signal(tmp_path, node_probe.PAUSE)
        assert somebody.poll() is None
    finally:
        somebody.communicate(b"\n")
    assert somebody.returncode == 0


@pytest.mark.parametrize("written", [{}, {"peer_id": "P"}, {"pid": "1", "join": 1, "metrics": None}])
def test_an_incomplete_endpoints_file_is_ignored(tmp_path: Path, written: dict[str, object]) -> None:
    (tmp_path / "endpoints.json").write_text(json.dumps(written))
    assert node_probe.read_endpoints(tmp_path) is None


def test_a_signal_that_the_system_refuses_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    with running(tmp_path) as process:
        monkeypatch.setattr(os, "kill", refuse)
        with pytest.raises(LocalError, match=rf"process {process.pid}\): Operation not permitted"):
            node_probe.send_signal(tmp_path, signal.SIGUSR1)
        monkeypatch.undo()


def signals_of_a_node() -> SignalHandler:
    """The signal handling of a training node; `drain` is the real one."""
    telemetry = cast(Telemetry, SimpleNamespace(event=lambda kind, **fields: None))
    advert = Advert("me", "run", 1, ("127.0.0.1:1",), state="training")
    state = NodeState(advert, RunManifest(), NodeConfig(), telemetry)
    signals = SignalHandler(watch_stdin=False)
    node: Node = cast(Node, SimpleNamespace(state=state, drain=lambda: Node.drain(node)))
    signals.node = node
    return signals


@pytest.mark.usefixtures("minds_signals")
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_makes_a_node_leave_and_the_second_stops_it_at_once(number: int, moves: bool) -> None:
    told: list[bool] = []

    async def main() -> None:
        signals = signals_of_a_node()
        assert signals.node is not None
        state = signals.node.state
        if moves:
            state.drain("moving to stage 0", next_stage=0)
        os.kill(os.getpid(), number)
        told.append(await state.waits.until(lambda: state.leaving, "signal", "me", 60.0))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60.0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert told == [True]


@pytest.mark.usefixtures("minds_signals")
def test_a_node_whose_run_has_ended_is_stopped_at_once_by_the_second_signal_too() -> None:
    """Withdrawing its advert and closing its connections may take many seconds. Every signal was ignored meanwhile."""

    async def main() -> None:
        signals = signals_of_a_node()
        assert signals.node is not None
        state = signals.node.state
        for event in ("end", "drain", "leave"):
            state.enter(event)
        os.kill(os.getpid(), signal.SIGINT)
        assert await state.waits.until(lambda: state.leaving, "signal", "me", 1.0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(1.0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


@pytest.mark.usefixtures("minds_signals")
def test_repeated_hangups_count_as_one_signal_and_a_hangup_under_nohup_as_none() -> None:
    async def hung_up() -> bool:
        signals, heard = signals_of_a_node(), asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGALRM, heard.set)
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGALRM):
            os.kill(os.getpid(), number)
        await heard.wait()
        assert signals.node is not None
        return signals.node.state.leaving

    assert asyncio.run(hung_up())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert not asyncio.run(hung_up())


IMPORTING = """
import signal, sys, threading
from noloco_p2p.cli.node import main
from noloco_p2p.launch import bootstrap
def importing(manifest):
    sys.modules["torch"] = None
    signal.raise_signal(signal.SIGINT)
    threading.Event().wait()
bootstrap.check_model = importing
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def test_an_interrupt_does_not_wait_until_torch_is_imported(tmp_path: Path) -> None:
    """A node took up to five seconds until it was "stopped at once"."""
    command = [sys.executable, "-c", IMPORTING, "--dir", "node", "--config", "tiny"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].endswith("stopped at once")


STARTING = """
import signal
from noloco_p2p.cli.node import main
from noloco_p2p.errors import ConfigError
from noloco_p2p.launch import foreseen
def check(*_, **__):
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    raise ConfigError("still here")
foreseen.check_node = check
main()
"""


def test_a_node_that_has_just_been_started_survives_the_signals_to_pause_and_resume() -> None:
    """In its first second they ended it."""
    command = [sys.executable, "-c", STARTING, "--config", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, "error: still here\n")
