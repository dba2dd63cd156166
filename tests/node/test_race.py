"""Several replicas are asked, and one of them gets the body."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from noloco_p2p.errors import Busy, PeerError, Unreachable, Violation
from noloco_p2p.node.pipeline.race import first_granted
from noloco_p2p.ports import Claim

Call = Callable[[Claim], Coroutine[Any, Any, str]]


class Peers:
    """Replicas that grant a place after some seconds, and reply after some more."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.cancelled: list[str] = []
        self.noted: list[tuple[str, str]] = []

    def call(self, name: str, grant_s: float, reply_s: float = 0.01, error: PeerError | None = None) -> Call:
        async def made(claim: Claim) -> str:
            try:
                await asyncio.sleep(grant_s)
                if error is not None:
                    raise error
                if not claim.take():
                    raise Busy("too late")
                self.sent.append(name)
                await asyncio.sleep(reply_s)
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            return f"reply of {name}"

        return made

    def note(self, peer: str, error: PeerError) -> None:
        self.noted.append((peer, type(error).__name__))
        if isinstance(error, Violation):
            raise error

    def ask(self, **calls: Call) -> tuple[str, str] | None:
        async def asked() -> tuple[str, str] | None:
            found = await first_granted(calls, self.note, lambda: None)
            assert len(asyncio.all_tasks()) == 1, "no call is left running"
            return found

        return asyncio.run(asked())


def test_the_first_to_grant_gets_the_body_and_the_other_is_let_go() -> None:
    peers = Peers()
    assert peers.ask(a=peers.call("a", 0.05, 0.0), b=peers.call("b", 0.01, 0.1)) == ("b", "reply of b")
    assert (peers.sent, peers.cancelled, peers.noted) == (["b"], ["a"], [])


def test_a_single_replica_gets_the_body() -> None:
    peers = Peers()
    assert peers.ask(a=peers.call("a", 0.01)) == ("a", "reply of a")
    assert (peers.sent, peers.cancelled, peers.noted) == (["a"], [], [])


def test_grants_at_the_same_moment_send_one_body() -> None:
    peers = Peers()
    assert peers.ask(a=peers.call("a", 0.0), b=peers.call("b", 0.0)) is not None
    assert len(peers.sent) == 1


def test_one_that_fails_leaves_the_other_in_the_race() -> None:
    peers = Peers()
    found = peers.ask(a=peers.call("a", 0.0, error=Unreachable("gone")), b=peers.call("b", 0.02))
    assert found == ("b", "reply of b")
    assert peers.noted == [("a", "Unreachable")]


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_is_left_when_all_fail(count: int) -> None:
    peers = Peers()
    calls = {name: peers.call(name, 0.0, error=Busy("full")) for name in "ab"[:count]}
    assert peers.ask(**calls) is None
    assert peers.noted == [(name, "Busy") for name in calls]


def test_the_winner_may_fail_after_its_grant() -> None:
    peers = Peers()

    async def dies(claim: Claim) -> str:
        await asyncio.sleep(0.01)
        assert claim.take()
        await asyncio.sleep(0.01)
        raise Unreachable("it died")

    assert peers.ask(a=dies, b=peers.call("b", 0.05)) is None
    assert peers.noted == [("a", "Unreachable")]
    assert peers.cancelled == ["b"]


@pytest.mark.parametrize("count", [1, 2])
def test_what_must_not_be_sent_again_ends_the_race(count: int) -> None:
    peers = Peers()
    calls = {"a": peers.call("a", 0.0, error=Violation("bad", ours=True)), "b": peers.call("b", 1.0)}
    with pytest.raises(Violation):
        peers.ask(**dict(list(calls.items())[:count]))
    assert peers.cancelled == ["b"][: count - 1]


def test_a_reply_that_is_there_at_once_ends_the_race() -> None:
    peers = Peers()

    async def repeats(claim: Claim) -> str:
        return "the stored reply"

    assert peers.ask(a=repeats, b=peers.call("b", 1.0)) == ("a", "the stored reply")
    assert (peers.sent, peers.cancelled) == ([], ["b"])


def test_a_cancelled_race_cancels_all_calls() -> None:
    peers = Peers()

    async def asked() -> None:
        calls = {"a": peers.call("a", 1.0), "b": peers.call("b", 1.0)}
        race = asyncio.create_task(first_granted(calls, peers.note, lambda: None))
        await asyncio.sleep(0.01)
        race.cancel()
        with pytest.raises(asyncio.CancelledError):
            await race
        assert sorted(peers.cancelled) == ["a", "b"]

    asyncio.run(asked())
