"""The doctor's report: findings printed in groups as they come, or all of them as one JSON object at the end."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import NolocoError, Unreachable
from noloco_p2p.humanize import plural
from noloco_p2p.io.blocking_calls import BlockingCalls
from noloco_p2p.observe import terminal
from noloco_p2p.observe.diagnosis.findings import SEVERITIES, Finding

BUSY = "stop whatever else keeps this machine or its disk busy, and try again"
"""Advice if work on this machine takes far too long."""
QUIET_S = 1.0
"""Seconds after which a step that is still running is announced."""
_INDENT = " " * 11

R = TypeVar("R")


class DoctorReport:
    """Collects the findings of one examination and prints them, with `as_json` only at the end.

    Notes about steps that take long go to standard error.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.findings: list[tuple[str, Finding]] = []
        """(group, finding), in the order of arrival."""
        self.figures: dict[str, float] = {}
        """Measured and derived values, by name; the name includes the unit."""
        self._as_json = as_json
        self._group = ""
        self._shown_group = ""

    def group(self, name: str) -> None:
        """Start a group: the heading for the findings that follow."""
        self._group = name

    def add(self, finding: Finding) -> None:
        """Add a finding to the current group, and print it unless the report is JSON."""
        self.findings.append((self._group, finding))
        if self._as_json:
            return
        if self._shown_group != self._group:
            self._shown_group = self._group
            typer.echo(typer.style(self._group, bold=True))
        severity = typer.style(f"{finding.severity:7}", fg=terminal.COLOURS[finding.severity])
        typer.echo(f"  {severity}  {finding.sentence}")
        if finding.advice:
            typer.echo(f"{_INDENT}→ {finding.advice}")

    def ok(self, name: str, sentence: str) -> None:
        """Report that `name` is fine."""
        self.add(Finding("ok", name, None, sentence, ""))

    def warning(self, name: str, sentence: str, advice: str, peer: PeerId | None = None) -> None:
        """Report that something works, but not as it should."""
        self.add(Finding("warning", name, peer, sentence, advice))

    def error(self, name: str, sentence: str, advice: str, peer: PeerId | None = None) -> None:
        """Report that something cannot work."""
        self.add(Finding("error", name, peer, sentence, advice))

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """Print what is being done if it takes longer than QUIET_S. The body must not block the event loop."""
        line = f"{_INDENT}… {doing}"
        note = asyncio.get_running_loop().call_later(QUIET_S, lambda: typer.echo(line, err=True))
        try:
            yield
        finally:
            note.cancel()

    async def attempt(
        self, name: str, doing: str, asked: Awaitable[R], advice: str, if_late: str | None = None
    ) -> R | None:
        """The result of a step that may fail; None if it failed, which is reported as an error with this advice.

        `if_late`: advice if the step only took too long (Unreachable), which is then a warning.
        """
        try:
            with self.step(doing):
                return await asked
        except NolocoError as error:
            if if_late is not None and isinstance(error, Unreachable):
                self.warning(name, str(error), if_late)
            else:
                self.error(name, str(error), advice)
        return None

    @property
    def exit_code(self) -> int:
        """0 if all is well, 1 with warnings, 2 with errors."""
        return max((SEVERITIES.index(finding.severity) for _, finding in self.findings), default=0)

    def end(self) -> int:
        """Print the JSON object, or the number of findings. Returns the exit code."""
        if self._as_json:
            findings = [{"group": group, **dataclasses.asdict(finding)} for group, finding in self.findings]
            content: dict[str, Any] = {"exit_code": self.exit_code, "findings": findings, "figures": self.figures}
            typer.echo(json.dumps(content, ensure_ascii=False, allow_nan=False))
        else:
            found = [finding.severity for _, finding in self.findings]
            bad = [plural(found.count(severity), severity) for severity in ("error", "warning")]
            typer.echo(f"{', '.join(bad)}, {found.count('ok')} ok")
        return self.exit_code


async def in_time(what: str, limit_s: float, work: Callable[[], R]) -> R:
    """Run blocking work in a thread that does not keep the process alive, unlike those of an executor.

    Raises what the work raises, and Unreachable, naming `what`, if it takes longer than `limit_s`.
    """
    doing = asyncio.get_running_loop().run_in_executor(BlockingCalls(what), work)
    try:
        return await asyncio.wait_for(doing, limit_s)
    except TimeoutError:
        raise Unreachable(f"{what} took longer than {limit_s:g} s") from None


async def or_error(asked: Awaitable[R]) -> R | NolocoError:
    """The result, or the error as a value, for use with `asyncio.gather`."""
    try:
        return await asked
    except NolocoError as error:
        return error
