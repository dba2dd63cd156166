"""The house rules of the package: its size, its names, its docstrings, and the specification that it cites.

Each rule is a function from the package's syntax trees to its violations, and is also tested on a planted violation.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "noloco_p2p"
CODE_LINES = 32_377
"""Lines of code of the package, without blanks, docstrings, comments and generated files; templates count. Raised by
what a feature or a mended bug took, and by no more."""
KERNEL = ("node", "core", "compute", "io", "ports.py")
"""The parts that train, without those that measure, watch and launch."""
KERNEL_LINES = 15_189
FILE_LINES, FUNCTION_LINES, PARAMETERS = 300, 50, 6

LONG_FILES: dict[str, str] = {"ports.py": "the contract between a node and its world, in one place"}
"""File → why it may be longer."""
LONG_FUNCTIONS: dict[str, str] = {}
"""`file:function` → why it may be longer."""
BROAD: dict[str, str] = {
    "cli/exits.py:run_app": "the last resort: a bug ends with one line, or a traceback with --debug",
    "compute/device.py:DeviceThread._run": "it is raised again in the task that waits for the call",
    "sim/device.py:SimDevice._perform": "it is raised again in the task that waits for the call",
    "io/blocking_calls.py:BlockingCalls._run": "it is raised again where the call is waited for",
    "lab/sim_command.py:simulate": "a bug is reported with the seed that shows it, and the other seeds run",
    "node/waits.py:Waits._check_conditions": "what a condition raises is for the task that waits: it asks again",
    "io/data/tokenizers.py:_from_transformers": "tokenizers raises nothing more particular",
    "io/telemetry/http_server.py:_PageHandler._response": "a bug in a page is answered with 500",
    "io/telemetry/prometheus_telemetry.py:PrometheusTelemetry.collect": "a bug in the status may not cost the others",
    "io/telemetry/prometheus_telemetry.py:PrometheusTelemetry.event": "an instrument may never stop what it watches",
    "io/telemetry/prometheus_telemetry.py:Watchdog.run": "an instrument may never stop what it watches",
}
"""`file:function` → why it catches everything."""
COLLECTIVES = {
    "lab/bench/baseline.py": "what users would otherwise run",
    "lab/bench/baseline_replica.py": "the same",
}
"""Files that may use torch.distributed; a node makes no collective call."""
SAME_NAME = {
    "device": "a port",
    "links": "those of the simulator, and `noloco bench links`",
    "stage": "a port, and `noloco bench stage`",
    "transport": "a port, and `noloco bench transport`",
}
"""Module names that may occur in several top-level folders: those of ports and commands."""

Tree = dict[str, ast.Module]


def _sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name)


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.fixture(scope="module")
def trees() -> Tree:
    return {_name(path): ast.parse(path.read_text("utf-8")) for path in _sources()}


def code_lines(path: Path) -> int:
    """The number of lines of a file that contain code."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return sum(1 for line in text.splitlines() if line.strip())
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def functions(tree: Tree) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """(`file:Class.function`, the function, whether it is public) of all functions outside other functions."""

    def walk(where: str, body: list[ast.stmt], public: bool) -> Iterator[tuple[str, ast.AST, bool]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(f"{where}{node.name}.", node.body, public and not node.name.startswith("_"))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{where}{node.name}", node, public and not node.name.startswith("_")

    for file, module in tree.items():
        for where, node, public in walk(f"{file}:", module.body, True):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield where, node, public


def long_functions(tree: Tree) -> set[str]:
    """Functions over the limit, including their inner functions."""
    return {
        where
        for where, node, _ in functions(tree)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES
    }


def wide_constructors(tree: Tree) -> set[str]:
    """Hand-written constructors with too many parameters."""
    return {
        where
        for where, node, _ in functions(tree)
        if node.name == "__init__" and len(node.args.args) + len(node.args.kwonlyargs) - 1 > PARAMETERS
    }


def without_docstring(tree: Tree) -> set[str]:
    """Public functions, methods and classes without a docstring, except overloaded operators."""
    missing = {
        where
        for where, node, public in functions(tree)
        if public
        and ast.get_docstring(node) is None
        and not any("overload" in ast.unparse(d) for d in node.decorator_list)
    }
    for file, module in tree.items():
        missing |= {
            f"{file}:{node.name}"
            for node in module.body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and ast.get_docstring(node) is None
        }
        if ast.get_docstring(module) is None and module.body:
            missing.add(file)
    return missing


def classes_named_twice(tree: Tree) -> dict[str, list[str]]:
    """Class names that are defined in more than one place."""
    places: dict[str, list[str]] = defaultdict(list)
    for file, module in tree.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(file)
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def modules_named_twice(tree: Tree) -> dict[str, list[str]]:
    """Module names that occur twice in a top-level folder, or in several without being a port's or a command's."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in tree:
        if not file.endswith("__init__.py"):
            places[file.rpartition("/")[2]].append(file)
    found = {}
    for name, files in sorted(places.items()):
        tops = [file.partition("/")[0] for file in files]
        if len(files) > 1 and (len(set(tops)) < len(tops) or name.removesuffix(".py") not in SAME_NAME):
            found[name] = files
    return found


def broad_excepts(tree: Tree) -> set[str]:
    """Functions that catch everything without re-raising it: `except:`, `except Exception`, `suppress(Exception)`."""

    def is_broad(kind: ast.expr | None) -> bool:
        names = [] if kind is None else [n.id for n in ast.walk(kind) if isinstance(n, ast.Name)]
        return kind is None or bool({"Exception", "BaseException"} & set(names))

    found = set()
    for where, function, _ in functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
                last = node.body[-1]
                if not (isinstance(last, ast.Raise) and last.exc is None):
                    found.add(where)
            elif (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("suppress")
                and any(map(is_broad, node.args))
            ):
                found.add(where)
    return found


def collectives(tree: Tree) -> set[str]:
    """Files that use torch.distributed, or modules built on it."""
    used = re.compile(r"torch\.(distributed|nn\.parallel)\b")

    def names(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [one.name for one in node.names]
        if isinstance(node, ast.ImportFrom):
            return [f"{node.module}.{one.name}" for one in node.names]
        return [ast.unparse(node)] if isinstance(node, ast.Attribute) else []

    return {file for file, module in tree.items() if any(used.match(n) for one in ast.walk(module) for n in names(one))}


def headings(document: Path) -> set[str]:
    """The titles of the sections of a Markdown file."""
    return set(re.findall(r"^#+ (?:\d+\. )?(.+?)\s*$", document.read_text("utf-8"), re.MULTILINE))


CITATION = re.compile(r"\b(ARCHITECTURE|METHOD)\.md((?:[, and]+\"[^\"]+\")*)")


def cited(text: str) -> set[tuple[str, str]]:
    """(document, section) of every reference, across line breaks and comment signs; section "" for a whole document."""
    flat = re.sub(r"\s*\n\s*(?:# ?)?", " ", text)
    found = set()
    for match in CITATION.finditer(flat):
        sections = re.findall(r'"([^"]+)"', match[2]) or [""]
        found |= {(f"{match[1]}.md", section) for section in sections}
    return found


# --- the rules -------------------------------------------------------------------------------------------------------


def test_no_file_is_too_long() -> None:
    long = {_name(path) for path in _sources() if len(path.read_text("utf-8").splitlines()) > FILE_LINES}
    assert long == set(LONG_FILES)


@pytest.mark.parametrize(
    ("rule", "excepted"),
    [
        (long_functions, LONG_FUNCTIONS),
        (wide_constructors, {}),
        (without_docstring, {}),
        (broad_excepts, BROAD),
        (collectives, COLLECTIVES),
        (classes_named_twice, {}),
        (modules_named_twice, {}),
    ],
)
def test_a_rule_of_the_house(rule: Callable[[Tree], set[str]], excepted: dict[str, str], trees: Tree) -> None:
    found = rule(trees)
    broken = "\n".join(
        sorted(f"{one} {found[one] if isinstance(found, dict) else ''}" for one in set(found) - set(excepted))
    )
    assert broken == ""
    assert sorted(set(excepted) - set(found)) == [], "an exception that is no longer needed"


def test_the_package_is_as_small_as_it_is_meant_to_be() -> None:
    files = [*_sources(), *PACKAGE.rglob("*.html"), *PACKAGE.rglob("*.js"), *PACKAGE.rglob("*.css")]
    lines = {_name(path): code_lines(path) for path in files}
    kernel = sum(count for file, count in lines.items() if file.startswith(KERNEL))
    assert sum(lines.values()) <= CODE_LINES
    assert kernel <= KERNEL_LINES


def test_every_cited_section_exists() -> None:
    sections = {name: headings(PACKAGE / name) | {""} for name in ("ARCHITECTURE.md", "METHOD.md")}
    files = [*_sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "proto").glob("*.proto"), *ROOT.rglob("*.md")]
    citations = {(path.relative_to(ROOT).as_posix(), *one) for path in files for one in cited(path.read_text("utf-8"))}
    assert len({one[1:] for one in citations}) > 20
    assert sorted(one for one in citations if one[2] not in sections[one[1]]) == []


def test_nothing_cites_the_drafts() -> None:
    draft = re.compile(r"\bdesign\.md|\bmethod\.md|\bissue \d")
    files = [*_sources(), *(ROOT / "proto").glob("*.proto"), *(ROOT / "tests").rglob("*.py")]
    assert sorted(str(path.relative_to(ROOT)) for path in files if draft.search(path.read_text("utf-8"))) == []


# --- and each rule can fail ------------------------------------------------------------------------------------------

LONG = "def long() -> None:\n" + "    print()\n" * FUNCTION_LINES
PLANTED = [
    (long_functions, LONG, "core/a.py:long"),
    (wide_constructors, "class A:\n    def __init__(self, a, b, c, d, e, f, *, g): ...", "core/a.py:A.__init__"),
    (without_docstring, 'class A:\n    """An A."""\n    def run(self): ...', "core/a.py:A.run"),
    (broad_excepts, "def run():\n    try:\n        pass\n    except Exception:\n        pass", "core/a.py:run"),
    (broad_excepts, "def run():\n    with suppress(BaseException):\n        pass", "core/a.py:run"),
    (collectives, "import torch\ntorch.distributed.barrier()", "core/a.py"),
    (collectives, "from torch import Tensor, distributed", "core/a.py"),
    (collectives, "def run():\n    import torch.nn.parallel as p", "core/a.py"),
    (classes_named_twice, "class B: ...\nclass C:\n    class _B: ...", "B"),
    (modules_named_twice, "", "a.py"),
]


@pytest.mark.parametrize(("rule", "source", "expected"), PLANTED)
def test_a_rule_finds_a_planted_violation(rule: Callable[[Tree], set[str]], source: str, expected: str) -> None:
    tree = {"core/a.py": ast.parse(source), "io/a.py": ast.parse("")}
    assert expected in rule(tree)
    assert not rule(
        {"core/a.py": ast.parse('"""Fine."""'), "io/stage.py": ast.parse(""), "sim/stage.py": ast.parse("")}
    )


def test_references_are_found_across_lines_and_comments() -> None:
    text = '# see ARCHITECTURE.md,\n# "A microbatch" and "Exactly\n# once"; METHOD.md'
    assert cited(text) == {("ARCHITECTURE.md", "A microbatch"), ("ARCHITECTURE.md", "Exactly once"), ("METHOD.md", "")}
