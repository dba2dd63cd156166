"""The evaluation at the end of a run: later stages stay as long as it takes, and it ends soon if they are gone."""

from functools import cache, partial

from short_runs import manifest_for

from noloco_p2p.config import EvaluationSettings, LimitSettings, NodeConfig
from noloco_p2p.core.timeouts import DESCRIBE_S
from noloco_p2p.node.directory_loop import RENEWALS_PER_TTL
from noloco_p2p.node.shutdown import EVALUATIONS_AT_ONCE
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import SimPlan, SimSwarm

LINGER_S = 10.0
ORIGINS, LATER = ("s0r0", "s0r1"), ("s1r0", "s1r1")


def swarm(linger_s: float = LINGER_S) -> SimSwarm:
    """Each origin evaluates for about four times LINGER_S."""
    manifest = manifest_for((2, 2), steps=8, evaluation=EvaluationSettings(every_steps=None, microbatches=40))
    limits = LimitSettings(patience_floor_s=0.6, linger_s=linger_s, drain_s=5.0)
    return SimSwarm(SimPlan(manifest, (2, 2), seed=1, config=NodeConfig(limits=limits), costs=Costs(forward_s=1.0)))


@cache
def undisturbed() -> Outcome:
    return swarm().run(limit_s=1_000.0)


def trained_at(outcome: Outcome) -> float:
    """When stage 0 took its last step."""
    return max(event.at_s for peer in ORIGINS for event in outcome.trace.of("inner_step", peer))


def test_later_stages_stay_while_held_out_microbatches_come() -> None:
    outcome = undisturbed()
    for origin in ORIGINS:
        (evaluation,) = outcome.trace.of("evaluation", origin)
        assert evaluation.at_s > trained_at(outcome) + 2 * LINGER_S
    assert not outcome.trace.of("warning", "s0r0")
    for process in outcome.processes:
        assert process.ended_at_s is not None
        assert process.ended_at_s < max(outcome.trace.of("evaluation", one)[0].at_s for one in ORIGINS) + LINGER_S


def test_later_stages_leave_soon_when_those_that_evaluate_are_gone() -> None:
    """Their adverts say otherwise until they expire, because the last advert of a node may not arrive everywhere."""
    disturbed, crash_s = swarm(linger_s=600.0), trained_at(undisturbed()) + LINGER_S
    for peer in ORIGINS:
        disturbed.at(crash_s, partial(disturbed.crash, peer))
    outcome = disturbed.run(limit_s=1_000.0, tolerate=True)
    ttl_s, refresh_s = NodeConfig().directory.ttl_s, NodeConfig().directory.refresh_s
    for process in outcome.processes:
        if process.peer in LATER:
            assert process.ended_at_s is not None
            soon_s = ttl_s / RENEWALS_PER_TTL + refresh_s + DESCRIBE_S
            assert process.ended_at_s < crash_s + soon_s < crash_s + ttl_s


def test_an_evaluation_is_given_up_when_nobody_can_answer_it_any_more() -> None:
    """No node returns after the end of a run. Otherwise the evaluation would wait `limits.microbatch_deadline_s`."""
    disturbed, crash_s = swarm(), trained_at(undisturbed()) + LINGER_S
    for peer in LATER:
        disturbed.at(crash_s, partial(disturbed.crash, peer))
    outcome = disturbed.run(limit_s=1_000.0, tolerate=True)
    for origin in ORIGINS:
        assert not outcome.trace.of("evaluation", origin)
        warnings = [str(e.get("message")) for e in outcome.trace.of("warning", origin)]
        lost = [w for w in warnings if w.startswith("a held-out microbatch was not evaluated: no replica of stage 1")]
        assert 1 <= len(lost) <= EVALUATIONS_AT_ONCE, warnings
        [ended_at_s] = [process.ended_at_s for process in outcome.processes if process.peer == origin]
        assert ended_at_s is not None
        assert ended_at_s < crash_s + 60.0, "an advert's life and three times LINGER_S"
