"""`noloco-node health` finds the node, prints ok or one line, and is quick."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import Status, Wait
from noloco_p2p.errors import ConfigError
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.observe import health_check
from noloco_p2p.observe.health_check import ask

WELL = Status(Advert("12D3KooWme", "ab" * 32, 0, (), state="training"), "tiny", 2, 1000, 12)
SICK = replace(WELL, waits=(Wait("gradient", "12D3KooWyou", 99.0, 60.0),))
LINE = "overdue: waited 99 s (at most 60 s) for gradient from 12D3KooWyou"
NOWHERE = "http://127.0.0.1:9/metrics"

SCRIPT = """
import sys
from noloco_p2p.cli.node import main
try:
    main()
finally:
    found = {name.partition(".")[0] for name in sys.modules}
    print(sorted(found & {"torch", "hivemind", "grpc", "prometheus_client", "asyncio", "yaml", "numpy"}))
"""


@pytest.fixture(scope="module")
def node() -> Iterator[list[object]]:
    """[port, status] of a node; tests may set the status."""
    telemetry = PrometheusTelemetry(2)
    found: list[object] = [telemetry.serve("127.0.0.1", 0), WELL]

    def now() -> Status:
        assert isinstance(found[1], Status)
        return found[1]

    telemetry.watch(now, Path())
    yield found
    telemetry.close()


@pytest.fixture
def home(node: list[object], tmp_path: Path) -> Path:
    """Directories of three nodes; only the second node answers, and its directory is the newest."""
    node[1] = WELL
    for number, urls in enumerate(
        (
            {"metrics": NOWHERE},
            {"metrics": "http://announced.invalid/metrics", "health": f"http://127.0.0.1:{node[0]}/health"},
            {"metrics": NOWHERE},
        )
    ):
        directory = tmp_path / "noloco-runs" / f"node-{number}"
        directory.mkdir(parents=True)
        (directory / "endpoints.json").write_text(json.dumps({"peer_id": "P", **urls}))
        os.utime(directory / "endpoints.json", (0, 100 - abs(number - 1)))
    return tmp_path / "noloco-runs"


def test_it_finds_the_node(home: Path, node: list[object]) -> None:
    assert ask(None, None, home) == (True, "ok")
    assert ask(home / "node-1", None, home) == (True, "ok")
    for url in (f"http://127.0.0.1:{node[0]}/metrics", f"http://127.0.0.1:{node[0]}", f"127.0.0.1:{node[0]}"):
        assert ask(home / "node-0", url, home) == (True, "ok")
    node[1] = SICK
    assert ask(None, None, home) == (False, LINE)


def test_nobody_answers(home: Path, tmp_path: Path) -> None:
    assert ask(home / "node-0", None, home) == (
        False,
        "no node answers at http://127.0.0.1:9/health: Connection refused",
    )
    empty = tmp_path / "nothing"
    empty.mkdir()
    expected = (False, f"no node has written its address to {empty / 'node-*' / 'endpoints.json'}")
    assert ask(None, None, empty) == expected
    for content in ("", "{", "[]", '{"peer_id": "P"}', '{"metrics": ""}'):
        (empty / "endpoints.json").write_text(content)
        assert ask(empty, None, home) == (False, f"no node has written its address to {empty / 'endpoints.json'}")


def test_an_answer_with_a_chunk_of_negative_length_is_no_answer() -> None:
    """It was a traceback."""

    class Broken(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        well, line = ask(None, f"http://127.0.0.1:{server.server_port}")
        thread.join()
    assert (well, line[:24]) == (False, "no node answers at http:")


def test_a_directory_that_is_removed_while_the_newest_node_is_looked_for_is_passed_over(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [*home.glob("node-*/endpoints.json"), home / "node-removed" / "endpoints.json"]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(found))
    assert ask(None, None, home) == (True, "ok")


class _Stranger(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b"\x1b]0;mine\x07red\nsecond line")


def test_what_a_stranger_answers_is_printed_without_control_characters(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        assert ask(None, f"http://127.0.0.1:{server.server_port}", tmp_path) == (False, " ]0;mine red")
        answering.join()


@pytest.mark.parametrize("url", ["", "https://127.0.0.1:1", "http://[::1", "http://a:99999", "/data"])
def test_what_is_no_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the address of a node: give http://HOST:PORT"):
        ask(None, url, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["health"], WELL, (0, "ok")),
        (["health", "--dir", "noloco-runs/node-1"], SICK, (1, LINE)),
        (["--dir", "noloco-runs/node-0", "health"], WELL, (1, "no node answers at http://127.0.0.1:9/health")),
    ],
)
def test_the_command(
    home: Path, node: list[object], arguments: list[str], status: Status, expected: tuple[int, str]
) -> None:
    """Its output, its exit code, and that it imports nothing heavy."""
    node[1] = status
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], cwd=home.parent, capture_output=True, text=True)
    line, heavy = done.stdout.splitlines()
    assert (done.returncode, line[: len(expected[1])]) == expected
    assert heavy == "[]"
    assert done.stderr == ""


def test_an_answer_without_end_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A health check went on for as long as a byte came every few seconds."""
    monkeypatch.setattr(health_check, "ANSWER_S", 0.5)
    ended = threading.Event()

    class Dripping(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
            for _ in range(100):
                if ended.wait(0.05):
                    return
                self.wfile.write(b".")

    with http.server.HTTPServer(("127.0.0.1", 0), Dripping) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert ask(None, url, tmp_path) == (False, f"no node answers at {url}/health: timed out")
        finally:
            ended.set()
