"""The results of `noloco bench links` as a page with a table and a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noloco_p2p.io.durable_files import writing
from noloco_p2p.lab.experiments.results import markdown
from noloco_p2p.lab.experiments.spec import Block, Table
from noloco_p2p.observe.plotting.plots import Curve, Plot, save
from noloco_p2p.observe.plotting.svg import LineStyle

PAGE = "report.md"
STYLES: dict[str, LineStyle] = {"real": "points", "simulated": "line"}
DESCRIPTION = (
    "Real processes, {nodes}, each behind an emulated line, and the simulator with their device seconds. Bytes per"
    " token are those of the tensors that all nodes sent; *on the line* is what the relay carried for them."
)


def add_gains(cases: Sequence[dict[str, Any]]) -> None:
    """Add `over_bfloat16` to every case of another codec if bfloat16 was measured on the same line."""
    plain = {(case["mbit_per_s"], case["delay_ms"]): case for case in cases if case["codec"] == "bfloat16"}
    for case in cases:
        base = plain.get((case["mbit_per_s"], case["delay_ms"]))
        if base is not None and base is not case:
            case["over_bfloat16"] = {
                side: case[side]["tokens"] / base[side]["tokens"] for side in ("real", "simulated")
            }


def row_text(case: Mapping[str, Any]) -> str:
    """A case in one line."""
    name = f"{case['mbit_per_s']:g} Mbit/s, {case['delay_ms']:g} ms, {case['codec']}"
    real, simulated = case["real"]["tokens"], case["simulated"]["tokens"]
    return f"{name}: {real:,.0f} tokens/s, simulated {simulated:,.0f}; line use {case['real']['line_use']:.0%}"


COLUMNS = (
    "Mbit/s", "ms", "codec", "tokens/s", "simulated", "off", "bytes/token", "simulated", "off", "on the line",
    "line used", "over bfloat16",
)  # fmt: skip


def write_page(out: Path, nodes: str, cases: Sequence[Mapping[str, Any]]) -> None:
    """Write the table and the plot to a directory, which is created if needed. Raises LocalError if that fails."""
    rows = []
    for case in cases:
        real, simulated = case["real"], case["simulated"]
        cells = [case["mbit_per_s"], case["delay_ms"], case["codec"]]
        for name in ("tokens", "bytes"):
            cells += [real[name], simulated[name], f"{case[f'{name}_off']:+.1%}"]
        gain = case.get("over_bfloat16", {}).get("real")
        rows.append([*cells, real["line_bytes"], f"{real['line_use']:.0%}", gain])
    curves = []
    for rate, codec in sorted({(case["mbit_per_s"], case["codec"]) for case in cases}):
        of = [case for case in cases if (case["mbit_per_s"], case["codec"]) == (rate, codec)]
        for side in ("real", "simulated"):
            points = [(case["delay_ms"], case[side]["tokens"]) for case in of]
            curves.append(Curve(f"{rate:g} Mbit/s, {codec}, {side}", points, STYLES[side]))
    plot = Plot("tokens", f"{nodes} nodes behind lines", ("ms one way", "tokens/s"), curves, from_zero=True)
    blocks: list[Block] = ["# links", Table(COLUMNS, rows, DESCRIPTION.format(nodes=nodes)), plot]
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        save(plot, out)
        (out / PAGE).write_text(markdown(blocks), "utf-8")
