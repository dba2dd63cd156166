"""Real stages compare a partner's vector with their own: it is clipped, refused, or taken because they are outliers."""

from dataclasses import replace

import pytest
import torch
from stages import make_batch, make_label, make_manifest, make_stages, microbatch, run_microbatch

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.partner_guard import PartnerGuard
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core import guard
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, SnapshotRequest

RULES = ("noloco", "averaged", "gossip")


def replicas(rule: str, *peers: str) -> list[TorchStage]:
    """Replicas of the first stage of a run, each after a few steps on its own data."""
    found = []
    for seed, peer in enumerate(peers):
        stages = make_stages(make_manifest(dtype="float64", outer={"rule": rule, "codec": "full"}), peer)
        for step in range(3):
            run_microbatch(stages, make_batch(100 * seed + step), microbatch(step, peer))
            for stage in stages:
                stage.inner_step(make_label(step + 1, 1e-3))
        found.append(stages[0])
    return found


def pulled(
    stage: TorchStage, other: TorchStage, round: int, change: float | torch.Tensor = 0.0
) -> tuple[FrozenRound, PartnerVector]:
    """What `stage` decodes from the other's vector, after every value was moved by `change`."""
    mine, request = stage.snapshot(round, 0), SnapshotRequest(0)
    sent = other.encode(other.snapshot(round, 0), request, "me")
    vector = host_tensor.to_torch(sent.tensors[0]) + change
    return mine, stage.decode(
        mine, request, replace(sent, tensors=(host_tensor.from_torch("vector", vector), *sent.tensors[1:]))
    )


def values(found: PartnerVector | FrozenRound) -> torch.Tensor:
    return host_tensor.to_torch(found.vector)


def acquainted(stage: TorchStage, other: TorchStage) -> None:
    """Do rounds until the stage knows how far away others are. Both replicas train on."""
    for round in range(1, 5):
        mine, theirs = pulled(stage, other, round)
        assert theirs.verdict == ""
        stage.merge(mine, [theirs])
        for one in (stage, other):
            with torch.no_grad():
                for theta in one.parameters.values():
                    theta.add_(torch.randn(theta.shape, generator=torch.Generator().manual_seed(round)), alpha=1e-4)
    assert stage.snapshot(9, 0).radii


@pytest.mark.parametrize("rule", RULES)
def test_who_is_far_is_merged_as_if_it_were_at_the_radius(rule: str) -> None:
    stage, other = replicas(rule, "me", "other")
    acquainted(stage, other)
    _, usual = pulled(stage, other, 9)
    assert (usual.verdict, usual.factors) == ("", ())
    mine, far = pulled(stage, other, 9, 0.005)
    assert far.verdict == "clipped"
    assert min(far.factors) < 1
    assert far.apart == pytest.approx(tuple(map(min, far.apart, mine.radii)))
    unclipped = values(mine) + (values(usual) + 0.005 - values(mine))
    at = 0
    for part in range(len(far.factors) // len(stage.parameters)):
        for factor, theta in zip(far.factors[part * len(stage.parameters) :], stage.parameters.values(), strict=False):
            one = slice(at, at + theta.numel())
            expected = values(mine)[one] + factor * (unclipped - values(mine))[one]
            assert torch.allclose(values(far)[one], expected, rtol=0, atol=1e-15)
            at += theta.numel()
    assert at == len(values(mine))


def test_a_single_far_value_comes_no_further_than_the_limit_in_a_codec_with_bounds() -> None:
    stage, other = replicas("noloco", "me", "other")
    acquainted(stage, other)
    mine, theirs = pulled(stage, other, 9)
    assert (mine.limits, theirs.sizes) == ((), ())
    judge = PartnerGuard(stage._outer.parameters, 1).judge
    theirs = replace(theirs, distances=host_tensor.from_torch("distances", torch.zeros(1)))
    usual = judge(mine, theirs)
    assert (usual.verdict, usual.vector, usual.distances) == ("", theirs.vector, theirs.distances)
    limits = guard.limits([guard.RADIUS * size for size in usual.sizes])
    far = values(theirs).clone()
    far[7] += 0.9 * mine.radii[0]
    sent = replace(theirs, vector=host_tensor.from_torch("vector", far))
    assert judge(mine, sent).verdict == "", "nothing else finds it"
    found, before = judge(replace(mine, limits=limits), sent), values(theirs)
    assert (found.verdict, found.distances, found.factors) == ("clipped", None, ())
    assert float(values(found)[7] - values(mine)[7]) == pytest.approx(limits[0])
    assert torch.equal(values(found)[:7], before[:7])
    assert torch.equal(values(found)[8:], before[8:])
    assert found.limits[0] == limits[0]
    assert usual.apart[0] < found.apart[0] < 0.9 * mine.radii[0]
    assert values(sent)[7] == far[7], "what was sent is left as it was"
    assert judge(mine, replace(sent, vector=found.vector)).sizes == pytest.approx(found.sizes)


def test_a_vector_whose_single_values_are_too_far_counts_as_clipped_only_if_they_matter() -> None:
    """In an honest swarm of two replicas that train with Muon, a few values of one vector in ten were beyond the
    limit, and all of these vectors were reported as distrusted."""
    stage, other = replicas("noloco", "me", "other")
    acquainted(stage, other)
    mine, theirs = pulled(stage, other, 9)
    theirs = replace(theirs, distances=host_tensor.from_torch("distances", torch.zeros(1)))
    largest = float((values(theirs) - values(mine)).abs().max())
    for share, verdict in ((0.9, ""), (0.1, "clipped")):
        found = PartnerGuard(stage._outer.parameters, 1).judge(
            replace(mine, limits=(share * largest,) * len(mine.radii)), theirs
        )
        assert (found.verdict, found.distances) == (verdict, None)
        assert float((values(found) - values(mine)).abs().max()) == pytest.approx(share * largest)


def test_both_single_values_and_whole_groups_may_be_too_far() -> None:
    stage, other = replicas("noloco", "me", "other")
    acquainted(stage, other)
    mine, theirs = pulled(stage, other, 9, 0.005)
    unlimited = values(pulled(stage, other, 9)[1]) + 0.005 - values(mine)
    sent = host_tensor.from_torch("vector", values(mine) + unlimited)
    mine = replace(mine, limits=(0.004,) * len(mine.radii))
    judge = PartnerGuard(stage._outer.parameters, 1)
    found = judge.judge(mine, replace(theirs, vector=sent, distances=sent))
    assert found.apart == pytest.approx(mine.radii)
    assert judge._distances(values(mine), values(found)) == pytest.approx(mine.radii), "and no nearer"
    at = 0
    for factor, limit, theta in zip(found.factors, found.limits, stage.parameters.values(), strict=True):
        one = slice(at, at + theta.numel())
        expected = values(mine)[one] + factor * unlimited[one].clamp(-limit, limit)
        assert torch.allclose(values(found)[one], expected, rtol=0, atol=1e-15)
        at += theta.numel()


def test_a_value_out_of_all_proportion_is_not_made_acceptable_by_the_limit() -> None:
    stage, other = replicas("noloco", "me", "other")
    acquainted(stage, other)
    mine, theirs = pulled(stage, other, 9)
    limited = replace(mine, limits=(1e-3,) * len(mine.radii))
    for change in (1e3, 1e38):
        vector = host_tensor.from_torch("vector", values(theirs) + change)
        found = PartnerGuard(stage._outer.parameters, 1).judge(
            limited, replace(theirs, vector=vector, distances=vector)
        )
        assert (found.verdict, found.limits) == ("refused", ())


def test_slow_weights_may_be_as_far_as_the_momentum_that_moves_them_can_bring_them() -> None:
    """They begin equal, so their own distances say little in the first rounds."""
    stage, other = replicas("averaged", "me", "other")
    for round in range(1, 4):
        mine, theirs = pulled(stage, other, round)
        apart = theirs.apart
        assert not any(apart[: len(apart) // 2]) or round > 1, "the same initial weights"
        stage.merge(mine, [theirs])
    radii = stage.snapshot(4, 0).radii
    slow, momentum = radii[: len(radii) // 2], radii[len(radii) // 2 :]
    assert all(one >= 2 * other > 0 for one, other in zip(slow, momentum, strict=True)), "α is ½"


@pytest.mark.parametrize("rule", RULES)
def test_what_is_out_of_all_proportion_is_refused_from_the_first_round_on(rule: str) -> None:
    stage, other = replicas(rule, "me", "other")
    for _ in range(2):
        for change in (1e3, 1e38, -1e38, 1e308):
            assert pulled(stage, other, 9, change)[1].verdict == "refused"
        acquainted(stage, other)


def test_two_that_agree_with_each_other_but_not_with_this_replica_are_taken() -> None:
    stage, other, third = replicas("noloco", "me", "other", "third")
    acquainted(third, other)
    acquainted(stage, other)
    assert pulled(stage, other, 9, 0.08)[1].verdict == "refused"
    assert pulled(stage, other, 9, 0.08)[1].verdict == "refused", "the same peer again is no confirmation"
    mine, found = pulled(stage, third, 9, 0.08)
    assert (found.verdict, found.factors, found.apart) == ("outlier", (), ())
    before = mine.radii
    stage.merge(mine, [found])
    assert stage.snapshot(10, 0).radii == before


def test_two_that_differ_or_lead_far_away_are_refused_however_often_they_come() -> None:
    stage, other, third = replicas("noloco", "me", "other", "third")
    acquainted(stage, other)
    change = torch.full((stage.state.parameters,), 0.08, dtype=torch.float64)
    in_part = change.clone()
    in_part[len(in_part) // 2 :] *= -1
    for one, others in [(change, in_part), (1000 * change, 1000 * change)] * 2:
        assert pulled(stage, other, 9, one)[1].verdict == "refused"
        assert pulled(stage, third, 9, others)[1].verdict == "refused"


def test_two_far_vectors_with_an_ordinary_one_between_them_are_no_pair() -> None:
    stage, other, third = replicas("noloco", "me", "other", "third")
    acquainted(stage, other)
    verdicts = [
        pulled(stage, one, 9, change)[1].verdict for one, change in [(other, 0.08), (other, 0.0), (third, 0.08)]
    ]
    assert verdicts == ["refused", "", "refused"]


def test_other_weights_begin_anew() -> None:
    stage, other = replicas("noloco", "me", "other")
    acquainted(stage, other)
    stage.restore(other.capture(9, 0.0, 3))
    assert stage.snapshot(9, 0).radii == ()


def test_a_group_of_unknown_usual_distance_is_judged_by_its_norm_and_the_others_by_theirs() -> None:
    stage, other = replicas("noloco", "me", "other")
    acquainted(stage, other)
    mine, theirs = pulled(stage, other, 9)
    assert min(theirs.apart) > 0
    radii = (0.0, *(0.9 * distance for distance in theirs.apart[1:]))
    found = PartnerGuard(stage._outer.parameters, 1).judge(replace(mine, radii=radii), theirs)
    assert (found.verdict, found.apart) == ("clipped", (theirs.apart[0], *radii[1:]))


def test_a_group_without_any_usual_distance_is_clipped_to_half_of_its_norm() -> None:
    stage, other = replicas("noloco", "me", "other")
    mine, theirs = pulled(stage, other, 1)
    assert mine.radii == ()
    judge = PartnerGuard(stage._outer.parameters, 1)
    norms = judge._distances(values(mine), None)
    found = judge.judge(mine, replace(theirs, vector=host_tensor.from_torch("vector", 2.25 * values(mine))))
    assert found.verdict == "clipped"
    assert found.apart == pytest.approx([guard.UNKNOWN * norm for norm in norms])
    assert torch.allclose(values(found), (1 + guard.UNKNOWN) * values(mine))


def test_a_usual_distance_is_accepted_however_short_the_own_vector_is_and_so_is_none() -> None:
    stage, other = replicas("noloco", "me", "other")
    mine, theirs = pulled(stage, other, 1)
    theirs = replace(theirs, distances=host_tensor.from_torch("distances", torch.zeros(1)))
    judge = PartnerGuard(stage._outer.parameters, 1)
    distances = judge._distances(values(mine), 3 * values(mine))
    far = replace(theirs, vector=host_tensor.from_torch("vector", 3 * values(mine)))
    assert judge.judge(replace(mine, radii=distances), far).verdict == ""
    same = judge.judge(mine, replace(theirs, vector=mine.vector))
    assert (same.verdict, sum(same.apart), sum(same.sizes)) == ("", 0.0, 0.0)


@pytest.mark.parametrize(("change", "verdict"), [(0.01, ""), (1e30, "refused")])
def test_a_group_that_is_zero_hides_nothing_out_of_all_proportion(change: float, verdict: str) -> None:
    """Some families begin with zeros, and a newcomer may reach its first round before it has served a microbatch."""
    stage, other = replicas("gossip", "me", "other")
    mine, _ = pulled(stage, other, 1)
    size = next(iter(stage.parameters.values())).numel()
    own, sent = values(mine).clone(), values(mine).clone()
    own[:size], sent[:size] = 0.0, change
    mine = replace(mine, vector=host_tensor.from_torch("vector", own))
    _, theirs = pulled(stage, other, 1)
    found = PartnerGuard(stage._outer.parameters, 1).judge(
        mine, replace(theirs, vector=host_tensor.from_torch("vector", sent))
    )
    assert found.verdict == verdict


@pytest.mark.parametrize("rule", RULES)
def test_a_vector_with_the_other_sign_is_refused_from_the_first_round_on(rule: str) -> None:
    stage, other = replicas(rule, "me", "other")
    mine, request = stage.snapshot(1, 0), SnapshotRequest(0)
    sent = other.encode(other.snapshot(1, 0), request, "me")
    flipped = host_tensor.from_torch("vector", -host_tensor.to_torch(sent.tensors[0]))
    assert stage.decode(mine, request, replace(sent, tensors=(flipped, sent.tensors[1]))).verdict == "refused"
