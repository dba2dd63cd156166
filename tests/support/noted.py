"""Adds a note to a failure's message."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to whatever is raised inside the `with`, such as the seed and the command that repeats the failure."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise
