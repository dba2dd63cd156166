"""One replica of four that sends what is not so, at both stages, in a run with real weights (`support/attackers`)."""

from math import log

from attackers import train

from noloco_p2p.lab.experiments.training import BYTE_VOCABULARY


def test_a_liar_does_not_keep_the_others_from_learning() -> None:
    """Merged, one of its vectors would make a replica's weights 500 times as large."""
    done, trace = train("vector-x1000", 1, 15, replicas=4)
    assert done.validation_loss < log(BYTE_VOCABULARY) - 0.5
    refused = [event for event in trace.of("distrusted") if event.get("result") == "refused"]
    assert {event.get("peer") for event in refused} == {"s0r3", "s1r3"}
