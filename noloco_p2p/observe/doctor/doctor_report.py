"""What the doctor tells: findings in groups, as they come, or all of them as one JSON object."""

import asyncio
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

import typer

from noloco_p2p import humanize
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Unreachable
from noloco_p2p.observe.diagnosis.findings import SEVERITIES, Finding, Severity

COLOURS: Mapping[Severity, str] = {"ok": "green", "warning": "yellow", "error": "red"}
BUSY = "stop what else keeps this machine or its disk busy, and try again"
"""What to do when work on this machine takes much too long."""
QUIET_S = 1.0
"""What takes longer is announced."""
_INDENT = " " * 11

R = TypeVar("R")


class Telling:
    """Takes the findings of one examination. With `as_json` nothing is printed before `end`.

    Notes of what takes its time go to standard error.
    """

    def __init__(self, *, as_json: bool = False, out: TextIO | None = None) -> None:
        self.found: list[tuple[str, Finding]] = []
        """(group, finding), in the order in which they came."""
        self.figures: dict[str, float] = {}
        """What was measured or worked out from it, by name with unit."""
        self._as_json = as_json
        self._out = out or sys.stdout
        self._group = ""
        self._shown = ""

    def group(self, name: str) -> None:
        """What comes next belongs to this group."""
        self._group = name

    def tell(self, finding: Finding) -> None:
        """One finding."""
        self.found.append((self._group, finding))
        if self._as_json:
            return
        if self._shown != self._group:
            self._shown = self._group
            self._print(self._styled(self._group, bold=True))
        word = self._styled(f"{finding.severity:7}", fg=COLOURS[finding.severity])
        self._print(f"  {word}  {finding.sentence}")
        if finding.advice:
            self._print(f"{_INDENT}→ {finding.advice}")

    def ok(self, name: str, sentence: str) -> None:
        """All is well with `name`."""
        self.tell(Finding("ok", name, None, sentence, ""))

    def warning(self, name: str, sentence: str, advice: str, peer: PeerId | None = None) -> None:
        """It works, but not as it should."""
        self.tell(Finding("warning", name, peer, sentence, advice))

    def error(self, name: str, sentence: str, advice: str, peer: PeerId | None = None) -> None:
        """It cannot work."""
        self.tell(Finding("error", name, peer, sentence, advice))

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """Says what is being done when it takes more than a second. In an event loop that is free meanwhile."""
        note = asyncio.get_running_loop().call_later(QUIET_S, self._note, doing)
        try:
            yield
        finally:
            note.cancel()

    @property
    def exit_code(self) -> int:
        """0: all is well, 1: warnings, 2: errors."""
        return max((SEVERITIES.index(finding.severity) for _, finding in self.found), default=0)

    def end(self) -> int:
        """The last word; returns the exit code."""
        if self._as_json:
            findings = [{"group": group, **dataclasses.asdict(finding)} for group, finding in self.found]
            told: dict[str, Any] = {"exit_code": self.exit_code, "findings": findings, "figures": self.figures}
            self._print(json.dumps(told, ensure_ascii=False, allow_nan=False))
            return self.exit_code
        counts = {severity: sum(f.severity == severity for _, f in self.found) for severity in SEVERITIES}
        self._print(
            f"{humanize.plural(counts['error'], 'error')}, {humanize.plural(counts['warning'], 'warning')}, {counts['ok']} ok"
        )
        return self.exit_code

    def _styled(self, text: str, *, fg: str | None = None, bold: bool = False) -> str:
        return typer.style(text, fg=fg, bold=bold) if self._out.isatty() else text

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def _note(self, doing: str) -> None:
        print(f"{_INDENT}… {doing}", file=sys.stderr, flush=True)


async def in_time(what: str, seconds: float, work: Callable[[], R]) -> R:
    """Run blocking work in a thread that does not keep the process alive.

    Raises what it raises, and Unreachable, which names `what`, when it takes longer than `seconds`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def deliver(result: R | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result: R | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  it is raised again where it is waited for
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=body, name=what, daemon=True).start()
    try:
        return await asyncio.wait_for(done, seconds)
    except TimeoutError:
        raise Unreachable(f"{what} took longer than {seconds:g} s") from None
