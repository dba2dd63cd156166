"""The documents match the code: every command, option, setting, path and metric in them exists."""

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import readme_tables
from typer.main import get_command

from noloco_p2p.cli import main as noloco
from noloco_p2p.cli import node as noloco_node
from noloco_p2p.cli.exits import DEBUG
from noloco_p2p.lab import scenario_files
from noloco_p2p.launch import settings

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "noloco_p2p"
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for place in ("*.md", "configs/**/*.md", "docker/*.md", "noloco_p2p/**/*.md")
    for path in ROOT.glob(place)
)
README_LINES = 250

FIRST_COMMANDS = ["pip install . && noloco swarm", "pip install '.[test]' && pytest"]

PROGRAMS = {"noloco": get_command(noloco.app), "noloco-node": get_command(noloco_node.app)}

PATH = re.compile(r"LICENSE|[\w.-]+/([\w.-]+/)*[\w.-]*|[\w-]+\.(py|md|yaml|toml|proto|json|jsonl)")
"""Text that counts as a path: with a slash inside or at the end, or with a known file ending."""

OF_A_RUN = re.compile(
    r"(noloco-(runs|experiments)|my-tasks)/.*|(noloco|endpoints|manifest|local|summary|swarm|results)\.json|known[_-]peers\.json"
    r"|events\.jsonl|(certificate|issuer)\.pem|invitations\.json|root\.key|mine\.yaml|report\.(html|md)|python/name:.*"
)
"""Files that a run makes or a user writes."""

FOREIGN_OPTION = re.compile(
    r"--(scale|profile|volumes|network|entrypoint|gpus|build|restart|rm|use-aliases|stop-timeout|read-only|cap-drop)\b.*"
)
"""Options of Docker and Compose."""

TERMS = re.compile(r"\d+/\d+mbit(,\w+)*|s/p|tokens/s|n/a|MiB/s|min/max")
"""Words with a slash that are not paths."""

COMMANDS = (
    "swarm",
    "export",
    "eval",
    "finetune",
    "tasks",
    "generate",
    "pause",
    "resume",
    "top",
    "doctor",
    "report",
    "track",
    "sim",
    "experiment",
)
BENCHES = ("pipeline", "baseline", "transport", "stage", "outer", "monitoring", "churn", "fuzz", "flood", "links")

HOSTS = {"arxiv.org", "HOST", "localhost", "127.0.0.1"}


def text_of(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


def blocks(text: str) -> list[str]:
    """The contents of the fenced blocks, in order."""
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)


def spans(text: str) -> list[str]:
    """The contents of inline code, in order."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.M | re.S))


def commands(text: str) -> Iterator[list[str]]:
    """Every noloco command: whole lines of the fenced blocks (alone, after `&&` or as printed) and inline code."""
    lines = [line for block in blocks(text) for line in block.splitlines()]
    parts = [part.removeprefix("join ").removeprefix("$ ").strip() for line in lines for part in line.split("&&")]
    for part in [*parts, *spans(text)]:
        if re.match(r"noloco(-node)?( |$)", part):
            yield [word for word in shlex.split(part, comments=True) if word != "NAME"]


def options_of(words: Sequence[str]) -> set[str]:
    """The options of a command, including those of its group. Raises AssertionError if there is no such command."""
    command = PROGRAMS[words[0]]
    found = {DEBUG, *option_names(command)}
    for word in words[1:]:
        if not hasattr(command, "commands"):
            break
        # `noloco-node` has options with values in addition to commands.
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


@cache
def all_options() -> set[str]:
    subcommands = [
        *(["noloco", name] for name in COMMANDS),
        *(["noloco", "bench", name] for name in BENCHES),
    ]
    return set().union(*(options_of(words) for words in [["noloco-node"], *subcommands]))


def test_the_readme_is_short_and_begins_with_the_two_commands() -> None:
    text = text_of("README.md")
    assert len(text.splitlines()) <= README_LINES
    shell = [block.strip() for block in blocks(text) if re.match(r"pip|noloco", block)]
    assert shell[:2] == FIRST_COMMANDS


def test_every_document_can_be_reached_from_the_readme() -> None:
    links = {(ROOT / target).resolve() for target in re.findall(r"\]\(([^)\s#]+)", text_of("README.md"))}
    assert {ROOT / document for document in DOCUMENTS if document != "README.md"} <= links


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_and_option_exists(document: str) -> None:
    text = text_of(document)
    for words in commands(text):
        known = options_of(words)
        for word in words:
            assert not word.startswith("-") or word.partition("=")[0] in known, f"{shlex.join(words)}: no option {word}"
    for option in (span for span in spans(text) if span.startswith("--")):
        foreign = document.startswith("docker/") and FOREIGN_OPTION.fullmatch(option)
        assert foreign or option.split()[0] in all_options(), f"no command has {option}"


def test_every_command_is_described() -> None:
    found = {tuple(words[:3]) for document in DOCUMENTS for words in commands(text_of(document))}
    assert {("noloco", "bench", name) for name in BENCHES} <= found
    assert {("noloco", name) for name in COMMANDS} <= {words[:2] for words in found}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_setting_exists(document: str) -> None:
    text = text_of(document)
    given = [(words, words[i + 1]) for words in commands(text) for i, word in enumerate(words) if word == "--set"]
    scenario_files.load(None, [one for words, one in given if words[1] == "sim"])
    variables = re.findall(r"\b(NOLOCO__\w+)=(\S+?)`", text)
    settings.read(None, dict(variables), [one for words, one in given if words[1] != "sim"])
    sections = {section[0] for section in settings.KNOWN.sections if section}
    for name in (span.partition("=")[0] for span in spans(text)):
        key = tuple(name.split("."))
        if len(key) > 1 and key[0] in sections and not (PACKAGE / f"{key[0]}.py").exists():
            known = settings.KNOWN.holds(key) or (
                document == "configs/sim/README.md" and scenario_files.KNOWN.holds(key)
            )
            assert known, f"there is no setting {name}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document: str) -> None:
    """Relative to the repository, or to the package (also without `.py`), or to the document, as links always are."""
    text = text_of(document)
    for link in (target for target in re.findall(r"\]\(([^)\s#]+)", text) if "://" not in target):
        assert (ROOT / document).parent.joinpath(link).exists(), f"there is no {link}"
    shown = [word for words in commands(text) for word in words] + spans(text)
    for path in {word for word in shown if PATH.fullmatch(word) and not OF_A_RUN.fullmatch(word)}:
        if TERMS.fullmatch(path):
            continue
        places = [
            ROOT / path,
            PACKAGE / path,
            PACKAGE / f"{path.partition('.')[0]}.py",
            (ROOT / document).parent / path,
        ]
        places += PACKAGE.glob(f"*/{path}")  # a path that leaves out the top-level folder
        assert any(place.exists() for place in places), f"there is no {path}"


def test_every_configuration_is_listed() -> None:
    listed = {span for name in ("configs/README.md", "configs/sim/README.md") for span in spans(text_of(name))}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")} <= listed


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_local_path_or_foreign_host_is_named(document: str) -> None:
    text = text_of(document)
    assert set(re.findall(r"https?://([^/:\s)`]+)", text)) <= HOSTS
    in_a_container = {"/tmp"} if document.startswith("docker/") else set[str]()
    assert set(re.findall(r"(?<![\w.])/(?:tmp|home|root|work|Users|mnt|opt)\b[^\s`]*", text)) <= in_a_container


def test_the_patterns_find_their_targets() -> None:
    texts = list(map(text_of, DOCUMENTS))
    shown = {span for text in texts for span in spans(text)}
    assert {"LICENSE", "configs/tiny.yaml", "core/"} <= {span for span in shown if PATH.fullmatch(span)}
    assert any(span.startswith("--") for span in shown)
    assert any("--set" in words for text in texts for words in commands(text))
    assert any(re.search(r"\bNOLOCO__\w+=\S+?`", text) for text in texts)


def test_the_generated_tables_are_up_to_date(tmp_path: Path) -> None:
    """And `readme_tables` rewrites outdated ones."""
    for name in readme_tables.FILES:
        text = text_of(name)
        assert readme_tables.updated(text) == text, f"{name}: run python tests/support/readme_tables.py"
        stale, tables = readme_tables.BLOCK.subn(r"\1| old |\n\3", text)
        assert tables
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(stale, "utf-8")
    assert readme_tables.update_files(tmp_path) == [tmp_path / name for name in readme_tables.FILES]
    assert all((tmp_path / name).read_text("utf-8") == text_of(name) for name in readme_tables.FILES)
    assert readme_tables.update_files(tmp_path) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_metric_exists(document: str) -> None:
    known = set(re.findall(r"^\| `(noloco_\w+)`", readme_tables.metrics_markdown(), re.M))
    named = set(re.findall(r"\bnoloco_(?!p2p)\w+", text_of(document)))
    volumes = {"noloco_bootstrap", "noloco_nodes"}
    assert named - volumes <= known
