"""The answer of an experiment's report."""

from collections.abc import Sequence

from noloco_p2p.lab.experiments.spec import Block


def answer(blocks: Sequence[Block]) -> str:
    """The first block of a report, which is one sentence."""
    first = blocks[0]
    assert isinstance(first, str)
    assert "\n" not in first
    assert first.endswith(".")
    return first
