"""How a command ends: by a signal, or with one line about what the user can fix."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import uvloop

from noloco_p2p.cli.exits import ended_by_signals, run_app
from noloco_p2p.errors import ConfigError


def _os_error(number: int, *filename: str) -> OSError:
    return OSError(number, os.strerror(number), *filename)


def _caused_by(interrupt: BaseException) -> RuntimeError:
    error = RuntimeError("Error calling __set_name__ on 'Field' instance 'reply' in 'Activation'")
    error.__cause__ = interrupt
    return error


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        # noloco report called the unreadable folder of a node a bug.
        (_os_error(errno.EACCES, "run/events.jsonl"), 2, "error: run/events.jsonl: Permission denied\n"),
        (_os_error(errno.ENAMETOOLONG, "a: 1\nb: 2"), 2, "error: a: 1 b: 2: File name too long\n"),
        (
            _os_error(errno.EACCES),
            1,
            "error: PermissionError: [Errno 13] Permission denied (a bug; --debug shows where)\n",
        ),
        (
            _os_error(errno.ENOENT, "x"),
            1,
            "error: FileNotFoundError: [Errno 2] No such file or directory: 'x' (a bug; ",
        ),
        # As os.getcwd raises it; noloco swarm and noloco sim called it a bug.
        (_os_error(errno.ENOENT), 2, "error: the current directory no longer exists: change to another one\n"),
        # As tempfile raises it: seven commands said that the current directory was gone.
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            2,
            "error: No usable temporary directory found in ['/tmp']: name one in TMPDIR\n",
        ),
        (_os_error(errno.ENOSPC, "x"), 2, "error: x cannot be written: No space left on device; free some space\n"),
        (_os_error(errno.EDQUOT), 2, "error: the output cannot be written: Disk quota exceeded; free some space\n"),
        # As torch raises it; noloco finetune, eval and generate called it a bug.
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."),
            2,
            "error: not enough memory (RuntimeError: CUDA out of memory. Tried to allocate 2 GiB.): use a smaller ",
        ),
        (MemoryError(), 2, "error: not enough memory (MemoryError: ): use a smaller "),
        (ConfigError("it is\x1b wrong\nand long"), 2, "error: it is  wrong\nand long\n"),
        (typer.BadParameter("it is\nwrong."), 2, "error: Invalid value: it is wrong; see noloco --help\n"),
        (typer.BadParameter("wrong. Is it?"), 2, "error: Invalid value: wrong. Is it? See noloco --help\n"),
        (typer.Exit(3), 3, ""),
        (typer.Abort(), 130, ""),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(7), 7, ""),
        (BrokenPipeError(), 141, ""),
        # As Python 3.11 raises it if a signal arrives while a class is made: during imports, Ctrl-C was called a bug.
        (_caused_by(KeyboardInterrupt()), 130, ""),
        (_caused_by(SystemExit(0)), 0, ""),
    ],
    ids=repr,
)
def test_a_command_ends_with_a_code_and_at_most_an_error_without_traceback(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def fails() -> None:
        raise raised

    monkeypatch.setattr("sys.argv", ["noloco"])
    with pytest.raises(SystemExit) as end:
        run_app(app, "noloco")
    shown = capsys.readouterr()
    assert (end.value.code, shown.out) == (code, "")
    assert shown.err[: len(said) or None] == said


@pytest.mark.parametrize(("columns", "widest"), [(200, 78), (60, 58), (40, 38)])
def test_the_help_is_as_wide_as_the_terminal(
    columns: int, widest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On less than 52 columns, the terminal broke its lines in the middle of words."""
    app = typer.Typer(rich_markup_mode=None)

    @app.command(help="word " * 60)
    def rests() -> None: ...

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.argv", ["noloco", "--help"])
    with pytest.raises(SystemExit):
        run_app(app, "noloco")
    assert widest - 5 <= max(map(len, capsys.readouterr().out.splitlines())) <= widest


@pytest.mark.parametrize("raised", [ConfigError("it is wrong"), ValueError("odd")])
def test_with_debug_an_error_is_raised(raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()

    @app.command()
    def fails() -> None:
        raise raised

    monkeypatch.setattr("sys.argv", ["noloco", "--debug"])
    with pytest.raises(type(raised), match=str(raised)):
        run_app(app, "noloco")


def started(command: str, instead: str, folder: Path, **environment: str) -> tuple[int, str, str]:
    """Exit code and output of an installed command in which the first large import runs this program instead."""
    (folder / "typer.py").write_text(instead)
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, function = pyproject["project"]["scripts"][command].partition(":")
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from {module} import {function}; {function}()"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=inherited | environment
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["noloco", "noloco-node"])
def test_an_interrupt_during_the_imports_ends_a_command_quietly(command: str, tmp_path: Path) -> None:
    """It printed the traceback of an import."""
    interrupted = "from signal import *\nsignal(SIGINT, default_int_handler)\nraise_signal(SIGINT)\n"  # may be ignored
    assert started(command, interrupted, tmp_path) == (130, "", "")


@pytest.mark.parametrize("command", ["noloco", "noloco-node"])
def test_threads_of_torch_do_not_spin_for_long_unless_the_user_says_so(command: str, tmp_path: Path) -> None:
    """Beside a program that used one of two cores, a node's threads took the other from each other."""
    shown = "import os, sys\nprint(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\nsys.exit()\n"
    assert started(command, shown, tmp_path) == (0, "3000 False\n", "")
    assert started(command, shown, tmp_path, GOMP_SPINCOUNT="7") == (0, "7 False\n", "")
    assert started(command, shown, tmp_path, OMP_WAIT_POLICY="ACTIVE") == (0, "None False\n", "")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_signal_cancels_the_main_task_and_is_raised_nowhere(run: Callable[..., Any]) -> None:
    """It was raised in whatever ran, such as a request that gRPC served, and a measurement ended with its traceback.

    Then all tasks were cancelled at once, and noloco track waited for ever for a process that one of them had started.
    """
    seen: list[object] = []

    async def help_to_the_end() -> None:
        signal.raise_signal(signal.SIGTERM)
        seen.append("goes on")
        await asyncio.Event().wait()

    async def main() -> None:
        helper = asyncio.create_task(help_to_the_end())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append(("cancelled", helper.cancelling()))
            raise

    with pytest.raises(SystemExit) as end, ended_by_signals():
        run(main())
    assert end.value.code == 128 + signal.SIGTERM
    assert seen == ["goes on", ("cancelled", 0)]


def test_a_second_signal_ends_a_command_whose_tasks_go_on() -> None:
    async def stubborn() -> None:
        tasks.append(asyncio.current_task())
        signal.raise_signal(signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            signal.raise_signal(signal.SIGTERM)

    tasks = list[asyncio.Task[None] | None]()
    with pytest.raises(SystemExit), ended_by_signals():
        asyncio.run(stubborn())
    assert tasks[0] is not None
    assert isinstance(tasks[0].exception(), SystemExit)
