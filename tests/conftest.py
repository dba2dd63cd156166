"""Hooks for the whole suite."""

import gc

from hypothesis import HealthCheck, settings

# How long an example takes says nothing: the machine does other things meanwhile.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Exempt the 570,000 objects that collection imported from garbage collection, which took 12 % of a simulation."""
    gc.collect()
    gc.freeze()
