"""`noloco top`: the whole swarm on one screen, with one sentence about it, from the statuses of its nodes."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import compress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import ConfigError, PeerError
from noloco_p2p.humanize import DASH, compact, elapsed, figure, plain, plural, short_id
from noloco_p2p.io.blocking_calls import BlockingCalls
from noloco_p2p.launch.progress_line import can_rewrite
from noloco_p2p.observe import survey, terminal
from noloco_p2p.observe.diagnosis.findings import SEVERITIES, Report, line
from noloco_p2p.observe.overview import ROUNDS, Overview, Row, overview

FINDINGS_SHOWN = 3
STAGES_SHOWN = 12
NODES_SHOWN = 200
"""Rows if the height is unknown, and some more if there are few stages; a terminal shows as many as fit."""
COLUMNS = (
    *("node", "host", "st", "state", "step", "inner", "rate", "rounds", "pwait", "B/s", "spread", "loss", "waits for"),
)
TEXTS = "node", "host", "state", "rounds", "states", "waits for"
"""The columns that are aligned on the left."""
FROM_WIDTH = {"inner": 120, "pwait": 120, "B/s": 100, "spread": 100, "host": 80, "rounds": 66, "rate": 48, "loss": 40}
FROM_WIDTH |= {"tokens/s": 36, "st": 32, "step": 32}
"""Width of the screen from which a column is shown, so that no figure is cut off; the others always are."""
HOST_CHARACTERS = 15, 24
"""Upper limits on the width of a host, on a screen without and with all columns. An IPv4 address takes up to 15."""
LARGEST = 9999.0
"""A larger spread or loss is shown as this, so that its width is bounded."""
LEGEND = {"rate": "tokens/s", "rounds": ", ".join(map("/".join, ROUNDS)), "pwait": "partner wait"}

Readings = Callable[[], Coroutine[Any, Any, list[Report]]]
"""Asks all nodes again on every call. Raises PeerError if no node answers."""


def run_top(join: Sequence[str], url: str | None, *, once: bool, as_json: bool, interval_s: float) -> None:
    """Show the swarm once, or until Ctrl-C. `join`: addresses, or `@FILE`.

    Raises ConfigError, LocalError, and PeerError if no node answers.
    """
    try:
        asyncio.run(show(join, url, once=once, as_json=as_json, interval_s=interval_s))
    except KeyboardInterrupt:
        if once or as_json:
            raise


async def show(join: Sequence[str], url: str | None, *, once: bool, as_json: bool, interval_s: float) -> None:
    """Show the swarm that the join addresses lead to, or the one that the node at the URL sees."""
    async with readings(join, url) as read:
        found = overview(await read())
        if as_json:
            print(json.dumps(found.as_json(), allow_nan=False))
        elif once or not can_rewrite(sys.stdout):
            console = terminal.console()
            console.print(render(found, None, width=console.width), soft_wrap=False)
        else:
            await _live(read, found, interval_s)


async def _live(read: Readings, found: Overview, interval_s: float) -> None:
    """Redraw every interval. While no node answers, the last view stays on the screen, with a note."""
    console = terminal.console()
    loop = asyncio.get_running_loop()
    seen_at, note = loop.time(), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            began = loop.time()
            live.update(render(found, console.size.height, note, console.width), refresh=True)
            await asyncio.sleep(max(0.0, interval_s - (loop.time() - began)))
            try:
                found, seen_at, note = overview(await read()), loop.time(), ""
            except PeerError as error:
                note = f"last update {elapsed(loop.time() - seen_at)} ago: {line(str(error))}"


# --- where the reports come from --------------------------------------------------------------------------------------


def from_url(url: str) -> Readings:
    """The swarm as seen by the node at a URL. If that node stops answering, the nodes last seen are asked directly."""
    adverts: list[Advert] = []

    async def read() -> list[Report]:
        try:
            found = await survey.by_url(url)
        except PeerError:
            found = await survey.by_adverts(adverts)
            if not any(report.status is not None for report in found):
                raise
        adverts[:] = [report.advert for report in found]
        return found

    return read


@asynccontextmanager
async def readings(join: Sequence[str], url: str | None) -> AsyncIterator[Readings]:
    """The swarm that these addresses lead to, or the one that the node at the URL sees. Raises ConfigError."""
    if bool(join) == (url is not None):
        raise ConfigError("give either --join ADDR or --url http://HOST:PORT: every node prints both when it starts")
    if url is not None:
        # A loop waits at its end for its usual executor, which may be asking a name server.
        asyncio.get_running_loop().set_default_executor(BlockingCalls("names", survey.AT_ONCE))
        yield from_url(url)
        return
    from noloco_p2p.launch.bootstrap import observing

    async with observing(join) as observer:

        async def read() -> list[Report]:
            return await survey.by_adverts(await observer.directory.peers())

        yield read


# --- the screen -------------------------------------------------------------------------------------------------------


def render(found: Overview, height: int | None, note: str = "", width: int = terminal.WIDTH) -> RenderableType:
    """The whole screen: at most `height` lines (None: unlimited) of `width` columns, the width of the console."""
    head: list[Text] = [Text(found.sentence, style=f"bold {terminal.COLOURS[found.severity]}")]
    if found.progress != found.sentence:
        head.append(Text(f"{found.name}: {found.progress}" if found.name else found.progress))
    if note:
        head.append(Text(note, style="red"))
    others = [f for f in found.findings if f.sentence != found.sentence]
    head += [Text(f"{f.severity}: {f.sentence}", style=terminal.COLOURS[f.severity]) for f in others[:FINDINGS_SHOWN]]
    if len(others) > FINDINGS_SHOWN:
        left = Counter(f.severity for f in others[FINDINGS_SHOWN:])
        head.append(Text(f"and {', '.join(plural(left[s], s) for s in reversed(SEVERITIES) if left[s])} more"))
    # Each table has a header line, at least one row, and perhaps a line that counts the others; three more lines are
    # between and below them.
    room, measure = STAGES_SHOWN + NODES_SHOWN, Console(width=width)
    while height is not None and (room := height - 7 - len(measure.render_lines(Group(*head)))) < 2 and len(head) > 1:
        head.pop()
    most = max(1, min(STAGES_SHOWN, room - 1))
    rows = max(1, room - min(len(found.stages), most))
    stages, nodes = _stages_table(found.stages, most, width), _nodes_table(found.nodes[:rows], width)
    parts: list[RenderableType] = [*head, Text(), stages, Text(), nodes]
    if len(found.nodes) > rows:
        parts.append(Text(f"and {plural(len(found.nodes) - rows, 'node')} more"))
    legend = "; ".join(f"{column}: {text}" for column, text in LEGEND.items() if FROM_WIDTH[column] <= width)
    return Group(*parts, Text(legend, style="dim"))


def _stages_table(stages: Sequence[Row], most: int, width: int) -> Table:
    rows = []
    for stage in stages[:most]:
        states = ", ".join(f"{count} {state}" for state, count in stage["states"].items()) or "none"
        rows.append((str(stage["stage"]), str(stage["replicas"]), compact(stage["tokens_per_s"]), states))
    if len(stages) > most:
        rows.append(("…", "", "", f"and {plural(len(stages) - most, 'stage')} more"))
    return _table(("stage", "replicas", "tokens/s", "states"), rows, width)


def _nodes_table(nodes: Sequence[Row], width: int) -> Table:
    table = _table(COLUMNS, [cells(node, HOST_CHARACTERS[width >= FROM_WIDTH["inner"]]) for node in nodes], width)
    for row, node in zip(table.rows, nodes, strict=True):
        row.style = None if node["answers"] else "dim"
    return table


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> Table:
    """A table of those columns that have room on a screen of this width; the last one is cut off if it has none."""
    shown = [FROM_WIDTH.get(column, 0) <= width for column in columns]
    # Text rather than markup, so that nothing a node says about itself is interpreted.
    texts = ([Text(cell, no_wrap=True, overflow="ellipsis") for cell in compress(row, shown)] for row in rows)
    table = terminal.plain_table(compress(columns, shown), TEXTS, texts)
    # On a narrow screen, rich shrinks wrapping columns first. So only this one may wrap; its text is cut off instead.
    table.columns[-1].no_wrap = False
    return table


def cells(node: Row, host_characters: int) -> tuple[str, ...]:
    """A node's row, in the order of COLUMNS."""
    stage, host = node["stage"], plain(node["host"] or DASH, host_characters)
    place = (short_id(node["peer"]), host, DASH if stage is None else str(stage), line(node["state"]))
    if not node["answers"]:
        return *place, *[DASH] * (len(COLUMNS) - 5), f"silent: {line(node['failure'])}"
    wait, results = node["waits_for"], ROUNDS[any(map(node["rounds"].get, ("all", "some")))]
    return (
        *place,
        _whole(node["step"]),
        _whole(node["inner_steps"]),
        compact(node["tokens_per_s"]),
        "/".join(compact(node["rounds"].get(result)) for result in results),
        _short(node["partner_wait_s"]),
        compact(node["bytes_per_s"]),
        DASH if node["replica_std"] is None else figure(min(node["replica_std"], LARGEST), 2),
        DASH if node["loss"] is None else f"{min(node['loss'], LARGEST):.2f}",
        "" if wait is None else line(f"{_short(wait['since_s'])} {short_id(wait['whom'])}: {wait['what']}"),
    )


def _whole(value: float) -> str:
    """A number without decimals; written compactly from a million on."""
    return f"{int(value)}" if abs(value) < 1e6 else compact(value)


def _short(seconds: float) -> str:
    return elapsed(seconds).replace(" ", "")
