"""The real world of one node, put together: identity, libp2p, manifest, metrics, gRPC, directory, node.

Everything that is opened is closed again in the opposite order, whatever happens in between.
"""

import asyncio
import gc
import importlib
import logging
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p import __version__
from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import Busy, ConfigError, Unreachable
from noloco_p2p.io.data.threaded_batches import make_batches
from noloco_p2p.io.dht import join_handshake as joining
from noloco_p2p.io.dht.addresses import announced_host
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.dht.dht_supervisor import RegisterHandlers, SupervisedDirectory
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.storage.file_checkpoints import FileCheckpoints
from noloco_p2p.io.telemetry.journal import FileJournal
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.io.transport.grpc_transport import GrpcTransport, probe, tune_allocator
from noloco_p2p.launch import bootstrap, join_file, run_files, settings
from noloco_p2p.launch.signals import SignalHandler
from noloco_p2p.node.loop import Node
from noloco_p2p.ports import Batches, Stage, World

LARGEST_ACTIVATION_BYTES = 1 << 30
"""An activation that claims to be larger is refused before its stage is asked."""
LAG_PERIOD_S = 0.5
SWITCH_INTERVAL_S = 0.0005
"""Python's thread switch interval: with the default the loop waits up to 13 ms for the device thread (measured)."""

log = logging.getLogger("noloco_p2p")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What the command line asks for."""

    join: tuple[str, ...]
    """Addresses, and `@FILE` for files with them."""
    run_id: str | None
    identity: Identity
    """Held by this process; its directory is the node's."""
    watch_stdin: bool
    given: settings.Overrides
    """Settings as given: file, environment, `--set`."""
    address_file: Path | None = None
    """Gets the join addresses, once others can join."""

    @property
    def dir(self) -> Path:
        """The node's directory: identity, known peers, endpoints.json, summary.json."""
        return self.identity.path.parent


async def run(order: NodeOptions) -> None:
    """Run one node until the run ends or a signal comes; it is cancelled by itself when it has to stop at once.

    Raises what made it fail, always a NolocoError or a bug.
    """
    early = SignalHandler(order.watch_stdin)
    if order.address_file is not None:
        join_file.remove(order.address_file)
    tune_allocator()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    local, identity = order.given.node(), order.identity
    listen = run_files.same_ports(order.dir, local.listen)
    own = None if order.join else await _own_run(order, local)
    async with AsyncExitStack() as closing:
        libp2p = await bootstrap.opened(order.join, identity, listen)
        closing.push_async_callback(libp2p.close)
        manifest, data = own if own is not None else (await _joined_run(order, libp2p, local), None)
        # What takes seconds to import is imported while a node that joins meets the others and chooses its stage.
        imports = asyncio.create_task(asyncio.to_thread(_try_model, manifest))
        imports.add_done_callback(lambda task: task.cancelled() or task.exception())
        closing.push_async_callback(asyncio.wait, [imports])
        telemetry = PrometheusTelemetry(manifest.stages)
        metrics_port = telemetry.serve(listen.host, listen.metrics_port)
        closing.callback(telemetry.close)
        closing.callback(asyncio.create_task(_watch_lag(telemetry)).cancel)
        transport = GrpcTransport(identity.peer_id, manifest.run_id, listen, telemetry, LARGEST_ACTIVATION_BYTES)
        await transport.listen()
        closing.push_async_callback(transport.close)
        known_path = order.dir / "known-peers.json"
        presence = await SupervisedDirectory.open(
            libp2p, run_id=manifest.run_id, stages=manifest.stages, known_path=known_path, offer=_offer(manifest)
        )
        closing.push_async_callback(presence.close)

        host = announced_host(listen.host, listen.announce_host, libp2p.joined[0] if libp2p.joined else None)
        advert = Advert(
            identity.peer_id,
            manifest.run_id,
            -1,
            (f"{host}:{transport.port}",),
            metrics=f"http://{host}:{metrics_port}/metrics",
            libp2p_metrics=f"http://{host}:{libp2p.metrics_port}/metrics" if libp2p.metrics_port else "",
            version=__version__,
        )
        run_files.store_manifest(order.dir, manifest)
        journal = FileJournal(order.dir, telemetry.counters)
        journal.open(
            peer_id=advert.peer_id,
            run_id=advert.run_id,
            name=manifest.name,
            version=advert.version,
            stage=local.stage,
        )
        closing.callback(journal.close)
        telemetry.record(journal)
        node = _node(advert, manifest, (order, local), (transport, presence, telemetry), data, imports)
        telemetry.watch(lambda: node.status(time.monotonic()), order.dir)
        await transport.serve(node.answers)
        await joining.check_reachable(libp2p, advert.addresses[0])
        run_files.introduce(order.dir, advert, libp2p, listen.host)
        if order.address_file is not None:
            join_file.write(order.address_file, libp2p.join_addresses)
        closing.callback(lambda: run_files.write_json(order.dir / "summary.json", run_files.summary(node, telemetry)))
        early.node = node
        await _until_the_end(node, presence)


def _offer(manifest: RunManifest) -> RegisterHandlers:
    """What this node answers over libp2p beside the DHT: the manifest, and whether a joining node can be reached."""

    async def offer(libp2p: Libp2pDaemon) -> None:
        await joining.serve_manifest(libp2p, manifest.canonical_json())
        await joining.serve_dial_back(
            libp2p, lambda address, peer: probe(address, peer, manifest.run_id, joining.PROBE_TIMEOUT_S)
        )

    return offer


async def _own_run(order: NodeOptions, local: NodeConfig) -> tuple[RunManifest, Batches | None]:
    """A first node's manifest, and its data unless it is told a later stage.

    Everything is tried before anybody can join: a model that cannot be split, or data that are not there, would
    otherwise be found when all the others have come.
    """
    manifest = order.given.manifest()
    stored = run_files.stored_manifest(order.dir)
    if stored is not None and not order.given.names_the_run:
        manifest = stored
        log.info("goes on with the run of %s: %s", order.dir, manifest.name)
    _check_asked(order, local, manifest)
    await asyncio.to_thread(_try_model, manifest)
    if local.stage or stored is not None:
        return manifest, None
    return manifest, await asyncio.to_thread(make_batches, manifest, local, order.identity.peer_id)


def _try_model(manifest: RunManifest) -> None:
    """Import all that the model needs, and split a small one like it. Raises ConfigError."""
    importlib.import_module("noloco_p2p.compute.factory").check_model(manifest)
    # What is imported lives for ever: without this the collector walks over it again and again while training.
    gc.collect()
    gc.freeze()


async def _joined_run(order: NodeOptions, libp2p: Libp2pDaemon, local: NodeConfig) -> RunManifest:
    """The manifest of a peer that a join address authenticates, or, when none of them can tell, that of before."""
    manifest, failure = run_files.stored_manifest(order.dir), None
    for joined in libp2p.joined:
        before = dht_time()
        try:
            received, theirs = await joining.fetch_manifest(libp2p, joined.peer_id)
        except (Busy, Unreachable) as error:
            failure = error
            continue
        joining.check_clock(theirs, mine_before=before, mine_after=dht_time(), ttl_s=local.directory.ttl_s)
        manifest, failure = settings.manifest_from_json(received), None
        break
    if failure is not None:
        if manifest is None:
            raise failure
        log.warning("%s; goes on with the run of %s", failure, order.dir)
    assert manifest is not None, "without a link there is the manifest of before"
    order.given.check_agrees(manifest)
    _check_asked(order, local, manifest)
    return manifest


def _check_asked(order: NodeOptions, local: NodeConfig, manifest: RunManifest) -> None:
    """Raises ConfigError when the run is not the one, or has not the stage, that the command line asks for."""
    if order.run_id is not None and manifest.run_id != order.run_id:
        raise ConfigError(
            f"--run {order.run_id}: the manifest hashes to {manifest.run_id}; join a node of the run that you mean"
        )
    if local.stage is not None and local.stage >= manifest.stages:
        raise ConfigError(f"stage {local.stage}: the run has stages 0 to {manifest.stages - 1}")


def _node(
    advert: Advert,
    manifest: RunManifest,
    asked: tuple[NodeOptions, NodeConfig],
    ports: tuple[GrpcTransport, SupervisedDirectory, PrometheusTelemetry],
    data: Batches | None,
    imports: asyncio.Task[None],
) -> Node:
    """The node; `data` is what stage 0 reads first, or None to open it once this node holds stage 0.

    No stage is made before `imports` is done: those libraries may not be imported by two threads at once.
    """
    order, local = asked
    transport, presence, telemetry = ports
    ready = [data] if data is not None else []

    async def stage(index: int) -> Stage:
        await imports
        device = importlib.import_module("noloco_p2p.compute.device")
        telemetry.event("stage", stage=index)
        telemetry.identify(peer_id=advert.peer_id, run_id=advert.run_id, stage=str(index), version=advert.version)
        made: Stage = await device.make_stage(manifest, local, index, advert.peer_id)
        telemetry.event("gauge", name="parameters", value=made.state.parameters)
        telemetry.measure_memory(importlib.import_module("noloco_p2p.compute.hardware").memory_meter(local.device))
        return made

    async def batches(cursor: Mapping[str, object] | None) -> Batches:
        if ready and cursor is None:
            return ready.pop()
        return await asyncio.to_thread(make_batches, manifest, local, advert.peer_id, cursor)

    checkpoints = FileCheckpoints(order.dir, manifest.run_id, advert.peer_id, local.checkpoint.keep)
    world = World(transport, presence, telemetry, checkpoints, stage, batches)
    return Node(advert, manifest, local, world, 1 + secrets.randbelow(2**64 - 1))


async def _until_the_end(node: Node, presence: SupervisedDirectory) -> None:
    """The node's life, unless its libp2p daemon cannot be kept alive."""
    life = asyncio.create_task(node.run())
    kept = asyncio.create_task(presence.keep(lambda message: node.trouble("libp2p", message)))
    try:
        await asyncio.wait([life, kept], return_when=asyncio.FIRST_COMPLETED)
        (life if life.done() else kept).result()
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        kept.cancel()
        await asyncio.gather(kept, return_exceptions=True)


async def _watch_lag(telemetry: PrometheusTelemetry) -> None:
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(LAG_PERIOD_S)
        telemetry.event("lag", seconds=max(0.0, loop.time() - before - LAG_PERIOD_S))
