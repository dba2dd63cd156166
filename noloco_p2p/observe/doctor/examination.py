"""The order of the checks: the machine, the node's directory, the swarm, what the run needs, what holds it up."""

import asyncio
import logging
import tempfile
from collections.abc import Iterator, Sequence, Set
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p.config import ListenSettings, NodeConfig, RunManifest
from noloco_p2p.core.balance import choose_stage
from noloco_p2p.core.members import READY
from noloco_p2p.core.messages import NO_STAGE, Advert, PeerId
from noloco_p2p.errors import ConfigError, LocalError, NolocoError
from noloco_p2p.io.dht.addresses import JoinAddress, announced_host
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import KEY, Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.launch import control, join_file, run_files
from noloco_p2p.launch.node_probe import HOME
from noloco_p2p.launch.observer import NullTelemetry
from noloco_p2p.launch.settings import Overrides
from noloco_p2p.observe import survey
from noloco_p2p.observe.bandwidth_probe import LinkProbe
from noloco_p2p.observe.diagnosis.diagnose import diagnose
from noloco_p2p.observe.doctor import link_speed, machine, peers, run_requirements
from noloco_p2p.observe.doctor.doctor_report import DoctorReport

LOOKS, LOOK_AGAIN_S = 2, 2.5
"""A link that carries nothing shows for most of the time, but not in the seconds in which it is tried again."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What the command line asks for."""

    join: tuple[str, ...]
    given: Overrides
    dir: Path | None
    as_json: bool


def run_doctor(options: DoctorOptions) -> int:
    """Examine, report, return the exit code. Raises ConfigError for settings or addresses that are none."""
    import uvloop

    report = DoctorReport(as_json=options.as_json)
    with _silence():
        uvloop.run(examine(options, report))
    return report.end()


@contextmanager
def _silence() -> Iterator[None]:
    """What the parts would log is reported as findings."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


async def examine(options: DoctorOptions, report: DoctorReport) -> None:
    """Every check that the options allow, reported as it ends. Raises ConfigError as `run_doctor`."""
    local = options.given.node()
    targets = [JoinAddress.parse(text) for text in join_file.JoinAddresses(options.join)]
    if options.join and not targets:
        raise ConfigError(f"no join address is in {' or '.join(options.join)} yet: is its node running?")
    node_dirs = () if options.dir is None else control.node_dirs(options.dir)
    stored = next((found for one in node_dirs if (found := run_files.stored_manifest(one)) is not None), None)
    own = stored if stored is not None and not options.given.names_the_run else None
    manifest = None if targets else own or options.given.manifest()
    report.group("machine")
    machine.check_python(report)
    device = await machine.check_device(report, local)
    machine.check_files(report)
    machine.check_time(report)
    running = []
    if options.dir is not None:
        report.group("node")
        running = await machine.check_node_dirs(report, options.dir)
    if running and not targets:
        targets = [JoinAddress.parse(text) for text in running[0].join]
    report.group("network")
    listen = machine.check_ports(report, local.listen, own_node=bool(running))
    examination = Examination(options, report, local, device, bool(running))
    async with AsyncExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="noloco-doctor-")))
        identity = Identity.open(folder / KEY)
        closing.callback(identity.close)
        libp2p = await peers.open_daemon(report, identity, listen, targets)
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
            report.ok("run", f"{which}: {manifest.name}, {manifest.stages} stages, id {manifest.run_id}")
            await examination.check_needs(manifest, examination.stage_of(manifest))


@dataclass(frozen=True, slots=True)
class Examination:
    """What all parts of one examination know, and those that ask a swarm."""

    options: DoctorOptions
    report: DoctorReport
    local: NodeConfig
    device: str | None
    runs_here: bool
    """A node of the directory in question runs on this machine: what it has, it has."""

    def stage_of(self, manifest: RunManifest) -> int | None:
        """The stage that the settings ask for; None when they ask for none, or for one that the run does not have."""
        wanted = self.local.stage
        if wanted is not None and wanted >= manifest.stages:
            sentence = f"stage {wanted} is asked for, the run has stages 0 to {manifest.stages - 1}"
            self.report.error("stage", sentence, "set stage to one of these, or leave it out")
            return None
        return wanted

    async def check_needs(self, manifest: RunManifest, stage: int | None) -> run_requirements.StageSizes | None:
        """What the run asks of this machine at a stage, or at any."""
        sizes = await run_requirements.sizes_of(self.report, manifest)
        if sizes is None:
            return None
        if self.device is not None and not self.runs_here:
            run_requirements.check_memory(self.report, manifest, self.device, stage)
        stages = range(manifest.stages) if stage is None else [stage]
        largest_bytes = max(sizes.checkpoint_bytes(index) for index in stages)
        run_requirements.check_disk(self.report, self.options.dir or HOME, self.local, largest_bytes)
        if 0 in stages and not self.runs_here:
            await run_requirements.check_data(self.report, manifest, self.local, "doctor")
        return sizes

    async def examine_swarm(
        self, closing: AsyncExitStack, libp2p: Libp2pDaemon, listen: ListenSettings, folder: Path
    ) -> None:
        """Join a swarm as an observer, and ask it; what is opened is closed by `closing`."""
        report, me = self.report, libp2p.peer_id
        manifest, ahead = await peers.ask_run(report, libp2p, self.options.given)
        if manifest is None:
            return
        directory = await self._open_directory(closing, libp2p, folder, manifest)
        ahead = await peers.clocks(report, libp2p, ahead)
        for finding in peers.judge_clocks(ahead, self.local.directory.ttl_s):
            report.add(finding)
        present = [] if directory is None else await peers.read_directory(report, directory)
        if not self.runs_here:
            await self._check_reached(libp2p, listen, manifest)
        await peers.check_reaches(report, present, manifest.run_id)
        if present:
            report.group("diagnosis")
            await self._diagnose(present, ahead.keys() | {me}, me)
        report.group("run")
        stage = self.stage_of(manifest)
        if stage is None:  # the one that a node without a stage of its own would take
            stage = choose_stage(Advert(me, manifest.run_id, NO_STAGE, ()), present, manifest.stages)
        links = await self._measure_links(me, manifest, present, stage)
        sizes = await self.check_needs(manifest, stage)
        if sizes is not None:
            replicas = [advert for advert in present if advert.stage == stage]
            await self._check_speed(manifest, replicas, stage, sizes, links)

    async def _open_directory(
        self, closing: AsyncExitStack, libp2p: Libp2pDaemon, folder: Path, manifest: RunManifest
    ) -> HivemindDirectory | None:
        known_path = folder / "known-peers.json"
        try:
            with self.report.step("joining the directory (DHT)"):
                directory = await HivemindDirectory.open(
                    libp2p, run_id=manifest.run_id, stages=manifest.stages, known_path=known_path
                )
        except NolocoError as error:
            self.report.error("directory", str(error), "join another node")
            return None
        closing.push_async_callback(directory.close)
        return directory

    async def _check_reached(self, libp2p: Libp2pDaemon, listen: ListenSettings, manifest: RunManifest) -> None:
        """Listen where the node would, and be dialled back."""
        transport = GrpcTransport(libp2p.peer_id, manifest.run_id, listen, NullTelemetry(), 0)
        try:
            await transport.listen()
            host = announced_host(listen.host, listen.announce_host, libp2p.joined[0])
            await peers.check_reached(self.report, libp2p, f"{host}:{transport.port}")
        except LocalError as error:
            self.report.error("port", str(error), "set listen.grpc_port")
        finally:
            await transport.close()

    async def _diagnose(self, present: Sequence[Advert], compared: Set[PeerId], me: PeerId) -> None:
        """What the nodes wait for, and which is the cause. The clocks of `compared` have been judged already."""
        for look in range(LOOKS):
            with self.report.step(f"asking {len(present)} nodes what they wait for"):
                await asyncio.sleep(LOOK_AGAIN_S if look else 0.0)
                diagnosis = diagnose(await survey.by_adverts(present))
            found = [f for f in diagnosis.findings if f.name != "clock" or (f.peer or me) not in compared]
            if any(finding.severity != "ok" for finding in found):
                break
        else:
            self.report.ok("swarm", diagnosis.sentence)
        for finding in found:
            self.report.add(finding)

    async def _measure_links(
        self, me: PeerId, manifest: RunManifest, present: Sequence[Advert], stage: int
    ) -> list[link_speed.StageLinks | None]:
        """Round trips and bandwidth to the own and to the next stage; None where nobody is, or nobody answers."""
        probe = LinkProbe(me, manifest.run_id)
        try:
            return [
                await link_speed.measure_links(
                    self.report, probe, index, [a for a in present if a.stage == index and a.state in READY]
                )
                for index in (stage, stage + 1)
            ]
        finally:
            await probe.close()

    async def _check_speed(
        self,
        manifest: RunManifest,
        replicas: Sequence[Advert],
        stage: int,
        sizes: run_requirements.StageSizes,
        links: Sequence[link_speed.StageLinks | None],
    ) -> None:
        """The speed to be expected at a stage, from this device, else from what its `replicas` announce."""
        too_large = sizes.parameters[stage] > link_speed.LARGEST_TIMED_PARAMETERS
        # A device that a node uses is not measured besides.
        device = None if self.runs_here or too_large else self.device
        measured = await link_speed.device_seconds(self.report, manifest, replicas, stage, device)
        if measured is None:
            reason = f"nobody announces one for stage {stage}, and it is not measured here"
            self.report.ok("speed", f"no speed can be given: {reason}")
        else:
            link_speed.report_rate(self.report, manifest, self.local, stage, measured, links[1])
            link_speed.report_round(self.report, manifest, sizes, stage, links[0])
