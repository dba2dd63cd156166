"""Collects the weights for an export from a running swarm. `collection.py` collects them from checkpoints.

The collector is an observer (bootstrap.py) that also calls nodes, as a peer does.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from noloco_p2p.compute import exported_model
from noloco_p2p.config import ListenSettings, RunManifest
from noloco_p2p.core.members import HOLDING
from noloco_p2p.core.messages import Advert, PeerId, TensorSpec
from noloco_p2p.core.resume import eldest
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.core.timeouts import TRANSFER_DEADLINE_S
from noloco_p2p.errors import ConfigError, LocalError, PeerError, Violation
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.transport.allocator import tune_allocator
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.launch.bootstrap import NullTelemetry, observing
from noloco_p2p.launch.collection import CollectedReplica, CollectedWeights, Say
from noloco_p2p.launch.progress_line import counted
from noloco_p2p.node.frozen_rounds import KEPT_ROUNDS

ATTEMPTS = 6
"""Attempts to fetch one outer round from all stages, after which the best result is used."""
ROUND_WAIT_S = 30.0
"""How long a replica may wait until it reaches the requested round, seconds."""
READINGS = 3
"""Readings of the directory before a stage counts as missing: early readings of a freshly joined DHT can miss nodes."""
READING_PAUSE_S = 1.0


async def from_swarm(join: Sequence[str], *, one: bool, say: Say) -> CollectedWeights:
    """Fetch snapshots of the newest outer round that all stages have: from all replicas, or from one per stage.

    Raises ConfigError (malformed address, or a run without outer rounds), Unreachable (no node answers), LocalError (a
    stage has no replica, or no common round could be fetched).
    """
    tune_allocator()
    async with observing(join, calls=True) as observer:
        manifest = observer.manifest
        if manifest.outer.pairing == "none":
            raise ConfigError(
                "this run has no outer rounds (outer.pairing: none), so its nodes have no snapshots: use --from"
            )
        transport = GrpcTransport(observer.links, ListenSettings(), NullTelemetry(), 0)
        try:
            stages = range(manifest.stages)
            specs = await asyncio.to_thread(lambda: [exported_model.stage_specs(manifest, stage) for stage in stages])
            return await SnapshotCollector(manifest, specs, observer.directory, transport, say).collect(one=one)
        finally:
            await transport.close()


@dataclass(slots=True)
class SnapshotCollector:
    """Searches for a round that all stages have, while the swarm keeps training."""

    manifest: RunManifest
    specs: Sequence[tuple[TensorSpec, ...]]
    directory: HivemindDirectory
    transport: GrpcTransport
    say: Say
    failed: set[PeerId] = field(default_factory=set)
    """Nodes that failed to send their weights, and are not asked again."""

    async def collect(self, *, one: bool) -> CollectedWeights:
        """See `from_swarm`."""
        best: CollectedWeights | None = None
        target: int | None = None
        for _ in range(ATTEMPTS):
            try:
                holders = await self._holders()
            except LocalError:
                if best is not None:
                    break  # the swarm has ended meanwhile
                raise
            if target is None:
                target = max(advert.outer_round for advert in holders)
            wanted = chosen(holders, target, self.manifest.stages, one=one)
            with counted(f"fetching outer round {target}", len(wanted)) as done:
                answers = await asyncio.gather(*(self._fetch(advert, target, done) for advert in wanted))
            found = [replica for replica in answers if replica is not None]
            best = better(best, common(self.manifest, found))
            rounds = {s: [r.round for r in found if r.stage == s] for s in range(self.manifest.stages)}
            if len(found) < len(wanted) and not all(rounds.values()):
                continue
            following = next_target(target, rounds)
            if following == target or len({replica.round for replica in found}) == 1:
                break
            target = following
        if best is None:
            raise LocalError("the swarm moved on faster than its snapshots arrived: no outer round is complete")
        return best

    async def _holders(self) -> list[Advert]:
        """The nodes that hold trained weights, are not paused and have not failed, at least one of each stage.

        A paused node sends what it holds, but others would wait in vain for it to reach their round. Raises LocalError.
        """
        for reading in range(READINGS):
            await asyncio.sleep(READING_PAUSE_S if reading else 0)
            holders = [a for a in await self.directory.peers() if a.state in HOLDING and a.peer_id not in self.failed]
            missing = set(range(self.manifest.stages)) - {advert.stage for advert in holders}
            if not missing:
                return holders
        stages = ", ".join(map(str, sorted(missing)))
        advice = "try again later (paused nodes are not asked), or use --from if the run has ended"
        raise LocalError(f"no node of the swarm offers trained weights of stage {stages}: {advice}")

    async def _fetch(self, advert: Advert, round: int, done: Callable[[], None]) -> CollectedReplica | None:
        """A replica's weights at `round`, or at the newest round it has. None if it sends none, which is reported.

        Calls `done` in either case.
        """
        parameters = self.specs[advert.stage]
        expected = exported_model.flat_weights(parameters)
        wait_s = min(ROUND_WAIT_S, self.manifest.outer.deadline_s)
        request = SnapshotRequest(advert.stage, round, wait_s, expected.dtype)
        try:
            snapshot = await self.transport.fetch_snapshot(advert, request, TRANSFER_DEADLINE_S, (expected,))
            if snapshot.peer != advert.peer_id:
                raise Violation(f"{advert.peer_id} sent the weights of {snapshot.peer}")
            weights = await asyncio.to_thread(exported_model.fast_weights, snapshot, parameters)
        except PeerError as error:
            self.failed.add(advert.peer_id)
            self.say(f"not used: {advert.peer_id} of stage {advert.stage}: {error}")
            return None
        finally:
            done()
        return CollectedReplica(advert.peer_id, advert.stage, snapshot.round, snapshot.step, weights)


def common(manifest: RunManifest, found: Sequence[CollectedReplica]) -> CollectedWeights | None:
    """The replicas of the newest round that every stage has; None if there is no such round."""
    by_peer = sorted(found, key=lambda replica: replica.peer)
    for round in sorted({replica.round for replica in found}, reverse=True):
        here = [[r for r in by_peer if (r.round, r.stage) == (round, stage)] for stage in range(manifest.stages)]
        if all(here):
            return CollectedWeights(manifest.run_id, manifest, round, tuple(map(tuple, here)))
    return None


def better(one: CollectedWeights | None, other: CollectedWeights | None) -> CollectedWeights | None:
    """The collection with more replicas; of equally large ones, the newer."""
    both = [found for found in (other, one) if found is not None]
    return max(both, key=lambda found: (sum(map(len, found.stages)), found.round), default=None)


def chosen(holders: Sequence[Advert], round: int, stages: int, *, one: bool) -> list[Advert]:
    """The replicas to ask: all that others may pull from at `round`, or with `one`, only the lowest peer id per stage.

    If a stage has no such replica, its other replicas are asked. Of several lineages in a stage, only one is.
    """
    wanted: list[Advert] = []
    for stage in range(stages):
        mine = sorted((a for a in holders if a.stage == stage), key=lambda advert: advert.peer_id)
        mine = [advert for advert in mine if advert.fresh_round == eldest(mine).fresh_round]
        settled = [advert for advert in mine if advert.partner_from_round <= round] or mine
        wanted += settled[:1] if one else settled
    return wanted


def next_target(target: int, rounds: Mapping[int, Sequence[int]]) -> int:
    """The round to request after a request for `target` returned these rounds, by stage; `target` if it cannot improve.

    If a replica is past it, all are asked to reach the same later round. If one is behind, the newest round that all of
    them still keep is requested, or else one that a replica of each stage keeps.
    """
    found = [round for mine in rounds.values() for round in mine]
    newest, oldest = max(found), min(found)
    if newest > target:
        return newest + 1
    return oldest if newest - oldest < KEPT_ROUNDS else min(max(mine) for mine in rounds.values())
