"""A half-open link, whose other end vanished silently: gRPC's keepalive ends the calls in flight on both sides."""

import asyncio

import pytest
from link_fixture import Proxy
from machine import in_time
from transport_fixture import LARGE, SMALL, Node, activation, echo, hang, pair, run, soon

from noloco_p2p.errors import Unreachable
from noloco_p2p.io.transport import channels, service

PROBING = ("keepalive_time_ms", "keepalive_timeout_ms", "ping_timeout_ms")


def hurried(options: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The options with all keepalive times divided by twelve."""
    return tuple((name, value // 12 if name.endswith(PROBING) else value) for name, value in options)


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "OPTIONS", hurried(channels.OPTIONS))
    monkeypatch.setattr(service, "OPTIONS", hurried(service.OPTIONS))


def test_the_real_keepalive_detects_it_within_fifteen_seconds() -> None:
    for options in (channels.OPTIONS, service.OPTIONS):
        found = dict(options)
        assert 0 < found["grpc.keepalive_time_ms"] + found["grpc.http2.ping_timeout_ms"] <= 15_000 // 12


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_calls_in_flight_on_a_half_open_link_fail_and_their_handlers_are_cancelled(
    shape: tuple[int, int, int],
) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        node = Node(hang)
        async with pair(node) as both, Proxy(both.b.port) as proxy:
            calling = [asyncio.create_task(both.a.propagate(proxy.peer, activation(shape, counter=i))) for i in (1, 2)]
            await soon(node.entered.wait())
            while len(node.calls) < 2:
                node.entered.clear()
                await soon(node.entered.wait())
            proxy.swallow()
            began = clock()
            for outcome in await asyncio.gather(*calling, return_exceptions=True):
                assert isinstance(outcome, Unreachable)
            assert in_time(clock() - began, 2.5), "15 s at the real settings are 1.25 s here"
            while len(node.ends) < 2:
                node.ended.clear()
                await soon(node.ended.wait())
            assert node.ends == ["CancelledError"] * 2
            await both.a.close()

    run(scenario())


def test_the_next_call_uses_a_new_link() -> None:
    async def scenario() -> None:
        async with pair(Node(echo)) as both, Proxy(both.b.port) as proxy:
            await both.a.propagate(proxy.peer, activation(counter=1))
            proxy.swallow()
            with pytest.raises(Unreachable):
                await both.a.propagate(proxy.peer, activation(counter=2))
            sent = activation(counter=3)
            assert (await both.a.propagate(proxy.peer, sent)).grad.data == sent.hidden.data
            assert len(proxy.wires) == 2
            await both.a.close()

    run(scenario())


def test_a_quiet_healthy_link_with_a_call_in_flight_is_left_alone() -> None:
    async def scenario() -> None:
        node = Node(hang)
        async with pair(node) as both, Proxy(both.b.port) as proxy:
            calling = asyncio.create_task(both.a.propagate(proxy.peer, activation()))
            await soon(node.entered.wait())
            await asyncio.sleep(2.0)
            assert not calling.done()
            calling.cancel()
            await both.a.close()

    run(scenario())
