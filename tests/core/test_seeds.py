"""Generators depend only on (seed, purpose)."""

import os
import subprocess
import sys

import pytest

from noloco_p2p.core.seeds import generator


def test_the_first_draws_are_pinned_and_independent_of_the_hash_seed() -> None:
    program = "from noloco_p2p.core.seeds import generator; print(generator(7, 'a', 1).getrandbits(64))"
    drawn = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert drawn == {f"{generator(7, 'a', 1).getrandbits(64)}\n"} == {"8728731100850801467\n"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab",), ("a", "b")),
        ((1,), ("1",)),
        ((1, 2), (12,)),
        (("a,b",), ("a", "b")),
        (('a","b',), ("a", "b")),
        ((), ("",)),
    ],
)
def test_different_purposes_have_different_generators(one: tuple[str | int, ...], other: tuple[str | int, ...]) -> None:
    assert generator(0, *one).getrandbits(64) == generator(0, *one).getrandbits(64)
    assert generator(0, *one).getrandbits(64) != generator(0, *other).getrandbits(64)
    assert generator(0, *one).getrandbits(64) != generator(1, *one).getrandbits(64)
