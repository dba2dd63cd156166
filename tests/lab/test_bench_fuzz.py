"""A short `noloco bench fuzz`: nothing that a stranger sends makes a node raise, hang or grow."""

import random

from noloco_p2p.lab.bench import fuzz
from noloco_p2p.launch.progress_line import ProgressLine


def test_random_messages_do_no_harm() -> None:
    figures = fuzz.run(line := ProgressLine(), 400, seed=1)
    assert figures["sent"] == 400
    assert line.text().startswith("sending, ")
    assert figures["crashes"] == 0
    assert figures["answers"] > 0, "some messages reach our code"
    assert figures["grown_mib"] < 64


def test_equal_seeds_give_equal_messages_and_few_are_unchanged() -> None:
    made = [[fuzz.mutated(random.Random(seed), b"x" * 64) for seed in range(200)] for _ in range(2)]
    assert made[0] == made[1]
    assert 0 < made[0].count(b"x" * 64) < 100
    assert max(map(len, made[0])) <= 2048
