"""What a node shows a browser: `/`, the picture of `noloco top` in one file, and `/swarm`, its figures as JSON.

Neither has an address in it: who may see a run need not know where its members are. All text that nodes say of
themselves is set as text by the page's script, the only one that its policy admits.
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
"""For so long, and for SHARE times as long as it took, an answer serves everybody who asks."""
SHARE = 10.0


def pages(health: Health) -> Mapping[str, Page]:
    """Path → what makes its response; `health` gives the node's own status, as for the pages of every node."""
    whole = FILE.read_bytes()
    script = whole.partition(b"<script>")[2].partition(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    answer = HttpResponse(
        whole, "text/html; charset=utf-8", policy=f"{policy}; frame-ancestors 'none'; base-uri 'none'"
    )
    return {"/": lambda query, accept: answer, "/swarm": SwarmFigures(health)}


class SwarmFigures:
    """A page: the swarm around this node as JSON. Asking all nodes costs; it is done seldom, whoever asks how often."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._asking = threading.Lock()
        self._answer = b""
        self._fresh_until = 0.0

    def __call__(self, query: str, accept: str) -> HttpResponse:
        """The newest figures, 503 while this node has none."""
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
    """The same with … for every address in its texts, and without the hosts of its nodes."""
    match value:
        case str():
            return ADDRESS.sub("…", value)
        case dict():
            return {name: without_addresses(each) for name, each in value.items() if name != "host"}
        case list() | tuple():
            return [without_addresses(each) for each in value]
    return value
