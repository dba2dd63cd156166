"""`Status` as the JSON of /status: flat, with the advert's fields next to the status's own. Input comes from strangers.

Unknown fields of later versions are ignored, and missing ones get their defaults. `health` is written but never read.
The target and purpose of a wait are words in JSON and values everywhere else; only this module parses the words.
"""

import json
import re
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from noloco_p2p.core import status as values
from noloco_p2p.core.members import STATES
from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import Status, Unknown, Wait
from noloco_p2p.errors import NO_JSON, Violation
from noloco_p2p.humanize import plain

LIMIT_BYTES = 4 * 1024 * 1024
"""Longest status accepted. A node that knows 256 others has one of 150 kB."""
ITEMS_LIMIT = 4_096
"""Most items of a list. If a node knows more other nodes, only the first ones are sent."""
LIST_LIMIT = 256
"""Most waits, calls and troubles that are sent; any beyond that are left out."""
FIELDS_LIMIT = 1_024
"""Most fields of an object: a run has no more stages."""
TEXT_LIMIT = 1_024
"""Most characters of a text. Longer texts are cut before sending, and refused on receipt."""
_line = partial(plain, most=TEXT_LIMIT)
_NUMBER_LIMIT = 2.0**63
_DEEPEST = 8

_PEER_ID = re.compile(r"12D3KooW[1-9A-Za-z]+")
"""An Ed25519 key in base58: every node has one."""
_N = "(0|[1-9][0-9]{0,17})"
_STAGE = re.compile(f"stage {_N}")
_MICROBATCH = re.compile(rf"(held-out )?microbatch {_N} of (\S+)")
_ROUND = re.compile(f"(asked for )?outer round {_N}")
_GUARDING = re.compile(f"guards stage {_N}")


@dataclass(frozen=True, slots=True)
class WaitInWords:
    """A `Wait` in its JSON form."""

    what: str
    whom: str
    since_s: float
    deadline_s: float | None
    why: str = ""
    idle: bool = False

    @classmethod
    def of(cls, wait: Wait) -> "WaitInWords":
        """Put a wait into words."""
        why = "" if wait.why is None else _line(str(wait.why))
        return cls(_line(wait.what), _line(str(wait.whom)), wait.since_s, wait.deadline_s, why, wait.idle)

    def read(self) -> Wait:
        """Parse the words back into a wait."""
        why = _purpose(self.why) if self.why else None
        return Wait(self.what, _target(self.whom), self.since_s, self.deadline_s, why, self.idle)


@dataclass(frozen=True, slots=True)
class _CallInWords:
    """A `Serving` in its JSON form."""

    caller: str
    why: str
    since_s: float


@dataclass(frozen=True, slots=True)
class _InWords:
    """The part of a status that consists of words in JSON and of values elsewhere."""

    waits: tuple[WaitInWords, ...] = ()
    serving: tuple[_CallInWords, ...] = ()


_RESOURCES, _TASKS = {each.value for each in values.Resource}, {each.value for each in values.Task}
_IN_WORDS = TypeAdapter(_InWords)
_STATUS = TypeAdapter(Status)
_ADVERT = TypeAdapter(Advert)
_NOT_SENT = "announced_at"
"""A field of adverts that only makes sense within one process."""
_WRITTEN_APART: Any = {"advert": True, "waits": True, "serving": True, "seen": {"__all__": {"advert": {_NOT_SENT}}}}
_ADVERT_FIELDS = frozenset(each.name for each in fields(Advert)) - {_NOT_SENT}


def encode(status: Status, health: str | None = None) -> bytes:
    """Encode a status. `health` is one line that says what is wrong, None if nothing is."""
    in_words = _InWords(
        tuple(WaitInWords.of(each) for each in status.waits[:LIST_LIMIT]),
        tuple(_CallInWords(each.caller, _line(str(each.why)), each.since_s) for each in status.serving[:LIST_LIMIT]),
    )
    said = [replace(each, name=_line(each.name), message=_line(each.message)) for each in status.troubles[:LIST_LIMIT]]
    status = replace(status, seen=status.seen[:ITEMS_LIMIT], troubles=tuple(said))
    parts = (
        json.dumps({"health": None if health is None else _line(health)}).encode(),
        _ADVERT.dump_json(status.advert, exclude={_NOT_SENT}),
        _IN_WORDS.dump_json(in_words),
        _STATUS.dump_json(status, exclude=_WRITTEN_APART),
    )
    return b"{" + b",".join(part[1:-1] for part in parts) + b"}"


def decode(content: bytes) -> Status:
    """Decode a status from another node. Raises Violation with one line that says what is wrong."""
    if len(content) > LIMIT_BYTES:
        raise Violation(f"status of {len(content)} bytes; at most {LIMIT_BYTES} are accepted")
    try:
        found = json.loads(content)
    except NO_JSON:
        raise Violation("status is not JSON") from None
    if not isinstance(found, dict):
        raise Violation("status is not a JSON object")
    _check(found, "status", 0)
    advert = {name: found.pop(name) for name in _ADVERT_FIELDS & found.keys()}
    apart = {name: found.pop(name) for name in {"waits", "serving"} & found.keys()}
    try:
        # From JSON, pydantic accepts lists as tuples and strings as keys of stages even in strict mode.
        status = _STATUS.validate_json(json.dumps(found | {"advert": advert}), strict=True)
        in_words = _IN_WORDS.validate_json(json.dumps(apart), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part != "advert")
        raise Violation(f"status whose {where[:100]} is not valid: {first['msg']}") from None
    for each in (status.advert, *(seen.advert for seen in status.seen)):
        if each.state not in STATES:
            raise Violation("status with an unknown state")
    serving = tuple(values.Serving(each.caller, _purpose(each.why), each.since_s) for each in in_words.serving)
    return replace(status, waits=tuple(each.read() for each in in_words.waits), serving=serving)


def _target(text: str) -> values.WaitTarget:
    """The target of a wait that these words name."""
    if text in _RESOURCES:
        return values.Resource(text)
    if found := _STAGE.fullmatch(text):
        return values.AnyReplica(int(found[1]))
    return text if _PEER_ID.fullmatch(text) else Unknown(text)


def _purpose(text: str) -> values.Purpose:
    """The purpose that these words name."""
    if found := _MICROBATCH.fullmatch(text):
        return values.ForMicrobatch(found[3], int(found[2]), held_out=found[1] is not None)
    if found := _ROUND.fullmatch(text):
        return values.ForRound(int(found[2]), asked=found[1] is not None)
    if found := _GUARDING.fullmatch(text):
        return values.ForGuarding(int(found[1]))
    return values.Task(text) if text in _TASKS else Unknown(text)


def _check(value: object, where: str, depth: int) -> None:
    """Raises Violation if a value is too long, too deep, not printable, or a number that is not finite or too large."""
    match value:
        case str() if len(value) > TEXT_LIMIT or not value.isprintable():
            raise Violation(f"status whose {where} is not short printable text")
        case int() | float() if not abs(value) < _NUMBER_LIMIT:
            raise Violation(f"status whose {where} is not a finite number below 2^63")
        case list() | dict() if depth >= _DEEPEST:
            raise Violation(f"status whose {where} is too deep")
        case list() | dict():
            most, what = (ITEMS_LIMIT, "items") if isinstance(value, list) else (FIELDS_LIMIT, "fields")
            if len(value) > most:
                raise Violation(f"status whose {where} has {len(value)} {what}; at most {most} are accepted")
            for name, each in value.items() if isinstance(value, dict) else ((where, each) for each in value):
                if len(name) > TEXT_LIMIT or not name.isprintable():
                    raise Violation(f"status with a name in {where} that is not short printable text")
                _check(each, name[:100], depth + 1)
