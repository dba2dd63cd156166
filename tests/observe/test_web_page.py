"""A node's web page: its policy, that it contains no address, and that other nodes are asked seldom."""

import base64
import hashlib
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from diagnosed import swarm, troubled, with_advert, with_status

from noloco_p2p.core.status import SeenPeer, Status
from noloco_p2p.humanize import compact, short_id
from noloco_p2p.io.telemetry import status_json
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.observe import web_page

HOSTILE = '<img src=x onerror="document.title=1"></script><script>alert(1)</script> http://10.1.2.3:4101/x'


class Others:
    """A server that stands in for all nodes but the first, and counts the requests."""

    def __init__(self) -> None:
        self.asked = 0
        self.body = b""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805
                self.asked += 1
                handler.send_response(200)
                handler.end_headers()
                handler.wfile.write(self.body)

            def log_message(handler, *args: object) -> None:  # noqa: N805
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/metrics"


@pytest.fixture
def others() -> Iterator[Others]:
    made = Others()
    yield made
    made.server.shutdown()
    made.server.server_close()


def two_nodes(others: Others) -> Status:
    """A node that sees another, which answers with a hostile name and trouble."""
    mine, theirs = list(swarm(1, 2).values())
    theirs = with_status(troubled(theirs, "disk", HOSTILE), run_name=HOSTILE)
    theirs = with_advert(theirs, metrics=others.url, version="<b>9</b>")
    assert mine.status is not None
    assert theirs.status is not None
    others.body = status_json.encode(theirs.status)
    own = replace(mine.status, run_name=HOSTILE, seen=(SeenPeer(theirs.status.advert, 1.0),))
    return replace(own, advert=replace(own.advert, addresses=("127.0.0.1:4102",)))


@pytest.fixture
def served(others: Others) -> Iterator[Callable[[str], http.client.HTTPResponse]]:
    telemetry = PrometheusTelemetry(1)
    status = two_nodes(others)
    port = telemetry.serve("127.0.0.1", 0, lambda health: web_page.pages(lambda: (status, None)))

    def ask(path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", path)
        return connection.getresponse()

    yield ask
    telemetry.close()


def test_the_page_allows_only_its_own_script(served: Callable[[str], http.client.HTTPResponse]) -> None:
    answer = served("/")
    text = answer.read().decode()
    policy = dict(part.split(" ", 1) for part in str(answer.getheader("Content-Security-Policy")).split("; "))
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert text.count("<script>") == 1
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http:", "https:", "//cdn"):
        assert way not in text, "texts of peers are set as text, and nothing is loaded from elsewhere"


def test_nodes_and_large_numbers_are_written_in_the_table_as_in_the_sentences_above_it() -> None:
    """A node had a letter more than in the findings, and a thousand million bytes were `1B`."""
    script = web_page.FILE.read_text("utf-8")
    cut = re.search(r'id\.length > (\d+) \? id\.slice\(0, (\d+)\) \+ "…" \+ id\.slice\(-(\d+)\)', script)
    assert cut is not None
    longest, first, last = map(int, cut.groups())
    peer = "12D3KooWRKeKJ5EZNNbbRJLkmT6aeisVGKPWz3m4YceMxJqFrNvJ"
    assert f"{peer[:first]}…{peer[-last:]}" == short_id(peer)
    assert short_id(peer[:longest]) == peer[:longest]
    for theirs, ours in re.findall(r'replace\("(\w)", "(\w)"\)', script):
        assert ours == compact({"K": 1e3, "B": 1e9}[theirs])[-1]
    assert '.replace("B", ' in script


def test_the_figures_are_those_of_top_without_addresses(
    served: Callable[[str], http.client.HTTPResponse], others: Others
) -> None:
    answer = served("/swarm")
    assert answer.getheader("Content-Type") == "application/json"
    text = answer.read().decode()
    found = json.loads(text)
    assert [node["answers"] for node in found["nodes"]] == [True, True]
    assert any("onerror" in each["sentence"] for each in found["findings"]), (
        "the page itself is responsible for showing it as text"
    )
    assert '"host"' not in text
    assert "127.0.0.1" not in text
    assert "10.1.2.3" not in text
    assert ":4101" not in text


def test_frequent_requests_do_not_reach_the_other_nodes_each_time(
    served: Callable[[str], http.client.HTTPResponse], others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    first = [served("/swarm").read() for _ in range(5)]
    assert len(set(first)) == others.asked == 1
    now += web_page.FRESH_S
    served("/swarm").read()
    assert others.asked == 2


def test_a_starting_node_answers_that_it_is_starting() -> None:
    answer = web_page.pages(lambda: (None, "starting"))["/swarm"]("", "")
    assert (answer.code, json.loads(answer.body)) == (503, {"health": "starting"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no answer from http://192.168.0.7:9464: refused", "no answer from … refused"),
        ("no answer from http://1.2.3.4:5 within 2 s", "no answer from … within 2 s"),
        ("dial /ip4/10.0.0.1/tcp/4101/p2p/12D3 now", "dial … now"),
        ("reached 10.0.0.1 and [fe80::1]:9464, home.example.org:4102", "reached … and … …"),
        ("version 0.1.0, 12:30 is a time, step 3", "version 0.1.0, … is a time, step 3"),
    ],
)
def test_addresses_are_removed_from_texts(text: str, shown: str) -> None:
    assert web_page.without_addresses({"a": [text, 3, None]}) == {"a": [shown, 3, None]}
