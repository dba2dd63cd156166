"""How far away a partner's vector may be: the radius, what is clipped, what is refused."""

from math import inf, nan

import pytest

from noloco_p2p.core.guard import (
    FEWEST,
    LARGEST_NORM,
    LIMIT,
    NORMS_KEPT,
    RADIUS,
    REFUSED,
    WINDOW,
    NormClip,
    PairDistances,
    factors,
    limits,
    moved_by,
)
from noloco_p2p.core.guard import group_of as group
from noloco_p2p.core.messages import TensorSpec


def usual(*distances: tuple[float, ...], learning_rate: float = 1.0) -> PairDistances:
    pairs = PairDistances()
    for distance in distances:
        pairs.observe(distance, learning_rate)
    return pairs


def test_the_radius_is_a_multiple_of_the_lower_quartile_and_follows_the_learning_rate() -> None:
    pairs = usual((2.0, 10.0), (1.0, 30.0), (900.0, 20.0), (3.0, 40.0), learning_rate=0.5)
    assert pairs.radii(0.5) == (2 * RADIUS, 20 * RADIUS)
    assert pairs.radii(1.0) == (4 * RADIUS, 40 * RADIUS)
    assert pairs.radii(0.1) == (2 * RADIUS, 20 * RADIUS), "what came before fades with the rounds, not at once"


def test_only_the_last_distances_count() -> None:
    pairs = usual(*[(0.1,)] * WINDOW)
    for _ in range(WINDOW):
        pairs.observe((1.0,), 0.25)
    assert pairs.radii(0.25) == (RADIUS,)
    assert pairs.radii(1.0) == (4 * RADIUS,)


def test_few_distances_or_no_learning_rate_tell_nothing() -> None:
    assert usual(*[(1.0,)] * (FEWEST - 1)).radii(1.0) == ()
    assert usual(*[(1.0,)] * FEWEST, learning_rate=0.0).radii(1.0) == ()


def test_slow_weights_may_be_as_far_apart_as_the_momentum_can_move_them() -> None:
    """Under `averaged`, φ is equal at first and after a round with the partner. δ moves it by up to δ / (1 − α)."""
    pairs = usual((0.0, 1.0, 2.0, 3.0), (0.0, 2.0, 2.0, 3.0), (1.0, 3.0, 2.0, 3.0))
    assert pairs.radii(1.0) == (0.0, 1 * RADIUS, 2 * RADIUS, 3 * RADIUS)
    assert moved_by(pairs.radii(1.0), 2.0) == (4 * RADIUS, 6 * RADIUS, 2 * RADIUS, 3 * RADIUS)
    assert moved_by((9.0, 1.0), 2.0) == (9.0, 1.0), "and further, if that is usual"
    assert moved_by((), 2.0) == ()


def test_a_far_vector_is_clipped_to_the_radius_and_one_much_too_far_is_refused() -> None:
    assert factors((1.0, 2.0), (2.0, 2.0)) == (1.0, 1.0)
    assert factors((1.0, 4.0), (2.0, 2.0)) == (1.0, 0.5)
    assert factors((2 * REFUSED,), (2.0,)) == (1 / REFUSED,)
    for far in (3 * REFUSED, 1e38, inf, nan):
        assert factors((1.0, far), (2.0, 2.0)) is None
    assert factors((1.0, 2.0 * REFUSED), (2.0, 1.0)) == (1.0, 1 / (2 * REFUSED)), "one small group alone is clipped"
    for distances, radii in (((9 * REFUSED, 1.0), (1.0, inf)), ((1.0, inf), (1.0, inf)), ((1.0, nan), (1.0, inf))):
        assert factors(distances, radii) is None, "an unknown radius hides nothing"
    assert factors((1.0, 9.0), (2.0, inf)) == (1.0, 1.0)
    assert factors((9.0,), (inf,)) == (1.0,)


def test_a_single_value_is_limited_where_the_usual_size_is_known() -> None:
    assert limits((3.0, 0.0)) == (3 * LIMIT, inf)
    assert limits(()) == ()


def test_one_liar_of_eight_moves_no_radius() -> None:
    """A replica that moved half of the way to a liar is further from its next partners, and so are other victims."""
    pairs = usual(*[(RADIUS,), (RADIUS / 2,), (RADIUS / 4,), (1.0,), (RADIUS / 2,), (1.0,), (1.0,)] * 8)
    assert pairs.radii(1.0) == (RADIUS,)


def test_the_radius_grows_if_all_partners_are_far_away() -> None:
    """As after a partition: the merged vectors are clipped at first, but soon no longer."""
    pairs, rounds = usual(*[(1.0,)] * 16), 0
    while (found := factors((30.0,), pairs.radii(1.0))) != (1.0,):
        assert found is not None, "it is never refused"
        pairs.observe((min(30.0, *pairs.radii(1.0)),), 1.0)
        rounds += 1
    assert rounds <= 20


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.3.mlp.up_proj.weight", (4, 4), "model.layers.3"),
        ("transformer.h.11.attn.c_attn.weight", (4, 4), "transformer.h.11"),
        ("lm_head.weight", (4, 4), "lm_head.weight"),
        ("model.layers.3.input_layernorm.weight", (4,), "vectors"),
        ("model.norm.weight", (4,), "vectors"),
    ],
)
def test_groups(name: str, shape: tuple[int, ...], expected: str) -> None:
    assert group(TensorSpec(name, "float32", shape)) == expected


@pytest.mark.parametrize("unit", [1.0, 2.0**-20])
def test_a_gradient_is_clipped_to_a_multiple_of_the_median_norm(unit: float) -> None:
    clip = NormClip()
    assert [clip.factor(1e6)] + [clip.factor(2 * unit) for _ in range(NORMS_KEPT)] == [1.0] * (NORMS_KEPT + 1)
    assert clip.factor(LARGEST_NORM * 2 * unit) == 1.0
    assert clip.factor(LARGEST_NORM * 8 * unit) == 0.25
    for _ in range(NORMS_KEPT // 3):
        clip.factor(1e9)
    for _ in range(NORMS_KEPT):
        clip.factor(0.0)
    assert clip.factor(LARGEST_NORM * 2 * unit) == 1.0, "neither a few large ones nor any zeros move the median"


def test_norms_that_all_grow_are_followed() -> None:
    clip = NormClip()
    for norm in [1.0] * NORMS_KEPT + [50.0] * (3 * NORMS_KEPT):
        found = clip.factor(norm)
    assert found == 1.0
