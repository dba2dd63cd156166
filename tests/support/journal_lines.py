"""Lines of a node's journal, for the tests of the report."""

import json

BEGAN_AT = 1_800_000_000.0


def line(event: str, up_s: float, **fields: object) -> bytes:
    """A line of a process that started at BEGAN_AT."""
    return json.dumps({"time": BEGAN_AT + up_s, "event": event, "up_s": up_s, **fields}).encode() + b"\n"
