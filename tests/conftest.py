"""Hooks for the whole suite."""

import gc


def pytest_collection_finish() -> None:
    """Exempt the 570,000 objects that collection imported from garbage collection, which took 12 % of a simulation."""
    gc.collect()
    gc.freeze()
