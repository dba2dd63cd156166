"""A node's pages over HTTP (/metrics, /sd, /health, /status), and the small server that serves them.

The server runs in its own threads, so it answers even while the node's event loop is stuck. A connection carries one
request. The number of requests in progress and the time for each are bounded: a slow client holds a thread for
DEADLINE_S at most, and loses it sooner if others need it.
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
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import Status
from noloco_p2p.errors import LocalError
from noloco_p2p.humanize import plain
from noloco_p2p.io.dht.reach import host_of, scope
from noloco_p2p.io.telemetry import status_json
from noloco_p2p.io.telemetry.scrape_targets import METRICS_PATH, targets

REQUESTS_LIMIT = 16
"""Most requests in progress. To accept one more, the oldest request of the host that has the most is cut off."""
DEADLINE_S = 10.0
"""Longest life of a request, from its connection to the last byte of the answer, seconds."""
SILENCE_S = 5.0
"""Longest wait for the next bytes from a client, seconds."""
POLL_S = 0.25
"""Time between two checks for requests past their deadline, and for a call of `close`, seconds."""
CPU_SHARE = 0.1
"""Most of a core that one host's requests take in the long run: each waits until earlier ones are paid for."""
FREED_S = 0.1
"""Longest wait for a cut-off request to give up its place, seconds."""
SMALLEST_GZIP_BYTES = 1_024

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
STARTING = "starting: this node is connecting to the others and loading its data"
"""The health of a process whose node does not exist yet."""

logger = logging.getLogger("noloco_p2p")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """The response of a page."""

    body: bytes
    content_type: str = TEXT
    code: int = 200
    policy: str = ""
    """Value of the header `Content-Security-Policy`."""


Health = Callable[[], tuple[Status | None, str | None]]
"""Returns the node's status, None before the node exists, and in one line what is wrong, None if nothing is."""
ADDRESS = re.compile(r"\S*(?:/(?:ip|dns)[46]?/|\d+\.\d+\.\d+\.\d+|[\w.\]-]+:\d)\S*")
"""Matches a word that contains an address, or a host and a port."""
Page = Callable[[str, str], HttpResponse]
"""(query, header `Accept`) → response. Runs in a thread of the server, and must not wait for the event loop."""


class HttpServer(socketserver.ThreadingTCPServer):
    """Answers GET and HEAD for the paths of `pages`, with one thread per request, at most REQUESTS_LIMIT.

    It does not use `http.server.HTTPServer`, which looks up this machine's name; that can take a long time.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, pages: Mapping[str, Page], outside: Mapping[str, Page]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self.pages, self.outside = pages, outside
        self._accepted: dict[Any, tuple[float, str]] = {}
        """Connection → when it was accepted, and its host; oldest first."""
        self._paid_at: dict[str, float] = {}
        """Host → when its next request may be answered."""
        self._changed = threading.Condition()
        super().__init__((host, port), _PageHandler)

    @classmethod
    def open(cls, host: str, port: int, pages: Mapping[str, Page], outside: Mapping[str, Page]) -> "HttpServer":
        """Listen (port 0 picks a free one) and start answering. Clients at public addresses get the pages of `outside`.
        Raises LocalError if the port cannot be opened."""
        try:
            server = cls(host, port, pages, outside)
        except OSError as error:
            raise LocalError(
                f"metrics: {host} port {port} cannot be opened ({error.strerror or error}); set listen.metrics_port"
            ) from error
        threading.Thread(target=server.serve_forever, args=(POLL_S,), name="web", daemon=True).start()
        return server

    def close(self) -> None:
        """Stop listening, and cut off the requests in progress. Takes POLL_S at most."""
        self.shutdown()
        self.server_close()
        self.cut_off(time.monotonic())

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a request; if there is no room, first cut off the oldest request of the busiest host."""
        with self._changed:
            if not self._has_room():
                [(busiest, _)] = Counter(host for _, host in self._accepted.values()).most_common(1)
                self._end(next(one for one, (_, host) in self._accepted.items() if host == busiest))
            if not self._changed.wait_for(self._has_room, FREED_S):
                self.shutdown_request(request)
                return
            self._accepted[request] = time.monotonic(), host_of(client_address[0])
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer when the host's turn comes, close the connection, and free the place."""
        host = host_of(client_address[0])
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
        """Called after each connection and every POLL_S: cut off requests that take too long."""
        self.cut_off(time.monotonic() - DEADLINE_S)

    def cut_off(self, until: float) -> None:
        """Shut down the connections accepted at or before `until` (monotonic clock), which ends their threads."""
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
        """Log at debug level only: a client that disconnects is not worth reporting."""
        logger.debug("web: a request failed", exc_info=True)
        with self._changed:
            self._accepted.pop(request, None)  # perhaps the system allows no further thread, which would do it


class _PageHandler(http.server.BaseHTTPRequestHandler):
    """Handles one request."""

    server: HttpServer
    timeout = SILENCE_S
    error_message_format, error_content_type = "%(code)d %(message)s\n", TEXT

    def do_GET(self) -> None:
        """Answer with the page, or 404. For HEAD, leave out the body."""
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
        path, _, query = re.sub("^https?://[^/?]*", "", self.path).partition("?")  # proxies are sent whole URLs
        pages = self.server.outside if scope(self.client_address[0]) == "public" else self.server.pages
        if (page := pages.get(path)) is None:
            return HttpResponse(f"404 no such page; the pages are: {' '.join(self.server.pages)}\n".encode(), code=404)
        try:
            return page(query, self.headers.get("Accept", ""))
        except Exception as error:  # report a bug to the client, and keep the server running
            logger.debug("web: %s failed", path, exc_info=True)
            return HttpResponse(f"500 {type(error).__name__}: {error}".splitlines()[0].encode() + b"\n", code=500)

    def version_string(self) -> str:
        """Value of the header `Server`."""
        return "noloco"

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: a scrape is not worth logging."""


def pages(registry: CollectorRegistry, health: Health) -> Mapping[str, Page]:
    """The pages that every node has, by path."""

    def metrics(query: str, accept: str) -> HttpResponse:
        encoder, content_type = choose_encoder(accept)
        names = parse_qs(query).get("name[]")
        return HttpResponse(encoder(registry if names is None else registry.restricted_registry(names)), content_type)

    def discovery(query: str, accept: str) -> HttpResponse:
        status, _ = health()
        if status is None or (status.advert.state == "starting" and not status.seen):
            return _line(STARTING, 503)  # it only knows itself so far; on an error Prometheus keeps its targets
        return HttpResponse(json.dumps(targets(status), separators=(",", ":")).encode(), JSON)

    def health_page(query: str, accept: str) -> HttpResponse:
        _, wrong = health()
        return _line("ok", 200) if wrong is None else _line(wrong, 503)

    def status_page(query: str, accept: str) -> HttpResponse:
        status, wrong = health()
        if status is None:
            return HttpResponse(json.dumps({"health": wrong}).encode(), JSON, 503)
        return HttpResponse(status_json.encode(status, wrong), JSON)

    return {METRICS_PATH: metrics, "/sd": discovery, "/health": health_page, "/status": status_page}


def without_addresses(health: Health) -> Health:
    """The health as shown to outsiders: without any node's addresses, and with those in texts masked."""

    def masked() -> tuple[Status | None, str | None]:
        status, wrong = health()
        if status is not None:
            seen = tuple(replace(one, advert=_unlocated(one.advert)) for one in status.seen)
            troubles = tuple(replace(one, message=ADDRESS.sub("…", one.message)) for one in status.troubles)
            status = replace(status, advert=_unlocated(status.advert), seen=seen, troubles=troubles)
        return status, wrong and ADDRESS.sub("…", wrong)

    return masked


def _unlocated(advert: Advert) -> Advert:
    return replace(advert, addresses=(), metrics="", libp2p_metrics="")


def _is_cut_off_within(seconds: float, request: Any) -> bool:
    """Wait for up to `seconds`, and return whether the request's connection was shut down meanwhile."""
    poll = select.poll()
    poll.register(request, 0)
    return seconds > 0 and bool(poll.poll(1e3 * seconds))


def _line(text: str, code: int) -> HttpResponse:
    return HttpResponse(" ".join(plain(text).split()).encode() + b"\n", code=code)
