"""The mapping of bounded size."""

from noloco_p2p.core.recent import Recent


def test_the_entries_that_were_set_last_are_kept() -> None:
    recent = Recent[str, int](2)
    recent["a"], recent["b"] = 1, 2
    recent["a"] = 3
    recent["c"] = 4
    assert list(recent.items()) == [("a", 3), ("c", 4)]
    assert recent.get("b") is None
