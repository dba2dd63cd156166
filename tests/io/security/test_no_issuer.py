"""A members-only run without any issuer: members stay, restart and serve each other until their certificates expire."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from members import Club
from test_admission import NOBODY
from test_certificates import shown_by

from noloco_p2p.errors import LocalError, PeerError
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.security import admission
from noloco_p2p.io.security.certificates import DAY_S, LIFETIME_S
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.revocations import Revocations
from noloco_p2p.launch import run_files, run_key

HOUR_S = 3600.0
AGES_S = (0.0, 1 * DAY_S, 2 * DAY_S, LIFETIME_S["member"] / 2 - HOUR_S)
"""How old the members' certificates are when the issuers go: the oldest is about to be renewed."""


@dataclass
class Clock:
    now: float

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    made = Clock(Club(tmp_path).now)
    monkeypatch.setattr(run_key, "dht_time", made)
    return made


def started(home: Path, club: Club, clock: Clock) -> Credentials:
    """The credentials of a node that starts with what its directory holds."""
    identity, revoked = Identity.open(home / "identity.key"), Revocations(club.trust, home / run_key.REVOKED)
    chain = run_key._stored(home, revoked, club.trust, identity.peer_id)
    identity.close()
    assert chain is not None, "the node would need an invitation"
    keep = home / run_key.CERTIFICATE
    return Credentials(club.trust, identity, chain, lambda one: run_files.write_whole(keep, one), clock, revoked)


def joined(home: Path, club: Club, clock: Clock) -> tuple[list[Path], list[Credentials]]:
    """Members of a run, with certificates of all ages."""
    homes = [home / f"member-{i}" for i in range(len(AGES_S))]
    for one, age_s in zip(homes, AGES_S, strict=True):
        one.mkdir()
        identity = Identity.open(one / "identity.key")
        run_files.write_whole(one / run_key.CERTIFICATE, club.chain(identity.peer_id, now=clock.now - age_s))
        identity.close()
    return homes, [started(one, club, clock) for one in homes]


def refused(members: list[Credentials]) -> list[tuple[str, str]]:
    """(server, caller) of the calls between any two members that are refused."""
    pairs = [(server, caller) for server in members for caller in members if server is not caller]
    found = []
    for server, caller in pairs:
        try:
            assert server.caller(shown_by(caller), observers=False) == caller.peer_id
        except (PeerError, AssertionError) as error:
            found.append((server.peer_id, f"{caller.peer_id}: {error}"))
    return found


def renewed(member: Credentials) -> str | None:
    """What a member says when it looks after its certificate once; none: it is not due."""
    said: list[str | None] = []

    async def look() -> None:
        keeping = asyncio.create_task(admission.keep_valid(NOBODY, member, None, list, said.append))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if keeping.done():
            keeping.result()
        keeping.cancel()

    asyncio.run(look())
    return said[0] if said else None


def test_for_24_hours_without_an_issuer_nobody_is_refused_and_all_may_restart(tmp_path: Path, clock: Clock) -> None:
    club = Club(tmp_path, now=clock.now - 4 * DAY_S)
    homes, members = joined(tmp_path, club, clock)
    said = []
    for hour in range(25):
        which = hour % len(members)
        members[which] = started(homes[which], club, clock)
        assert refused(members) == [], f"after {hour} hours"
        said.append([renewed(one) for one in members])
        clock.now += HOUR_S
    assert said[0] == [None] * len(members)
    trouble = said[24][-1]
    assert trouble is not None, "the oldest certificate is due, and its node says so"
    assert "start a node that admits members" in trouble
    assert "\n" not in trouble


def test_without_an_issuer_each_member_serves_to_the_end_of_its_certificate_and_ends_with_one_line(
    tmp_path: Path, clock: Clock
) -> None:
    club, began = Club(tmp_path, now=clock.now - 4 * DAY_S), clock.now
    _, members = joined(tmp_path, club, clock)
    for member, age_s in sorted(zip(members, AGES_S, strict=True), key=lambda one: -one[1]):
        clock.now = began + LIFETIME_S["member"] - age_s - HOUR_S
        assert not [one for one in refused(members) if one[1].startswith(member.peer_id)]
        renewed(member)
        clock.now += 2 * HOUR_S
        with pytest.raises(LocalError, match=r"^this node's certificate has expired .*noloco invite\)$") as ended:
            renewed(member)
        assert "\n" not in str(ended.value)
        assert len([one for one in refused(members) if one[1].startswith(member.peer_id)]) == len(members) - 1
