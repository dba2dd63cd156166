"""Where a node gets its weights if the run has already begun: the order of all sources."""

from dataclasses import replace

import pytest

from noloco_p2p.core.exchanges import PROBES
from noloco_p2p.core.messages import STREAM, Advert, Holding
from noloco_p2p.core.resume import (
    NEAR_ROUNDS,
    RestoreSource,
    common_round,
    deciding,
    guards_ahead,
    has_last_step,
    lacking,
    restore_sources,
    run_has_begun,
)

STAGES = 3


def advert(peer: str, stage: int, state: str = "training", round: int = 0, holds: tuple[Holding, ...] = ()) -> Advert:
    return Advert(peer, "run", stage, (f"{peer}:1",), state=state, outer_round=round, holds=holds)


def held(stage: int, *rounds: int) -> tuple[Holding, ...]:
    return tuple(Holding(stage, round, 10 * round) for round in rounds)


def kinds(found: list[RestoreSource]) -> list[tuple[str, str | int]]:
    """(kind, peer id or round) of each source."""
    return [(s.kind, s.peer.peer_id if s.peer else s.holding.round if s.holding else "") for s in found]


ME = advert("me", 1, "syncing")
OTHERS = [advert("a", 0, round=20), advert("z", 2, round=20)]


@pytest.mark.parametrize("state", ["training", "finished", "paused"])
def test_a_run_has_begun_when_somebody_has_trained(state: str) -> None:
    waiting = [advert("a", 0, "waiting"), advert("b", 1, "starting"), advert("c", 1, "syncing")]
    assert not run_has_begun(waiting)
    assert run_has_begun([*waiting, advert("d", 2, state)])
    assert run_has_begun([*waiting, advert("d", 2, "waiting", holds=held(2, 1))])
    assert run_has_begun([*waiting, replace(advert("d", 2, "draining"), step=0.5)])


def test_a_node_has_the_last_step_if_any_of_its_checkpoints_is_of_it() -> None:
    assert not has_last_step(advert("a", 0), 50)
    assert not has_last_step(advert("a", 0, holds=held(0, 3, 4)), 50)
    assert has_last_step(advert("a", 0, holds=held(0, 3, 5)), 50)


def test_lacking_names_what_is_missing() -> None:
    others = [advert("a", 0, "waiting"), advert("b", 1, "starting")]
    me = advert("me", 1, "waiting")
    assert lacking(me, others, 2, 2, {"waiting"}) == {0: 1, 1: 1}
    assert lacking(me, others, 2, 1, {"waiting"}) == {}


def test_a_living_replica_comes_first_the_furthest_one_before_all() -> None:
    mates = [advert("b", 1, round=19), advert("c", 1, "finished", 20), advert("d", 1, "paused", 20)]
    guard = advert("g", 0, round=20, holds=held(1, 20))
    found = kinds(restore_sources(ME, [*OTHERS, *mates, guard], held(1, 3, 4), STAGES))
    assert found == [("peer", "c"), ("peer", "d"), ("peer", "b")], "and never an old checkpoint, or fresh weights"
    late = kinds(restore_sources(ME, [*OTHERS, *mates, guard], held(1, 3, 4), STAGES, late=True))
    assert late == [*found, ("guardian", "g")], "they may answer and give nothing"


@pytest.mark.parametrize(("behind", "first"), [(0, "shard"), (NEAR_ROUNDS, "shard"), (NEAR_ROUNDS + 1, "peer")])
def test_an_own_checkpoint_will_do_while_it_is_hardly_behind(behind: int, first: str) -> None:
    mate = advert("b", 1, round=20)
    found = restore_sources(ME, [*OTHERS, mate], held(1, 10, 19 - behind, 20 - behind), STAGES)
    assert found[0].kind == first
    assert first == "peer" or kinds(found)[:2] == [("shard", 20 - behind), ("peer", "b")], "only the newest"
    assert ("peer", "b") in kinds(found), "in case the checkpoint is damaged"


@pytest.mark.parametrize(("round", "first"), [(9, "c"), (7, "c"), (6, "b")])
def test_of_two_lineages_the_one_that_has_trained_for_more_rounds_comes_first(round: int, first: str) -> None:
    """The earlier one, if both have trained for as many."""
    fresh = [replace(advert(peer, 1, round=21), fresh_round=18) for peer in "bd"]
    others = [*OTHERS, *fresh, replace(advert("c", 1, round=round), fresh_round=4)]
    assert kinds(restore_sources(ME, others, (), STAGES))[0] == ("peer", first)


def test_a_checkpoint_of_the_lineage_that_has_trained_for_fewer_rounds_comes_after_the_replicas() -> None:
    others = [*OTHERS, advert("b", 1, round=9)]
    assert kinds(restore_sources(ME, others, [Holding(1, 21, 210, 18)], STAGES)) == [("peer", "b")]


@pytest.mark.parametrize(("round", "first"), [(0, ("peer", "b")), (1, ("shard", 1)), (12, ("shard", 12))])
def test_a_checkpoint_of_an_earlier_lineage_comes_first_unless_the_others_have_trained_for_more_rounds(
    round: int, first: tuple[str, str | int]
) -> None:
    others = [*OTHERS, replace(advert("b", 1, round=20), fresh_round=18)]
    assert kinds(restore_sources(ME, others, held(1, round), STAGES))[0] == first


def test_of_its_own_checkpoints_of_two_lineages_the_one_that_has_trained_for_more_rounds_comes_first() -> None:
    """It began afresh while its disk could not be read."""
    others, own = [*OTHERS, replace(advert("b", 1, round=20), fresh_round=18)], (*held(1, 12), Holding(1, 20, 200, 18))
    assert kinds(restore_sources(ME, others, own, STAGES))[0] == ("shard", 12)


def test_a_lost_stage_resumes_from_the_newest_weights_that_anybody_has() -> None:
    guards = [advert("f", 0, round=20, holds=held(1, 18)), advert("g", 2, round=20, holds=(*held(0, 19), *held(1, 19)))]
    assert kinds(restore_sources(ME, [*OTHERS, *guards], (), STAGES)) == [
        ("guardian", "g"),
        ("guardian", "f"),
        ("fresh", ""),
    ]
    own = kinds(restore_sources(ME, [*OTHERS, *guards], held(1, 17, 19), STAGES))
    assert own == [("shard", 19), ("guardian", "g"), ("guardian", "f"), ("shard", 17), ("fresh", "")], "it has Adam too"
    for mine in (Holding(1, 20, 205), *held(1, 19)):
        first = restore_sources(ME, [*OTHERS, *guards], (), STAGES, mine)[0]
        assert (first.peer, first.holding) == (None, mine), "of equal ones its own need not travel"


def test_a_lost_stage_resumes_from_the_weights_that_have_trained_for_most_rounds() -> None:
    """A newcomer began afresh at round 15 while the guardian of the others was out of reach, and was lost in turn."""
    old = (Holding(1, 14, 140, 2),)
    elder = advert("a", 0, round=20, holds=old)
    younger = advert("g", 2, round=20, holds=(Holding(1, 19, 190, 15),))
    others = [elder, younger]
    assert kinds(restore_sources(ME, others, (), STAGES))[:2] == [("guardian", "a"), ("guardian", "g")]
    own = [Holding(1, 20, 200, 15)]
    assert kinds(restore_sources(ME, others, own, STAGES))[0] == ("guardian", "a")
    as_old = advert("c", 2, round=20, holds=(Holding(1, 20, 200, 8),))
    assert kinds(restore_sources(ME, [as_old, elder], (), STAGES))[0] == ("guardian", "a"), "the earlier of two as old"
    mate = advert("b", 1, "waiting", holds=old)
    assert kinds(restore_sources(ME, [mate, younger], own, STAGES)) == [("wait", "")]
    assert kinds(restore_sources(ME, [replace(mate, holds=tuple(own)), elder], (), STAGES))[0] == ("guardian", "a")


def test_the_last_weights_of_a_replica_count_even_beyond_the_round_of_the_others() -> None:
    guard = advert("g", 0, round=20, holds=held(1, 21))
    assert kinds(restore_sources(ME, [*OTHERS, guard], (), STAGES))[0] == ("guardian", "g")


def test_after_everybody_was_stopped_all_go_on_from_one_round() -> None:
    waiting = [advert("a", 0, "waiting", holds=held(0, 3, 4)), advert("z", 2, "waiting", holds=held(2, 3))]
    me = replace(ME, holds=held(1, 3, 4, 5))
    assert common_round([me, *waiting], STAGES) == 3
    found = kinds(restore_sources(me, waiting, me.holds, STAGES))
    assert found == [("shard", 3), ("shard", 4), ("shard", 5), ("fresh", "")]
    # One of them has already begun, and announces its round: the answer stays the same.
    begun = [advert("a", 0, "training", 3), waiting[1]]
    assert kinds(restore_sources(me, begun, me.holds, STAGES))[0] == ("shard", 3)


@pytest.mark.parametrize(("state", "round", "newest"), [
    ("training", 20, 20),
    ("draining", 20, 20),
    ("draining", 0, 4),
    ("syncing", 20, 20),
    ("syncing", 0, 4),
])  # fmt: skip
def test_a_replica_that_leaves_still_has_its_round_but_not_before_it_has_weights(
    state: str, round: int, newest: int
) -> None:
    others = [advert("a", 0, state, round), advert("z", 2, round=20, holds=held(0, 4))]
    assert common_round([ME, *others], STAGES) == newest
    assert kinds(restore_sources(ME, others, held(1, 4, 20), STAGES))[0] == ("shard", newest)


def test_the_next_checkpoint_after_a_damaged_one_is_the_nearest() -> None:
    waiting = [advert("a", 0, "waiting", holds=held(0, 5)), advert("z", 2, "waiting", holds=held(2, 5))]
    found = restore_sources(ME, waiting, held(1, 1, 5, 6, 8), STAGES)
    assert kinds(found) == [("shard", 5), ("shard", 6), ("shard", 8), ("shard", 1), ("fresh", "")]
    found = restore_sources(ME, waiting, held(1, 3, 4, 6, 7), STAGES)
    assert kinds(found)[:4] == [("shard", 4), ("shard", 6), ("shard", 3), ("shard", 7)], "of two as near, the older"
    guard = advert("g", 0, round=5, holds=held(1, 3))
    found = restore_sources(replace(ME, holds=held(1, 6)), [*waiting, guard], held(1, 6), STAGES)
    assert kinds(found) == [("shard", 6), ("guardian", "g"), ("fresh", "")]


def test_stages_without_any_weights_do_not_count() -> None:
    assert common_round([], STAGES) is None
    assert common_round([advert("a", 0, "waiting", holds=held(0, 7)), advert("b", 1, "waiting")], STAGES) == 7
    assert common_round([advert("a", 0, "waiting", holds=held(3, 1)), *OTHERS], STAGES) == 20, "there is no stage 3"
    assert common_round([advert("a", 0, "waiting", holds=held(0, 0)), OTHERS[1]], STAGES) == 0


@pytest.mark.parametrize("state", ["starting", "waiting", "left"])
def test_a_mate_in_a_state_without_weights_of_its_own_is_not_waited_for_whatever_round_it_names(state: str) -> None:
    for holds in ((), held(2, 30)):
        found = kinds(restore_sources(ME, [*OTHERS, advert("b", 1, state, 20, holds)], [], STAGES))
        assert [kind for kind, _ in found] == ["fresh"]


@pytest.mark.parametrize(("state", "round", "kind"), [
    ("draining", 1, "wait"),
    ("syncing", 1, "wait"),
    ("syncing", 0, "fresh"),
])  # fmt: skip
def test_a_mate_that_leaves_or_stood_still_is_waited_for_if_it_has_weights(state: str, round: int, kind: str) -> None:
    assert restore_sources(ME, [*OTHERS, advert("b", 1, state, round)], [], STAGES)[0].kind == kind


@pytest.mark.parametrize(("holding", "ahead"), [
    (Holding(1, 30 + NEAR_ROUNDS, 300, 20), False),
    (Holding(1, 31 + NEAR_ROUNDS, 310, 20), True),
    (Holding(1, 99, 990, 95), False),
    (Holding(0, 99, 990), False),
])  # fmt: skip
def test_guardians_are_ahead_of_a_replica_if_their_weights_have_trained_for_more_rounds(
    holding: Holding, ahead: bool
) -> None:
    me, guard = replace(advert("me", 1, round=15), fresh_round=5), advert("g", 2, round=99, holds=(holding,))
    assert kinds(guards_ahead(me, [*OTHERS, guard])) == [("guardian", "g")] * ahead


def test_a_node_without_weights_waits_for_a_mate_that_has_them() -> None:
    mate = advert("b", 1, "waiting", holds=held(1, 8, 9))
    rest = [advert("a", 0, "waiting", holds=held(0, 9)), advert("z", 2, "waiting", holds=held(2, 9))]
    assert kinds(restore_sources(ME, [mate, *rest], (), STAGES)) == [("wait", "")]
    assert kinds(restore_sources(ME, [mate, *rest], held(1, 7), STAGES)) == [("wait", "")], "two rounds are too many"
    for enough in ((2, 8), (9,)):
        assert kinds(restore_sources(ME, [mate, *rest], held(1, *enough), STAGES))[0] == ("shard", enough[-1])
    assert kinds(restore_sources(ME, [mate, *rest], held(1, 12), STAGES)) == [("wait", "")], "others cannot reach it"
    old_and_young = replace(mate, holds=(*held(1, 8), Holding(1, 9, 90, 7)))
    assert kinds(restore_sources(ME, [old_and_young, *rest], held(1, 6), STAGES)) == [("wait", "")], "its oldest count"
    initial = [replace(one, holds=held(one.stage, 0)) for one in (mate, *rest)]
    assert kinds(restore_sources(ME, initial, (), STAGES)) == [("wait", "")]


def test_a_mates_weights_of_another_stage_or_beyond_the_common_round_are_not_waited_for() -> None:
    rest = [advert("a", 0, "waiting", holds=held(0, 4)), advert("z", 2, "waiting", holds=held(2, 4))]
    guardian, ahead = (advert("b", 1, "waiting", holds=held(*what)) for what in ((0, 4), (1, 9)))
    assert kinds(restore_sources(ME, [guardian, *rest], (), STAGES)) == [("fresh", "")]
    found = restore_sources(replace(ME, holds=held(1, 1)), [ahead, *rest], held(1, 1), STAGES)
    assert kinds(found) == [("shard", 1), ("fresh", "")]


def test_of_two_checkpoints_of_one_round_the_one_of_the_latest_step_comes_first() -> None:
    own = [Holding(1, 5, step) for step in (50, 58, 54)]
    found = restore_sources(replace(ME, holds=tuple(own)), OTHERS, own, STAGES)
    assert [source.holding.step for source in found if source.holding] == [58, 54, 50]


def test_the_nodes_with_the_newest_weights_must_answer_before_a_lost_stage_resumes() -> None:
    """Of its own stage several, in case one of them is silent; while it has a living replica, only those."""
    living = [advert("b", 1), advert("c", 1, "paused")]
    assert deciding(ME, [], [*OTHERS, *living, advert("d", 1, "waiting", holds=held(1, 30))], STAGES) == living
    mates = [advert(f"m{n}", 1, "waiting", holds=held(1, 20 + n)) for n in range(PROBES + 1)]
    older = [advert("w", 0, round=19), advert("y", 2, round=19)]
    newest = [*mates[1:], OTHERS[1]]
    assert deciding(ME, [], [*older, *OTHERS, *mates], STAGES) == [OTHERS[0], *newest]
    known = advert("x", 0, round=21)
    assert deciding(ME, [known], [*older, *OTHERS, *mates], STAGES) == newest, "nobody of stage 0 can change anything"
    young, afresh = advert("m", 1, "waiting", holds=(Holding(1, 99, 990, 95),)), replace(known, fresh_round=20)
    found = deciding(ME, [], [*older, *OTHERS, afresh, young, *mates], STAGES)
    assert found == [*mates[1:], afresh, OTHERS[1]], (
        "the oldest weights of its own stage, and the last rounds of others"
    )


@pytest.mark.parametrize("round", [20, 22])
def test_a_replica_of_another_stage_must_answer_though_a_guardian_has_shown_as_new_weights(round: int) -> None:
    """A replica's advert may be older than what its guardian has pulled since. Without its answer the only replica of
    a stage took the guardian's round for that of the swarm, and continued from a checkpoint two rounds old."""
    guardian, replica = replace(OTHERS[1], holds=held(0, round)), OTHERS[0]
    assert deciding(ME, [guardian], [replica], STAGES) == [replica]
    assert deciding(ME, [], [replica, guardian], STAGES) == [replica, guardian]
    assert deciding(ME, [guardian, replace(replica, outer_round=23)], [advert("b", 0, round=19)], STAGES) == []


def test_fresh_weights_are_the_last_resort() -> None:
    assert kinds(restore_sources(ME, OTHERS, (), STAGES)) == [("fresh", "")]
    assert kinds(restore_sources(ME, [], (), STAGES)) == [("fresh", "")], "nobody has any weights at all"
    assert kinds(restore_sources(ME, [], held(1, 3, 4), STAGES)) == [("shard", 4), ("shard", 3), ("fresh", "")]


def test_the_boldest_donor_is_asked_last() -> None:
    living = [advert(peer, 1, round=round) for peer, round in (("a", 4), ("b", 10**6), ("c", 5), ("d", 6))]
    assert kinds(restore_sources(ME, living, [], STAGES)) == [("peer", peer) for peer in "dcab"]
    assert kinds(restore_sources(ME, living, held(1, 5), STAGES))[0] == ("shard", 5), "nor does it make others look old"


@pytest.mark.parametrize(("round", "first"), [(20, ("peer", "b")), (21, ("shard", 8))])
def test_a_donor_is_not_bold_because_another_one_has_stood_still(round: int, first: tuple[str, str | int]) -> None:
    """Or claims that: the swarm's clock counts too. A replica that was mute for ten seconds made the only other one
    look bold, and this node went on from its own old checkpoint."""
    living = [advert("a", 1, round=5), advert("b", 1, round=round)]
    assert kinds(restore_sources(ME, living, held(1, 8), STAGES, credible=20))[0] == first


def test_a_donor_that_needs_a_relay_is_asked_after_the_others() -> None:
    def hidden(one: Advert) -> Advert:
        return replace(one, addresses=(STREAM, "relay/r"))

    near, far, bold = advert("b", 1, round=4), hidden(advert("c", 1, round=5)), advert("d", 1, round=10**6)
    asked = [source.peer for source in restore_sources(hidden(ME), [near, far, bold], [], STAGES)]
    assert asked == [near, far, bold]
    assert restore_sources(ME, [near, far, bold], [], STAGES)[0].peer == far
    found = restore_sources(hidden(ME), [near, far], held(1, 5 - NEAR_ROUNDS), STAGES)
    assert found[0].kind == "shard", "how far the others are does not depend on how they are reached"
