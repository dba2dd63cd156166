"""Assembles one node in the real world: libp2p, manifest, metrics, gRPC, directory, journal, node.

Everything that is opened is closed in reverse order, whatever happens in between.
"""

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop

from noloco_p2p import __version__
from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import NO_STAGE, Advert
from noloco_p2p.errors import LocalError, PeerError
from noloco_p2p.io.data.threaded_batches import make_batches
from noloco_p2p.io.dht import clock_watch
from noloco_p2p.io.dht import join_handshake as joining
from noloco_p2p.io.dht.addresses import announced_host
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.reach import joined
from noloco_p2p.io.security import admission, revocations
from noloco_p2p.io.storage.file_checkpoints import FileCheckpoints
from noloco_p2p.io.telemetry.journal import FileJournal
from noloco_p2p.io.telemetry.log import start as start_log
from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
from noloco_p2p.io.transport.allocator import tune_allocator
from noloco_p2p.io.transport.connection_limit import ConnectionLimit, allow_many_files
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.launch import bootstrap, join_file, run_files, run_key, ways
from noloco_p2p.launch.bootstrap import NodeOptions
from noloco_p2p.launch.local_time import local_time
from noloco_p2p.launch.run_key import Standing
from noloco_p2p.launch.signal_handler import SignalHandler
from noloco_p2p.node.loop import Node
from noloco_p2p.ports import Batches, Device, Stage, World

LARGEST_ACTIVATION_BYTES = 1 << 30
"""An activation whose header claims a larger size is refused before the stage sees it."""
LAG_PERIOD_S = 0.5
"""How often the lag of the event loop is measured."""
SWITCH_INTERVAL_S = 0.0005
"""Python's thread switch interval. With the default, the loop waits up to 13 ms for the device thread (measured)."""

log = logging.getLogger("noloco_p2p")


@dataclass(frozen=True, slots=True)
class NodePorts:
    """The opened ports through which a node reaches the real world, and its first advert."""

    advert: Advert
    """The advert before the node holds a stage."""
    transport: GrpcTransport
    directory: HivemindDirectory
    telemetry: PrometheusTelemetry


def run_to_end(options: NodeOptions, *, json_lines: bool) -> None:
    """Run a node on uvloop until it has left. The log goes to stderr; of the libraries, only errors are logged."""
    stop_log = start_log(sys.stderr, json_lines=json_lines)
    for noisy in ("hivemind", "transformers", "datasets", "grpc"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        uvloop.run(run(options))
    except asyncio.CancelledError:
        log.info("stopped at once")
    finally:
        stop_log()


async def run(options: NodeOptions) -> None:
    """Run one node until the run ends or a signal comes. When it has to stop at once, its own task is cancelled.

    Raises whatever made it fail: a NolocoError, unless it is a bug; LocalError also if its last checkpoint failed.
    """
    signals = SignalHandler(options.watch_stdin)
    if options.address_file is not None:
        join_file.remove(options.address_file)
    tune_allocator()
    allow_many_files()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asyncio.get_running_loop().set_default_executor(_Threads())
    local = options.overrides.node()
    listen = run_files.same_ports(options.dir, local.listen)
    own = None if options.join else await bootstrap.own_run(options, local)
    async with AsyncExitStack() as closing:
        libp2p = await bootstrap.connect(options.join, options.identity, listen, own[0] if own is not None else None)
        closing.push_async_callback(libp2p.close)
        local = run_key.with_invited_stage(local, libp2p)
        manifest, data = own if own is not None else (await bootstrap.joined_run(options, libp2p, local), None)
        # Slow imports take place while a joining node meets the others and chooses its stage.
        imports = asyncio.create_task(asyncio.to_thread(bootstrap.check_model, manifest))
        imports.add_done_callback(lambda task: task.cancelled() or task.exception())
        standing = await run_key.of_node(options.dir, options.identity, options.key, manifest, libp2p)
        heard = local.model_copy(update={"listen": listen})
        ports = await _open_ports(closing, libp2p, heard, manifest, options, standing)
        await refuse_second(ports)
        limit = ConnectionLimit(ports.transport.port, ports.transport.unread)
        closing.callback(asyncio.create_task(limit.watch()).cancel)
        run_files.store_manifest(options.dir, manifest)
        run_files.store_local_files(options.dir, local)
        journal = FileJournal(options.dir, ports.telemetry.counters)
        me = ports.advert
        who = {"peer_id": me.peer_id, "run_id": me.run_id, "name": manifest.name, "version": me.version}
        made = {"machine": run_files.machine(), "command": run_files.command("noloco-node")}
        journal.open(**who, **made, stage=local.stage)
        closing.callback(journal.close)
        ports.telemetry.record(journal)
        node = _node(closing, ports, manifest, local, options.dir, data, imports)
        ports.telemetry.watch(lambda: node.status(time.monotonic()), options.dir)
        await ports.transport.serve(node.handler)
        joins = [f"{address}{standing.invitation}" for address in libp2p.join_addresses]
        how_to_join = ways.NOT_HERE if libp2p.asks_only else standing.how_to_join(options.dir, joins)
        run_files.introduce(options.dir, ports.advert, libp2p, listen.host, how_to_join)
        if options.address_file is not None:
            join_file.write(options.address_file, joins)
        closing.push(partial(_store, lambda: run_files.store_summary(options.dir, node, ports.telemetry)))
        signals.node = node
        await _until_the_end(node, ports.directory, libp2p, standing)
        _check_saved(node, options)


def _store(summary: Callable[[], None], kind: object, error: BaseException | None, trace: object) -> None:
    """Store the summary on leaving a context. If that fails as well, what ended the context is what its owner reads."""
    with nullcontext() if error is None else suppress(LocalError):
        summary()


class _Threads(ThreadPoolExecutor):
    """Does not wait for its threads at the end: a node that is stopped at once may just be importing torch."""

    def shutdown(self, *_: object, **__: object) -> None:
        """Start nothing more."""
        super().shutdown(wait=False, cancel_futures=True)


def _check_saved(node: Node, options: NodeOptions) -> None:
    """Raises LocalError if the last checkpoint failed. A launcher itself looks for a checkpoint of every stage."""
    for trouble in node.state.troubles(time.monotonic()):
        if trouble.name == "disk" and not options.watch_stdin:
            raise LocalError(trouble.message)


async def refuse_second(ports: NodePorts) -> None:
    """Raise LocalError if another process with this identity, in a copied directory, is running and answers."""
    listed: list[Advert] = []
    with suppress(PeerError):
        listed = await ports.directory.peers()
    for other in listed:
        if other.peer_id == ports.advert.peer_id and other.metrics != ports.advert.metrics:
            with suppress(PeerError):  # otherwise the advert was left by a process that was killed
                await ports.transport.describe(other)
                where = f"at {other.addresses[0]}, with this identity"
                raise LocalError(f"another process takes part {where}: remove identity.key here, or stop that process")


async def _open_ports(
    closing: AsyncExitStack,
    libp2p: Libp2pDaemon,
    local: NodeConfig,
    manifest: RunManifest,
    options: NodeOptions,
    standing: Standing,
) -> NodePorts:
    """Open metrics, gRPC and directory; `closing` closes them. Raises LocalError (a port in use)."""
    listen = local.listen
    telemetry = PrometheusTelemetry(manifest.stages, manifest.steps)
    private = standing.credentials is not None
    metrics_port = telemetry.serve(listen.host, listen.metrics_port, options.pages, private=private)
    closing.callback(telemetry.close)
    closing.callback(asyncio.create_task(_watch_lag(telemetry)).cancel)
    me, run_id = libp2p.peer_id, manifest.run_id
    streams = ways.open_streams(closing, libp2p, run_id, standing)
    transport = GrpcTransport(standing.links, listen, telemetry, LARGEST_ACTIVATION_BYTES, local.limits)
    await transport.listen()
    closing.push_async_callback(transport.close)
    host = announced_host(listen.host, listen.announce_host, libp2p.joined)
    way_in = await ways.find(libp2p, streams, listen, host, transport.port)
    directory = await standing.open_directory(libp2p, manifest, options.dir)
    closing.push_async_callback(directory.close)
    # Requests over libp2p streams are served last, so that a peer that gets an answer also finds a DHT.
    await joining.serve_manifest(libp2p, manifest.canonical_json())
    await joining.serve_dial_back(libp2p, standing.probe)
    if standing.records is not None:
        await admission.serve(libp2p, standing.issuer)
        await revocations.serve(libp2p, standing.records.revoked)
    if way_in is not None:
        closing.callback(asyncio.create_task(way_in.keep(directory.announce_again)).cancel)
    if not libp2p.asks_only and (relay := ways.relay(libp2p, run_id, standing, transport, local)) is not None:
        await relay.serve()
    advert = Advert(
        me,
        run_id,
        NO_STAGE,
        (joined(host, transport.port), *(way_in.addresses()[:1] if way_in is not None else ())),
        metrics=f"http://{joined(host, metrics_port)}/metrics",
        libp2p_metrics=f"http://{joined(host, libp2p.metrics_port)}/metrics" if libp2p.metrics_port else "",
        version=__version__,
    )
    return NodePorts(advert, transport, directory, telemetry)


def _node(
    closing: AsyncExitStack,
    ports: NodePorts,
    manifest: RunManifest,
    local: NodeConfig,
    home: Path,
    data: Batches | None,
    imports: asyncio.Task[None],
) -> Node:
    """Make the node. `data` is what stage 0 reads first; with None, it is opened once this node holds stage 0.

    `closing` closes its devices, so that what still waits for one ends before the loop, which would report it as a bug.

    No stage is made before `imports` is done: two threads must not import those libraries at the same time.
    """
    advert, telemetry = ports.advert, ports.telemetry
    ready = [data] if data is not None else []

    async def stage(index: int) -> tuple[Stage, Device]:
        await imports
        from noloco_p2p.compute import device, hardware

        telemetry.event("stage", stage=index)
        telemetry.identify(peer_id=advert.peer_id, run_id=advert.run_id, stage=str(index), version=advert.version)
        made = await device.make_stage(manifest, local, index, advert.peer_id)
        closing.callback(made[1].close, hung=True)
        telemetry.event("gauge", name="parameters", value=made[0].state.parameters)
        telemetry.measure_memory(hardware.memory_meter(local.device))
        return made

    async def batches(cursor: Mapping[str, object] | None) -> Batches:
        if ready and cursor is None:
            return ready.pop()
        return await asyncio.to_thread(make_batches, manifest, local, advert.peer_id, cursor)

    checkpoints = FileCheckpoints(home, manifest.run_id, advert.peer_id, local.checkpoint.keep)
    secret = secrets.randbits(64)
    world = World(ports.transport, ports.directory, telemetry, checkpoints, stage, batches, secret, local_time)
    return Node(advert, manifest, local, world, 1 + secrets.randbelow(2**64 - 1))


async def _until_the_end(node: Node, directory: HivemindDirectory, libp2p: Libp2pDaemon, standing: Standing) -> None:
    """Run the node. Raises LocalError if its libp2p daemon cannot be kept alive, or its certificate has expired."""
    trouble, ttl_s = node.state.trouble, node.state.config.directory.ttl_s
    life = asyncio.create_task(node.run())
    helpers = [directory.keep(partial(trouble, "libp2p")), clock_watch.keep(libp2p, ttl_s, partial(trouble, "clock"))]
    helpers += standing.keeping(libp2p, partial(trouble, "members"))
    tasks = [life, *map(asyncio.create_task, helpers)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        (life if life in done else done.pop()).result()
    finally:
        for task in tasks:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _watch_lag(telemetry: PrometheusTelemetry) -> None:
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(LAG_PERIOD_S)
        telemetry.event("lag", seconds=max(0.0, loop.time() - before - LAG_PERIOD_S))
