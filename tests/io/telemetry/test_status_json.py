"""/status as JSON: a status reads back the same at another node, and malformed ones are refused in one line."""

import contextlib
import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.config import MAX_LAYERS
from noloco_p2p.core.members import STATES
from noloco_p2p.core.messages import Advert, Holding
from noloco_p2p.core.status import (
    AnyReplica,
    ForGuarding,
    ForMicrobatch,
    ForRound,
    MicrobatchSize,
    NodeFigures,
    Purpose,
    Resource,
    SeenPeer,
    Serving,
    Status,
    Task,
    Trouble,
    Unknown,
    Wait,
    WaitTarget,
)
from noloco_p2p.errors import Violation
from noloco_p2p.io.telemetry import status_json

letters = st.characters(exclude_categories=("C", "Z")) | st.just(" ")
texts = st.text(letters, max_size=20)
counts = st.integers(0, 2**53)
numbers = st.floats(0, 2.0**62)
stages = st.integers(-1, 100)


def tuples_of(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(items, max_size=3).map(tuple)


def by_type(cls: type, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draws all fields of a class by their annotations, except those given as `special`."""
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: counts,
        float: numbers,
        str: texts,
        float | None: st.none() | numbers,
        int | None: st.none() | counts,
        str | None: st.none() | texts,
    }
    found = {each.name: special[each.name] if each.name in special else plain[each.type] for each in fields(cls)}
    return st.builds(cls, **found)


peers = st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabc", min_size=1, max_size=44).map("12D3KooW".__add__)
# Only words that this version does not know become an Unknown, here as in a status that a node reads.
other_targets = texts.map(status_json._target).filter(lambda target: isinstance(target, Unknown))
other_purposes = texts.map(status_json._purpose).filter(lambda purpose: isinstance(purpose, Unknown))
targets = st.one_of(peers, st.builds(AnyReplica, st.integers(0, 100)), st.sampled_from(Resource), other_targets)
purposes = st.one_of(
    st.builds(ForMicrobatch, peers, counts, st.booleans()),
    st.builds(ForRound, counts, st.booleans()),
    st.builds(ForGuarding, st.integers(0, 100)),
    st.sampled_from(Task),
    other_purposes.filter(lambda purpose: purpose != Unknown("")),
)
adverts = by_type(
    Advert,
    stage=stages,
    state=st.sampled_from(STATES),
    addresses=tuples_of(texts),
    holds=tuples_of(st.builds(Holding, stages, counts, counts, counts)),
    announced_at=st.just(0.0),
)
tallies = st.dictionaries(texts, counts, max_size=3)
figures = by_type(
    NodeFigures,
    rounds=tallies,
    microbatches=tallies,
    rerouted=tallies,
    distrusted=tallies,
    idle_s=st.dictionaries(texts, numbers, max_size=3),
)
statuses = by_type(
    Status,
    advert=adverts,
    waits=tuples_of(by_type(Wait, whom=targets, why=st.none() | purposes)),
    serving=tuples_of(by_type(Serving, why=purposes)),
    seen=tuples_of(by_type(SeenPeer, advert=adverts)),
    deserted=st.dictionaries(st.integers(0, 100), numbers, max_size=3),
    troubles=tuples_of(by_type(Trouble)),
    microbatch=st.none() | by_type(MicrobatchSize),
    figures=figures,
)

ME = Advert("12D3KooWme", "ab" * 32, 1, ("10.0.0.1:4102",), state="training", step=12.5, holds=(Holding(0, 3, 30),))
STATUS = Status(ME, "tiny", 2, 1000, 12, waits=(Wait("gradient", "12D3KooWyou", 1.5, 60.0, ForMicrobatch("X", 7)),))


NESTED: object = 1
for _ in range(30):
    NESTED = [NESTED]
WAIT = {"what": "gradient", "whom": "you", "since_s": 1.0, "deadline_s": None}


def spoilt(**changes: object) -> bytes:
    return json.dumps(json.loads(status_json.encode(STATUS)) | changes).encode()


@settings(max_examples=60)
@given(statuses, st.none() | texts)
def test_a_status_reads_back_the_same(status: Status, health: str | None) -> None:
    assert status_json.decode(status_json.encode(status, health)) == status


def test_the_json_is_flat_and_says_what_is_wrong() -> None:
    found = json.loads(status_json.encode(STATUS, "stage 0 has no replica"))
    assert found["health"] == "stage 0 has no replica"
    assert {"peer_id": "12D3KooWme", "state": "training", "stage": 1, "stages": 2, "inner_steps": 12}.items() <= (
        found.items()
    )
    assert found["waits"] == [
        {
            "what": "gradient",
            "whom": "12D3KooWyou",
            "since_s": 1.5,
            "deadline_s": 60.0,
            "why": "microbatch 7 of X",
            "idle": False,
        }
    ]
    assert json.loads(status_json.encode(STATUS))["health"] is None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("12D3KooWyou", "12D3KooWyou"),
        ("device", Resource.DEVICE),
        ("inner step", Resource.INNER_STEP),
        ("stage 12", AnyReplica(12)),
        *[
            (words, Unknown(words))
            for words in ("stage 01", "stage ²", "stage -1", "stage " + "9" * 99, "the moon", "")
        ],
    ],
)
def test_the_target_of_a_wait_is_parsed(words: str, value: WaitTarget) -> None:
    (wait,) = status_json.decode(spoilt(waits=[WAIT | {"whom": words}])).waits
    assert wait.whom == value
    assert json.loads(status_json.encode(replace(STATUS, waits=(wait,))))["waits"][0]["whom"] == words


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("microbatch 7 of X", ForMicrobatch("X", 7)),
        ("held-out microbatch 7 of X", ForMicrobatch("X", 7, held_out=True)),
        ("outer round 12", ForRound(12)),
        ("asked for outer round 12", ForRound(12, asked=True)),
        ("guards stage 3", ForGuarding(3)),
        ("for a newcomer", Task.NEWCOMER),
        ("", None),
        *[(words, Unknown(words)) for words in ("microbatch 07 of X", "microbatch 7 of ", "outer round", "a hobby")],
    ],
)
def test_the_purpose_of_a_wait_is_parsed(words: str, value: Purpose | None) -> None:
    (wait,) = status_json.decode(spoilt(waits=[WAIT | {"why": words}])).waits
    assert wait.why == value
    assert json.loads(status_json.encode(replace(STATUS, waits=(wait,))))["waits"][0]["why"] == words


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults() -> None:
    found = json.loads(status_json.encode(STATUS))
    more = found | {"humour": ["good"], "figures": found["figures"] | {"humour": 3}}
    assert status_json.decode(json.dumps(more).encode()) == STATUS
    for name in ("figures", "deserted", "libp2p_metrics", "step_took_s"):
        assert status_json.decode(json.dumps({n: v for n, v in found.items() if n != name}).encode()) == STATUS


def test_a_nodes_own_messages_are_encoded_acceptably_whatever_they_contain() -> None:
    """A message with line ends or control characters, or of any length, becomes one that is accepted."""
    trouble = Trouble("disk", "no space\nleft\x1b[2J" + "x" * 5000, 1.0)
    read = status_json.decode(status_json.encode(replace(STATUS, troubles=(trouble,) * 5000), "two\nlines"))
    assert len(read.troubles) == status_json.LIST_LIMIT
    assert read.troubles[0].message.startswith("no space left [2Jxxx")
    assert len(read.troubles[0].message) == status_json.TEXT_LIMIT


def test_a_run_of_1024_stages_may_have_lost_all_but_one() -> None:
    status = replace(STATUS, stages=MAX_LAYERS, deserted=dict.fromkeys(range(1, MAX_LAYERS), 3.0))
    assert status_json.decode(status_json.encode(status)) == status


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"step": 1' + b"0" * 5000 + b"}",
        b" " * (status_json.LIMIT_BYTES + 1),
        spoilt(step=float("nan")),
        spoilt(step=float("inf")),
        spoilt(step="12.5"),
        spoilt(step=True),
        spoilt(step=10**400),
        spoilt(inner_steps=1.5),
        spoilt(inner_steps=2**63),
        spoilt(peer_id=None),
        spoilt(peer_id="x" * 1025),
        spoilt(peer_id="a\x1b[2J"),
        spoilt(run_name="\u202eevil"),
        spoilt(state="flying"),
        spoilt(waits={}),
        spoilt(waits=[WAIT | {"since_s": float("nan")}]),
        spoilt(waits=[WAIT | {"deadline_s": -float("inf")}]),
        spoilt(waits=[WAIT | {"idle": 1}]),
        spoilt(waits=[{"what": "gradient"}]),
        spoilt(waits=[WAIT] * (status_json.ITEMS_LIMIT + 1)),
        spoilt(deserted={"one": 1.0}),
        spoilt(deserted={str(i): 1.0 for i in range(status_json.FIELDS_LIMIT + 1)}),
        spoilt(seen=[{"advert": {}, "aside_s": 0.0}]),
        spoilt(holds=[[1, 2]]),
        spoilt(figures={"up_s": "long"}),
        spoilt(anything=NESTED),
        spoilt(**{"a\nb": 1}),
    ],
    ids=range(32),
)
def test_a_malformed_status_is_refused_in_one_line(content: bytes) -> None:
    with pytest.raises(Violation) as refused:
        status_json.decode(content)
    line = str(refused.value)
    assert line.startswith("status")
    assert line.isprintable()
    assert len(line) < 300


@settings(max_examples=40)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_any_value_of_a_field_is_accepted_or_a_violation(value: object) -> None:
    """Whatever a field contains, the only error is a Violation."""
    for name in ("seen", "figures", "waits", "step", "deserted", "addresses"):
        with contextlib.suppress(Violation):
            assert isinstance(status_json.decode(spoilt(**{name: value})), Status)
