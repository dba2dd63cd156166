"""The churn bench: its figures are right, and it leaves no process behind."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from processes import SMALL, wait_until, working_below
from typer.testing import CliRunner
from warm_start import SharedServer

from noloco_p2p.cli.main import app
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.lab.bench import churn, churn_figures, churn_schedule, churn_watch, node_fleet
from noloco_p2p.lab.bench.churn_figures import WeightsSource, loss_ratio, rounds_lost
from noloco_p2p.lab.bench.node_fleet import Fleet, FleetNode, InnerStepLine, parsed
from noloco_p2p.lab.sample_stats import quantile
from noloco_p2p.launch import node_process
from noloco_p2p.launch.node_probe import MetricsReading
from noloco_p2p.launch.node_process import NodeProcess
from noloco_p2p.launch.progress_line import ProgressLine
from noloco_p2p.observe.report.journals import read_processes


def lines(*steps: tuple[float, int, Sequence[str]]) -> list[InnerStepLine]:
    return [InnerStepLine("P", at, inner, inner - 1, 10 * len(ids), tuple(ids)) for at, inner, ids in steps]


BEGINNING = WeightsSource(0.0, "start")


def test_a_correct_life_has_no_duplicates() -> None:
    assert churn_figures.duplicates(lines((1, 1, "ab"), (2, 2, "cd")), [BEGINNING]) == 0


@pytest.mark.parametrize("again", [(2, 2, "cb"), (2, 2, "cc")])
def test_an_id_counted_twice_is_found(again: tuple[float, int, str]) -> None:
    assert churn_figures.duplicates(lines((1, 1, "ab"), again), [BEGINNING]) == 1


def test_ids_that_are_not_in_the_checkpoint_may_be_counted_again() -> None:
    before = [(1, 1, "ab"), (2, 2, "cd"), (3, 3, "ef")]
    lives = [BEGINNING, WeightsSource(10.0, "shard")]
    assert churn_figures.duplicates(lines(*before, (11, 2, "cf"), (12, 3, "eg")), lives) == 0, (
        "it resumed from inner step 1"
    )
    assert churn_figures.duplicates(lines(*before, (11, 3, "ce")), lives) == 1, "c is in the checkpoint, e is not"
    assert churn_figures.duplicates(lines(*before, (11, 4, "ce")), lives) == 2


def test_weights_of_another_replica_contain_none_of_this_nodes_ids() -> None:
    for source in ("peer", "guardian", "fresh"):
        lives = [BEGINNING, WeightsSource(10.0, source)]
        assert churn_figures.duplicates(lines((1, 1, "ab"), (11, 2, "ab"), (12, 3, "cd")), lives) == 0
        assert churn_figures.duplicates(lines((1, 1, "ab"), (11, 2, "ab"), (12, 3, "bd")), lives) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--nodes", "3x1"], "--nodes 3x1"),
        (["--nodes", "1x3", "--kill-last"], "--nodes 1x3 --kill-last"),
        (["--seed", str(2**63 - 1), "--seeds", "2"], "--set seed"),
        (["--set", "stages=4"], "--set stages"),
    ],
)
def test_what_would_be_known_to_fail_minutes_later_is_refused_at_once(
    options: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(churn, "run", lambda plan: {})
    result = CliRunner().invoke(app, ["bench", "churn", *options])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(named)
    assert not result.output, "nothing is promised before"


def test_stalls_are_counted_from_the_disturbance() -> None:
    trained = [0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 20.0, 21.0]
    assert churn_figures.stalls(trained, [2.5], 21.0) == [12.0], "the longest stall, whenever it began"
    assert churn_figures.stalls(trained, [2.5, 7.5], 21.0) == [3.5, 12.0]
    assert churn_figures.stalls(trained, [2.5, 7.5, 15.0], 21.0) == [3.5, 12.0, 5.0]
    assert churn_figures.stalls(trained, [20.5], 30.0) == [9.0], "the stall lasts until the end if no step follows"
    assert churn_figures.stalls([], [], 3.0) == []


def test_the_last_training_node_of_a_stage_is_spared() -> None:
    rng = Random(7)
    training = {0: ["0-0", "0-1", "0-2"], 1: ["1-0"], 2: ["2-0", "2-1"]}
    drawn = {churn_schedule.victim(rng, training) for _ in range(200)}
    assert drawn == {"0-0", "0-1", "0-2", "2-0", "2-1"}
    assert churn_schedule.victim(rng, {0: ["0-0"], 1: []}) is None
    assert [churn_schedule.victim(Random(3), training) for _ in range(2)] == [
        churn_schedule.victim(Random(3), training)
    ] * 2


def test_losses_are_compared_at_equal_tokens() -> None:
    curve = [(100.0, 4.0), (200.0, 3.0), (400.0, 2.0)]
    assert [churn_figures.at_tokens(curve, tokens) for tokens in (50, 100, 150, 300, 500)] == [4.0, 4.0, 3.5, 2.5, 2.0]
    assert churn_figures.at_tokens([], 5) is None
    calm = {"curve": curve[:2], "tokens": 400, "validation_loss": 2.0}
    churned = {"tokens": 300, "validation_loss": 2.55}
    assert loss_ratio(churned, calm) == {"equal_tokens": pytest.approx(1.02), "equal_steps": pytest.approx(1.275)}
    assert loss_ratio({"tokens": 0, "validation_loss": None}, calm) == {"equal_tokens": None, "equal_steps": None}


def test_quantiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.95)) == (50.0, 95.0)
    assert (quantile([3.0], 0.95), quantile([], 0.5)) == (3.0, None)


def test_a_truncated_line_is_left_out() -> None:
    whole = {
        "inner_step": 3,
        "step": 2,
        "at": 5.5,
        "microbatches": [{"id": "a", "tokens": 7}, {"id": "b", "tokens": 8}],
    }
    assert parsed("P", json.dumps(whole)) == InnerStepLine("P", 5.5, 3, 2, 15, ("a", "b"))
    assert parsed("P", json.dumps(whole)[:-9]) is None


def test_the_shape_is_written_as_stages_by_replicas() -> None:
    assert churn.shape_of("3x2") == (3, 2)
    for wrong in ("3", "x3", "0x2", "2x-1", "3x3x3", "²x2", "9" * 5_000 + "x3"):
        with pytest.raises(ConfigError, match="STAGESxREPLICAS"):
            churn.shape_of(wrong)


def log(node: FleetNode, *events: tuple[float, str, dict[str, object]]) -> None:
    node.dir.mkdir()
    lines = [{"time": at, "up_s": at, "event": kind, **fields} for at, kind, fields in events]
    (node.dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_loss_that_is_not_finite_is_no_point_of_the_curve(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, (1, 1))
    log(fleet.of_stage(0)[0], (1.0, "evaluation", {"loss": None}), (2.0, "evaluation", {"loss": 4.5}))
    assert churn_figures._curve(fleet, lines((1, 1, "ab"), (2, 2, "c"))) == [(30.0, 4.5)]


def test_rounds_lost_by_a_dead_stage_are_counted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, (2, 2))
    dead, back = fleet.of_stage(1)
    log(dead, (1.0, "outer_round", {"round": 6}), (9.0, "outer_round", {"round": 8}))
    log(back, (2.0, "outer_round", {"round": 7}))
    back.set_aside()
    log(back, (6.0, "resumed", {"round": 6, "source": "guardian"}), (8.0, "resumed", {"round": 7, "source": "peer"}))
    expected = {"stage": 1, "before": 7, "after": 6, "source": "guardian", "lost": 1}
    assert rounds_lost(fleet, 1, 5.0) == expected
    assert rounds_lost(fleet, 1, 8.5)["after"] is None


def test_a_stage_is_killed_completely_only_when_a_guardian_has_a_newer_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, guarded, dead = [1000.0], [3.0], list[str]()
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(NodeProcess, "running", property(lambda node: node.name not in dead))
    monkeypatch.setattr(NodeProcess, "kill", lambda node: dead.append(node.name))
    monkeypatch.setattr(FleetNode, "set_aside", lambda node: None)

    def metrics(node: NodeProcess) -> MetricsReading:
        return MetricsReading(now[0], (("noloco_guarded_round", {"stage": str(1 - node.stage)}, guarded[0]),))

    monkeypatch.setattr(NodeProcess, "read_metrics", metrics)
    fleet = Fleet(tmp_path, (2, 3))
    for node in fleet.nodes.values():
        node.trains = True
    schedule = churn_schedule.kill_stages(fleet, Random(1), 10.0)

    def after(seconds: float) -> list[churn_schedule.Disturbance]:
        done: list[churn_schedule.Disturbance] = []
        for _ in range(round(seconds * 10)):
            now[0] += 0.1
            done += filter(None, [next(schedule)])
        return done

    assert after(9.5) == []
    (first,) = after(1.0)
    stage = int(first.nodes[0][0])
    assert (first.kind, first.nodes, first.emptied) == ("kill", (f"{stage}-2",), None), (
        "with two replicas left the stage has guardians"
    )
    assert after(20.0) == [], "no guardian has a newer round than the dead node may have had"
    guarded[0] = 4.0
    later = after(30.0)
    assert [name for one in later for name in one.nodes] == [f"{stage}-0", f"{stage}-1"]
    assert [one.emptied for one in later] in ([stage], [None, stage])
    assert all(fleet.nodes[name].restart_at is not None for name in dead)
    assert len(dead) == 3


FAKE = r"""
import json, os, signal, sys, time
from pathlib import Path
home = Path(sys.argv[sys.argv.index("--dir") + 1])
os.chdir(home)
endpoints = {"peer_id": home.name, "run_id": "r", "pid": os.getpid(), "join": ["addr"], "metrics": "http://127.0.0.1:1/"}
(home / "endpoints.json").write_text(json.dumps(endpoints))
os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
steps = home.parent / "audit" / f"steps-{home.name}.jsonl"
for n in range(1, 10_000):
    line = {"inner_step": n, "step": n, "at": time.time(), "microbatches": []}
    with steps.open("a") as file:
        file.write(json.dumps(line) + "\n")
    time.sleep(0.02)
"""
"""A fake node as the bench sees it: it writes its endpoints, takes steps, and has a child process."""


def test_a_line_from_before_the_kill_is_not_a_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may be read after the kill, but the node no longer trains, and has not returned."""
    fleet = Fleet(tmp_path, (1, 1))
    (tmp_path / "audit").mkdir()
    monkeypatch.setattr(FleetNode, "peer", "12D3me")
    node = fleet.nodes["0-0"]
    step = {"at": 2.0, "inner_step": 1, "step": 1, "microbatches": [{"id": "a", "tokens": 3}]}
    steps = tmp_path / "audit" / "steps-12D3me.jsonl"
    node.started_at, node.killed = 1.0, False
    steps.write_text(json.dumps(step) + "\n")
    fleet.tick()
    assert (node.trains, fleet.back_s) == (True, [1.0])
    fleet.kill(node, None)
    with steps.open("a") as file:
        file.write(json.dumps({**step, "at": 2.5, "inner_step": 2}) + "\n")
    fleet.tick()
    assert (node.trains, fleet.back_s, len(fleet.lines)) == (False, [1.0], 2)


def disturbed_and_broken_off(run_dir: Path) -> None:
    """Kill, stop and restart nodes, then press Ctrl-C while a node is stopped."""
    with Fleet(run_dir, (2, 2)) as fleet:
        fleet.start()
        fleet.wait(lambda: all(node.active for node in fleet.nodes.values()), "all step", 30.0)
        hung, dead, brief = (fleet.nodes[name] for name in ("0-0", "1-1", "0-1"))
        fleet.stop(hung, 60.0)
        assert fleet.training() == {0: ["0-1"], 1: ["1-0", "1-1"]}
        before = dead.endpoints
        fleet.kill(dead, 0.0)
        assert fleet.training() == {0: ["0-1"], 1: ["1-0"]}
        fleet.wait(lambda: dead.active, "it is back", 30.0)
        assert None not in (before, dead.endpoints)
        assert before != dead.endpoints
        fleet.stop(brief, 0.0)
        fleet.wait(lambda: brief.active, "it goes on", 30.0)
        assert len(working_below(run_dir)) >= 8, "four nodes, each with a child process"
        assert fleet.back_s
        assert fleet.step > 1
        raise KeyboardInterrupt


def nodes_run(script: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every node run this script, whatever its arguments are."""
    (home / "node.py").write_text(script)
    monkeypatch.setattr(node_process, "PROGRAM", (str(home / "node.py"),))
    monkeypatch.setattr(node_fleet, "ForkServerProcess", SharedServer)


@pytest.mark.soak
def test_an_interrupted_bench_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_run(FAKE, tmp_path, monkeypatch)
    run_dir = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        disturbed_and_broken_off(run_dir)
    wait_until(lambda: not working_below(run_dir), "the end of all that was started", 10.0)


def test_a_node_that_exits_unexpectedly_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_run("import sys; print('no luck'); sys.exit(3)", tmp_path, monkeypatch)
    with (
        Fleet(tmp_path / "run", (1, 1)) as fleet,
        pytest.raises(LocalError, match="0-0 ended with exit code 3: no luck"),
    ):
        fleet.start()


def test_hangs_are_distinguished_from_nodes_that_came_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(NodeProcess, "running", property(lambda child: child.name in running))
    monkeypatch.setattr(NodeProcess, "exit_code", property(lambda child: None if child.name in running else 0))
    monkeypatch.setattr(NodeProcess, "read_metrics", lambda child: None)
    running = {"0-0", "0-1", "1-0", "1-1"}
    fleet = Fleet(tmp_path, (2, 2))
    fleet.back_s = [10.0]
    seen = churn_watch.ChurnWatch(fleet, 100, lambda line: None)
    for node in fleet.nodes.values():
        node.trains, node.started_at, node.progressed_at = True, now[0], now[0]
    now[0] += 29.0
    fleet.step = 50
    for name in ("0-0", "1-0"):
        fleet.nodes[name].progressed_at = now[0]
    seen.tick(now[0])
    assert seen.hangs == []
    assert seen.near_the_end(now[0]), "29 s are left"
    fleet.nodes["1-1"].stopped_until = now[0] + 9
    now[0] += 2.0
    seen.tick(now[0])
    seen.tick(now[0])
    assert seen.hangs == ["0-1: no inner step for 30 s"], "a stopped node does not hang, and a hang is reported once"
    fleet.nodes["1-1"].stopped_until, fleet.nodes["1-1"].trains = None, False
    fleet.step = 99
    seen.tick(now[0])
    running -= {"0-0", "0-1", "1-0"}
    assert not seen.over
    seen.tick(now[0])
    assert (seen.over, seen.too_late, len(seen.hangs)) == (True, ["1-1"], 1)


ENOUGH = 100
"""The least number of microbatches that a short run counts, however slow the machine is."""


class UntilItIsBack(churn_watch.ChurnWatch):
    """Continues until the killed node has returned and enough has been trained, then asks all nodes to leave."""

    asked = False

    def near_the_end(self, now: float) -> bool:
        return False

    def tick(self, now: float) -> None:
        super().tick(now)
        nodes = self._fleet.nodes.values()
        done = {one for line in self._fleet.first_stage_lines() for one in line.ids}
        if len(self._fleet.back_s) > len(nodes) and len(done) > ENOUGH and not self.asked:
            self.asked = True
            for node in nodes:
                node.terminate()


@pytest.mark.soak
def test_a_short_run_with_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four real nodes, one of which is killed: the run ends, everything is counted, and nothing is left."""
    monkeypatch.setattr(node_fleet, "ForkServerProcess", SharedServer)
    monkeypatch.setattr(churn, "ChurnWatch", UntilItIsBack)
    monkeypatch.setattr(churn_schedule, "PAUSE_S", (0.1, 0.2))
    steps, sets = 100_000, (*SMALL[1::2], "evaluation.every_steps=10", "inner.warmup_steps=10")
    plan = churn.ChurnPlan((2, 2), 1.0, 1.8 / 60, False, 3, 1, steps, False, sets)
    found = churn.one_run(tmp_path / "run", plan, steps, 3, ProgressLine(), disturbed=True)
    assert (found["kills"], found["stops"], found["duplicates"], found["crashes"], found["hangs"]) == (1, 0, 0, [], [])
    assert len(found["back_s"]) == len(found["stall_after_kill_s"]) == 1
    places = [read_processes(path.parent) for path in sorted((tmp_path / "run").glob("*/events.jsonl"))]
    resumed = [[sum(event.kind == "resumed" for event in process) for process in place] for place in places]
    assert [place[1] for place in resumed if len(place) == 2] == [1], "the killed node resumed in the running swarm"
    # Other nodes may have resumed too: at the start a late node finds the run already in progress.
    assert sum(found["resumed_from"].values()) == sum(map(sum, resumed))
    assert found["tokens"] == found["microbatches_done"] * 2 * 32
    assert found["microbatches_done"] > ENOUGH
    assert found["curve"][-1][0] <= found["tokens"]
    assert 0 < found["validation_loss"] < 6
    wait_until(lambda: not working_below(tmp_path), "the end of all that was started", 10.0)
