"""The data pipeline: shifted targets, every token once, a held-out part, exact resumption, clear errors."""

import asyncio
import bz2
import errno
import gzip
import itertools
import json
import logging
import os
import subprocess
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow
import pytest
from pyarrow import parquet
from row_files import PACKED, ROWS_OF_TEXT, write_ids, write_rows, write_text
from soak import soak
from tokenizer_files import save_tokenizer

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Batch, HostTensor
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data import corpora, hub_corpora, samples, tokenizers
from noloco_p2p.io.data.threaded_batches import READ_AHEAD, ThreadedBatches, make_batches

Numbers = npt.NDArray[np.int64]


LINES = 16
"""Lines per block of compressed text."""


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_corpora, "BLOCK_LINES", LINES)


def array(tensor: HostTensor) -> Numbers:
    dtype = {"int32": "<i4", "uint8": "u1"}[tensor.dtype]
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape).astype(np.int64)


def manifest(kind: str, **changes: object) -> RunManifest:
    small = {"sequence_length": 16, "microbatch_size": 3, "data": {"kind": kind}, "evaluation": {"microbatches": 2}}
    return RunManifest.model_validate(small | changes)


def write_packed(folder: Path) -> tuple[str, ...]:
    """Two files of 60 blocks."""
    for i, pack in enumerate((gzip, bz2)):
        lines = [f"<{i}:{n:05}>\n" for n in range(60 * LINES)]
        (folder / f"{i}.txt.{('gz', 'bz2')[i]}").write_bytes(pack.compress("".join(lines).encode()))
    return (str(folder / "*.txt.*"),)


def write_c4(folder: Path) -> tuple[str, ...]:
    for shard in range(2):
        with gzip.open(folder / f"c4-train.0000{shard}-of-00002.json.gz", "wt") as file:
            for i in range(200):
                row = {"text": f"é{shard}:{i} " * 8, "timestamp": "2019-04-25T12:57:54Z", "url": "http://example.org"}
                file.write(json.dumps(row) + "\n")
    return (str(folder / "c4-*.json.gz"),)


def nothing(folder: Path) -> tuple[str, ...]:
    return ()


KINDS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "stdlib": nothing,
    "text": write_text,
    "text packed": write_packed,
    "c4": write_c4,
    "parquet": partial(write_ids, "parquet"),
}


@pytest.fixture(params=sorted(KINDS))
def kind_and_files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, tuple[str, ...]]:
    return request.param.split()[0], KINDS[request.param](tmp_path)


def read(batches: ThreadedBatches, count: int) -> list[Batch]:
    async def collect() -> list[Batch]:
        return [await batches.next() for _ in range(count)]

    return asyncio.run(collect())


def values(batch: Batch) -> tuple[bytes, bytes, bytes]:
    return bytes(batch.inputs.data), bytes(batch.targets.data), bytes(batch.mask.data) if batch.mask else b""


def test_targets_are_the_inputs_shifted_by_one(kind_and_files: tuple[str, tuple[str, ...]]) -> None:
    kind, files = kind_and_files
    batches = make_batches(manifest(kind), NodeConfig(data_files=files), "peer")
    for batch in [*read(batches, 5), *batches.validation()]:
        assert batch.inputs.spec == ("inputs", "int32", (3, 16))
        assert batch.targets.spec == ("targets", "int32", (3, 16))
        inputs, targets = array(batch.inputs), array(batch.targets)
        if kind == "parquet":
            assert batch.mask is not None
            assert batch.mask.spec == ("mask", "uint8", (3, 16))
            mask = array(batch.mask)
            assert np.array_equal(targets[:, :-1] == -100, mask[:, 1:] == 0)
            assert (mask[:, 1:] == 0).any()
            assert (targets != -100).any(axis=1).all()
        else:
            assert batch.mask is None
        counted = targets[:, :-1] != -100
        assert np.array_equal(inputs[:, 1:][counted], targets[:, :-1][counted])
    batches.close()


@pytest.mark.parametrize("stop", [290, *soak([1, 7])])
def test_a_cursor_resumes_bitwise(kind_and_files: tuple[str, tuple[str, ...]], stop: int) -> None:
    """290 microbatches are more than one pass over each of the small corpora."""
    kind, files = kind_and_files
    config = NodeConfig(data_files=files)
    whole = make_batches(manifest(kind), config, "peer")
    expected = [values(batch) for batch in read(whole, stop + 40)]
    first = make_batches(manifest(kind), config, "peer")
    assert [values(batch) for batch in read(first, stop)] == expected[:stop]
    cursor = json.loads(json.dumps(first.cursor))
    rest = make_batches(manifest(kind), config, "peer", cursor)
    assert rest.cursor == cursor
    assert [values(batch) for batch in read(rest, 40)] == expected[stop:]
    for batches in (whole, first, rest):
        batches.close()


def test_the_cursor_does_not_count_what_is_read_ahead(kind_and_files: tuple[str, tuple[str, ...]]) -> None:
    """A checkpoint reads the cursor right after `next`, however far ahead the reading thread is."""
    kind, files = kind_and_files
    config = NodeConfig(data_files=files)
    batches = make_batches(manifest(kind), config, "peer")
    fresh = batches.cursor
    cursors = []
    for _ in range(6):
        read(batches, 1)
        deadline = time.monotonic() + 20.0
        while not all(each.done() for each in batches._ahead) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [each.done() for each in batches._ahead] == [True] * READ_AHEAD
        cursors.append(batches.cursor)
    batches.close()
    one_by_one, expected = make_batches(manifest(kind), config, "peer"), []
    for _, place in itertools.islice(one_by_one._items, 6):
        expected.append({"units": fresh["units"], **place._asdict()})
    assert cursors == expected
    assert fresh not in cursors
    assert batches.cursor == cursors[-1], "closing does not move the cursor"


def test_peers_read_different_streams_and_the_same_validation(kind_and_files: tuple[str, tuple[str, ...]]) -> None:
    kind, files = kind_and_files
    a, b = (make_batches(manifest(kind), NodeConfig(data_files=files), peer) for peer in ("a", "b"))
    assert {values(batch) for batch in read(a, 10)}.isdisjoint(values(batch) for batch in read(b, 10))
    held_out = [values(batch) for batch in a.validation()]
    assert len(held_out) == 2
    assert held_out == [values(batch) for batch in b.validation()] == [values(batch) for batch in a.validation()]
    a.close()
    b.close()


def one_pass(kind: str, files: tuple[str, ...]) -> tuple[bytes, bytes]:
    """All text of one pass and all held-out text of a text corpus, ids decoded to bytes and EOS to a line end."""
    corpus: corpora.Corpus
    tokenizer = tokenizers.BYTES
    if kind in ("c4", "rows"):
        corpus = hub_corpora.text_corpus(manifest("c4" if kind == "c4" else "text").data, files, tokenizer)
    else:
        found = corpora.file_corpus(corpora.matching_files(files), tokenizer) if files else None
        corpus = found or corpora.stdlib_corpus(tokenizer)

    def text(documents: Iterator[corpora.TokenizedDocument]) -> bytes:
        ids = np.concatenate([document.ids for document in documents])
        return np.where(ids == 1, 10, ids - 3).astype(np.uint8).tobytes()

    every = (corpus.documents(unit, 0, lambda: True) for unit in range(corpus.units))
    return text(itertools.chain.from_iterable(every)), text(corpus.held_out())


def test_a_file_is_held_out_by_the_checksum_of_its_relative_path(tmp_path: Path) -> None:
    trained, held_out = one_pass("text", write_text(tmp_path))
    for i in range(120):
        text = b"<%03d>" % i * (20 + i % 7) + b"\n"
        is_held_out = zlib.crc32(b"%03d.txt" % i) % 50 == 0
        assert (text in held_out, text in trained) == (is_held_out, not is_held_out), i
    assert held_out


def test_the_held_out_sample_is_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "PIECE_BYTES", 64)
    monkeypatch.setattr(samples, "VALIDATION_TOKENS", 1)
    for letter in "ab":
        (tmp_path / letter).write_text(letter * 64 * 3_000)  # 60 pieces of each are held out, and about 24 are read
    settings = manifest("text", evaluation={"microbatches": 16})
    found = b"".join(
        values(batch)[1]
        for batch in make_batches(settings, NodeConfig(data_files=(str(tmp_path / "*"),)), "").validation()
    )
    ids = np.frombuffer(found, np.int32)
    assert 0.2 < np.mean(ids == ord("b") + 3) < 0.8


def test_files_of_equal_names_in_several_folders_are_all_read(tmp_path: Path) -> None:
    for folder in "abc":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    found = corpora.matching_files(
        (*(str(tmp_path / folder / "*.txt") for folder in "abc"), f"{tmp_path}/a/../b/x.txt")
    )
    assert [found[name].read_text() for name in sorted(found)] == ["a", "b", "c"]
    assert next(iter(found)) == "x.txt"


def test_a_file_that_two_globs_match_is_read_once(tmp_path: Path) -> None:
    """It had two names, `sub/x.txt` and `x.txt`, of which one could be held out and the other trained on."""
    (tmp_path / "sub").mkdir()
    for name in ("x.txt", "sub/x.txt", "sub/y.txt"):
        (tmp_path / name).touch()
    found = corpora.matching_files((f"{tmp_path}/**/*.txt", f"{tmp_path}/sub/*.txt", f"{tmp_path}/sub/../sub/y.txt"))
    assert sorted(found) == ["sub/x.txt", "sub/y.txt", "x.txt"]


def test_a_file_that_a_glob_also_matches_through_a_link_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real/x.txt").touch()
    assert [*corpora.matching_files((f"{tmp_path}/real/*.txt", f"{tmp_path}/link/*.txt"))] == ["x.txt"]


def test_a_file_may_be_named_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "[v1]").mkdir()
    path = tmp_path / "[v1]" / "a?.txt"
    path.touch()
    assert corpora.matching_files((str(path),)) == {"a?.txt": path}


def test_rows_may_be_in_files_and_folders_named_like_globs(tmp_path: Path) -> None:
    """`[1].jsonl` was "empty", and `a*.jsonl` stood for all files that it matches: the held-out part was trained on."""
    (tmp_path / "[v1]").mkdir()
    for name in ("[1].jsonl", "a*.jsonl", "ab-validation.jsonl"):
        (tmp_path / "[v1]" / name).write_text("".join(json.dumps({"text": f"{name} {i} "}) + "\n" for i in range(60)))
    trained, held_out = one_pass("rows", (f"{tmp_path}/[[]v1]/*",))
    assert [trained.count(name) for name in (b"[1]", b"a*", b"ab-")] == [60, 60, 0]
    assert held_out.count(b"ab-") == len(held_out.splitlines()) == 60


def test_a_file_may_have_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    """It was held out, or not, by the checksum of its name, and a name in Latin-1 has no UTF-8."""
    for name in (b"M\xfcller.txt", b"b.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(name * 9_000)
    trained, held_out = one_pass("text", (str(tmp_path / "*.txt"),))
    assert trained.count(b"M\xfcller.txt") > 7_000
    assert held_out


def test_packed_text_is_read_whole_in_blocks_of_lines(tmp_path: Path) -> None:
    trained, held_out = one_pass("rows", write_packed(tmp_path))
    lines = {text.encode() for i in range(2) for n in range(60 * LINES) if (text := f"<{i}:{n:05}>")}
    assert set(trained.split()) | set(held_out.split()) == lines
    assert len(trained.split()) + len(held_out.split()) == len(lines)
    assert held_out.count(b"\n\n") == len(held_out.split()) // LINES > 0, "an end of text after each block"


@pytest.mark.parametrize("kind", ROWS_OF_TEXT)
def test_rows_of_text_are_read_from_files_of_many_kinds(kind: str, tmp_path: Path) -> None:
    files = write_rows(kind, tmp_path)
    trained, held_out = one_pass("rows", files)
    texts = [f"é{part}:{i}, ".encode() * 8 for part in range(2) for i in range(200)]
    out = held_out.splitlines()
    assert 1 <= len(out) <= 30
    assert trained.splitlines() == [text for text in texts if text not in out]
    batches = make_batches(manifest("text"), NodeConfig(data_files=files), "peer")
    assert values(read(batches, 1)[0])
    batches.close()
    paths = sorted(tmp_path.glob(files[0].removeprefix(f"{tmp_path}/")))
    every = [document.ids for path in paths for document in hub_corpora.documents_of(path, tokenizers.BYTES)]
    assert sum(map(len, every)) == sum(len(text) + 1 for text in texts), "noloco eval reads all of them"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_columns_that_are_not_read_may_differ_from_file_to_file(kind: str, tmp_path: Path) -> None:
    """The node stopped when it came to the second file: b.jsonl cannot be read: Couldn't cast."""
    others: list[dict[str, list[object]]] = [{"n": [1, 2]}, {"n": ["x", "y"], "more": [1, 2]}, {}]
    for part, other in enumerate(others):
        rows = datasets.Dataset.from_dict({"text": [f"<{part}:0>", f"<{part}:1>"], **other})
        write: dict[str, Callable[[Path], object]] = {"csv": rows.to_csv, "jsonl": rows.to_json}
        write.get(kind, rows.to_parquet)(tmp_path / f"{part}.{kind}")
    corpus = hub_corpora.text_corpus(manifest("c4").data, (str(tmp_path / f"*.{kind}"),), tokenizers.BYTES)
    every = [bytes(document.ids[:-1].astype(np.uint8) - 3) for document in corpus.everything()]
    assert every == [b"<%d:%d>" % (part, i) for part in range(3) for i in range(2)]


def test_columns_that_are_not_read_may_differ_from_row_to_row(tmp_path: Path) -> None:
    """Types were guessed from the first block. What follows it here ended a run, however long it had trained."""
    texts = [f"{i:06} " * 1_000 for i in range(2_000)]
    rows: list[dict[str, object]] = [{"text": text, "date": "2020-01-01", "id": 7} for text in texts]
    rows += [{"id": "x", "date": "unknown", "meta": {"a": []}, "text": "at the end"}, {"text": None}, {"id": 8}]
    (tmp_path / "x.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    every = list(hub_corpora.documents_of(tmp_path / "x.jsonl", tokenizers.BYTES))
    assert [len(document.ids) for document in every] == [7_001] * 2_000 + [11, 1, 1]


@pytest.mark.parametrize(
    ("name", "pack"), [("x.json", bytes), ("X.JSON.GZ", gzip.compress), ("x.json.zst", PACKED["zst"])]
)
@pytest.mark.parametrize("indent", [None, 2])
def test_rows_may_be_an_array(name: str, pack: Callable[[bytes], bytes], indent: int | None, tmp_path: Path) -> None:
    rows = [{"text": f"é{i}"} for i in range(70)]
    (tmp_path / name).write_bytes(pack(json.dumps(rows, indent=indent).encode()))
    every = hub_corpora.documents_of(tmp_path / name, tokenizers.BYTES)
    assert [bytes(document.ids[:-1].astype(np.uint8) - 3).decode() for document in every] == [
        f"é{i}" for i in range(70)
    ]


@pytest.mark.parametrize("before", ["\ufeff", "\n\r\n", "\ufeff\n  "])
def test_an_array_may_begin_after_a_byte_order_mark_or_empty_lines(before: str, tmp_path: Path) -> None:
    """It said: line 1 of x.json cannot be read: Expecting value."""
    rows = before + json.dumps([{"text": "a"}, {"text": "b"}], indent=1)
    (tmp_path / "x.json").write_text(rows, encoding="utf-8", newline="")
    every = hub_corpora.documents_of(tmp_path / "x.json", tokenizers.BYTES)
    assert [bytes(document.ids[:-1].astype(np.uint8) - 3) for document in every] == [b"a", b"b"]


def test_text_that_looks_like_a_date_is_text(tmp_path: Path) -> None:
    """It said: the text of a row is datetime.datetime(2020, 1, 1, 0, 0)."""
    (tmp_path / "x.jsonl").write_text('{"text": "2020-01-01T00:00:00"}\n' * 3)
    every = list(hub_corpora.documents_of(tmp_path / "x.jsonl", tokenizers.BYTES))
    assert [bytes(document.ids[:-1].astype(np.uint8) - 3) for document in every] == [b"2020-01-01T00:00:00"] * 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"a"', "a row is 'a'"),
        ("7", "a row is 7"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ("{", "Expecting"),
    ],
)
def test_a_line_that_is_no_row_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(LocalError, match=f"^line 3 of {path} cannot be read: {message}"):
        list(hub_corpora.documents_of(path, tokenizers.BYTES))


def test_half_of_a_surrogate_pair_is_dropped(tmp_path: Path) -> None:
    """JSON can escape one, as where an emoji was cut in two. It said: 'utf-8' codec can't encode character."""
    (tmp_path / "x.jsonl").write_text('{"text": "cut\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    every = hub_corpora.documents_of(tmp_path / "x.jsonl", tokenizers.BYTES)
    assert [bytes(document.ids[:-1].astype(np.uint8) - 3).decode() for document in every] == ["cut", "😀"]


def test_lines_of_csv_may_end_with_a_comma(tmp_path: Path) -> None:
    """Then the first column was taken for the rows' names, and the second one for the text."""
    (tmp_path / "x.csv").write_text("text,source\nhello,web,\nworld,book,\n")
    every = hub_corpora.documents_of(tmp_path / "x.csv", tokenizers.BYTES)
    assert [bytes(document.ids[:-1].astype(np.uint8) - 3) for document in every] == [b"hello", b"world"]


def test_text_of_csv_is_taken_literally(tmp_path: Path) -> None:
    """`NA`, `null` and `None` were empty documents, and a file of numbers was refused: the text of a row is 7.0."""
    texts = ["NA", "null", "None", "nan", "", "hello"]
    (tmp_path / "words.csv").write_text("n,text\n" + "".join(f'NA,"{text}"\n' for text in texts))
    (tmp_path / "numbers.csv").write_text("text,n\n007,1\n1e5,2\nTrue,\n")
    for name, expected in (("words.csv", texts), ("numbers.csv", ["007", "1e5", "True"])):
        every = hub_corpora.documents_of(tmp_path / name, tokenizers.BYTES)
        assert [bytes(document.ids[:-1].astype(np.uint8) - 3).decode() for document in every] == expected


@pytest.mark.parametrize(("files", "share"), [(corpora.FEW_UNITS - 1, corpora.THIN_SHARE), (corpora.FEW_UNITS, 1.0)])
def test_replicas_take_only_some_rows_of_each_pass_where_there_are_few_files(
    files: int, share: float, tmp_path: Path
) -> None:
    for number in range(files):
        (tmp_path / f"{number:02}.jsonl").write_text('{"text": "a"}\n')
    corpus = hub_corpora.text_corpus(manifest("text").data, (f"{tmp_path}/*",), tokenizers.BYTES)
    assert (corpus.units, corpus.share) == (files, share)


def test_data_that_is_all_held_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c4-validation.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"^only validation files match .*/\*\.jsonl$"):
        make_batches(manifest("c4"), NodeConfig(data_files=(f"{tmp_path}/*.jsonl",)), "peer")


def test_files_of_several_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nhello\n")
    (tmp_path / "b.jsonl").write_text('{"text": "hello"}\n')
    (tmp_path / "c.txt").write_text("hello")
    for pattern, kinds in (("[ab].*", "csv, json"), ("[bc].*", "json, text")):
        with pytest.raises(ConfigError, match=rf"several kinds \({kinds}\)"):
            make_batches(manifest("text"), NodeConfig(data_files=(str(tmp_path / pattern),)), "peer")


def test_the_standard_library_is_read_whole_without_its_tests() -> None:
    trained, held_out = one_pass("stdlib", ())
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = sorted(name.as_posix() for name in names if skipped.isdisjoint(name.parts[:-1]))
    expected: dict[bool, bytes] = {True: b"", False: b""}
    for is_held_out in expected:
        chosen = [name for name in kept if (zlib.crc32(name.encode()) % 50 == 0) == is_held_out]
        texts = [(root / name).read_bytes() for name in chosen]
        expected[is_held_out] = b"".join(text.replace(b"\x01", b"?") + b"\n" for text in texts if text)
    assert zlib.crc32(trained) == zlib.crc32(expected[False])
    assert zlib.crc32(held_out) == zlib.crc32(expected[True])


def test_c4_holds_out_documents_where_no_file_is_named_validation(tmp_path: Path) -> None:
    trained, held_out = one_pass("c4", write_c4(tmp_path))
    texts = [f"é{shard}:{i} ".encode() * 8 + b"\n" for shard in range(2) for i in range(200)]
    out = [text for text in texts if text in held_out]
    assert 2 <= len(out) <= 30
    assert [text for text in texts if text in trained] == [text for text in texts if text not in out]


def test_c4_files_named_validation_are_the_held_out_part(tmp_path: Path) -> None:
    files = write_c4(tmp_path)
    with gzip.open(tmp_path / "c4-validation.00000-of-00001.json.gz", "wt") as file:
        file.write(json.dumps({"text": "only here", "timestamp": "2019-04-25T12:57:54Z", "url": "u"}) + "\n")
    trained, held_out = one_pass("c4", files)
    assert held_out == b"only here\n"
    assert trained.count(b"\n") == 400
    assert b"only here" not in trained


class Counting:
    """A corpus whose units hold 3 documents of 40 ids each; no id occurs twice."""

    def __init__(self, share: float, units: int = 5) -> None:
        self.share = share
        self.units = units

    def documents(self, unit: int, skip: int, take: corpora.TakeDocument) -> Iterator[corpora.TokenizedDocument]:
        for i in range(skip, 3):
            first = (unit * 3 + i) * 40
            yield corpora.TokenizedDocument(np.arange(first, first + 40, dtype=np.int32)) if take() else corpora.EMPTY

    def held_out(self) -> Iterator[corpora.TokenizedDocument]:
        return iter([])


def test_every_token_of_a_pass_is_a_target_once() -> None:
    one = manifest("text", microbatch_size=1, sequence_length=37)
    stream = samples.SampleStream(Counting(1.0), one, "peer").batches(samples.StreamPosition())
    targets = [int(n) for batch, _ in itertools.islice(stream, 599 // 37) for n in array(batch.targets).flat]
    assert len(targets) == len(set(targets)) == 599 // 37 * 37


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_cursor_inside_a_unit_resumes_bitwise(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "POOL_TOKENS", 70)
    one = samples.SampleStream(Counting(share), manifest("text", microbatch_size=2), "peer")
    whole = [(values(batch), place) for batch, place in itertools.islice(one.batches(samples.StreamPosition()), 60)]
    assert any(place.document not in (0, 3) for _, place in whole)
    for k in range(50):
        resumed = [(values(batch), place) for batch, place in itertools.islice(one.batches(whole[k][1]), 9)]
        assert resumed == whole[k + 1 : k + 10], f"after {k + 1} microbatches"


class LeftPadded:
    """Rows padded in front, of which only every 50th is long enough to reach into a sample of 17 ids."""

    units, share = 1, 1.0

    def documents(self, unit: int, skip: int, take: corpora.TakeDocument) -> Iterator[corpora.TokenizedDocument]:
        for i in range(skip, 1_000):
            ids = np.full(40, i, np.int32)
            yield corpora.TokenizedDocument(ids, np.asarray(np.arange(40) >= (9 if i % 50 == 49 else 20), np.uint8))

    def held_out(self) -> Iterator[corpora.TokenizedDocument]:
        return iter([])


def test_rows_without_a_target_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they made a pool, all of them were looked at again for each further row: 20,000 took a quarter of an hour,
    and none was ever let go of."""
    seen: list[int] = []

    def counted(documents: list[corpora.TokenizedDocument], length: int) -> list[corpora.TokenizedDocument]:
        seen.append(len(documents))
        return cut(documents, length)

    cut = samples._cut
    monkeypatch.setattr(samples, "_cut", counted)
    monkeypatch.setattr(samples, "POOL_TOKENS", 400)
    stream = samples.SampleStream(LeftPadded(), manifest("parquet", microbatch_size=1), "peer")
    whole = [(values(batch), place) for batch, place in itertools.islice(stream.batches(samples.StreamPosition()), 40)]
    assert [place.document for _, place in whole] == 2 * [*range(50, 1_001, 50)]
    assert max(seen) == 10
    for k in (0, 7, 19, 20):
        resumed = [(values(batch), place) for batch, place in itertools.islice(stream.batches(whole[k][1]), 9)]
        assert resumed == whole[k + 1 : k + 10]


class Short(Counting):
    """One document of a few ids."""

    def __init__(self, length: int) -> None:
        super().__init__(1.0, 1)
        self.length = length

    def documents(self, unit: int, skip: int, take: corpora.TakeDocument) -> Iterator[corpora.TokenizedDocument]:
        for _ in range(skip, 1):
            yield corpora.TokenizedDocument(np.arange(self.length, dtype=np.int32)) if take() else corpora.EMPTY


def test_data_shorter_than_a_sample_is_joined_over_several_passes() -> None:
    stream = samples.SampleStream(Short(7), manifest("text", microbatch_size=1), "peer")
    whole = [(values(batch), place) for batch, place in itertools.islice(stream.batches(samples.StreamPosition()), 5)]
    assert [place.pass_number for _, place in whole] == [3, 6, 9, 12, 15]
    assert np.frombuffer(whole[0][0][0], "<i4").tolist() == [n % 7 for n in range(16)]
    assert [(values(batch), place) for batch, place in itertools.islice(stream.batches(whole[1][1]), 3)] == whole[2:]


def test_data_without_a_sample_is_reported() -> None:
    """The reading thread would look for one for ever."""
    stream = samples.SampleStream(Short(0), manifest("text"), "peer")
    with pytest.raises(LocalError, match=r"^the data does not contain a single sample of 17 tokens$"):
        next(stream.batches(samples.StreamPosition()))


def test_a_padded_row_is_a_sample_if_it_has_a_target() -> None:
    """The first of a sample's ids is no target, and those after its last one do not count."""
    for place, is_sample in ((0, False), (1, True), (16, True), (17, False)):
        mask = np.asarray(np.arange(30) == place, np.uint8)
        found = samples._cut([corpora.TokenizedDocument(np.arange(30, dtype=np.int32), mask)], 16)
        assert len(found) == is_sample, place


def test_held_out_samples_are_drawn_from_more_than_are_needed() -> None:
    """Otherwise they would all be of the first rows."""

    class HeldOut(Counting):
        def held_out(self) -> Iterator[corpora.TokenizedDocument]:
            return (corpora.TokenizedDocument(np.full(17, row, np.int32)) for row in range(60))

    stream = samples.SampleStream(HeldOut(1.0), manifest("text"), "peer")
    rows = [int(row) for batch in stream.validation() for row in array(batch.inputs)[:, 0]]
    assert len(rows) == 6
    assert max(rows) >= 12


@pytest.mark.parametrize("length", [17, 400])
def test_rows_without_a_target_do_not_count_as_held_out_samples(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens seemed to be enough, and a run was refused or evaluated on fewer rows than it asks for."""
    read: list[int] = []

    class HeldOut(Counting):
        def held_out(self) -> Iterator[corpora.TokenizedDocument]:
            for row in range(1_000):
                read.append(row)
                mask = np.full(length, row % 10 == 9, np.uint8)
                yield corpora.TokenizedDocument(np.full(length, row, np.int32), mask)

    monkeypatch.setattr(samples, "VALIDATION_TOKENS", 1)
    stream = samples.SampleStream(HeldOut(1.0), manifest("parquet"), "peer")
    rows = {int(row) for batch in stream.validation() for row in array(batch.inputs)[:, 0]}
    assert len(rows) == 6
    assert {row % 10 for row in rows} == {9}
    assert 110 <= len(read) <= 130, "they are drawn from twice as many"


@pytest.mark.parametrize("rows", [2, 3])
def test_one_held_out_microbatch_is_enough(rows: int) -> None:
    class HeldOut(Counting):
        def held_out(self) -> Iterator[corpora.TokenizedDocument]:
            return iter([corpora.TokenizedDocument(np.zeros(16 * rows + 1, np.int32))])

    stream = samples.SampleStream(HeldOut(1.0), manifest("text"), "peer")
    if rows == 3:
        assert len(stream.validation()) == 1
    else:
        with pytest.raises(ConfigError, match="has 2 samples of 17 tokens, fewer than one microbatch"):
            stream.validation()


def test_replicas_begin_with_different_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "POOL_TOKENS", 400)
    one = manifest("text", microbatch_size=1, sequence_length=39)
    read_by = []
    for peer in ("a", "b"):
        stream = samples.SampleStream(Counting(1.0, units=200), one, peer).batches(samples.StreamPosition())
        read_by.append({int(array(batch.inputs)[0, 0]) // 120 for batch, _ in itertools.islice(stream, 30)})
    assert len(read_by[0] & read_by[1]) <= 3


def test_replicas_take_different_documents_where_there_are_few_units() -> None:
    one = manifest("text", microbatch_size=1, sequence_length=39)
    taken: dict[str, list[int]] = {}
    for peer in ("a", "b"):
        stream = samples.SampleStream(Counting(0.125), one, peer).batches(samples.StreamPosition())
        taken[peer] = [int(array(batch.inputs)[0, 0]) // 40 for batch, _ in itertools.islice(stream, 300)]
    assert set(taken["a"]) == set(taken["b"]) == set(range(15)), "over many passes each replica reads all documents"
    equal = sum(x == y for x, y in zip(taken["a"], taken["b"], strict=True))
    assert equal < 60, "1 in 15 agrees by chance"


def test_the_byte_tokenizer_is_byt5s() -> None:
    from transformers import ByT5Tokenizer

    theirs = ByT5Tokenizer()
    ours = tokenizers.BYTES
    texts = ["", "Größe 日本 \x00\x7f", "</s><pad><extra_id_0>", Path(json.__file__).read_text("utf-8")]
    for text in texts:
        ids = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ours.encode(text.encode()).tolist() == ids
    assert (ours.eos, tokenizers.BYTE_VOCABULARY) == (theirs.eos_token_id, len(theirs))


def test_a_tokenizer_from_a_directory(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    directory = save_tokenizer(tmp_path / "good", letters | {"<eos>": len(letters)})
    files = write_text(tmp_path)
    settings = manifest("text", data={"kind": "text", "tokenizer": "some/name"})
    batches = make_batches(settings, NodeConfig(data_files=files, tokenizer_dir=directory), "peer")
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(directory).decode(array(read(batches, 1)[0].inputs)[0].tolist())
    assert text.replace("<eos>", "").strip("<>0123456789z") == ""
    batches.close()
    spare = tokenizers.load_tokenizer("some/name", directory, 257).encode(b"a<spare>b<eos>\xff")
    assert spare.max() < 256, "special tokens in a text are text"
    assert AutoTokenizer.from_pretrained(directory).decode(spare.tolist()) == "a<spare>b<eos>"
    with pytest.raises(ConfigError, match="has 257 ids, the model's vocab_size is 256"):
        tokenizers.load_tokenizer("some/name", directory, 256)
    newer = Path(save_tokenizer(tmp_path / "newer", letters), "tokenizer.json")
    newer.write_text(newer.read_text().replace('"version": "1.0"', '"version": "2.0"'))
    with pytest.raises(ConfigError, match="cannot be loaded: Unknown tokenizer version"):
        tokenizers.load_tokenizer("some/name", str(newer.parent), 384)
    damaged = Path(save_tokenizer(tmp_path / "damaged", letters), "tokenizer_config.json")
    damaged.write_text(json.dumps(json.loads(damaged.read_text()) | {"model_max_length": "long"}))
    with pytest.raises(ConfigError, match=r"cannot be loaded: '>' not supported"):  # it was a TypeError
        tokenizers.load_tokenizer("some/name", str(damaged.parent), 384)
    empty = save_tokenizer(tmp_path / "empty", {"<eos>": 0})
    with pytest.raises(ConfigError, match="its files are empty or do not match"):
        tokenizers.load_tokenizer("some/name", empty, 384)
    with pytest.raises(ConfigError, match="no end-of-text token"):
        tokenizers.load_tokenizer("some/name", save_tokenizer(tmp_path / "no_eos", letters, eos=None), 384)
    with pytest.raises(ConfigError, match="there is no directory"):
        tokenizers.load_tokenizer("some/name", str(tmp_path / "absent"), 384)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*[^: ]$"):  # not only the beginning of a list
        tokenizers.load_tokenizer("some/name", str(tmp_path / "bare"), 384)


def test_ids_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    """The end of text may be beyond the vocabulary, as in Llama 3, and so may words that were added."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    first = {"<eos>": 0} | {letter: i + 1 for letter, i in letters.items()}
    for name, words in (("last", letters), ("first", first)):
        directory = save_tokenizer(tmp_path / name, words)
        assert tokenizers.load_tokenizer("some/name", directory, 257).eos == (256 if name == "last" else 0)
        with pytest.raises(ConfigError, match="has 257 ids, the model's vocab_size is 256"):
            tokenizers.load_tokenizer("some/name", directory, 256)
    made = AutoTokenizer.from_pretrained(directory)
    made.add_tokens(["word"])
    made.save_pretrained(tmp_path / "more")
    encode = tokenizers.load_tokenizer("some/name", str(tmp_path / "more"), 258).encode
    assert len(encode(b"wor d")) == 5
    with pytest.raises(ValueError, match=r"^the tokenizer returned id 258, but the model's vocab_size is 258$"):
        encode(b"a word")


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    """The manifest names the tokenizer, and comes from strangers."""
    directory = Path(save_tokenizer(tmp_path / "made", {"<eos>": 0}))
    found = json.loads((directory / "tokenizer_config.json").read_text())
    found |= {"auto_map": {"AutoTokenizer": [None, "code.Made"]}, "tokenizer_class": "Made"}
    (directory / "tokenizer_config.json").write_text(json.dumps(found))
    (directory / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Made: pass\n")
    with pytest.raises(ConfigError):
        tokenizers.load_tokenizer("some/name", str(directory), 384)
    assert not (tmp_path / "ran").exists()


def test_wrong_settings_are_reported_in_one_line(tmp_path: Path) -> None:
    glob = str(tmp_path / "nothing-*.txt")
    cases: list[tuple[RunManifest, NodeConfig, str]] = [
        (manifest("text"), NodeConfig(data_files=(glob,)), "no data file matches .*nothing-"),
        (manifest("text"), NodeConfig(data_files=(str(tmp_path),)), "a directory: name its files, for example .*/\\*"),
        (manifest("text"), NodeConfig(), "needs data_files"),
        (manifest("c4"), NodeConfig(), "needs data_files .*, or data.dataset"),
        (manifest("stdlib"), NodeConfig(data_files=(glob,)), "set data.kind: text"),
        (manifest("stdlib", data={"dataset": "allenai/c4"}), NodeConfig(), "use c4 or parquet"),
        (manifest("stdlib", model={"config": {"vocab_size": 300}}), NodeConfig(), "384 ids, the model's .* 300"),
        (manifest("stdlib", model={"config": {}}), NodeConfig(), "vocab_size must be set"),
        (manifest("stdlib", model={"config": {"vocab_size": True}}), NodeConfig(), "vocab_size must be set"),
        (manifest("stdlib"), NodeConfig(tokenizer_dir="x"), "tokenizer_dir is set"),
    ]
    for settings, config, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            make_batches(settings, config, "peer")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", "", "it is empty|has 0 samples"),
        ("x.jsonl", '{"text": 7}\n', "is 7"),
        ("X.JSONL", '{"b": 7}\n', "Column name|no column 'text'"),
        ("x.jsonl", '\n{"b": "c"}\n{"b": "d"}\n', "^line 2 of .*no column 'text'"),
    ],
)
def test_rows_without_text_are_reported(name: str, text: str, message: str, tmp_path: Path) -> None:
    """The message comes either from the installed version of datasets or from the package."""
    (tmp_path / name).write_text(text)
    with pytest.raises((LocalError, ConfigError), match=message):
        make_batches(manifest("text"), NodeConfig(data_files=(str(tmp_path / name),)), "peer")


def test_an_empty_file_does_not_stand_for_the_held_out_part(tmp_path: Path) -> None:
    assert zlib.crc32(b"m25/__init__.py") % 50 == 0 != zlib.crc32(b"m25/code.py") % 50
    (tmp_path / "m25").mkdir()
    (tmp_path / "m25/__init__.py").touch()
    (tmp_path / "m25/code.py").write_text("1\n" * 3 * corpora.PIECE_BYTES)
    trained, held_out = one_pass("text", (str(tmp_path / "**/*.py"),))
    assert (len(trained), len(held_out)) == (5 * corpora.PIECE_BYTES + 1, corpora.PIECE_BYTES)


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match="too small"):
        make_batches(manifest("text"), NodeConfig(data_files=(str(tmp_path / "a.txt"),)), "peer")
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(ConfigError, match="has 0 samples of 17 tokens, fewer than one microbatch"):
        make_batches(manifest("text"), NodeConfig(data_files=(str(tmp_path / "*.txt"),)), "peer")


def test_a_cursor_of_other_data_is_refused(tmp_path: Path) -> None:
    config = NodeConfig(data_files=write_text(tmp_path))
    cursor = {"units": 7, "pass_number": 0, "unit": 0, "document": 0, "sample": 0}
    with pytest.raises(ConfigError, match=r"data of 7 parts .*, but the data here has \d+"):
        make_batches(manifest("text"), config, "peer", cursor)
    with pytest.raises(ConfigError, match="damaged"):
        make_batches(manifest("text"), config, "peer", cursor | {"sample": "x"})


def test_a_file_that_may_not_be_read_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node stopped when it came to the file, perhaps after hours."""
    files, opened = write_text(tmp_path), Path.open
    found = corpora.file_corpus(corpora.matching_files(files), tokenizers.BYTES)
    closed = found.pieces[0].path

    def refusing(path: Path, *given: Any) -> Any:
        if path == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *given)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(LocalError, match=f"^{closed} cannot be read: Permission denied$"):
        make_batches(manifest("text"), NodeConfig(data_files=files), "peer")


def test_data_lost_after_the_start_fails_next_without_a_hang(tmp_path: Path) -> None:
    files = write_text(tmp_path)
    batches = make_batches(manifest("text"), NodeConfig(data_files=files), "peer")
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    with pytest.raises(LocalError, match=r"\.txt cannot be read: No such file or directory$"):
        read(batches, 1)
    batches.close()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[1, 384]] * 9, "attention_mask": [[1, 1]] * 9}, "ids from 1 to 384, but vocab_size is 384"),
        ({"input_ids": [[1, 2]] * 9, "attention_mask": [[1]] * 9}, "ids and .* mask values"),
        ({"input_ids": [[1, 2]] * 9}, "attention_mask"),
        ({"input_ids": [[1, 2.5]] * 9, "attention_mask": [[1, 1]] * 9}, "a row's input_ids are not whole numbers"),
        ({"input_ids": [[1, None]] * 9, "attention_mask": [[1, 1]] * 9}, "a row's input_ids are not whole numbers"),
        ({"input_ids": [[1, 2]] * 9, "attention_mask": [[1, 1]] * 8 + [None]}, "attention_mask are not whole numbers"),
    ],
)
def test_parquet_with_unsuitable_columns_is_refused(
    tmp_path: Path, columns: dict[str, list[object]], message: str
) -> None:
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(LocalError, match=message):
        make_batches(manifest("parquet"), NodeConfig(data_files=(str(tmp_path / "x.parquet"),)), "peer")


@pytest.mark.parametrize("column", ["input_ids", "attention_mask"])
def test_a_row_with_an_enormous_number_is_refused(column: str, tmp_path: Path) -> None:
    """It ended the node with a traceback: OverflowError, int too large to convert to float."""
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1]}] * 9
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[0] | {column: [1, 10**400]}])))
    with pytest.raises(LocalError, match="cannot be read: int too large to convert to float"):
        make_batches(manifest("parquet"), NodeConfig(data_files=(str(tmp_path / "x.jsonl"),)), "peer")


def test_of_rows_longer_than_a_sample_as_many_are_held_out_as_the_run_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens were counted in full, though a sample has only the first of them: too few rows seemed enough."""
    monkeypatch.setattr(samples, "VALIDATION_TOKENS", 1_000)
    rows = [[n] * 400 for n in range(384)] * 2
    path = tmp_path / "x.parquet"
    datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 400] * len(rows)}).to_parquet(path)
    batches = make_batches(manifest("parquet"), NodeConfig(data_files=(str(path),)), "peer")
    assert len(list(batches.validation())) == manifest("parquet").evaluation.microbatches == 2


def test_an_empty_parquet_file_among_others_is_skipped(tmp_path: Path) -> None:
    config = NodeConfig(data_files=write_rows("parquet", tmp_path))
    expected = [values(batch) for batch in make_batches(manifest("text"), config, "peer").validation()]
    parquet.write_table(parquet.read_table(tmp_path / "0.parquet").slice(0, 0), tmp_path / "2.parquet")
    assert [values(batch) for batch in make_batches(manifest("text"), config, "peer").validation()] == expected


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_csv_file_among_others_is_skipped(content: str, tmp_path: Path) -> None:
    """It ended a node that came to it, maybe hours into the run: No columns to parse from file."""
    rows = "text\n" + "".join(f"row {n}\n" for n in range(400))
    (tmp_path / "a.csv").write_text(rows)
    (tmp_path / "b.csv").write_text(content)
    tokens: list[npt.NDArray[np.int32]] = []
    for pattern in ("a.csv", "*.csv"):
        corpus = hub_corpora.text_corpus(manifest("text").data, (str(tmp_path / pattern),), tokenizers.BYTES)
        every = [one.ids for unit in range(corpus.units) for one in corpus.documents(unit, 0, lambda: True)]
        tokens.append(np.concatenate([*every, *(one.ids for one in corpus.held_out())]))
    assert np.array_equal(tokens[0], tokens[1])
    assert not list(hub_corpora.documents_of(tmp_path / "b.csv", tokenizers.BYTES))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("words\na b c\n")
    with pytest.raises(LocalError, match="there is no column 'text'"):
        make_batches(manifest("text"), NodeConfig(data_files=(str(tmp_path / "x.csv"),)), "peer")


def test_a_cache_that_cannot_be_made_is_not_blamed_on_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` makes its cache in the home directory, which a user of a container may lack. It said: x.jsonl cannot
    be read: [Errno 13] Permission denied: '/nonexistent'."""
    (tmp_path / "x.jsonl").write_text('{"text": "a b c"}\n')
    home = tmp_path / "a file"
    home.touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "cache")
    with pytest.raises(LocalError) as told:
        make_batches(manifest("c4"), NodeConfig(data_files=(str(tmp_path / "x.jsonl"),)), "peer")
    assert str(told.value) == f"{home / 'cache'}, the cache of datasets, cannot be made: Not a directory; set HF_HOME"


def test_the_file_with_an_invalid_row_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It said: the data cannot be read. Before that, `datasets` logged a line of its own."""
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)
    for part, row in enumerate(['{"text": "a"}', '{"text": "b"', '{"text": "c"}']):
        (tmp_path / f"{part}.jsonl").write_text(row)
    corpus = hub_corpora.text_corpus(manifest("c4").data, (str(tmp_path / "*.jsonl"),), tokenizers.BYTES)
    assert [len(list(corpus.documents(unit, 0, lambda: True))) for unit in (0, 2)] == [1, 1]
    for documents in (corpus.documents(1, 0, lambda: True), corpus.everything()):
        with pytest.raises(LocalError, match=f"^line 1 of {tmp_path}/1.jsonl cannot be read: Expecting ',' delimiter$"):
            list(documents)
    assert caplog.records == []


def test_a_truncated_shard_is_reported(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    write_c4(whole)
    shard = sorted(whole.iterdir())[0]
    (tmp_path / "c4-train.json.gz").write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(LocalError, match="cannot be read"):
        make_batches(manifest("c4"), NodeConfig(data_files=(str(tmp_path / "*.gz"),)), "peer")


@pytest.mark.parametrize("extension", ["xz", "zst"])
def test_a_damaged_archive_is_reported(extension: str, tmp_path: Path) -> None:
    whole = bytearray(PACKED[extension]("".join(f"line {n}\n" for n in range(2_000)).encode()))
    whole[10:20] = bytes(10)
    path = tmp_path / f"a.txt.{extension}"
    path.write_bytes(whole)
    with pytest.raises(LocalError, match=f"^{path} cannot be read: "):
        list(hub_corpora.documents_of(path, tokenizers.BYTES))


@pytest.mark.parametrize("extension", sorted(PACKED))
def test_an_archive_that_was_cut_off_is_reported(extension: str, tmp_path: Path) -> None:
    """A truncated .zst was read as a shorter file."""
    path = tmp_path / f"a.txt.{extension}"
    path.write_bytes(PACKED[extension]("".join(f"line {n}\n" for n in range(200_000)).encode())[:-40])
    with pytest.raises(LocalError, match=f"^{path} cannot be read: "):
        list(hub_corpora.documents_of(path, tokenizers.BYTES))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (bytes([1, 16, 0, 0, 0]), bytes([1, 4, 0, 0, 0]), "Integers with less than 8 bits not implemented"),
        ((448).to_bytes(8, "little"), (448 | 1 << 54).to_bytes(8, "little"), ""),
    ],
)
def test_a_damaged_arrow_file_is_reported(before: bytes, after: bytes, message: str, tmp_path: Path) -> None:
    """Of integers of 4 bits it said: NotImplementedError: … (a bug; --debug shows where), of 16 PiB: MemoryError."""
    whole = pyarrow.table({"text": ["a b c"] * 40, "n": pyarrow.array(range(40), pyarrow.int16())})
    with pyarrow.ipc.new_stream(path := tmp_path / "x.arrow", whole.schema) as stream:
        stream.write_table(whole)
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after, 1))
    with pytest.raises(LocalError, match=f"^{path} cannot be read: {message}"):
        list(hub_corpora.documents_of(path, tokenizers.BYTES))


def test_a_cancelled_next_loses_nothing(tmp_path: Path) -> None:
    config = NodeConfig(data_files=write_text(tmp_path))
    expected = [values(batch) for batch in read(make_batches(manifest("text"), config, "peer"), 30)]
    batches = make_batches(manifest("text"), config, "peer")

    async def interrupted() -> list[tuple[bytes, bytes, bytes]]:
        found: list[tuple[bytes, bytes, bytes]] = []
        while len(found) < 30:
            task = asyncio.create_task(batches.next())
            await asyncio.sleep(0)
            task.cancel()
            try:
                found.append(values(await task))
            except asyncio.CancelledError:
                found.append(values(await batches.next()))
        return found

    assert asyncio.run(interrupted()) == expected
    batches.close()


def test_after_close_nothing_is_read_and_next_fails() -> None:
    batches = make_batches(manifest("stdlib"), NodeConfig(), "peer")

    async def closed() -> None:
        await batches.next()
        batches.close()
        with pytest.raises(LocalError, match="closed"):
            await batches.next()

    asyncio.run(closed())
    batches._thread.shutdown(wait=True)
    assert sum(each.done() and not each.cancelled() for each in batches._ahead) <= READ_AHEAD
    assert not any(thread.is_alive() for thread in batches._thread._threads)


def test_the_default_data_needs_no_heavy_import() -> None:
    code = """
import asyncio, sys
from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.io.data.threaded_batches import make_batches
asyncio.run(make_batches(RunManifest(), NodeConfig(), "peer").next())
print(sorted({"datasets", "transformers", "torch", "pandas", "pyarrow"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_named_data_set_is_streamed_with_its_own_validation_split(tmp_path: Path) -> None:
    """A folder stands in for the hub: the same loader opens both by name."""
    for split, count in (("train", 130), ("validation", 20)):
        lines = [json.dumps({"text": f"{split} {i} " * 9}) for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    train, validation = hub_corpora._hub(str(tmp_path), None, ["text"])
    assert isinstance(train, datasets.IterableDataset), "it is not downloaded"
    assert {row["text"].split()[0] for row in train} == {"train"}
    assert validation is not None
    assert [row["text"].split()[:2] for row in validation] == [["validation", str(i)] for i in range(20)]
    (tmp_path / "validation.jsonl").unlink()
    assert hub_corpora._hub(str(tmp_path), None, ["text"])[1] is None
    with pytest.raises(LocalError, match="cannot be opened"):
        hub_corpora._hub(str(tmp_path / "absent"), None, ["text"])
