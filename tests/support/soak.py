"""Marks cases for the long run only, `pytest -m soak`: further seeds and combinations of what a test covers already."""

from collections.abc import Iterable
from typing import Any

import pytest


def soak(cases: Iterable[object]) -> list[Any]:
    """These cases of a parametrised test; a case with several parameters is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]
