"""Which tensors of another replica's state a stage continues from."""

from contextlib import nullcontext

import pytest
import torch

from noloco_p2p.compute import replica_tensors
from noloco_p2p.core.messages import ReplicaState, TensorSpec
from noloco_p2p.errors import Violation

MOST, MOST_MEAN = 10.0, 3.0
KINDS = ("fast", "adam_mean", "adam_square")
EXPECTED = replica_tensors.specs(KINDS, [TensorSpec("w", "float64", (2,))])


@pytest.mark.parametrize(
    ("fast", "mean", "square", "refused"),
    [
        (10.0, 0.0, 0.0, ""),
        (-10.1, 0.0, 0.0, "has a value of 10.1 in fast/w; the limit is 10"),
        (0.0, 1e4, 1e9, ""),
        (0.0, -5.9, 1.0, ""),
        (0.0, -6.1, 1.0, "has means in adam_mean/w"),
        (0.0, 6.1, 1.0, "has means in adam_mean/w"),
        (0.0, 1e-19, 0.0, ""),
        (0.0, 1e-17, 0.0, "has means in adam_mean/w"),
        (0.0, 0.0, -1e-9, "is below zero in adam_square/w"),
    ],
)
def test_weights_are_bounded_and_means_go_with_their_squares(
    fast: float, mean: float, square: float, refused: str
) -> None:
    """A mean of gradients is at most `most_mean` times the root of their mean square, within a factor for rounding."""
    values = [torch.tensor([0.0, value], dtype=torch.float64) for value in (fast, mean, square)]
    kinds = {kind: {"w": value} for kind, value in zip(KINDS, values, strict=True)}
    state = ReplicaState("p", 0, 1, 1.0, 1, 1, replica_tensors.pack(kinds))
    with pytest.raises(Violation, match=refused) if refused else nullcontext():
        found = replica_tensors.unpack_state(state, 0, EXPECTED, MOST, MOST_MEAN)
        assert [found[kind]["w"].tolist() for kind in KINDS] == [value.tolist() for value in values]
