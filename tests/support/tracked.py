"""Reads a directory as TensorBoard does."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_back(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag → points (step, value), in the order in which they were written."""
    found = EventAccumulator(str(directory), purge_orphaned_data=False)
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
