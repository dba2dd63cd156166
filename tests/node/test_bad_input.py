"""Bad input is answered with one line that names it and exit code 2; nothing is started and nothing is left behind."""

import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import in_time
from processes import SMALL, NodeProcess, node_processes, settings

from noloco_p2p.cli.exits import run_app
from noloco_p2p.cli.node import app
from noloco_p2p.config import RunManifest
from noloco_p2p.errors import LocalError
from noloco_p2p.io.dht.identity import KEY, Identity, peer_id_of
from noloco_p2p.io.dht.libp2p import Libp2pDaemon

SOMEBODY = peer_id_of(bytes(range(32)))
HASH = "0123456789abcdef" * 4
HANGING_NODE = str(Path(__file__).parents[1] / "support" / "hanging_node.py")
LIMITED_NODE = str(Path(__file__).parents[1] / "support" / "limited_node.py")


class Refused:
    """Runs `noloco-node` in this process, in its own directory. Returns the lines on stderr; expects exit code 2."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.home, self._monkeypatch, self._capfd = home, monkeypatch, capfd

    def __call__(self, *arguments: str) -> list[str]:
        self._monkeypatch.setattr(sys, "argv", ["noloco-node", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_app(app, "noloco-node")
        output = self._capfd.readouterr()
        assert ended.value.code == 2, output.err
        assert output.out == "", "no join command is printed"
        return output.err.splitlines()

    def one_line(self, *arguments: str) -> str:
        (line,) = self(*arguments)
        assert line.startswith("error: ")
        return line


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Refused]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    interval = sys.getswitchinterval()
    with node_processes(tmp_path) as nodes:
        yield Refused(tmp_path, monkeypatch, capfd)
        nodes.nothing_left()
    sys.setswitchinterval(interval)


def test_all_mistyped_keys_are_named_at_once_with_file_line_and_nearest_key(refused: Refused) -> None:
    (refused.home / "run.yaml").write_text("stagess: 3\nouter:\n  inner_stepz: 3\nsteps: many\n")
    assert refused("--config", "run.yaml", "--set", "sede=4", "--set", "seed") == [
        "error: --set seed: write it as --set key=value",
        "run.yaml:1: there is no key stagess; the nearest is stages",
        "run.yaml:3: there is no key outer.inner_stepz; the nearest is outer.inner_steps",
        "--set sede: there is no key sede; the nearest is seed",
        "run.yaml:4: steps must be a whole number, not 'many'",
    ]


BAD_RUNS = {
    "no such file": (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read: No such file or directory"),
    "no number": (["--stage", "first"], "'--stage': Input should be a valid integer"),
    "unstable": (["--set", "outer.gamma=2"], "gamma 2 drives pairs apart"),
    "another run": (["--run", HASH], f"--run {HASH}: the manifest hashes to {RunManifest().run_id}"),
    "no such stage": (["--stage", "2"], "stage 2: the run has stages 0 to 1"),
    "more stages than layers": (settings(stages="5"), "stages is 5, but the model has only 4 layers"),
    "dropout": (settings(model__config__attention_dropout="0.1"), "attention_dropout is 0.1; dropout must be 0"),
    "tied": (settings(model__config__tie_word_embeddings="true"), "tie_word_embeddings is true"),
    "family": (settings(model__family="lama"), "no causal language model 'lama' (did you mean 'llama'?)"),
    "not splittable": (settings(model__family="nanochat"), "the family nanochat cannot be split over 2 stages"),
    "no files": (settings(data__kind="text", data_files="[nothing/*.txt]"), "no data file matches nothing/*.txt"),
    "no data": (settings(data__kind="text"), "needs data_files"),
    "vocabulary": (settings(model__config__vocab_size="300"), "384 ids, the model's vocab_size is 300"),
    "no tokenizer": (settings(data__tokenizer="mine", tokenizer_dir="none"), "there is no directory none"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_a_run_that_cannot_be_is_refused_before_anybody_can_join(
    case: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Libp2pDaemon, "open", None)
    arguments, message = BAD_RUNS[case]
    assert message in refused.one_line(*arguments)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:4000", "it is not of the form /ip4/HOST/tcp/PORT/p2p/PEER_ID"),
        (f"/ip4/127.0.0.1/tcp/4000/p2p/{SOMEBODY[:-3]}", "its peer id is mistyped or cut off"),
        (f"/ip4/127.0.0.1/tcp/70000/p2p/{SOMEBODY}", "there is no port 70000"),
    ],
)
def test_a_malformed_address_is_refused_and_named(address: str, message: str, refused: Refused) -> None:
    line = refused.one_line("--join", address)
    assert f"malformed join address '{address}': {message}; copy the address that a running node prints" in line


def test_a_dead_address_and_a_silent_one_each_get_their_line_within_ten_seconds(refused: Refused) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{SOMEBODY}"
        dead = refused.one_line("--join", address)
        assert f"join address {address}: nobody answers (connection refused)" in dead
        silent.listen()
        began_at = time.monotonic()
        mute = refused.one_line("--join", address)
        assert in_time(time.monotonic() - began_at, 10)
    assert f"join address {address}: nobody answers (an answer did not arrive within 5 s)" in mute


@pytest.mark.parametrize("port", ["dht_port", "metrics_port"])
def test_a_port_in_use_is_named(port: str, refused: Refused) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        line = refused.one_line("--set", f"listen.{port}={number}", *SMALL)
    assert f"port {number}" in line
    assert "in use" in line
    assert f"listen.{port}" in line


def test_processes_that_join_wrongly_end_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        first = nodes.start(*SMALL, own_dir="first")
        address = first.endpoints().join[0]
        run_id, peer_id = first.endpoints().run_id, first.endpoints().peer_id
        taken = first.endpoints().metrics.rpartition(":")[2].partition("/")[0]
        (tmp_path / "mine.yaml").write_text("seed: 7\nsteps: 1000\nlimits:\n  drain_s: 3\n")
        wrong = {
            f"join address {address.replace(peer_id, SOMEBODY)}: another peer answers there ({peer_id})": nodes.start(
                "--join", address.replace(peer_id, SOMEBODY)
            ),
            f"--run {HASH}: the manifest hashes to {run_id}": nodes.start("--join", address, "--run", HASH),
            "mine.yaml:1: seed is 7 here, 0 in the swarm: leave it out": nodes.start(
                "--join", address, "--config", "mine.yaml"
            ),
            "stage 2: the run has stages 0 to 1": nodes.start("--join", address, "--stage", "2"),
            f"port {taken} on 127.0.0.1 is in use by another process": nodes.start(
                "--join", address, *settings(listen__grpc_port=taken)
            ),
        }
        for message, node in wrong.items():
            assert one_line_of(node).startswith(f"error: {message}")
        assert first.process.poll() is None, "the swarm is not affected"
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 0
        nodes.nothing_left()


def one_line_of(node: NodeProcess) -> str:
    """The message of a refused process."""
    assert node.end() == 2, node.logged()
    (line,) = node.logged().splitlines()
    assert node.printed() == ""
    return line


def test_a_full_disk_ends_a_node_with_one_line(tmp_path: Path) -> None:
    alone = [*SMALL, *settings(stages="1", start_replicas="1", steps="8")]
    with node_processes(tmp_path) as nodes:

        def limited(own_dir: str, bytes_a_file: int, *more: str) -> NodeProcess:
            Identity.open(tmp_path / own_dir / KEY).close()
            command = (sys.executable, LIMITED_NODE, str(bytes_a_file))
            return nodes.start(*alone, *more, command=command, own_dir=own_dir)

        run = limited("a", 100)
        summary = limited("b", 1_000, *settings(checkpoint__every_steps="null"))
        audit = limited("c", 600_000, *settings(audit__dir=str(tmp_path / "audit")))
        checkpoint = limited("d", 30_000)
        assert [node.end() for node in nodes.started] == [2, 2, 2, 2]
        nodes.nothing_left()
    assert not any("Traceback" in node.logged() for node in nodes.started)
    last = {node: node.logged().splitlines()[-1] for node in nodes.started}
    assert f"{run.dir}/manifest.json cannot be written: File too large" in last[run]
    assert f"{summary.dir}/summary.json cannot be written: File too large" in last[summary]
    assert f"the audit cannot write {tmp_path}/audit/round-000001-" in last[audit]
    assert "free some space or set another audit.dir" in last[audit]
    assert audit.summary()["inner_steps"] == 4, "finished work is reported all the same"
    assert last[checkpoint].startswith("error: no checkpoint of outer round 2: ")
    assert checkpoint.summary()["state"] == "finished"


def test_a_node_whose_device_hangs_ends_with_one_line(tmp_path: Path) -> None:
    """A process whose device thread never returns can still end."""
    hangs = settings(stages="1", start_replicas="1")
    with node_processes(tmp_path) as nodes:
        node = nodes.start(*SMALL, *hangs, command=(sys.executable, HANGING_NODE), own_dir="hung")
        assert node.end() == 2, node.logged()
        nodes.nothing_left()
    last = node.logged().splitlines()[-1]
    assert last.startswith("error: the device has not completed its work for"), node.logged()
    assert node.summary()["inner_steps"] == 2, "finished work is reported all the same"


def test_an_identity_or_a_summary_that_does_not_fit_on_the_disk_is_a_local_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(LocalError, match=r"identity .*File too large"):
            Identity.open(tmp_path / KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
