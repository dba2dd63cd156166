"""What a node says over HTTP (web.py): /metrics, /sd, /health and /status. Made in the threads of the server."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from noloco_p2p.core.health import problem_line
from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import Status
from noloco_p2p.io.telemetry import status_json
from noloco_p2p.io.telemetry.http_server import JSON, Answer, Asked, Page
from noloco_p2p.io.telemetry.metrics import MOST_LABELS

STARTING = "starting: this node meets the others and reads what it needs"
"""Its health before there is a node that could tell."""
METRICS_PATH = "/metrics"
METRICS_URL = re.compile(r"http://((?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5})(/[\w./-]{0,100})?")
GONE = frozenset({"left"})
"""States of those who serve nothing any more."""
HELP = """\
/metrics  for Prometheus
/sd       all nodes that this one knows, for Prometheus' HTTP service discovery
/health   ok, or 503 with the reason
/status   what this node does and waits for, as JSON
"""

logger = logging.getLogger("noloco_p2p")


class Watched:
    """The node as it is at the moment of asking, from any thread. Before `watch` it is starting."""

    def __init__(self) -> None:
        self._status: Callable[[], Status] | None = None

    def watch(self, status: Callable[[], Status]) -> None:
        """From now on there is a node, and `status` tells of it."""
        self._status = status

    def now(self) -> tuple[Status | None, str | None]:
        """Its status, None before there is one, and what is wrong in one line, None when nothing is."""
        if self._status is None:
            return None, STARTING
        status = self._status()
        return status, problem_line(status)


class Scraped(Collector):
    """Metrics of the node that are made when somebody scrapes."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.memory: Callable[[], tuple[int, int]] | None = None
        """Bytes of the device's memory that are used, and that there are."""

    def describe(self) -> list[Metric]:
        """None ahead of time."""
        return []

    def collect(self) -> Iterator[Metric]:
        """See `Collector`. Never raises: a scrape has much else to tell."""
        try:
            status, wrong = self._watched.now()
            found = list(_of_status(status, wrong))
            if self.memory is not None:
                found.append(_of_memory(*self.memory()))
        except Exception:  # an instrument may never stop what it watches
            logger.debug("the node's status cannot be told", exc_info=True)
            found = [_gauge("healthy", HEALTHY, 0)]
        yield from found


HEALTHY = "1 while /health answers 200, else 0."


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"noloco_{name}", text, value)


def _of_status(status: Status | None, wrong: str | None) -> Iterator[Metric]:
    yield _gauge("healthy", HEALTHY, wrong is None)
    if status is None:
        return
    yield _gauge("run_steps", "Length of the run, in steps.", status.steps)
    longest_s = max((wait.since_s for wait in status.waits if not wait.idle), default=0.0)
    yield _gauge("longest_wait_seconds", "Since when the longest wait that holds something up lasts.", longest_s)
    troubles = GaugeMetricFamily("noloco_trouble", "1 while something is wrong, by its name.", labels=["name"])
    for trouble in status.troubles[:MOST_LABELS]:
        troubles.add_metric([trouble.name], 1)
    yield troubles
    if status.figures.disk_free_bytes is not None:
        yield _gauge("disk_free_bytes", "Free space where the node's directory is.", status.figures.disk_free_bytes)


def _of_memory(used: int, total: int) -> Metric:
    text = "Memory of the device: used, and in total. Where the CPU is the device: by this process."
    memory = GaugeMetricFamily("noloco_device_memory_bytes", text, labels=["kind"])
    memory.add_metric(["used"], used)
    memory.add_metric(["total"], total)
    return memory


def pages(registry: CollectorRegistry, watched: Watched) -> Mapping[str, Page]:
    """Path → what makes its answer."""

    def metrics(asked: Asked) -> Answer:
        encoder, content_type = choose_encoder(asked.accept)
        names = parse_qs(asked.query).get("name[]")
        chosen = registry if names is None else registry.restricted_registry(names)
        return Answer(encoder(chosen), content_type)

    def discovery(asked: Asked) -> Answer:
        status, _ = watched.now()
        if status is None or (status.advert.state == "starting" and not status.seen):
            return _line(STARTING, 503)  # it would know of itself only: Prometheus keeps the targets that it had
        return Answer(json.dumps(targets(status), separators=(",", ":")).encode(), JSON)

    def health(asked: Asked) -> Answer:
        _, wrong = watched.now()
        return _line("ok", 200) if wrong is None else _line(wrong, 503)

    def status_page(asked: Asked) -> Answer:
        status, wrong = watched.now()
        if status is None:
            return Answer(json.dumps({"health": wrong}).encode(), JSON, 503)
        return Answer(status_json.encode(status, wrong), JSON)

    return {
        METRICS_PATH: metrics,
        "/sd": discovery,
        "/health": health,
        "/status": status_page,
        "/": lambda asked: Answer(HELP.encode()),
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


def _line(text: str, code: int) -> Answer:
    return Answer(" ".join(text.split()).encode() + b"\n", code=code)
