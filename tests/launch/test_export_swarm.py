"""Export from running nodes: real libp2p, DHT and gRPC; the nodes' answers are scripted."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import daemon, run
from stages import make_manifest, make_stages
from transport_fixture import Events, Node, hang

from noloco_p2p.compute import exported_model, host_tensor
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import ListenSettings, OuterSettings, RunManifest
from noloco_p2p.core.messages import Advert, PeerId
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import ConfigError, LocalError, Unreachable, Violation
from noloco_p2p.io.dht.hivemind_directory import HivemindDirectory
from noloco_p2p.io.dht.join_handshake import serve_manifest
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.io.transport.peer_links import open_links
from noloco_p2p.launch.collection import CollectedReplica, CollectedWeights
from noloco_p2p.launch.live_collection import SnapshotCollector, better, chosen, common, from_swarm, next_target

MANIFEST = make_manifest(dtype="float32")


@dataclass
class Holder:
    """A node that serves snapshots of its newest two rounds."""

    stage: TorchStage
    newest: int
    moves: int = 0
    """Rounds that it has advanced by the first request; at later requests it has reached the requested round."""
    dead: bool = False
    """Whether it is announced although nothing listens at its address."""
    peer: PeerId = ""
    address: str = ""
    asked: list[int | None] = field(default_factory=list)

    async def give(self, request: SnapshotRequest) -> Snapshot:
        """Answer as `node/outer_round.py` does."""
        round = request.round
        assert request.stage == self.stage.state.index
        assert round is not None
        self.asked.append(round)
        if self.moves:
            self.newest = self.newest + self.moves if len(self.asked) == 1 else max(round, self.newest)
        given = round if self.newest - 1 <= round <= self.newest else self.newest
        return replace(self.stage.encode(self.stage.snapshot(given, 10 * given), request, "observer"), peer=self.peer)


def holders(*newest: tuple[int, int]) -> list[Holder]:
    """One node for each (stage, newest round), each with different weights."""
    made = []
    for number, (index, round) in enumerate(newest):
        stage = make_stages(MANIFEST)[index]
        with torch.no_grad():
            for theta in stage.parameters.values():
                theta.add_(0.1 * (number + 1))
        made.append(Holder(stage, round))
    return made


@asynccontextmanager
async def swarm(home: Path, members: Sequence[Holder], manifest: RunManifest = MANIFEST) -> AsyncIterator[str]:
    """Announces these nodes; yields the address to join."""
    first: str | None = None
    async with AsyncExitStack() as closing:
        for number, holder in enumerate(members):
            libp2p = await closing.enter_async_context(daemon(home / str(number), join=[first] if first else None))
            directory = await HivemindDirectory.open(
                libp2p, run_id=manifest.run_id, stages=manifest.stages, known_path=home / f"known-{number}.json"
            )
            closing.push_async_callback(directory.close)
            transport = GrpcTransport(open_links(libp2p.identity, manifest.run_id), ListenSettings(), Events(), 1 << 20)
            closing.push_async_callback(transport.close)
            await transport.serve(Node(hang, holder.give))
            await serve_manifest(libp2p, manifest.canonical_json())
            holder.peer = libp2p.peer_id
            addresses = ("127.0.0.1:1" if holder.dead else f"127.0.0.1:{transport.port}",)
            mine = Advert(holder.peer, manifest.run_id, holder.stage.state.index, addresses, state="training")
            await directory.announce(replace(mine, outer_round=holder.newest), 30.0)
            first = first or libp2p.join_addresses[0]
        assert first is not None
        yield first


def test_the_newest_round_that_all_nodes_can_serve_is_exported(tmp_path: Path) -> None:
    """One stage is a round ahead and one of four nodes is dead: three serve round 5, the fourth is named."""

    async def test() -> None:
        members = holders((0, 5), (0, 5), (1, 6), (0, 5))
        members[3].dead = True
        said: list[str] = []
        async with swarm(tmp_path, members) as address:
            (tmp_path / "address").write_text(address)
            found = await from_swarm([f"@{tmp_path / 'address'}"], one=False, say=said.append)
        assert (found.manifest, found.round) == (MANIFEST, 5)
        assert [{r.peer for r in mine} for mine in found.stages] == [
            {members[0].peer, members[1].peer},
            {members[2].peer},
        ]
        for mine in found.stages:
            for replica in mine:
                assert (replica.round, replica.step) == (5, 50)
                stage = next(member.stage for member in members if member.peer == replica.peer)
                for name, theta in stage.parameters.items():
                    torch.testing.assert_close(replica.weights[name], theta.detach(), rtol=1e-6, atol=1e-7)
        assert len(said) == 1
        assert f"not used: {members[3].peer} of stage 0" in said[0]

    run(test)


def test_if_the_swarm_has_moved_on_a_later_round_is_exported(tmp_path: Path) -> None:
    """The adverts are old: by the first answers the nodes are 2 and 5 rounds further. Then all reach round 11."""

    async def test() -> None:
        members = holders((0, 5), (1, 5))
        members[0].moves, members[1].moves = 2, 5
        async with swarm(tmp_path, members) as address:
            found = await from_swarm([address], one=False, say=print)
        assert found.round == 11
        assert [member.asked for member in members] == [[5, 11], [5, 11]]

    run(test)


def test_with_one_a_single_replica_of_each_stage_is_used(tmp_path: Path) -> None:
    """The one with the lowest peer id, or the next one if its answer is unusable."""

    async def test() -> None:
        members = holders((0, 5), (0, 5), (1, 5))
        async with swarm(tmp_path, members) as address:
            low, high = sorted(members[:2], key=lambda member: member.peer)
            found = await from_swarm([address], one=True, say=print)
            assert [[r.peer for r in mine] for mine in found.stages] == [[low.peer], [members[2].peer]]
            assert high.asked == []
            low.newest, low.peer = 6, "liar"
            said: list[str] = []
            found = await from_swarm([address], one=True, say=said.append)
            assert [[r.peer for r in mine] for mine in found.stages] == [[high.peer], [members[2].peer]]
            assert "sent the weights of liar" in said[0]

    run(test)


@dataclass
class EndingSwarm:
    """A directory and a transport at once. The swarm ends when all its nodes have been asked once."""

    members: Sequence[Holder]

    async def peers(self) -> list[Advert]:
        return [
            Advert(one.peer, "run", one.stage.state.index, (), state="training", outer_round=one.newest)
            for one in self.members
            if not one.asked
        ]

    async def fetch_snapshot(self, peer: Advert, request: SnapshotRequest, *_: object) -> Snapshot:
        return await next(one for one in self.members if one.peer == peer.peer_id).give(request)


def test_what_was_fetched_is_exported_if_the_swarm_ends_before_a_better_round_is_found() -> None:
    """One of three nodes is a round behind, so all would be asked again for its round."""
    members = holders((0, 7), (0, 6), (1, 7))
    for number, member in enumerate(members):
        member.peer = f"peer-{number}"
    specs = [exported_model.stage_specs(MANIFEST, stage) for stage in range(MANIFEST.stages)]
    ending: Any = EndingSwarm(members)
    found = asyncio.run(SnapshotCollector(MANIFEST, specs, ending, ending, print).collect(one=False))
    assert (found.round, [[r.peer for r in mine] for mine in found.stages]) == (7, [["peer-0"], ["peer-2"]])


def test_each_reason_why_a_swarm_cannot_be_exported_has_its_message(tmp_path: Path) -> None:
    async def test() -> None:
        async with swarm(tmp_path / "a", holders((0, 5))) as address:
            with pytest.raises(LocalError, match=r"offers trained weights of stage 1: try again later \(paused nodes"):
                await from_swarm([address], one=False, say=print)
        with pytest.raises(Unreachable, match="nobody answers"):
            await from_swarm([address], one=False, say=print)
        alone = MANIFEST.model_copy(update={"outer": OuterSettings(rule="noloco", pairing="none")})
        async with swarm(tmp_path / "b", holders((0, 0)), alone) as address:
            with pytest.raises(ConfigError, match="no outer rounds"):
                await from_swarm([address], one=False, say=print)

    run(test)


def test_weights_in_a_snapshot_equal_theta_bit_for_bit() -> None:
    stage = holders((1, 3))[0].stage
    parameters = exported_model.stage_specs(MANIFEST, 1)
    snapshot = stage.encode(stage.snapshot(3, 7), SnapshotRequest(1, weights="float32"), "observer")
    assert [tensor.spec for tensor in snapshot.tensors] == [exported_model.flat_weights(parameters)]
    found = exported_model.fast_weights(snapshot, parameters)
    for name, theta in stage.parameters.items():
        assert torch.equal(found[name], theta.detach())
    first = host_tensor.to_torch(snapshot.tensors[0]).clone()
    first[0] = torch.nan
    bad = replace(snapshot, tensors=(host_tensor.from_torch("weights", first),))
    with pytest.raises(Violation, match="not finite"):
        exported_model.fast_weights(bad, parameters)


@pytest.mark.parametrize(
    ("target", "rounds", "following"),
    [
        (7, {0: [7, 7], 1: [7, 7]}, 7),
        (7, {0: [7, 9], 1: [8, 7]}, 10),  # the swarm has passed the target: all are asked for the same later round
        (7, {0: [7, 6], 1: [7, 7]}, 6),  # one node is a round behind: the others still keep that round
        (7, {0: [7, 3], 1: [7, 7]}, 7),  # one node is far behind: it is left out
        (7, {0: [7, 7], 1: [5, 4]}, 5),
    ],
)
def test_the_next_round_to_request(target: int, rounds: dict[int, list[int]], following: int) -> None:
    assert next_target(target, rounds) == following


def test_which_nodes_are_asked() -> None:
    def advert(peer: str, stage: int, partner_from_round: int = 0, round: int = 8, fresh: int = 0) -> Advert:
        joined = partner_from_round
        return Advert(peer, "run", stage, (), partner_from_round=joined, outer_round=round, fresh_round=fresh)

    adverts = [advert("c", 1, 9), advert("b", 0), advert("a", 0, 9), advert("d", 0)]
    assert [one.peer_id for one in chosen(adverts, 8, 2, one=False)] == ["b", "d", "c"]
    assert [one.peer_id for one in chosen(adverts, 9, 2, one=False)] == ["a", "b", "d", "c"]
    assert [one.peer_id for one in chosen(adverts, 8, 2, one=True)] == ["b", "c"]
    adverts = [advert("a", 0, fresh=6), advert("b", 0), advert("c", 1, fresh=4), advert("d", 1, round=3)]
    assert [one.peer_id for one in chosen(adverts, 8, 2, one=False)] == ["b", "c"], "of two lineages only one"


def test_the_newest_round_of_all_stages_is_chosen() -> None:
    def found(*at: tuple[str, int, int]) -> CollectedWeights | None:
        return common(MANIFEST, [CollectedReplica(peer, stage, round, 1, {}) for peer, stage, round in at])

    newer = found(("b", 0, 5), ("a", 0, 5), ("c", 1, 5), ("d", 1, 6))
    assert newer is not None
    assert newer.round == 5
    assert [[replica.peer for replica in mine] for mine in newer.stages] == [["a", "b"], ["c"]]
    assert found(("a", 0, 5), ("c", 1, 6)) is None
    older_larger = found(("a", 0, 4), ("b", 0, 4), ("c", 1, 4), ("d", 1, 4))
    assert better(newer, older_larger) is better(older_larger, newer) is older_larger
    assert better(None, newer) is better(newer, None) is newer
