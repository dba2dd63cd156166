"""The owner's hours: across midnight, in several spans, and when the clocks change."""

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from noloco_p2p.config import LimitSettings
from noloco_p2p.core.hours import closed_until

MIDNIGHT = datetime(2026, 1, 1)


def at(time: str) -> datetime:
    return MIDNIGHT.replace(hour=int(time[:2]), minute=int(time[3:]))


@pytest.mark.parametrize(
    ("spans", "time", "until"),
    [
        ("", "12:00", None),
        ("22:00-07:00", "21:59", "22:00"),
        ("22:00-07:00", "22:00", None),
        ("22:00-07:00", "00:00", None),
        ("22:00-07:00", "06:59", None),
        ("22:00-07:00", "07:00", "22:00"),
        ("08:00-24:00", "23:59", None),
        ("08:00-24:00", "00:00", "08:00"),
        ("12:00-13:00 22:00-07:00", "07:30", "12:00"),
        ("12:00-13:00 22:00-07:00", "12:30", None),
        ("12:00-13:00 22:00-07:00", "13:00", "22:00"),
        ("06:00-07:00 08:00-09:00", "23:00", "06:00"),
        ("00:00-24:00", "00:00", None),
        ("09:00-09:00", "03:00", None),
    ],
)
def test_until_when_the_machine_belongs_to_its_owner(spans: str, time: str, until: str | None) -> None:
    assert closed_until(spans.split(), at(time)) == until


times = st.integers(0, 1439)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=4), times)
def test_the_span_that_is_announced_is_the_next_to_begin(ends: list[tuple[int, int]], minute: int) -> None:
    spans = ["-".join(f"{end // 60:02}:{end % 60:02}" for end in span) for span in ends]
    now = MIDNIGHT + timedelta(minutes=minute)
    until = closed_until(spans, now)
    if until is not None:
        while now.strftime("%H:%M") != until:
            assert closed_until(spans, now) == until
            now += timedelta(minutes=1)
        assert closed_until(spans, now) is None


@pytest.mark.parametrize(
    ("day", "span", "open_minutes"),
    [
        ((2026, 3, 29), "01:00-04:00", 120),  # the clock goes from 01:59 to 03:00
        ((2026, 10, 25), "01:00-04:00", 240),  # from 02:59 back to 02:00
        ((2026, 3, 29), "02:15-02:45", 0),  # this half hour does not exist on that day
        ((2026, 10, 25), "02:15-02:45", 60),  # and exists twice on this one
        ((2026, 3, 29), "22:00-02:30", 120 + 120),  # ends with the first minute after the skipped hour
        ((2026, 7, 1), "22:00-07:00", 540),
    ],
)
def test_hours_follow_the_wall_clock(day: tuple[int, int, int], span: str, open_minutes: int) -> None:
    zone = ZoneInfo("Europe/Berlin")
    begin, end = (datetime(*day, tzinfo=zone) + timedelta(days=days) for days in (0, 1))
    seconds = range(int(begin.timestamp()), int(end.timestamp()), 60)
    opened = sum(closed_until([span], datetime.fromtimestamp(second, zone)) is None for second in seconds)
    assert opened == open_minutes


def test_one_span_may_stand_without_a_list_and_nonsense_is_refused() -> None:
    assert LimitSettings.model_validate({"hours": "22:00-07:00"}).hours == ("22:00-07:00",)
    assert LimitSettings.model_validate({"hours": ["08:00-09:00", "22:00-24:00"]}).hours[1] == "22:00-24:00"
    for wrong in ("22-07", "22:00", "24:00-07:00", "22:00-24:01", "22:60-07:00", "22:00–07:00"):
        with pytest.raises(ValidationError):
            LimitSettings.model_validate({"hours": wrong})
