"""A swarm started by hand, one terminal per node: the printed join command, leaving, dying, being left behind."""

import shlex
import shutil
import signal
import time
from pathlib import Path

from processes import PACED, SMALL, NodeProcess, Nodes, node_processes, settings, wait_until

from noloco_p2p.io.dht.identity import peer_id_of
from noloco_p2p.launch import node_probe
from noloco_p2p.observe.health_check import ask

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
TERMINALS = "terminals"
LOCAL = settings(limits__drain_s="60", directory__ttl_s="8")
"""A leaving node may take long; a killed one is soon forgotten."""


def join_command(node: NodeProcess) -> list[str]:
    """The command line that a node prints for the others, as a shell would split it."""
    (line,) = [line for line in node.printed().splitlines() if line.startswith("join ")]
    words = shlex.split(line.removeprefix("join "))
    assert words[0] == "noloco-node"
    return words[1:]


def say_join_command(node: NodeProcess) -> list[str]:
    node.wait_for(lambda: "join " in node.printed() and node.printed().endswith("\n"), "join command")
    return join_command(node)


def test_a_printed_command_pasted_into_three_terminals_at_once_makes_the_swarm(tmp_path: Path) -> None:
    terminals = tmp_path / TERMINALS
    terminals.mkdir()
    few = settings(steps="6", evaluation__microbatches="2")
    address = tmp_path / "address"
    address.write_text(f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id_of(bytes(32))}\n")
    with node_processes(tmp_path) as nodes:
        by_file = nodes.start("--join", f"@{address}", cwd=terminals)
        by_file.wait_for(
            lambda: "reading the file again" in by_file.logged(), "word that the address of before is dead"
        )
        first = nodes.start("--config", str(TINY), *few, "--address-file", str(address), cwd=terminals)
        pasted = say_join_command(first)
        assert pasted[0] == "--join"
        assert len(pasted) == 2, "the command names nothing but the address"
        for fresh in (True, False):
            nodes.start(*pasted, cwd=terminals, fresh=fresh)
        nodes.all_end_well()
        nodes.nothing_left()
    assert address.read_text() == f"{pasted[1]}\n"
    homes = sorted((terminals / "noloco-runs").iterdir())
    assert [home.name for home in homes] == ["node-1", "node-2", "node-3", "node-4"]
    summaries = [NodeProcess(first.process, home, first.out, first.err).summary() for home in homes]
    assert by_file.logged().count("nobody answers") == 1, "logged once"
    assert sorted(str(one["stage"]) for one in summaries) == ["0", "0", "1", "1"]
    assert len({one["peer_id"] for one in summaries}) == 4
    assert {one["state"] for one in summaries} == {"finished"}
    assert all(1 <= one["outer_rounds"] <= 6 for one in summaries), "one may outlast the step after it"
    losses = [one["validation_loss"] for one in summaries if one["stage"] == 0]
    assert len(losses) == 2
    assert all(isinstance(loss, float) and 0 < loss < 6.1 for loss in losses)


def start_swarm(nodes: Nodes, counts: tuple[int, ...], *more: str) -> list[list[NodeProcess]]:
    """Start the nodes of each stage, that of stage 0 first. Returns when the swarm trains."""
    made: list[list[NodeProcess]] = [[] for _ in counts]
    made[0].append(nodes.start(*SMALL, *LOCAL, *more, "--stage", "0", command=PACED, own_dir="0-0"))
    address = made[0][0].endpoints().join[0]
    for stage, count in enumerate(counts):
        for replica in range(len(made[stage]), count):
            made[stage].append(
                nodes.start(
                    "--join",
                    address,
                    "--stage",
                    str(stage),
                    "--watch-stdin",
                    *LOCAL,
                    command=PACED,
                    own_dir=f"{stage}-{replica}",
                    pipe_stdin=True,
                )
            )
    for node in nodes.started:
        node.wait_for_steps(1)
    return made


def test_one_node_leaves_one_is_killed_and_the_others_finish(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        (stays, leaves), (serves, dies) = start_swarm(nodes, (2, 2), *settings(steps="80"))
        assert [ask(node.dir, None, tmp_path) for node in nodes.started] == [(True, "ok")] * 4
        # One is killed first, early in the run: leaving takes a while, in which a fast swarm could finish.
        dies.process.send_signal(signal.SIGKILL)
        dies.process.wait()
        leaves.process.send_signal(signal.SIGTERM)
        assert leaves.end(30) == 0
        assert leaves.logged().splitlines()[-1].endswith("left: leave")
        assert leaves.summary()["state"] == "left"
        assert ask(dies.dir, None, tmp_path)[1].startswith("no node answers at http://127.0.0.1:")
        assert stays.end() == 0, stays.logged()
        assert serves.end() == 0, serves.logged()
        nodes.nothing_left()
        summary = stays.summary()
        assert summary["state"] == serves.summary()["state"] == "finished"
        assert summary["outer_rounds"] == 20
        assert summary["rerouted"] > 0, "the killed replica's microbatches went to the other one"


def test_a_copy_of_a_running_nodes_directory_is_refused(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        (first,), (other,) = start_swarm(nodes, (1, 1), *settings(steps="100000", start_replicas="1"))
        shutil.copytree(other.dir, tmp_path / "copy")
        copy = nodes.start("--join", first.endpoints().join[0], *LOCAL, own_dir="copy")
        assert copy.end() == 2
        at = (node_probe.read_json(other.dir / node_probe.ENDPOINTS) or {})["grpc"]
        said = f"another process takes part at {at}, with this identity: remove identity.key here, or stop that process"
        assert copy.logged() == f"error: {said}\n"
        taken = other.total("inner_steps_total")
        other.wait_for_steps(int(taken) + 2)
        # The advert of a killed process does not keep a restart away.
        other.process.send_signal(signal.SIGKILL)
        other.process.wait()
        nodes.start("--join", first.endpoints().join[0], *LOCAL, own_dir="copy").wait_for_steps(1)


def test_unequal_stages_train_and_a_second_signal_or_closed_input_stops_a_node_at_once(tmp_path: Path) -> None:
    endless = settings(steps="100000", start_replicas="1")
    with node_processes(tmp_path) as nodes:
        (first,), (one, other) = start_swarm(nodes, (1, 2), *endless)
        assert other.process.stdin is not None
        other.process.stdin.close()
        assert other.end(10) == 0
        assert "the launcher is gone" in other.logged()
        one.process.send_signal(signal.SIGSTOP)
        first.process.send_signal(signal.SIGTERM)
        first.wait_for(lambda: "draining: told to leave" in first.logged(), "drain")
        time.sleep(0.5)
        assert first.process.poll() is None, "it waits for the gradients of its microbatches"
        first.process.send_signal(signal.SIGTERM)
        assert first.end(10) == 0
        one.process.send_signal(signal.SIGCONT)
        one.process.send_signal(signal.SIGTERM)
        assert one.end(10) == 0
        nodes.nothing_left()


def test_two_nodes_in_one_directory_do_not_share_an_identity(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        first = nodes.start(*SMALL, own_dir="mine")
        wait_until(lambda: (tmp_path / "mine" / "identity.key").exists(), "the identity")
        second = nodes.start(*SMALL, own_dir="mine")
        assert second.end() == 2
        assert "in use by another process" in second.logged()
        first.process.send_signal(signal.SIGKILL)
