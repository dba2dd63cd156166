"""How a node comes to its run: the libp2p daemon, linked to the peers that the command line names, and the manifest.

An observer comes to a run in the same way: under an identity of its own, it announces nothing and serves nothing.
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
from noloco_p2p.errors import Busy, ConfigError, Unreachable
from noloco_p2p.io.data.threaded_batches import make_batches
from noloco_p2p.io.dht import join_handshake as joining
from noloco_p2p.io.dht.addresses import JoinAddress, local_host_towards
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import KEY, Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.port_mapping import home_router
from noloco_p2p.io.dht.reach import is_open_to_others
from noloco_p2p.io.telemetry.http_server import Health, Page
from noloco_p2p.io.transport.peer_links import Links
from noloco_p2p.launch import join_file, run_files, run_key, settings
from noloco_p2p.ports import Batches

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
    overrides: settings.Overrides
    """Settings as given: file, environment, `--set`."""
    address_file: Path | None = None
    """The join addresses are written there once others can join."""
    key: Path | None = None
    """The root key of a members-only run, by which this node admits others."""
    pages: Callable[[Health], Mapping[str, Page]] | None = None
    """Pages of its HTTP server besides those that every node has, or in their place."""

    @property
    def dir(self) -> Path:
        """The node's directory: identity, known peers, endpoints.json, summary.json."""
        return self.identity.path.parent

    def with_key(self) -> "NodeOptions":
        """With the key of the run that a first node starts or continues, in a file of its directory if none was named.

        Raises ConfigError, LocalError.
        """
        own, stored = self.dir / run_key.KEY, run_files.stored_manifest(self.dir)
        if self.key is None:
            begins = stored is None and not self.overrides.says_who_may_join
            begins = begins and is_open_to_others(self.overrides.node().listen)
            goes_on = stored is not None and stored.security.root_key is not None and own.exists()
            if self.join or not (begins or goes_on):
                return self
        path = self.key or own
        known = path.exists() or self.join
        public = run_key.public_half(run_key.read(path)) if known else run_key.make(path)
        return replace(self, key=path, overrides=self.overrides.for_members(public))


async def opened(
    join: tuple[str, ...], identity: Identity, listen: ListenSettings, begins: RunManifest | None
) -> Libp2pDaemon:
    """The daemon; `join`: the values of `--join`; `begins`: the run of a first node. A file is waited for, and read
    again while nobody answers.

    A node that ran here before needs none of them: it knows its run and other peers. Raises as `Libp2pDaemon.open`.
    """
    stored = run_files.stored_manifest(identity.path.parent)
    ran_before, known = stored is not None, begins or stored
    members = known is not None and known.security.root_key is not None
    addresses = join_file.JoinAddresses(join, join_file.PATIENCE_S if ran_before else math.inf)
    if addresses.files:
        # What fails here fails again below, where it is asked for.
        await asyncio.gather(addresses.come(), asyncio.to_thread(import_ahead), return_exceptions=True)
    while True:
        try:
            texts = await addresses.come()
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
            log.warning("%s; trying the peers known from before", error)
            addresses = join_file.JoinAddresses(())


def import_ahead() -> None:
    """Import what takes seconds: while there is perhaps nobody to join yet, or before nodes are forked."""
    importlib.import_module("hivemind.dht.node")
    importlib.import_module("noloco_p2p.compute.model_family").import_transformers()
    importlib.import_module("noloco_p2p.compute.factory")


async def own_run(options: NodeOptions, local: NodeConfig) -> tuple[RunManifest, Batches | None]:
    """A first node's manifest, and its data unless it was given a later stage.

    Model and data are tried before anybody can join: a model that cannot be split, or data that do not exist, would
    otherwise be found only when all the others are there. Raises ConfigError, LocalError.
    """
    manifest = options.overrides.manifest()
    stored = run_files.stored_manifest(options.dir)
    if stored is not None and not options.overrides.names_the_run:
        manifest = stored
        log.info("continues the run of %s: %s", options.dir, manifest.name)
    _check_agrees(options, local, manifest)
    await asyncio.to_thread(check_model, manifest)
    if local.stage or stored is not None:
        return manifest, None
    return manifest, await asyncio.to_thread(make_batches, manifest, local, options.identity.peer_id)


def check_model(manifest: RunManifest) -> None:
    """Import all that the model needs, and split a small one like it. Raises ConfigError."""
    importlib.import_module("noloco_p2p.compute.factory").check_model(manifest)
    # Imported objects live as long as the process; without this the collector scans them again and again in training.
    gc.freeze()
    gc.enable()


async def joined_run(options: NodeOptions, libp2p: Libp2pDaemon, local: NodeConfig) -> RunManifest:
    """The manifest of a peer that a join address authenticates, or, when none of them answers, the stored one.

    Raises ConfigError when it is another run than the settings and `--run` describe, and what the peer's answer raises.
    """
    manifest, failure = run_files.stored_manifest(options.dir), None
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
        log.warning("%s; continues the run of %s", failure, options.dir)
    assert manifest is not None, "a node without a link has a stored manifest"
    options.overrides.check_agrees(manifest)
    _check_agrees(options, local, manifest)
    return manifest


def _check_agrees(options: NodeOptions, local: NodeConfig, manifest: RunManifest) -> None:
    """Raises ConfigError when the run is not the one that the command line names, or does not have its stage."""
    run_files.refuse_other_run(options.dir, manifest)
    if options.run_id is not None and manifest.run_id != options.run_id:
        raise ConfigError(
            f"--run {options.run_id}: the manifest hashes to {manifest.run_id}; join a node of the run that you mean"
        )
    if local.stage is not None and local.stage >= manifest.stages:
        raise ConfigError(f"stage {local.stage}: the run has stages 0 to {manifest.stages - 1}")


# --- without being a node --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observer:
    """What an observer has of a swarm."""

    manifest: RunManifest
    """The run of the peer that it joined."""
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
    """Join the swarm behind these values of `--join`, one live one suffices, for as long as the `with` lasts.

    A file is waited for. In a members-only run, whoever `calls` nodes over gRPC needs an invitation.

    Raises ConfigError (malformed address), LocalError (no daemon), and of the peer Unreachable, Declined or Violation.
    """
    join_file.check(join)
    addresses = await join_file.JoinAddresses(join, join_file.PATIENCE_S).come()
    async with AsyncExitStack() as closing:
        home = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="noloco-observer-")))
        identity = Identity.open(home / KEY)
        closing.callback(identity.close)
        here = local_host_towards(JoinAddress.parse(addresses[0]).host)
        libp2p = await Libp2pDaemon.open(identity, host=here, port=0, join=addresses)
        closing.push_async_callback(libp2p.close)
        received, _ = await joining.fetch_manifest(libp2p, libp2p.joined[0].peer_id)
        manifest = settings.manifest_from_json(received)
        standing = await run_key.of_observer(identity, manifest, libp2p, calls=calls)
        directory = await standing.open_directory(libp2p, manifest, home)
        closing.push_async_callback(directory.close)
        yield Observer(manifest, directory, standing.links)
