"""How a command ends: one line and exit code 2 for what the user can fix, a traceback only with --debug."""

import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EACCES, EDQUOT, ENAMETOOLONG, ENOSPC, EPERM
from itertools import pairwise
from shutil import get_terminal_size
from types import FrameType
from typing import NoReturn

import typer

from noloco_p2p.errors import ConfigError, LocalError, NolocoError
from noloco_p2p.humanize import plain
from noloco_p2p.launch.stop_signals import handled

DEBUG = "--debug"
EMPTY_VALUE = re.compile(r"--[a-z-]+=")
"""An option with an empty value in one word."""
USER_ERROR, UNEXPECTED, INTERRUPTED = 2, 1, 130
FULL = ENOSPC, EDQUOT
WRONG_NAME = EACCES, EPERM, ENAMETOOLONG
"""Errors of a file that the user can fix by naming another one."""
LACKING = "strict", "surrogateescape", "backslashreplace"
"""Python's error handlers for characters that an encoding lacks: of stdout, of stdout in the C locale, of stderr."""


def run_app(app: typer.Typer, name: str) -> NoReturn:
    """Run a command line, and then exit the process. `--debug` may appear anywhere on it."""
    # If a standard stream is closed, some other file would get its number.
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", errors=LACKING[1])
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors=LACKING[1])
    arguments = sys.argv[1:]
    debug = DEBUG in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in LACKING:
            # A locale may lack characters that we print. On a terminal, escapes would not fit: they are wider.
            stream.reconfigure(errors="replace" if stream.isatty() else "backslashreplace")
    try:
        _refuse_empty((name, *arguments))
        code = _code_of(app, name, [a for a in arguments if a != DEBUG])
        print(end="", flush=True)
    except NolocoError as error:
        if debug:
            raise
        fail(str(error), USER_ERROR)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except (SystemExit, BrokenPipeError) as end:
        # Typer turns a broken pipe into exit code 1, which has other meanings here.
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        finish_output()
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:  # the last resort: a bug ends in one line, or a traceback with --debug
        # Python 3.11 wraps what a signal raises while a class names its fields, as during an import.
        if isinstance(wrapped := error.__cause__, KeyboardInterrupt | SystemExit):
            sys.exit(getattr(wrapped, "code", INTERRUPTED))
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in FULL:
            fail(f"{error.filename or 'the output'} cannot be written: {error.strerror}; free some space", USER_ERROR)
        if isinstance(error, OSError) and error.errno in WRONG_NAME and error.filename is not None:
            fail(f"{plain(str(error.filename), 300)}: {error.strerror}", USER_ERROR)
        if isinstance(error, FileNotFoundError) and error.filename is None:  # of tempfile, or of os.getcwd
            gone = "the current directory no longer exists: change to another one"
            fail(f"{error.strerror}: name one in TMPDIR" if "temporary" in str(error) else gone, USER_ERROR)
        from noloco_p2p.compute.device import as_local  # its settings take time to import

        what = f"{type(error).__name__}: {error}"
        if isinstance(as_local(error), LocalError):
            fail(f"not enough memory ({what}): use a smaller batch or model, or another device", USER_ERROR)
        fail(f"{what} (a bug; --debug shows where)", UNEXPECTED)
    sys.exit(code)


def _refuse_empty(words: Sequence[str]) -> None:
    """Raise ConfigError for an empty argument, such as an unset variable of a script: as a path it would be the current
    directory. Only a prompt may be empty."""
    for before, word in pairwise(words):
        option = before if not word else word[:-1] if EMPTY_VALUE.fullmatch(word) else None
        if option is not None and "--prompt" not in (option, before):
            raise ConfigError(f"{option} '' is empty: give a value, or leave it out")


def _code_of(app: typer.Typer, name: str, arguments: list[str]) -> int:
    """Run the command that the arguments name. Returns its exit code; ends the process if the arguments are wrong."""
    # Typer's own copy of click has no public name; UsageError is the base class of BadParameter.
    usage_error: type[Exception] = typer.BadParameter.__base__ or typer.BadParameter
    width = min(max(get_terminal_size().columns, 20), 80) - 2  # typer's own least width is 50
    try:
        code = app(prog_name=name, args=arguments, standalone_mode=False, terminal_width=width)
    except usage_error as error:
        text = str(getattr(error, "format_message", error.__str__)())
        if text.startswith("Usage:"):  # a command group without a command: this is its help
            print(text)
            return 0
        place = getattr(getattr(error, "ctx", None), "command_path", name)
        line = " ".join(text.split()).rstrip(".").replace("Value error, ", "")
        fail(f"{line}{' See' if line.endswith('?') else '; see'} {place} --help", USER_ERROR)
    return code if isinstance(code, int) else 0


def say(line: str) -> None:
    """Print a line of a command whose result is on disk: nothing is lost if the line cannot be written."""
    with suppress(OSError):
        print(line, flush=True)


def finish_output() -> None:
    """Write what stdout and stderr still hold, and discard what cannot be written: the interpreter would try again at
    its end, and exit with an error of its own."""
    for stream, number in (sys.stdout, 1), (sys.stderr, 2):
        try:
            print(end="", file=stream, flush=True)  # unlike stream.flush(), also if the stream is closed
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the body of the `with` as Ctrl-C does, so that no process and no half-written
    directory is left behind. A second one ends it at once.
    """
    asked: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        on_interrupt = signal.getsignal(signal.SIGINT)
        if len(asked) == 1 and callable(on_interrupt):
            # That of asyncio cancels the main task, which can clean up. An exception raised here would end whatever
            # task is running, and then all others at once, including those that the clean-up needs.
            on_interrupt(signal.SIGINT, frame)
        else:
            raise SystemExit(128 + number)

    with handled(signal.default_int_handler, signal.SIGINT), handled(leave, signal.SIGTERM, signal.SIGHUP):
        try:
            yield
        finally:
            if asked:
                sys.exit(128 + asked[0])


def fail(message: str, code: int) -> NoReturn:
    """Exit with an error message on stderr, if it can be written there."""
    with suppress(OSError):
        print("\n".join(map(plain, f"error: {message}".split("\n"))), file=sys.stderr)
    finish_output()
    sys.exit(code)
