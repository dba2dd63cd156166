"""The swarm seen through a join address: which nodes answer, their run, their clocks, and what can be reached."""

import asyncio
import importlib
from collections.abc import Mapping, Sequence

from noloco_p2p.config import ListenSettings, RunManifest
from noloco_p2p.core.members import PRESENT
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.errors import Busy, ConfigError, LocalError, NolocoError, PeerError, Unreachable
from noloco_p2p.humanize import short_id
from noloco_p2p.io.dht import adverts, join_handshake
from noloco_p2p.io.dht.addresses import JoinAddress, announced_host
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.transport.grpc_transport import probe
from noloco_p2p.launch.settings import Overrides, manifest_from_json
from noloco_p2p.observe.diagnosis.findings import Finding, Severity
from noloco_p2p.observe.doctor.doctor_report import DoctorReport, or_peer_error

IMPORT_S = 30.0
PROBE_S = 3.0
"""Longest wait for a gRPC address to answer."""
MOST_PROBED = 32
"""Nodes whose address is tried."""
MOST_CLOCKS = 8
"""Nodes that are asked for the time."""
CLOSE_S = 1.5
"""Clocks that differ by less agree. The ages of adverts are counted by them, and a view is seconds old anyway."""
READINGS = 3
READING_PAUSE_S = 1.0
"""One reading of a DHT that was joined a moment ago can miss somebody."""
SET_CLOCK = "set the clock, for example by NTP"
ANOTHER_NODE = "give the address of a node that runs"


async def open_daemon(
    report: DoctorReport, identity: Identity, listen: ListenSettings, join: Sequence[JoinAddress]
) -> Libp2pDaemon | None:
    """Start p2pd; None, reported, when it does not start."""
    try:
        await report.in_time("importing hivemind", IMPORT_S, lambda: importlib.import_module("hivemind"))
        host = announced_host(listen.host, listen.announce_host, join[0] if join else None)
        with report.step("starting the libp2p daemon (p2pd)"):
            libp2p = await Libp2pDaemon.open(identity, host=listen.host, port=listen.dht_port, announce_host=host)
    except (LocalError, Unreachable, ConfigError) as error:
        advice = "see listen.host and listen.dht_port, and whether p2pd may run here, and is not held up by other work"
        report.error("libp2p", str(error), advice)
        return None
    where = JoinAddress.parse(libp2p.join_addresses[0]).multiaddress
    report.ok("libp2p", f"the libp2p daemon (p2pd) starts; others would find it at {where}")
    return libp2p


async def dial(report: DoctorReport, libp2p: Libp2pDaemon, targets: Sequence[JoinAddress]) -> None:
    """Links to the peers to be joined; `libp2p.joined` are those that answer."""
    with report.step(f"dialling {', '.join(map(str, targets))}"):
        results = await asyncio.gather(*(libp2p.dial(target) for target in targets), return_exceptions=True)
    for target, result in zip(targets, results, strict=True):
        if result is None:
            libp2p.joined += (target,)
            report.ok("join", f"{target.multiaddress} answers as {short_id(target.peer_id)}")
        elif isinstance(result, ConfigError | Unreachable | LocalError):
            reason, _, advice = str(result).partition("; ")
            add = report.warning if len(targets) > 1 else report.error
            add("join", reason, advice or ANOTHER_NODE, target.peer_id)
        else:
            raise result
    if len(targets) > 1 and not libp2p.joined:
        report.error("join", "none of the join addresses answers", ANOTHER_NODE)


async def ask_run(
    report: DoctorReport, libp2p: Libp2pDaemon, given: Overrides
) -> tuple[RunManifest | None, dict[PeerId, float]]:
    """(the run of the joined peers, how far each one's clock is ahead of ours, seconds); reports what is wrong."""
    manifest, ahead = None, {}
    for peer in (target.peer_id for target in libp2p.joined):
        try:
            with report.step(f"asking {short_id(peer)} for the run"):
                received, ahead[peer] = await _manifest_and_clock(libp2p, peer)
            theirs = manifest_from_json(received)
        except PeerError as error:
            advice = "wait until that node has started, or join another one"
            report.error("run", f"{short_id(peer)} does not give its run: {error}", advice, peer)
            continue
        about = f"{theirs.stages} stages, {theirs.steps} steps, id {theirs.run_id}"
        if manifest is None:
            manifest = theirs
            report.ok("run", f"run {theirs.name}, {about}")
            _check_agrees(report, given, theirs, peer)
        elif theirs.run_id != manifest.run_id:
            sentence = f"{short_id(peer)} works on another run: {theirs.name}, {about}"
            report.error("run", sentence, "give addresses of one run", peer)
    return manifest, ahead


async def _manifest_and_clock(libp2p: Libp2pDaemon, peer: PeerId) -> tuple[bytes, float]:
    """(manifest, how far the peer's clock is ahead of ours, seconds)."""
    before = adverts.dht_time()
    received, theirs = await join_handshake.fetch_manifest(libp2p, peer)
    return received, theirs - (before + adverts.dht_time()) / 2


def _check_agrees(report: DoctorReport, given: Overrides, manifest: RunManifest, peer: PeerId) -> None:
    """The settings given here against the swarm's."""
    if not given.names_the_run:
        return
    try:
        given.check_agrees(manifest)
    except ConfigError as error:
        for line in str(error).splitlines():
            sentence = f"another run than that of {short_id(peer)}: {line.rpartition(': ')[0]}"
            report.error("run", sentence, "leave the key out, or join the swarm that you mean", peer)
    else:
        report.ok("run", "the settings given here agree with the swarm's")


async def clocks(report: DoctorReport, libp2p: Libp2pDaemon, ahead: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """The clocks of some more nodes of the swarm, besides those that are known."""
    more = sorted((await libp2p.links()) - ahead.keys())[: MOST_CLOCKS - len(ahead)]
    with report.step(f"asking {len(more)} nodes for the time"):
        answers = await asyncio.gather(*(or_peer_error(_manifest_and_clock(libp2p, peer)) for peer in more))
    found = {peer: answer[1] for peer, answer in zip(more, answers, strict=True) if not isinstance(answer, PeerError)}
    return {**ahead, **found}


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
        one = len(agreeing) == 1
        of = f"that of node {short_id(agreeing[0])}" if one else f"those of {len(agreeing)} nodes"
        sentence = f"this machine's clock is {_off(-right)} {of}"
        found.append(Finding(_severity(right, ttl_s), "clock", None, sentence, SET_CLOCK))
    for peer in sorted(ahead):
        off_s = ahead[peer] - right
        if abs(off_s) > CLOSE_S:
            sentence = f"the clock of node {short_id(peer)} is {_off(off_s)} the others'"
            found.append(Finding(_severity(off_s, ttl_s), "clock", peer, sentence, f"on that machine, {SET_CLOCK}"))
    if not found:
        largest = max(abs(off) for off in ahead.values())
        sentence = f"the clock agrees with {len(ahead)} nodes' (within {largest:.2f} s)"
        found.append(Finding("ok", "clock", None, sentence, ""))
    return found


def _off(ahead_s: float) -> str:
    return f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"


def _severity(off_s: float, ttl_s: float) -> Severity:
    """As a node that joins judges: more than half an advert's life, and adverts look expired or live too long."""
    return "error" if abs(off_s) > ttl_s / 2 else "warning"


async def check_reached(report: DoctorReport, libp2p: Libp2pDaemon, address: str) -> None:
    """Let joined peers dial this machine's gRPC address (`host:port`), at which this process listens, back."""
    failure = ""
    for peer in (target.peer_id for target in libp2p.joined):
        try:
            with report.step(f"letting {short_id(peer)} dial {address} back"):
                reason = await join_handshake.ask_dial_back(libp2p, peer, address)
        except (Busy, PeerError) as error:
            failure = str(error)
            continue
        if reason is None:
            report.ok("port", f"{short_id(peer)} reaches this machine at {address}")
        else:
            port = address.rpartition(":")[2]
            advice = f"open TCP port {port}, or set listen.announce_host and listen.grpc_port to what leads here"
            sentence = f"{short_id(peer)} cannot reach this machine at {address} ({reason})"
            report.error("port", sentence, advice, libp2p.peer_id)
        return
    sentence = f"nobody could be asked to dial {address} back: {failure}"
    report.warning("port", sentence, "try again, or join another node")


async def read_directory(report: DoctorReport, directory: HivemindDirectory) -> list[Advert]:
    """The nodes that are present, sorted by peer id; reports failures."""
    found: dict[PeerId, Advert] = {}
    whole = True
    try:
        with report.step("reading the directory"):
            for reading in range(READINGS):
                if reading:
                    await asyncio.sleep(READING_PAUSE_S)
                before = len(found)
                found |= {advert.peer_id: advert for advert in await directory.peers()}
                if reading and len(found) == before:
                    break
    except NolocoError as error:
        report.error("directory", str(error), "try again; the swarm's directory does not answer")
        whole = False
    present = [found[peer] for peer in sorted(found) if found[peer].state in PRESENT]
    if not present and whole:
        advice = "set this machine's clock if it is wrong: all adverts look expired by it; else try again"
        report.warning("directory", "the directory lists no node that is there", advice)
    return present


async def check_reaches(report: DoctorReport, present: Sequence[Advert], run_id: str) -> None:
    """Whether this machine reaches the gRPC addresses of the nodes that are present."""
    dialled = [advert for advert in present if advert.addresses][:MOST_PROBED]
    if not dialled:
        return

    async def failure(advert: Advert) -> str | None:
        reasons = []
        for address in advert.addresses:
            reason = await probe(address, advert.peer_id, run_id, PROBE_S)
            if reason is None:
                return None
            reasons.append(f"{address}: {reason}")
        return "; ".join(reasons)

    with report.step(f"dialling the gRPC addresses of {len(dialled)} nodes"):
        reasons = await asyncio.gather(*map(failure, dialled))
    for advert, reason in zip(dialled, reasons, strict=True):
        if reason is not None:
            node = f"node {short_id(advert.peer_id)} of stage {advert.stage}"
            advice = "see whether it still runs, and whether its port is open for this machine"
            report.warning("unreachable", f"{node} cannot be reached from here ({reason})", advice, advert.peer_id)
    sentence = f"{reasons.count(None)} of {len(dialled)} nodes are reached at their gRPC addresses"
    if None in reasons:
        report.ok("peers", sentence)
    else:
        report.error("peers", sentence, "see to this machine's network: outgoing connections must be open")
