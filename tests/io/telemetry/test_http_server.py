"""The HTTP server of a node: the contents of its pages, and that it answers despite a stuck loop or a bad client."""

import asyncio
import gzip
import http.client
import json
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from machine import at_most, in_time
from processes import wait_until

from noloco_p2p.core.messages import Advert, Holding
from noloco_p2p.core.status import Resource, SeenPeer, Status, Trouble, Unknown, Wait
from noloco_p2p.errors import LocalError
from noloco_p2p.io.dht.reach import scope
from noloco_p2p.io.telemetry import http_server, scrape_targets, status_json
from noloco_p2p.io.telemetry.http_server import REQUESTS_LIMIT, HttpResponse, HttpServer
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry

RUN = "ab" * 32
PAGES = ("/status", "/metrics", "/sd", "/health")


def advert(number: int, **changes: object) -> Advert:
    known = Advert(
        f"12D3KooW{number:044d}",
        RUN,
        number % 2,
        (f"192.168.100.{number % 250}:41002",),
        metrics=f"http://192.168.100.{number % 250}:41003/metrics",
        state="training",
        step=1234.5678,
        outer_round=123,
        microbatches_per_s=12.345678901234567,
        steps_per_s=1.2345678901234567,
        settled=True,
        partner_from_round=3,
        holds=(Holding(1, 122, 1220), Holding(2, 122, 1220)),
        version="0.1.0",
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def status(peers: int = 2) -> Status:
    return Status(
        advert(0),
        "tiny",
        2,
        1000,
        12,
        seen=tuple(SeenPeer(advert(number), 3.2123456789) for number in range(1, 1 + peers)),
    )


class Asker:
    """A client of one server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        """The status code, headers and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def line(self, path: str) -> tuple[int, str]:
        """The status code and text of the answer."""
        code, _, body = self.ask(path)
        return code, body.decode()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the server's time limits, which its threads may exceed on a busy machine."""
    monkeypatch.setattr(http_server, "FREED_S", 60.0)
    monkeypatch.setattr(http_server, "DEADLINE_S", 120.0)


@pytest.fixture
def telemetry() -> Iterator[PrometheusTelemetry]:
    made = PrometheusTelemetry(stages=2)
    yield made
    made.close()


@pytest.fixture
def asker(telemetry: PrometheusTelemetry) -> Iterator[Asker]:
    port = telemetry.serve("127.0.0.1", 0)
    try:
        yield Asker(port)
    finally:
        telemetry.close()


def sample(telemetry: PrometheusTelemetry, metric: str, /, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(f"noloco_{metric}", labels)


def test_before_the_node_exists_the_server_says_that_it_is_starting(
    telemetry: PrometheusTelemetry, asker: Asker
) -> None:
    assert asker.line("/health") == (503, f"{http_server.STARTING}\n")
    code, text = asker.line("/status")
    assert (code, json.loads(text)) == (503, {"health": http_server.STARTING})
    assert asker.line("/sd")[0] == 503, "on an error Prometheus keeps its targets"
    assert asker.ask("/metrics")[0] == 200
    assert sample(telemetry, "healthy") == 0


def test_health_is_ok_or_one_line_of_what_is_wrong(
    telemetry: PrometheusTelemetry, asker: Asker, tmp_path: Path
) -> None:
    now = [status()]
    telemetry.watch(lambda: now[0], tmp_path)
    assert asker.line("/health") == (200, "ok\n")
    assert sample(telemetry, "healthy") == 1
    now[0] = replace(status(), waits=(Wait("gradient", "12D3KooWyou", 99.0, 60.0, Unknown("microbatch 7\nof X")),))
    code, text = asker.line("/health")
    assert code == 503
    assert text == "overdue: waited 99 s (at most 60 s) for gradient from 12D3KooWyou (microbatch 7 of X)\n"
    assert json.loads(asker.line("/status")[1])["health"] == text.strip()
    assert sample(telemetry, "healthy") == 0


def test_clients_outside_a_members_only_run_see_no_addresses(
    telemetry: PrometheusTelemetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = "join address /ip4/192.0.2.9/tcp/4101/p2p/12D3: nobody at far.example:4102, [2001:db8::9]:4102, 192.0.2.8"
    now = replace(status(), troubles=(Trouble("libp2p", trouble, 9.0),))
    telemetry.watch(lambda: now, tmp_path)
    asker = Asker(telemetry.serve("127.0.0.1", 0, private=True))
    everything = {path: asker.ask(path)[2].decode() for path in PAGES}
    assert "192.168.100.1:41002" in everything["/status"]
    assert "192.168.100.1:41003" in everything["/sd"]
    monkeypatch.setattr(http_server, "scope", lambda host: "public")
    told = {path: asker.ask(path)[2].decode() for path in PAGES}
    for path, text in told.items():
        assert not re.search(r"192\.(0|168)\.|far\.example|2001:|tcp/41", text), path
    found = status_json.decode(told["/status"].encode())
    assert [one.advert.peer_id for one in found.seen] == [one.advert.peer_id for one in now.seen]
    assert json.loads(told["/sd"]) == []
    expected = "join address … nobody at … … …"
    assert http_server.without_addresses(lambda: (None, trouble))() == (None, expected)
    assert [one.message for one in found.troubles] == [expected]


@pytest.mark.parametrize(("host", "public"), [
    ("127.0.0.1", False), ("::1", False), ("10.1.2.3", False), ("::ffff:192.168.1.2", False), ("fe80::1%eth0", False),
    ("8.8.8.8", True), ("2606:4700::1", True), ("::ffff:8.8.8.8", True),
])  # fmt: skip
def test_a_client_with_a_public_address_is_outside(host: str, public: bool) -> None:
    assert (scope(host) == "public") is public


def test_status_reads_back(telemetry: PrometheusTelemetry, asker: Asker, tmp_path: Path) -> None:
    telemetry.watch(status, tmp_path)
    telemetry.event("outer_round", round=1, result="alone", reason="none", seconds=0.5, bytes=0)
    code, headers, body = asker.ask("/status")
    assert (code, headers["Content-Type"]) == (200, "application/json")
    found = status_json.decode(body)
    assert replace(found, figures=status().figures) == status()
    assert found.figures.rounds == {"alone": 1}
    assert found.figures.disk_free_bytes is not None
    assert found.figures.rss_bytes > 1_000_000
    assert abs(found.figures.unix_time_s - time.time()) < 60


def test_discovery_has_one_target_for_each_live_node(asker: Asker, telemetry: PrometheusTelemetry) -> None:
    seen = (
        SeenPeer(advert(1, libp2p_metrics="http://192.168.100.1:41004/metrics")),
        SeenPeer(advert(2, state="left")),
        SeenPeer(advert(3, stage=-1, metrics="http://[fd00::3]:41003/metrics"), aside_s=9.0),
        SeenPeer(advert(4, metrics="")),
        SeenPeer(advert(5, metrics="http://evil:41003/metrics?x=1")),
        SeenPeer(advert(6, metrics="ftp://10.0.0.1:21/metrics")),
    )
    telemetry.watch(lambda: replace(status(), seen=seen), Path())
    code, headers, body = asker.ask("/sd")
    assert (code, headers["Content-Type"]) == (200, "application/json")
    found = json.loads(body)

    def labels(number: int, stage: str, kind: str = "node") -> dict[str, str]:
        meta = {"peer_id": advert(number).peer_id, "stage": stage, "run_id": RUN, "version": "0.1.0", "kind": kind}
        return {f"__meta_noloco_{name}": value for name, value in meta.items()}

    assert found == [
        {"targets": ["192.168.100.0:41003"], "labels": labels(0, "0")},
        {"targets": ["192.168.100.1:41003"], "labels": labels(1, "1")},
        {"targets": ["192.168.100.1:41004"], "labels": labels(1, "1", "libp2p")},
        {"targets": ["[fd00::3]:41003"], "labels": labels(3, "")},
    ]


def test_a_newcomer_that_has_seen_no_peer_lists_no_targets(asker: Asker, telemetry: PrometheusTelemetry) -> None:
    now = [replace(status(), advert=replace(advert(0), state="starting"), seen=())]
    telemetry.watch(lambda: now[0], Path())
    assert asker.line("/sd") == (503, f"{http_server.STARTING}\n")
    now[0] = replace(now[0], seen=(SeenPeer(advert(1)),))
    assert len(json.loads(asker.ask("/sd")[2])) == 2
    now[0] = replace(status(), seen=())
    assert len(json.loads(asker.ask("/sd")[2])) == 1, "the first node, which waits for others"


def test_metrics_that_are_computed_at_a_scrape(telemetry: PrometheusTelemetry, tmp_path: Path) -> None:
    gradients = Wait("gradient", "P", 3.0, 60.0), Wait("gradient", "Q", 2.0, 60.0)
    waits = (Wait("orders", Resource.OWNER, 500.0, None, idle=True), *gradients)
    troubles = tuple(Trouble(f"trouble {number}", "bad", 1.0) for number in range(100))
    telemetry.watch(lambda: replace(status(), waits=waits, troubles=troubles), tmp_path)
    telemetry.measure_memory(lambda: (7, 9))
    assert sample(telemetry, "run_steps") == 1000
    assert sample(telemetry, "longest_wait_seconds") == 3.0, "idle waits do not count"
    assert sample(telemetry, "trouble", name="trouble 0") == 1
    assert [sample(telemetry, "device_memory_bytes", kind=kind) for kind in ("used", "total")] == [7, 9]
    assert (sample(telemetry, "disk_free_bytes") or 0) > 0
    families = {family.name: family for family in telemetry.registry.collect()}
    assert len(families["noloco_trouble"].samples) == 24
    telemetry.measure_memory(None)
    used, total = (sample(telemetry, "device_memory_bytes", kind=kind) for kind in ("used", "total"))
    assert 1_000_000 < (used or 0) < (total or 0)
    rss = telemetry.registry.get_sample_value("process_resident_memory_bytes")
    assert rss is not None
    assert rss > 1_000_000
    telemetry.close()
    assert telemetry._watchdog is not None
    assert not telemetry._watchdog.is_alive()


def test_a_bug_in_the_status_is_reported_and_leaves_the_metrics(telemetry: PrometheusTelemetry, asker: Asker) -> None:
    def fails() -> Status:
        raise RuntimeError("dictionary changed size\nduring iteration")

    telemetry.watch(fails, Path())
    assert asker.line("/health") == (500, "500 RuntimeError: dictionary changed size\n")
    code, text = asker.line("/metrics")
    assert code == 200
    assert "noloco_healthy 0.0" in text
    assert "noloco_inner_steps_total 0.0" in text


def test_a_stuck_loop_is_reported(
    telemetry: PrometheusTelemetry, asker: Asker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop is blocked while another thread asks, which asks once more after the loop has recovered."""
    longest_s = at_most(0.5)
    monkeypatch.setattr("noloco_p2p.core.health.LONGEST_SILENCE_S", longest_s)
    telemetry.watch(status, tmp_path)
    found: list[tuple[int, str]] = []
    stuck, asked = threading.Event(), threading.Event()

    def ask() -> None:
        stuck.wait(10)
        give_up_at = time.monotonic() + longest_s + 5
        while time.monotonic() < give_up_at and (not found or found[-1][0] == 200):
            found.append(asker.line("/health"))
        asked.set()

    async def life() -> None:
        telemetry.event("lag", seconds=0.0)
        stuck.set()
        assert asked.wait(longest_s + 10)  # blocks the loop on purpose
        telemetry.event("lag", seconds=0.6)

    observer = threading.Thread(target=ask)
    observer.start()
    asyncio.run(life())
    observer.join()
    assert found[0] == (200, "ok\n")
    code, line = found[-1]
    silent = re.fullmatch(r"the event loop has been silent for (\d+) s: something blocks this process\n", line)
    assert code == 503
    assert silent is not None
    assert int(silent[1]) >= max(1, round(longest_s))
    assert asker.line("/health") == (200, "ok\n")


def test_paths_methods_and_compression_follow_http(asker: Asker, telemetry: PrometheusTelemetry) -> None:
    telemetry.watch(lambda: status(100), Path())
    code, _, body = asker.ask("/nothing")
    assert code == 404
    assert all(path in body.decode() for path in PAGES)
    assert asker.ask("/metrics", "POST")[0] == 501
    with socket.create_connection(("127.0.0.1", asker.port), timeout=5) as client:
        client.sendall(b"HEAD /sd HTTP/1.0\r\n\r\n")
        head, _, body = b"".join(iter(lambda: client.recv(65_536), b"")).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(asker.ask('/sd')[2])}".encode() in head.splitlines()
    assert body == b""
    code, headers, packed = asker.ask("/sd", **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == asker.ask("/sd")[2]


@pytest.mark.parametrize(
    ("address", "code"), [("http://[", 404), ("http://node:9100/metrics", 200), ("/metrics?x=[", 200)]
)
def test_whatever_the_address_is_there_is_an_answer(asker: Asker, address: str, code: int) -> None:
    with socket.create_connection(("127.0.0.1", asker.port), timeout=5) as client:
        client.sendall(f"GET {address} HTTP/1.0\r\n\r\n".encode())
        assert client.makefile("rb").readline().startswith(f"HTTP/1.0 {code} ".encode())


def test_metrics_come_in_the_requested_format(asker: Asker) -> None:
    _, headers, body = asker.ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    _, headers, body = asker.ask("/metrics?name[]=noloco_step&unheard=of")
    assert headers["Content-Type"].startswith("text/plain")
    assert [line for line in body.decode().splitlines() if not line.startswith("#")] == ["noloco_step 0.0"]


def test_slow_clients_do_not_hold_places(asker: Asker) -> None:
    """Three times as many silent clients as there are places connect; other requests are answered nevertheless."""
    before = threading.active_count()
    slow = [socket.create_connection(("127.0.0.1", asker.port)) for _ in range(3 * http_server.REQUESTS_LIMIT)]
    try:
        wait_until(lambda: threading.active_count() >= before + http_server.REQUESTS_LIMIT, "a thread for every place")
        for _ in range(5):
            assert asker.ask("/metrics")[0] == 200
            assert threading.active_count() <= before + http_server.REQUESTS_LIMIT
    finally:
        for each in slow:
            each.close()
    wait_until(lambda: threading.active_count() <= before, "the end of the threads")


def test_a_client_that_sends_too_slowly_is_cut_off_at_the_deadline(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then resets the timeouts of the socket, but not the deadline of the request."""
    monkeypatch.setattr(http_server, "DEADLINE_S", 0.5)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", asker.port), timeout=0.05) as drip:
        drip.sendall(b"GET /metrics HTTP/1.0\r\nX-Slow: ")
        while time.monotonic() < began + 60:
            try:
                drip.sendall(b"x")
                if drip.recv(100) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert (took_s := time.monotonic() - began) > 0.4
    assert in_time(took_s, 3)


@pytest.mark.parametrize(
    "sent", [b"\r\n\r\n", b"GET\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"\xff\x00" * 50 + b"\r\n", b"A" * 70_000]
)
def test_a_malformed_request_is_refused_and_the_next_one_answered(asker: Asker, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", asker.port), timeout=5) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        try:
            answer = client.recv(4096)
        except ConnectionResetError:
            answer = b""
    assert b" 200 " not in answer
    assert asker.ask("/metrics")[0] == 200


def test_requests_for_which_there_was_no_thread_do_not_hold_places(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(socketserver.ThreadingMixIn, "process_request", refuses)
        for _ in range(REQUESTS_LIMIT):
            with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
                asker.ask("/metrics")
    assert asker.ask("/metrics")[0] == 200


def test_a_closed_server_is_gone(telemetry: PrometheusTelemetry) -> None:
    port = telemetry.serve("127.0.0.1", 0)
    telemetry.close()
    telemetry.close()
    with pytest.raises(ConnectionRefusedError):
        Asker(port).ask("/health")
    assert telemetry.serve("127.0.0.1", port) == port, "the port can be opened again at once"
    telemetry.close()


def test_an_address_of_another_machine_is_named(telemetry: PrometheusTelemetry) -> None:
    with pytest.raises(LocalError, match=r"metrics: 192\.0\.2\.1 port 0 cannot be opened .*listen\.metrics_port"):
        telemetry.serve("192.0.2.1", 0)


def test_256_peers_fit_into_200_kb(asker: Asker, telemetry: PrometheusTelemetry, tmp_path: Path) -> None:
    telemetry.watch(lambda: status(256), tmp_path)
    sizes = {path: len(asker.ask(path)[2]) for path in ("/metrics", "/sd", "/status")}
    assert all(1_000 < size < 200_000 for size in sizes.values()), sizes
    assert len(json.loads(asker.ask("/sd")[2])) == 257


@dataclass
class Flooded:
    """A server whose page is asked for and not answered yet, while others open connections."""

    server: HttpServer
    asked: threading.Event = field(default_factory=threading.Event)
    answer: threading.Event = field(default_factory=threading.Event)
    flood: list[socket.socket] = field(default_factory=list)


@contextmanager
def flooded() -> Iterator[Flooded]:
    def slow(query: str, accept: str) -> HttpResponse:
        found.asked.set()
        found.answer.wait(60)
        return HttpResponse(b"ok")

    found = Flooded(HttpServer.open("127.0.0.1", 0, {"/": slow}, {}))
    try:
        yield found
    finally:
        found.answer.set()
        found.server.close()
        for each in found.flood:
            each.close()


def test_a_host_that_floods_cuts_off_only_its_own_requests() -> None:
    """Hole 17: one host opened 320 connections a second, and every scrape from another was cut off unanswered."""
    got: list[bytes] = []
    with flooded() as under:
        port = under.server.server_address[1]

        def scrape() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/")
            got.append(connection.getresponse().read())

        scraping = threading.Thread(target=scrape)
        scraping.start()
        assert under.asked.wait(60)
        for _ in range(5 * REQUESTS_LIMIT):
            under.flood.append(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)))
        # The earlier connections have been cut off in favour of later ones.
        assert under.flood[0].recv(1) == b""
        assert under.flood[2 * REQUESTS_LIMIT].recv(1) == b""
        under.answer.set()
        scraping.join(60)
        assert got == [b"ok"]


def test_the_addresses_of_one_ipv6_network_are_one_host() -> None:
    """A subscriber has 2^64 of them: with a new one for each request it had the fewest requests, and cut off others."""
    with flooded() as under:
        address = "127.0.0.1", under.server.server_address[1]
        with socket.create_connection(address, timeout=60) as scrape:
            scrape.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert under.asked.wait(60)
            for number in range(2 * REQUESTS_LIMIT):
                ours, theirs = socket.socketpair()
                under.flood.append(ours)
                under.server.process_request(theirs, (f"2001:db8::{number:x}", 1, 0, 0))
            under.answer.set()
            assert scrape.recv(15) == b"HTTP/1.0 200 OK"


def test_discovery_lists_a_bounded_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_targets, "NODES_LIMIT", 3)
    named = [each["labels"]["__meta_noloco_peer_id"] for each in scrape_targets.targets(status(10))]  # type: ignore[index]
    assert named == [advert(number).peer_id for number in range(4)], "this node is among them"


def test_a_host_gets_a_share_of_the_cpu_and_does_not_delay_others() -> None:
    """A host that requested page after page used 90 % of a core."""
    page_s, pages = 0.02, 5

    def costly(query: str, accept: str) -> HttpResponse:
        began = time.thread_time()
        while time.thread_time() - began < page_s:
            pass
        return HttpResponse(b"ok")

    server = HttpServer.open("127.0.0.1", 0, {"/": costly}, {})
    asker, port = Asker(server.server_address[1]), server.server_address[1]
    try:
        began = time.monotonic()
        for _ in range(pages):
            assert asker.line("/") == (200, "ok")
            answered_at = time.monotonic()
            while server._accepted:  # What a page has cost is known once its connection has ended, after its answer.
                time.sleep(0.01)
        assert answered_at - began >= (pages - 1) * page_s / http_server.CPU_SHARE
        server._paid_at["127.0.0.1"] = time.monotonic() + 600
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(REQUESTS_LIMIT)]
        other = http.client.HTTPConnection("127.0.0.1", port, timeout=60, source_address=("127.0.0.2", 0))
        other.request("GET", "/")
        assert other.getresponse().read() == b"ok"
        assert waiting[0].recv(1) == b"", "its earlier place"
        other.close()
    finally:
        server.close()
    for one in waiting[1:]:
        assert one.recv(1) == b"", "no connection waits for its turn any more"
        one.close()
