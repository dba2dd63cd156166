"""Names in certificates, and what a caller's certificate must show; `test_intrusions` does the same over TLS."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from members import HOUR_S, Club, forged

from noloco_p2p.errors import Declined, Violation
from noloco_p2p.io.dht.identity import peer_id_of
from noloco_p2p.io.security import certificates
from noloco_p2p.io.security.certificates import CHAIN_LIMIT_BYTES, Role, RunTrust
from noloco_p2p.io.security.credentials import Credentials
from noloco_p2p.io.security.revocations import Revocations

ANN = peer_id_of(bytes(32))
Shown = dict[str, tuple[bytes, ...]]


@pytest.mark.parametrize("role", ["member", "observer"])
def test_a_name_is_that_of_one_peer_in_one_role_of_one_run(tmp_path: Path, role: Role) -> None:
    trust = Club(tmp_path).trust
    name = trust.name_of(ANN, role)
    assert trust.owner_of(name) == (ANN, role)
    twin = name[:51] + "b" + name[52:]  # of the five bits of this letter only the first one is part of the key
    other_run = RunTrust("cd" * 32, trust.root_key).name_of(ANN, role)
    longer = f"{name[:52]}.other{name[52:]}"
    for wrong in (twin, other_run, longer, name.upper(), f"a{name}", f"{name}.", name[1:], trust.suffix, ""):
        with pytest.raises(Violation, match="not the name of a peer of this run"):
            trust.owner_of(wrong)


def test_an_issuer_cannot_admit_a_key_of_another_kind(tmp_path: Path) -> None:
    club, key = Club(tmp_path), ec.generate_private_key(ec.SECP256R1()).public_key()
    names = [certificates._authority(0), certificates._names(club.trust.name_of(ANN, "member"))]
    for made in (key, club.door.public_key()):
        chain = forged(made, club.door, subject="member", issuer="issuer", more=names) + club.issuer
        with pytest.raises(Violation, match="not issued for this run"):
            club.trust.membership(chain)


def shown_by(caller: Credentials) -> Shown:
    """What gRPC reports about a caller."""
    name, chain = caller.trust.name_of(caller.peer_id, caller.membership.role).encode(), caller.leaf()[1]
    leaf = chain.removesuffix(caller.chain)
    return {
        "x509_subject_alternative_name": (name,),
        "peer_dns": (name,),
        "x509_pem_cert": (leaf,),
        "x509_pem_cert_chain": (chain,),
    }


def other_leaf(shown: Shown, other: Credentials) -> Shown:
    return shown | {name: shown_by(other)[name] for name in ("x509_pem_cert", "x509_pem_cert_chain")}


WRONG: dict[str, Callable[[Shown, Credentials], Shown]] = {
    "no other name": lambda shown, other: shown | {"x509_subject_alternative_name": ()},
    "and no other name": lambda shown, other: {
        name: values * 2 if "name" in name or "dns" in name else values for name, values in shown.items()
    },
    "one DNS name": lambda shown, other: shown | {"peer_dns": ()},
    "not the name of a peer": lambda shown, other: shown | dict.fromkeys(list(shown)[:2], (b"\xff.p2p",)),
    "not signed by the peer that it names": other_leaf,
    "more certificates than any peer has": lambda shown, other: (
        shown | {"x509_pem_cert_chain": (b"\n" * (2 * CHAIN_LIMIT_BYTES),)}
    ),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_caller_must_show_one_name_and_a_leaf_that_its_own_key_signed(tmp_path: Path, why: str) -> None:
    club = Club(tmp_path)
    mine, caller, other = (club.credentials(name) for name in ("mine", "caller", "other"))
    assert mine.caller(shown_by(caller), observers=False) == caller.peer_id
    with pytest.raises(Violation, match=why):
        mine.caller(WRONG[why](shown_by(caller), other), observers=True)


def test_a_caller_that_expired_or_was_revoked_is_refused_and_an_observer_may_only_observe(tmp_path: Path) -> None:
    club, later = Club(tmp_path), [0.0]
    mine = club.credentials("mine", clock=lambda: club.now + later[0])
    caller, observer = club.credentials("caller"), club.credentials("observer", "observer")
    assert mine.caller(shown_by(observer), observers=True) == observer.peer_id
    with pytest.raises(Declined, match="an observer may not"):
        mine.caller(shown_by(observer), observers=False)
    later[0] = certificates.LEAF_S + HOUR_S
    with pytest.raises(Violation, match="has expired"):
        mine.caller(shown_by(caller), observers=False)
    later[0] = 0.0
    assert mine.caller(shown_by(caller), observers=False) == caller.peer_id
    revoked = Revocations(club.trust)
    mine = Credentials(club.trust, mine.identity, mine.chain, revoked=revoked)
    revoked.adopt(club.revoking(1, caller.peer_id))
    with pytest.raises(Violation, match="was revoked"):
        mine.caller(shown_by(caller), observers=False)


def test_a_certificate_is_no_renewal_of_itself(tmp_path: Path) -> None:
    club = Club(tmp_path)
    mine = club.credentials("mine")
    assert not mine.is_renewed_by(mine.chain)
    assert mine.is_renewed_by(club.chain(mine.peer_id, now=club.now + HOUR_S / 2))
    assert not mine.is_renewed_by(club.chain(mine.peer_id, now=club.now + 2 * HOUR_S)), "it is not valid yet"


def test_a_member_does_not_let_an_issuer_make_it_an_observer(tmp_path: Path) -> None:
    club = Club(tmp_path)
    mine = club.credentials("mine", now=club.now + HOUR_S / 2 - certificates.LIFETIME_S["member"])
    assert mine.is_renewed_by(club.chain(mine.peer_id))
    assert not mine.is_renewed_by(club.chain(mine.peer_id, "observer"))
