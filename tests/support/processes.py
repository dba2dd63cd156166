"""Real `noloco-node` processes for tests: start them, wait for what they report, end them by their ids.

Every process works in a directory below the test's own, and so do its children: whatever is left at the end is found by
its directory, reported, and ended.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm_start
from machine import at_most

from noloco_p2p.errors import Unreachable
from noloco_p2p.launch import node_probe
from noloco_p2p.launch.fork_server_process import ForkedProcess

NODE = (sys.executable, "-m", "noloco_p2p.cli.node")
PACED = (sys.executable, str(Path(__file__).with_name("paced_node.py")))
"""A node that pauses after each inner step, for tests of things that take a while during training."""
NOLOCO = (sys.executable, str(Path(__file__).with_name("warm_noloco.py")))
"""`noloco` for `Nodes.start`; the nodes that it starts are forked as well."""
LONGEST_S = 120.0
"""Time limit for whatever a test waits for. A quiet machine needs a tenth of it."""
ENDING_S = 10.0
"""Time that the libp2p daemon of a killed node needs to exit."""
PAUSE_S = (0.02, 0.5)
"""Polling interval; at least ten times as long as one check takes."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def wait_until(holds: Callable[[], bool], what: str, seconds: float = LONGEST_S) -> None:
    """Poll until it holds. Fails the test if it does not in time."""
    began_at = looked_at = time.monotonic()
    while not holds():
        if (waited_s := time.monotonic() - began_at) > seconds:
            assert waited_s < at_most(seconds), f"not within {waited_s:.0f} s: {what}"
        time.sleep(min(max(PAUSE_S[0], 10 * (time.monotonic() - looked_at)), PAUSE_S[1]))
        looked_at = time.monotonic()


def working_below(home: Path) -> list[int]:
    """Running processes whose working directory is `home` or below it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                directory = Path(os.readlink(entry / "cwd"))
            except OSError:
                continue
            if directory.is_relative_to(home):
                found.append(int(entry.name))
    return found


@dataclass(eq=False)
class NodeProcess:
    """A node that is running, or has run."""

    process: "subprocess.Popen[bytes] | ForkedProcess"
    dir: Path
    """The node's directory: identity, endpoints.json, summary.json."""
    out: Path
    err: Path

    def printed(self) -> str:
        """Its standard output."""
        return self.out.read_text()

    def logged(self) -> str:
        """Its standard error."""
        return self.err.read_text()

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until it holds. Fails the test if the process ends before."""

        def alive_and() -> bool:
            if holds():
                return True
            assert self.process.poll() is None, f"it ended before {what}: {self.printed()}{self.logged()}"
            return False

        wait_until(alive_and, f"{what} of {self.dir}")

    def endpoints(self) -> node_probe.NodeEndpoints:
        """Wait for the file that says who it is and where it can be reached, from this process, not an earlier one."""

        def written() -> bool:
            found = node_probe.read_endpoints(self.dir)
            return found is not None and found.pid == self.process.pid

        self.wait_for(written, node_probe.ENDPOINTS)
        found = node_probe.read_endpoints(self.dir)
        assert found is not None
        return found

    def total(self, name: str, **labels: str) -> float:
        """A sum over its metrics now (see `scrape.Reading.total`); 0.0 if it serves none."""
        try:
            return node_probe.scrape(self.endpoints().metrics, 5.0).total(name, **labels)
        except Unreachable:
            return 0.0

    def wait_for_steps(self, count: int) -> None:
        """Wait until it has taken `count` inner steps."""
        self.wait_for(lambda: self.total("inner_steps_total") >= count, f"inner step {count}")

    def summary(self) -> Mapping[str, Any]:
        """The summary that it wrote at its end."""
        found = node_probe.read_json(self.dir / node_probe.SUMMARY)
        assert found is not None, f"no summary in {self.dir}"
        return found

    def end(self, seconds: float = LONGEST_S) -> int:
        """Wait for it to end. Returns the exit code."""
        try:
            wait_until(lambda: self.process.poll() is not None, f"the end of {self.dir}", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logged()}") from None
        return self.process.wait()


@dataclass
class Nodes:
    """The node processes of one test, below one directory. Made by `node_processes`."""

    home: Path
    started: list[NodeProcess] = field(default_factory=list)

    def start(
        self,
        *arguments: str,
        command: Sequence[str] = NODE,
        own_dir: str | None = None,
        cwd: Path | None = None,
        pipe_stdin: bool = False,
        fresh: bool = False,
    ) -> NodeProcess:
        """Start a node with `--dir <home>/<own_dir>`; without `own_dir` it picks a directory in `cwd` itself.

        It is forked with its imports in memory (see warm_start), or if `fresh` started in a new interpreter.
        """
        number = len(self.started)
        out, err = self.home / f"{number}.out", self.home / f"{number}.err"
        given = [*arguments] if own_dir is None else [*arguments, "--dir", str(self.home / own_dir)]
        with out.open("wb") as to_out, err.open("wb") as to_err:
            start = _fresh if fresh else _warm
            process = start([*command, *given], (to_out.fileno(), to_err.fileno()), pipe_stdin, cwd or self.home)
        self.started.append(NodeProcess(process, self.home / (own_dir or ""), out, err))
        return self.started[-1]

    def all_end_well(self) -> None:
        """Wait until all have ended with exit code 0. Fails the test at the first that does not."""

        def all_ended() -> bool:
            for node in self.started:
                assert node.process.poll() in (None, 0), node.logged()
            return all(node.process.poll() == 0 for node in self.started)

        wait_until(all_ended, "the end of all nodes")

    def nothing_left(self) -> None:
        """Fails the test unless all processes are gone, libp2p daemons included."""
        wait_until(lambda: not working_below(self.home), "the end of all that was started", ENDING_S)


def _fresh(command: list[str], output: tuple[int, int], pipe_stdin: bool, cwd: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE if pipe_stdin else subprocess.DEVNULL,
        stdout=output[0],
        stderr=output[1],
        env=os.environ | ENVIRONMENT,
        cwd=cwd,
        # A stopped process in the tests' own process group can make the system send SIGHUP to all of them.
        process_group=0,
    )


def _warm(command: list[str], output: tuple[int, int], pipe_stdin: bool, cwd: Path) -> ForkedProcess:
    process = warm_start.server().fork("noloco-test", command[1:], output, os.environ | ENVIRONMENT, cwd)
    if not pipe_stdin:
        process.stdin.close()
    return process


@contextmanager
def node_processes(home: Path) -> Iterator[Nodes]:
    """Start nodes below `home`. Afterwards neither they nor anything that they started is running any more."""
    nodes = Nodes(home)
    try:
        yield nodes
    finally:
        for node in nodes.started:
            node.process.send_signal(signal.SIGKILL)
            node.process.wait()
            if node.process.stdin is not None:
                node.process.stdin.close()
        for pid in working_below(home):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def settings(**values: str) -> list[str]:
    """`--set` options; `__` in a name stands for a dot."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


SMALL = settings(
    model__config="{hidden_size: 32, num_hidden_layers: 2, intermediate_size: 64, num_attention_heads: 2, "
    "vocab_size: 384, max_position_embeddings: 32, tie_word_embeddings: false}",
    sequence_length="32",
    microbatch_size="2",
    inner__optimizer="adamw",
    outer__rule="noloco",
    outer__inner_steps="4",
    evaluation__microbatches="2",
)
"""A model so small that starting a node takes longer than training it."""
