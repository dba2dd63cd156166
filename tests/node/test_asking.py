"""A node requests places for as many bodies as its line can send soon; the others wait until one has been sent."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from noloco_p2p.core.line_rate import ASKED_S, MIN_ASKED, MeasuredLine
from noloco_p2p.core.messages import MicrobatchId
from noloco_p2p.node.pipeline.asking import Asking
from noloco_p2p.node.waits import Waits
from noloco_p2p.sim import virtual_time

ID = MicrobatchId("a", 1, 1)


@dataclass
class Node:
    """The properties of a node that decide whether a body waits."""

    routing: str = "random"
    draining: bool = False
    manifest: Any = field(init=False)
    waits: Waits = field(default_factory=Waits)

    def __post_init__(self) -> None:
        self.manifest = SimpleNamespace(routing=self.routing)


def line(body_s: float | None) -> MeasuredLine:
    """A line on which an activation takes `body_s`; None: nothing has been measured."""
    measured = MeasuredLine()
    measured.up.carries("activation", 1000)
    if body_s is not None:
        measured.up.ended(measured.up.began(0.0), 1000, body_s)
    return measured


def asking(body_s: float | None, node: Node | None = None) -> Asking:
    return Asking(node or Node(), SimpleNamespace(line=line(body_s)))  # type: ignore[arg-type]


def most(of: Asking, tried: int = 100) -> int:
    """How many of `tried` bodies may ask, one after another."""
    asked = 0
    while asked < tried and of.may_ask():
        of.begin()
        asked += 1
    return asked


@pytest.mark.parametrize(
    ("body_s", "expected"), [(ASKED_S / 10, 10), (ASKED_S, MIN_ASKED), (60.0, MIN_ASKED), (None, 100)]
)
def test_as_many_ask_as_the_line_sends_soon(body_s: float | None, expected: int) -> None:
    assert most(asking(body_s)) == expected


@pytest.mark.parametrize("node", [Node("balanced"), Node("fixed"), Node(draining=True)])
def test_nobody_waits_where_the_policy_names_the_replica_or_the_node_leaves(node: Node) -> None:
    assert most(asking(60.0, node)) == 100


def test_one_that_has_left_makes_room_once() -> None:
    of = asking(60.0)
    left = of.begin()
    of.begin()
    assert not of.may_ask()
    left()
    left()
    assert of.may_ask()
    of.begin()
    assert not of.may_ask(), "reporting the same body twice makes no further room"


def test_each_body_that_has_left_lets_one_waiting_body_ask() -> None:
    async def scenario() -> None:
        of = asking(60.0)
        lefts = [of.begin() for _ in range(MIN_ASKED)]

        async def one() -> None:
            assert await of.until_may_ask(ID, 1e6)
            of.begin()

        waiting = {asyncio.create_task(one()) for _ in range(MIN_ASKED + 1)}
        for left in lefts:
            left()
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1
        assert not of.may_ask()
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_body_that_waits_without_any_leaving_gives_up() -> None:
    async def scenario() -> None:
        of = asking(60.0)
        for _ in range(MIN_ASKED):
            of.begin()
        assert not await of.until_may_ask(ID, 0.01)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_body_waits_on_while_those_before_it_are_sent() -> None:
    """All of them together may take longer than a microbatch may go without progress."""

    async def scenario() -> None:
        of = asking(60.0)
        lefts = [of.begin() for _ in range(MIN_ASKED + 3)]
        waiting = asyncio.create_task(of.until_may_ask(ID, 10.0))
        for left in lefts[:4]:
            await asyncio.sleep(9.0)
            assert not waiting.done()
            left()
        assert await waiting

    virtual_time.run(scenario(), limit_s=100)


def test_a_body_that_waits_asks_when_the_node_leaves() -> None:
    async def scenario() -> None:
        node = Node()
        of = asking(60.0, node)
        for _ in range(MIN_ASKED):
            of.begin()
        waiting = asyncio.create_task(of.until_may_ask(ID, 10.0))
        await asyncio.sleep(1.0)
        node.draining = True
        node.waits.pulse()
        assert await waiting

    virtual_time.run(scenario(), limit_s=100)
