"""The order of the checks: the machine, the node's directory, the swarm, what holds it up, what the run needs."""

import asyncio
import logging
import tempfile
from collections.abc import Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p.config import ListenSettings, NodeConfig, RunManifest
from noloco_p2p.core.balance import choose_stage
from noloco_p2p.core.members import READY
from noloco_p2p.core.messages import NO_STAGE, Advert, PeerId
from noloco_p2p.humanize import plural
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import KEY, Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.launch import homes, join_file, node_probe, run_files
from noloco_p2p.launch.homes import Home
from noloco_p2p.launch.settings import Overrides
from noloco_p2p.observe import survey
from noloco_p2p.observe.bandwidth_probe import LinkProbe
from noloco_p2p.observe.diagnosis.diagnose import diagnose
from noloco_p2p.observe.doctor import machine, peers
from noloco_p2p.observe.doctor.doctor_report import DoctorReport
from noloco_p2p.observe.doctor.run_requirements import RunRequirements

LOOKS, LOOK_AGAIN_S = 2, 2.5
"""How often the swarm is diagnosed if nothing is found, and the pause between: a broken link shows most of the time,
but not while it is being retried."""


def run_doctor(join: Sequence[str], given: Overrides, directory: Path | None, *, as_json: bool) -> int:
    """Examine, report, and return the exit code. Raises ConfigError if settings or addresses are invalid."""
    import uvloop

    report = DoctorReport(as_json=as_json)
    logging.disable(logging.ERROR)  # whatever would be logged is reported as a finding
    try:
        uvloop.run(examine(report, join, given, directory))
    finally:
        logging.disable(logging.NOTSET)
    return report.end()


async def examine(report: DoctorReport, join: Sequence[str], given: Overrides, directory: Path | None) -> None:
    """Run every check that these options allow, and report each. Raises ConfigError as `run_doctor` does."""
    local = given.node()
    targets = [*map(JoinAddress.parse, join_file.known(join))]
    kinds = Home.SWARM, Home.NODE, Home.OTHER, Home.EMPTY
    kind = None if directory is None else homes.require("--dir ", directory, *kinds)
    node_dirs = () if directory is None else tuple(node_probe.node_dirs(directory))
    if kind is Home.SWARM:  # it tells its nodes where its files are
        known = run_files.local_files(node_dirs)._asdict()
        local = local.model_copy(update={key: value for key, value in known.items() if not getattr(local, key)})
    stored = next((found for one in node_dirs if (found := run_files.stored_manifest(one)) is not None), None)
    own = stored if stored is not None and not given.names_the_run else None
    manifest = None if targets else own or given.manifest()
    report.group("machine")
    machine.check_python(report)
    device = await machine.check_device(report, local)
    machine.check_files(report)
    machine.check_tcp(report)
    machine.check_time(report)
    running = []
    if directory is not None:
        report.group("node")
        running = await machine.check_node_dirs(report, directory)
    targets = targets or [JoinAddress.parse(text) for one in running[:1] for text in one.join]
    report.group("network")
    listen = machine.check_ports(report, local.listen, own_node=bool(running))
    own_id = running[0].peer_id if running else None
    examination = Examination(report, given, directory or node_probe.HOME, local, device, own_id)
    async with AsyncExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="noloco-doctor-")))
        identity = Identity.open(folder / KEY)
        closing.callback(identity.close)
        begins = own is None and not given.says_who_may_join
        members = manifest is not None and (begins or manifest.security.root_key is not None)
        libp2p = await peers.open_daemon(report, identity, listen, targets, members)
        if libp2p is not None:
            closing.push_async_callback(libp2p.close)
            if targets:
                await peers.dial(report, libp2p, targets)
            if libp2p.joined:
                report.group("swarm")
                await examination.examine_swarm(closing, libp2p, listen, folder)
        if manifest is not None and not running:
            report.group("run")
            which = "the run of this directory" if own is not None else "the run of these settings"
            report.ok("run", f"{which}: {manifest.name}, {plural(manifest.stages, 'stage')}, id {manifest.run_id}")
            needs = examination.requirements(manifest)
            await needs.check(examination.home, needs.wanted_stage())


@dataclass(frozen=True, slots=True)
class Examination:
    """The context that all checks of an examination share, and the checks that ask a swarm."""

    report: DoctorReport
    given: Overrides
    home: Path
    """The node's directory, which may not exist yet."""
    local: NodeConfig
    device: str | None
    own: PeerId | None
    """The node of this directory, or the first one, if it runs on this machine."""

    def requirements(self, manifest: RunManifest) -> RunRequirements:
        """The checks of this machine against the needs of a run."""
        return RunRequirements(self.report, manifest, self.local, self.device, self.own)

    async def examine_swarm(
        self, closing: AsyncExitStack, libp2p: Libp2pDaemon, listen: ListenSettings, folder: Path
    ) -> None:
        """Join a swarm as an observer and examine it. Whatever is opened is left to `closing` to close."""
        report, me = self.report, libp2p.peer_id
        manifest, ahead = await peers.ask_run(report, libp2p, self.given)
        if manifest is None:
            return
        standing, answered = await peers.admission(report, libp2p, manifest, own_node=self.own is not None)
        links, opened = standing.links, standing.open_directory(libp2p, manifest, folder)
        directory = await report.attempt("directory", "joining the directory (DHT)", opened, "join another node")
        if directory is not None:
            closing.push_async_callback(directory.close)
        ahead = await peers.clocks(report, libp2p, ahead)
        for finding in peers.judge_clocks(ahead, self.local.directory.ttl_s):
            report.add(finding)
        present = [] if directory is None else await peers.read_directory(report, directory)
        if answered and self.own is None:
            await peers.check_reached(report, libp2p, listen, links)
        if answered:
            await peers.check_reaches(report, present, links)
        if present:
            report.group("diagnosis")
            await self._diagnose(present, ahead.keys() | {me}, me)
        report.group("run")
        probe = LinkProbe(links)
        closing.push_async_callback(probe.close)
        await self._examine_run(probe, me, manifest, present, answered=answered)

    async def _diagnose(self, present: Sequence[Advert], compared: Set[PeerId], me: PeerId) -> None:
        """Find out what the nodes wait for, and the cause. The clocks of `compared` have already been judged."""
        for look in range(LOOKS):
            with self.report.step(f"asking {plural(len(present), 'node')} what they wait for"):
                await asyncio.sleep(LOOK_AGAIN_S if look else 0.0)
                diagnosis = diagnose(await survey.by_adverts(present))
            found = [f for f in diagnosis.findings if f.name != "clock" or (f.peer or me) not in compared]
            if any(finding.severity != "ok" for finding in found):
                break
        else:
            self.report.ok("swarm", diagnosis.sentence)
        for finding in found:
            self.report.add(finding)

    async def _examine_run(
        self, probe: LinkProbe, me: PeerId, manifest: RunManifest, present: Sequence[Advert], *, answered: bool
    ) -> None:
        """Check what the swarm's run needs of this machine, and how fast it would be.

        `answered`: nodes answer this machine over gRPC, so links to them can be measured.
        """
        needs = self.requirements(manifest)
        stage = needs.wanted_stage()
        if stage is None:  # that of the running node, or else the one that a node would take
            would_take = choose_stage(Advert(me, manifest.run_id, NO_STAGE, ()), present, manifest.stages)
            stage = next((one.stage for one in present if one.peer_id == self.own and one.stage >= 0), would_take)
        ready = [advert for advert in present if answered and advert.state in READY]
        links = [
            await needs.measure_links(probe, index, [advert for advert in ready if advert.stage == index])
            for index in (stage, stage + 1)
        ]
        parameters = await needs.check(self.home, stage)
        if parameters is not None:
            replicas = [advert for advert in present if advert.stage == stage]
            await needs.check_speed(stage, parameters[stage], replicas, links)
