"""The command `noloco` without a swarm: bad usage, quick help, and how readings become rows and summaries."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from noloco_p2p import __version__
from noloco_p2p.cli import bench, main, node
from noloco_p2p.config import RunManifest
from noloco_p2p.errors import Unreachable
from noloco_p2p.lab.bench import pipeline
from noloco_p2p.launch import cpu_seconds, node_probe, progress_line, swarm_summary
from noloco_p2p.launch.node_probe import MetricsReading, NodeEndpoints
from noloco_p2p.launch.node_process import NodeProcess
from noloco_p2p.launch.progress_line import ProgressLine
from noloco_p2p.launch.swarm_display import COLUMNS, Display, current_row, row, warnings

HEAVY = ("torch", "transformers", "hivemind", "grpc", "datasets", "numpy", "pydantic", "yaml")


def noloco(*arguments: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    command, env = [sys.executable, "-m", "noloco_p2p.cli.main", *arguments], {**os.environ, **variables}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["swarm", "--bogus"], "--bogus"),
        (["swarm", "--stages", "0"], "--stages"),
        (["swarm", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["swarm", "--set", "outer.inner_stepz=3"], "outer.inner_steps"),
        (["swarm", "--set", "outer.gamma=2"], "apart"),
        (["generate", "model", "--prompt", "a", "--seed", "9" * 20], "--seed"),
        (["generate", "model", "--prompt", "a", "--tokens", "9" * 20], "--tokens"),
        (["sim", "--seed", "9" * 20], "--seed"),
        (["sim", "--nodes", "9" * 11], "--nodes: 99,999,999,999 nodes are too many: a stage has at most 2,048"),
        (["sim", "--set", "run.microbatches_per_step=99999999"], "run.microbatches_per_step must be at most 10000"),
        (["sim", "--set", "limit_s=1e300"], "limit_s must be at most 2592000"),
        (["swarm", "--replicas", "9" * 11], "--replicas: start_replicas must be at most 2048"),
        (["swarm", "--stages", "4", "--replicas", "2000"], "8,000 nodes need at least"),
        (["bench", "churn", "--nodes", "4x2000"], "8,000 nodes need at least"),
        (["bench", "links", "--nodes", "4x2000"], "8,000 nodes need at least"),
        (["bench", "churn", "--seed", "9" * 20], "--seed"),
        (["bench", "pipeline", "--seconds", "inf"], "--seconds"),
        (["track"], "Missing option '--to'. Choose from: tensorboard, wandb; see noloco track --help"),
        # An invitation ends by 2106: its time has 32 bits.
        (["invite", "--dir", "run", "--for", "10000d"], "give 1 to 9999 minutes, hours or days"),
        (["swarm", "--dir", ""], "--dir '' is empty: give a value, or leave it out"),
        (["export", "--out", "model", "--from="], "--from '' is empty"),
        (["report", ""], "report '' is empty"),
        (["nope"], "nope"),
    ],
)
def test_bad_usage_gets_one_line_and_exit_code_2(
    arguments: Sequence[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["noloco", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not [*tmp_path.iterdir()]


def test_only_a_prompt_may_be_empty(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a path, an unset variable of a script would be the current directory."""
    for prompt in (["--prompt", ""], ["--prompt="], ["--prompt", "--dir="]):
        monkeypatch.setattr(sys, "argv", ["noloco", "generate", "nowhere", *prompt])
        with pytest.raises(SystemExit):
            main.main()
        assert "there is no such directory" in capsys.readouterr().err


def test_commands_work_in_a_locale_that_lacks_a_character(tmp_path: Path) -> None:
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = noloco("experiment", cwd=tmp_path, **ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u03b3" in done.stdout


def test_without_a_command_the_help_is_shown(tmp_path: Path) -> None:
    for words, begins in (([], "Usage: noloco ["), (["bench"], "Usage: noloco bench"), (["-h"], "Usage: noloco [")):
        done = noloco(*words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(begins)
        assert done.stdout.endswith(".\n")
    assert noloco("--version", cwd=tmp_path).stdout == f"{__version__}\n"


def commands(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, *words, name)


VALUE = r"[A-Z][^<>{}]*|[a-z]+(\|[a-z]+)+"
"""The name of a value: FILE, or all its choices, mean|one."""


@pytest.mark.parametrize("app", [main.app, node.app])
def test_every_help_text_fits_80_columns_and_names_its_values(app: typer.Typer) -> None:
    for words in commands(typer.main.get_command(app)):
        text = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*words, "--help"]).output
        assert max(map(len, text.splitlines())) <= 80, words
        usage = text.partition("\n\n")[0].split("[OPTIONS]")[1].split()
        assert all(re.fullmatch(r"\[?[A-Z|]+\]?(\.\.\.\]?)?", name) for name in usage), usage
        lists = re.findall(r"^(?:Arguments|Options):\n((?:  .*\n)+)", text, re.MULTILINE)
        names = [name for each in lists for name in re.findall(r"^  (\S+(?: \S+)*)", each, re.MULTILINE)]
        assert "-h, --help" in names
        for word in (word for name in names for word in name.split() if word != "/" and not word.startswith("-")):
            assert re.fullmatch(VALUE, word), (words, word)


def test_a_shell_completes_commands_and_options() -> None:
    asks = {"COMP_WORDS": "noloco swarm --st", "COMP_CWORD": "2", "_NOLOCO_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "noloco_p2p.cli.main"]
    done = subprocess.run(command, env=os.environ | asks, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["--stages", "--steps"]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_characters_that_a_locale_lacks_are_escaped(encoding: str, tmp_path: Path) -> None:
    """Including a file name in another encoding than the terminal's."""
    command = [*(sys.executable, "-m", "noloco_p2p.cli.main", "key", "new"), "caf\udce9 …"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    said = rb"wrote caf\udce9 \u2026; its" if encoding == "ascii" else rb"wrote caf\udce9 " + "…; its".encode()
    assert done.stdout.startswith(said)


def test_a_terminal_shows_one_mark_for_each_character_that_its_locale_lacks(tmp_path: Path) -> None:
    """An escape is wider: where tables are drawn in place, as by noloco top, lines ran over and the screen scrolled."""
    ours, terminal = pty.openpty()
    with open(ours, "rb", buffering=0) as screen:
        command = [*(sys.executable, "-m", "noloco_p2p.cli.main", "key", "new"), "caf\udce9 …"]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=terminal, stderr=terminal, timeout=60, check=False
        )
        os.close(terminal)
        assert done.returncode == 0
        assert screen.read(4096).startswith(b"wrote caf? ?; its")


def test_closed_standard_files_are_not_reused_for_others() -> None:
    """The next file opened would otherwise get its descriptor, and child processes would have none."""
    code = "import os, sys; from noloco_p2p.cli import main; sys.argv[1:] = ['configs']\ntry: main.main()\n"
    code += "except SystemExit as end: sys.exit(end.code or not all(map(os.get_inheritable, range(3))))"
    command = ["sh", "-c", f'"{sys.executable}" -c "$0" <&- >&- 2>&-', code]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(("closed", "output"), [("2>&-", "all laws hold"), (">&-", "")])
def test_a_command_works_without_a_standard_output_or_error(closed: str, output: str) -> None:
    """Closed streams are None in Python: noloco sim and report, and noloco-node, called that a bug."""
    command = ["sh", "-c", f'"{sys.executable}" -m noloco_p2p.cli.main sim --set run.steps=1 {closed}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, output in done.stdout, "error" in done.stdout + done.stderr) == (0, True, False)


def test_without_a_standard_error_no_error_is_written_to_the_output(tmp_path: Path) -> None:
    command = ["sh", "-c", f'"{sys.executable}" -m noloco_p2p.cli.main configs nope 2>&-']
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")


buffered_or_not = pytest.mark.parametrize(
    "env", [{**os.environ, "PYTHONUNBUFFERED": value} for value in ("", "1")], ids=["buffered", "unbuffered"]
)
"""By default a command writes its output at its end, if it is short and goes to a pipe or a file."""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize("words", [["main", "configs"], ["main", "bench"], ["node", "--version"]])
@buffered_or_not
def test_output_to_a_full_disk_is_an_error_of_one_line(words: Sequence[str], env: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", f"noloco_p2p.cli.{words[0]}", *words[1:]]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=env)
    line = "error: the output cannot be written: No space left on device; free some space\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("words", [["main", "configs"], ["main", "bench"], ["main", "configs", "tiny"], ["node", "-h"]])
@buffered_or_not
def test_a_closed_pipe_ends_a_command_silently_with_a_code_of_its_own(
    words: Sequence[str], env: dict[str, str]
) -> None:
    """The code was 1, which means something else: warnings after noloco doctor, a broken law after noloco sim."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        command = [sys.executable, "-m", f"noloco_p2p.cli.{words[0]}", *words[1:]]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_node_without_a_standard_output_ends_with_its_exit_code() -> None:
    """It failed when it flushed what it did not have."""
    command = ["sh", "-c", f'"{sys.executable}" -m noloco_p2p.cli.node --describe >&-']
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@buffered_or_not
def test_an_error_message_that_cannot_be_written_does_not_change_the_exit_code(env: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "noloco_p2p.cli.main", "nope"]
        assert subprocess.run(command, stderr=full, timeout=60, check=False, env=env).returncode == 2


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = noloco("swarm", "--set", "steps=none", "--debug", cwd=tmp_path)
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("module", ["noloco_p2p.cli.main", "noloco_p2p.cli.node"])
def test_help_imports_nothing_heavy(module: str) -> None:
    program = (
        f"import runpy, sys; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module('{module}', run_name='__main__')\n"
        f"except SystemExit as end: assert not end.code, end.code\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "--help" in done.stdout
    assert done.stderr.strip() == "[]"


def test_a_node_imports_nothing_unused() -> None:
    """Imports delay the start, and take up memory for the whole run."""
    hivemind = ("hivemind.averaging", "hivemind.moe", "hivemind.optim")
    compiler = ("sympy", "torch._dynamo.utils", "torch._inductor", "torch.distributed.tensor")
    unused = ("scipy", "datasets", "pandas", "pyarrow", *hivemind, *compiler)
    program = (
        "import gc, sys; gc.disable()\n"
        "from noloco_p2p.launch import bootstrap, compose; from noloco_p2p.config import RunManifest\n"
        "import hivemind.dht.node, hivemind.p2p; bootstrap.check_model(RunManifest())\n"
        f"print([m for m in {unused!r} if m in sys.modules], gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[] True True", "imported objects are exempt from garbage collection during training"


def test_an_observer_imports_no_torch() -> None:
    """noloco top --join took as long to start, and to end on Ctrl-C, as torch took to import, and three times the
    memory."""
    program = (
        "import sys; from noloco_p2p.launch import bootstrap; from noloco_p2p.observe import top, track\n"
        "import hivemind.dht.node, hivemind.p2p; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def reading(at: float, steps: float, tokens: float) -> MetricsReading:
    return MetricsReading(
        at,
        (
            ("noloco_inner_steps_total", {}, steps),
            ("noloco_tokens_total", {}, tokens),
            ("noloco_outer_rounds_total", {"result": "partner"}, 2.0),
            ("noloco_outer_rounds_total", {"result": "alone"}, 1.0),
            ("noloco_loss", {}, 2.5),
            ("noloco_step", {}, 7.0),
            ("noloco_state", {"state": "waiting"}, 0.0),
            ("noloco_state", {"state": "training"}, 1.0),
            ("noloco_peers", {"stage": "0", "state": "training"}, 2.0),
            ("noloco_peers", {"stage": "1", "state": "training"}, 2.0),
            ("noloco_peers", {"stage": "1", "state": "left"}, 1.0),
        ),
    )


def line(*values: object, **more: object) -> dict[str, object]:
    """The row of a node, with values in the order of the columns."""
    return dict(zip(COLUMNS, values, strict=False)) | more


def test_a_row_is_made_from_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeProcess(tmp_path, 0, 1)
    assert row(node) == current_row(node) == line("0-1", 0)
    node.readings.append(reading(10.0, 0.0, 0.0))
    assert row(node) == line("0-1", 0, "training", 0, 3, 2.5, None, 3, step=7.0)
    node.readings.append(reading(11.0, 0.0, 0.0))
    assert row(node)["tokens/s"] is None, "no speed before the first step"
    node.readings.append(reading(12.0, 4.0, 3000.0))
    assert row(node) == current_row(node) == line("0-1", 0, "training", 4, 3, 2.5, 1500.0, 3, step=7.0)
    node.readings.popleft()
    node.readings.popleft()
    node.readings.append(reading(14.0, 5.0, 4000.0))
    assert row(node)["tokens/s"] == 500.0, "over the readings that are kept"
    node.readings.append(MetricsReading(14.0, (("noloco_inner_steps_total", {}, 1.0),)))
    assert row(node)["loss"] is None, "a step without tokens has no loss, rather than 0.000"
    node = written(tmp_path, 0, 1, inner_steps=5, outer_rounds=4, final_loss=2.25, step=9)
    assert current_row(node) == line("0-1", 0), "the node has not been started: the summary is of an earlier run"
    monkeypatch.setattr(NodeProcess, "exit_code", 0)
    assert current_row(node) == line("0-1", 0, "finished", 5, 4, 2.25, step=9)
    last = written(tmp_path, 1, 1, inner_steps=5, outer_rounds=4, final_loss=None, step=9)
    last.readings.append(reading(12.0, 4.0, 3000.0))
    assert current_row(last)["loss"] is None, "the last loss read is of an earlier step"


def test_only_a_node_that_trains_and_answers_has_a_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that hung, or was paused, went on with its last speed, in its row and in the speed of the swarm."""
    answers: list[MetricsReading] = [reading(10.0, 0.0, 0.0), reading(12.0, 4.0, 3000.0)]

    def scrape(url: str, timeout_s: float) -> MetricsReading:
        if not answers:
            raise Unreachable("no answer")
        return answers.pop(0)

    monkeypatch.setattr(node_probe, "scrape", scrape)
    monkeypatch.setattr(NodeProcess, "running", True)
    monkeypatch.setattr(NodeProcess, "endpoints", NodeEndpoints("A", "run", 1, (), "http://127.0.0.1:1/metrics"))
    node, shown = NodeProcess(tmp_path, 0, 1), line("0-1", 0, "training", 4, 3, 2.5, 1500.0, 3, step=7.0)
    node.read_metrics()
    for reads in (True, False):
        assert (node.read_metrics() is not None) == reads
        assert row(node) == shown, "one late answer changes nothing"
    assert node.read_metrics() is None
    assert row(node) == shown | {"state": "silent", "tokens/s": None}
    answers += [reading(14.0, 5.0, 4000.0)]
    node.read_metrics()
    assert row(node)["state"] == "training"
    paused = (*((n, s, v) for n, s, v in reading(0.0, 5.0, 4000.0).samples if n != "noloco_state"),)
    node.readings.append(MetricsReading(16.0, (*paused, ("noloco_state", {"state": "paused"}, 1.0))))
    assert [row(node)[column] for column in ("state", "inner step", "tokens/s")] == ["paused", 5, None]


def test_a_deserted_stage_is_named_below_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    def seen(*stages: tuple[str, float]) -> MetricsReading:
        return MetricsReading(0.0, tuple(("noloco_stage_deserted_seconds", {"stage": s}, value) for s, value in stages))

    notes = warnings([seen(("0", 0.0), ("1", 41.0)), None, seen(("0", 0.0), ("1", 42.2))])
    assert notes == ["stage 1 has had no replica for 42 s"]
    assert warnings([seen(("0", 0.0))]) == []
    Display(1000, plain=True).show([line("0-0", 0), line("0-1", 0, "paused", 4, 3, 2.5, 1500.0, 3)], notes)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "0-0  starting",
        "0-1  paused  inner step 4  outer round 3  loss 2.500  tokens/s 1,500  peers 3",
        "stage 1 has had no replica for 42 s",
    ]


def test_the_troubles_of_nodes_are_counted_below_them() -> None:
    """A swarm none of whose checkpoints could be written said nothing before its end."""
    full, fine = MetricsReading(0.0, (("noloco_trouble", {"name": "disk"}, 1.0),)), MetricsReading(0.0, ())
    assert warnings([full, None, fine, full]) == ["trouble (disk) at 2 nodes: see the logs"]
    assert warnings([fine]) == []


def written(run_dir: Path, stage: int, replica: int, **figures: Any) -> NodeProcess:
    """A node whose directory has a summary."""
    child = NodeProcess(run_dir, stage, replica)
    child.dir.mkdir(parents=True)
    (child.dir / "summary.json").write_text(json.dumps({"state": "finished", **figures}))
    return child


def test_the_summary_is_computed_from_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"tokens": 1000, "inner_steps": 10, "validation_step": 10, "outer_rounds": 2, "replica_std": 0.1}
    nodes = [
        written(
            tmp_path, 0, 0, **first, validation_loss=2.0, last_step_at=109.0, evaluation_s=2.0, training=[[100, 109.5]]
        ),
        written(
            tmp_path, 0, 1, **first, validation_loss=3.0, last_step_at=111.0, evaluation_s=0.0, training=[[101, 150]]
        ),
        written(tmp_path, 1, 0, tokens=2000, inner_steps=11, outer_rounds=3, replica_std=0.3, validation_loss=None),
        NodeProcess(tmp_path, 1, 1),
    ]
    manifest = RunManifest(stages=2, start_replicas=2, steps=10)
    before = swarm_summary.summarise(nodes, manifest, 4, 1.0)
    assert (before["tokens"], before["inner_steps"]) == (0, None), "stopped before the nodes were restarted"
    monkeypatch.setattr(NodeProcess, "exit_code", 0)
    summary = swarm_summary.summarise(nodes, manifest, 4, 30.0)
    assert (summary["stages"], summary["replicas"], summary["steps"], summary["resumed_from_step"]) == (2, 2, 10, 4)
    assert summary["tokens"] == 2000
    assert summary["tokens_per_s"] == pytest.approx(2000 / (111 - 100 - 1))
    assert summary["validation_loss"] == 2.5
    assert summary["validation_perplexity"] == pytest.approx(exp(2.5))
    assert (summary["inner_steps"], summary["outer_rounds"]) == (10, 3)
    assert summary["replica_std"] == [pytest.approx(0.1), 0.3]
    assert summary["completed"] is False, "one node wrote no summary"
    assert summary["nodes"][3]["peer_id"] is None
    nodes.append(written(tmp_path, 0, 2, resumed={"source": "shard", "round": 1, "step": 3.5, "peer": None}))
    assert swarm_summary.summarise(nodes, manifest, 4, 30.0)["resumed_from_step"] == 3, "where a node did begin"
    assert swarm_summary.summarise(nodes, manifest, None, 30.0)["resumed_from_step"] is None, "a node was restarted"
    lines = swarm_summary.summary_lines(summary)
    assert lines[0] == "not completed after 30 s: 10 inner steps, 3 outer rounds"
    assert max(map(len, lines)) <= 60, "the lines fit a narrow terminal"
    assert lines[1:] == [
        "validation loss 2.5000 nats per token, perplexity 12.18",
        "2,000 tokens, 200 tokens/s while training",
    ]
    monkeypatch.setattr(NodeProcess, "exit_code", -9)
    (nodes[0].dir / "summary.json").unlink()
    lines = swarm_summary.summary_lines(swarm_summary.summarise(nodes, manifest, 4, 30.0))
    assert lines[-1] == "without 3 killed nodes: see noloco report", "not as if they had done nothing"


@pytest.mark.parametrize(
    ("evaluations", "every", "loss"),
    [
        ([], 20, None),
        ([(40, 4.0), (60, 2.0), (60, 3.0)], None, 2.5),
        ([(59, 4.0), (60, 2.0)], 20, 2.0),
        ([(39, 8.0), (40, 4.0), (21, 2.0), (20, 7.0)], 20, 14 / 3),
        ([(40, 4.0), (39, 2.0)], None, 4.0),
    ],
    ids=["none", "at the end", "one before the end", "within an interval", "without an interval"],
)
def test_an_old_evaluation_is_no_part_of_the_validation_loss(
    evaluations: list[tuple[float, float]], every: float | None, loss: float | None
) -> None:
    """A node that was paused until the others had left keeps its last one, of step 40 of 60."""
    assert swarm_summary.newest_validation(evaluations, 60, every) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("code", "state", "completed"), [(0, "finished", True), (1, "finished", False), (0, "left", False)]
)
def test_a_run_is_completed_once_every_node_has_finished_well(
    code: int, state: str, completed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {"0-0": 0, "1-0": code}
    monkeypatch.setattr(NodeProcess, "exit_code", property(lambda node: codes[node.name]))
    nodes = [written(tmp_path, stage, 0, **({"state": state} if stage else {})) for stage in (0, 1)]
    assert swarm_summary.summarise(nodes, RunManifest(stages=2), None, 1.0)["completed"] == completed


def test_the_speed_while_training_leaves_out_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `limits.hours`, a run of 14 s with 5 s of pause had a third fewer tokens/s than its report said."""
    own = {"tokens": 450, "evaluation_s": 0.0, "last_step_at": 114.0}
    turns = [[100.0, 104.0], [109.5, 115.0]], [[101.0, 105.0], [110.0, 114.5]]
    monkeypatch.setattr(NodeProcess, "exit_code", 0)
    nodes = [written(tmp_path, 0, replica, **own, training=spans) for replica, spans in enumerate(turns)]
    summary = swarm_summary.summarise(nodes, RunManifest(stages=1), None, 20.0)
    assert summary["tokens_per_s"] == pytest.approx(900 / (5.0 + 4.5))


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0),
        ([(1, 4), (2, 3), (3.5, 5)], 4),  # one of them within another
        ([(1, 4), (6, 20), (15, 30)], 3 + 4),  # two that end after the last step, one that begins after it
        ([(6, 7), (1, 4)], 1 + 3),
    ],
)
def test_time_counts_once_if_several_nodes_train(spans: list[tuple[float, float]], seconds: float) -> None:
    assert swarm_summary.covered_s(spans, 10.0) == seconds


def test_a_node_that_took_no_step_has_a_peer_id_but_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeProcess, "exit_code", 0)
    node = written(tmp_path, 0, 0, state="left", peer_id="12D3me", training=[[100, 110]], last_step_at=None, tokens=0)
    summary = swarm_summary.summarise([node], RunManifest(stages=1), None, 1.0)
    assert (summary["nodes"][0]["peer_id"], summary["tokens_per_s"], summary["final_loss"]) == ("12D3me", None, None)


def test_the_summary_of_a_run_that_has_diverged_or_not_begun_has_lines() -> None:
    """It ended in a traceback, because such a loss has no perplexity."""
    known: dict[str, Any] = {
        "completed": False,
        "wall_s": 3.0,
        "inner_steps": None,
        "outer_rounds": 0,
        "tokens": 0,
        "tokens_per_s": None,
        "nodes": [],
    }
    begun = {"validation_loss": None, "validation_perplexity": None}
    first = "not completed after 3 s: 0 inner steps, 0 outer rounds"
    assert swarm_summary.summary_lines(known | begun) == [first, "0 tokens"]
    diverged = {"validation_loss": 1234.5, "validation_perplexity": None}
    loss = "validation loss 1234.5000 nats per token, perplexity –"
    assert swarm_summary.summary_lines(known | diverged) == [first, loss, "0 tokens"]


def test_a_perplexity_that_overflows_is_none() -> None:
    assert swarm_summary.perplexity(log(7)) == pytest.approx(7)
    assert swarm_summary.perplexity(1e4) is None
    assert swarm_summary.perplexity(float("nan")) is None


def test_cpu_seconds_are_split_by_thread() -> None:
    before = cpu_seconds.CpuSeconds({7: 1.0, 8: 5.0, 9: 0.5}, 2.0)
    after = cpu_seconds.CpuSeconds({7: 2.0, 8: 9.0, 9: 1.0, 10: 0.25}, 2.5)
    assert cpu_seconds.split(7, before, after) == {"compute": 4.0, "loop": 1.0, "wire": 1.25}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_another_process_may_have_a_name_cut_within_a_character(tmp_path: Path) -> None:
    """Linux cuts names after 15 bytes."""
    program = tmp_path / ("a" * 14 + "é")
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as other:
        try:
            assert b"\xc3" in Path(f"/proc/{other.pid}/stat").read_bytes()
            assert cpu_seconds.read(os.getpid()).threads
        finally:
            other.kill()


def moment(pid: int, at: float, tokens: float, busy: float, cpu_s: dict[int, float]) -> pipeline.NodeSample:
    """A node's counters and its threads' CPU seconds; the machine was busy for 3 s per second."""
    samples: tuple[tuple[str, dict[str, str], float], ...] = (
        ("noloco_tokens_total", {}, tokens),
        ("noloco_device_seconds_total", {}, busy),
        ("noloco_idle_seconds_total", {"cause": "partner"}, at / 10),
    )
    endpoints = NodeEndpoints(f"peer-{pid}", "run", pid, (), "")
    return pipeline.NodeSample(endpoints, MetricsReading(at, samples), cpu_seconds.CpuSeconds(cpu_s, 0.0), 3 * at)


LONG = "; this takes more than 1 min 30 s"


@pytest.mark.parametrize(
    ("least_s", "as_json", "said"),
    [
        (59.0, True, ""),
        (59.0, False, "measuring a\n"),
        *((90.0, json, f"measuring a{LONG}\n") for json in (False, True)),
    ],
)
def test_a_measurement_is_announced(
    least_s: float, as_json: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    def measure(line: object) -> dict[str, float]:
        heard.append(capsys.readouterr().err)
        return {"ratio": 0.5}

    bench._report("a", measure, as_json, least_s)
    assert heard == [said]
    printed = capsys.readouterr().out
    assert printed == ('{"ratio": 0.5}\n' if as_json else "ratio: 0.5\n")


@pytest.mark.parametrize(
    ("tells", "expected"),
    [(True, r"sending, \d+ s elapsed, about .* left"), (False, r"running, \d+ s elapsed, at least \d.* left")],
)
def test_a_measurement_shows_how_far_it_is(
    tells: bool, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From what it tells, or else from how long it takes."""
    monkeypatch.setattr(progress_line, "FILE_S", 0.01)
    shown = ""

    def measure(line: ProgressLine) -> dict[str, float]:
        nonlocal shown
        if tells:
            line.tell("sending", 1e-9)
        capsys.readouterr()
        while not shown.count("\n") > 1:  # the first line may have been made before it was told
            shown += capsys.readouterr().err
        return {}

    bench._report("a", measure, False, 3600.0)
    assert re.fullmatch(expected, shown.splitlines()[1])


def test_the_bench_prints_its_figures_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    figures: dict[str, Any] = {"ratio": 2 / 3, "std": None, "stalls_s": [1 / 3, 20000 / 3], "hangs": [], "cold": {}}
    bench._report("a", lambda _: figures | {"runs": [{"seed": 0, "kinds": {"kill": 3}}]}, False)
    assert capsys.readouterr().out.splitlines() == [
        "ratio: 0.66667",
        "std: –",
        "stalls_s: 0.33333, 6,666.7",
        "hangs: –",
        "cold: –",
        "runs 0:",
        "  seed: 0",
        "  kinds:",
        "    kill: 3",
    ]


def test_the_bench_computes_its_figures_between_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "cores", lambda: 4)
    begin = {
        "0-0": moment(1, 100.0, 5000.0, 50.0, {1: 10.0, 2: 90.0}),
        "1-0": moment(5, 100.0, 9000.0, 50.0, {5: 10.0, 6: 80.0}),
    }
    end = {
        "0-0": moment(1, 110.0, 25000.0, 58.0, {1: 11.0, 2: 98.0, 3: 2.0}),
        "1-0": moment(5, 110.0, 29000.0, 56.0, {5: 12.0, 6: 87.0}),
    }
    found = pipeline.figures(begin, end)
    assert found["tokens_per_s"] == pytest.approx(2000.0), "only stage 0 counts"
    assert found["device_busy"] == pytest.approx((0.8 + 0.6) / 2)
    assert found["idle_by_cause"] == {"partner": pytest.approx(0.1)}
    shares = {"compute": 15 / 40, "loop": 3 / 40, "wire": 2 / 40, "others": 10 / 40, "idle": 10 / 40}
    assert found["core_shares"] == pytest.approx(shares)
