"""`noloco track`: the figures of a swarm can be read back from an event file; the nodes are invented."""

import asyncio
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from diagnosed import silent, swarm, with_advert, with_figures, with_status
from served_nodes import served_nodes
from tracked import read_back

from noloco_p2p.cli import main
from noloco_p2p.errors import ConfigError, LocalError, Unreachable
from noloco_p2p.launch import node_probe
from noloco_p2p.launch.node_probe import KEY_LOCK, SUMMARY
from noloco_p2p.observe import track
from noloco_p2p.observe.diagnosis.findings import Report
from noloco_p2p.observe.top import Readings


def nodes(step: float, state: str = "training", **figures: object) -> dict[str, Report]:
    """A 2 × 2 swarm at this step, with these figures at every node."""
    found = {name: with_advert(report, step=step, state=state) for name, report in swarm(2, 2).items()}
    return {name: with_figures(report, **figures) for name, report in found.items()}


def test_the_figures_of_the_swarm_can_be_read_back_by_step(tmp_path: Path) -> None:
    tracking = track.Tracking(track.open_sink("tensorboard", tmp_path, "tiny", {}))
    first = nodes(
        10.0, loss=4.0, validation_loss=5.0, learning_rate=0.25, grad_norm=0.5, replica_std=2.0, bytes_per_s=100.0
    )
    first["S0R1"] = with_advert(with_figures(first["S0R1"], loss=2.0), state="paused")
    first["S1R1"] = silent(first["S1R1"])
    tracking.take([*first.values()])
    tracking.take([*first.values()])  # without news nothing is written
    tracking.take([*nodes(20.0, loss=1.0, validation_loss=5.0).values()])
    tracking.take([*nodes(15.0, loss=9.0, validation_loss=4.5).values()])  # nor for a step before the last
    assert not tracking.ended
    assert read_back(tmp_path / "tensorboard")["loss"] == [(10, 4.0), (20, 1.0)], "it can be followed"
    tracking.take([*nodes(20.0, "finished", loss=1.0, validation_loss=3.0).values()])
    assert tracking.ended
    with pytest.raises(Unreachable):
        tracking.take([silent(report) for report in first.values()])
    tracking.sink.close()
    found = read_back(tmp_path / "tensorboard")
    assert found["loss"] == [(10, 4.0), (20, 1.0), (20, 1.0)], "that of the node that trains"
    assert found["validation_loss"] == [(10, 5.0), (20, 3.0)]
    assert (found["learning_rate"], found["grad_norm"]) == ([(10, 0.25)], [(10, 0.5)])
    assert found["replica_std/stage_0"] == found["replica_std/stage_1"] == [(10, 2.0)]
    assert found["tokens_per_s"] == [(10, 2050.0), (20, 4100.0)], "the sum over the training nodes of stage 0"
    assert found["bytes_per_s"] == [(10, 300.0), (20, 0.0), (20, 0.0)]
    states = {name: points for name, points in found.items() if name.startswith("nodes/")}
    assert states == {
        "nodes/training": [(10, 2.0), (20, 4.0), (20, 0.0)],
        "nodes/paused": [(10, 1.0), (20, 0.0), (20, 0.0)],
        "nodes/silent": [(10, 1.0), (20, 0.0), (20, 0.0)],
        "nodes/finished": [(20, 4.0)],
    }


def test_a_validation_is_written_once_whichever_nodes_leave_or_return(tmp_path: Path) -> None:
    """A mean over fewer nodes is not a new validation, and the first node to evaluate does not wait for others."""
    tracking = track.Tracking(track.open_sink("tensorboard", tmp_path, "tiny", {}))

    def at(step: float, *losses: float | None) -> list[Report]:
        found = nodes(step, loss=1.0)
        for name, loss in zip(("S0R0", "S0R1"), losses, strict=True):
            found[name] = with_figures(found[name], validation_loss=loss)
        return [*found.values()]

    tracking.take(at(10.0, 5.0, 4.0))
    gone = at(20.0, 5.0, 4.0)
    tracking.take([silent(report) if report.peer == gone[0].peer else report for report in gone])
    tracking.take(at(30.0, 5.0, 4.0))
    tracking.take(at(40.0, 5.0, None))  # the other node has been restarted
    tracking.take(at(50.0, 3.0, None))
    tracking.take(at(60.0, 3.0, 2.5))
    tracking.take(at(70.0, 2.0, 2.5))
    tracking.sink.close()
    assert read_back(tmp_path / "tensorboard")["validation_loss"] == [(10, 4.5), (50, 3.0), (60, 2.5), (70, 2.0)]


def test_nothing_is_written_before_a_run_begins(tmp_path: Path) -> None:
    tracking = track.Tracking(track.open_sink("tensorboard", tmp_path, "tiny", {}))
    waiting = [with_status(report, inner_steps=0) for report in nodes(40.0, "waiting").values()]
    tracking.take(waiting)
    assert (tracking.written, tracking.ended) == (0, False), "the nodes of a run that is continued wait at step 40"
    tracking.sink.close()


@pytest.mark.parametrize(("step", "steps", "ended"), [(4999.0, 5000, False), (5000.0, 5000, True), (9.0, 0, False)])
def test_a_run_has_ended_once_its_last_step_is_reached(step: float, steps: int, ended: bool, tmp_path: Path) -> None:
    tracking = track.Tracking(track.open_sink("tensorboard", tmp_path, "tiny", {}))
    tracking.take([with_status(report, steps=steps) for report in nodes(step).values()])
    assert tracking.ended == ended
    tracking.sink.close()


def test_a_swarm_that_is_silent_for_a_while_is_waited_for_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readings of a swarm that trains, each after two failures; then it ends."""
    monkeypatch.setattr(track, "INTERVAL_S", 0.0)
    silence = Unreachable("no answer")
    found: list[dict[str, Report] | Unreachable] = [silence, silence, nodes(10.0), silence, silence]
    found += [nodes(5000.0, "finished"), silence]
    said: list[str] = []

    async def read() -> list[Report]:
        one = found.pop(0)
        if isinstance(one, Unreachable):
            raise one
        return [*one.values()]

    tracking = track.Tracking(track.open_sink("tensorboard", tmp_path, "tiny", {}))
    asyncio.run(tracking.follow(read, threading.Event(), said.append))
    tracking.sink.close()
    assert said == ["waiting for the swarm: no answer"] * 2
    assert (tracking.written, tracking.step, found) == (2, 5000, [])


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `noloco` with these arguments; returns its exit code."""
    monkeypatch.setattr("sys.argv", ["noloco", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_an_observer_writes_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(track, "INTERVAL_S", 0.01)
    monkeypatch.chdir(tmp_path)
    with served_nodes(nodes(5000.0, "finished", loss=1.5)) as served:
        take = track.Tracking.take

        def take_and_go(tracking: track.Tracking, reports: list[Report]) -> None:
            take(tracking, reports)
            for name in list(served.servers):
                served.stop(name)

        monkeypatch.setattr(track.Tracking, "take", take_and_go)
        assert command(monkeypatch, "track", "--to", "tensorboard", "--url", served.urls["S1R0"]) == 0
    (directory,) = tmp_path.glob("noloco-track/*")
    assert directory.name == "tiny-abababab"
    assert read_back(directory / "tensorboard")["loss"] == [(5000, 1.5)]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"track     tensorboard --logdir noloco-track/{directory.name}/tensorboard"
    assert printed[-1] == "1 reading written, up to step 5,000"


@pytest.mark.parametrize("words", [["track", "--url", "http://127.0.0.1:1", "--to"], ["swarm", "--track"]])
def test_a_missing_package_is_named_before_anything_is_created(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *words, "wandb") == 2
    assert capsys.readouterr().err == f"error: {words[-1]} wandb needs the package wandb: pip install wandb\n"
    assert list(tmp_path.iterdir()) == []


def test_a_swarm_of_which_no_node_answers_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def readings(join: Sequence[str], url: str | None) -> AsyncIterator[Readings]:
        async def read() -> list[Report]:
            return [silent(report) for report in nodes(10.0).values()]

        yield read

    monkeypatch.setattr(track, "readings", readings)
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "track", "--to", "tensorboard", "--join", "/ip4/127.0.0.1/tcp/1") == 2
    said = "error: no node answers with its status (nodes found: 4): Connection refused\n"
    assert (capsys.readouterr().err, [*tmp_path.iterdir()]) == (said, [])


def test_a_directory_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "swarm.json").touch()
    words = ("track", "--to", "tensorboard", "--url", "http://127.0.0.1:1", "--dir", str(tmp_path))
    assert command(monkeypatch, *words) == 2
    assert "is the directory of a swarm" in capsys.readouterr().err


def test_the_figures_of_the_swarm_of_a_directory_end_with_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that do not run, or do not answer, are passed over."""
    monkeypatch.setattr(track, "INTERVAL_S", 0.01)
    with served_nodes(nodes(30.0, loss=1.5)) as served:
        metrics = {"0-0": None, "0-1": "http://127.0.0.1:1/metrics", "1-0": f"{served.urls['S1R0']}/metrics"}
        for name in metrics:
            (tmp_path / name).mkdir()
            (tmp_path / name / KEY_LOCK).touch()
        monkeypatch.setattr(
            node_probe, "running", lambda place: (at := metrics[place.name]) and SimpleNamespace(metrics=at)
        )
        written = threading.Event()
        take = track.Tracking.take

        def noted(tracking: track.Tracking, reports: list[Report]) -> None:
            take(tracking, reports)
            written.set()

        monkeypatch.setattr(track.Tracking, "take", noted)
        with track.tracked("tensorboard", tmp_path, {}):
            assert written.wait(60.0)
            summary = {"completed": True, "steps": 40, "validation_loss": 2.0, "tokens_per_s": None, "nodes": [1, 2]}
            (tmp_path / SUMMARY).write_text(json.dumps(summary))
        assert "track" not in {thread.name for thread in threading.enumerate()}
    found = read_back(tmp_path / "tensorboard")
    assert (found["loss"], found["validation_loss"]) == ([(30, 1.5)], [(40, 2.0)])
    assert (found["nodes/training"], found["nodes/finished"]) == ([(30, 4.0), (40, 0.0)], [(40, 2.0)])
    for metrics["1-0"] in (None, "http://127.0.0.1:1/metrics"):
        with pytest.raises(Unreachable, match=r"no node of .* answers"):
            asyncio.run(track._of_directory(tmp_path))


def test_a_run_that_was_stopped_has_no_last_figures(tmp_path: Path) -> None:
    for summary in (None, {"completed": False, "steps": 40, "validation_loss": 2.0, "nodes": []}):
        if summary is not None:
            (tmp_path / SUMMARY).write_text(json.dumps(summary))
        with track.tracked("tensorboard", tmp_path, {}):
            pass
    assert read_back(tmp_path / "tensorboard") == {}


def test_a_failing_sink_ends_the_tracking_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(sink: track.EventFile, step: int, figures: Mapping[str, float]) -> None:
        raise LocalError("the disk is full")

    monkeypatch.setattr(track.EventFile, "write", full)
    with track.tracked("tensorboard", tmp_path, {}):
        summary = {"completed": True, "steps": 8, "validation_loss": 2.0, "nodes": []}
        (tmp_path / SUMMARY).write_text(json.dumps(summary))
    assert capsys.readouterr().out.splitlines()[1:] == ["tracking has ended: the disk is full"]


def test_a_sink_that_fails_while_the_swarm_runs_and_again_at_its_end_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise LocalError("the disk is full")

    failed = threading.Event()

    async def follow(*_: object) -> None:
        failed.set()
        full()

    monkeypatch.setattr(track.Tracking, "follow", follow)
    monkeypatch.setattr(track.EventFile, "close", full)
    with track.tracked("tensorboard", tmp_path, {}):
        assert failed.wait(60.0)
    assert capsys.readouterr().out.splitlines()[1:] == ["tracking has ended: the disk is full"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from noloco_p2p.errors import LocalError
from noloco_p2p.observe.track import open_sink

sink = open_sink("tensorboard", Path(sys.argv[1]), "tiny", {})
sink.write(1, {"loss": 4.0})
sink.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    again = open_sink("tensorboard", Path(sys.argv[1]), "tiny", {})
    again.write(2, {"loss": 3.0})
except LocalError as error:
    print(error)
"""


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    """A thread of TensorBoard's own writer printed a traceback as well."""
    ended = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == (f"{tmp_path}/tensorboard cannot be written: File too large\n", "")
    assert read_back(tmp_path / "tensorboard") == {"loss": [(1, 4.0)]}


class WandbError(Exception):
    """Stands in for wandb's own exception."""


def test_wandb_gets_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four parts of the package that are used stand in for it."""
    logged: list[tuple[int, Mapping[str, float]]] = []

    def log(found: Mapping[str, float], step: int) -> None:
        if step > 10:
            raise WandbError("no connection") if step == 20 else ConnectionResetError("Connection lost")
        logged.append((step, found))

    def init(**given: Any) -> SimpleNamespace:
        if given["name"] == "stranger":
            raise WandbError("no account.")
        assert (given["project"], given["config"]) == ("noloco", {"steps": 8})
        assert Path(given["dir"]).is_dir(), "wandb writes elsewhere if it does not exist"
        files = Path(given["dir"]) / "wandb" / "offline-run-1" / "files"
        known: dict[str, Any] = {"url": "https://wandb.ai/me/tiny"} if given["name"] == "online" else {}
        finish, offline = partial(logged.append, (-1, {})), not known  # wandb warns if it is asked for an address then
        return SimpleNamespace(log=log, finish=finish, offline=offline, dir=str(files), **known)

    module = ModuleType("wandb")
    module.__dict__.update(init=init, Settings=dict, errors=SimpleNamespace(Error=WandbError))
    monkeypatch.setitem(sys.modules, "wandb", module)
    home = tmp_path / "new"
    assert track.open_sink("wandb", home, "online", {"steps": 8}).how_to_view == "https://wandb.ai/me/tiny"
    tracking = track.Tracking(track.open_sink("wandb", home, "tiny", {"steps": 8}))
    assert tracking.sink.how_to_view == f"wandb sync {home}/wandb/offline-run-1"
    tracking.take([*nodes(10.0, loss=4.0).values()])
    tracking.sink.close()
    figures = {"loss": 4.0, "tokens_per_s": 4100.0, "bytes_per_s": 0.0, "nodes/training": 4}
    assert logged == [(10, figures), (-1, {})], "the figures that are known, and the end"
    with pytest.raises(LocalError, match=r"^wandb: no connection$"):
        tracking.take([*nodes(20.0).values()])
    with pytest.raises(LocalError, match=r"^wandb: Connection lost$"):  # a swarm that had ended well ended with code 1
        tracking.take([*nodes(30.0).values()])
    with pytest.raises(ConfigError, match=r"^wandb: no account; WANDB_MODE=offline writes files only$"):
        track.open_sink("wandb", tmp_path, "stranger", {})
