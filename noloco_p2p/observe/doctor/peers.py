"""Checks of the swarm behind a join address: which nodes answer, their run, their clocks, and which can be reached."""

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from noloco_p2p.config import ListenSettings, RunManifest
from noloco_p2p.core.members import PRESENT
from noloco_p2p.core.messages import STREAM, Advert, PeerId
from noloco_p2p.errors import ConfigError, LocalError, NolocoError, PeerError
from noloco_p2p.humanize import plural, short_id
from noloco_p2p.io.dht import join_handshake
from noloco_p2p.io.dht.addresses import JoinAddress, announced_host, from_here
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.port_mapping import home_router
from noloco_p2p.io.dht.reach import Reach, endpoint, host_scope, is_open_to_others, joined
from noloco_p2p.io.dht.streams import Streams
from noloco_p2p.io.dht.ways_in import WaysIn
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.io.transport.peer_links import Links
from noloco_p2p.io.transport.probe import probe
from noloco_p2p.launch import run_key
from noloco_p2p.launch.bootstrap import NullTelemetry
from noloco_p2p.launch.run_key import Standing
from noloco_p2p.launch.settings import Overrides, manifest_from_json
from noloco_p2p.observe.diagnosis.findings import Finding
from noloco_p2p.observe.diagnosis.symptoms import wrong_clocks
from noloco_p2p.observe.doctor.doctor_report import DoctorReport, in_time, or_error

IMPORT_S = 30.0
"""Longest import of hivemind."""
PROBE_S = 3.0
"""Longest wait for a gRPC address to answer."""
MAX_PROBED = 32
"""Upper limit on the nodes whose addresses are tried."""
MAX_CLOCKS = 8
"""Upper limit on the nodes asked for the time."""
CLOSE_S = 1.5
"""Clocks that differ by less agree. The ages of adverts depend on them, and a view of a swarm is seconds old anyway."""
READINGS = 3
READING_PAUSE_S = 1.0
"""The directory is read several times, because one reading of a newly joined DHT may miss some nodes."""
ANOTHER_NODE = "give the address of a running node"


async def open_daemon(
    report: DoctorReport, identity: Identity, listen: ListenSettings, join: Sequence[JoinAddress], members: bool
) -> Libp2pDaemon | None:
    """Start p2pd. None if it does not start, which is reported. `members`: whether a first node that others can reach
    would make the run members-only, or it is."""
    advice = "check listen.host and listen.dht_port, that p2pd may run here, and that other work does not slow it down"

    async def start() -> Libp2pDaemon:
        await in_time("importing hivemind", IMPORT_S, lambda: importlib.import_module("hivemind.p2p"))
        host = announced_host(listen.host, listen.announce_host, join)
        router = home_router(listen, join, members=members and not join and is_open_to_others(listen))
        return await Libp2pDaemon.open(
            identity, host=listen.host, port=listen.dht_port, announce_host=host, router=router
        )

    libp2p = await report.attempt("libp2p", "starting the libp2p daemon (p2pd)", start(), advice)
    if libp2p is not None:
        where = JoinAddress.parse(libp2p.join_addresses[0]).multiaddress
        mapped = ", a port mapped by the home router (UPnP)" if libp2p.outside is not None else ""
        report.ok("libp2p", f"the libp2p daemon (p2pd) starts; others would find it at {where}{mapped}")
    return libp2p


async def dial(report: DoctorReport, libp2p: Libp2pDaemon, targets: Sequence[JoinAddress]) -> None:
    """Open links to the peers to be joined. Those that answer are added to `libp2p.joined`."""
    # What the owner names may be dialled, and what is near it: this machine may announce no more than 127.0.0.1.
    libp2p.reach = Reach(one.host for one in (*map(JoinAddress.parse, libp2p.join_addresses), *targets))
    with report.step(f"dialling {', '.join(map(str, targets))}"):
        failures = await asyncio.gather(*(or_error(libp2p.dial(target)) for target in targets))
    for target, failure in zip(targets, failures, strict=True):
        if failure is None:
            libp2p.joined += (target,)
            report.ok("join", f"{target.multiaddress} answers as {short_id(target.peer_id)}")
        else:
            reason, _, advice = str(failure).partition("; ")
            add = report.warning if len(targets) > 1 else report.error
            add("join", reason, advice or ANOTHER_NODE, target.peer_id)
    if len(targets) > 1 and not libp2p.joined:
        report.error("join", "no join address answers", ANOTHER_NODE)


async def ask_run(
    report: DoctorReport, libp2p: Libp2pDaemon, given: Overrides
) -> tuple[RunManifest | None, dict[PeerId, float]]:
    """(run of the joined peers, seconds by which each peer's clock is ahead of ours). Reports problems.

    The run is None if no peer says what it is.
    """
    manifest, ahead, silent = None, dict[PeerId, float](), dict[PeerId, PeerError]()
    for peer in (target.peer_id for target in libp2p.joined):
        try:
            with report.step(f"asking {short_id(peer)} for the run"):
                received, ahead[peer] = await join_handshake.fetch_manifest(libp2p, peer)
            theirs = manifest_from_json(received)
        except PeerError as error:
            silent[peer] = error
            continue
        about = f"{plural(theirs.stages, 'stage')}, {plural(theirs.steps, 'step')}, id {theirs.run_id}"
        if manifest is None:
            manifest = theirs
            report.ok("run", f"run {theirs.name}, {about}")
            _check_agrees(report, given, theirs, peer)
        elif theirs.run_id != manifest.run_id:
            sentence = f"{short_id(peer)} works on another run: {theirs.name}, {about}"
            report.error("run", sentence, "give addresses of a single run", peer)
    add = report.error if manifest is None else report.warning  # a node takes the run from any of them
    for peer, failure in silent.items():
        advice = "wait until that node has started, or join another"
        add("run", f"{short_id(peer)} does not report its run: {failure}", advice, peer)
    return manifest, ahead


def _check_agrees(report: DoctorReport, given: Overrides, manifest: RunManifest, peer: PeerId) -> None:
    """Compare the settings given here with the swarm's."""
    if not given.names_the_run:
        return
    try:
        given.check_agrees(manifest)
    except ConfigError as error:
        for line in str(error).splitlines():
            sentence = f"these settings are not those of {short_id(peer)}'s run: {line.rpartition(': ')[0]}"
            report.error("run", sentence, "leave the key out, or join the swarm that you want", peer)
    else:
        report.ok("run", "the settings given here agree with the swarm's")


async def clocks(report: DoctorReport, libp2p: Libp2pDaemon, ahead: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """The known clocks, and those of further nodes with a link to this one, up to MAX_CLOCKS in all."""
    more = sorted((await libp2p.links()) - ahead.keys())[: max(0, MAX_CLOCKS - len(ahead))]
    with report.step(f"asking {plural(len(more), 'node')} for the time"):
        answers = await asyncio.gather(*(or_error(join_handshake.fetch_manifest(libp2p, peer)) for peer in more))
    found = {peer: one[1] for peer, one in zip(more, answers, strict=True) if not isinstance(one, NolocoError)}
    return {**ahead, **found}


def judge_clocks(ahead: Mapping[PeerId, float], ttl_s: float) -> list[Finding]:
    """Findings about wrong clocks, given how far each peer's is ahead of ours; or one finding that all agree. Pure.

    A clock is an error under the same condition as for a joining node: when it is off by more than half an advert's
    lifetime, adverts look expired or live too long.
    """
    if not ahead:
        return []
    largest_s = max(abs(off_s) for off_s in ahead.values())
    sentence = f"the clock agrees with {plural(len(ahead), 'node')} (within {largest_s:.2f} s)"
    return wrong_clocks(ahead, CLOSE_S, ttl_s / 2) or [Finding("ok", "clock", None, sentence, "")]


async def check_reached(report: DoctorReport, libp2p: Libp2pDaemon, listen: ListenSettings, links: Links) -> None:
    """Listen where a node would, and have a joined peer dial back."""
    transport = GrpcTransport(links, listen, NullTelemetry(), 0)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(transport.close)
        try:
            await transport.listen()
        except LocalError as error:
            report.error("port", str(error), "set listen.grpc_port")
            return
        host = announced_host(listen.host, listen.announce_host, libp2p.joined)
        here, address = (from_here(listen.host).strip("[]"), transport.port), joined(host, transport.port)
        await _dialled_back(report, libp2p, address, WaysIn(libp2p, Streams(libp2p, links.run_id), here, address))


async def _dialled_back(report: DoctorReport, libp2p: Libp2pDaemon, address: str, ways: WaysIn) -> None:
    """Have a joined peer dial back this machine's gRPC address, at which this process listens, or find another way in.

    As for a node, the first joined peer that can be asked decides, those outside this network first, unless another
    reaches this machine (`find_way`).
    """
    failure = ""
    for peer in join_handshake.outsiders_first(libp2p.joined):
        try:
            with report.step(f"having {short_id(peer.peer_id)} dial back to {address}"):
                peer, where, reason = await join_handshake.find_way(libp2p, peer, address, ways)
        except PeerError as error:
            failure = str(error)
            continue
        name, port = short_id(peer.peer_id), address.rpartition(":")[2]
        advice = f"open TCP port {port}, or set listen.announce_host and listen.grpc_port to an address that leads here"
        sentence = f"{name} cannot reach this machine at {address} ({reason})"
        if where == address:
            report.ok("port", f"{name} reaches this machine at {address}")
        elif where == STREAM:
            sentence += "; a node here would be reached over links that it keeps to public nodes, which is slower"
            report.warning("port", sentence, f"to be reached directly, {advice}", libp2p.peer_id)
        elif where and host_scope(peer.host) == "private":
            report.ok("port", f"the router maps {where} to this machine (UPnP); {name} is behind it and cannot test it")
        elif where:
            report.ok("port", f"{name} reaches this machine at {where}, a port mapped by this machine's router (UPnP)")
        else:
            report.error("port", sentence, advice, libp2p.peer_id)
        return
    advice = "try again, or join another node"
    report.warning("port", f"no peer could be asked to dial back to {address}: {failure}", advice)


async def admission(
    report: DoctorReport, libp2p: Libp2pDaemon, manifest: RunManifest, *, own_node: bool
) -> tuple[Standing, bool]:
    """The standing with which this machine may ask the swarm, and whether nodes answer it over gRPC. Reports if not.

    `own_node`: the swarm may have been joined through a node of this machine, whose address carries no invitation.
    """
    invited = any(address.invitation for address in libp2p.joined)
    if own_node and not invited and manifest.security.root_key is not None:
        report.ok("members", "links between nodes are not checked; for that, give --join an address from noloco invite")
    else:
        asking = run_key.of_observer(libp2p.identity, manifest, libp2p, calls=True)
        advice = "give the address that noloco invite prints; links between nodes are not checked without it"
        standing = await report.attempt("members", "asking for an observer's certificate", asking, advice)
        if standing is not None:
            return standing, True
    return await run_key.of_observer(libp2p.identity, manifest, libp2p, calls=False), False


async def read_directory(report: DoctorReport, directory: HivemindDirectory) -> list[Advert]:
    """The adverts of the nodes that are present, sorted by peer id. Reports failures."""
    found: dict[PeerId, Advert] = {}

    async def read() -> bool:
        for reading in range(READINGS):
            if reading:
                await asyncio.sleep(READING_PAUSE_S)
            before = len(found)
            found.update({advert.peer_id: advert for advert in await directory.peers()})
            if reading and len(found) == before:
                break
        return True

    advice = "try again; the swarm's directory does not answer"
    whole = await report.attempt("directory", "reading the directory", read(), advice)
    present = [found[peer] for peer in sorted(found) if found[peer].state in PRESENT]
    if whole and not present:
        advice = "check this machine's clock: if it is wrong, all adverts look expired; otherwise try again"
        report.warning("directory", "the directory lists no live node", advice)
    return present


async def check_reaches(report: DoctorReport, present: Sequence[Advert], links: Links) -> None:
    """Check whether this machine reaches the gRPC addresses of the nodes that are present, MAX_PROBED at most."""
    dialled = [advert for advert in present if any(map(endpoint, advert.addresses[:1]))][:MAX_PROBED]
    if not dialled:
        return

    async def failure(advert: Advert) -> str | None:
        reasons = []
        for address in advert.addresses:
            if (reason := await probe(address, advert.peer_id, links, PROBE_S)) is None:
                return None
            reasons.append(f"{address}: {reason}")
        return "; ".join(reasons)

    with report.step(f"dialling the gRPC addresses of {plural(len(dialled), 'node')}"):
        reasons = await asyncio.gather(*map(failure, dialled))
    for advert, reason in zip(dialled, reasons, strict=True):
        if reason is not None:
            node = f"node {short_id(advert.peer_id)} of stage {advert.stage}"
            advice = "check that it still runs and that its port is open to this machine"
            report.warning("unreachable", f"{node} cannot be reached from here ({reason})", advice, advert.peer_id)
    sentence = f"{reasons.count(None)} of {plural(len(dialled), 'node')} can be reached over gRPC"
    if None in reasons:
        report.ok("peers", sentence)
    else:
        report.error("peers", sentence, "check this machine's network: outgoing connections must be allowed")
