"""The journal: its contents, its bounded size, and that no fault of its files harms the node."""

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from noloco_p2p.io.telemetry.counters import RunCounters
from noloco_p2p.io.telemetry.journal import (
    MAX_CHARACTERS,
    NAME,
    EventFiles,
    FileJournal,
    Journal,
    TokenBucket,
    oldest_first,
    period_s,
)
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry

MINUTE, HOUR, WEEK = 60.0, 3_600.0, 7 * 86_400.0


class Clock:
    """A clock that moves only when it is set."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


class Lines:
    """A journal in memory, and the clocks that it reads."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.wall = Clock()
        self.raw: list[str] = []
        self.counters = RunCounters(2)
        self.journal = Journal(self.raw.append, self.counters, self.clock, self.wall)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.raw) if line["event"] == kind]

    def note(self, kind: str, /, **fields: object) -> None:
        self.counters.count(kind, fields)
        self.journal.note(kind, fields)

    def step(self, loss: float, tokens: int = 10) -> None:
        self.note(
            "inner_step",
            inner_step=1,
            step=7.25,
            tokens=tokens,
            loss_sum=loss * tokens,
            loss_tokens=tokens,
            learning_rate=1e-3,
            grad_norm=float("nan"),
            busy_s=0.5,
        )


@pytest.fixture
def lines() -> Lines:
    return Lines()


def in_order(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in oldest_first(directory) for line in path.read_bytes().splitlines()]


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


# === contents =========================================================================================================


def test_a_progress_line_holds_the_nodes_progress_and_every_count_since_its_start(lines: Lines) -> None:
    lines.note("state", state="training", reason="synced")
    for loss in (6.0, 4.0):
        lines.step(loss)
    lines.note("idle", cause="partner", seconds=0.25)
    lines.note("idle", cause="partner", seconds=0.5)
    lines.note("bytes", direction="in", kind="activation", bytes=1_000)
    lines.note("microbatch", result="dropped", reason="deadline", message="too late")
    lines.note("span", name="forward", seconds=0.125)
    lines.clock.at += 1.0
    lines.note("reroute", reason="unreachable", peer="Q", message="gone")
    (progress,) = lines.of("progress")
    assert progress == {
        "time": 100.0,
        "event": "progress",
        "up_s": 1.0,
        "state": "training",
        "step": 7.25,
        "learning_rate": 0.001,
        "grad_norm": None,
        "inner_steps": 2,
        "tokens": 20,
        "loss": 5.0,
        "final_loss": 5.0,
        "device_s": 1.0,
        "idle_s": {"partner": 0.75},
        "bytes": {"in activation": 1000},
        "microbatches": {"dropped": 1},
        "dropped": {"deadline": 1},
        "phase_s": {"forward": 0.125},
        "rerouted": {"unreachable": 1},
        "held": {},
    }


def test_the_loss_is_the_mean_since_the_previous_line_while_counts_accumulate(lines: Lines) -> None:
    for loss in (6.0, 2.0):
        lines.step(loss)
        lines.clock.at += 1.0
        lines.note("lag", seconds=0.0)
    assert [(line["loss"], line["tokens"], line["final_loss"]) for line in lines.of("progress")] == [
        (6.0, 10, 6.0),
        (2.0, 20, 4.0),
    ]


def test_the_end_writes_pending_progress_and_is_the_last_line(lines: Lines) -> None:
    lines.journal.start(peer_id="Q", name="tiny", stage=None)
    lines.step(3.0)
    lines.journal.end()
    lines.note("warning", message="closing")
    assert [json.loads(line)["event"] for line in lines.raw] == ["start", "progress", "end"]
    assert lines.of("progress")[0]["inner_steps"] == 1
    assert "stage" not in lines.of("start")[0]


def test_membership_and_deserted_stages_are_written_only_when_they_change(lines: Lines) -> None:
    for count in (2, 2, 3, 3, 2):
        lines.note("membership", counts={(0, "training"): count, (1, "waiting"): 1})
    for stages in ({}, {1: 0.0}, {1: 5.0}, {}, {}):
        lines.note("deserted", stages=stages)
    assert [line["counts"]["0 training"] for line in lines.of("membership")] == [2, 3, 2]
    assert [list(line["stages"]) for line in lines.of("deserted")] == [["1"], []]


def test_a_peers_text_stays_one_bounded_line(lines: Lines) -> None:
    lines.note("warning", message="first\nsecond \x1b[31m" + "x" * 10_000)
    (line,) = lines.of("warning")
    assert "\n" not in lines.raw[0]
    assert len(line["message"]) == MAX_CHARACTERS


def test_a_repeated_warning_is_one_line_and_a_count(lines: Lines) -> None:
    for _ in range(50):
        lines.note("warning", message="no snapshot")
    lines.clock.at += 1.0
    lines.note("lag", seconds=0.0)
    assert len(lines.of("warning")) == 1
    assert lines.of("progress")[0]["held"] == {"warning": 49}


@pytest.mark.parametrize(("age_s", "expected"), [(5.0, 1.0), (HOUR, 3.6), (WEEK, 604.8)])
def test_the_period_of_progress_grows_with_the_age(age_s: float, expected: float) -> None:
    assert period_s(age_s) == pytest.approx(expected)


def test_a_burst_of_one_kind_is_written_and_then_a_few_lines_per_period() -> None:
    bucket = TokenBucket()
    written = [sum(bucket.take(up_s, period_s=2.0) for _ in range(100)) for up_s in (0.0, 2.0, 6.0, 1000.0)]
    assert written == [40, 4, 8, 40]


def test_a_week_has_at_most_7500_progress_lines_and_counts_every_round(lines: Lines) -> None:
    rounds = 0
    while lines.clock.at < WEEK:
        lines.clock.at += 7.0
        rounds += 1
        lines.note("outer_round", round=rounds, result="partner", reason="drawn", partner="Q", seconds=1.0, bytes=9)
    lines.journal.end()
    progress = lines.of("progress")
    assert 5_000 < len(progress) < 7_500  # events come only every seven seconds
    assert progress[-1]["rounds"] == {"partner": rounds}
    assert len(lines.of("outer_round")) < 4.1 * 7_500
    assert sum(map(len, lines.raw)) < 10_000_000


# === its files ========================================================================================================


def test_200000_events_are_bounded_and_the_newest_can_be_read(tmp_path: Path) -> None:
    """What a node that keeps failing writes: many processes in turn, each with a burst of every kind of event."""
    files = EventFiles(tmp_path, file_bytes=20_000)
    clock, largest, events = Clock(), 0, 0
    for life in range(100):
        counters = RunCounters(2)
        journal = Journal(files.write, counters, clock, clock)
        journal.start(peer_id="Q", life=life)
        for n in range(100):
            journal.note("warning", {"message": f"trouble {n} of life {life}"})
        for _ in range(1_900):
            counters.count("busy", {"direction": "in"})
            journal.note("busy", {"direction": "in"})
        clock.at += 10.0
        journal.end()
        events += 2_000
        largest = max(largest, size_of(tmp_path))
    found = in_order(tmp_path)
    assert events == 200_000
    assert 100_000 < largest <= 8 * 20_000
    assert found[-1]["event"] == "end"
    assert [line["life"] for line in found if line["event"] == "start"][-1] == 99
    times = [line["time"] for line in found]
    assert times == sorted(times)


def test_a_node_killed_within_a_line_continues_on_the_next(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"event":"start"}\n{"event":"prog')
    for process in ("second", "third"):
        files = EventFiles(tmp_path)
        files.write(process)
    assert (tmp_path / NAME).read_bytes() == b'{"event":"start"}\n{"event":"prog\nsecond\nthird\n'


@pytest.fixture
def full_disk(tmp_path: Path) -> Path:
    (tmp_path / NAME).symlink_to("/dev/full")
    return tmp_path


def test_a_full_disk_loses_lines_until_there_is_room_again(full_disk: Path) -> None:
    clock = Clock()
    files = EventFiles(full_disk, now=clock)
    files.write("lost")
    (full_disk / NAME).unlink()
    files.write("lost as well")
    clock.at += 11.0
    files.write("written")
    assert (full_disk / NAME).read_bytes().split() == [b"written"]


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the file size of this process: a line that exceeds it is written in part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_written_in_part_does_not_spoil_the_next(tmp_path: Path) -> None:
    clock = Clock()
    files = EventFiles(tmp_path, now=clock)
    with files_of_at_most(10):
        files.write("first")
        files.write("second")
    clock.at += 11.0
    files.write("third")
    assert (tmp_path / NAME).read_bytes().splitlines() == [b"first", b"seco", b"third"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists the open files of a process")
def test_retries_on_a_full_disk_leak_no_descriptors(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"event":"prog')
    clock = Clock()
    files = EventFiles(tmp_path, now=clock)
    opened = len(os.listdir("/proc/self/fd"))
    with files_of_at_most(14):
        for _ in range(5):
            files.write("lost")
            clock.at += 11.0
    assert len(os.listdir("/proc/self/fd")) == opened
    files.write("written")
    assert (tmp_path / NAME).read_bytes().splitlines() == [b'{"event":"prog', b"written"]


def test_a_removed_directory_does_no_harm_and_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    clock, directory = Clock(), tmp_path / "node"
    directory.mkdir()
    files = EventFiles(directory, now=clock)
    files.write("first")
    (directory / NAME).unlink()
    directory.rmdir()
    files.write("lost")
    assert not directory.exists()
    directory.mkdir()
    clock.at += 11.0
    files.write("second")
    assert (directory / NAME).read_bytes() == b"second\n"


def test_a_disk_that_hangs_does_not_stop_the_node(tmp_path: Path) -> None:
    """The file is a pipe that nobody reads, so the writing thread hangs once it is full."""
    os.mkfifo(tmp_path / NAME)
    reader = os.open(tmp_path / NAME, os.O_RDONLY | os.O_NONBLOCK)
    journal = FileJournal(tmp_path, RunCounters(2))
    journal.open(peer_id="Q")
    for n in range(5_000):
        journal.start(text="x" * 300, n=n)
    try:
        assert os.read(reader, 1 << 20).startswith(b'{"time"')
    finally:
        os.close(reader)


def test_telemetry_passes_every_event_and_phase_to_the_journal_and_survives_its_faults(tmp_path: Path) -> None:
    telemetry = PrometheusTelemetry(2)
    journal = FileJournal(tmp_path, telemetry.counters)
    journal.open(peer_id="Q", name="tiny")
    telemetry.record(journal)
    with telemetry.span("forward"):
        telemetry.event("state", state="training", reason="synced")
    telemetry.event("stuck", message="nothing for 60 s", well=False)
    telemetry.event("inner_step", tokens="many")
    journal.close()
    found = in_order(tmp_path)
    assert [line["event"] for line in found] == ["start", "state", "stuck", "progress", "end"]
    assert found[3]["phase_s"]["forward"] > 0
    assert found[3]["state"] == "training"
