"""Numbers, sizes and times in readable form."""

from math import nan

import pytest

from noloco_p2p import humanize

PEER = "12D3KooW" + 39 * "x" + "S1R0x"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([humanize.compact(n) for n in (0, 12.345, 840, 999, 999.9, 1234)], ["0", "12.3", "840", "999", "1k", "1.23k"]),
        ([humanize.compact(n) for n in (12_345, 4.1e6, 9.996e11, 2e12)], ["12.3k", "4.1M", "1T", "2T"]),
        ([humanize.compact(n) for n in (10**400, nan, None)], ["0", "0", "0"]),
        ([humanize.compact(12_345, 4), humanize.compact(-12_345)], ["12.35k", "-12.3k"]),
        ([humanize.size_text(n) for n in (0, 999, 1_234_567)], ["0 B", "999 B", "1.23 MB"]),
        ([humanize.count(12_345.4), humanize.loss(1.23456), humanize.loss(None)], ["12,345", "1.2346", "–"]),
        ([humanize.figure(n) for n in (0.012345, 12_345.6, 1e9, None)], ["0.0123", "12,346", "1e+09", "–"]),
        ([humanize.figure(n, 2) for n in (9.96, 99.7, 140.2)], ["10", "100", "140"]),
        ([humanize.figure(n, 2) for n in (-3.21e-5, 1e-6, 9e-7, 0.0)], ["-0.000032", "0.000001", "9e-07", "0"]),
        ([humanize.percent(n) for n in (0.1234, None)], ["12.3 %", "–"]),
        ([humanize.duration(s) for s in (0.01234, 59.4, 83.0, 3599.6)], ["0.0123 s", "59.4 s", "1 min 23 s", "1 h"]),
        ([humanize.duration(s) for s in (7261.0, 7 * 86_400.0 + 3_600)], ["2 h 1 min", "7 d 1 h"]),
        ([humanize.elapsed(s) for s in (0.44, 42.3, 130.0, 7300.0, 1e6)], ["0.4 s", "42 s", "2 min", "2 h", "12 d"]),
        ([humanize.elapsed(s) for s in (-1.0, nan, None)], ["0.0 s", "0.0 s", "0.0 s"]),
        ([humanize.clock(0.0), humanize.clock(1e300)], ["1970-01-01 00:00:00", "–"]),
        ([humanize.plural(n, "node") for n in (1, 3, 2000)], ["1 node", "3 nodes", "2,000 nodes"]),
        ([humanize.tally({"a": 3, "b": 0, "c": 1_117}), humanize.tally({})], ["3 a, 1,117 c", "–"]),
        ([humanize.short_id(PEER), humanize.short_id("12D3x")], ["12D3…S1R0x", "12D3x"]),
    ],
)  # fmt: skip
def test_numbers_sizes_and_times_are_readable(written: list[str], expected: list[str]) -> None:
    assert written == expected


@pytest.mark.parametrize(
    "text", ["\x1b]0;mine\x07\x1b[2J", "a\nb\rc\td", "\u202egnp.exe", "\x9b31m", "\u2028", "\ud800"]
)
def test_plain_text_is_one_line_without_control_characters(text: str) -> None:
    shown = humanize.plain(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert shown.split() == "".join(c if c.isprintable() else " " for c in text).split()


def test_plain_lines_keep_line_ends_but_no_control_characters() -> None:
    assert humanize.plain_lines("a\tb\n\x1b[2Jc\rd\x08\u202e é") == "a\tb\n [2Jc d   é"


def test_plain_text_is_bounded_and_otherwise_unchanged() -> None:
    assert humanize.plain("größer – ok") == "größer – ok"
    assert humanize.plain("x" * 200, 100) == "x" * 99 + "…"
