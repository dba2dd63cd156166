"""A small HTTP server in threads of its own: it answers while the event loop of the node is stuck.

What it answers is in http_pages.py. One request a connection, a bounded number of them at once, each for a bounded
time: a slow client holds a thread for DEADLINE_S at most, and loses it sooner when others come.
"""

import contextlib
import gzip
import http.server
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.exposition import gzip_accepted

from noloco_p2p.errors import LocalError

REQUESTS_LIMIT = 16
"""Requests at once; for one more the oldest is cut off."""
DEADLINE_S = 10.0
"""Longest life of a request, from its connection to the last byte of the answer."""
SILENCE_S = 5.0
"""Longest wait for the next bytes of a client."""
POLL_S = 0.25
"""How often the server looks for requests past their deadline, and whether it is to close."""
FREED_S = 0.1
"""Wait for the thread of a request that was cut off."""
SMALLEST_GZIP_BYTES = 1_024

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

logger = logging.getLogger("noloco_p2p")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What a page answers."""

    body: bytes
    content_type: str = TEXT
    code: int = 200


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

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = addresses[0][0]
        self.pages = pages
        self._places = threading.BoundedSemaphore(REQUESTS_LIMIT)
        self._accepted_at: dict[Any, float] = {}
        """Connection → when it was accepted, oldest first."""
        self._lock = threading.Lock()
        super().__init__((host, port), _PageHandler)

    @classmethod
    def open(cls, host: str, port: int, pages: Mapping[str, Page]) -> "HttpServer":
        """Listen, and answer from now on (port 0 picks one). LocalError when it cannot be opened."""
        try:
            server = cls(host, port, pages)
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
        if not self._places.acquire(blocking=False):
            with self._lock:
                oldest = next(iter(self._accepted_at.values()), 0.0)
            self.cut_off(oldest)
            if not self._places.acquire(timeout=FREED_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._accepted_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, close, and give the place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._accepted_at.pop(request, None)
            self._places.release()

    def service_actions(self) -> None:
        """Between two connections, and every POLL_S: end what takes too long."""
        self.cut_off(time.monotonic() - DEADLINE_S)

    def cut_off(self, until: float) -> None:
        """Break the connections that were accepted at that time or before; their threads end by it."""
        with self._lock:
            late = [request for request, accepted_at in self._accepted_at.items() if accepted_at <= until]
        for request in late:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

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
        page = self.server.pages.get(where.path)
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
