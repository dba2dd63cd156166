"""The pages that a node serves to browsers: `/`, the view of `noloco top` in HTML, and `/swarm`, its figures as JSON.

Neither contains an address: a viewer of a run need not know where its members are. The page's script is the only one
that its Content-Security-Policy admits, and it inserts whatever nodes say about themselves as text, never as HTML.
"""

import asyncio
import base64
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noloco_p2p.io.telemetry.http_server import ADDRESS, JSON, Health, HttpResponse, Page

FILE = Path(__file__).with_suffix(".html")
FRESH_S = 2.0
"""An answer is reused for this long, or for SHARE times as long as it took to make, whichever is longer."""
SHARE = 10.0


def pages(health: Health) -> Mapping[str, Page]:
    """The pages by path. `health` returns the node's own status, as for its other pages."""
    whole = FILE.read_bytes()
    policy = f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src {script_source(whole)}"
    policy += "; frame-ancestors 'none'; base-uri 'none'"
    answer = HttpResponse(whole, "text/html; charset=utf-8", policy=policy)
    return {"/": lambda query, accept: answer, "/swarm": SwarmFigures(health)}


def script_source(page: bytes) -> str:
    """What a Content-Security-Policy says to admit the script of this page and no other."""
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"


class SwarmFigures:
    """The page `/swarm`: the swarm around this node, as JSON.

    Asking all nodes is expensive, so an answer is reused for a while, however many requests come.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._asking = threading.Lock()
        self._answer = b""
        self._fresh_until = 0.0

    def __call__(self, query: str, accept: str) -> HttpResponse:
        """The newest figures, or 503 while this node has no status yet."""
        status, wrong = self._health()
        if status is None:
            return HttpResponse(json.dumps({"health": wrong}).encode(), JSON, 503)
        with self._asking:
            began = time.monotonic()
            if began >= self._fresh_until:
                from noloco_p2p.observe import survey
                from noloco_p2p.observe.overview import overview

                found = overview(asyncio.run(survey.around(status))).as_json()
                self._answer = json.dumps(without_addresses(found), allow_nan=False).encode()
                ended = time.monotonic()
                self._fresh_until = ended + max(FRESH_S, SHARE * (ended - began))
            return HttpResponse(self._answer, JSON)


def without_addresses(value: Any) -> Any:
    """The same value with … for every address in its texts, and without the hosts of the nodes."""
    match value:
        case str():
            return ADDRESS.sub("…", value)
        case dict():
            return {name: without_addresses(each) for name, each in value.items() if name != "host"}
        case list() | tuple():
            return [without_addresses(each) for each in value]
    return value
