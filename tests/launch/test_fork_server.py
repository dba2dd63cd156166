"""A forked node is a process of its own in every respect, and neither server nor nodes outlive the launcher."""

import fcntl
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import warm_start
from processes import wait_until, working_below

from noloco_p2p.errors import LocalError
from noloco_p2p.launch import fork_server_process, node_process
from noloco_p2p.launch.fork_server import NUMBER, ForkServer
from noloco_p2p.launch.fork_server_process import ForkedProcess, ForkServerProcess
from noloco_p2p.launch.node_process import NodeProcess

TELLS = """
import json, os, random, sys, tempfile, uuid
import numpy
from pathlib import Path
print(json.dumps({
    "arguments": sys.argv[1:], "mine": os.environ.get("MINE"), "path": os.environ.get("PATH"), "cwd": os.getcwd(),
    "leads": os.getpid() == os.getpgid(0) == os.getsid(0), "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "name": Path("/proc/self/comm").read_text().strip(),
    "chance": [random.random(), numpy.random.random(), tempfile.mktemp(), str(uuid.uuid4()), os.urandom(8).hex()],
}), flush=True)
print("diagnostics", file=sys.stderr)
sys.exit(7 if sys.stdin.read() == "" else 8)
"""
STUBBORN = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
open("child.part", "w").write(str(child.pid))
os.rename("child.part", "child")
while True: time.sleep(1000)
"""
LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from warm_start import ForkOfThisProcess
server = ForkOfThisProcess()
if sys.argv[2] == "launcher at once":
    os.kill(os.getpid(), signal.SIGKILL)
server.start({})
Path("reads.py").write_text("import sys; sys.stdin.read()")
process = server.fork("reads", ("reads.py",), (1, 2), {}, Path.cwd())
if sys.argv[2] == "server":
    os.kill(server.pid, signal.SIGKILL)
    print(process.wait())
    server.close()
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def server() -> ForkServerProcess:
    """The shared fork server, which has imported what a node needs."""
    return warm_start.server()


def forked(server: ForkServerProcess, home: Path, script: str, *arguments: str, **environment: str) -> ForkedProcess:
    """A process that runs the script in `home`, with standard output and error in the files `out` and `err` there."""
    (home / "script.py").write_text(script)
    with (home / "out").open("ab") as out, (home / "err").open("ab") as err:
        program, output = [str(home / "script.py"), *arguments], (out.fileno(), err.fileno())
        return server.fork("noloco-node 0-0", program, output, {"PATH": "/bin:/usr/bin", **environment}, home)


def test_a_fork_has_its_own_session_environment_and_exit_code(server: ForkServerProcess, tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    for mine in ("one", None):
        process = forked(server, tmp_path, TELLS, "a", "b c", **({"MINE": mine} if mine else {}))
        assert process.poll() is None, "it waits for its standard input"
        process.stdin.close()
        assert process.wait() == 7
        told.append(json.loads((tmp_path / "out").read_text().splitlines()[-1]))
    for mine, each in zip(("one", None), told, strict=True):
        assert (each["arguments"], each["mine"], each["path"]) == (["a", "b c"], mine, "/bin:/usr/bin")
        assert (each["cwd"], each["leads"], each["files"]) == (str(tmp_path), True, [0, 1, 2])
        assert each["name"] == "noloco-node 0-0"
    assert not set(told[0]["chance"]) & set(told[1]["chance"]), "forks do not share random numbers"
    assert (tmp_path / "err").read_text() == "diagnostics\n" * 2


def test_a_fork_gets_signals_and_its_children_are_killed_with_it(server: ForkServerProcess, tmp_path: Path) -> None:
    process = forked(server, tmp_path, STUBBORN)
    wait_until((tmp_path / "child").exists, "its child")
    process.send_signal(signal.SIGTERM)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: b"sleep" in b"".join(map(command_of, working_below(tmp_path))), "its child alone")
    process.kill_group()  # its id cannot have been reused, because it has not been waited for
    assert process.wait() == -signal.SIGKILL
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: not working_below(tmp_path), "the end of both")
    wait_until(lambda: not Path(f"/proc/{process.pid}").exists(), "nothing of it is left")


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_node_that_does_not_end_is_killed_with_its_children(
    server: ForkServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node_process, "PROGRAM", (str(tmp_path / "stubborn.py"),))
    monkeypatch.setattr(node_process, "KILL_AFTER_S", 0.2)
    node = NodeProcess(tmp_path / "run", 0, 0)
    node.start(server, [])
    wait_until((tmp_path / "child").exists, "its child")
    node_process.end_all([node])
    assert node.exit_code == -signal.SIGKILL
    wait_until(lambda: not working_below(tmp_path), "the end of both")


@pytest.mark.parametrize("dies", ["server", "launcher", "launcher at once"])
def test_nothing_is_left_when_the_server_or_the_launcher_is_killed(
    server: ForkServerProcess, tmp_path: Path, dies: str
) -> None:
    launcher = forked(server, tmp_path, LAUNCHER, str(Path(warm_start.__file__).parent), dies)
    assert launcher.wait() == (0 if dies == "server" else -signal.SIGKILL), (tmp_path / "err").read_text()
    wait_until(lambda: not working_below(tmp_path), "the end of server and node")
    assert (tmp_path / "err").read_text() == ""
    assert (tmp_path / "out").read_text() == ("-9\n" if dies == "server" else "")


@pytest.mark.parametrize("dies", ["server", "node"])
def test_a_node_killed_with_the_server_is_not_taken_for_one_that_was_killed_itself(tmp_path: Path, dies: str) -> None:
    """After the end of the fork server, noloco swarm said `node 0-0 was killed by signal 9`."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen("cat", stdin=subprocess.PIPE, start_new_session=True) as child, theirs:
        assert child.stdin is not None
        theirs.sendall(NUMBER.pack(child.pid))
        node = NodeProcess(tmp_path, 0, 0)
        node._process = ForkedProcess(ours, child.stdin)
        assert node.running
        if dies == "node":
            theirs.sendall(NUMBER.pack(-signal.SIGKILL))
        theirs.close()
        assert node.exit_code == -signal.SIGKILL
        why = " by signal 9" if dies == "node" else ", because the fork server of all nodes has ended"
        assert node.ending == f"was killed{why}"


def test_a_failing_import_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "uvloop.py").write_text("raise ImportError('uvloop is broken')")
    broken = ForkServerProcess()
    broken.start({**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})
    try:
        with pytest.raises(LocalError, match="has ended with exit code 1"):
            wait_until(lambda: broken.ready, "its end")
        with pytest.raises(LocalError, match="node 0-0 cannot be started"):
            NodeProcess(tmp_path, 0, 0).start(broken, [])
    finally:
        broken.close()
    assert "uvloop is broken" in capfd.readouterr().err


def test_a_server_with_threads_refuses_to_fork() -> None:
    resting = threading.Event()
    thread = threading.Thread(target=resting.wait)
    thread.start()
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs, pytest.raises(SystemExit, match=r"while a thread runs \(.+\): "):
            ForkServer(theirs).serve()
    finally:
        resting.set()
        thread.join()


def test_a_launcher_may_have_more_open_files_than_select_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With about 500 nodes, a launcher had no file left for the next one; with a higher limit, it met a bug."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= before[1] < 2048:
        pytest.skip("the system allows no more files than select knows")
    ours, theirs = socket.socketpair()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    monkeypatch.setattr(fork_server_process, "PROGRAM", ("-c", ""))
    server = ForkServerProcess()
    try:
        server.start({})
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2048
        with theirs, ours, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1500)) as far:
            theirs.sendall(NUMBER.pack(4711))
            process = ForkedProcess(far, io.BytesIO())
            assert (process.pid, process.poll()) == (4711, None)
            theirs.sendall(NUMBER.pack(7))
            assert process.poll() == 7
    finally:
        server.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_system_that_cannot_fork_safely_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(LocalError, match=r"start each with noloco-node$"):
        ForkServerProcess().start({})
