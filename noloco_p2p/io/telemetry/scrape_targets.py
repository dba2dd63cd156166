"""The response to Prometheus' HTTP service discovery: which nodes to scrape."""

import re
from collections.abc import Iterator

from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import Status

NODES_LIMIT = 1024
"""Most other nodes that are listed."""
METRICS_PATH = "/metrics"
METRICS_URL = re.compile(r"http://((?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5})(/[\w./-]{0,100})?")
GONE = frozenset({"left"})
"""States of nodes that no longer serve anything."""


def targets(status: Status) -> list[dict[str, object]]:
    """The targets to scrape, one entry each: this node and the first NODES_LIMIT that it knows, sorted by peer id."""
    known = [seen.advert for seen in status.seen if seen.advert.state not in GONE]
    adverts = sorted([status.advert, *known[:NODES_LIMIT]], key=lambda advert: advert.peer_id)
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
