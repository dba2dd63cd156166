"""Asks all nodes of a swarm for their status, on behalf of observers such as `noloco top` and `noloco doctor`.

An address in an advert is a stranger's claim. So only `http://HOST:PORT/status` is requested, redirects are not
followed, and the number, size and duration of the answers are limited.
"""

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from urllib.parse import urlsplit

from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.status import SeenPeer, Status
from noloco_p2p.errors import ConfigError, PeerError, Unreachable, Violation
from noloco_p2p.humanize import short_id
from noloco_p2p.io.dht.reach import Reach, endpoint, host_scope, joined
from noloco_p2p.io.telemetry.status_json import LIMIT_BYTES, decode
from noloco_p2p.observe.diagnosis.findings import Report, line

TIMEOUT_S = 2.0
"""Time limit for one node's answer, from opening the connection to the last byte."""
AT_ONCE = 32
"""Nodes asked at the same time; each may send up to ANSWER_LIMIT_BYTES."""
NODES_LIMIT = 1024
"""Upper limit on the number of nodes asked."""
ANSWER_LIMIT_BYTES = LIMIT_BYTES + 16_384
"""Upper limit on an answer: a status, and the HTTP headers before it."""


def base_url(url: str) -> str:
    """`http://HOST:PORT` of a URL with any path. Raises ConfigError, quoting the URL, if it is malformed."""
    if (at := endpoint(url)) is None:
        raise ConfigError(f"malformed address {line(url)[:100]!r}: it is not of the form http://HOST:PORT")
    return f"http://{joined(*at)}"


async def ask(base: str) -> Report:
    """The status of the node at a `base_url`, and about how far its wall clock is ahead of ours.

    Raises Unreachable if there is no answer within TIMEOUT_S, and Violation if the answer is not a status.
    """
    before = time.time()
    body = await _get_status(base)
    middle = (before + time.time()) / 2
    status = decode(body)
    ahead_s = status.figures.unix_time_s - middle if status.figures.unix_time_s else None
    return Report(status.advert.peer_id, status.advert, status, "", ahead_s)


async def by_url(url: str) -> list[Report]:
    """The swarm as seen by one node, including that node. `url` is its `http://HOST:PORT` or its metrics address.

    Raises ConfigError if `url` is malformed, and Unreachable or Violation if what it leads to does not answer like a
    node.
    """
    base = base_url(url)
    try:
        first = await ask(base)
    except Violation as error:
        raise Violation(f"{base} does not answer like a noloco node: {error}") from None
    except Unreachable as error:
        raise Unreachable(f"{error}: give the metrics address that a running node prints") from None
    assert first.status is not None
    return await around(first.status, base, first.clock_ahead_s)


async def around(status: Status, base: str | None = None, clock_ahead_s: float | None = None) -> list[Report]:
    """The swarm as seen by the node with this status, including that node. `base`: where it answered, if asked.

    What it says of its addresses is believed only if it runs on this machine.
    """
    own = [at[0] for at in map(endpoint, (base or "", *status.advert.addresses)) if at is not None]
    reach = Reach(own if base is None or host_scope(own[0]) == "loopback" else own[:1])
    metrics = base or status.advert.metrics
    advert = replace(status.advert, announced_at=asyncio.get_running_loop().time(), metrics=metrics)
    first = Report(advert.peer_id, advert, status, "", clock_ahead_s)
    return await by_adverts(await reach.within(map(_here, status.seen)), known=[first], reach=reach)


async def by_adverts(
    adverts: Iterable[Advert], known: Sequence[Report] = (), reach: Reach | None = None
) -> list[Report]:
    """Reports of the nodes that these adverts announce, sorted by peer id. Nodes in `known` are not asked again.

    Nodes known to more than half of the nodes that answer are asked too, within the same networks (`reach`), because a
    single reading of the directory can miss a node.
    """
    adverts = list(adverts)
    reach = reach or Reach(at[0] for advert in adverts for at in [endpoint(advert.metrics)] if at is not None)
    found = {report.peer: report for report in known}
    places = asyncio.Semaphore(AT_ONCE)

    async def add(some: Iterable[Advert]) -> None:
        new = {advert.peer_id: advert for advert in some if advert.state != "left" and advert.peer_id not in found}
        wanted = [new[peer] for peer in sorted(new)]
        asked = await asyncio.gather(*(_report(advert, places) for advert in wanted[:NODES_LIMIT]))
        others = [Report(a.peer_id, a, None, "not asked: there are too many nodes") for a in wanted[NODES_LIMIT:]]
        now = asyncio.get_running_loop().time()
        for report in (*asked, *others):
            found[report.peer] = replace(report, age_s=max(0.0, now - report.advert.announced_at))

    await add(adverts)
    await add(await reach.within(_known_to_most(found)))
    return [found[peer] for peer in sorted(found)]


def _known_to_most(found: dict[PeerId, Report]) -> list[Advert]:
    """The newest advert of each node that more than half of the nodes that answered have seen."""
    statuses = [report.status for report in found.values() if report.status is not None]
    seen = [{each.advert.peer_id: _here(each) for each in status.seen}.values() for status in statuses]
    adverts = sorted(chain.from_iterable(seen), key=lambda advert: advert.announced_at)
    counts, newest = Counter(advert.peer_id for advert in adverts), {advert.peer_id: advert for advert in adverts}
    return [newest[peer] for peer in sorted(counts) if 2 * counts[peer] > len(statuses)]


def _here(seen: SeenPeer) -> Advert:
    """The advert of a node that another node knows, dated by this loop's clock as if it had been read here."""
    return replace(seen.advert, announced_at=asyncio.get_running_loop().time() - seen.age_s)


async def _report(advert: Advert, places: asyncio.Semaphore) -> Report:
    """Ask one node. Errors are not raised but put into the report, which does not say how old the advert is."""
    failed = Report(advert.peer_id, advert, None)
    if not advert.metrics:
        return replace(failed, failure="it announces no metrics address that can be asked from here")
    try:
        base = base_url(advert.metrics)
        async with places:
            report = replace(await ask(base), advert=advert)
    except (PeerError, ConfigError) as error:
        return replace(failed, failure=line(str(error)))
    own = report.newest
    if (own.peer_id, own.run_id) == (advert.peer_id, advert.run_id):
        return report
    other = f"{short_id(own.peer_id)} of run {line(own.run_id)[:12]}"
    return replace(failed, failure=f"another node or run answers at {base}: {other}")


# --- one request ------------------------------------------------------------------------------------------------------


async def _get_status(base: str) -> bytes:
    """The body of `/status`. Raises Unreachable or Violation."""
    at = urlsplit(base)
    answer = bytearray()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            try:
                # With HTTP/1.0, the end of the connection is the end of the answer.
                writer.write(f"GET /status HTTP/1.0\r\nHost: {at.netloc}\r\nAccept: application/json\r\n\r\n".encode())
                while len(answer) <= ANSWER_LIMIT_BYTES and (part := await reader.read(1 << 16)):
                    answer += part
            finally:
                writer.close()
    except TimeoutError:
        raise Unreachable(f"no answer from {base} within {TIMEOUT_S:g} s") from None
    except (OSError, UnicodeError) as error:  # UnicodeError: no name has this form
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else "it cannot be reached"
        raise Unreachable(f"no answer from {base}: {reason}") from None
    found = re.match(rb"HTTP/1\.[01] ([1-5][0-9]{2})[ \r]", answer)
    if found is None:
        raise Violation(f"the answer of {base} is not HTTP")
    code = found[1].decode()
    if code != "200":
        raise Violation(f"the answer is a redirect ({code})" if code[0] == "3" else f"the answer is {code}")
    if len(answer) > ANSWER_LIMIT_BYTES:
        raise Violation(f"the answer is longer than the limit of {ANSWER_LIMIT_BYTES} bytes")
    return bytes(answer.partition(b"\r\n\r\n")[2])
