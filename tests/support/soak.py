"""Cases that only the long run tries, `pytest -m soak`: further seeds and combinations of what a test tries already."""

from collections.abc import Iterable
from typing import Any

import pytest


def soak(cases: Iterable[object]) -> list[Any]:
    """These cases of a parametrised test; one of several parameters is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]
