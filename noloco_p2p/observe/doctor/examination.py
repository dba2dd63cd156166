"""The order of the checks: the machine, the node's directory, the swarm, what the run needs, what holds it up."""

import asyncio
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p.config import ListenSettings, NodeConfig, RunManifest
from noloco_p2p.core.balance import stage_to_take
from noloco_p2p.core.members import PRESENT, READY
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.errors import ConfigError, LocalError, NolocoError
from noloco_p2p.io.dht.addresses import JoinAddress, announced_host
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import KEY, Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.launch import control, join_file, run_files, settings
from noloco_p2p.launch.node_probe import HOME
from noloco_p2p.launch.observer import NullTelemetry
from noloco_p2p.observe import survey
from noloco_p2p.observe.bandwidth_probe import Gauge
from noloco_p2p.observe.diagnosis import diagnose
from noloco_p2p.observe.doctor import link_speed, machine, node_directory, peers, run_requirements
from noloco_p2p.observe.doctor.doctor_report import Telling

LOOKS, LOOK_AGAIN_S = 2, 2.5
"""A link that carries nothing shows for most of the time, but not in the seconds in which it is tried again."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the command line asks for."""

    join: tuple[str, ...]
    given: settings.Overrides
    dir: Path | None
    as_json: bool


def run_doctor(order: Order) -> int:
    """Examine, tell, return the exit code. Raises ConfigError for settings or addresses that are none."""
    import uvloop

    telling = Telling(as_json=order.as_json)
    with _silence():
        uvloop.run(examine(order, telling))
    return telling.end()


@contextmanager
def _silence() -> Iterator[None]:
    """What the parts would log is told as findings."""
    loggers = [logging.getLogger(name) for name in ("hivemind", "transformers", "datasets", "grpc", "noloco_p2p")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


async def examine(order: Order, telling: Telling) -> None:
    """Every check that the order allows, told as it ends. Raises ConfigError as `run_doctor`."""
    local, targets = order.given.node(), [JoinAddress.parse(text) for text in join_file.JoinAddresses(order.join)]
    if order.join and not targets:
        raise ConfigError(f"no join address is in {' or '.join(order.join)} yet: is its node running?")
    node_dirs = () if order.dir is None else control.node_dirs(order.dir)
    stored = next((found for one in node_dirs if (found := run_files.stored_manifest(one)) is not None), None)
    own = stored if stored is not None and not order.given.names_the_run else None
    manifest = None if targets else own or order.given.manifest()
    telling.group("machine")
    machine.check_python(telling)
    device = await machine.check_device(telling, local)
    machine.check_files(telling)
    machine.check_time(telling)
    running = []
    if order.dir is not None:
        telling.group("node")
        running = await node_directory.check_home(telling, order.dir)
    if running and not targets:
        targets = [JoinAddress.parse(text) for text in running[0].join]
    telling.group("network")
    listen = machine.check_ports(telling, local.listen, own_node=bool(running))
    async with AsyncExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="noloco-doctor-")))
        identity = Identity.open(folder / KEY)
        closing.callback(identity.close)
        libp2p = await peers.open_daemon(telling, identity, listen, targets)
        place = Place(order, telling, local, device, bool(running))
        if libp2p is not None:
            closing.push_async_callback(libp2p.close)
            if targets:
                await _Visit(place, libp2p, listen, folder).make(closing, targets)
        if manifest is not None and not running:
            telling.group("run")
            what = "the run of this directory" if own is not None else "the run of these settings"
            telling.ok("run", f"{what}: {manifest.name}, {manifest.stages} stages, id {manifest.run_id}")
            await place.check_needs(manifest, place.stage_of(manifest))


@dataclass(frozen=True, slots=True)
class Place:
    """What all parts of one examination know."""

    order: Order
    telling: Telling
    local: NodeConfig
    device: str | None
    runs_here: bool
    """A node of the directory in question runs on this machine: what it has, it has."""

    def stage_of(self, manifest: RunManifest) -> int | None:
        """The stage that the settings ask for; None when they ask for none, or, told, for one that is not there."""
        asked = self.local.stage
        if asked is not None and asked >= manifest.stages:
            told = f"stage {asked} is asked for, the run has stages 0 to {manifest.stages - 1}"
            self.telling.error("stage", told, "set stage to one of these, or leave it out")
            return None
        return asked

    async def check_needs(self, manifest: RunManifest, stage: int | None) -> run_requirements.Sizes | None:
        """What the run asks of this machine at a stage, or at any."""
        telling, local = self.telling, self.local
        sizes = await run_requirements.sizes_of(telling, manifest)
        if sizes is None:
            return None
        if self.device is not None and not self.runs_here:
            run_requirements.check_memory(telling, manifest, self.device, stage)
        stages = range(manifest.stages) if stage is None else [stage]
        folder = self.order.dir or HOME
        run_requirements.check_disk(telling, folder, local, max(sizes.checkpoint_bytes(index) for index in stages))
        if 0 in stages and not self.runs_here:
            await run_requirements.check_data(telling, manifest, local, "doctor")
        return sizes


class _Visit:
    """The part of an examination that asks a swarm."""

    def __init__(self, place: Place, libp2p: Libp2pDaemon, listen: ListenSettings, folder: Path) -> None:
        self._place = place
        self._libp2p = libp2p
        self._listen = listen
        self._folder = folder

    async def make(self, closing: AsyncExitStack, targets: Sequence[JoinAddress]) -> None:
        """Join as an observer; what is opened is closed by `closing`."""
        place, telling, libp2p = self._place, self._place.telling, self._libp2p
        await peers.dial(telling, libp2p, targets)
        if not libp2p.joined:
            return
        telling.group("swarm")
        manifest, ahead = await peers.ask_run(telling, libp2p, place.order.given)
        if manifest is None:
            return
        directory = await self._directory(closing, manifest)
        ahead = await peers.clocks(telling, libp2p, ahead)
        for finding in peers.judge_clocks(ahead, place.local.directory.ttl_s):
            telling.tell(finding)
        everybody = [] if directory is None else await peers.read_directory(telling, directory)
        everybody = [advert for advert in everybody if advert.state in PRESENT]
        if not place.runs_here:
            await self._check_reached(manifest)
        await peers.check_reaches(telling, everybody, manifest.run_id)
        if everybody:
            await self._diagnose(everybody, ahead)
        telling.group("run")
        stage = self._stage(manifest, everybody)
        links = await self._links(manifest, stage, everybody)
        sizes = await place.check_needs(manifest, stage)
        if sizes is not None:
            mates = [advert for advert in everybody if advert.stage == stage]
            await self._expect(manifest, stage, mates, sizes, links)

    async def _directory(self, closing: AsyncExitStack, manifest: RunManifest) -> HivemindDirectory | None:
        telling = self._place.telling
        try:
            with telling.step("joining the directory (DHT)"):
                directory = await HivemindDirectory.open(
                    self._libp2p,
                    run_id=manifest.run_id,
                    stages=manifest.stages,
                    known_path=self._folder / "known-peers.json",
                )
        except NolocoError as error:
            telling.error("directory", str(error), "join another node")
            return None
        closing.push_async_callback(directory.close)
        return directory

    async def _check_reached(self, manifest: RunManifest) -> None:
        """Listen where the node would, and be dialled back."""
        libp2p, listen = self._libp2p, self._listen
        transport = GrpcTransport(libp2p.peer_id, manifest.run_id, listen, NullTelemetry(), 0)
        try:
            await transport.listen()
            host = announced_host(listen.host, listen.announce_host, libp2p.joined[0])
            await peers.check_reached(self._place.telling, libp2p, f"{host}:{transport.port}")
        except LocalError as error:
            self._place.telling.error("port", str(error), "set listen.grpc_port")
        finally:
            await transport.close()

    async def _diagnose(self, everybody: Sequence[Advert], ahead: Mapping[PeerId, float]) -> None:
        """What the nodes wait for, and who is the cause. The clocks of `ahead` have been compared already."""
        telling = self._place.telling
        telling.group("diagnosis")
        me = self._libp2p.peer_id
        compared = ahead.keys() | {me}
        for look in range(LOOKS):
            with telling.step(f"asking {len(everybody)} nodes what they wait for"):
                await asyncio.sleep(LOOK_AGAIN_S if look else 0.0)
                reports = await survey.by_adverts(everybody)
            found = [f for f in diagnose.findings(reports) if f.name != "clock" or (f.peer or me) not in compared]
            if any(finding.severity != "ok" for finding in found):
                break
        else:
            telling.ok("swarm", diagnose.sentence(reports))
        for finding in found:
            telling.tell(finding)

    def _stage(self, manifest: RunManifest, everybody: Sequence[Advert]) -> int:
        """The stage that a node with these settings would take."""
        asked = self._place.stage_of(manifest)
        me = Advert(self._libp2p.peer_id, manifest.run_id, -1, ())
        return stage_to_take(me, everybody, manifest.stages) if asked is None else asked

    async def _links(self, manifest: RunManifest, stage: int, everybody: Sequence[Advert]) -> link_speed.Pair:
        """Round trips and bandwidth to the own and the next stage."""
        gauge, found = Gauge(self._libp2p.peer_id, manifest.run_id), list[link_speed.Links | None]()
        try:
            for index in (stage, stage + 1):
                replicas = [a for a in everybody if a.stage == index and a.state in READY]
                found.append(await link_speed.measure_links(self._place.telling, gauge, index, replicas))
        finally:
            await gauge.close()
        return found[0], found[1]

    async def _expect(
        self,
        manifest: RunManifest,
        stage: int,
        mates: Sequence[Advert],
        sizes: run_requirements.Sizes,
        links: link_speed.Pair,
    ) -> None:
        """The speed to be expected at a stage."""
        place, telling = self._place, self._place.telling
        free = None if place.runs_here else place.device  # a device in use is not measured besides
        measured = await link_speed.device_seconds(telling, manifest, stage, mates, sizes, free)
        if measured is None:
            told = f"nobody announces one for stage {stage}, and it is not measured here"
            telling.ok("speed", f"no speed can be told: {told}")
            return
        await link_speed.tell_expected(telling, manifest, place.local, stage, measured, links, sizes)
