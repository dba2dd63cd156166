"""Runs with real weights in which one replica of each stage lies (`support/attackers`)."""

import re
from functools import cache
from math import log

import pytest
from attackers import Result, train
from soak import soak

from noloco_p2p.lab.experiments.training import BYTE_VOCABULARY

SHORT, WHOLE = (15, 4), (60, 8)
"""(steps, replicas of each stage); the table "What liars cost" of METHOD.md is about WHOLE."""


@cache
def honest(attack: str, size: tuple[int, int]) -> Result:
    """The same run, in which nobody lies."""
    return train(re.sub(r"^[^*/%+@]+", "none", attack), 1, *size)


def test_a_liar_does_not_keep_the_others_from_learning() -> None:
    """If one of its vectors were merged, the replica's weights would become 500 times as large."""
    result = train("vector-x1000", 1, *SHORT)
    assert result.loss < log(BYTE_VOCABULARY) - 0.5
    refused = [event for event in result.trace.of("distrusted") if event.get("result") == "refused"]
    assert {event.get("peer") for event in refused} == {"s0r3", "s1r3"}


def test_false_losses_change_no_weights_and_only_what_is_said_of_evaluations_by_the_liar() -> None:
    result = train("losses-x1000", 1, *SHORT)
    assert result.loss == honest("losses-x1000", SHORT).loss
    assert len([loss for loss in result.said if loss > log(BYTE_VOCABULARY)]) == 1


@pytest.mark.parametrize(
    ("attack", "size", "percent"),
    [
        ("busy", SHORT, 2.0),
        *soak([("labels-x1000", SHORT, 2.0)]),
        *soak(
            (attack, WHOLE, percent)
            for attack, percent in {
                "silence+long": 2.0,
                "busy": 2.0,
                "busy%balanced+long": 3.0,
                "labels-x1000": 2.0,
                "labels-x1000%balanced": 4.0,
                "rounds-x1000": 2.0,
                "speeds-x1000%weighted": 2.0,
                "holds-x1000@restart": 2.0,
                "tokens-still": 2.0,
                "gradient-flip": 3.0,
                "hidden-x1000": 2.0,
                "hidden-bias": 2.0,
                "hidden-1e38": 2.5,
                "hidden-nan": 2.5,
                "hidden-noise": 4.0,
                "hidden-still": 4.0,
                "hidden-flip": 7.0,
                "vector-spikes/gossip": 2.0,
                "vector-spikes*2/gossip": 2.0,
            }.items()
        ),
    ],
)
def test_a_lie_costs_little(attack: str, size: tuple[int, int], percent: float) -> None:
    assert train(attack, 1, *size).loss < (1 + percent / 100) * honest(attack, size).loss


@pytest.mark.soak
def test_a_liar_that_goes_as_far_as_it_may_does_not_drive_the_others_apart() -> None:
    """It drags whoever meets it away from the others. The next partners must not take that for the usual distance."""
    attack = "vector-far/gossip"
    assert train(attack, 1, *WHOLE).loss < honest(attack, WHOLE).loss + 0.1
