"""README.md tells the truth: its commands, options, settings, paths and metrics are those of the code."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from prometheus_client import CollectorRegistry

from noloco_p2p.cli import main as noloco
from noloco_p2p.cli import node as noloco_node
from noloco_p2p.cli.exits import DEBUG
from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import Status, Trouble
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.lab import scenarios
from noloco_p2p.launch import settings
from noloco_p2p.launch.config_reference import reference_markdown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BEGIN, END = "\n<!-- configuration:begin -->\n", "<!-- configuration:end -->\n"

FIRST_COMMANDS = ["pip install . && noloco swarm", "pip install '.[test]' && pytest"]

PROGRAMS = {"noloco": noloco.app, "noloco-node": noloco_node.app}

PATH = re.compile(r"LICENSE|[\w.-]+/([\w.-]+/)*[\w.-]*|[\w-]+\.(py|md|yaml|toml|proto|jsonl?)")
"""What is taken for a path: it has a slash inside or at its end, or a known ending."""

OF_A_RUN = re.compile(r"noloco-runs/.*|summary\.json|events\.jsonl|mine\.yaml")
"""Files that the README mentions and a run makes."""

COMMANDS = ("swarm", "export", "eval", "generate", "pause", "resume", "top", "doctor", "report", "sim", "experiment")
BENCHES = ("pipeline", "transport", "stage", "outer", "monitoring", "churn")

HOSTS = {"arxiv.org", "HOST", "localhost"}


def blocks() -> list[str]:
    """Contents of the fenced blocks, in order."""
    return re.findall(r"^```\w*\n(.*?)^```$", README, re.M | re.S)


def spans() -> list[str]:
    """Contents of the inline code, in order."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```\w*\n.*?^```$", "", README, flags=re.M | re.S))


def commands() -> Iterator[list[str]]:
    """Every command of ours: whole lines of the fenced blocks (alone, after `&&` or as printed) and inline code."""
    lines = [line for block in blocks() for line in block.splitlines()]
    parts = [part.removeprefix("join ").strip() for line in lines for part in line.split("&&")]
    for text in [*parts, *spans()]:
        if re.match(r"noloco(-node)?( |$)", text):
            yield shlex.split(text)


def options_of(words: list[str]) -> set[str]:
    """The options of a command, those of its group included. AssertionError when there is no such command."""
    command = typer.main.get_command(PROGRAMS[words[0]])
    found = {DEBUG, *option_names(command)}
    for word in words[1:]:
        if not hasattr(command, "commands"):
            break
        # Beside commands, `noloco-node` has options with values.
        if not word.startswith("-") and (
            word in command.commands or not getattr(command, "invoke_without_command", False)
        ):
            assert word in command.commands, f"{shlex.join(words)}: there is no command {word}"
            command = command.commands[word]
            found |= option_names(command)
    return found


def option_names(command: object) -> set[str]:
    parameters = getattr(command, "params", [])
    return {"--help", *(name for one in parameters for name in (*one.opts, *one.secondary_opts))}


def all_options() -> set[str]:
    subcommands = [
        *(["noloco", name] for name in COMMANDS),
        *(["noloco", "bench", name] for name in BENCHES),
    ]
    return set().union(*(options_of(words) for words in [["noloco-node"], *subcommands]))


def test_the_two_commands_come_first() -> None:
    assert [block.strip() for block in blocks()[:2]] == FIRST_COMMANDS
    assert all(f"\n{command}\n" in README for command in FIRST_COMMANDS)


def test_every_command_and_option_exists() -> None:
    found = list(commands())
    for words in found:
        known = options_of(words)
        for word in words:
            assert not word.startswith("-") or word.partition("=")[0] in known, f"{shlex.join(words)}: no option {word}"
    told = {tuple(words[:3]) for words in found}
    assert {("noloco", "bench", name) for name in BENCHES} <= told
    for option in (span for span in spans() if span.startswith("--")):
        assert option.split()[0] in all_options(), f"no command has {option}"


def test_every_setting_exists() -> None:
    given = [(words, words[i + 1]) for words in commands() for i, word in enumerate(words) if word == "--set"]
    sets = [one for words, one in given if words[1] != "sim"]
    scenarios.load(None, [one for words, one in given if words[1] == "sim"])
    variables = re.findall(r"\b(NOLOCO__\w+)=(\S+?)`", README)
    assert sets
    assert variables
    settings.read(None, dict(variables), sets)
    names = [span.partition("=")[0] for span in spans()]
    sections = {section[0] for section in settings.KNOWN.sections if section}
    for name in names:
        key = tuple(name.split("."))
        if len(key) > 1 and key[0] in sections:
            assert key in settings.KNOWN.keys, f"there is no setting {name}"


def test_every_path_exists() -> None:
    links = [target for target in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in target]
    shown = [word for words in commands() for word in words] + spans()
    paths = {word for word in [*links, *shown] if PATH.fullmatch(word) and not OF_A_RUN.fullmatch(word)}
    assert {"LICENSE", "configs/tiny.yaml", "noloco_p2p/node/loop.py", "noloco_p2p/core/"} <= paths
    for path in sorted(paths):
        assert (ROOT / path).exists(), f"there is no {path}"
    assert {path for path in paths if path.startswith("configs/") and path.endswith(".yaml")} == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")
    }


def test_no_place_of_ours_is_named() -> None:
    assert set(re.findall(r"https?://([^/:\s)]+)", README)) <= HOSTS
    assert not re.findall(r"(?<![\w.])/(?:tmp|home|root|work|Users|mnt|opt)\b\S*", README)


def test_the_configuration_reference_is_up_to_date() -> None:
    _, _, after = README.partition(BEGIN)
    block, end, _ = after.partition(END)
    assert end
    assert block == reference_markdown(), "make it again with the command above the tables"


def test_the_command_that_makes_the_reference_again(tmp_path: Path) -> None:
    command = next(line for line in README.splitlines() if line.startswith("python -c "))
    before, _, after = README.partition(BEGIN)
    stale = tmp_path / "README.md"
    stale.write_text(before + BEGIN + "| old |\n" + after[after.index(END) :], "utf-8")
    subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=tmp_path, check=True, timeout=60)
    assert stale.read_text("utf-8") == README


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """That of a fresh node on which everything with labels has happened once."""
    telemetry = PrometheusTelemetry(1)
    telemetry.identify(peer_id="p", run_id="r", stage="0", version="1")
    events: dict[str, dict[str, object]] = {
        "outer_round": {"round": 1, "result": "alone", "reason": "none", "seconds": 0.0, "bytes": 0},
        "microbatch": {"result": "dropped", "reason": "drained"},
        "guarded": {"stage": 0, "round": 1, "bytes": 1},
        "reroute": {"reason": "unreachable"},
        "busy": {"direction": "in"},
        "idle": {"cause": "partner", "seconds": 0.0},
        "bytes": {"direction": "in", "kind": "snapshot", "bytes": 1},
        "membership": {"counts": {}},
    }
    for kind, fields in events.items():
        telemetry.event(kind, **fields)
    trouble = Trouble("disk", "full", 1.0)
    telemetry.watch(lambda: Status(Advert("P", "ab", 0, ()), "tiny", 1, 9, 0, troubles=(trouble,)), ROOT)
    telemetry.measure_memory(None)
    yield telemetry.registry
    telemetry.close()


def test_the_table_of_metrics_is_that_of_a_node(registry: CollectorRegistry) -> None:
    rows = re.findall(r"^\| `(noloco_\w+)` \| (\w+) \| ([^|]*)\|", README, re.M)
    told = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(told) == len(rows)
    ending = {"counter": "_total", "info": "_info"}
    assert told == {
        family.name + ending.get(family.type, ""): (
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
        )
        for family in registry.collect()
        if family.name.startswith("noloco_")
    }
    assert set(re.findall(r"\bnoloco_(?!p2p)\w+", README)) <= set(told)
