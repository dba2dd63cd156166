"""No single node matters: real processes are killed, stopped, paused, told to leave, and started again."""

import re
import signal
import time
from functools import partial
from pathlib import Path

from machine import in_time
from processes import NOLOCO, PACED, SMALL, NodeProcess, Nodes, node_processes, settings, wait_until

from noloco_p2p.io.storage.checkpoint_format import stored_checkpoints
from noloco_p2p.node.pauses import LOOK_S

ENDLESS = [*settings(steps="1000000", evaluation__every_steps="null"), *SMALL]
EACH_ROUND = settings(checkpoint__every_steps="1")
STOPPED_S = 2 * LOOK_S + 1.0
"""A node that is stopped for this many seconds notices it."""


def start(nodes: Nodes, name: str, *arguments: str) -> NodeProcess:
    """Start a node in its own directory, which may exist already."""
    return nodes.start(*arguments, command=PACED, own_dir=name)


def address_of(node: NodeProcess) -> str:
    return node.endpoints().join[0]


def two_by_two(nodes: Nodes, *more: str) -> dict[str, NodeProcess]:
    """Four nodes that train; `more` are arguments of all of them."""
    swarm = {"a": start(nodes, "a", "--stage", "0", *ENDLESS, *more)}
    for name, stage in (("b", 0), ("c", 1), ("d", 1)):
        swarm[name] = start(nodes, name, "--join", address_of(swarm["a"]), "--stage", str(stage), *more)
    for node in swarm.values():
        node.wait_for_steps(10)
    return swarm


def goes_on(node: NodeProcess, steps: int = 5) -> None:
    """Wait until it has taken `steps` more inner steps."""
    node.wait_for_steps(int(node.total("inner_steps_total")) + steps)


def logged(node: NodeProcess, text: str) -> re.Match[str]:
    """Wait for the text in the log of this process."""
    node.wait_for(lambda: re.search(text, node.logged()) is not None, text)
    found = re.search(text, node.logged())
    assert found is not None
    return found


def kill(*killed: NodeProcess) -> None:
    for node in killed:
        node.process.send_signal(signal.SIGKILL)
    for node in killed:
        node.process.wait()


def test_nodes_fail_hang_pause_and_leave_and_the_run_goes_on(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        swarm = two_by_two(nodes, *EACH_ROUND)
        a, b, c, d = swarm.values()

        kill(d)
        for node in (a, b, c):
            goes_on(node)
        # Nobody answers at the address that it gets, but it knows its run and its peers from before.
        nobody = re.sub(r"/tcp/\d+/", "/tcp/1/", address_of(a))
        d = start(nodes, "d", "--join", nobody, "--stage", "1", *EACH_ROUND)
        assert logged(d, r"weights from: (shard|peer)")
        goes_on(d)

        c.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for node in (a, b, d):
            goes_on(node, 10)
        assert in_time(time.monotonic() - began, 40), "a hung node must not hold the others up"
        wait_until(lambda: time.monotonic() - began > STOPPED_S, "the end of the stop")
        c.process.send_signal(signal.SIGCONT)
        logged(c, "stood still for")
        logged(c, "weights from: peer")
        goes_on(c)

        b.process.send_signal(signal.SIGUSR1)
        logged(b, "paused: the owner needs the device")
        held = b.total("inner_steps_total")
        goes_on(a, 10)
        assert b.total("inner_steps_total") == held
        b.process.send_signal(signal.SIGUSR2)
        logged(b, "training: the device is back")
        goes_on(b)

        c.process.send_signal(signal.SIGTERM)
        assert c.end() == 0
        assert c.summary()["state"] == "left"
        for node in (a, b, d):
            goes_on(node)
        for node in (a, b, d):
            assert node.total("dropped_total") == 0, node.logged()


def test_a_lost_stage_comes_back_from_its_guardian_and_a_dead_swarm_from_its_checkpoints(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        a = start(nodes, "a", "--stage", "0", *ENDLESS, *settings(start_replicas="1"), *EACH_ROUND)
        lonely = settings(checkpoint__every_steps="null")
        c = start(nodes, "c", "--join", address_of(a), "--stage", "1", *lonely)
        a.wait_for(lambda: a.total("guarded_round", stage="1") >= 3, "a guarded round 3 of stage 1")

        kill(c)
        logged(a, "stage 1 has had no replica")
        guarded = a.total("guarded_round", stage="1")
        c = start(nodes, "c", "--join", address_of(a), "--stage", "1", *EACH_ROUND)
        round = int(logged(c, r"outer round (\d+)\), weights from: guardian")[1])
        assert round == guarded, "these are not the newest weights that its guardian holds"
        logged(a, "stage 1 has a replica again")
        goes_on(a, 10)
        assert a.total("dropped_total") == 0, a.logged()
        c.wait_for(lambda: bool(rounds_in(tmp_path / "c")), "a checkpoint")

        kill(a, c)
        kept = min(max(rounds_in(tmp_path / name)) for name in "ac")
        a, c = start(nodes, "a"), start(nodes, "c")
        for node in (a, c):
            assert int(logged(node, r"outer round (\d+)\), weights from: shard")[1]) == kept
            goes_on(node)

        def export(out: str, *source: str) -> None:
            done = nodes.start("export", *source, "--out", out, command=NOLOCO)
            assert done.end() == 0, done.printed() + done.logged()

        export("joined", "--join", address_of(a))
        a.process.send_signal(signal.SIGTERM)
        assert a.end() == 0
        kill(c)
        export("kept", "--from", "a", "--from", "c")
        for directory in (tmp_path / "joined", tmp_path / "kept"):
            assert (directory / "config.json").is_file()
            assert list(directory.glob("*.safetensors"))


def test_a_resumed_chain_is_bitwise_equal_to_one_that_was_never_stopped(tmp_path: Path) -> None:
    """Two stages with one replica each, killed in the middle, at different moments."""
    steps = 32
    run = [
        *settings(steps=str(steps), start_replicas="1", routing="balanced", evaluation__every_steps="null"),
        *SMALL,
    ]
    local = [*EACH_ROUND, *settings(limits__max_in_flight="1", checkpoint__keep="1000")]
    with node_processes(tmp_path) as nodes:
        for name in ("whole", "stopped"):
            (tmp_path / name).mkdir()
        keys = {}

        def pair(where: str) -> tuple[NodeProcess, NodeProcess]:
            first = start(nodes, f"{where}/0", "--stage", "0", *run, *local)
            return first, start(nodes, f"{where}/1", "--join", address_of(first), "--stage", "1", *local)

        # The data of stage 0 depend on its peer id, so both runs have the same identities.
        whole = pair("whole")
        for index in range(2):
            whole[index].endpoints()
            keys[index] = (tmp_path / "whole" / str(index) / "identity.key").read_bytes()
            directory = tmp_path / "stopped" / str(index)
            directory.mkdir()
            (directory / "identity.key").write_bytes(keys[index])
            (directory / "identity.key").chmod(0o600)
        assert [node.end() for node in whole] == [0, 0]
        stopped = pair("stopped")
        for index in (1, 0):
            directory = tmp_path / "stopped" / str(index)
            wait_until(partial(reached, directory, 4), "a checkpoint of outer round 4")
            kill(stopped[index])
        stopped = pair("stopped")
        assert [node.end() for node in stopped] == [0, 0]
        assert re.search("weights from: shard", stopped[0].logged())
        for index in range(2):
            assert final(tmp_path / "stopped" / str(index)) == final(tmp_path / "whole" / str(index))


def rounds_in(directory: Path) -> list[int]:
    """The outer rounds of the checkpoints in a node's directory."""
    return [shard.manifest.round for shard in stored_checkpoints(directory)]


def reached(directory: Path, round: int) -> bool:
    return max(rounds_in(directory), default=0) >= round


def final(directory: Path) -> tuple[int, bytes]:
    """Round and bytes of the tensors of the newest checkpoint."""
    newest = max(stored_checkpoints(directory), key=lambda shard: shard.manifest.round)
    return newest.manifest.round, newest.tensors_path.read_bytes()
