"""Connects a node to its run: starts the libp2p daemon, links to the peers to join, and gets the manifest from them.

An observer joins a run in the same way, under an identity of its own, but announces nothing and serves nothing.
"""

import asyncio
import gc
import importlib
import logging
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from noloco_p2p.config import ListenSettings, NodeConfig, RunManifest
from noloco_p2p.errors import Busy, ConfigError, Declined, Unreachable
from noloco_p2p.io.data.threaded_batches import make_batches
from noloco_p2p.io.dht import join_handshake as joining
from noloco_p2p.io.dht.addresses import JoinAddress, local_host_towards
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import KEY, Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.port_mapping import home_router
from noloco_p2p.io.dht.reach import is_open_to_others
from noloco_p2p.io.security import revocations
from noloco_p2p.io.telemetry.http_server import Health, Page
from noloco_p2p.io.transport.peer_links import Links
from noloco_p2p.launch import join_file, run_files, run_key, settings
from noloco_p2p.launch.library_code import give_back_unused_code
from noloco_p2p.ports import Batches

TIMES_AGAIN = 10
"""How often a joined peer is asked again for its run, every `join_file.AGAIN_S`, because it may still be starting."""

log = logging.getLogger("noloco_p2p")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options of a node from its command line."""

    join: tuple[str, ...]
    """Addresses, or `@FILE` for a file of addresses."""
    run_id: str | None
    identity: Identity
    """Locked by this process; its file is in the node's directory."""
    watch_stdin: bool
    """Stop at once when standard input closes: the launcher is gone."""
    overrides: settings.Overrides
    """Settings as given: file, environment, `--set`."""
    address_file: Path | None = None
    """Where to write the join addresses once others can join."""
    key: Path | None = None
    """The root key of a members-only run, with which this node admits others."""
    pages: Callable[[Health], Mapping[str, Page]] | None = None
    """Makes further pages for the HTTP server."""

    @property
    def dir(self) -> Path:
        """The node's directory: identity, known peers, endpoints.json, summary.json."""
        return self.identity.path.parent

    def with_key(self) -> "NodeOptions":
        """The same options with the root key, if this is the first node of a members-only run, new or continued.

        Without `--key` the key is in a file of the node's directory. Raises ConfigError, LocalError.
        """
        own, stored = self.dir / run_key.KEY, run_files.stored_manifest(self.dir)
        if self.key is None:
            begins = stored is None and not self.overrides.says_who_may_join
            begins = begins and is_open_to_others(self.overrides.node().listen)
            goes_on = stored is not None and stored.security.root_key is not None and own.exists()
            if self.join or not (begins or goes_on):
                return self
        path = self.key or own
        public = run_key.public_half(run_key.read(path)) if path.exists() or self.join else run_key.make(path)
        return replace(self, key=path, overrides=self.overrides.for_members(public))


async def connect(
    join: tuple[str, ...], identity: Identity, listen: ListenSettings, begins: RunManifest | None
) -> Libp2pDaemon:
    """Start the libp2p daemon and link it to the peers. `join`: values of `--join`; `begins`: the run of a first node.

    An address file is waited for, and read again while no peer answers. A node that ran in this directory before can do
    without: it falls back to the peers that it knows. Raises as `Libp2pDaemon.open` does.
    """
    stored = run_files.stored_manifest(identity.path.parent)
    ran_before, known = stored is not None, begins or stored
    members = known is not None and known.security.root_key is not None
    addresses = join_file.JoinAddresses(join, join_file.PATIENCE_S if ran_before else math.inf)
    if addresses.files:
        # Errors are ignored here, because they occur again below, or where the imports are needed.
        await asyncio.gather(addresses.wait(), asyncio.to_thread(import_ahead), return_exceptions=True)
    while True:
        try:
            texts = await addresses.wait()
            return await Libp2pDaemon.open(
                identity,
                host=listen.host,
                port=listen.dht_port,
                announce_host=listen.announce_host,
                join=texts,
                metrics_port=listen.libp2p_metrics_port,
                router=home_router(listen, [*map(JoinAddress.parse, texts)], members=members),
            )
        except Unreachable as error:
            if await addresses.may_change(error):
                continue
            if not addresses.given or not ran_before:
                raise
            log.warning("%s; trying the peers known from earlier", error)
            addresses = join_file.JoinAddresses(())


def import_ahead() -> None:
    """Import the slow modules early: while waiting for somebody to join, or before nodes are forked."""
    importlib.import_module("hivemind.dht.node")
    importlib.import_module("noloco_p2p.compute.model_family").import_transformers()
    importlib.import_module("noloco_p2p.compute.factory")


async def own_run(options: NodeOptions, local: NodeConfig) -> tuple[RunManifest, Batches | None]:
    """The manifest of a first node, and its data, unless it continues a run or was given a later stage.

    Model and data are checked before anybody can join: otherwise a model that cannot be split, or missing data, would
    only be noticed after all the others have joined. Raises ConfigError, LocalError.
    """
    manifest = options.overrides.manifest()
    stored = run_files.stored_manifest(options.dir)
    if stored is not None and not options.overrides.names_the_run:
        manifest = stored
        log.info("continuing the run of %s: %s", options.dir, manifest.name)
    _check_agrees(options, local, manifest)
    await asyncio.to_thread(check_model, manifest)
    if local.stage or stored is not None:
        return manifest, None
    return manifest, await asyncio.to_thread(make_batches, manifest, local, options.identity.peer_id)


def check_model(manifest: RunManifest) -> None:
    """Import all that the model needs, and try to split a small model of the same kind. Raises ConfigError."""
    importlib.import_module("noloco_p2p.compute.factory").check_model(manifest)
    # Imported objects live as long as the process. Frozen, they are not scanned by every collection during training.
    gc.freeze()
    gc.enable()
    give_back_unused_code()


async def joined_run(options: NodeOptions, libp2p: Libp2pDaemon, local: NodeConfig) -> RunManifest:
    """The manifest of a joined peer, or the stored one if none of them answers.

    Raises ConfigError if the settings or `--run` describe another run, and the errors of asking the peers.
    """
    manifest = run_files.stored_manifest(options.dir)
    try:
        if libp2p.joined:
            received, ahead, unsure_s = await _described_run(libp2p)
            joining.check_clock(ahead, unsure_s, local.directory.ttl_s)
            manifest = settings.manifest_from_json(received)
    except (Busy, Unreachable) as error:
        if manifest is None:
            raise
        log.warning("%s; continuing the run of %s", error, options.dir)
    assert manifest is not None, "a node without a link has a stored manifest"
    options.overrides.check_agrees(manifest)
    _check_agrees(options, local, manifest)
    return manifest


async def _described_run(libp2p: Libp2pDaemon) -> tuple[bytes, float, float]:
    """As `first_manifest`, but patient: where all nodes are started at once, a peer can be linked before it answers."""
    for _ in range(TIMES_AGAIN):
        try:
            return await joining.first_manifest(libp2p)
        except Declined as error:
            log.info("%s; asking again", error)
        await asyncio.sleep(join_file.AGAIN_S)
    return await joining.first_manifest(libp2p)


def _check_agrees(options: NodeOptions, local: NodeConfig, manifest: RunManifest) -> None:
    """Raise ConfigError if the run is not the one that the command line or the directory names, or lacks its stage."""
    run_files.refuse_other_run(options.dir, manifest)
    if options.run_id is not None and manifest.run_id != options.run_id:
        raise ConfigError(
            f"--run {options.run_id}: the manifest hashes to {manifest.run_id}; join a node of the run that you want"
        )
    if local.stage is not None and local.stage >= manifest.stages:
        raise ConfigError(f"stage {local.stage}: the run has stages 0 to {manifest.stages - 1}")


# --- without being a node --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observer:
    """An observer's view of a swarm: it can read the directory and call nodes."""

    manifest: RunManifest
    """The run of the joined peer."""
    directory: HivemindDirectory
    links: Links


class NullTelemetry:
    """Telemetry for a process that reports to nobody."""

    def event(self, kind: str, /, **fields: object) -> None:
        """Do nothing."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


@asynccontextmanager
async def observing(join: Sequence[str], *, calls: bool = False) -> AsyncIterator[Observer]:
    """Join the swarm behind these values of `--join` for the duration of the `with`. One live address is enough.

    `calls`: nodes will be called over gRPC, which takes an invitation in a members-only run. Raises ConfigError
    (malformed or no address), LocalError (no daemon), and Unreachable, Declined or Violation from the joined peer.
    """
    addresses = join_file.known(join)
    async with AsyncExitStack() as closing:
        home = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="noloco-observer-")))
        identity = Identity.open(home / KEY)
        closing.callback(identity.close)
        here = local_host_towards(*(JoinAddress.parse(one).host for one in addresses))
        libp2p = await Libp2pDaemon.open(identity, host=here, port=0, join=addresses)
        closing.push_async_callback(libp2p.close)
        received, *_ = await joining.first_manifest(libp2p)
        manifest = settings.manifest_from_json(received)
        standing = await run_key.of_observer(identity, manifest, libp2p, calls=calls)
        directory = await standing.open_directory(libp2p, manifest, home)
        closing.push_async_callback(directory.close)
        if (records := standing.records) is not None:
            keeping = revocations.keep(libp2p, records.revoked, lambda: records.ahead, tuple)
            closing.callback(asyncio.create_task(keeping).cancel)
        yield Observer(manifest, directory, standing.links)
