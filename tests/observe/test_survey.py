"""Requests for the status of nodes, to servers that are slow, send too much, redirect, or are no nodes at all."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from diagnosed import advert, peer, swarm, with_advert, with_figures, with_status
from machine import in_time

from noloco_p2p.core.status import SeenPeer
from noloco_p2p.errors import ConfigError, Unreachable, Violation
from noloco_p2p.io.telemetry import status_json
from noloco_p2p.observe import survey
from noloco_p2p.observe.diagnosis.findings import Report

Answering = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
"""Answers a request, given the head of it."""


@asynccontextmanager
async def _server(answering: Answering) -> AsyncIterator[str]:
    """Runs a server on loopback; yields its `http://host:port`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answering(await reader.readuntil(b"\r\n\r\n"), writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client may disconnect
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def _http(body: bytes, code: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.0 {code}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def _saying(reply: bytes) -> Answering:
    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        await writer.drain()

    return answer


def _page(report: Report, unix_time_s: float | None = None) -> bytes:
    at = time.time() if unix_time_s is None else unix_time_s
    status = with_figures(report, unix_time_s=at).status
    assert status is not None
    return _http(status_json.encode(status))


def _asked(answering: Answering) -> str:
    """The error that a server's answer leads to."""

    async def go() -> str:
        async with _server(answering) as url:
            with pytest.raises((Unreachable, Violation)) as caught:
                await survey.ask(survey.base_url(url))
            return f"{type(caught.value).__name__}: {caught.value}"

    return asyncio.run(go())


# --- one node ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [b"Content-Length", b"Age"], ids=["its length said", "until the end"])
def test_a_status_is_read_and_its_clock_compared(length: bytes) -> None:
    report = swarm()["S1R0"]

    async def go() -> Report:
        page = _page(report, time.time() + 120.0).replace(b"Content-Length", length)
        async with _server(_saying(page)) as url:
            return await survey.ask(survey.base_url(url))

    answer = asyncio.run(go())
    assert answer.status is not None
    assert report.status is not None
    assert answer.status.waits == report.status.waits
    assert answer.status.advert == report.status.advert
    assert answer.clock_ahead_s == pytest.approx(120.0, abs=1.0)


def test_without_a_time_the_clock_is_unknown() -> None:
    async def go() -> Report:
        async with _server(_saying(_page(swarm()["S1R0"], 0.0))) as url:
            return await survey.ask(survey.base_url(url))

    assert asyncio.run(go()).clock_ahead_s is None


GOOD = _page(with_status(swarm()["S1R0"], seen=()))

REFUSED: dict[str, tuple[bytes, str]] = {
    "a redirect": (_http(b"", "302 Found", "Location: http://127.0.0.1:1/status\r\n"), "a redirect (302)"),
    "not found": (_http(b"no", "404 Not Found"), "the answer is 404"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
    "silence": (b"", "not HTTP"),
    "an endless head": (b"HTTP/1.0 200 OK\r\nX: " + b"x" * survey.ANSWER_LIMIT_BYTES, "longer than the limit"),
    "too long": (b"HTTP/1.0 200 OK\r\n\r\n" + b" " * (status_json.LIMIT_BYTES + 1), "at most"),
    "cut off": (GOOD[:-100], "not JSON"),
    "no JSON": (_http(b"\xff\x00{"), "not JSON"),
    "another JSON": (_http(b"{}"), "status"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_answer_that_is_not_a_status_is_a_violation(case: str) -> None:
    reply, expected = REFUSED[case]
    found = _asked(_saying(reply))
    assert found.startswith("Violation: ")
    assert expected in found


def test_a_redirect_is_not_followed() -> None:
    asked: list[bytes] = []

    async def note(head: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(head)
        writer.write(GOOD)

    async def go() -> None:
        async with _server(note) as elsewhere:
            redirect = _http(b"", "301 Moved", f"Location: {elsewhere}/status\r\n")
            async with _server(_saying(redirect)) as url:
                with pytest.raises(Violation):
                    await survey.ask(survey.base_url(url))

    asyncio.run(go())
    assert asked == []


def test_only_the_path_of_the_status_is_requested() -> None:
    """Whatever path an advert contains."""
    asked: list[bytes] = []

    async def note(head: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(head.splitlines()[0])
        writer.write(GOOD)

    async def go() -> None:
        async with _server(note) as url:
            await survey.by_adverts([replace(advert(1, 0), metrics=f"{url}/shutdown")])

    asyncio.run(go())
    assert asked == [b"GET /status HTTP/1.0"]


def test_a_server_that_sends_too_slowly_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "TIMEOUT_S", 0.3)

    async def drip(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        for _ in range(100):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    began = time.monotonic()
    assert "within 0.3 s" in _asked(drip)
    assert in_time(time.monotonic() - began, 2.0)


def test_a_refused_connection_is_unreachable() -> None:
    with pytest.raises(Unreachable, match=r"no answer from http://127\.0\.0\.1:1: Connection refused"):
        asyncio.run(survey.ask("http://127.0.0.1:1"))


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "no such name"), OSError("two failed")])
def test_a_host_that_cannot_be_reached_is_unreachable(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(asyncio, "open_connection", fails)
    with pytest.raises(Unreachable, match="no answer from http://nowhere:1: it cannot be reached"):
        asyncio.run(survey.ask("http://nowhere:1"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "https://127.0.0.1:80",
        "file:///etc/passwd",
        "http://127.0.0.1",
        "http://user:word@127.0.0.1:80",
        "http://127.0.0.1:99999",
        "http://a b:80",
        "http://:80",
        "http://[::1:80",
        "http://xn\u00e9:80",
    ],
)
def test_malformed_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not of the form http://HOST:PORT"):
        survey.base_url(url)
    with pytest.raises(ConfigError, match=f"malformed address '{'x' * 100}'"):
        survey.base_url("x" * 101)


def test_base_urls() -> None:
    assert survey.base_url("http://10.0.0.1:9100/metrics") == "http://10.0.0.1:9100"
    assert survey.base_url("http://[::1]:9100") == "http://[::1]:9100"
    assert survey.base_url("10.0.0.1:9100") == "http://10.0.0.1:9100"


# --- a swarm ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _swarm(reports: dict[str, Report], unseen: Sequence[str] = ()) -> AsyncIterator[dict[str, Report]]:
    """Serves these nodes, each with its own server and all others in its view; only S0R0 also sees the `unseen`."""
    async with AsyncExitStack() as closing:
        pages: dict[str, bytes] = {}

        def serving(name: str) -> Answering:
            async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
                writer.write(pages[name])
                await writer.drain()

            return answer

        urls = {name: await closing.enter_async_context(_server(serving(name))) for name in reports}
        there = {name: with_advert(r, metrics=f"{urls[name]}/metrics") for name, r in reports.items()}
        adverts = {name: r.advert for name, r in there.items() if r.advert is not None}
        for name, report in there.items():
            seen = tuple(
                SeenPeer(a) for other, a in adverts.items() if other != name and (other not in unseen or name == "S0R0")
            )
            pages[name] = _page(with_status(report, seen=seen))
        yield there


def _url(report: Report) -> str:
    assert report.advert is not None
    return report.advert.metrics


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where nodes have been asked for their status."""
    found: list[str] = []
    ask = survey.ask

    async def noted(base: str) -> Report:
        found.append(base)
        return await ask(base)

    monkeypatch.setattr(survey, "ask", noted)
    return found


def test_one_url_leads_to_all_nodes(asked: list[str]) -> None:
    async def go() -> list[Report]:
        async with _swarm(swarm()) as nodes:
            return await survey.by_url(_url(nodes["S1R1"]))

    found = asyncio.run(go())
    assert [report.peer for report in found] == sorted(peer(s, r) for s in range(3) for r in range(3))
    assert len(asked) == len({*asked}) == 9, "each is asked once"
    assert all(report.status is not None and report.advert is not None and not report.failure for report in found)
    assert all(report.clock_ahead_s is not None and abs(report.clock_ahead_s) < 5.0 for report in found)


def test_a_node_missing_in_the_adverts_but_known_to_most_is_asked_too() -> None:
    async def go() -> list[Report]:
        async with _swarm(swarm(2, 2)) as nodes:
            adverts = [report.advert for name, report in nodes.items() if name != "S1R1" and report.advert is not None]
            return await survey.by_adverts(adverts)

    found = asyncio.run(go())
    assert [report.peer for report in found] == sorted(peer(s, r) for s in range(2) for r in range(2))
    assert all(report.status is not None for report in found)


def test_the_node_at_the_url_is_listed_although_no_other_knows_it_and_leads_only_to_networks_like_its_own(
    asked: list[str],
) -> None:
    """A stranger's advert cannot make the observer connect to hosts in its own private network."""
    there = replace(advert(0, 1), metrics="http://10.0.0.1:9100/metrics")

    async def go() -> list[Report]:
        mine = with_advert(swarm()["S0R0"], addresses=("127.0.0.1:4100",))
        async with _server(_saying(_page(with_status(mine, seen=(SeenPeer(there, 7.0),))))) as url:
            return await survey.by_url(url)

    first, other = asyncio.run(go())
    assert (first.peer, first.status is not None) == (peer(0, 0), True)
    assert (other.peer, other.failure) == (peer(0, 1), "it announces no metrics address that can be asked from here")
    assert other.age_s == pytest.approx(7.0, abs=1.0)
    assert len(asked) == 1


@pytest.mark.parametrize(("base", "leads"), [("http://8.8.8.8:9100", 0), ("http://127.0.0.1:9100", 2), (None, 2)])
def test_only_the_addresses_of_a_node_on_this_machine_say_in_which_networks_this_machine_is(
    base: str | None, leads: int, asked: list[str]
) -> None:
    """A stranger at the URL that calls loopback and private addresses its own cannot make the observer dial them, nor
    have itself asked there when it is asked again."""
    places = ("127.0.0.1:1", "10.0.0.1:1")
    seen = tuple(SeenPeer(replace(advert(0, n), metrics=f"http://{at}/metrics")) for n, at in enumerate(places, 1))
    stranger = with_advert(swarm()["S0R0"], addresses=places, metrics="http://10.0.0.1:22/metrics")
    status = with_status(stranger, seen=seen).status
    assert status is not None

    async def go() -> list[Report]:
        return await survey.around(status, base)

    first = asyncio.run(go())[0]
    assert len(asked) == leads
    assert base is None or first.advert.metrics == base


def test_of_what_others_know_of_a_node_the_newest_is_used() -> None:
    async def go() -> list[str]:
        ages = {"S0R0": 9.0, "S0R1": 1.0, "S0R2": 5.0}
        known = {
            name: with_status(swarm()[name], seen=(SeenPeer(replace(advert(1, 0), metrics=name), age_s),))
            for name, age_s in ages.items()
        }
        return [one.metrics for one in survey._known_to_most(known)]

    assert asyncio.run(go()) == ["S0R1"]


def test_what_half_of_the_nodes_know_is_not_known_to_most() -> None:
    async def go(others: int) -> int:
        known = {name: with_status(swarm()[name], seen=(SeenPeer(advert(1, 0)),)) for name in ("S0R0", "S0R1")}
        known |= {f"S2R{other}": with_status(swarm()[f"S2R{other}"], seen=()) for other in range(others)}
        return len(survey._known_to_most(known))

    assert [asyncio.run(go(others)) for others in (1, 2)] == [1, 0]


def test_a_node_known_to_few_is_not_asked() -> None:
    """So a single liar cannot send the observer to a thousand addresses."""

    async def go() -> list[Report]:
        async with _swarm(swarm(2, 2), unseen=["S1R1"]) as nodes:
            adverts = [report.advert for name, report in nodes.items() if name != "S1R1" and report.advert is not None]
            return await survey.by_adverts(adverts)

    assert peer(1, 1) not in [report.peer for report in asyncio.run(go())]


def test_a_node_without_a_status_is_reported_with_the_reason() -> None:
    async def go() -> dict[str, Report]:
        async with _swarm(swarm(2, 3)) as nodes:
            names = ("S0R0", "S0R1", "S1R0", "S1R1", "S1R2")
            gone, other, mute, left, elsewhere = (nodes[name].advert for name in names)
            adverts = [
                replace(gone, metrics="http://127.0.0.1:1/metrics"),
                replace(other, metrics=mute.metrics),
                replace(mute, metrics=""),
                replace(left, state="left"),
                replace(elsewhere, run_id="cd" * 32),
            ]
            return {report.peer: report for report in await survey.by_adverts(adverts)}

    found = asyncio.run(go())
    silent = [peer(0, 0), peer(0, 1), peer(1, 0), peer(1, 2)]
    assert {at: report.status for at, report in found.items()} == dict.fromkeys(silent)
    assert "Connection refused" in found[peer(0, 0)].failure
    assert "another node or run answers at" in found[peer(0, 1)].failure
    assert found[peer(1, 2)].failure.endswith("S1R2 of run abababababab")
    assert found[peer(1, 0)].failure == "it announces no metrics address that can be asked from here"
    assert found[peer(0, 0)].advert is not None


def test_slow_nodes_are_waited_for_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "TIMEOUT_S", 0.5)

    async def hang(head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5.0)

    async def go() -> tuple[list[Report], float]:
        async with _server(hang) as url:
            began = time.monotonic()
            found = await survey.by_adverts([replace(advert(0, replica), metrics=url) for replica in range(20)])
            return found, time.monotonic() - began

    found, took_s = asyncio.run(go())
    assert all("within 0.5 s" in report.failure for report in found)
    assert len(found) == 20
    assert in_time(took_s, 2.5)


def test_no_more_nodes_than_the_limit_are_asked(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """Those that are not asked were said to have announced themselves 0.0 s ago."""
    monkeypatch.setattr(survey, "NODES_LIMIT", 1)
    adverts = [replace(advert(0, replica), metrics="http://127.0.0.1:1", announced_at=-60.0) for replica in (1, 0)]
    found = asyncio.run(survey.by_adverts(adverts))
    assert len(asked) == 1
    assert [report.failure[:9] for report in found] == ["no answer", "not asked"]
    assert all(report.age_s >= 60.0 for report in found)


def test_a_url_without_a_node_is_reported() -> None:
    with pytest.raises(Unreachable, match="Connection refused: give the metrics address that a running node prints"):
        asyncio.run(survey.by_url("http://127.0.0.1:1"))

    async def go() -> None:
        async with _server(_saying(_http(b"<html>"))) as url:
            with pytest.raises(Violation, match="does not answer like a noloco node: status is not JSON"):
                await survey.by_url(url)

    asyncio.run(go())
