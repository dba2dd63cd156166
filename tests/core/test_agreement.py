"""Which replicas' offers count in a round of all replicas."""

from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.core.agreement import Agreement, GroupView, agree, digest

A, B, C, D = "abcd"


def views(**of: tuple[str, int]) -> dict[str, GroupView]:
    return {peer: GroupView(tuple(peers), digest) for peer, (peers, digest) in of.items()}


def test_the_digest_depends_on_all_parts_and_not_on_where_they_are_divided() -> None:
    assert digest([b"one", b"two"]) == digest([b"on", memoryview(b"etwo")])
    assert len({digest(parts) for parts in ([], [b"one"], [b"one", b"two"], [b"two", b"one"])}) == 4


def test_replicas_that_all_offers_name_count() -> None:
    assert agree(views(a=("abc", 7), b=("abc", 7), c=("abc", 7))) == Agreement((A, B, C), 7)
    assert agree(views(a=("abc", 7), b=("bc", 7), c=("abc", 7))) == Agreement((B, C), 7), "b does not know a yet"
    assert agree(views(a=("abc", 7), b=("abc", 7))) == Agreement((A, B), 7), "no offer of c arrived"
    assert agree(views(a=("abc", 7), b=("abc", 7), c=("abc", 7), d=("abc", 7))).counted == (A, B, C), "d is new"
    assert agree(views(a=("a", 7))) == Agreement((A,), 7)


def test_if_no_replica_is_named_by_all_everybody_counts() -> None:
    assert agree(views(a=("", 7), b=("", 7))) == Agreement((A, B), 7)
    assert agree(views(a=("b", 7), b=("a", 7))) == Agreement((A, B), 7)


def test_the_largest_set_wins_and_among_equals_that_of_the_smallest_id() -> None:
    assert agree(views(a=("abc", 1), b=("abc", 2), c=("abc", 2))) == Agreement((B, C), 2)
    assert agree(views(a=("abcd", 2), b=("abcd", 1), c=("abcd", 1), d=("abcd", 2))) == Agreement((A, D), 2)
    new = views(a=("ab", 1), b=("ab", 2), c=("ab", 2), d=("ab", 2))
    assert agree(new) == Agreement((A,), 1), "an offer of a replica that is not named does not count"


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.tuples(st.sets(st.sampled_from("abcdef")), st.integers(0, 2)), min_size=1
    )
)
def test_equal_offers_lead_to_equal_agreements(offers: dict[str, tuple[set[str], int]]) -> None:
    found = {peer: GroupView(tuple(sorted(peers)), digest) for peer, (peers, digest) in offers.items()}
    agreed = agree(found)
    assert agreed == agree(dict(reversed(found.items())))
    assert agreed.counted
    assert list(agreed.counted) == sorted(set(agreed.counted))
    assert {found[peer].digest for peer in agreed.counted} == {agreed.digest}
