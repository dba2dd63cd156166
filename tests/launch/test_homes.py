"""No command writes into or misreads a directory of another kind: every command with every kind of directory."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer import Typer

from noloco_p2p.cli import main as noloco_main
from noloco_p2p.cli import node as node_main
from noloco_p2p.config import ListenSettings, RunManifest
from noloco_p2p.errors import ConfigError, LocalError, NolocoError, OtherRun
from noloco_p2p.io.dht.identity import KEY, Identity, peer_id_of
from noloco_p2p.lab.bench import links
from noloco_p2p.lab.experiments import runner
from noloco_p2p.launch import compose, finetuning, join_file, run_files, swarm
from noloco_p2p.launch.bootstrap import NodeOptions
from noloco_p2p.observe.doctor import machine

JOIN = f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id_of(bytes(32))}"
WENT = "it went on"
INSIDE, RUNS = ("inside a swarm", "inside a node"), ("swarm", "node")
"""A model may be inside the directory of a swarm or of a node, another run may not."""


def files(directory: Path, **contents: str) -> Path:
    """Create a directory with files; `__` in a name stands for a slash, `_` for a dot."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = directory / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return directory


def a_node(home: Path, seed: int = 0) -> Path:
    Identity.open(home / KEY).close()
    run_files.store_manifest(home, RunManifest(seed=seed))
    return home


def a_swarm(home: Path, *, completed: bool) -> Path:
    a_node(home / "0-0")
    files(home, swarm_json=json.dumps(RunManifest().model_dump(mode="json")))
    return files(home, summary_json=json.dumps({"completed": completed, "inner_steps": 9}))


def link_to_nothing(home: Path) -> Path:
    home.symlink_to("not-mounted")
    return home


KINDS: dict[str, Callable[[Path], Path]] = {
    "nothing": lambda home: home,
    "fresh volume": lambda home: files(files(home / "lost+found").parent, _cache__version="1"),
    "swarm": lambda home: a_swarm(home, completed=False),
    "finished swarm": lambda home: a_swarm(home, completed=True),
    "node": a_node,
    "node of another run": lambda home: a_node(home, seed=1),
    "node of a finished swarm": lambda home: a_swarm(home, completed=True) / "0-0",
    INSIDE[0]: lambda home: a_swarm(home, completed=False) / "mine",
    INSIDE[1]: lambda home: a_node(home) / "mine",
    "model": lambda home: files(home, noloco_json="{}", config_json="{}"),
    "experiment": lambda home: files(home, results_json='{"experiment": "spread"}', report_md="# spread"),
    "links": lambda home: files(home, report_md="# links", tokens_svg="<svg/>"),
    "tasks": lambda home: files(home, train_jsonl="{}", addition_jsonl="{}"),
    "plots": lambda home: files(home, loss_svg="<svg/>"),
    "own files": lambda home: files(home, thesis_tex="years", sub__summary_json="{}"),
    "file": lambda home: files(home.parent, dir="text") / "dir",
    "link to nothing": lambda home: link_to_nothing(home),
    "below a link to nothing": lambda home: link_to_nothing(home) / "mine",
}
HERE, OUT = "{dir}", "{tmp}/out"
COMMANDS: dict[str, tuple[list[str], str]] = {
    "swarm": (["swarm", "--dir", HERE], "nothing, swarm"),
    "node": (["noloco-node", "--dir", HERE, "--set", "seed=0"], "nothing, node"),
    "export": (["export", "--from", "{tmp}", "--out", HERE], "nothing"),
    "finetune": (["finetune", "{tmp}/model", "--data", "x", "--out", HERE], "nothing"),
    "experiment": (["experiment", "spread", "--out", HERE], "nothing, experiment"),
    "bench links": (["bench", "links", "--out", HERE], "nothing"),
    "tasks": (["tasks", HERE, "--train", "1", "--test", "1"], "nothing, tasks"),
    "plots": (["sim", "--seed", "1", "--plots", HERE], "nothing, plots"),
    # These only read; their output is a separate file.
    "report": (["report", HERE, "--out", OUT], "swarm, finished swarm, node, node of another run, own files"),
    "export from": (["export", "--from", HERE, "--out", OUT], "swarm, finished swarm, node, own files"),
    "doctor from": (
        ["doctor", "--dir", HERE],
        "nothing, swarm, finished swarm, node, own files, inside a swarm, inside a node",
    ),
    "eval": (["eval", HERE], "model"),
    "generate": (["generate", HERE, "--prompt", "a"], "model"),
    "finetune from": (["finetune", HERE, "--data", "x", "--out", OUT], "model"),
}
"""Command → its arguments, and the kinds of directory that it accepts."""
SAME = {"node of another run": "node", "node of a finished swarm": "node"}
"""Kinds that are the same to a command that only reads."""


def tree(home: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(home)): path.read_bytes() if path.is_file() else None
        for path in sorted(home.rglob("*"))
        if not path.name.endswith(".lock")
    }


def raises(*_: object, **__: object) -> None:
    raise LocalError(WENT)


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces whatever comes after the check of the directory."""
    monkeypatch.setattr(swarm, "LocalSwarm", raises)
    monkeypatch.setattr(compose, "run_to_end", raises)
    monkeypatch.setattr(runner, "workers", raises)
    monkeypatch.setattr(links, "run", raises)
    monkeypatch.setattr(machine, "check_python", raises)
    monkeypatch.setattr(finetuning, "read_examples", raises)
    monkeypatch.setattr("noloco_p2p.lab.sim_command.scenario_files.load", raises)
    monkeypatch.delenv("NOLOCO__SEED", raising=False)


def answer(words: list[str]) -> str:
    """The one line with which a command fails; empty if it succeeds."""
    app: Typer = node_main.app if words[0] == "noloco-node" else noloco_main.app
    try:
        app(args=words[1:] if words[0] == "noloco-node" else words, standalone_mode=False)
    except NolocoError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_accepts_only_its_kinds_of_directory_and_touches_no_other(
    kind: str, command: str, tmp_path: Path
) -> None:
    files(tmp_path / "model", noloco_json="{}")
    home = KINDS[kind](tmp_path / "here")
    words, wanted = COMMANDS[command]
    reads = "from" in command or command in ("report", "eval", "generate")
    named = SAME.get(kind, kind) if reads else kind
    if kind == "fresh volume" or (kind in INSIDE and not reads and command not in RUNS):
        named = "nothing"
    before = tree(tmp_path)
    line = answer([word.format(dir=home, tmp=tmp_path) for word in words])
    if named in wanted.split(", "):
        assert not re.search(r"(is (a|an|the) |holds |inside ).*: name", line), line
    else:
        assert len(line.splitlines()) == 1, line
        assert WENT not in line
        assert str(home) in line or str(home.parent) in line
        assert tree(tmp_path) == before, "nothing was touched"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["noloco-node", "--dir", "{swarm}"], "--dir {swarm} is the directory of a swarm, not of a node"),
        (["swarm", "--dir", "{node}"], "--dir {node} is the directory of a node, not of a swarm"),
        (["swarm", "--dir", "{own}"], "--dir {own} holds files that are not of a swarm: name another directory"),
        (
            ["eval", "{swarm}"],
            "{swarm} is the directory of a swarm, not an exported model: "
            "noloco export --from {swarm} --out DIR makes one",
        ),
        (
            ["eval", "{node}"],
            "{node} is the directory of a node, not an exported model: "
            "noloco export --from {node} --out DIR makes one, with another --from for each other stage",
        ),
        (["report", "{model}"], "{model} is an exported model"),
        (["export", "--from", "{swarm}", "--out", "{model}"], "--out {model} is an exported model: name"),
    ],
)
def test_the_refusal_names_the_actual_and_the_wanted_kind(words: list[str], line: str, tmp_path: Path) -> None:
    places = {"swarm": "swarm", "node": "node", "model": "model", "own": "own files"}
    homes = {name: str(KINDS[kind](tmp_path / name)) for name, kind in places.items()}
    assert answer([word.format(**homes) for word in words]).startswith(line.format(**homes))


def test_a_summary_is_not_replaced_by_a_less_informative_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    worse_and_worse: list[dict[str, object]] = [
        {"state": "finished", "inner_steps": 9},
        {"completed": True, "inner_steps": 0},
        {"state": "left", "inner_steps": 3},
        {"completed": False, "inner_steps": None},
    ]
    for place, summary in enumerate(reversed(worse_and_worse)):
        assert run_files.store_unless_less(path, summary)
        for less in worse_and_worse[len(worse_and_worse) - place :]:
            assert not run_files.store_unless_less(path, less)
        assert json.loads(path.read_text()) == summary
    assert run_files.store_unless_less(path, {"state": "finished", "inner_steps": 2}), (
        "of two equally informative ones the newer counts"
    )


def test_a_node_without_a_given_directory_skips_those_of_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a_node(Path("noloco-runs/node-1"), seed=1)
    files(Path("noloco-runs/node-2"), thesis_tex="years")
    taken: list[Path] = []

    def run(options: NodeOptions, *, json_lines: bool) -> None:
        taken.append(options.dir)
        run_files.refuse_other_run(options.dir, RunManifest(seed=2))

    monkeypatch.setattr(compose, "run_to_end", run)
    assert answer(["noloco-node", "--join", JOIN]) == "", "the peer tells the node which run it joins"
    assert taken == [Path("noloco-runs/node-1"), Path("noloco-runs/node-3")]
    with pytest.raises(OtherRun, match=r"noloco-runs/node-1 .* run tiny .*seed"):
        run_files.refuse_other_run(taken[0], RunManifest(seed=2))
    assert answer(["noloco-node", "--set", "seed=2"]) == ""
    assert taken[2:] == [Path("noloco-runs/node-3")]


def test_an_earlier_port_yields_to_the_same_one_in_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both services wanted the port, and the node could not start."""
    monkeypatch.setattr(run_files, "_is_free", lambda host, port: True)
    before = {"join": ["/ip4/127.0.0.1/tcp/4001/p2p/x"], "grpc": "127.0.0.1:4002", "metrics": "http://127.0.0.1:4003/"}
    files(tmp_path, endpoints_json=json.dumps(before))
    found = run_files.same_ports(tmp_path, ListenSettings(grpc_port=4001))
    assert (found.dht_port, found.grpc_port, found.metrics_port) == (0, 4001, 4003)


def test_foreign_files_are_not_replaced(tmp_path: Path) -> None:
    mine = files(tmp_path, thesis_tex="years") / "thesis.tex"
    node = a_node(tmp_path / "node")
    (node / "events.jsonl").write_text('{"event": "start", "time": 1e9, "up_s": 0, "peer_id": "a", "stage": 0}\n')
    for words in (["report", str(node), "--out", str(mine)], ["sim", "--trace", str(mine)]):
        assert re.match(rf"\S+ {mine} exists and is not a \w+ of noloco", answer(words)), words
    with pytest.raises(ConfigError, match=re.escape(str(mine))):
        join_file.remove(mine)
    assert mine.read_text() == "years"
    os.mkfifo(tmp_path / "pipe")  # root could even replace a device by a file
    for path in (Path("-"), tmp_path / "pipe", tmp_path):
        for words in (["report", str(node), "--out"], ["report", str(node), "--csv"], ["sim", "--trace"]):
            option, refusal = words[-1], "is not a regular file: name another one"
            assert answer([*words, str(path)]) == f"{option} {path} {refusal}"
        with pytest.raises(ConfigError, match=refusal):
            join_file.remove(path)
    for _ in range(2):
        assert answer(["report", str(node), "--out", str(tmp_path / "page.html")]) == ""
