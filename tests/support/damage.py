"""What hypothesis makes of the content of a file or message: cut off, overwritten, or with other values in its JSON."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
NESTED = b"[" * 200_000
"""Deeper than Python's parser goes: an example of its own wherever damaged content is read, because it takes long."""


def damaged(valid: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, and those of a valid content with damage of every kind."""
    cut = st.integers(0, len(valid)).map(lambda end: valid[:end])
    patched = st.builds(_patched, st.just(valid), st.integers(0, len(valid)), st.binary(max_size=9))
    kinds = [st.binary(max_size=300), cut, patched, JSON.map(_written)]
    try:
        found = json.loads(valid)
    except ValueError:
        return st.one_of(kinds)
    places = st.sampled_from([*_places(found)])
    return st.one_of([*kinds, st.builds(_replaced, st.just(valid), places, JSON)])


def _written(value: object) -> bytes:
    return json.dumps(value).encode()


def _patched(valid: bytes, at: int, put: bytes) -> bytes:
    return valid[:at] + put + valid[at + len(put) :]


def _replaced(valid: bytes, place: tuple[Any, ...], value: object) -> bytes:
    found = json.loads(valid)
    holder = found
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return _written(found)


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values inside objects and lists."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield *above, key
        yield from _places(value[key], (*above, key))
