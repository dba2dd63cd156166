"""One replica that takes from all of its stage: whom it expects, what it merges, and who is set aside."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.agreement import GroupView
from noloco_p2p.core.messages import Advert, HostTensor, PeerId
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector
from noloco_p2p.errors import Declined, PeerError, Unreachable
from noloco_p2p.node.group_pull import GroupPull
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.node.vector_pull import Pull, VectorPuller
from noloco_p2p.sim import virtual_time

ROUND = 5
NOTHING = HostTensor("vector", "float32", (0,), memoryview(b""))
WAIT_S = 20.0


class Place:
    """A replica with the mates b, c and d, whose answers are in `answers`; the others have what it has."""

    def __init__(self, me: PeerId = "a", **outer: Any) -> None:
        fields: dict[str, Any] = {"rule": "diloco", "deadline_s": WAIT_S} | outer
        manifest = RunManifest(outer=OuterSettings(**fields))
        advert = Advert(me, manifest.run_id, 0, (), state="training", outer_round=ROUND - 1)
        telemetry = cast(Any, SimpleNamespace(event=lambda *_, **__: None))
        self.node = NodeState(advert, manifest, NodeConfig(), telemetry)
        self.swarm = Membership(self.node)
        self.members = self.swarm.members
        self.sees()
        self.answers: dict[PeerId, PartnerVector | PeerError] = {}
        self.took_s = 0.0
        puller = VectorPuller(self.node, self.swarm, cast(Any, None))
        puller.fetch = self.fetch  # type: ignore[method-assign]
        self.group = GroupPull(self.node, self.swarm, puller)

    def sees(self, **from_round: int) -> None:
        """Read the membership, with `partner_from_round` by peer."""
        mate = partial(Advert, run_id=self.node.run_id, stage=0, addresses=(), state="training")
        mates = [mate(peer, partner_from_round=from_round.get(peer, 0)) for peer in "bcd"]
        self.members.update(mates, now=self.node.now())

    async def fetch(self, peer: Advert, mine: FrozenRound, wait_s: float, idle: bool) -> Pull:
        """As in `VectorPuller`."""
        assert (wait_s, idle) == (WAIT_S, True)
        await asyncio.sleep(self.took_s)
        answer = self.answers.get(peer.peer_id, vector(peer.peer_id))
        if isinstance(answer, PeerError):
            raise answer
        return Pull("", (answer,), 10, 1)

    async def pull(self) -> Pull:
        return await self.group.pull(self.group.with_view(frozen()), True)

    @property
    def expected(self) -> str:
        view = self.group.with_view(frozen()).view
        assert view is not None, "the rule takes from all"
        return "".join(view.peers)


def frozen() -> FrozenRound:
    return FrozenRound("a", ROUND, ROUND, NOTHING, NOTHING, view=GroupView((), 7))


def vector(peer: PeerId, digest: int = 7, named: str = "abcd") -> PartnerVector:
    return PartnerVector(peer, ROUND, ROUND, NOTHING, NOTHING, view=GroupView(tuple(named), digest))


def at(scenario: Callable[[Place], Awaitable[None]], me: PeerId = "a", **outer: Any) -> None:
    async def main() -> None:
        await asyncio.sleep(100.0)
        await scenario(Place(me, **outer))

    virtual_time.run(main(), limit_s=1000)


def test_it_expects_itself_and_all_mates_that_count_in_the_round() -> None:
    async def scenario(place: Place) -> None:
        assert place.expected == "abcd"
        place.sees(c=ROUND + 1, d=ROUND)
        assert place.expected == "abd"
        place.members.failed("b", now=place.node.now())
        assert place.expected == "ad", "b is set aside"
        place.node.update(partner_from_round=ROUND)
        assert place.expected == "ad"
        place.node.update(partner_from_round=ROUND + 1)
        assert place.expected == "d", "it has just copied its weights"

    at(scenario)


@pytest.mark.parametrize("me", ["a", "bb", "e"])
def test_those_that_it_expects_are_named_in_ascending_order(me: PeerId) -> None:
    """Peers refuse a snapshot that names them in another one."""

    async def scenario(place: Place) -> None:
        assert place.expected == "".join(sorted([me, *"bcd"]))

    at(scenario, me)


def test_it_waits_for_each_as_long_as_the_run_says() -> None:
    async def scenario(place: Place) -> None:
        assert (await place.pull()).reason == "all"

    at(scenario, deadline_s=60.0, partner_wait_s=WAIT_S)


def test_what_all_have_is_merged() -> None:
    async def scenario(place: Place) -> None:
        pull = await place.pull()
        assert [one.peer for one in pull.theirs] == ["b", "c", "d"]
        assert (pull.reason, pull.nbytes, pull.asked_again) == ("all", 30, 3)
        assert (pull.counted, pull.left_out, pull.ahead) == (True, 0, ())

    at(scenario)


def test_a_replica_that_expects_no_mate_asks_none() -> None:
    async def scenario(place: Place) -> None:
        place.sees(**dict.fromkeys("bcd", ROUND + 1))
        assert await place.pull() == Pull("nobody")

    at(scenario)


def test_a_replica_that_differs_from_most_is_told_whom_to_copy() -> None:
    async def scenario(place: Place) -> None:
        place.answers = {peer: vector(peer, 8) for peer in "bcd"}
        pull = await place.pull()
        assert (pull.counted, pull.ahead, pull.left_out) == (False, ("b", "c", "d"), 0)

    at(scenario)


def test_a_replica_that_does_not_expect_itself_merges_the_others() -> None:
    async def scenario(place: Place) -> None:
        place.node.update(partner_from_round=ROUND + 1)
        place.answers = {peer: vector(peer, named="bcd") for peer in "bcd"}
        pull = await place.pull()
        assert ([one.peer for one in pull.theirs], pull.counted, pull.ahead) == (["b", "c", "d"], False, ())

    at(scenario)


@pytest.mark.parametrize(
    ("answer", "took_s", "reason", "aside"),
    [
        (Unreachable("gone"), 1.0, "unreachable", True),
        (Declined("its weights began at another round"), 1.0, "declined", False),
        (Declined("it has no such round"), WAIT_S, "declined", True),
        (PartnerVector("b", ROUND, ROUND, NOTHING, NOTHING), 1.0, "violation", True),
    ],
)
def test_one_that_gives_nothing_is_left_out(
    answer: PartnerVector | PeerError, took_s: float, reason: str, aside: bool
) -> None:
    """One that declines in time holds nobody up: it may count again in the next round."""

    async def scenario(place: Place) -> None:
        place.answers, place.took_s = {"b": answer}, took_s
        pull = await place.pull()
        assert (pull.reason, [one.peer for one in pull.theirs], pull.left_out) == (reason, ["c", "d"], 1)
        assert place.members.is_aside("b", now=place.node.now()) == aside

    at(scenario)


def test_one_that_gives_its_vector_again_is_no_longer_held_against() -> None:
    async def scenario(place: Place) -> None:
        await place.pull()
        place.answers = {"b": Unreachable("gone")}
        for _ in range(4):
            await place.pull()
            await asyncio.sleep(100.0)
        place.answers.clear()
        await place.pull()
        place.answers = {"b": Unreachable("gone")}
        await place.pull()
        await asyncio.sleep(1.5)
        assert not place.members.is_aside("b", now=place.node.now()), "as after a first failure"

    at(scenario)


@pytest.mark.parametrize(
    ("pull", "of_all", "result"),
    [
        (Pull("nobody"), False, "alone"),
        (Pull("", (vector("b"),)), False, "partner"),
        (Pull("", (replace(vector("b"), round=ROUND - 1),)), False, "stale"),
        (Pull("", (vector("b"),), other=True), False, "other"),
        (Pull("", (vector("b"),)), True, "all"),
        (Pull("", (vector("b"),), left_out=1), True, "some"),
    ],
)
def test_the_result_of_a_round(pull: Pull, of_all: bool, result: str) -> None:
    assert pull.result(frozen(), of_all) == result
