"""Over gRPC on loopback: two replicas receive only the header, and the first to grant a place gets the body."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from transport_fixture import Events, Node, activation, advert, echo, run, soon, transport

from noloco_p2p.core.messages import Activation, Gradient, Header, PeerId
from noloco_p2p.errors import Busy, PeerError
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.node.pipeline.race import first_granted
from noloco_p2p.ports import Body

MIDDLE = (3, 333, 777)
"""3 MiB: more than is sent together with its header."""
Serve = Callable[[Header, Body], Awaitable[Gradient]]


class Asked:
    """Replicas b and c, and the outcome of asking both."""

    def __init__(self, a: GrpcTransport, nodes: dict[PeerId, Node], ports: dict[PeerId, int]) -> None:
        self.a, self.nodes, self.ports = a, nodes, ports
        self.received = {peer: Events() for peer in nodes}
        self.noted: list[tuple[PeerId, PeerError]] = []
        self.failed = asyncio.Event()
        self.left = 0

    async def ask(self, sent: Activation, *peers: PeerId) -> tuple[PeerId, Gradient] | None:
        """Ask these replicas for a place."""

        def leaves() -> None:
            self.left += 1

        calls = {
            peer: partial(self.a.propagate, advert(f"127.0.0.1:{self.ports[peer]}", peer_id=peer), sent)
            for peer in peers
        }

        def note(peer: PeerId, error: PeerError) -> None:
            self.noted.append((peer, error))
            self.failed.set()

        return await first_granted(calls, note, leaves)

    def bodies(self) -> dict[PeerId, int]:
        """How many whole bodies each replica has received."""
        return {
            peer: sum(kind == "bytes" and f["kind"] == "activation" for kind, f in events.seen)
            for peer, events in self.received.items()
        }


@asynccontextmanager
async def two(b: Serve, c: Serve) -> AsyncIterator[Asked]:
    """A caller, and two replicas with these handlers."""
    asked = Asked(transport("A"), {"b": Node(b), "c": Node(c)}, {})
    servers = {peer: transport(peer, asked.received[peer]) for peer in asked.nodes}
    try:
        for peer, server in servers.items():
            await server.serve(asked.nodes[peer])
            asked.ports[peer] = server.port
        yield asked
    finally:
        for one in (asked.a, *servers.values()):
            await one.close()


def waits_until(event: asyncio.Event) -> Serve:
    """A handler that has a place once `event` is set."""

    async def serve(header: Header, body: Body) -> Gradient:
        await event.wait()
        return await echo(header, body)

    return serve


async def busy(header: Header, body: Body) -> Gradient:
    raise Busy("full")


def test_the_first_that_has_a_place_gets_the_body_and_the_other_only_the_header() -> None:
    async def scenario() -> None:
        never, place = asyncio.Event(), asyncio.Event()
        async with two(waits_until(never), waits_until(place)) as asked:
            sent = activation(MIDDLE)
            asking = asyncio.create_task(asked.ask(sent, "b", "c"))
            for node in asked.nodes.values():
                await soon(node.entered.wait())
            assert asked.bodies() == {"b": 0, "c": 0}
            assert asked.left == 0
            place.set()
            found = await asking
            assert found is not None
            peer, gradient = found
            assert (peer, gradient.grad.data) == ("c", sent.hidden.data)
            await soon(asked.nodes["b"].ended.wait())
            assert asked.nodes["b"].ends == ["CancelledError"]
            assert asked.bodies() == {"b": 0, "c": 1}
            assert (asked.left, asked.noted) == (1, [])

    run(scenario())


def test_places_at_the_same_moment_send_one_body() -> None:
    async def scenario() -> None:
        both = asyncio.Event()
        async with two(waits_until(both), waits_until(both)) as asked:
            for counter in range(1, 6):
                for node in asked.nodes.values():
                    node.entered.clear()
                asking = asyncio.create_task(asked.ask(activation(MIDDLE, counter=counter), "b", "c"))
                for node in asked.nodes.values():
                    await soon(node.entered.wait())
                both.set()
                assert await asking is not None
                both.clear()
                assert sum(asked.bodies().values()) == asked.left == counter
            assert asked.noted == []

    run(scenario())


def test_one_that_refuses_leaves_the_other_the_body_and_two_that_refuse_nothing() -> None:
    async def scenario() -> None:
        place = asyncio.Event()
        async with two(busy, waits_until(place)) as asked:
            asking = asyncio.create_task(asked.ask(activation(MIDDLE), "b", "c"))
            await soon(asked.failed.wait())
            place.set()
            found = await asking
            assert found is not None
            assert found[0] == "c"
            assert [(peer, type(error)) for peer, error in asked.noted] == [("b", Busy)]
            asked.noted.clear()
            assert await asked.ask(activation(MIDDLE, counter=2), "b") is None
            assert [type(error) for _, error in asked.noted] == [Busy]
            assert asked.bodies() == {"b": 0, "c": 1}
            assert asked.left == 1

    run(scenario())


def test_a_caller_that_gives_up_before_any_place_has_sent_nothing() -> None:
    async def scenario() -> None:
        never = asyncio.Event()
        async with two(waits_until(never), waits_until(never)) as asked:
            asking = asyncio.create_task(asked.ask(activation(MIDDLE), "b", "c"))
            for node in asked.nodes.values():
                await soon(node.entered.wait())
            asking.cancel()
            await asyncio.wait([asking])
            for node in asked.nodes.values():
                await soon(node.ended.wait())
            assert asked.bodies() == {"b": 0, "c": 0}
            assert asked.left == 0

    run(scenario())
