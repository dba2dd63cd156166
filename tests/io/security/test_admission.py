"""Invitations, the peers that use them, and certificates that are renewed before they expire."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from daemons import daemon
from daemons import run as run_daemons
from members import HOUR_S, RUN, Club
from soak import soak

from noloco_p2p.config import RunManifest, SecuritySettings
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, Declined, LocalError, Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import Identity, peer_id_of
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.durable_files import write_whole
from noloco_p2p.io.security import admission, certificates, invitations, revocations
from noloco_p2p.io.security.admission import Issuer
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.invitations import Invitation, UseBook
from noloco_p2p.io.security.revocations import Revocations
from noloco_p2p.launch import run_files, run_key

ANN, BOB, EVE = (peer_id_of(bytes([i]) * 32) for i in (1, 2, 3))
NOBODY = cast(Libp2pDaemon, None)
"""In place of the daemon of a node that makes no calls."""


def invitation(club: Club, **changes: Any) -> Invitation:
    fields: dict[str, Any] = {"uses": 2, "until": club.now + HOUR_S, "stage": None} | changes
    return Invitation.signed(club.root, club.run_id, **fields)


def issuer(club: Club, clock: Callable[[], float] | None = None) -> Issuer:
    identity = Identity.open(club.home / "issuer.key")
    certificate = certificates.issuer_certificate(club.root, club.trust, identity.peer_id, club.now)
    book, revoked = UseBook(club.home / "book"), Revocations(club.trust)
    return Issuer(club.trust, identity, certificate, book, clock or (lambda: club.now), revoked)


def asked(**what: str) -> bytes:
    return json.dumps(what).encode()


@pytest.mark.parametrize("stage", [None, 0, 7])
def test_an_invitation_survives_its_text_form(tmp_path: Path, stage: int | None) -> None:
    club = Club(tmp_path)
    made = invitation(club, stage=stage)
    assert Invitation.parse(made.text) == made
    assert made.text.isalnum()
    assert len(made.text) < 140
    made.check(club.trust, club.now)


def test_a_mistyped_invitation_is_reported_as_such(tmp_path: Path) -> None:
    text = invitation(Club(tmp_path)).text
    for wrong in ("", text[:-2], text + "11", "0" + text[1:], "é"):
        with pytest.raises(ConfigError, match="mistyped or cut off"):
            Invitation.parse(wrong)
    changed = text[:40] + ("2" if text[40] != "2" else "3") + text[41:]
    club = Club(tmp_path)
    with pytest.raises(Declined, match="ask for another one"):
        Invitation.parse(changed).check(club.trust, club.now)


def test_a_refused_peer_receives_the_reason_in_one_line(tmp_path: Path) -> None:
    club = Club(tmp_path)
    mine = issuer(club)
    cases = {
        "expired": invitation(club, until=club.now - 1),
        "another run": Invitation.signed(club.root, "cd" * 32, uses=2, until=club.now + 9, stage=None),
        "not made by this run's root": Invitation.signed(
            Ed25519PrivateKey.generate(), RUN, uses=2, until=club.now + 9, stage=None
        ),
    }
    for why, one in cases.items():
        for role in ("member", "observer"):
            with pytest.raises(Declined, match=why) as caught:
                mine.answer(ANN, asked(invitation=one.text, role=role))
            assert "noloco invite" in str(caught.value)
            assert len(str(caught.value).splitlines()) == 1
    long = asked(invitation=invitation(club).text, role="observer", more="x" * 4096)
    nonsense = b"", b"[]", b"[" * 4096, b"{}", b'{"invitation": 1}', long
    fields = "invitation", "certificate"
    for request in (*nonsense, *(asked(**{name: text}) for name in fields for text in ("x", "\ud800"))):
        with pytest.raises(Violation):
            mine.answer(ANN, request)


def test_uses_are_counted_per_peer_and_across_restarts(tmp_path: Path) -> None:
    club = Club(tmp_path)
    request = asked(invitation=invitation(club).text, role="member")
    book = club.home / "book"
    first = issuer(club)
    assert club.trust.membership(first.answer(ANN, request)).peer_id == ANN
    first.identity.close()
    again = issuer(club)
    for peer in (ANN, BOB, ANN, BOB):
        assert club.trust.membership(again.answer(peer, request)).role == "member"
    with pytest.raises(Declined, match=r"used up \(2 of 2\).*noloco invite"):
        again.answer(EVE, request)
    [(until, peers)] = json.loads(book.read_bytes()).values()
    assert (peers, until) == ([ANN, BOB], int(club.now + HOUR_S))


def test_a_use_is_on_disk_before_its_certificate_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    club = Club(tmp_path)
    mine, request = issuer(club), asked(invitation=invitation(club, uses=1).text, role="member")
    written: list[bytes] = []

    def issue(self: Issuer, peer: str, role: str) -> bytes:
        written.append((club.home / "book").read_bytes())
        return b""

    monkeypatch.setattr(Issuer, "issue", issue)
    mine.answer(ANN, request)
    assert ANN.encode() in written[0]
    served: list[Callable[[PeerId, bytes], Awaitable[bytes]]] = []

    async def serve(name: str, answer: Callable[[PeerId, bytes], Awaitable[bytes]]) -> None:
        served.append(answer)

    asyncio.run(admission.serve(cast(Libp2pDaemon, SimpleNamespace(serve=serve)), mine))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(invitations, "write_whole", full)
    other = asked(invitation=invitation(club).text, role="member")
    with pytest.raises(LocalError, match="No space left"):
        mine.answer(BOB, other)
    with pytest.raises(Declined, match="cannot record which peers it admits"):
        asyncio.run(cast(Any, served[0](BOB, other)))
    assert len(written) == 1, "no certificate without a recorded use"


def test_an_unreadable_book_of_uses_is_not_replaced(tmp_path: Path) -> None:
    for broken in (b"", b"[1]", b'{"a": 1}', b'{"a": [Infinity, []]}'):
        (tmp_path / "book").write_bytes(broken)
        with pytest.raises(LocalError, match="book of invitations"):
            UseBook(tmp_path / "book")


def test_observers_do_not_use_up_an_invitation(tmp_path: Path) -> None:
    club = Club(tmp_path)
    mine, request = issuer(club), asked(invitation=invitation(club, uses=1).text, role="observer")
    assert {club.trust.membership(mine.answer(peer, request)).role for peer in (ANN, BOB, EVE)} == {"observer"}
    assert not (club.home / "book").exists()


def test_two_peers_cannot_share_the_last_use_of_an_invitation_if_one_of_them_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    club, answers = Club(tmp_path), list[Callable[[PeerId, bytes], Awaitable[bytes]]]()
    request = asked(invitation=invitation(club, uses=1).text, role="member")
    writing, written = threading.Event(), threading.Event()

    def slowly(*file: Any) -> None:
        writing.set()
        written.wait()
        write_whole(*file)

    async def serve(name: str, answer: Callable[[PeerId, bytes], Awaitable[bytes]]) -> None:
        answers.append(answer)

    async def scenario() -> None:
        await admission.serve(cast(Libp2pDaemon, SimpleNamespace(serve=serve)), issuer(club))
        [answer] = answers
        first = asyncio.ensure_future(answer(ANN, request))
        await asyncio.to_thread(writing.wait)
        first.cancel()
        asyncio.get_running_loop().call_later(0.1, written.set)
        with pytest.raises(Declined, match="used up"):
            await answer(BOB, request)
        assert await answer(ANN, request)

    monkeypatch.setattr(invitations, "write_whole", slowly)
    asyncio.run(scenario())


def test_another_invitation_does_not_make_an_issuer_forget_who_used_the_first(tmp_path: Path) -> None:
    club = Club(tmp_path)
    mine, one = issuer(club), asked(invitation=invitation(club, uses=1).text, role="member")
    for peer, request in ((ANN, one), (BOB, asked(invitation=invitation(club).text, role="member"))):
        mine.answer(peer, request)
    with pytest.raises(Declined, match="used up"):
        mine.answer(EVE, one)


def test_an_issuer_whose_clock_was_ahead_still_knows_who_used_an_invitation(tmp_path: Path) -> None:
    club, ahead = Club(tmp_path), [0.0]
    mine = issuer(club, lambda: club.now + ahead[0])
    one, lasting = invitation(club, uses=1), invitation(club, until=club.now + 9 * certificates.DAY_S)
    mine.answer(ANN, asked(invitation=one.text, role="member"))
    ahead[0] = certificates.LIFETIME_S["member"]
    mine.answer(BOB, asked(invitation=lasting.text, role="member"))
    ahead[0] = 0.0
    with pytest.raises(Declined, match="used up"):
        mine.answer(EVE, asked(invitation=one.text, role="member"))


def test_long_expired_invitations_are_dropped_from_the_book(tmp_path: Path) -> None:
    club, later = Club(tmp_path), [0.0]
    mine = issuer(club, lambda: club.now + later[0])
    for hours in (1.0, 200.0):
        later[0] = (hours - 1) * HOUR_S
        one = invitation(club, until=club.now + hours * HOUR_S)
        mine.answer(ANN, asked(invitation=one.text, role="member"))
    assert len(json.loads((club.home / "book").read_bytes())) == 1


def test_a_valid_certificate_is_renewed_for_its_own_peer_only(tmp_path: Path) -> None:
    club, later = Club(tmp_path), [3 * certificates.DAY_S]
    mine = issuer(club, lambda: club.now + later[0])
    held = club.chain(ANN).decode()
    renewed = club.trust.membership(mine.answer(ANN, asked(certificate=held)))
    assert renewed.until == pytest.approx(club.now + 10 * certificates.DAY_S, abs=1)
    with pytest.raises(Declined, match="not the caller's"):
        mine.answer(BOB, asked(certificate=held))
    with pytest.raises(Declined, match="not the caller's"):
        mine.answer(ANN, asked(certificate=club.chain(ANN, "observer", now=club.now + later[0]).decode()))
    later[0] = 7 * certificates.DAY_S + 1
    with pytest.raises(Declined, match="expired"):
        mine.answer(ANN, asked(certificate=held))


def test_a_certificate_expires_no_later_than_its_issuers(tmp_path: Path) -> None:
    club = Club(tmp_path)
    mine = issuer(club, lambda: club.now + certificates.ISSUER_S - HOUR_S)
    assert club.trust.membership(mine.issue(ANN, "member")).until == pytest.approx(
        club.now + certificates.ISSUER_S, abs=1
    )


def test_over_libp2p_a_member_renews_and_a_newcomer_is_admitted(tmp_path: Path) -> None:
    async def test() -> None:
        club = Club(tmp_path)
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "c") as c:
            certificate = certificates.issuer_certificate(club.root, club.trust, a.peer_id, club.now)
            book = UseBook(tmp_path / "book")
            mine = Issuer(club.trust, a.identity, certificate, book, time.time, Revocations(club.trust))
            await admission.serve(a, mine)
            await admission.serve(c, None)
            token, expired = (invitation(club, until=club.now + later_s).text for later_s in (HOUR_S, -1))
            useless = [f"{c.join_addresses[0]}/invite/{text}" for text in ("mistyped", expired)]
            async with daemon(tmp_path / "b", join=[*useless, f"{a.join_addresses[0]}/invite/{token}"]) as b:
                assert token not in str(b.joined[-1])
                found = club.trust.membership(await admission.invited(b, club.trust, "member", time.time()))
                assert (found.peer_id, found.role, found.issuer) == (b.peer_id, "member", a.peer_id)
                before = Club(tmp_path, club.run_id, club.root, club.now - 4 * certificates.DAY_S)
                old = before.chain(b.peer_id)
                mine = certificates_of(club, b.identity, old)
                issuers = [JoinAddress.parse(one.join_addresses[0]) for one in (c, a)]
                said: list[str | None] = []
                keeping = asyncio.create_task(admission.keep_valid(b, mine, None, lambda: issuers, said.append))
                async with asyncio.timeout(20):
                    while not said and not keeping.done():  # noqa: ASYNC110  the answer comes from another process
                        await asyncio.sleep(0.05)
                if keeping.done():
                    keeping.result()
                keeping.cancel()
                assert said == [None]
                assert mine.membership.issuer == a.peer_id
                assert mine.membership.until > club.now + 6 * certificates.DAY_S
            async with daemon(tmp_path / "b", join=[a.join_addresses[0]]) as bare:
                with pytest.raises(ConfigError, match=r"joined with an invitation.*noloco invite"):
                    await admission.invited(bare, club.trust, "member", time.time())
            async with daemon(tmp_path / "b", join=[f"{c.join_addresses[0]}/invite/{token}"]) as wrong:
                with pytest.raises(Declined, match="this node admits nobody"):
                    await admission.invited(wrong, club.trust, "member", time.time())

    run_daemons(test)


@pytest.mark.parametrize("first", ["says nonsense", *soak(["ends soon"])])
def test_if_an_issuer_cannot_renew_for_longer_the_next_one_is_asked(tmp_path: Path, first: str) -> None:
    async def nonsense(caller: PeerId, request: bytes) -> bytes:
        return b"no certificate"

    async def test() -> None:
        club, book = Club(tmp_path), UseBook(tmp_path / "book")
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
        async with daemon(tmp_path / "a") as a, daemon(tmp_path / "c") as c, daemon(tmp_path / "b") as b:
            for each, age_s in ((a, certificates.ISSUER_S - HOUR_S), (c, 0.0)):
                own = certificates.issuer_certificate(club.root, club.trust, each.peer_id, club.now - age_s)
                issues = Issuer(club.trust, each.identity, own, book, time.time, Revocations(club.trust))
                if each is a and first == "says nonsense":
                    await a.serve(admission.CERTIFICATE_CALL, nonsense)
                else:
                    await admission.serve(each, issues)
            before = Club(tmp_path, club.run_id, club.root, club.now - 4 * certificates.DAY_S)
            mine = certificates_of(club, b.identity, before.chain(b.peer_id))
            issuers = [JoinAddress.parse(one.join_addresses[0]) for one in (a, c)]
            said: asyncio.Queue[str | None] = asyncio.Queue()
            keeping = asyncio.create_task(admission.keep_valid(b, mine, None, lambda: issuers, said.put_nowait))
            assert await said.get() is None
            keeping.cancel()
            assert mine.membership.issuer == c.peer_id
            assert mine.membership.until > club.now + 6 * certificates.DAY_S

    run_daemons(test)


def test_an_issuer_warns_of_the_end_of_its_own_certificate_and_stops_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    club, later = Club(tmp_path), [certificates.ISSUER_S - certificates.DAY_S]
    mine = issuer(club, lambda: club.now + later[0])
    start = club.now + later[0] - 6 * certificates.DAY_S
    credentials = club.credentials("mine", clock=lambda: club.now + later[0], now=start)
    said: list[str | None] = []
    monkeypatch.setattr(admission, "LOOK_S", 0.0)

    def hear(message: str | None) -> None:
        said.append(message)
        later[0] += certificates.DAY_S / 2

    with pytest.raises(LocalError, match=r"has expired .*noloco invite"):
        asyncio.run(asyncio.wait_for(admission.keep_valid(NOBODY, credentials, mine, list, hear), 20))
    assert len(said) == 2
    assert all("restart it with --key" in str(message) for message in said)


def test_an_issuer_whose_own_certificate_has_long_expired_admits_nobody_and_is_renewed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with `ValueError: the not valid after date must be after the not valid before date`."""
    club, answers = Club(tmp_path), list[Callable[[PeerId, bytes], Awaitable[bytes]]]()
    for late_s in (1.0, 2 * HOUR_S):
        now = club.now + certificates.ISSUER_S + late_s
        mine = issuer(club, lambda now=now: now)  # type: ignore[misc]
        credentials = club.credentials(f"{late_s}", clock=mine.clock, now=now - certificates.DAY_S)
        with pytest.raises(Declined, match="restart it with --key"):
            asyncio.run(admission._renewed(NOBODY, credentials, mine, []))

        async def serve(name: str, answer: Callable[[PeerId, bytes], Awaitable[bytes]]) -> None:
            answers.append(answer)

        asyncio.run(admission.serve(cast(Libp2pDaemon, SimpleNamespace(serve=serve)), mine))
        request = asked(invitation=invitation(club, until=now + HOUR_S).text, role="member")
        with pytest.raises(Declined, match="this node admits nobody"):
            asyncio.run(answers[-1](ANN, request))  # type: ignore[arg-type]
        run_files.write_whole(tmp_path / run_key.ISSUER, mine.certificate)
        monkeypatch.setattr(run_key, "dht_time", mine.clock)
        assert run_key._issuer(tmp_path, club.trust, mine.identity, mine.revoked) is None
        mine.identity.close()


def certificates_of(club: Club, identity: Identity, chain: bytes) -> Any:
    from noloco_p2p.io.security.credentials import Credentials

    return Credentials(club.trust, identity, chain)


def test_an_issuer_renews_its_membership_at_half_of_its_lifetime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    club, later = Club(tmp_path), [0.0]
    mine = issuer(club, lambda: club.now + later[0])
    credentials = club.credentials("mine", clock=lambda: club.now + later[0])
    before = credentials.chain
    assert credentials.renewal_at == pytest.approx(club.now + 3.5 * certificates.DAY_S, abs=HOUR_S)
    later[0] = credentials.renewal_at - club.now - HOUR_S
    said: list[str | None] = []
    monkeypatch.setattr(admission, "LOOK_S", 0.0)

    async def keep() -> None:
        keeping = asyncio.create_task(admission.keep_valid(NOBODY, credentials, mine, list, said.append))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (said, credentials.chain) == ([], before), "no sooner"
        later[0] += HOUR_S + 1  # the machine slept: the loop's own clock stood still
        while not said:  # noqa: ASYNC110  a task of its own
            await asyncio.sleep(0)
        keeping.cancel()

    asyncio.run(asyncio.wait_for(keep(), 20))
    assert said == [None]
    assert credentials.chain != before


def test_a_certificate_from_a_fast_clock_is_replaced_once_the_clock_is_right(tmp_path: Path) -> None:
    """Until the certificate becomes valid, every peer would refuse its calls."""
    club, ahead = Club(tmp_path), [30 * certificates.DAY_S]
    mine = issuer(club, lambda: club.now + ahead[0])
    credentials = club.credentials("mine", clock=lambda: club.now + ahead[0])
    said: list[str | None] = []

    async def keep(renewals: int) -> None:
        keeping = asyncio.create_task(admission.keep_valid(NOBODY, credentials, mine, list, said.append))
        while len(said) < renewals:  # noqa: ASYNC110  a task of its own
            await asyncio.sleep(0)
        keeping.cancel()

    asyncio.run(asyncio.wait_for(keep(1), 20))
    assert credentials.membership.begins > club.now + certificates.DAY_S
    ahead[0] = 0.0
    asyncio.run(asyncio.wait_for(keep(2), 20))
    assert said == [None, None]
    assert credentials.membership.begins <= club.now < credentials.renewal_at
    assert credentials.leaf()[1].endswith(credentials.chain)


def test_an_invited_node_does_not_start_with_a_certificate_from_a_fast_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could connect to it until that certificate became valid, and it named its own ports as the reason."""
    root = Ed25519PrivateKey.generate()
    manifest = RunManifest(security=SecuritySettings(root_key=run_key.public_half(root)))
    club = Club(tmp_path, manifest.run_id, root)
    monkeypatch.setattr(run_key, "dht_time", lambda: club.now)
    identity = Identity.open(tmp_path / "identity.key")
    early = club.chain(identity.peer_id, now=club.now + certificates.DAY_S)

    async def call(*_: object) -> bytes:
        return club.chain(identity.peer_id)

    def started(invited: str) -> float:
        (tmp_path / run_key.CERTIFICATE).write_bytes(early)
        joined = [JoinAddress("127.0.0.1", 1, ANN, invited)]
        libp2p = SimpleNamespace(joined=joined, call=call, peer_id=identity.peer_id)
        monkeypatch.setattr(revocations, "ask", AsyncMock())
        coming = run_key.of_node(tmp_path, identity, None, manifest, cast(Libp2pDaemon, libp2p))
        credentials = asyncio.run(coming).credentials
        assert credentials is not None
        return credentials.membership.begins

    assert started(invitation(club).text) < club.now
    assert started("") > club.now, "an issuer may still renew it"


def test_a_node_that_nobody_admits_any_more_is_told_to_get_an_invitation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate expired while it was off, or its issuer was revoked; it was told to start a run with a key."""
    root = Ed25519PrivateKey.generate()
    manifest = RunManifest(security=SecuritySettings(root_key=run_key.public_half(root)))
    club, identity = Club(tmp_path, manifest.run_id, root), Identity.open(tmp_path / "identity.key")
    monkeypatch.setattr(run_key, "dht_time", lambda: club.now + certificates.LIFETIME_S["member"])
    monkeypatch.setattr(revocations, "ask", AsyncMock())
    (tmp_path / run_key.CERTIFICATE).write_bytes(club.chain(identity.peer_id))
    libp2p = cast(Libp2pDaemon, SimpleNamespace(joined=[], peer_id=identity.peer_id))
    with pytest.raises(ConfigError, match=r"^this run is members-only.*ask a member who can make one"):
        asyncio.run(run_key.of_node(tmp_path, identity, None, manifest, libp2p))


@pytest.mark.parametrize("why", ["", "for an observer", "for another peer", "of another run", "expired", "revoked"])
def test_a_node_continues_only_with_a_certificate_that_admits_it(tmp_path: Path, why: str) -> None:
    """With that of an observer, which a node kept until it had expired, all others refused its adverts."""
    club, elsewhere = Club(tmp_path), Club(tmp_path)
    chain = {
        "for an observer": club.chain(EVE, "observer"),
        "for another peer": club.chain(ANN),
        "of another run": elsewhere.chain(EVE),
        "expired": club.chain(EVE, now=club.now - certificates.LIFETIME_S["member"] - 1),
    }.get(why, club.chain(EVE))
    revoked = Revocations(club.trust)
    if why == "revoked":
        revoked.adopt(club.revoking(1, club.trust.membership(chain).issuer))
    assert run_key._stored(tmp_path, revoked, club.trust, EVE) is None
    (tmp_path / run_key.CERTIFICATE).write_bytes(chain)
    assert run_key._stored(tmp_path, revoked, club.trust, EVE) == (None if why else chain)


@pytest.mark.parametrize("why", ["for an observer", "for another peer", "of another run"])
def test_an_issuer_that_gives_a_newcomer_a_useless_certificate_is_passed_over(tmp_path: Path, why: str) -> None:
    """The node kept the certificate of an observer, and all others refused its adverts, after each of its restarts."""
    club, elsewhere = Club(tmp_path), Club(tmp_path)
    token = invitation(club).text
    libp2p = SimpleNamespace(peer_id=EVE, joined=[JoinAddress("127.0.0.1", 1, peer, token) for peer in (ANN, BOB)])
    useless = {
        "for an observer": club.chain(EVE, "observer"),
        "for another peer": club.chain(ANN),
        "of another run": elsewhere.chain(EVE),
    }[why]

    async def call(issuer: PeerId, *_: object) -> bytes:
        return useless if issuer == ANN else club.chain(EVE)

    libp2p.call = call
    made = asyncio.run(admission.invited(cast(Libp2pDaemon, libp2p), club.trust, "member", club.now))
    assert club.trust.membership(made) == club.trust.membership(club.chain(EVE))
    libp2p.joined.pop()
    with pytest.raises(Violation, match="another peer or role" if why.startswith("for") else "not issued for this run"):
        asyncio.run(admission.invited(cast(Libp2pDaemon, libp2p), club.trust, "member", club.now))


def test_a_certificate_from_an_issuer_with_a_fast_clock_is_not_adopted(tmp_path: Path) -> None:
    club = Club(tmp_path)
    credentials = club.credentials("mine", clock=lambda: club.now)
    assert not credentials.is_renewed_by(club.chain(credentials.peer_id, now=club.now + 2 * HOUR_S))
    assert credentials.is_renewed_by(club.chain(credentials.peer_id, now=club.now + HOUR_S / 2))


def test_without_an_issuer_a_member_stays_to_the_end_of_its_certificate_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    club, later = Club(tmp_path), [4 * certificates.DAY_S]
    credentials = club.credentials("mine", clock=lambda: club.now + later[0])
    said: list[str | None] = []
    monkeypatch.setattr(admission, "LOOK_S", 0.0)

    def hear(message: str | None) -> None:
        said.append(message)
        later[0] += certificates.DAY_S

    with pytest.raises(LocalError, match=r"has expired .*noloco invite"):
        asyncio.run(asyncio.wait_for(admission.keep_valid(NOBODY, credentials, None, list, hear), 20))
    assert len(said) == 3, "on days 4, 5 and 6"
    assert all(message is not None and "start a node that admits" in message for message in said)


def test_an_issuer_at_a_useless_address_does_not_end_the_renewals(tmp_path: Path) -> None:
    club, said = Club(tmp_path), asyncio.Queue[str | None]()
    credentials = club.credentials("mine", clock=lambda: club.now + 4 * certificates.DAY_S)

    async def dial(address: JoinAddress, what: str) -> None:
        raise ConfigError("no such host")

    async def scenario() -> None:
        libp2p, address = cast(Libp2pDaemon, SimpleNamespace(dial=dial)), cast(JoinAddress, None)
        keeping = asyncio.create_task(
            admission.keep_valid(libp2p, credentials, None, lambda: [address], said.put_nowait)
        )
        heard = asyncio.create_task(said.get())
        await asyncio.wait([keeping, heard], return_when=asyncio.FIRST_COMPLETED)
        assert heard.done(), keeping.exception()
        assert "(no such host)" in str(heard.result())
        keeping.cancel()

    asyncio.run(scenario())


def test_a_renewed_certificate_is_used_though_the_disk_is_full_and_kept_once_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LOOK_S", 0.0)
    club, later, kept, said = Club(tmp_path), [0.0], list[bytes](), list[str | None]()
    full = [False]

    def keep(chain: bytes) -> None:
        if full[0]:
            raise LocalError("no space left")
        kept.append(chain)

    def hear(message: str | None) -> None:
        said.append(message)
        later[0] = 8 * certificates.DAY_S  # The old certificate has expired, and the issuer knows nobody any more.
        full[0] = len(said) < 3
        if message is None:
            raise asyncio.CancelledError

    mine = issuer(club)
    credentials = Credentials(
        club.trust, mine.identity, club.chain(mine.identity.peer_id), keep, lambda: club.now + later[0]
    )
    later[0], full[0] = 4 * certificates.DAY_S, True
    early = replace(mine, clock=credentials.clock)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(admission.keep_valid(NOBODY, credentials, early, list, hear), 20))
    trouble = "this node's certificate could not be renewed: no space left"
    assert said == [trouble, trouble, trouble, None]
    assert kept[1] == credentials.chain
    assert credentials.membership.until > club.now + 10 * certificates.DAY_S


@pytest.mark.parametrize("what", ["disk is full", "daemon has died"])
def test_a_member_retries_the_renewal_if_its(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(admission, "LOOK_S", 0.0)
    kept: list[bytes] = []
    reason = "no space left" if what == "disk is full" else "p2pd"

    def keep(chain: bytes) -> None:
        kept.append(chain)
        if len(kept) == 2 and what == "disk is full":
            raise LocalError(reason)

    async def test() -> None:
        club = Club(tmp_path)
        async with daemon(tmp_path) as a, daemon(tmp_path / "b", join=a.join_addresses) as b:
            old = Club(tmp_path, club.run_id, club.root, club.now - 4 * certificates.DAY_S).chain(b.peer_id)
            credentials = Credentials(club.trust, b.identity, old, keep)
            mine = issuer(club) if what == "disk is full" else None
            said = asyncio.Queue[str | None]()
            if what == "daemon has died":
                os.kill(b.p2p._child.pid, signal.SIGKILL)
                await asyncio.wait([b.failed])
            keeping = asyncio.create_task(
                admission.keep_valid(b, credentials, mine, lambda: [*b.joined], said.put_nowait)
            )
            first = asyncio.ensure_future(asyncio.gather(said.get(), said.get()))
            both: list[asyncio.Future[Any]] = [keeping, first]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            assert not keeping.done(), keeping.exception()
            trouble, then = await first
            assert trouble is not None
            assert re.match(f"this node's certificate could not be renewed: .*{reason}", trouble)
            assert then == (None if what == "disk is full" else trouble)
            keeping.cancel()

    run_daemons(test)
