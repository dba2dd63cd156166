"""Which peers a node asks when there are more than it may ask, and what it makes of their answers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.exchanges import PROBES
from noloco_p2p.core.members import TRAINED, Members
from noloco_p2p.core.messages import Advert, NodeDescription, Origin
from noloco_p2p.errors import Unreachable
from noloco_p2p.node.inquiry import Inquiry
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

MANIFEST = RunManifest()
PEERS = [Advert(f"peer-{i:04d}", MANIFEST.run_id, 0, ("127.0.0.1:1",)) for i in range(2048)]


def inquiry(me: str) -> Inquiry:
    node = SimpleNamespace(config=NodeConfig(), manifest=MANIFEST, me=me, now=lambda: 0.0)
    return Inquiry(cast(NodeState, node), Members(me, 30.0))


def test_the_few_that_are_asked_are_the_same_every_time_and_others_for_another_node() -> None:
    chosen = inquiry("me").few(PEERS)
    assert len(set(chosen)) == PROBES
    assert inquiry("me").few(PEERS[::-1]) == chosen
    assert inquiry("me").few(sorted({*PEERS[1000:], *chosen}, key=lambda one: one.peer_id)) == chosen, (
        "the others play no part"
    )
    counts = [sum(peer in PEERS[:1024] for peer in inquiry(f"node {i}").few(PEERS)) for i in range(64)]
    assert sum(counts) == pytest.approx(64 * PROBES / 2, abs=64)
    assert len({inquiry(f"node {i}").few(PEERS)[0] for i in range(64)}) > 32


# --- what peers answer ------------------------------------------------------------------------------------------------

TTL_S = NodeConfig().directory.ttl_s


class Place:
    """A node of stage 1 in training whose peers answer after `takes_s`, unless they are `silent`."""

    def __init__(self) -> None:
        me = Advert("me", MANIFEST.run_id, 1, (), state="training")
        self.node = NodeState(me, MANIFEST, NodeConfig(), cast(Any, SimpleNamespace(event=lambda *_, **__: None)))
        self.swarm = Membership(self.node)
        self.inquiry, self.members = self.swarm.inquiry, self.swarm.members
        self.asked: list[str] = []
        self.open = 0
        self.takes_s = 1.0
        self.silent: set[str] = set()
        self.told = 0

    async def describe(self, peer: Advert) -> NodeDescription:
        self.asked.append(peer.peer_id)
        self.open += 1
        await asyncio.sleep(self.takes_s)
        self.open -= 1
        if peer.peer_id in self.silent:
            raise Unreachable("nobody is there")
        said = peer.stage, peer.state, peer.step + 1, peer.outer_round + 1, "", peer.fresh_round + 1
        return NodeDescription(peer.peer_id, peer.run_id, *said)

    def changed(self) -> None:
        self.told += 1

    def sees(self, peers: Iterable[str], stage: int = 0, state: str = "training", *, met: bool = True) -> list[Advert]:
        """Read adverts of peers that have answered before, unless not `met`."""
        adverts = [Advert(p, MANIFEST.run_id, stage, (), state=state, announced_at=self.node.now()) for p in peers]
        self.members.update(adverts, now=self.node.now(), doubts=not met)
        for advert in adverts if met else ():
            self.members.answered(advert.peer_id)
        return adverts


def at(scenario: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = Place()
        running = asyncio.create_task(place.inquiry.run(cast(Any, place), place.changed))
        await scenario(place)
        assert not running.done(), "it never ends"
        running.cancel()
        await asyncio.wait([running])

    virtual_time.run(main(), limit_s=10_000)


def names(count: int, letter: str = "p") -> list[str]:
    return [f"{letter}{number:02d}" for number in range(count)]


def test_few_peers_are_asked_at_a_time_and_none_that_has_just_been_asked() -> None:
    async def scenario(place: Place) -> None:
        many = place.sees(names(20))
        for _ in range(3):
            place.inquiry.ask(many)
            await asyncio.sleep(0.1)
            assert place.open == len(place.asked) == PROBES
        await asyncio.sleep(1.0)
        assert place.inquiry.answers == place.told == PROBES
        await place.inquiry.until_asked(many, anew=False)
        assert sorted(place.asked) == names(20), "each once"
        assert place.inquiry.answering(many, TRAINED) == many
        await place.inquiry.until_asked(many[:2], anew=False)
        assert len(place.asked) == 20
        await place.inquiry.until_asked(many[:2], anew=True)
        assert len(place.asked) == 22
        place.inquiry.forget()
        assert place.inquiry.answering(many, TRAINED) == []
        assert place.inquiry.unknown(many) == many

    at(scenario)


def test_an_answer_that_was_under_way_when_all_were_forgotten_does_not_count() -> None:
    """The machine may have slept since the question, and the others have trained on meanwhile."""

    async def scenario(place: Place) -> None:
        peers = place.sees(["p"])
        place.inquiry.ask(peers)
        await asyncio.sleep(0.5)
        place.inquiry.forget()
        assert await place.inquiry.answering_now(peers, TRAINED) == peers
        assert place.asked == ["p", "p"]

    at(scenario)


def test_peers_that_have_never_answered_are_met_a_few_at_a_time_and_a_caller_at_once() -> None:
    async def scenario(place: Place) -> None:
        place.sees(names(30), met=False)
        place.inquiry.meet()
        await asyncio.sleep(0.1)
        assert place.open == PROBES
        callers = [peer for peer in names(30) if peer not in place.asked]
        for caller in ("a stranger", place.asked[0], *callers):
            place.inquiry.meet(caller)
        await asyncio.sleep(0.1)
        assert place.asked[PROBES:] == callers[:PROBES], "strangers cannot make it call many at once"
        assert place.open == 2 * PROBES
        await asyncio.sleep(10.0)
        assert sorted(place.asked) == names(30)
        assert place.inquiry.answers == 0, "no decision depended on them"
        assert place.members.met == set(names(30))
        place.inquiry.meet(callers[0])
        await asyncio.sleep(10.0)
        assert len(place.asked) == 30, "once it has answered, its calls are no reason to ask it"

    at(scenario)


def test_a_newcomer_is_met_before_those_that_were_asked_in_vain() -> None:
    async def scenario(place: Place) -> None:
        place.silent.update(names(20))
        place.sees(names(20), met=False)
        for _ in range(5):
            place.inquiry.meet()
            await asyncio.sleep(20.0)
            place.sees(names(20), met=False)
        assert {*place.asked} == {*names(20)}
        await asyncio.sleep(60.0)
        place.asked.clear()
        place.sees([*names(20), "new"], met=False)
        place.inquiry.meet()
        await asyncio.sleep(0.1)
        assert place.asked == ["new"]
        assert place.members.doubted() == {*names(20), "new"}

    at(scenario)


def test_a_peer_that_is_being_met_is_not_asked_a_second_time_for_a_decision() -> None:
    async def scenario(place: Place) -> None:
        [peer] = place.sees(["p"], met=False)
        place.inquiry.meet()
        await asyncio.sleep(0.5)
        await place.inquiry.until_asked([peer], anew=False)
        assert (place.asked, place.inquiry.answers) == (["p"], 1)

    at(scenario)


@pytest.mark.parametrize("met", [False, True])
def test_silence_sets_only_those_aside_that_have_never_answered(met: bool) -> None:
    """One that has answered may be behind a line that is full."""

    async def scenario(place: Place) -> None:
        place.silent.add("p")
        [peer] = place.sees(["p"])
        if not met:
            place.members.met.clear()
        await place.inquiry.until_asked([peer], anew=True)
        assert place.members.is_aside("p", now=place.node.now()) != met
        assert place.inquiry.with_answer(peer) is None
        place.silent.clear()
        await asyncio.sleep(1.0)
        await place.inquiry.until_asked([peer], anew=True)
        assert not place.members.is_aside("p", now=place.node.now())
        answer = replace(peer, step=1.0, outer_round=1, fresh_round=1)
        assert place.inquiry.with_answer(peer) == answer
        assert place.inquiry.with_answer(replace(peer, stage=1, state="paused")) == answer, "it has moved since"

    at(scenario)


def test_an_answer_does_not_bring_a_peer_back_whose_calls_fail() -> None:
    async def scenario(place: Place) -> None:
        place.takes_s = 0.1
        [peer] = place.sees(["p"])
        place.members.failed("p", now=place.node.now())
        assert await place.inquiry.answering_now([peer], TRAINED) == [peer]
        assert place.members.is_aside("p", now=place.node.now())

    at(scenario)


def test_how_long_a_peer_has_been_silent() -> None:
    async def scenario(place: Place) -> None:
        place.silent.add("p")
        [peer] = place.sees(["p"])
        assert not place.inquiry.is_silent("p")
        began = place.node.now()
        while place.node.now() - began < 3 * TTL_S:
            await place.inquiry.until_asked([peer], anew=True)
            await asyncio.sleep(TTL_S / 2)
        since = began + place.takes_s
        assert place.inquiry.is_silent("p")
        assert place.inquiry.silent_s("p") == pytest.approx(place.node.now() - since)
        assert place.inquiry.silent_s("p", since + 10.0) == pytest.approx(place.node.now() - since - 10.0)
        assert place.inquiry.is_gone("p")
        place.members.heard(Origin("p", 0, 0), now=place.node.now() - 5.0)
        assert place.inquiry.silent_s("p") == pytest.approx(5.0)
        assert not place.inquiry.is_gone("p"), "it may be this node that is out of reach"

    at(scenario)


def test_who_is_asked_first() -> None:
    """Those that have answered, then those whose microbatches came, and last those that are doubted."""

    async def scenario(place: Place) -> None:
        answered, heard = place.sees(names(2, "a")), place.sees(names(2, "h"), met=False)
        unheard, doubted = place.sees(names(2, "u")), place.sees(names(20, "d"), met=False)
        await place.inquiry.until_asked(answered, anew=False)
        for advert in heard:
            place.members.heard(Origin(advert.peer_id, 0, 0), now=place.node.now())
        everybody = [*doubted, *unheard, *heard, *answered]
        found = "".join(advert.peer_id[0] for advert in place.inquiry.few(everybody))
        assert found == "aahhuudd"
        assert place.inquiry.few(doubted[:PROBES]) == doubted[:PROBES]

    at(scenario)


@pytest.mark.parametrize(("state", "asks"), [("training", True), ("syncing", False), ("paused", False)])
def test_the_clocks_of_the_first_stage_are_asked_for_in_training(state: str, asks: bool) -> None:
    async def scenario(place: Place) -> None:
        place.node.update(state=state, steps_per_s=1.0)
        place.sees(["a"], state="syncing")
        place.sees(["b"], stage=1)
        for peer in place.sees(["c", "d"]):
            place.members.update([replace(peer, step=10.0, steps_per_s=1.0)], now=place.node.now())
        place.inquiry.ask_first_stage()
        await asyncio.sleep(0.1)
        assert sorted(place.asked) == ["a", "c", "d"] * asks
        assert place.inquiry.clocks() == []
        await asyncio.sleep(1.0)
        assert place.inquiry.clocks() == [pytest.approx(11.1)] * 2 * asks

    at(scenario)
