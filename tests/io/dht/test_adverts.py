"""Signed records: anything but a well-formed advert signed by the key in its subkey is refused."""

import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core.messages import Advert, Holding
from noloco_p2p.errors import ConfigError, Violation
from noloco_p2p.io.dht import adverts
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.dht.adverts import (
    LONGEST_TTL_S,
    PAYLOAD_LIMIT_BYTES,
    AdvertPayload,
    AdvertRecord,
    AdvertValidator,
    decode,
    encode,
    packed_bytes,
    packed_text,
)
from noloco_p2p.io.dht.identity import Identity, peer_id_of, public_key_of

RUN = "ab" * 32
NOW = 1.0e9
KEYS = {b"key of stage 0": 0, b"key of stage 1": 1}
PEER = peer_id_of(bytes(range(32)))


@dataclass(unsafe_hash=True)
class Raw:
    """Stands in for hivemind's DHTRecord."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def advert(**changes: object) -> Advert:
    fields: dict[str, object] = {
        "peer_id": PEER,
        "run_id": RUN,
        "stage": 0,
        "addresses": ("10.0.0.1:5000", "host.example:5000"),
        "metrics": "http://10.0.0.1:9100/metrics",
        "libp2p_metrics": "http://10.0.0.1:9101/metrics",
        "state": "training",
        "step": 12.75,
        "outer_round": 3,
        "fresh_round": 2,
        "microbatches_per_s": 1.5,
        "capacity_per_s": 1.25,
        "steps_per_s": 0.25,
        "evaluated": True,
        "settled": True,
        "stays": True,
        "partner_from_round": 4,
        "moving_to": 1,
        "holds": (Holding(0, 3, 30), Holding(1, 2, 20)),
        "version": "1.2.3",
    }
    return Advert(**{**fields, **changes})  # type: ignore[arg-type]


def record(made: Advert) -> AdvertRecord:
    return AdvertRecord(made, NOW - 2.0, (f"/ip4/10.0.0.1/tcp/4001/p2p/{made.peer_id}",))


def test_every_field_of_an_advert_travels() -> None:
    assert decode(encode(record(advert())), run_id=RUN, stage=0, peer_id=PEER) == record(advert())
    elsewhere = {"peer_id", "run_id", "stage"}
    assert {field.name for field in dataclasses.fields(Advert)} == set(AdvertPayload.model_fields) - {
        "libp2p",
        "certificate",
        "revoked",
        "holds_fresh",
    } | elsewhere


def test_an_advert_of_an_older_version_without_the_later_fields_is_read() -> None:
    for payload in (without("libp2p_metrics"), encode(record(advert(libp2p_metrics="")))):
        assert b"libp2p_metrics" not in payload
        assert decode(payload, run_id=RUN, stage=0, peer_id=PEER) == record(advert(libp2p_metrics=""))
    for payload in (without("stays"), encode(record(advert(stays=False)))):
        assert b"stays" not in payload
        assert decode(payload, run_id=RUN, stage=0, peer_id=PEER) == record(advert(stays=False))
    for payload in (without("fresh_round"), encode(record(advert(fresh_round=0)))):
        assert b"fresh_round" not in payload
        assert decode(payload, run_id=RUN, stage=0, peer_id=PEER) == record(advert(fresh_round=0))


def test_the_lineages_of_what_a_node_holds_travel_apart_so_that_older_versions_read_the_rest() -> None:
    made = record(advert(holds=(Holding(0, 3, 30, 2), Holding(1, 2, 20))))
    payload = encode(made)
    assert json.loads(payload)["holds"] == [[0, 3, 30], [1, 2, 20]]
    assert decode(payload, run_id=RUN, stage=0, peer_id=PEER) == made
    assert "holds_fresh" not in json.loads(encode(record(advert())))


@pytest.mark.parametrize("lineages", [[2], [2, 1, 0], [4, 0], [-1, 0]])
def test_a_lineage_that_cannot_be_is_a_violation(lineages: list[int]) -> None:
    with pytest.raises(Violation, match=r"holds_fresh|lists weights"):
        decode(spoilt(holds_fresh=lineages), run_id=RUN, stage=0, peer_id=PEER)


def test_an_advert_of_a_node_that_neither_moves_nor_holds_checkpoints_travels() -> None:
    made = record(advert(moving_to=None, holds=()))
    assert decode(encode(made), run_id=RUN, stage=0, peer_id=PEER) == made


def test_only_the_last_of_many_holdings_are_announced_so_that_the_advert_fits() -> None:
    holds = tuple(Holding(1000 + i, 10**7 + i, 10**9 + i, 10**7) for i in range(50))
    long = {"addresses": ("h" * 80 + ":50000",) * 3, "metrics": "m" * 100}
    payload = encode(record(advert(**long, outer_round=10**7, fresh_round=10**7, holds=holds)))
    assert decode(payload, run_id=RUN, stage=0, peer_id=PEER).advert.holds == holds[-8:]


@pytest.mark.parametrize("changes", [{"moving_to": 2}, {"holds": (Holding(2, 1, 1),)}])
def test_an_advert_that_names_a_stage_beyond_the_run_is_a_violation(changes: dict[str, object]) -> None:
    payload = encode(record(advert(**changes)))
    assert decode(payload, run_id=RUN, stage=0, peer_id=PEER, stages=3).advert == advert(**changes)
    with pytest.raises(Violation, match="names stage 2 of a run with 2 stages"):
        decode(payload, run_id=RUN, stage=0, peer_id=PEER, stages=2)


def test_an_advert_over_the_size_limit_is_not_encoded() -> None:
    with pytest.raises(ConfigError, match=f"at most {PAYLOAD_LIMIT_BYTES}"):
        encode(
            record(advert(addresses=("x" * 250, "y" * 250, "z" * 250, "w" * 250), metrics="m" * 250, version="v" * 250))
        )


def spoilt(**changes: object) -> bytes:
    return json.dumps({**json.loads(encode(record(advert()))), **changes}).encode()


def without(name: str) -> bytes:
    return json.dumps({k: v for k, v in json.loads(encode(record(advert()))).items() if k != name}).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[1]",
        b"{",
        b"[" * 1000,
        b"\xff\xfe",
        encode(record(advert())) + b" " * PAYLOAD_LIMIT_BYTES,
        spoilt(step=float("nan")),
        spoilt(step=float("inf")),
        spoilt(step=-1.0),
        spoilt(step="1"),
        spoilt(step=True),
        spoilt(step=10**400),
        spoilt(step=1e300),
        spoilt(version="1\n"),
        spoilt(version="é"),
        spoilt(step=None),
        spoilt(outer_round=1.5),
        spoilt(outer_round=-1),
        spoilt(outer_round=2**70),
        spoilt(fresh_round=-1),
        spoilt(fresh_round=None),
        spoilt(fresh_round=4),
        spoilt(state="sleeping"),
        spoilt(evaluated=1),
        spoilt(version=None),
        spoilt(version="1\n2"),
        spoilt(metrics="h" * 300),
        spoilt(libp2p_metrics="h" * 300),
        spoilt(libp2p_metrics=None),
        spoilt(libp2p_metrics=["http://10.0.0.1:9101/metrics"]),
        spoilt(addresses="10.0.0.1:1"),
        spoilt(addresses=["a:1"] * 5),
        spoilt(addresses=[["a:1"]]),
        spoilt(announced_at=None),
        spoilt(partner_from_round=-1),
        spoilt(partner_from_round=None),
        without("partner_from_round"),
        spoilt(moving_to=-1),
        spoilt(moving_to="1"),
        spoilt(moving_to=True),
        without("moving_to"),
        without("holds"),
        spoilt(holds=None),
        spoilt(holds={"0": 1}),
        spoilt(holds=[[0, 1, 1]] * 9),
        spoilt(holds=[[0, 1]]),
        spoilt(holds=[0, 1, 1]),
        spoilt(holds=[[0, 1, 1.5]]),
        spoilt(holds=[[0, -1, 1]]),
        spoilt(holds=[[0, 1, 2**64]]),
    ],
)
def test_a_malformed_payload_is_a_violation(payload: bytes) -> None:
    with pytest.raises(Violation, match=r"^advert "):
        decode(payload, run_id=RUN, stage=0, peer_id=PEER)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_violation(payload: bytes) -> None:
    with pytest.raises(Violation):
        decode(payload, run_id=RUN, stage=0, peer_id=PEER)


def test_adverts_are_packed_as_hivemind_packs() -> None:
    from hivemind.utils import MSGPackSerializer

    for length in (0, 31, 255, 256, PAYLOAD_LIMIT_BYTES):
        assert packed_bytes(bytes(length)) == MSGPackSerializer.dumps(bytes(length))
    assert packed_text(PEER) == MSGPackSerializer.dumps(PEER)


def signed(identity: Identity, **changes: object) -> tuple[AdvertValidator, Raw]:
    validator = AdvertValidator(identity, RUN, KEYS, lambda: NOW)
    value = packed_bytes(encode(record(advert(peer_id=identity.peer_id))))
    plain = Raw(b"key of stage 0", packed_text(identity.peer_id), value, NOW + 30.0)
    return validator, dataclasses.replace(plain, value=validator.sign_value(plain))


def test_a_signed_record_is_valid_at_every_node(tmp_path: Path) -> None:
    mine, other = Identity.open(tmp_path / "mine"), Identity.open(tmp_path / "other")
    validator, good = signed(mine)
    elsewhere = AdvertValidator(other, RUN, KEYS, lambda: NOW)
    assert validator.validate(good)
    assert elsewhere.validate(good)
    assert packed_bytes(encode(record(advert(peer_id=mine.peer_id)))) == elsewhere.strip_value(good)
    mine.close()
    other.close()


def test_checked_records_are_remembered_without_their_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of the directory returns the same records again; each lives for minutes, and new ones keep coming."""
    mine, checks = Identity.open(tmp_path / "mine"), list[str]()

    def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
        checks.append(peer_id)
        return True

    monkeypatch.setattr(adverts, "verify", verify)
    validator, good = signed(mine)
    records = [dataclasses.replace(good, expiration_time=NOW + at / 100) for at in range(1000, 2000)]
    tracemalloc.start()
    for each in (*records, *records):
        copy = dataclasses.replace(each, value=bytes(bytearray(each.value)))
        assert validator.validate(copy)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(checks) == len(records)
    assert used < len(records) * len(good.value)
    monkeypatch.setattr(adverts, "_CHECKED_LIMIT", 1)
    validator, _ = signed(mine)
    checks.clear()
    for each in records[:2] * 2:
        assert validator.validate(each)
    assert len(checks) == 4, "a stranger's many records do not fill the memory"
    mine.close()


FORGERIES: dict[str, Callable[[Raw, str], Raw]] = {
    "another peer's subkey": lambda r, other: dataclasses.replace(r, subkey=packed_text(other)),
    "moved to another stage": lambda r, _: dataclasses.replace(r, key=b"key of stage 1"),
    "moved to another run": lambda r, _: dataclasses.replace(r, key=b"key of another run"),
    "kept alive": lambda r, _: dataclasses.replace(r, expiration_time=r.expiration_time + 1e-3),
    "changed": lambda r, _: dataclasses.replace(r, value=r.value.replace(b"12.75", b"99.75")),
    "bit of the signature": lambda r, _: dataclasses.replace(r, value=bytes([r.value[0] ^ 1]) + r.value[1:]),
    "no signature": lambda r, _: dataclasses.replace(r, value=r.value[64:]),
    "no value": lambda r, _: dataclasses.replace(r, value=b""),
    "trailing bytes": lambda r, _: dataclasses.replace(r, value=r.value + b"x"),
    "no subkey": lambda r, _: dataclasses.replace(r, subkey=b"\xc0"),
    "subkey as bytes": lambda r, _: dataclasses.replace(r, subkey=packed_bytes(r.subkey[2:])),
    "never ends": lambda r, _: dataclasses.replace(r, expiration_time=float("inf")),
    "ends at nan": lambda r, _: dataclasses.replace(r, expiration_time=float("nan")),
}


@pytest.mark.parametrize("kind", sorted(FORGERIES))
def test_a_forged_record_is_refused(tmp_path: Path, kind: str) -> None:
    mine = Identity.open(tmp_path / "mine")
    validator, good = signed(mine)
    assert validator.validate(good)
    assert not validator.validate(FORGERIES[kind](good, PEER))
    mine.close()


def test_a_long_subkey_is_not_remembered(tmp_path: Path) -> None:
    """A stranger could fill the memory with subkeys of 4 MiB, the most that a message of hivemind holds."""
    mine = Identity.open(tmp_path / "mine")
    validator, good = signed(mine)
    before = public_key_of.cache_info().misses
    assert not validator.validate(dataclasses.replace(good, subkey=b"\xda\x00\x81" + b"a" * 129))
    assert public_key_of.cache_info().misses == before
    mine.close()


def test_a_peer_names_only_its_own_daemon() -> None:
    own, other = (f"/ip4/8.8.8.8/tcp/4001/p2p/{peer}" for peer in (PEER, peer_id_of(bytes(32))))
    assert adverts.libp2p_address(AdvertRecord(advert(), NOW, (other, "nonsense", own))) == JoinAddress.parse(own)
    assert adverts.libp2p_address(AdvertRecord(advert(), NOW, (other, "nonsense"))) is None


def test_a_record_that_its_own_peer_signed_is_refused_if_it_is_malformed(tmp_path: Path) -> None:
    """hivemind unpacks subkey and value itself: in another packing they could mean something else to it."""
    mine = Identity.open(tmp_path / "mine")
    validator, good = signed(mine)
    plain = dataclasses.replace(good, value=validator.strip_value(good))
    for changes in (
        {"value": packed_bytes(b"{}")},
        {"value": packed_bytes(spoilt(announced_at=NOW + 31.0))},
        {"value": plain.value + b" "},
        {"value": b"\xc4" + plain.value[2:]},
        {"value": b"\xc5\x00\x00" + plain.value[3:]},
        {"key": b"key of another run"},
        {"subkey": packed_bytes(mine.peer_id.encode())},
        {"subkey": packed_text(mine.peer_id) + b" "},
        {"subkey": b"\xd9\x34" + b"\xff" * 52},
        {"subkey": b"\xd9\xff" + b"a" * 256},
        {"value": b"\xc5\xff\xff" + bytes(1 << 16)},
        {"expiration_time": NOW + LONGEST_TTL_S + 1.0},
    ):
        made = dataclasses.replace(plain, **changes)
        assert not validator.validate(dataclasses.replace(made, value=validator.sign_value(made))), changes
    mine.close()
