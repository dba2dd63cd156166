"""Which counted ids a replica remembers, and for how long."""

from noloco_p2p.core.messages import MicrobatchId
from noloco_p2p.core.spent_ids import SPENT_IDS, SPENT_STEPS, SpentIds


def test_ids_of_the_last_steps_are_all_remembered_however_many_they_are() -> None:
    spent, steps = SpentIds(), SPENT_STEPS + 3
    ids = [[MicrobatchId(f"p{n}", 1, step) for n in range(SPENT_IDS)] for step in range(steps)]
    for mine in ids:
        assert all(map(spent.spend, mine))
        spent.end_step()
    kept = [one for mine in ids[-(SPENT_STEPS - 1) :] for one in mine]
    assert list(spent.ended()) == kept, "and no older ones, so that the memory is bounded"
    assert not any(map(spent.spend, [one for mine in ids[-2:] for one in mine]))
