"""What a node says over HTTP (/metrics, /sd, /health, /status), and the small server that answers with it.

It runs in threads of its own: it answers while the event loop of the node is stuck. One request a connection, a bounded
number of them at once, each for a bounded time: a slow client holds a thread for DEADLINE_S at most, and loses it
sooner when others come.
"""

import contextlib
import gzip
import http.server
import json
import logging
import re
import select
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import Status
from noloco_p2p.errors import LocalError
from noloco_p2p.humanize import plain
from noloco_p2p.io.telemetry import status_json
from noloco_p2p.io.telemetry.scrape_targets import METRICS_PATH, targets

REQUESTS_LIMIT = 16
"""Requests at once; for one more the oldest of the host that has the most is cut off."""
DEADLINE_S = 10.0
"""Longest life of a request, from its connection to the last byte of the answer."""
SILENCE_S = 5.0
"""Longest wait for the next bytes of a client."""
POLL_S = 0.25
"""How often the server looks for requests past their deadline, and whether it is to close."""
CPU_SHARE = 0.1
"""Most of a core that the requests of one host take in the long run: the next one waits until the last are paid for."""
FREED_S = 0.1
"""Wait for the thread of a request that was cut off."""
SMALLEST_GZIP_BYTES = 1_024

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
STARTING = "starting: this node is meeting the others and reading what it needs"
"""Its health before there is a node that could be asked."""
HELP = """\
/metrics  for Prometheus
/sd       all nodes that this one knows, for Prometheus' HTTP service discovery
/health   ok, or 503 with the reason
/status   what this node does and waits for, as JSON
"""

logger = logging.getLogger("noloco_p2p")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What a page answers."""

    body: bytes
    content_type: str = TEXT
    code: int = 200
    policy: str = ""
    """Value of the header `Content-Security-Policy`."""


Health = Callable[[], tuple[Status | None, str | None]]
"""The node's status, None before there is one, and what is wrong in one line, None when nothing is."""
ADDRESS = re.compile(r"\S*(?:/(?:ip|dns)[46]?/|\d+\.\d+\.\d+\.\d+|[\w.\]-]+:\d)\S*")
"""A word with an address in it, or with a host and a port."""
Page = Callable[[str, str], HttpResponse]
"""(query, header `Accept`) → response, in a thread of the server. It must not wait for the event loop."""


class HttpServer(socketserver.ThreadingTCPServer):
    """Answers GET and HEAD of the paths of `pages`, with a thread for each request, REQUESTS_LIMIT of them at most.

    Not `http.server.HTTPServer`, which looks up the name of this machine: that can take long.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, pages: Mapping[str, Page], outside: Mapping[str, Page]) -> None:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = addresses[0][0]
        self.pages, self.outside = pages, outside
        self._accepted: dict[Any, tuple[float, str]] = {}
        """Connection → when it was accepted, and from where, oldest first."""
        self._paid_at: dict[str, float] = {}
        """When the next request of each host may be answered."""
        self._changed = threading.Condition()
        super().__init__((host, port), _PageHandler)

    @classmethod
    def open(
        cls, host: str, port: int, pages: Mapping[str, Page], outside: Mapping[str, Page] | None = None
    ) -> "HttpServer":
        """Listen, and answer from now on (port 0 picks one), whoever is at a public address with the pages for
        `outside`. LocalError when it cannot be opened."""
        try:
            server = cls(host, port, pages, pages if outside is None else outside)
        except OSError as error:
            raise LocalError(
                f"metrics: {host} port {port} cannot be opened ({error.strerror or error}); set listen.metrics_port"
            ) from error
        threading.Thread(target=server.serve_forever, args=(POLL_S,), name="web", daemon=True).start()
        return server

    def close(self) -> None:
        """Cut off the requests in hand and stop listening (POLL_S at most)."""
        self.shutdown()
        self.server_close()
        self.cut_off(time.monotonic())

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give it a thread; the oldest request is cut off when there is none left."""
        with self._changed:
            if not self._has_room():
                hosts = Counter(host for _, host in self._accepted.values())
                busiest = max(hosts, key=hosts.__getitem__)
                self._end(next(one for one, (_, host) in self._accepted.items() if host == busiest))
            if not self._changed.wait_for(self._has_room, FREED_S):
                self.shutdown_request(request)
                return
            self._accepted[request] = time.monotonic(), client_address[0]
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer when it is the host's turn, close, and give the place back."""
        host = client_address[0]
        try:
            if _is_cut_off_within(self._paid_at.get(host, 0.0) - time.monotonic(), request):
                self.shutdown_request(request)
            else:
                super().process_request_thread(request, client_address)
        finally:
            with self._changed:
                now = time.monotonic()
                self._paid_at[host] = max(now, self._paid_at.get(host, 0.0)) + time.thread_time() / CPU_SHARE
                self._paid_at = {host: at for host, at in self._paid_at.items() if at > now}
                self._accepted.pop(request, None)
                self._changed.notify_all()

    def service_actions(self) -> None:
        """Between two connections, and every POLL_S: end what takes too long."""
        self.cut_off(time.monotonic() - DEADLINE_S)

    def cut_off(self, until: float) -> None:
        """Break the connections that were accepted at that time or before; their threads end by it."""
        with self._changed:
            late = [request for request, (accepted_at, _) in self._accepted.items() if accepted_at <= until]
        for request in late:
            self._end(request)

    def _end(self, request: Any) -> None:
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def _has_room(self) -> bool:
        return len(self._accepted) < REQUESTS_LIMIT

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""
        logger.debug("web: a request failed", exc_info=True)


class _PageHandler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: HttpServer
    timeout = SILENCE_S
    error_message_format, error_content_type = "%(code)d %(message)s\n", TEXT

    def do_GET(self) -> None:
        """Answer with the page, or 404; HEAD: the same without the body."""
        response = self._response()
        body = response.body
        self.send_response(response.code)
        self.send_header("Content-Type", response.content_type)
        self.send_header("X-Content-Type-Options", "nosniff")
        if response.policy:
            self.send_header("Content-Security-Policy", response.policy)
        if len(body) >= SMALLEST_GZIP_BYTES and gzip_accepted(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def _response(self) -> HttpResponse:
        where = urlsplit(self.path)
        page = (self.server.outside if _is_public(self.client_address[0]) else self.server.pages).get(where.path)
        if page is None:
            return HttpResponse(f"404 no such page; there are: {' '.join(self.server.pages)}\n".encode(), code=404)
        try:
            return page(where.query, self.headers.get("Accept", ""))
        except Exception as error:  # whoever watches learns of a bug and goes on watching
            logger.debug("web: %s failed", where.path, exc_info=True)
            return HttpResponse(f"500 {type(error).__name__}: {error}".splitlines()[0].encode() + b"\n", code=500)

    def version_string(self) -> str:
        """Value of the header `Server`."""
        return "noloco"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape is no news."""


def pages(registry: CollectorRegistry, health: Health) -> Mapping[str, Page]:
    """Path → what makes its response."""

    def metrics(query: str, accept: str) -> HttpResponse:
        encoder, content_type = choose_encoder(accept)
        names = parse_qs(query).get("name[]")
        chosen = registry if names is None else registry.restricted_registry(names)
        return HttpResponse(encoder(chosen), content_type)

    def discovery(query: str, accept: str) -> HttpResponse:
        status, _ = health()
        if status is None or (status.advert.state == "starting" and not status.seen):
            return _line(STARTING, 503)  # it would know of itself only: Prometheus keeps the targets that it had
        return HttpResponse(json.dumps(targets(status), separators=(",", ":")).encode(), JSON)

    def health_page(query: str, accept: str) -> HttpResponse:
        _, wrong = health()
        return _line("ok", 200) if wrong is None else _line(wrong, 503)

    def status_page(query: str, accept: str) -> HttpResponse:
        status, wrong = health()
        if status is None:
            return HttpResponse(json.dumps({"health": wrong}).encode(), JSON, 503)
        return HttpResponse(status_json.encode(status, wrong), JSON)

    return {
        METRICS_PATH: metrics,
        "/sd": discovery,
        "/health": health_page,
        "/status": status_page,
        "/": lambda query, accept: HttpResponse(HELP.encode()),
    }


def without_addresses(health: Health) -> Health:
    """What is told to outsiders: nobody's addresses, and none in a text."""

    def told() -> tuple[Status | None, str | None]:
        status, wrong = health()
        if status is not None:
            seen = tuple(replace(one, advert=_unlocated(one.advert)) for one in status.seen)
            troubles = tuple(replace(one, message=ADDRESS.sub("…", one.message)) for one in status.troubles)
            status = replace(status, advert=_unlocated(status.advert), seen=seen, troubles=troubles)
        return status, wrong and ADDRESS.sub("…", wrong)

    return told


def _unlocated(advert: Advert) -> Advert:
    return replace(advert, addresses=(), metrics="", libp2p_metrics="")


def _is_cut_off_within(seconds: float, request: Any) -> bool:
    """Wait so long, if at all, or until somebody has shut the connection of a request down."""
    poll = select.poll()
    poll.register(request, 0)
    return seconds > 0 and bool(poll.poll(1e3 * seconds))


def _is_public(host: str) -> bool:
    ip = ip_address(host.partition("%")[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_global


def _line(text: str, code: int) -> HttpResponse:
    return HttpResponse(" ".join(plain(text).split()).encode() + b"\n", code=code)
