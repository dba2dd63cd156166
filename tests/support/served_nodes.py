"""Made-up nodes that answer over HTTP on loopback, for the tests of programs that watch a swarm."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from diagnosed import with_advert, with_figures, with_status

from noloco_p2p.core.status import SeenPeer
from noloco_p2p.io.telemetry import status_json
from noloco_p2p.observe.diagnosis.findings import Report


@dataclass
class Served:
    """The nodes, which answer on loopback."""

    urls: dict[str, str]
    servers: dict[str, ThreadingHTTPServer]

    def stop(self, name: str) -> None:
        """Make this node stop answering."""
        server = self.servers.pop(name)
        server.shutdown()
        server.server_close()


def told_now(report: Report) -> bytes:
    """The status page, by a clock that is right at the time of the request."""
    status = with_figures(report, unix_time_s=time.time()).status
    assert status is not None
    return status_json.encode(status)


@contextmanager
def served_nodes(reports: dict[str, Report]) -> Iterator[Served]:
    """Serve each node on its own port; all nodes see each other."""
    pages: dict[int, Report] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = told_now(pages[self.connection.getsockname()[1]]) if self.path == "/status" else b"no"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    served = Served({}, {})
    for name in reports:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        served.servers[name] = server
        served.urls[name] = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    there = {name: with_advert(r, metrics=f"{served.urls[name]}/metrics") for name, r in reports.items()}
    adverts = {name: r.advert for name, r in there.items() if r.advert is not None}
    for name, report in there.items():
        seen = tuple(SeenPeer(other) for at, other in adverts.items() if at != name)
        pages[int(served.urls[name].rpartition(":")[2])] = with_status(report, seen=seen)
    try:
        yield served
    finally:
        for name in list(served.servers):
            served.stop(name)
