"""The response to Prometheus' HTTP service discovery: which nodes to scrape."""

from collections.abc import Iterator

from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import Status
from noloco_p2p.io.dht.reach import endpoint, joined

NODES_LIMIT = 1024
"""Most other nodes that are listed."""
METRICS_PATH = "/metrics"
"""The page of a node, and of its libp2p daemon."""


def targets(status: Status) -> list[dict[str, object]]:
    """The targets to scrape, one entry each: this node and the first NODES_LIMIT that it knows, sorted by peer id."""
    known = [seen.advert for seen in status.seen if seen.advert.state != "left"]
    adverts = sorted([status.advert, *known[:NODES_LIMIT]], key=lambda advert: advert.peer_id)
    return [target for advert in adverts if advert.state != "left" for target in _targets(advert)]


def _targets(advert: Advert) -> Iterator[dict[str, object]]:
    for kind, url in (("node", advert.metrics), ("libp2p", advert.libp2p_metrics)):
        if (at := endpoint(url)) is None:
            continue
        labels = {
            "__meta_noloco_peer_id": advert.peer_id,
            "__meta_noloco_stage": str(advert.stage) if advert.stage >= 0 else "",
            "__meta_noloco_run_id": advert.run_id,
            "__meta_noloco_version": advert.version,
            "__meta_noloco_kind": kind,
        }
        yield {"targets": [joined(*at)], "labels": labels}
