"""An observer of a swarm: it joins the DHT under an identity of its own, announces nothing and serves nothing."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.io.dht import join_handshake as joining
from noloco_p2p.io.dht.addresses import JoinAddress, local_host_towards
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.identity import KEY, Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.launch import settings


@dataclass(frozen=True, slots=True)
class Observer:
    """What an observer has of a swarm."""

    peer_id: PeerId
    """Its own, drawn for this time."""
    manifest: RunManifest
    """The run of the peer that it joined."""
    directory: HivemindDirectory


class NullTelemetry:
    """Telemetry for a process that reports to nobody."""

    def event(self, kind: str, /, **fields: object) -> None:
        """Do nothing."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


@asynccontextmanager
async def observing(join: Sequence[str]) -> AsyncIterator[Observer]:
    """Join the swarm behind these addresses, one live one suffices, for as long as the `with` lasts.

    Raises ConfigError (malformed address), LocalError (no daemon), and of the peer Unreachable, Declined or Violation.
    """
    async with AsyncExitStack() as closing:
        home = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="noloco-observer-")))
        identity = Identity.open(home / KEY)
        closing.callback(identity.close)
        here = local_host_towards(JoinAddress.parse(join[0]).host)
        libp2p = await Libp2pDaemon.open(identity, host=here, port=0, join=join)
        closing.push_async_callback(libp2p.close)
        received, _ = await joining.fetch_manifest(libp2p, libp2p.joined[0].peer_id)
        manifest = settings.manifest_from_json(received)
        directory = await HivemindDirectory.open(
            libp2p, run_id=manifest.run_id, stages=manifest.stages, known_path=home / "known-peers.json"
        )
        closing.push_async_callback(directory.close)
        yield Observer(identity.peer_id, manifest, directory)
