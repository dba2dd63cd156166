"""The signed form of adverts in the DHT, and the checks that every node makes before it stores or believes one.

A record is a 64-byte signature followed by the payload, a JSON object as one msgpack byte string. Peer id, run id and
stage are not in the payload: the subkey *is* the peer id, and the key is the hash of run and stage. The signature
covers key, subkey, expiration and payload, so a record can neither be moved to another stage, run or peer, nor be kept
alive beyond the time that its signer gave it. All times are DHT time: seconds since 1970. No pickle anywhere.
"""

import contextlib
import hashlib
import json
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from noloco_p2p.core.members import STATES
from noloco_p2p.core.messages import Advert, Holding, PeerId
from noloco_p2p.core.recent import Recent
from noloco_p2p.errors import ConfigError, Violation
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.identity import SIGNATURE_BYTES, Identity, public_key_of, verify
from noloco_p2p.io.dht.member_records import MemberRecords
from noloco_p2p.io.security.certificates import CHAIN_LIMIT_BYTES

if TYPE_CHECKING:
    from hivemind.dht.validation import DHTRecord

PAYLOAD_LIMIT_BYTES = 1536
"""A larger payload is neither sent nor accepted: 1 KiB for everything but `holds`, which takes less than 0.5 KiB."""
MEMBERS_PAYLOAD_LIMIT_BYTES = PAYLOAD_LIMIT_BYTES + 1280
"""The same for a payload with a member's certificate, which takes up the difference."""
LONGEST_TTL_S = 300.0
"""Longest lifetime of a record, seconds, so that strangers cannot fill the DHT forever. It is one and a half times the
largest `directory.ttl_s`, because the clocks of two peers may differ by half of an advert's lifetime."""
ADVERTS_PER_STAGE_LIMIT = 2048
"""Most adverts of one stage that a reading takes in. The rest is skipped: new peers before known ones, and among them
those with the largest ids."""
ADDRESSES_LIMIT = 4
"""Most addresses of one kind in one advert."""
HOLDS_LIMIT = 8
"""Most weights that one advert lists; a node that has more lists the last ones."""
_CONTEXT = b"noloco advert 1\x00"
"""Prefix of everything signed here, so that a signature made for one purpose is worthless for another."""
_CHECKED_LIMIT = 16_384
"""How many results of checks are remembered, because every reading brings the same records again. They are remembered
by digest, because records are large, and most of those remembered have expired."""

packed_bytes: Callable[[bytes], bytes] = msgpack.packb
packed_text: Callable[[str], bytes] = msgpack.packb
"""The shortest forms in which hivemind stores a value and a subkey."""

Text = Annotated[str, Field(max_length=256, pattern="^[ -~]*$")]
Texts = Annotated[tuple[Text, ...], Field(max_length=ADDRESSES_LIMIT)]
Number = Annotated[float, Field(ge=0, lt=2**63, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class AdvertPayload(BaseModel):
    """The payload of a record: fields of `Advert`, when it was made, and where the signer's libp2p daemon is.

    Fields without a default must be present. A later version may add fields with one; unknown fields are ignored. A
    field that has its default is not sent, for versions that do not know it.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    addresses: Texts
    metrics: Text
    libp2p_metrics: Text = ""
    state: Text
    step: Number
    outer_round: Count
    fresh_round: Count = 0
    microbatches_per_s: Number
    capacity_per_s: Number
    steps_per_s: Number
    evaluated: bool
    settled: bool
    stays: bool = False
    partner_from_round: Count
    moving_to: Count | None
    unserved: bool = False
    holds: Annotated[tuple[tuple[Count, Count, Count], ...], Field(max_length=HOLDS_LIMIT)]
    """Stage, round and step of each set of weights."""
    holds_fresh: Annotated[tuple[Count, ...], Field(max_length=HOLDS_LIMIT)] = ()
    """The lineage of each; empty if all are 0."""
    version: Text
    announced_at: Number
    libp2p: Texts
    certificate: Annotated[str, Field(max_length=CHAIN_LIMIT_BYTES, pattern="^[ -~\\n]*$")] = ""
    """The signer's certificate and its issuer's, PEM; empty in open runs."""
    revoked: Count = 0
    """The number of the signer's list of revoked peers; 0 if it has none."""


_NOT_OF_THE_ADVERT = {"holds_fresh", "announced_at", "libp2p", "certificate", "revoked"}
"""Fields of the payload that do not come from the field of `Advert` with the same name."""


@dataclass(frozen=True, slots=True)
class AdvertRecord:
    """An advert, with the data that only the directory needs."""

    advert: Advert
    announced_at: float
    """DHT time at which the signer made it."""
    libp2p: tuple[str, ...]
    """Where the signer's libp2p daemon is: `/ip4/…/tcp/…/p2p/<peer id>`."""
    certificate: str = ""
    """The signer's certificate and its issuer's, PEM; empty in an open run."""
    revoked: int = 0
    """The number of the signer's list of revoked peers; 0 if it has none."""


def stage_key(run_id: str, stage: int) -> str:
    """The DHT key of a stage's adverts."""
    return f"noloco/{run_id}/stage/{stage}"


def encode(record: AdvertRecord) -> bytes:
    """The payload of a record, without the fields that have their default. Raises ConfigError if the advert is larger
    than others would accept."""
    own = {name: getattr(record.advert, name) for name in AdvertPayload.model_fields.keys() - _NOT_OF_THE_ADVERT}
    holds = tuple(held[:3] for held in record.advert.holds[-HOLDS_LIMIT:])
    lineages = tuple(held.fresh_round for held in record.advert.holds[-HOLDS_LIMIT:])
    apart = {name: getattr(record, name) for name in _NOT_OF_THE_ADVERT if name != "holds_fresh"}
    fields = own | apart | {"holds": holds, "holds_fresh": lineages if any(lineages) else ()}
    payload = AdvertPayload.model_construct(**fields).model_dump_json(exclude_defaults=True).encode()
    if (nbytes := _own_bytes(payload, record.certificate)) > PAYLOAD_LIMIT_BYTES:
        raise ConfigError(
            f"the advert has {nbytes} bytes; at most {PAYLOAD_LIMIT_BYTES} are accepted: shorten listen.announce_host"
        )
    return payload


def decode(payload: bytes, *, run_id: str, stage: int, peer_id: PeerId, stages: int | None = None) -> AdvertRecord:
    """The record of a payload found under this run, stage and peer id. Raises Violation that says what is wrong.

    `stages` is the number of stages in the run; the record may not name any others.
    """
    try:
        sent = AdvertPayload.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = first["loc"][0] if first["loc"] else "payload"
        raise Violation(f"advert whose {field} is malformed: {first['msg']}") from error
    if _own_bytes(payload, sent.certificate) > PAYLOAD_LIMIT_BYTES:
        raise Violation(f"advert of {len(payload)} bytes; at most {PAYLOAD_LIMIT_BYTES} are accepted")
    if sent.state not in STATES or sent.fresh_round > sent.outer_round:
        raise Violation("advert with an unknown state, or with weights that began after its newest round")
    lineages = sent.holds_fresh or (0,) * len(sent.holds)
    holds = tuple(Holding(*held, fresh_round) for held, fresh_round in zip(sent.holds, lineages, strict=False))
    if len(lineages) != len(sent.holds) or any(held.age < 0 for held in holds):
        raise Violation("advert that lists weights without their lineage, or weights that began after their round")
    most = max(sent.moving_to or 0, *(holding.stage for holding in holds), 0)
    if stages is not None and most >= stages:
        raise Violation(f"advert that names stage {most} of a run with {stages} stages")
    fields = sent.model_dump(exclude={"holds", *_NOT_OF_THE_ADVERT})
    advert = Advert(peer_id=peer_id, run_id=run_id, stage=stage, holds=holds, **fields)
    return AdvertRecord(advert, sent.announced_at, sent.libp2p, sent.certificate, sent.revoked)


def _own_bytes(payload: bytes, certificate: str) -> int:
    """The size of a payload without the certificate in it, bytes."""
    return len(payload) - (len(f',"certificate":{json.dumps(certificate)}') if certificate else 0)


def living_records(
    subkeys: Mapping[object, Any], run_id: str, stage: int, now: float, seen: Set[PeerId] = frozenset()
) -> Iterator[AdvertRecord]:
    """The valid records of one stage that have not expired. `now` is DHT time; peers in `seen` keep their places.

    Signatures were checked when the records arrived; this parses the records and drops those that have expired.
    """
    peers = sorted((subkey for subkey in subkeys if isinstance(subkey, str)), key=lambda peer: (peer not in seen, peer))
    for peer_id in peers[:ADVERTS_PER_STAGE_LIMIT]:
        payload, expires = subkeys[peer_id]
        if expires <= now or not isinstance(payload, bytes):
            continue
        with contextlib.suppress(Violation):
            yield decode(payload, run_id=run_id, stage=stage, peer_id=peer_id)


def newest_of_each(records: Iterable[AdvertRecord]) -> list[AdvertRecord]:
    """One record per peer, the one announced last, because its stage says where the peer is now; sorted by peer id."""
    newest = {record.advert.peer_id: record for record in sorted(records, key=lambda record: record.announced_at)}
    return [newest[peer_id] for peer_id in sorted(newest)]


def libp2p_address(record: AdvertRecord) -> JoinAddress | None:
    """Where a peer says that its daemon is: the first address that is well formed and does not name another peer."""
    for text in record.libp2p:
        with contextlib.suppress(ConfigError):
            address = JoinAddress.parse(text)
            if address.peer_id == record.advert.peer_id:
                return address
    return None


@dataclass(eq=False)
class AdvertValidator:
    """Signs this node's records, and refuses any record that is not a well-formed advert signed by its own subkey.

    It has the methods that hivemind's DHT calls on a record validator. hivemind consults it about every record that it
    is asked to store or reads from others.
    """

    identity: Identity
    run_id: str
    stages: Mapping[bytes, int]
    """Hashed DHT keys of this run → stage indices."""
    clock: Callable[[], float]
    """Returns DHT time."""
    members: MemberRecords | None = None
    """If given, only members' records are valid."""
    _checked: Recent[bytes, bool] = field(default_factory=lambda: Recent(_CHECKED_LIMIT))
    """Digest of a record → whether it is valid, in order of last use."""

    def sign_value(self, record: "DHTRecord") -> bytes:
        """The value of one of this node's own records, with its signature in front."""
        return self.identity.sign(_signed(record, record.value)) + bytes(record.value)

    def strip_value(self, record: "DHTRecord") -> bytes:
        """The value of a valid record without its signature."""
        return bytes(record.value[SIGNATURE_BYTES:])

    def validate(self, record: "DHTRecord") -> bool:
        """Whether a record may be stored or believed. Never raises, whatever the bytes are."""
        if not record.expiration_time <= self.clock() + LONGEST_TTL_S:
            return False
        limit = PAYLOAD_LIMIT_BYTES if self.members is None else MEMBERS_PAYLOAD_LIMIT_BYTES
        if len(record.value) > SIGNATURE_BYTES + limit + 3 or len(record.subkey) > 2 * SIGNATURE_BYTES:
            return False
        # The answer may change when a new list of revoked peers arrives.
        revoked = 0 if self.members is None else self.members.revoked.held.number
        digest = hashlib.blake2b(b"%d " % revoked + _signed(record, record.value), digest_size=32).digest()
        known = self._checked.get(digest)
        self._checked[digest] = found = self._well_formed(record) if known is None else known
        return found

    def _well_formed(self, record: "DHTRecord") -> bool:
        stage = self.stages.get(record.key)
        peer_id = record.subkey[2:].decode("ascii", errors="replace")
        if stage is None or public_key_of(peer_id) is None or record.subkey != packed_text(peer_id):
            return False
        signature, value = record.value[:SIGNATURE_BYTES], record.value[SIGNATURE_BYTES:]
        payload = value[2:] if value[:1] == b"\xc4" else value[3:]
        if value != packed_bytes(payload):
            return False
        try:
            made = decode(payload, run_id=self.run_id, stage=stage, peer_id=peer_id, stages=len(self.stages))
        except Violation:
            return False
        if made.announced_at > record.expiration_time or not verify(peer_id, _signed(record, value), signature):
            return False
        if self.members is None:
            return not made.certificate
        return self.members.admits(peer_id, made.certificate, record.expiration_time)


def _signed(record: "DHTRecord", value: bytes) -> bytes:
    """The bytes that the signature covers. Each part is preceded by its length, which makes them unambiguous."""
    parts = (record.key, record.subkey, struct.pack(">d", record.expiration_time), value)
    return _CONTEXT + b"".join(struct.pack(">I", len(part)) + part for part in parts)


def dht_time() -> float:
    """Seconds since 1970: the clock that all nodes of a DHT roughly share."""
    return time.time()
