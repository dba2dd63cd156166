"""The swarm seen through a join address: who answers, which run, whose clock, who reaches whom."""

import asyncio
import importlib
from collections.abc import Mapping, Sequence

from noloco_p2p import humanize
from noloco_p2p.config import ListenSettings, RunManifest
from noloco_p2p.core.members import PRESENT
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.errors import Busy, ConfigError, LocalError, NolocoError, PeerError, Unreachable
from noloco_p2p.io.dht import adverts
from noloco_p2p.io.dht import join_handshake as joining
from noloco_p2p.io.dht.addresses import JoinAddress, announced_host
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.transport.grpc_transport import probe
from noloco_p2p.launch import settings
from noloco_p2p.observe.diagnosis.findings import Finding, Severity
from noloco_p2p.observe.doctor.doctor_report import Telling, in_time

IMPORT_S = 30.0
PROBE_S = 3.0
"""Longest wait for a gRPC address to answer."""
MOST_PROBED = 32
"""Nodes whose address is tried."""
MOST_CLOCKS = 8
"""Nodes that are asked for the time."""
CLOSE_S = 1.5
"""Clocks that differ by less agree. Adverts tell ages by them, and a view is seconds old anyway."""
READINGS = 3
READING_PAUSE_S = 1.0
"""One reading of a DHT that was joined a moment ago can miss somebody."""
SET_CLOCK = "set the clock, for example by NTP"


async def open_daemon(
    telling: Telling, identity: Identity, listen: ListenSettings, join: Sequence[JoinAddress]
) -> Libp2pDaemon | None:
    """Start p2pd; None, told, when it does not start."""
    try:
        with telling.step("importing hivemind"):
            await in_time("importing hivemind", IMPORT_S, lambda: importlib.import_module("hivemind"))
        with telling.step("starting the libp2p daemon (p2pd)"):
            libp2p = await Libp2pDaemon.open(
                identity,
                host=listen.host,
                port=listen.dht_port,
                announce_host=announced_host(listen.host, listen.announce_host, join[0] if join else None),
            )
    except (LocalError, Unreachable, ConfigError) as error:
        advice = "see listen.host and listen.dht_port, and whether p2pd may run here, and is not held up by other work"
        telling.error("libp2p", str(error), advice)
        return None
    where = JoinAddress.parse(libp2p.join_addresses[0]).multiaddress
    telling.ok("libp2p", f"the libp2p daemon (p2pd) starts; others would find it at {where}")
    return libp2p


async def dial(telling: Telling, libp2p: Libp2pDaemon, targets: Sequence[JoinAddress]) -> None:
    """Links to those who are to be joined, told; `libp2p.joined` are those who answer."""
    with telling.step(f"dialling {', '.join(map(str, targets))}"):
        results = await asyncio.gather(*(libp2p.dial(target) for target in targets), return_exceptions=True)
    answered = []
    for target, result in zip(targets, results, strict=True):
        if result is None:
            answered.append(target)
            telling.ok("join", f"{target.multiaddress} answers as {humanize.peer(target.peer_id)}")
        elif isinstance(result, ConfigError | Unreachable | LocalError):
            told, _, advice = str(result).partition("; ")
            say = telling.warning if len(targets) > 1 else telling.error
            say("join", told, advice or "give the address of a node that runs", target.peer_id)
        else:
            raise result
    libp2p.joined = tuple(answered)
    if targets and not answered and len(targets) > 1:
        telling.error("join", "none of the join addresses answers", "give the address of a node that runs")


async def ask_run(
    telling: Telling, libp2p: Libp2pDaemon, given: settings.Overrides
) -> tuple[RunManifest | None, dict[PeerId, float]]:
    """(the run of those who were joined, how far each one's clock is ahead of ours, seconds); faults are told."""
    manifest, ahead = None, {}
    for target in libp2p.joined:
        peer = target.peer_id
        try:
            with telling.step(f"asking {humanize.peer(peer)} for the run"):
                received, ahead[peer] = await _manifest(libp2p, peer)
            theirs = settings.manifest_from_json(received)
        except PeerError as error:
            told = f"{humanize.peer(peer)} tells no run: {error}"
            telling.error("run", told, "wait until that node has started, or join another one", peer)
            continue
        if manifest is None:
            manifest = theirs
            telling.ok(
                "run", f"run {manifest.name}, {manifest.stages} stages, {manifest.steps} steps, id {manifest.run_id}"
            )
            _check_agrees(telling, given, manifest, peer)
        elif theirs.run_id != manifest.run_id:
            told = f"{humanize.peer(peer)} works on another run: {theirs.name}, id {theirs.run_id}"
            telling.error("run", told, "give addresses of one run", peer)
    return manifest, ahead


async def _manifest(libp2p: Libp2pDaemon, peer: PeerId) -> tuple[bytes, float]:
    """(manifest, how far the peer's clock is ahead of ours, seconds)."""
    before = adverts.dht_time()
    received, theirs = await joining.fetch_manifest(libp2p, peer)
    return received, theirs - (before + adverts.dht_time()) / 2


def _check_agrees(telling: Telling, given: settings.Overrides, manifest: RunManifest, peer: PeerId) -> None:
    """The settings given here against the swarm's."""
    if not given.names_the_run:
        return
    try:
        given.check_agrees(manifest)
    except ConfigError as error:
        for line in str(error).splitlines():
            told = f"another run than that of {humanize.peer(peer)}: {line.rpartition(': ')[0]}"
            telling.error("run", told, "leave the key out, or join the swarm that you mean", peer)
    else:
        telling.ok("run", "the settings given here agree with the swarm's")


async def clocks(telling: Telling, libp2p: Libp2pDaemon, ahead: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """The clocks of some more nodes of the swarm, besides those that are known."""
    more = sorted((await libp2p.links()) - ahead.keys())[: MOST_CLOCKS - len(ahead)]
    with telling.step(f"asking {len(more)} nodes for the time"):
        answers = await asyncio.gather(*(_manifest(libp2p, peer) for peer in more), return_exceptions=True)
    found = dict(ahead)
    for peer, answer in zip(more, answers, strict=True):
        if isinstance(answer, tuple):
            found[peer] = answer[1]
        elif not isinstance(answer, PeerError):
            raise answer
    return found


def judge_clocks(ahead: Mapping[PeerId, float], ttl_s: float) -> list[Finding]:
    """Whose clock is wrong, by how far each peer's is ahead of ours. Pure.

    The time on which most agree is taken for right; where nobody agrees, the first peer's.
    """
    if not ahead:
        return []
    votes = [*(ahead[peer] for peer in sorted(ahead)), 0.0]
    right = max(votes, key=lambda one: sum(abs(one - other) <= CLOSE_S for other in votes))
    found = []
    if abs(right) > CLOSE_S:
        agreeing = [peer for peer in sorted(ahead) if abs(ahead[peer] - right) <= CLOSE_S]
        of = f"that of node {humanize.peer(agreeing[0])}" if len(agreeing) == 1 else f"those of {len(agreeing)} nodes"
        way = "behind" if right > 0 else "ahead of"
        sentence = f"this machine's clock is {abs(right):.1f} s {way} {of}"
        found.append(Finding(_severity(right, ttl_s), "clock", None, sentence, SET_CLOCK))
    for peer in sorted(ahead):
        off = ahead[peer] - right
        if abs(off) > CLOSE_S:
            sentence = f"the clock of node {humanize.peer(peer)} is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} the others'"
            found.append(Finding(_severity(off, ttl_s), "clock", peer, sentence, f"on that machine, {SET_CLOCK}"))
    if not found:
        largest = max(abs(off) for off in ahead.values())
        sentence = f"the clock agrees with {len(ahead)} nodes' (within {largest:.2f} s)"
        found.append(Finding("ok", "clock", None, sentence, ""))
    return found


def _severity(off_s: float, ttl_s: float) -> Severity:
    """As a node that joins judges: more than half an advert's life, and adverts look expired or live too long."""
    return "error" if abs(off_s) > ttl_s / 2 else "warning"


async def check_reached(telling: Telling, libp2p: Libp2pDaemon, address: str) -> None:
    """Let joined peers dial this machine's gRPC address (`host:port`), at which this process listens, back."""
    failure = ""
    for target in libp2p.joined:
        try:
            with telling.step(f"letting {humanize.peer(target.peer_id)} dial {address} back"):
                reason = await joining.ask_dial_back(libp2p, target.peer_id, address)
        except (Busy, PeerError) as error:
            failure = str(error)
            continue
        if reason is None:
            telling.ok("port", f"{humanize.peer(target.peer_id)} reaches this machine at {address}")
            return
        told = f"{humanize.peer(target.peer_id)} cannot reach this machine at {address} ({reason})"
        port = address.rpartition(":")[2]
        advice = f"open TCP port {port}, or set listen.announce_host and listen.grpc_port to what leads here"
        telling.error("port", told, advice, libp2p.peer_id)
        return
    telling.warning(
        "port", f"nobody could be asked to dial {address} back: {failure}", "try again, or join another node"
    )


async def read_directory(telling: Telling, directory: HivemindDirectory) -> list[Advert]:
    """Everybody who is there, sorted by peer id; failures are told."""
    found: dict[PeerId, Advert] = {}
    try:
        with telling.step("reading the directory"):
            for reading in range(READINGS):
                if reading:
                    await asyncio.sleep(READING_PAUSE_S)
                fresh = await directory.peers()
                more = {advert.peer_id for advert in fresh} - found.keys()
                found |= {advert.peer_id: advert for advert in fresh}
                if reading and not more:
                    break
    except NolocoError as error:
        telling.error("directory", str(error), "try again; the swarm's directory does not answer")
    else:
        if not any(advert.state in PRESENT for advert in found.values()):
            advice = "set this machine's clock if it is wrong: all adverts look expired by it; else try again"
            telling.warning("directory", "the directory lists no node that is there", advice)
    return [found[peer] for peer in sorted(found)]


async def check_reaches(telling: Telling, everybody: Sequence[Advert], run_id: str) -> None:
    """Whether this machine reaches the gRPC addresses of those who are there."""
    there = [a for a in everybody if a.state in PRESENT and a.addresses][:MOST_PROBED]
    if not there:
        return

    async def tried(advert: Advert) -> str | None:
        reasons = []
        for address in advert.addresses:
            reason = await probe(address, advert.peer_id, run_id, PROBE_S)
            if reason is None:
                return None
            reasons.append(f"{address}: {reason}")
        return "; ".join(reasons)

    with telling.step(f"dialling the gRPC addresses of {len(there)} nodes"):
        answers = await asyncio.gather(*map(tried, there))
    for advert, reason in zip(there, answers, strict=True):
        if reason is not None:
            told = (
                f"node {humanize.peer(advert.peer_id)} of stage {advert.stage} cannot be reached from here ({reason})"
            )
            advice = "see whether it still runs, and whether its port is open for this machine"
            telling.warning("unreachable", told, advice, advert.peer_id)
    reached = sum(reason is None for reason in answers)
    told = f"{reached} of {len(there)} nodes are reached at their gRPC addresses"
    if reached:
        telling.ok("peers", told)
    else:
        telling.error("peers", told, "see to this machine's network: outgoing connections must be open")
