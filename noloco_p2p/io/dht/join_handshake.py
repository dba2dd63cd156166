"""The calls of a node that joins, before it has a directory: it asks a peer for the run manifest, for the time, and
whether its own gRPC address can be reached. Both ends are here. The calls go over libp2p, which authenticates peers.
"""

import asyncio
import json
import logging
import math
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from noloco_p2p.config import MANIFEST_LIMIT_BYTES
from noloco_p2p.core.messages import STREAM, PeerId
from noloco_p2p.core.wire import PROTOCOL
from noloco_p2p.errors import NO_JSON, Busy, ConfigError, Declined, LocalError, PeerError, Unreachable, Violation
from noloco_p2p.humanize import plain
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.reach import endpoint, host_scope, is_private, joined, scope
from noloco_p2p.io.dht.ways_in import WaysIn

ReachabilityProbe = Callable[[str, PeerId], Awaitable[str | None]]
"""Dials an address (`host:port`, or `p2p`). Returns None if the expected peer answers, otherwise the reason."""

MANIFEST_CALL = f"noloco/manifest/{PROTOCOL}"
"""A node that speaks another protocol is refused here, before it can join and then reach nobody."""
DIAL_BACK_CALL = "noloco/dial-back/1"
MANIFEST_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 4.0
DIAL_BACK_TIMEOUT_S = 6.0
DIAL_BACK_TRIES = 3
DIALS_AT_ONCE = 4
DIALS_PER_MINUTE = 60
"""Limits on dialling back, because strangers choose the addresses; each dial tells them one line of text."""
TRIED = "others reach this node at %s, a port that its router maps (UPnP)"
UNTRIED = "the router maps %s to this node (UPnP); nobody outside has dialled it yet"
_REASON_LIMIT = 200
_BUSY = "busy"

log = logging.getLogger(__name__)


async def serve_manifest(libp2p: Libp2pDaemon, manifest: bytes) -> None:
    """Answer requests for the run manifest (canonical JSON) and the time. To be called once per `libp2p`."""

    async def answer(caller: PeerId, request: bytes) -> bytes:
        return struct.pack(">d", dht_time()) + manifest

    await libp2p.serve(MANIFEST_CALL, answer)


async def fetch_manifest(libp2p: Libp2pDaemon, peer_id: PeerId) -> tuple[bytes, float]:
    """Ask a linked peer for (manifest JSON, how far its clock is ahead of ours, seconds).

    Only the size of the manifest is checked. Raises Unreachable, Declined (the peer has none), Violation.
    """
    before = dht_time()
    answer = await libp2p.call(peer_id, MANIFEST_CALL, b"", MANIFEST_TIMEOUT_S)
    if not 8 < len(answer) <= 8 + MANIFEST_LIMIT_BYTES:
        raise Violation(f"peer {peer_id} sent a manifest of {len(answer) - 8} bytes (limit {MANIFEST_LIMIT_BYTES})")
    [time] = struct.unpack(">d", answer[:8])
    if not math.isfinite(time):
        raise Violation(f"peer {peer_id} sent a time that is not finite")
    return answer[8:], time - (before + dht_time()) / 2


async def first_manifest(libp2p: Libp2pDaemon) -> tuple[bytes, float, float]:
    """The run of the first joined peer that describes it: (manifest JSON, how far that peer's clock is ahead of ours,
    give or take how much, seconds).

    If none does, raises the error of one that answered, or else that of one that did not, as `fetch_manifest` does.
    """
    failures, loop = list[PeerError](), asyncio.get_running_loop()
    for peer in libp2p.joined:
        before = loop.time()
        try:
            return *await fetch_manifest(libp2p, peer.peer_id), (loop.time() - before) / 2
        except PeerError as error:
            failures.append(error)
    raise min(failures, key=lambda one: isinstance(one, Busy | Unreachable))


def check_clock(ahead: float, unsure_s: float, ttl_s: float) -> None:
    """Raise ConfigError that states how far a peer's clock is `ahead` of ours (seconds, give or take `unsure_s`) if
    that is certainly more than half of `ttl_s`, the lifetime of an advert: adverts would then look expired, or live too
    long."""
    if abs(ahead) - unsure_s > ttl_s / 2:
        raise ConfigError(
            f"this machine's clock is {abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'} that of the joined "
            f"peer; at most {ttl_s / 2:g} s are allowed: set the clock (for example with NTP)"
        )


class DialRateLimit:
    """Limits how often strangers' addresses are dialled. Pure: `now` is in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._free = DIALS_AT_ONCE
        self._begun_at = deque([-math.inf] * DIALS_PER_MINUTE, DIALS_PER_MINUTE)
        """When the last dials began, as many of them as may begin within a minute."""

    def begin(self, *, now: float) -> bool:
        """Whether one more dial may begin now. If so, `end` must follow."""
        if self._free == 0 or self._begun_at[0] > now - 60.0:
            return False
        self._free -= 1
        self._begun_at.append(now)
        return True

    def end(self) -> None:
        """Note that a dial has ended."""
        self._free += 1


async def serve_dial_back(libp2p: Libp2pDaemon, probe: ReachabilityProbe) -> None:
    """Let linked peers ask whether their gRPC address can be reached from here, which `probe` finds out.

    A peer can only ask about itself, because libp2p authenticates it, and only about addresses that this node would
    dial anyway (`reach`). `probe` may raise Unreachable instead of returning a reason.
    """
    allowed = DialRateLimit()

    async def reached(place: tuple[str, int] | None, caller: PeerId) -> str | None:
        if place is None:
            return await probe(STREAM, caller)
        host, port = place
        known = await libp2p.reach.addresses([host])
        return await probe(joined(known[host], port), caller) if host in known else f"the peer does not dial {host}"

    async def answer(caller: PeerId, request: bytes) -> bytes:
        address = request.decode("ascii", errors="replace")
        place = endpoint(address)
        if place is None and address != STREAM:
            raise Violation("the address is not of the form host:port")
        if not allowed.begin(now=asyncio.get_running_loop().time()):
            return json.dumps(_BUSY).encode()
        try:
            reason = await asyncio.wait_for(reached(place, caller), PROBE_TIMEOUT_S)
        except TimeoutError:
            reason = f"no answer within {PROBE_TIMEOUT_S:g} s"
        except Unreachable as error:
            reason = str(error)
        finally:
            allowed.end()
        return json.dumps({"reason": None if reason is None else reason[:_REASON_LIMIT]}).encode()

    await libp2p.serve(DIAL_BACK_CALL, answer)


async def ask_dial_back(libp2p: Libp2pDaemon, peer_id: PeerId, address: str) -> str | None:
    """Ask a linked peer to dial this node at `address` (`host:port`, or `p2p`). Returns None, or why that failed.

    Raises Busy (the peer is dialling enough others; ask again later), Unreachable, Declined, Violation.
    """
    answer = await libp2p.call(peer_id, DIAL_BACK_CALL, address.encode(), DIAL_BACK_TIMEOUT_S)
    try:
        found = json.loads(answer)
    except NO_JSON as error:
        raise Violation(f"peer {peer_id} answered the dial-back with something that is not JSON") from error
    if found == _BUSY:
        raise Busy(f"peer {peer_id} is busy dialling others back")
    if not isinstance(found, dict) or set(found) != {"reason"} or not isinstance(found["reason"], str | None):
        raise Violation(f"peer {peer_id} answered the dial-back with an unknown message")
    return None if found["reason"] is None else plain(found["reason"], _REASON_LIMIT)


async def find_way(libp2p: Libp2pDaemon, peer: JoinAddress, address: str, ways: WaysIn) -> tuple[JoinAddress, str, str]:
    """Find out where a joined peer reaches this node. Returns it, the first address that works, and why the gRPC
    address did not if it was tried.

    The addresses are `host:port` of a port that the router maps, this node's gRPC address, `p2p`, or an empty string
    for nowhere. A peer on this node's own network cannot tell whether others get through the router, so it is not asked
    about that. If another joined peer reaches this node where this one does not, that one is returned (`_reached`). If
    the peer is too busy to open a stream over the link on which it answers, that counts as possible. Raises as
    `ask_dial_back`.
    """
    if outside := await ways.through_router():
        by, reason = (peer, None) if _is_near(peer) else await _reached(libp2p, peer, outside)
        if reason is None:
            await ways.serve()
            return by, outside, ""
        await ways.not_through_router(f"{outside}: {reason}")
    by, reason = await _reached(libp2p, peer, address)
    if reason is None:
        return by, address, ""
    await ways.serve()
    try:
        no_stream = await ask_dial_back(libp2p, peer.peer_id, STREAM)
    except (Busy, Declined, Unreachable) as error:
        no_stream = None if isinstance(error, Busy) else str(error)
    return (peer, STREAM, reason) if no_stream is None else (peer, "", f"{reason}, nor over libp2p: {no_stream}")


async def _reached(libp2p: Libp2pDaemon, peer: JoinAddress, address: str) -> tuple[JoinAddress, str | None]:
    """Have a joined peer dial this node at an address. Returns it, and why it did not get through, or None.

    It may be behind a firewall that lets nothing out, or lie. So unless the address is private, the other joined peers
    outside this node's own network are asked, too, and one that gets through is returned instead. Raises as
    `ask_dial_back`.
    """
    reason = await ask_dial_back(libp2p, peer.peer_id, address)
    others = [one for one in libp2p.joined if one != peer and not _is_near(one)]
    for other in others if reason is not None and not is_private(address) else ():
        with suppress(PeerError):
            if await ask_dial_back(libp2p, other.peer_id, address) is None:
                return other, None
    return peer, reason


def outsiders_first(joined: Iterable[JoinAddress]) -> list[JoinAddress]:
    """These peers in the order in which they are asked how they reach this node. Those outside its own network come
    first, because one inside cannot tell whether others get in."""
    return sorted(joined, key=_is_near)


def _is_near(peer: JoinAddress) -> bool:
    return host_scope(peer.host) == "private"


async def check_reachable(libp2p: Libp2pDaemon, address: str, ways: WaysIn) -> bool:
    """Have a joined peer reach this node at its gRPC address (`host:port`), or by one of the `ways`.

    Returns whether it is reached at its gRPC address. Raises LocalError if it cannot be reached at all. If a peer
    cannot be asked (because it has just died, or is busy), or its answer makes no sense, the next one is asked. If none
    can, or those that do say that they do not reach this node while others cannot be asked, a private address is taken
    for one that peers at public addresses do not reach.
    """
    for attempt in range(DIAL_BACK_TRIES if libp2p.joined else 1):
        await asyncio.sleep(attempt)
        failure = nowhere = ""
        for peer in outsiders_first(libp2p.joined):
            try:
                by, where, reason = await find_way(libp2p, peer, address, ways)
            except PeerError as error:
                failure = str(error)
                continue
            if where == STREAM:
                log.warning("%s; until then they use links that this node keeps open", _unreachable(address, reason))
            elif where not in ("", address):
                log.info(UNTRIED if _is_near(by) else TRIED, where)
            if where:
                return where == address
            nowhere = reason
    if nowhere and not failure:
        raise LocalError(_unreachable(address, nowhere))
    if failure:
        log.warning("it is not known whether others reach this node at %s: %s", address, failure)
    known = await libp2p.reach.addresses(peer.host for peer in libp2p.joined)
    hidden = is_private(address) and "public" in map(scope, known.values())
    if outside := await ways.through_router():
        log.info(UNTRIED, outside)
    if outside or hidden:
        await ways.serve()
    return not (outside or hidden)


def _unreachable(address: str, reason: str) -> str:
    return (
        f"others cannot reach this node at {address} ({reason}): open TCP port {address.rpartition(':')[2]}, "
        "or set listen.announce_host and listen.grpc_port to an address that leads here"
    )
