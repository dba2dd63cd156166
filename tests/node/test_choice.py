"""Which replicas a microbatch is offered to."""

import random
from collections import Counter
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.line_rate import FAR_S, MeasuredLine, Sending
from noloco_p2p.core.messages import Advert, Origin, PeerId
from noloco_p2p.core.routing import StepView
from noloco_p2p.core.trials import Trials
from noloco_p2p.errors import Declined
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.choice import FAILED_AGAIN_S, UNSERVED_S, Attempts, Choice, ReplicaChoice
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time

PER_STEP = 6
ROUND_TRIPS_S = {"far": 20 * FAR_S, "further": 21 * FAR_S, "farthest": 22 * FAR_S, "near": FAR_S / 2, "nearby": 0.0}


class Chooser:
    """The choice of a node of some stage. The next stage has the replicas of ROUND_TRIPS_S."""

    def __init__(self, index: int = 0, policy: str = "random") -> None:
        self.now_s = 0.0
        self.gone: set[PeerId] = set()
        self.aside: set[PeerId] = set()
        self.answered: list[PeerId] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        adverts = {peer: Advert(peer, "run", index + 1, ()) for peer in ROUND_TRIPS_S}

        def usable(stage: int, now: float, without: Collection[PeerId]) -> list[PeerId]:
            assert stage == index + 1
            return sorted(adverts.keys() - self.gone - {*without})

        members = SimpleNamespace(
            usable=usable,
            get=adverts.get,
            of_stage=lambda stage, _: [adverts[peer] for peer in usable(stage, 0.0, ())],
            is_aside=lambda peer, now: peer in self.aside,
        )
        shares = dict.fromkeys(ROUND_TRIPS_S, 0.2)
        view = StepView("me", ("me",), ("me",), tuple(sorted(adverts)), shares)
        manifest = SimpleNamespace(routing=policy, seed=1, microbatches_per_step=PER_STEP)
        node = SimpleNamespace(
            index=index,
            manifest=manifest,
            me="me",
            rng=random.Random(3),
            now=lambda: self.now_s,
            advert=(advert := SimpleNamespace(unserved=False)),
            update=lambda **fields: vars(advert).update(fields),
            event=lambda name, **fields: self.events.append((name, fields)),
        )
        line = MeasuredLine()
        for peer, seconds in ROUND_TRIPS_S.items():
            line.answered(peer, seconds)
        self.trials = Trials(1.0, lambda: 0.0, adverts.get)
        swarm: Any = SimpleNamespace(members=members, view=view, trials=self.trials, answered=self.answered.append)
        self.advert = advert
        self.of = ReplicaChoice(node, swarm, line)  # type: ignore[arg-type]

    def choose(
        self,
        step: int,
        index: int,
        *,
        busy: tuple[PeerId, ...] = (),
        busy_at: float | None = None,
        way: Sending = Sending.ASKED,
        avoid: tuple[PeerId, ...] = (),
        attempts: Attempts | None = None,
    ) -> Choice:
        attempts = attempts or Attempts(True, frozenset(avoid), busy=set(busy), busy_at=busy_at)
        return self.of.by_policy(Origin("me", step, index), attempts, lambda advert: way)

    def pair(self, step: int, index: int, **options: Any) -> list[PeerId]:
        return [advert.peer_id for advert in self.choose(step, index, **options).replicas]


def test_the_pairs_of_a_step_are_spread_over_all_and_the_farthest_go_first() -> None:
    chooser = Chooser()
    for step in range(20):
        pairs = [chooser.pair(step, index) for index in range(PER_STEP)]
        assert all(len({*pair}) == 2 for pair in pairs)
        times = Counter(peer for pair in pairs for peer in pair)
        assert {*times.values()} <= {2, 3}, "of twelve places each of five has two or three"
        nearest = [min(ROUND_TRIPS_S[peer] for peer in pair) // FAR_S for pair in pairs]
        assert nearest == sorted(nearest, reverse=True)


def test_a_second_choice_in_a_step_gives_the_same_pair() -> None:
    chooser = Chooser()
    pairs = [chooser.pair(3, index) for index in range(PER_STEP)]
    assert [chooser.pair(3, index) for index in reversed(range(PER_STEP))] == pairs[::-1]
    assert [chooser.pair(4, index) for index in range(PER_STEP)] != pairs


def test_another_replica_stands_in_for_one_that_is_busy_or_gone() -> None:
    chooser = Chooser()
    first, second = chooser.pair(0, 0)
    assert first not in chooser.pair(0, 0, busy=(first,))
    assert second in chooser.pair(0, 0, busy=(first,))
    chooser.gone = {first, second}
    assert len({*chooser.pair(0, 0)} - {first, second}) == 2
    everybody = tuple(ROUND_TRIPS_S)
    chooser.gone = set()
    assert chooser.pair(0, 0, busy=everybody) == []
    assert chooser.pair(0, 0, busy=everybody[1:]) == ["far"]


def test_a_small_body_goes_to_one_of_the_pair() -> None:
    chooser = Chooser()
    for way in (Sending.WHOLE, Sending.AT_ONCE):
        assert chooser.pair(0, 0, way=way) == chooser.pair(0, 0)[:1]


def test_only_a_whole_body_is_refused_while_another_replica_may_be_free() -> None:
    patient = {way: Chooser().choose(0, 0, way=way).patient for way in Sending}
    assert patient == {Sending.WHOLE: False, Sending.AT_ONCE: True, Sending.ASKED: True}


def test_a_body_that_was_refused_once_is_asked_for() -> None:
    first = {way: Chooser().choose(0, 0, way=way, busy_at=1.0).header_first for way in Sending}
    assert first == {Sending.WHOLE: False, Sending.AT_ONCE: True, Sending.ASKED: True}


def test_a_later_stage_draws_for_each() -> None:
    chooser = Chooser(1)
    pairs = {tuple(chooser.pair(0, 0)) for _ in range(50)}
    assert len(pairs) > 10


def test_a_replica_that_the_origin_distrusts_is_asked_only_if_there_is_no_other() -> None:
    chooser = Chooser(1)
    asked = {peer for _ in range(50) for peer in chooser.pair(0, 0, avoid=("far", "near"))}
    assert asked == {"farthest", "further", "nearby"}
    chooser.gone = asked
    assert {peer for _ in range(50) for peer in chooser.pair(0, 0, avoid=("far", "near"))} == {"far", "near"}


@pytest.mark.parametrize(
    ("policy", "asked"), [("random", ["far"]), ("weighted", ["far", "far"]), ("balanced", ["far"])]
)
def test_if_only_one_replica_is_left_it_is_asked_and_may_queue_any_body(policy: str, asked: list[PeerId]) -> None:
    chooser = Chooser(1, policy)
    chooser.gone = {*ROUND_TRIPS_S} - {"far"}
    assert chooser.pair(0, 0) == asked
    assert chooser.choose(0, 0, way=Sending.WHOLE).patient


@pytest.mark.parametrize("policy", ["balanced", "fixed"])
def test_a_policy_that_names_a_replica_waits_for_it_while_it_is_busy(policy: str) -> None:
    chooser = Chooser(0, policy)
    chosen = chooser.choose(0, 0)
    [named] = chosen.replicas
    assert (chosen.header_first, chosen.patient) == (True, True)
    assert chooser.pair(0, 0, busy=(named.peer_id,)) == []
    chosen = chooser.choose(0, 0, way=Sending.WHOLE)
    assert (chosen.replicas, chosen.header_first, chosen.patient) == ([named], False, True)
    assert chooser.events == []
    chooser.gone = {named.peer_id}
    attempts = Attempts(True, frozenset())
    for _ in range(2):
        [other] = chooser.choose(0, 0, attempts=attempts).replicas
        assert other != named
    [(event, fields)] = chooser.events
    assert (event, fields["reason"]) == ("reroute", "fallback"), "it is reported once"
    assert fields["peer"] in {*ROUND_TRIPS_S} - {named.peer_id}


@pytest.mark.parametrize(("waited_s", "most"), [(1.0, 20), (10.0, 70), (100.0, 180)])
def test_a_long_wait_for_busy_replicas_is_not_polled_ten_times_a_second(waited_s: float, most: int) -> None:
    attempts = Attempts(True, frozenset(), busy_at=50.0)
    now, pauses = 50.0, list[float]()
    while now < 50.0 + waited_s:
        attempts.busy = {"A"}
        pauses.append(attempts.pause_s)
        now += attempts.pause_s
        attempts.begin_anew(now, free=True)
    assert len(pauses) <= most
    assert max(pauses) == pytest.approx(max(0.1, min(1.0, 0.05 * waited_s)), rel=0.1)


@pytest.mark.parametrize(
    ("trains", "busy", "pauses_s", "failed"),
    [
        (True, True, [0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1], {"just now"}),
        (True, False, [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5], set()),
        (False, False, [0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1], set()),
    ],
)
def test_who_is_asked_again_after_a_pause_and_how_long_it_is(
    trains: bool, busy: bool, pauses_s: list[float], failed: set[PeerId]
) -> None:
    attempts, found = Attempts(trains, frozenset()), list[float]()
    for _ in pauses_s:
        attempts.busy = {"busy"} if busy else set()
        attempts.failed = {"a while ago": 100.0 - FAILED_AGAIN_S, "just now": 100.5 - FAILED_AGAIN_S}
        found.append(attempts.pause_s)
        attempts.begin_anew(100.0, free=True)
        assert attempts.busy == set()
        assert attempts.failed.keys() == failed
    assert found == pytest.approx(pauses_s)


def test_a_node_says_that_the_next_stage_does_not_serve_it_until_it_does() -> None:
    chooser = Chooser()
    for now_s, unserved in (
        (1.0, False),
        (1.0 + UNSERVED_S, False),
        (2.0 + UNSERVED_S, True),
        (3.0 + UNSERVED_S, True),
    ):
        chooser.now_s = now_s
        chooser.choose(0, 0)
        assert chooser.advert.unserved == unserved
    chooser.of.served_by("near")
    assert (chooser.advert.unserved, chooser.answered) == (False, ["near"])
    chooser.now_s = 2 * UNSERVED_S
    chooser.choose(0, 0)
    assert not chooser.advert.unserved
    chooser.now_s = 3 * UNSERVED_S + 1.0
    chooser.choose(0, 0)
    assert chooser.advert.unserved


@pytest.mark.parametrize(("index", "policy"), [(0, "random"), (0, "weighted"), (0, "balanced"), (1, "random")])
def test_connections_are_warmed_up_to_those_that_are_known_to_get_it(index: int, policy: str) -> None:
    chooser, origin = Chooser(index, policy), Origin("me", 0, 0)
    expected = [advert.peer_id for advert in chooser.of.expected(origin)]
    assert expected == (chooser.pair(0, 0) if (index, policy) == (0, "random") else [])
    chooser.gone = {*ROUND_TRIPS_S} - {"near"}
    assert [advert.peer_id for advert in chooser.of.expected(origin)] == ["near"]
    chooser.gone = {*ROUND_TRIPS_S}
    assert chooser.of.expected(origin) == []


def test_evaluations_go_to_all_in_a_fixed_order_and_past_those_that_failed() -> None:
    chooser, order = Chooser(), sorted(ROUND_TRIPS_S)

    def asked(index: int, skipped: int = 0, way: Sending = Sending.ASKED, failed: bool = False) -> Choice:
        attempts = Attempts(False, frozenset(), skipped=skipped, failed={"x": 0.0} if failed else {})
        return chooser.of.in_turn(Origin("me", 0, index), attempts, lambda advert: way)

    def name(choice: Choice) -> str:
        [advert] = choice.replicas
        return advert.peer_id

    assert [name(asked(index)) for index in range(6)] == [*order, order[0]]
    assert name(asked(1, skipped=2)) == order[3]
    assert [asked(0, way=way).header_first for way in (Sending.ASKED, Sending.AT_ONCE, Sending.WHOLE)] == [1, 1, 0]
    chooser.aside = {order[0], order[1]}
    assert name(asked(0)) == order[2], "the next one stands in"
    with chooser.trials.call(order[4]):
        pass
    assert name(asked(0, failed=True)) == order[4], "after a failure one that has served before"
    chooser.aside = {*order}
    assert name(asked(3)) == order[3], "all are set aside"
    chooser.gone = {*order}
    assert asked(0).replicas == []


def test_while_the_replicas_that_have_failed_least_are_busy_the_others_are_asked() -> None:
    """None has served anything yet, as at the beginning of a run."""
    chooser, names = Chooser(), sorted(ROUND_TRIPS_S)
    for peer in names[2:]:
        with pytest.raises(Declined), chooser.trials.call(peer):
            raise Declined("not yet")
    assert {*chooser.pair(0, 0)} == {*names[:2]}
    assert {*chooser.pair(0, 0, busy=tuple(names[:2]))} <= {*names[2:]}
    assert len(chooser.pair(0, 0, busy=tuple(names[:2]))) == 2


def test_a_busy_replica_that_a_policy_names_is_asked_as_often_after_a_long_wait() -> None:
    """`balanced` skips one that is always Busy, but for a second only: with longer pauses the run stood still."""
    attempts = Attempts(True, frozenset(), busy={"A"}, failed={"A": 100.0}, busy_at=0.0, pause_s=0.1)
    attempts.begin_anew(100.1, free=False)
    assert (attempts.failed, attempts.pause_s) == ({"A": 100.0}, 0.1)


def test_a_wait_for_replicas_that_failed_is_polled_as_before() -> None:
    attempts = Attempts(True, frozenset(), busy_at=0.0, pause_s=0.4)
    attempts.begin_anew(100.0, free=True)
    assert attempts.pause_s == 0.5


def test_under_weighted_two_are_drawn_from_all() -> None:
    chooser = Chooser(0, "weighted")
    pairs = [chooser.pair(0, 0) for _ in range(50)]
    assert {len(pair) for pair in pairs} == {2}
    assert {len({*pair}) for pair in pairs} == {1, 2}, "the second may be the first"


@pytest.mark.parametrize("policy", ["fixed", "balanced"])
def test_replicas_that_nobody_has_met_yet_are_those_of_the_policy(policy: str) -> None:
    """Stage 1 began while this node was still loading: it never answered this node before the first microbatch."""

    async def scenario() -> None:
        manifest = RunManifest.model_validate({"routing": policy})
        me = Advert("me", manifest.run_id, 0, (), state="waiting")
        node = NodeState(me, manifest, NodeConfig(), cast(Any, SimpleNamespace(event=lambda *_, **__: None)))
        swarm = Membership(node)
        swarm.read([Advert(peer, manifest.run_id, 1, (), state="training") for peer in ("A", "B")])
        assert swarm.members.doubted() == {"A", "B"}
        swarm.fix_view()
        attempts = Attempts(True, frozenset())
        for index in range(PER_STEP):
            ReplicaChoice(node, swarm, MeasuredLine()).by_policy(
                Origin("me", 0, index), attempts, lambda _: Sending.ASKED
            )
        assert not attempts.fell_back

    virtual_time.run(scenario(), limit_s=10)
