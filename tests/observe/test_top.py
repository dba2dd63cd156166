"""`noloco top`: its contents, its width, and how it ends; the nodes are invented and served over HTTP."""

import asyncio
import io
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemons import daemon, run
from diagnosed import (
    advert,
    gradient_of,
    peer,
    silent,
    swarm,
    wait,
    waiting,
    why,
    with_advert,
    with_figures,
)
from rich.console import Console
from served_nodes import served_nodes

from noloco_p2p.cli import main
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import NO_STAGE, Advert
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.join_handshake import serve_manifest
from noloco_p2p.launch import bootstrap
from noloco_p2p.observe import terminal, top
from noloco_p2p.observe.diagnosis.findings import Report
from noloco_p2p.observe.overview import Overview, overview


def _drawn(found: Overview, height: int | None = None, note: str = "", width: int = terminal.WIDTH) -> list[str]:
    console = Console(width=width, record=True, color_system=None, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(top.render(found, height, note, width))
    return [drawn.rstrip() for drawn in console.export_text().splitlines()]


def _overview(reports: dict[str, Report]) -> Overview:
    return overview(list(reports.values()))


# --- contents -------------------------------------------------------------------------------------------------------


def test_a_healthy_swarm_is_shown_as_one_sentence_stages_and_nodes() -> None:
    found = _overview(swarm())
    assert found.sentence == found.progress
    assert found.severity == "ok"
    drawn = _drawn(found, width=120)
    assert drawn[0] == "training: step 1,234 of 5,000 (25 %), 9 nodes, 6.15k tokens/s, loss 2.31"
    assert drawn[2:4] == ["stage replicas tokens/s states", "    0        3    6.15k 3 training"]
    assert drawn[7].split() == [*top.COLUMNS[:-1], "waits", "for"]
    rows = [row.split() for row in drawn[8:17]]
    assert [(row[0], row[2]) for row in rows] == [(f"12D3…xS{s}R{r}", str(s)) for s in range(3) for r in range(3)]
    assert rows[0][:2] == ["12D3…xS0R0", "192.0.2.1"]
    assert rows[0][2:] == ["0", "training", "1234", "1230", "2.05k", "11/0/0/1", "0.0s", "0", "–", "2.31"]
    assert rows[8][6] == "2.05k", "a later stage is measured in the same way, not by the speed of its device"


def test_rounds_with_all_replicas_are_labelled() -> None:
    nodes = {name: with_figures(one, rounds={"all": 11, "some": 2, "alone": 1}) for name, one in swarm(1, 1).items()}
    drawn = _drawn(_overview(nodes))
    (row,) = (row.split() for row in drawn if row.startswith("12D3…"))
    assert "11/2/1" in row
    assert "all/some/alone" in " ".join(drawn[-2:])


def test_only_nodes_that_train_count_towards_the_rate_of_a_stage() -> None:
    """A node that has just paused still reports its rate of the last seconds, and the first line does not count it."""
    nodes = swarm()
    nodes["S0R0"] = with_advert(nodes["S0R0"], state="paused")
    found = _overview(nodes)
    assert [stage["tokens_per_s"] for stage in found.stages] == [4100.0, 6150.0, 6150.0]
    assert "4.1k tokens/s" in found.progress


def test_stages_without_nodes_and_nodes_without_a_stage_are_shown() -> None:
    nodes = swarm(3, 2)
    del nodes["S1R0"], nodes["S1R1"]
    nodes["S0R1"] = with_advert(nodes["S0R1"], state="paused")
    nodes["S2R0"] = with_advert(nodes["S2R0"], stage=NO_STAGE, state="starting")
    nodes["S2R1"] = replace(nodes["S2R1"], clock_ahead_s=0.5)
    found = _overview(nodes)
    assert [(node["peer"], node["stage"], node["state"], node["clock_ahead_s"]) for node in found.nodes] == [
        (peer(0, 0), 0, "training", nodes["S0R0"].clock_ahead_s),
        (peer(0, 1), 0, "paused", nodes["S0R1"].clock_ahead_s),
        (peer(2, 1), 2, "training", 0.5),
        (peer(2, 0), None, "starting", nodes["S2R0"].clock_ahead_s),
    ]
    assert [(stage["stage"], stage["replicas"], stage["states"]) for stage in found.stages] == [
        (0, 2, {"paused": 1, "training": 1}),
        (1, 0, {}),
        (2, 1, {"training": 1}),
    ]
    drawn = [row.split() for row in _drawn(found)]
    assert ["0", "2", "2.05k", "1", "paused,", "1", "training"] in drawn
    assert ["1", "0", "0", "none"] in drawn
    silents = _overview({name: silent(report) for name, report in swarm(2, 1).items()})
    assert (silents.name, [stage["states"] for stage in silents.stages]) == ("", [{"silent": 1}, {"silent": 1}])
    assert "no status of 2 nodes" in _drawn(silents), "without the name of the run"


def test_a_swarm_that_trains_is_well_even_if_a_finding_warns_of_something() -> None:
    found = _overview(swarm(2, 1))
    assert [finding.severity for finding in found.findings] == ["warning"]
    assert (found.sentence, found.severity) == (found.progress, "ok")


def test_narrow_screens_keep_the_columns_that_say_most() -> None:
    heads = {
        width: next(row for row in _drawn(_overview(swarm(2, 1)), width=width) if row.startswith("node ")).split()
        for width in (120, 119, 100, 99, 80, 79)
    }
    assert heads[120] == [*top.COLUMNS[:-1], "waits", "for"]
    assert heads[119] == heads[100] == [name for name in heads[120] if name not in ("inner", "pwait")]
    assert heads[99] == heads[80] == [name for name in heads[100] if name not in ("B/s", "spread")]
    assert heads[79] == [name for name in heads[80] if name != "host"]
    legends = ["pwait: partner wait" in "\n".join(_drawn(_overview(swarm(2, 1)), width=width)) for width in (120, 119)]
    assert legends == [True, False]
    nodes = {"S0R0": waiting(swarm(2, 1)["S0R0"], *gradient_of(1, 0, 5, 20.0)), "S1R0": swarm(2, 1)["S1R0"]}
    row = next(row for row in _drawn(_overview(nodes), width=80) if row.startswith("12D3…xS0R0"))
    assert row.endswith("20s 12D3…xS1R0: gradi…")


@pytest.mark.parametrize(
    ("std", "shown"), [(0.0, "0"), (1.234e-5, "0.000012"), (0.0123, "0.012"), (1.234e-9, "1.2e-09"), (1e300, "9,999")]
)
def test_the_spread_is_written_as_in_the_report(std: float, shown: str) -> None:
    nodes = {"S0R0": with_figures(swarm(1, 1)["S0R0"], replica_std=std)}
    drawn = _drawn(_overview(nodes), width=120)
    (row,) = (row.split() for row in drawn if row.startswith("12D3…"))
    assert row[top.COLUMNS.index("spread")] == shown


def test_the_host_of_each_node_is_shown() -> None:
    nodes = swarm(2, 2)
    nodes["S0R1"] = with_advert(nodes["S0R1"], metrics="")
    nodes["S1R0"] = silent(with_advert(nodes["S1R0"], metrics=f"http://{'long.' * 9}org:9100/metrics"), "refused")
    drawn = _drawn(_overview(nodes), width=120)
    rows = [row.split() for row in drawn if row.startswith("12D3…")]
    assert [row[1] for row in rows] == ["192.0.2.1", "–", "long.long.long.long.lon…", "192.0.2.2"]
    assert drawn[-6].split()[:3] == ["node", "host", "st"]
    assert [len(row) for row in rows[:2]] == [12, 12], "no other column is lost"
    rows = [row.split() for row in _drawn(_overview(nodes), width=80) if row.startswith("12D3…")]
    assert [row[1] for row in rows] == ["192.0.2.1", "–", "long.long.long…", "192.0.2.2"]


def test_findings_are_shown_on_top_in_their_colour() -> None:
    nodes = swarm()
    nodes["S1R0"] = with_figures(nodes["S1R0"], loop_silent_s=42.0)
    found = _overview(nodes)
    assert found.severity == "error"
    assert found.sentence.endswith("its event loop has been stuck for 42 s")
    console = Console(width=120, force_terminal=True, color_system="standard", record=True)
    with console.capture() as captured:
        console.print(top.render(found, None))
    first, second = captured.get().splitlines()[:2]
    assert first.startswith("\x1b[1;31mnode"), "bold and red"
    assert second.startswith("tiny: training: step 1,234"), "the progress is still shown"


def test_at_most_three_findings_are_shown_and_the_others_counted() -> None:
    nodes = {name: replace(r, clock_ahead_s=120.0 * index) for index, (name, r) in enumerate(swarm().items())}
    nodes["S0R0"] = with_advert(nodes["S0R0"], state="paused")
    found = _overview(nodes)
    drawn = _drawn(found)
    assert sum(row.startswith("error: ") for row in drawn) == top.FINDINGS_SHOWN
    assert f"and {len(found.findings) - 5} errors, 1 ok more" in drawn


def test_a_node_is_shown_with_what_it_waits_for() -> None:
    nodes = swarm()
    nodes["S0R0"] = waiting(nodes["S0R0"], *gradient_of(1, 1, 5, 20.0), wait("word", Resource.SWARM, 99.0, idle=True))
    nodes["S1R0"] = silent(nodes["S1R0"], "Connection refused")
    drawn = _drawn(_overview(nodes))
    assert next(row for row in drawn if row.startswith("12D3…xS0R0")).endswith("20s 12D3…xS1R1: gradient")
    nodes["S1R0"] = silent(nodes["S1R0"], "Connection refused" * 4)
    cut = next(row for row in _drawn(_overview(nodes)) if row.startswith("12D3…xS1R0"))
    assert len(cut) == terminal.WIDTH
    assert cut.split()[2:5] == ["1", "training", "–"], "only the last column is cut"
    row = next(row for row in drawn if row.startswith("12D3…xS1R0"))
    assert row.split()[2:5] == ["1", "training", "–"]
    assert row.endswith("silent: Connection refused")
    assert "    1        3     4.1k 1 silent, 2 training" in drawn


@pytest.mark.parametrize("width", [80, 66, 60, 48, 40, 32, 20])
def test_no_figure_is_cut_off_on_a_narrow_screen(width: int) -> None:
    """On 40 columns, a loss of 2.70 was `2.…`, and the legend explained what was not there."""
    rounds = {"partner": 1234, "stale": 123, "other": 2, "alone": 3}
    nodes = {name: with_advert(with_figures(one, rounds=rounds), step=123_456.0) for name, one in swarm(2, 1).items()}
    drawn = _drawn(_overview(nodes), width=width)
    place = {0: "training", 32: "123456", 48: "2.05k", 66: "1.23k/123/2/3", 40: "2.31"}
    figures = [text for least, text in place.items() if least <= width]
    row = next(row for row in drawn if row.startswith("12D3…xS0R0")).split()
    assert row[row.index("training") :][: len(figures)] == figures
    legend = " ".join(" ".join(drawn).split())
    assert ("rate: tokens/s" in legend, "rounds: partner" in legend) == (width >= 48, width >= 66)
    [stage] = [row.split()[:3] for row in drawn if row.split()[:2] == ["0", "1"]]
    assert stage == ["0", "1", "2.05k" if width >= 36 else "1"]


@pytest.mark.parametrize("width", [120, 100, 60, 30])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    nodes = swarm(stages=40, replicas=2)
    nodes["S0R0"] = with_advert(
        with_figures(nodes["S0R0"], tokens_per_s=9e18, loss=9e18, replica_std=9e18, bytes_per_s=9e18),
        step=9e18,
        microbatches_per_s=9e18,
        state="x" * 200,
    )
    nodes["S1R0"] = silent(nodes["S1R0"], "[bold]no[/bold] \x1b[2J" * 40)
    for height in (None, 24):
        drawn = _drawn(_overview(nodes), height, note="y" * 300, width=width)
        assert max(map(len, drawn)) <= width
        assert not any("\x1b" in row for row in drawn)


def test_rows_are_bounded_by_the_height_and_the_others_counted() -> None:
    found = _overview(swarm(stages=2, replicas=30))
    for height in (24, 40):
        drawn = _drawn(found, height)
        assert len(drawn) <= height
        assert sum(row.startswith("12D3…") for row in drawn) > height // 2
    shown = sum(row.startswith("12D3…") for row in drawn)
    assert f"and {60 - shown} nodes more" in drawn
    many = _drawn(_overview(swarm(stages=40, replicas=1)), 24)
    assert "    … " in "\n".join(many)
    assert "and 28 stages more" in "\n".join(many)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("height", [20, 24])
def test_the_screen_fits_a_small_terminal_however_much_there_is_to_say(height: int, width: int) -> None:
    """A hundred nodes of ten stages, eight of them silent: the sentences about these take three lines each."""
    nodes = swarm(stages=10, replicas=10)
    for name in [*nodes][:8]:
        nodes[name] = silent(nodes[name], "no answer from http://192.0.2.1:9100 within 2 s")
    drawn = _drawn(_overview(nodes), height, note="last update 3 s ago: no node answers", width=width)
    assert len(drawn) <= height
    shown = sum(row.startswith("12D3…") for row in drawn)
    assert shown
    assert f"and {100 - shown} nodes more" in drawn
    assert drawn[-1].startswith("rate: ")


def test_json_output_is_complete() -> None:
    nodes = swarm(2, 2)
    nodes["S0R0"] = with_figures(nodes["S0R0"], loss=None)
    nodes["S1R0"] = silent(waiting(nodes["S1R0"]))
    nodes["S1R1"] = waiting(nodes["S1R1"], wait("backward", Resource.DEVICE, 3.0, 60.0, why(7)))
    shown = json.loads(json.dumps(_overview(nodes).as_json(), allow_nan=False))
    assert set(shown) == {"name", "sentence", "severity", "progress", "findings", "stages", "nodes"}
    assert [node["peer"] for node in shown["nodes"]] == [peer(s, r) for s in range(2) for r in range(2)]
    assert shown["nodes"][0]["loss"] is None
    assert shown["nodes"][2]["failure"] == "Connection refused"
    assert shown["nodes"][3]["waits_for"] == wait_json("backward", "device", 3.0, 60.0, f"microbatch 7 of {peer(0, 0)}")
    assert shown["stages"][1] == {
        "stage": 1,
        "replicas": 2,
        "states": {"silent": 1, "training": 1},
        "tokens_per_s": 2050.0,
    }
    assert {finding["name"] for finding in shown["findings"]} == {"unreachable"}


def wait_json(what: str, whom: str, since_s: float, deadline_s: float, why: str) -> dict[str, Any]:
    """A wait, as in the JSON output."""
    return {"what": what, "whom": whom, "since_s": since_s, "deadline_s": deadline_s, "why": why, "idle": False}


# --- the command ----------------------------------------------------------------------------------------------------


def _run(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """(exit code, stdout, stderr) of `noloco top`."""
    monkeypatch.setattr("sys.argv", ["noloco", "top", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_one_view_by_url_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with served_nodes(swarm(2, 2)) as served:
        url = f"{served.urls['S1R1']}/metrics"
        code, out, err = _run(["--url", url, "--once"], monkeypatch, capsys)
        assert (code, err) == (0, "")
        assert out.startswith("training: step 1,234 of 5,000 (25 %), 4 nodes, 4.1k tokens/s")
        code, piped, _ = _run(["--url", url], monkeypatch, capsys)
        assert piped == out, "without a terminal the output is printed once"
        code, out, err = _run(["--url", url, "--json"], monkeypatch, capsys)
        assert (code, err) == (0, "")
        assert len(json.loads(out)["nodes"]) == 4


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "give either --join ADDR or --url http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1", "--join", "x"], "give either --join ADDR or --url"),
        (["--url", "http://127.0.0.1:1"], "no answer from http://127.0.0.1:1: Connection refused: give the metrics"),
        (["--url", "ftp://127.0.0.1:1"], "malformed address 'ftp://127.0.0.1:1'"),
        (["--join", "127.0.0.1:1"], "malformed join address '127.0.0.1:1'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(arguments, monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {shown}")
    assert err.count("\n") == 1


def test_one_view_by_join_address_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real libp2p daemon and directory; the node's answer over HTTP is invented."""
    manifest = RunManifest()

    async def test() -> None:
        async with AsyncExitStack() as closing:
            libp2p = await closing.enter_async_context(daemon(tmp_path))
            directory = await HivemindDirectory.open(
                libp2p, run_id=manifest.run_id, stages=manifest.stages, known_path=tmp_path / "known.json"
            )
            closing.push_async_callback(directory.close)
            await serve_manifest(libp2p, manifest.canonical_json())
            mine = with_advert(swarm(1, 1)["S0R0"], peer_id=libp2p.peer_id, run_id=manifest.run_id)
            served = closing.enter_context(served_nodes({"S0R0": mine}))
            assert mine.advert is not None
            await directory.announce(replace(mine.advert, metrics=f"{served.urls['S0R0']}/metrics"), 30.0)
            join_file = tmp_path / "address"
            join_file.write_text(f"{libp2p.join_addresses[0]}\n")
            await top.show((f"@{join_file}",), None, once=True, as_json=True, interval_s=2.0)
        shown = json.loads(capsys.readouterr().out)
        assert [(node["peer"], node["answers"]) for node in shown["nodes"]] == [(libp2p.peer_id, True)]
        assert shown["sentence"].startswith("training: step 1,234 of 5,000 (25 %), 1 node")

    run(test)


def test_when_the_node_at_the_url_leaves_the_others_are_still_watched() -> None:
    with served_nodes(swarm(2, 2)) as served:
        read, began = top.from_url(served.urls["S0R0"]), time.monotonic()
        assert all(report.status is not None for report in asyncio.run(read()))
        served.stop("S0R0")
        found = {report.peer: report for report in asyncio.run(read())}
        assert [at for at, report in found.items() if report.status is None] == [peer(0, 0)]
        assert found[peer(0, 0)].age_s <= time.monotonic() - began, "its last answer is recent"
        for name in ("S0R1", "S1R0", "S1R1"):
            served.stop(name)
        with pytest.raises(Unreachable):
            asyncio.run(read())


def test_the_directory_is_read_again_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Directory:
        readings = 0

        async def peers(self) -> list[Advert]:
            self.readings += 1
            return [replace(advert(0, replica), metrics="") for replica in range(self.readings)]

    monkeypatch.setattr(bootstrap, "observing", lambda _: nullcontext(SimpleNamespace(directory=Directory())))

    async def twice() -> list[int]:
        async with top.readings(["ADDR"], None) as read:
            return [len(await read()), len(await read())]

    assert asyncio.run(twice()) == [1, 2]


@pytest.mark.parametrize("live", [True, False])
def test_ctrl_c_ends_the_live_view_well_and_anything_else_as_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "show", interrupted)
    for once, as_json in [(False, False)] if live else [(True, False), (False, True)]:
        with nullcontext() if live else pytest.raises(KeyboardInterrupt):
            top.run_top((), "http://127.0.0.1:1", once=once, as_json=as_json, interval_s=1.0)


def test_while_no_node_answers_the_last_view_stays_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three reads: success, no answer, Ctrl-C."""
    notes: list[str] = []
    sentences: list[str] = []
    drawn_at: list[float] = []
    render, screen = top.render, io.StringIO()

    async def read() -> list[Report]:
        if len(notes) < 2:
            raise Unreachable("no answer from http://127.0.0.1:1: Connection refused")
        raise KeyboardInterrupt

    def noted(found: Overview, height: int | None, note: str, width: int) -> Any:
        notes.append(note)
        sentences.append(found.sentence)
        drawn_at.append(time.monotonic())
        return render(found, height, note, width)

    monkeypatch.setattr(top, "render", noted)
    console = Console(file=screen, force_terminal=True, color_system=None, width=120, height=40, _environ={})
    monkeypatch.setattr(terminal, "console", lambda: console)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(top._live(read, _overview(swarm()), 0.2))
    assert notes[0] == ""
    assert notes[1].endswith(" s ago: no answer from http://127.0.0.1:1: Connection refused")
    assert sentences[0] == sentences[1]
    assert _drawn(_overview(swarm()), 40, notes[1])[1] == notes[1]
    assert drawn_at[1] - drawn_at[0] > 0.19
    before, _, after = screen.getvalue().partition("\x1b[?1049h")
    assert before == "", "nothing is drawn outside of the alternate screen"
    assert notes[1] in after
