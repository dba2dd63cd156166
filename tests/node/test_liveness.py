"""Which peers are considered gone: silent and stuck ones, whatever the lines are, and no others."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from barriers import barrier
from soak import soak

from noloco_p2p.config import (
    DirectorySettings,
    EvaluationSettings,
    LimitSettings,
    NodeConfig,
    OuterSettings,
    RunManifest,
)
from noloco_p2p.core import wire
from noloco_p2p.core.line_rate import PART_BYTES
from noloco_p2p.core.members import Members
from noloco_p2p.core.messages import Activation, Advert, Gradient, MicrobatchId, PeerId, Progress
from noloco_p2p.errors import Busy, PeerError, Stalled, Unreachable
from noloco_p2p.node.pipeline.liveness import Liveness
from noloco_p2p.node.waits import Waits
from noloco_p2p.ports import ALONE, Claim
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.links import MEASURED, Access, Geography, Link, MessageSizes
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.telemetry import TraceEvent
from noloco_p2p.sim.transport import SimTransport
from noloco_p2p.sim.virtual_time import run
from noloco_p2p.sim.world import SimPlan, SimSwarm

MEGABIT = 1e6 / 8
BODY_BYTES = 2 << 20
"""More than one message: such a body is announced."""


def plan(
    replicas: tuple[int, ...], *, routing: str = "random", seed: int = 1, steps: int = 6, **settings: object
) -> SimPlan:
    manifest = RunManifest(
        stages=len(replicas),
        start_replicas=1,
        steps=steps,
        sequence_length=4,
        microbatch_size=1,
        microbatches_per_step=8,
        outer=OuterSettings(rule="noloco", pairing="none"),
        routing=routing,  # type: ignore[arg-type]
        seed=seed,
        evaluation=EvaluationSettings(every_steps=None, microbatches=2),
    )
    limits = LimitSettings(max_in_flight=8, linger_s=600.0, drain_s=600.0, microbatch_deadline_s=600.0)
    small = (8,) * len(replicas)
    sizes = MessageSizes(BODY_BYTES, BODY_BYTES, small, small, small, MEASURED)
    config = NodeConfig(limits=limits, directory=DirectorySettings(ttl_s=6.0), rebalance=False)
    return SimPlan(manifest, replicas, seed=seed, config=config, sizes=sizes, **settings)  # type: ignore[arg-type]


Calls = dict[tuple[str, object], list[float]]
"""(caller, callee) → when the caller sent activations to the callee."""


def called_at(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = {}
    propagate = SimTransport.propagate

    async def noted(self: SimTransport, peer: Advert, activation: Activation, claim: Claim = ALONE) -> Gradient:
        calls.setdefault((self._me, peer.peer_id), []).append(asyncio.get_running_loop().time())
        return await propagate(self, peer, activation, claim)

    monkeypatch.setattr(SimTransport, "propagate", noted)
    return calls


def stopped_at(calls: Calls, failure: TraceEvent, at_s: float) -> float:
    """When the failure could first be noticed: at the stop, or at the first call after it if none was in flight."""
    of_peer = [one for one in calls[failure.peer, failure.get("peer")] if one <= failure.at_s]
    in_flight = [one for one in of_peer if one <= at_s]
    later = [one for one in of_peer if one > at_s]
    return at_s if in_flight and failure.at_s - at_s < 5.0 else min(later, default=at_s)


def blamed(outcome: Outcome) -> Counter[str]:
    return Counter(str(event.get("peer")) for event in outcome.trace.of("reroute"))


LARGE_SEEDS = 16
"""With these seeds bodies are announced. With others they may be sent at once, as with AT_ONCE_SEEDS."""
LATE_SEED = 130
"""A step takes twenty times as long as the first: too little is known by then to find that unusual."""
AT_ONCE_SEEDS = (30, 37, 50, 56)
UNEVEN_SEED = 142
"""Under `fixed` one of two replicas gets all microbatches, and is soon ahead of their steps."""
IN_EVERY_RUN = {*range(4), LATE_SEED, *AT_ONCE_SEEDS, UNEVEN_SEED}


def drawn(seed: int) -> tuple[SimPlan, str]:
    """A healthy swarm on lines of 0.5 to 1,000 Mbit/s and 0 to 300 ms, and its description."""
    rng = random.Random(seed)
    replicas = rng.choice([(3, 3), (2, 2), (3, 1), (1, 2, 1), (2, 1, 2), (1, 1, 1, 1), (1,) * 8])
    mbit, latency_s = 10 ** rng.uniform(-0.3, 3), rng.choice([0.0, 0.01, 0.05, 0.3, rng.uniform(0, 0.3)])
    routing, shared = rng.choice(["random", "weighted", "balanced", "fixed"]), rng.choice([False, True])
    rate = mbit * MEGABIT
    body = int(max(1.2 * wire.PACK_BYTES, rate * 10 ** rng.uniform(-1, 1)))
    if seed >= LARGE_SEEDS:
        body = rng.randint(PART_BYTES, wire.PACK_BYTES)
    small = (max(8, int(rate * rng.uniform(0.1, 3))),) * len(replicas)
    geography = Geography(
        Link(latency_s, rng.choice([0.0, 0.3]), None if shared else rate), Access(rate, rate) if shared else Access()
    )
    outer = OuterSettings(rule="noloco", pairing="none")
    if rng.random() < 0.5:
        outer = OuterSettings(rule="noloco", inner_steps=1, overlap=rng.random() < 0.5)
    found = plan(
        replicas,
        routing=routing,
        seed=seed,
        steps=2,
        geography=geography,
        costs=Costs(*(10 ** rng.uniform(-3, 0),) * 2, spread=rng.choice([0.0, 0.3])),
    )
    manifest = found.manifest.model_copy(update={"outer": outer, "microbatches_per_step": rng.choice([1, 2, 4, 8])})
    limits = found.config.limits.model_copy(update={"max_in_flight": rng.choice([1, 2, 8, 64])})
    words = (
        f"{replicas} {routing} {mbit:.3g} Mbit/s {'a node' if shared else 'a pair'}, {latency_s:.3g} s, {body} bytes"
    )
    config = found.config.model_copy(update={"limits": limits})
    sizes = MessageSizes(body, body, small, small, small, MEASURED)
    return replace(found, manifest=manifest, config=config, sizes=sizes), words


@pytest.mark.parametrize(
    "seed", [*sorted(IN_EVERY_RUN), *soak(sorted({*range(LARGE_SEEDS), *range(100, 150)} - IN_EVERY_RUN))]
)
def test_without_faults_nobody_is_set_aside_and_nothing_is_sent_twice(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    aside: list[tuple[str, str]] = []
    found, words = drawn(seed)
    swarm = SimSwarm(found)

    def failed(self: Members, peer: PeerId, *, now: float, answered: bool = False) -> None:
        if swarm.process(peer).running:
            aside.append((self._me, peer))

    monkeypatch.setattr(Members, "failed", failed)
    outcome = swarm.run(limit_s=1_000_000)
    assert not blamed(outcome), words
    assert not aside, words
    for node in outcome.of_stage(0):
        assert (node.state, node.microbatches["dropped"]) == ("left", 0), words
    kinds = list(swarm.network.traffic.byte_counts().values())
    bodies = [counts for one in kinds for kind, counts in one.items() if kind in ("activation", "gradient")]
    assert sum(counts.sent for counts in bodies) > 0
    if found.manifest.outer.pairing == "none":
        # Before a round for which a replica waits, its waiting line is flushed, even calls whose body is arriving.
        assert sum(counts.lost for counts in bodies) == 0, words


@pytest.mark.parametrize("seed", [0, *soak([1])])
def test_a_stuck_device_is_left_by_its_callers_alone(seed: int) -> None:
    """The process continues and answers, but its device completes nothing any more."""
    swarm = SimSwarm(plan((2, 2, 2), seed=seed, steps=60, link=Link(0.005), costs=Costs(spread=0.2)))
    swarm.at(10.0, lambda: swarm.slow("s2r0", 1e9))
    swarm.at(60.0, lambda: swarm.crash("s2r0"))
    outcome = swarm.run(limit_s=2000)
    assert set(blamed(outcome)) == {"s2r0"}
    first = min(event.at_s for event in outcome.trace.of("reroute"))
    assert first < 10.0 + 13.0, "five silences of 2 s, and the time between two questions"
    for node in outcome.of_stage(0):
        assert (node.state, node.microbatches["dropped"]) == ("left", 0), node.peer


def test_a_stuck_device_gets_no_further_when_one_of_its_callers_gives_up() -> None:
    """A cancelled operation is no progress: all callers leave the device as soon as the first one does."""
    swarm = SimSwarm(plan((2, 2, 2), seed=0, steps=32, link=Link(0.005), costs=Costs(spread=0.2)))
    swarm.at(10.0, lambda: swarm.slow("s1r0", 1e9))
    swarm.at(80.0, lambda: swarm.crash("s1r0"))
    outcome = swarm.run(limit_s=2000)
    assert set(blamed(outcome)) == {"s1r0"}
    for node in outcome.of_stage(0):
        steps = [event.at_s for event in outcome.trace.of("inner_step", node.peer)]
        stall_s = max(later - earlier for earlier, later in pairwise(steps))
        assert stall_s < 13.0, "five silences of 2 s, and the time between two questions"


@pytest.mark.parametrize("stages", [8, *soak([3])])
def test_a_stopped_last_stage_is_found_by_its_caller_alone_and_within_five_seconds(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    found_s, calls = [], called_at(monkeypatch)
    for seed in range(2):
        replicas = (*(1,) * (stages - 1), 2)
        swarm = SimSwarm(
            plan(
                replicas,
                routing="balanced",
                seed=seed,
                steps=20,
                link=Link(0.02, bytes_per_s=25e6),
                costs=Costs(0.01, 0.02),
            )
        )
        last, at_s = f"s{stages - 1}r0", 3.0 + 0.31 * seed
        swarm.at(at_s, lambda swarm=swarm, last=last: swarm.network.block(barrier("hang", last)))  # type: ignore[misc]
        swarm.at(90.0, lambda swarm=swarm, last=last: swarm.crash(last))  # type: ignore[misc]
        outcome = swarm.run(limit_s=4000)
        of_others = [
            event for event in outcome.trace.of("reroute") if event.peer != last and event.get("reason") != "fallback"
        ]
        assert {(event.peer, event.get("peer")) for event in of_others} == {(f"s{stages - 2}r0", last)}
        found_s.append(of_others[0].at_s - stopped_at(calls, of_others[0], at_s))
    assert max(found_s) < 5.0, found_s


def test_a_peer_that_claims_any_progress_leaves_its_callers_report_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Liveness, "events", lambda *_: 2**64 - 1)
    swarm = SimSwarm(plan((1, 1, 1), link=Link(0.05), costs=Costs(0.3, 0.3)))
    seen: list[Progress] = []

    def look() -> None:
        node = swarm.process("s1r0").node
        incarnation = swarm.process("s0r0").node._incarnation
        asked = [MicrobatchId("s0r0", incarnation, counter) for counter in range(50)]
        seen.extend(report for report in node.handler.progress("s0r0", asked) if report is not None)

    for at_s in (2.0, 2.5, 3.0):
        swarm.at(at_s, look)
    outcome = swarm.run(limit_s=2000)
    assert seen
    assert all(0 <= report.events < wire.REPLYING for report in seen)
    assert not blamed(outcome)


class _PeerThatGetsOn:
    """Answers each request after half a second, with more progress than before."""

    def __init__(self) -> None:
        self._events = 0

    async def progress(self, peer: Advert, microbatches: list[MicrobatchId], timeout_s: float) -> list[Progress]:
        await asyncio.sleep(0.5)
        self._events += 1
        return [Progress(self._events, 0.0) for _ in microbatches]


def test_a_call_that_is_just_ending_leaves_the_others_what_their_peer_has_said() -> None:
    """The second answer, at 2.5 s, arrives when the time of one call has run out, but not that of the other."""
    peer = Advert("s1r0", "run", 1, ("s1r0",), microbatches_per_s=1.0)

    async def reply(after_s: float) -> str:
        try:
            await asyncio.sleep(after_s)
            return "gradient"
        finally:
            await asyncio.sleep(0)  # as over gRPC, where a call finishes what it has begun

    async def main() -> list[object]:
        node: Any = SimpleNamespace(
            now=asyncio.get_running_loop().time,
            config=NodeConfig(limits=LimitSettings(patience_floor_s=2.0)),
            waits=Waits(),
        )
        transport: Any = _PeerThatGetsOn()
        liveness = Liveness(node, transport)
        calls = [
            liveness.watched(peer, MicrobatchId("s0r0", 1, counter), longest_s, reply(4.0), lambda: None)
            for counter, longest_s in enumerate((2.5, 2.7))
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    ended, gradient = run(main())
    assert isinstance(ended, Stalled)
    assert gradient == "gradient"


FLOOR_S = 2.0
"""A peer is asked every second."""
Answer = Callable[[str, int, float], Progress | None]
"""What a peer says at a time about the microbatch with this counter."""


class _Peers:
    """Peers that answer at once, and note what they were asked."""

    def __init__(self, answer: Answer, *, takes_s: float = 0.0) -> None:
        self._answer, self._takes_s = answer, takes_s
        self.asked: list[tuple[float, str, list[int]]] = []
        self.limits_s: list[float] = []
        self.progressed: list[tuple[int, float]] = []
        """(Microbatch, when a call of it was told of progress.)"""

    async def progress(self, peer: Advert, microbatches: list[MicrobatchId], timeout_s: float) -> list[Progress | None]:
        now = asyncio.get_running_loop().time()
        counters = [microbatch.counter for microbatch in microbatches]
        self.asked.append((round(now, 3), peer.peer_id, counters))
        self.limits_s.append(timeout_s)
        await asyncio.sleep(self._takes_s)
        return [self._answer(peer.peer_id, counter, now) for counter in counters]


Watched = tuple[str, float, float, float]
"""(peer, when a call begins, its longest time without progress, when its reply comes)."""


def ends(peers: _Peers, *calls: Watched, rate: float = 1.0, then_s: float = 0.0) -> list[tuple[str, float]]:
    """How each call ends, and when; the microbatches are numbered in this order."""

    async def main() -> list[tuple[str, float]]:
        now = asyncio.get_running_loop().time
        config = NodeConfig(limits=LimitSettings(patience_floor_s=FLOOR_S))
        node: Any = SimpleNamespace(now=now, config=config, waits=Waits())
        transport: Any = peers
        liveness = Liveness(node, transport)

        async def one(counter: int, peer: str, begins_s: float, longest_s: float, reply_s: float) -> tuple[str, float]:
            advert = Advert(peer, "run", 1, (peer,), microbatches_per_s=rate)
            await asyncio.sleep(begins_s)
            reply, id = asyncio.sleep(reply_s - now(), "gradient"), MicrobatchId("s0r0", 1, counter)
            progressed = lambda: peers.progressed.append((counter, round(now(), 3)))  # noqa: E731
            try:
                return await liveness.watched(advert, id, longest_s, reply, progressed), round(now(), 3)
            except PeerError as error:
                return str(error), round(now(), 3)

        found = await asyncio.gather(*(one(counter, *call) for counter, call in enumerate(calls)))
        await asyncio.sleep(max(0.001, then_s))
        assert liveness._tick.cancelled(), "no timer is left"
        assert not liveness._asking, "and no question is open"
        return list(found)

    return run(main())


def _says(progress: Progress | None) -> Answer:
    return lambda *_: progress


def _fails(error: PeerError) -> Answer:
    def answer(*_: object) -> Progress:
        raise error

    return answer


GETS_ON: Answer = lambda peer, counter, now: Progress(int(now), 0.0)  # noqa: E731
SILENT = "s1r0 does not report progress: gone"
LOST = "s1r0 does not have microbatch 0"
STALLED = "s1r0 made no progress for 40 s", 40.0
STUCK = "the device of s1r0 has completed nothing for 12 s"


@pytest.mark.parametrize(
    ("answer", "rate", "ended"),
    [
        (GETS_ON, 1.0, ("gradient", 60.0)),
        (_says(Progress(7, 0.0)), 1.0, STALLED),
        (lambda peer, counter, now: Progress(7 + (now > 10.0), 0.0), 1.0, (STALLED[0], 51.0)),
        (_says(Progress(7, 12.0)), 100.0, (STUCK, 1.0)),
        (_says(Progress(7, 9.5)), 100.0, STALLED),
        (_says(Progress(7, 12.0)), 1.0, STALLED),
        (_says(Progress(7, 12.0)), 0.0, STALLED),
        (_says(None), 1.0, (LOST, 32.0)),
        (lambda peer, counter, now: Progress(int(now), 0.0) if 20 < now < 22 else None, 1.0, STALLED),
        (_fails(Unreachable("gone")), 1.0, (SILENT, 1.0)),
        (_fails(Busy("full")), 1.0, STALLED),
    ],
    ids=[
        "gets on",
        "stands still",
        "stands still later",
        "stuck",
        "slow",
        "slow device",
        "speed unknown",
        "lost",
        "late",
        "silent",
        "busy",
    ],
)
def test_a_call_lasts_as_long_as_its_peer_makes_progress(answer: Answer, rate: float, ended: tuple[str, float]) -> None:
    longest_s = 40.0
    assert ends(_Peers(answer), ("s1r0", 0.0, longest_s, 60.0), rate=rate) == [ended]


def test_a_header_behind_calls_that_make_progress_is_not_lost() -> None:
    behind = lambda peer, counter, now: None if counter else Progress(int(now), 0.0)  # noqa: E731
    calls = [("s1r0", 0.0, 10.0, 60.0), ("s1r0", 0.0, 10.0, 60.0)]
    assert ends(_Peers(behind), *calls) == [("gradient", 60.0)] * 2
    stands = lambda peer, counter, now: None if counter else Progress(7, 0.0)  # noqa: E731
    why = "s1r0 made no progress for 10 s"
    assert ends(_Peers(stands), *calls) == [(why, 10.0), (why, 11.0)], "it is heard of once, at 1.0 s"
    rarely = lambda peer, counter, now: None if counter else Progress(int(now / 20), 0.0)  # noqa: E731
    peers = _Peers(rarely)
    assert ends(peers, *(("s1r0", 0.0, 100.0, 70.0),) * 2) == [("gradient", 70.0)] * 2
    assert peers.progressed == [(1, 1.0), *((counter, at_s) for at_s in (20.0, 40.0, 60.0) for counter in (0, 1))]


def test_a_peer_that_falls_silent_as_one_of_its_calls_ends_fails_the_others() -> None:
    peers = _Peers(_fails(Unreachable("gone")), takes_s=1.4)
    calls = [("s1r0", 0.0, 40.0, 1.5), ("s1r0", 0.0, 40.0, 60.0)]
    assert ends(peers, *calls) == [("gradient", 1.5), (SILENT, 2.4)]


def test_a_call_that_ends_while_its_peer_is_asked_leaves_the_others_their_progress() -> None:
    peers = _Peers(GETS_ON, takes_s=1.4)
    assert ends(peers, ("s1r0", 0.0, 5.0, 3.5), ("s1r0", 0.0, 5.0, 20.5)) == [("gradient", 3.5), ("gradient", 20.5)]
    assert ends(peers, ("s1r0", 0.0, 5.0, 1.5)) == [("gradient", 1.5)]


def test_the_progress_with_a_microbatch_is_that_of_all_its_calls() -> None:
    """It may be offered to two replicas; what they report is reported to the stage before."""

    async def main() -> None:
        config = NodeConfig(limits=LimitSettings(patience_floor_s=FLOOR_S))
        node: Any = SimpleNamespace(now=asyncio.get_running_loop().time, config=config, waits=Waits())
        liveness = Liveness(node, cast(Any, _Peers(GETS_ON)))
        ids = [MicrobatchId("s0r0", 1, counter) for counter in range(2)]

        async def call(peer: str, id: MicrobatchId) -> None:
            await liveness.watched(Advert(peer, "run", 1, (peer,)), id, 9.0, asyncio.sleep(6.0), lambda: None)

        calls = [asyncio.create_task(call(*one)) for one in (("s1r0", ids[0]), ("s1r1", ids[0]), ("s1r0", ids[1]))]
        await asyncio.sleep(0.5)
        assert [liveness.events(id) for id in ids] == [0, 0], "nothing is known yet"
        await asyncio.sleep(3.0)
        assert [liveness.events(id) for id in ids] == [6, 3]
        await asyncio.wait(calls)
        assert liveness.events(ids[0]) == 0

    run(main())


def test_each_peer_is_asked_about_its_own_calls_that_have_lasted_for_a_while() -> None:
    peers = _Peers(GETS_ON)
    calls = [("s1r0", 0.0, 9.0, 3.5), ("s1r1", 0.7, 9.0, 3.5), ("s1r0", 1.5, 9.0, 2.5)]
    assert [found for found, _ in ends(peers, *calls, then_s=9.0)] == ["gradient"] * 3
    assert peers.asked == [
        (1.0, "s1r0", [0]),
        (2.0, "s1r0", [0, 2]),
        (2.0, "s1r1", [1]),
        (3.0, "s1r0", [0]),
        (3.0, "s1r1", [1]),
    ], "and nobody is asked after the last call has ended"


def test_a_peer_is_not_asked_again_before_it_has_answered() -> None:
    peers = _Peers(GETS_ON, takes_s=1.4)
    ends(peers, ("s1r0", 0.0, 9.0, 60.5))
    assert [at_s for at_s, _, _ in peers.asked] == [float(second) for second in range(1, 60, 2)]
    assert peers.limits_s[0] == FLOOR_S
    assert peers.limits_s[-1] > FLOOR_S, "it is known that answers take long"
