"""A run with real weights in which one of four replicas of each stage sends false data (`support/attackers`)."""

from math import log

from attackers import train

from noloco_p2p.lab.experiments.training import BYTE_VOCABULARY


def test_a_liar_does_not_keep_the_others_from_learning() -> None:
    """If one of its vectors were merged, the replica's weights would become 500 times as large."""
    done, trace = train("vector-x1000", 1, 15, replicas=4)
    assert done.validation_loss < log(BYTE_VOCABULARY) - 0.5
    refused = [event for event in trace.of("distrusted") if event.get("result") == "refused"]
    assert {event.get("peer") for event in refused} == {"s0r3", "s1r3"}
