"""What a failure is to say besides its message."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to whatever is raised inside of the `with`, such as the seed and the command that repeats it."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise
