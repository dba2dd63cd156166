"""What a node says over HTTP: /metrics, /sd, /health and /status. Made in the threads of http_server.py."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import Status
from noloco_p2p.io.telemetry import status_json
from noloco_p2p.io.telemetry.http_server import JSON, HttpResponse, Page

STARTING = "starting: this node meets the others and reads what it needs"
"""Its health before there is a node that could be asked."""
METRICS_PATH = "/metrics"
METRICS_URL = re.compile(r"http://((?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5})(/[\w./-]{0,100})?")
GONE = frozenset({"left"})
"""States of nodes that no longer serve anything."""
HELP = """\
/metrics  for Prometheus
/sd       all nodes that this one knows, for Prometheus' HTTP service discovery
/health   ok, or 503 with the reason
/status   what this node does and waits for, as JSON
"""


def pages(registry: CollectorRegistry, health: Callable[[], tuple[Status | None, str | None]]) -> Mapping[str, Page]:
    """Path → what makes its response.

    `health` gives the node's status, None before there is one, and what is wrong in one line, None when nothing is.
    """

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


def targets(status: Status) -> list[dict[str, object]]:
    """What Prometheus scrapes: this node and all that it knows, in the order of their ids, one entry a target."""
    adverts = sorted([status.advert, *(seen.advert for seen in status.seen)], key=lambda advert: advert.peer_id)
    return [target for advert in adverts if advert.state not in GONE for target in _targets(advert)]


def _targets(advert: Advert) -> Iterator[dict[str, object]]:
    for kind, url in (("node", advert.metrics), ("libp2p", advert.libp2p_metrics)):
        found = METRICS_URL.fullmatch(url)
        if found is None:
            continue
        labels = {
            "__meta_noloco_peer_id": advert.peer_id,
            "__meta_noloco_stage": str(advert.stage) if advert.stage >= 0 else "",
            "__meta_noloco_run_id": advert.run_id,
            "__meta_noloco_version": advert.version,
            "__meta_noloco_kind": kind,
        }
        if found[2] not in (None, METRICS_PATH):
            labels["__metrics_path__"] = found[2]
        yield {"targets": [found[1]], "labels": labels}


def _line(text: str, code: int) -> HttpResponse:
    return HttpResponse(" ".join(text.split()).encode() + b"\n", code=code)
