"""Records of a members-only run: a non-member's record is neither stored, nor counted, nor read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from members import Club, public
from test_adverts import KEYS, NOW, Raw, advert, record

from noloco_p2p.core.messages import Holding
from noloco_p2p.errors import ConfigError, Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.adverts import (
    LONGEST_TTL_S,
    MEMBERS_PAYLOAD_LIMIT_BYTES,
    PAYLOAD_LIMIT_BYTES,
    AdvertRecord,
    AdvertValidator,
    decode,
    encode,
    packed_bytes,
    packed_text,
)
from noloco_p2p.io.dht.identity import Identity, peer_id_of
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.security import certificates
from noloco_p2p.io.security.revocations import Revocations

REPLY_LIMIT_BYTES = 4 << 20
"""The largest answer that hivemind's daemon passes on."""
TTL_S = 30.0
EVE = peer_id_of(bytes(range(32)))


def raw(validator: AdvertValidator, identity: Identity, certificate: bytes, ttl_s: float = TTL_S) -> Raw:
    """A signed record of a node, with any certificate."""
    made = record(advert(peer_id=identity.peer_id, run_id="ab" * 32))
    made = AdvertRecord(made.advert, NOW, (), certificate.decode())
    plain = Raw(b"key of stage 0", packed_text(identity.peer_id), packed_bytes(encode(made)), NOW + ttl_s)
    return Raw(plain.key, plain.subkey, validator.sign_value(plain), plain.expiration_time)


def validator(club: Club, identity: Identity, *, members: bool = True) -> AdvertValidator:
    records = MemberRecords(club.trust, Revocations(club.trust)) if members else None
    return AdvertValidator(identity, club.run_id, KEYS, lambda: NOW, records)


@pytest.fixture
def club(tmp_path: Path) -> Club:
    return Club(tmp_path, now=NOW)


def identity_of(club: Club, name: str) -> Identity:
    return Identity.open(club.home / f"{name}.identity")


OUTSIDERS: dict[str, Callable[[Club, Identity, Identity], bytes]] = {
    "no certificate": lambda club, me, other: b"",
    "text that is none": lambda club, me, other: b"certificate",
    "another member's": lambda club, me, other: club.chain(other.peer_id),
    "an observer's": lambda club, me, other: club.chain(me.peer_id, "observer"),
    "one of another root": lambda club, me, other: Club(club.home, now=NOW).chain(me.peer_id),
    "one of another run": lambda club, me, other: Club(club.home, "cd" * 32, club.root, NOW).chain(me.peer_id),
    "one that its own key signed": lambda club, me, other: certificates.member_chain(
        club.issuer, me.key, club.trust, me.peer_id, "member", NOW
    ),
    "one that has expired": lambda club, me, other: club.chain(me.peer_id, now=NOW - 8 * certificates.DAY_S),
    "one that ends before the record": lambda club, me, other: club.chain(
        me.peer_id, now=NOW - 7 * certificates.DAY_S + TTL_S / 2
    ),
}


@pytest.mark.parametrize("kind", OUTSIDERS)
def test_a_non_members_record_is_not_stored(club: Club, kind: str) -> None:
    me, other = identity_of(club, "me"), identity_of(club, "other")
    mine = validator(club, me)
    assert mine.validate(raw(mine, me, club.chain(me.peer_id)))
    assert not mine.validate(raw(mine, me, OUTSIDERS[kind](club, me, other)))


def test_an_open_run_accepts_no_certificates(club: Club) -> None:
    me = identity_of(club, "me")
    mine = validator(club, me, members=False)
    assert mine.validate(raw(mine, me, b""))
    assert not mine.validate(raw(mine, me, club.chain(me.peer_id)))


def test_issuers_are_known_by_their_own_certificates(club: Club) -> None:
    me = identity_of(club, "me")
    records = MemberRecords(club.trust, Revocations(club.trust))
    place = JoinAddress("127.0.0.1", 4101, me.peer_id)
    made = AdvertRecord(advert(peer_id=me.peer_id), NOW, (str(place),), club.chain(me.peer_id).decode())
    records.read([made], {me.peer_id: place})
    assert (records.issuers, list(records.ahead)) == ({}, [])
    own = certificates.issuer_certificate(club.root, club.trust, me.peer_id, NOW)
    chain = certificates.member_chain(own, me.key, club.trust, me.peer_id, "member", NOW)
    records.read([replace(made, certificate=chain.decode())], {me.peer_id: place})
    assert records.issuers == {me.peer_id: place}


def test_a_member_cannot_have_others_dial_any_address_to_renew_or_to_ask_for_a_list(club: Club) -> None:
    me = identity_of(club, "me")
    records = MemberRecords(club.trust, Revocations(club.trust))
    own = certificates.issuer_certificate(club.root, club.trust, me.peer_id, NOW)
    chain = certificates.member_chain(own, me.key, club.trust, me.peer_id, "member", NOW).decode()
    inside = f"/ip4/10.0.0.1/tcp/22/p2p/{me.peer_id}"
    claims = AdvertRecord(advert(peer_id=me.peer_id), NOW, (inside,), chain, revoked=9)
    records.read([claims], {})
    assert (list(records.ahead), records.issuers) == ([], {})
    place = JoinAddress("8.8.8.8", 4101, me.peer_id)
    records.read([claims], {me.peer_id: place})
    assert (list(records.ahead), records.issuers) == ([place], {me.peer_id: place})


@pytest.mark.parametrize("who", ["the peer", "its issuer"])
def test_records_of_a_revoked_peer_count_as_left_and_are_later_refused(club: Club, who: str) -> None:
    gone = identity_of(club, "gone")
    named = gone.peer_id if who == "the peer" else peer_id_of(public(club.door))

    def believing(*lists: bytes) -> tuple[AdvertValidator, MemberRecords]:
        records = MemberRecords(club.trust, Revocations(club.trust))
        for one in lists:
            assert records.revoked.adopt(one)
        return AdvertValidator(gone, club.run_id, KEYS, lambda: NOW, records), records

    mine, records = believing()
    stored = raw(mine, gone, club.chain(gone.peer_id), LONGEST_TTL_S)
    shown = AdvertRecord(advert(peer_id=gone.peer_id), NOW, (), club.chain(gone.peer_id).decode())
    assert mine.validate(stored)
    assert records.read([shown], {}) == [shown]
    assert records.revoked.admitted_by == {gone.peer_id: peer_id_of(public(club.door))}
    asked = gone.peer_id, shown.certificate, NOW + TTL_S
    assert records.belongs(*asked)
    assert not records.belongs(EVE, *asked[1:])
    assert records.revoked.adopt(club.revoking(int(NOW), named))
    assert not records.belongs(*asked)
    for gone_one in (shown, replace(shown, certificate="")):
        assert [(one.advert.state, one.advert.step) for one in records.read([gone_one], {})] == [("left", 0.0)]
    # The record may have been stored earlier. If it were refused, a reader would lose the whole answer that holds it.
    assert mine.validate(stored)
    mine, records = believing(club.revoking(int(NOW) - 61, named))
    assert not mine.validate(stored)
    assert records.revoked.adopt(club.revoking(int(NOW) - 60, EVE))
    assert mine.validate(stored), "an earlier verdict is not reused after a new list"


def largest(club: Club, peer_id: str) -> bytes:
    """The largest payload that a member may send."""
    holds = tuple(Holding(1, 2**62 + i, 2**62) for i in range(8))
    made = advert(peer_id=peer_id, metrics="m" * 250, addresses=("a" * 250,), holds=holds)
    texts: tuple[str, ...] = ("b" * 200,)
    chain = club.chain(peer_id).decode()
    spare = PAYLOAD_LIMIT_BYTES - len(encode(AdvertRecord(made, NOW, texts)))
    texts = (*texts, "c" * (spare - 3))
    payload = encode(AdvertRecord(made, NOW, texts, chain))
    assert PAYLOAD_LIMIT_BYTES < len(payload) <= MEMBERS_PAYLOAD_LIMIT_BYTES
    assert len(encode(AdvertRecord(made, NOW, texts))) == PAYLOAD_LIMIT_BYTES
    assert decode(payload, run_id=club.run_id, stage=0, peer_id=peer_id).certificate == chain
    return payload


def test_a_certificate_field_cannot_carry_other_data(club: Club) -> None:
    peer_id = identity_of(club, "me").peer_id
    payload = largest(club, peer_id)
    with pytest.raises(Violation, match="at most"):
        decode(payload.replace(b'"version"', b' "version"'), run_id=club.run_id, stage=0, peer_id=peer_id)
    with pytest.raises(ConfigError, match="at most"):
        encode(AdvertRecord(advert(metrics="m" * 256, addresses=("a" * 256,) * 4, version="v" * 256), NOW, (), "x"))


def test_1024_of_the_largest_adverts_of_a_stage_can_be_read_at_once(club: Club) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.proto import dht_pb2
    from hivemind.utils import MSGPackSerializer

    me = identity_of(club, "me")
    value = bytes(64) + packed_bytes(largest(club, me.peer_id))
    held = DictionaryDHTValue()
    for number in range(1024):
        held.store(f"{number:052d}", value, NOW + TTL_S)
    found = dht_pb2.FindResult(value=MSGPackSerializer.dumps(held), expiration_time=NOW + TTL_S)
    found.nearest_node_ids.extend(DHTID.generate().to_bytes() for _ in range(20))
    assert found.ByteSize() < REPLY_LIMIT_BYTES * 3 // 4
