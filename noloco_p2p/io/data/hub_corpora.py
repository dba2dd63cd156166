"""Corpora that are streams of the `datasets` library: rows of text or of token ids, from files or from the hub.

`datasets` is imported only here, and only when such data is opened, because the import takes 1.7 s.
"""

import glob
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BufferedReader
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noloco_p2p.config import DataSettings
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data import corpora
from noloco_p2p.io.data.corpora import EMPTY, FileCorpus, TakeDocument, TokenizedDocument
from noloco_p2p.io.data.tokenizers import Tokenizer

LAYOUTS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""File extension (without that of the compression) → the `datasets` reader for it. Everything else is read as text."""
COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst"})
CSV = {"index_col": False, "converters": {"text": str}, "keep_default_na": False}
"""Options of pandas. It would take the first column for an index where lines end with a comma, the text `NA` for one
that is missing, and texts that are all digits for numbers."""
OPTIONS: Any = {"text": {"keep_linebreaks": True}, "csv": CSV, "parquet": {"batch_size": 1_024}}
"""Options of readers. The default `batch_size` is the number of rows in a file's first row group, which can be 0."""
BLOCK_LINES = 1_024
"""Lines per document of compressed text, which can only be read from its start."""

Row = dict[str, Any]


class StreamCorpus:
    """The rows of a streaming data set of the `datasets` library; a unit is one of its shards.

    `files`: those of `train`. They are named in errors if each of them is a shard.
    """

    def __init__(
        self, train: Any, validation: Any | None, encode: Callable[[Row], TokenizedDocument], files: Sequence[str] = ()
    ) -> None:
        self.units = int(train.num_shards)
        self._names = files if len(files) == self.units else ["the data"] * self.units
        self.share = corpora.THIN_SHARE if self.units < corpora.FEW_UNITS else 1.0
        self._train = train
        self._validation = validation
        self._encode = encode

    def documents(self, unit: int, skip: int, take: TakeDocument) -> Iterator[TokenizedDocument]:
        """One document per row of the shard."""
        for document in self._read(self._train.shard(self.units, unit).skip(skip), take, self._names[unit]):
            yield EMPTY if self._validation is None and _is_held_out(document) else document

    def held_out(self) -> Iterator[TokenizedDocument]:
        """The validation split, or if there is none, the rows with crc32(int32 ids) % HELD_OUT_EVERY == 0."""
        if self._validation is not None:
            return self._read(self._validation, lambda: True)
        return filter(_is_held_out, self.everything())

    def everything(self) -> Iterator[TokenizedDocument]:
        """All documents except those of a validation split, shard by shard. Raises LocalError."""
        shards = (self._train.shard(self.units, unit) for unit in range(self.units))
        return chain.from_iterable(map(self._read, shards, repeat(lambda: True), self._names))

    def _read(self, rows: Any, take: TakeDocument, name: str = "the data") -> Iterator[TokenizedDocument]:
        from pandas.errors import EmptyDataError  # of an empty CSV file

        with corpora.failing_as_local_error(name), suppress(EmptyDataError):
            for row in rows:
                yield self._encode(row) if take() else EMPTY


def _is_held_out(document: TokenizedDocument) -> bool:
    return zlib.crc32(document.ids.tobytes()) % corpora.HELD_OUT_EVERY == 0


def text_corpus(data: DataSettings, patterns: tuple[str, ...], tokenizer: Tokenizer) -> StreamCorpus:
    """Rows with a column `text`: each row is a document, with the tokenizer's EOS after it."""
    train, validation, files = _streams(data, patterns, ["text"])
    return StreamCorpus(train, validation, _encoder(tokenizer), files)


def _encoder(tokenizer: Tokenizer) -> Callable[[Row], TokenizedDocument]:
    def encode(row: Row) -> TokenizedDocument:
        text = row["text"] or ""
        if not isinstance(text, str):
            raise ValueError(f"the text of a row is {text!r:.60}")
        return TokenizedDocument(np.append(tokenizer.encode(text.encode(errors="ignore")), np.int32(tokenizer.eos)))

    return encode


def documents_of(path: Path, tokenizer: Tokenizer) -> Iterator[TokenizedDocument]:
    """All text of one file, as documents; an empty file has none. Raises LocalError."""
    if not is_plain_text(path):
        return StreamCorpus(_local([str(path)], ["text"]), None, _encoder(tokenizer), [str(path)]).everything()
    with corpora.failing_as_local_error(str(path)):
        size = path.stat().st_size
        return FileCorpus([], corpora.pieces(path, size, size or 1), tokenizer).held_out()


def is_plain_text(path: Path) -> bool:
    """Whether a file can be read from any position, and is nothing but text."""
    return path.suffix.lower() not in {*COMPRESSED, *LAYOUTS}


def parquet_corpus(data: DataSettings, patterns: tuple[str, ...], vocabulary: int) -> StreamCorpus:
    """Rows that are already token ids, with an attention mask: each row is one sample."""

    def encode(row: Row) -> TokenizedDocument:
        ids, mask = _whole(row, "input_ids"), _whole(row, "attention_mask") != 0
        if ids.shape != mask.shape or ids.ndim != 1:
            raise ValueError(f"a row has {ids.shape} ids and {mask.shape} mask values")
        if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise ValueError(f"a row has token ids from {ids.min()} to {ids.max()}, but vocab_size is {vocabulary}")
        return TokenizedDocument(ids.astype(np.int32), mask.astype(np.uint8))

    train, validation, _ = _streams(data, patterns, ["input_ids", "attention_mask"])
    return StreamCorpus(train.reshard(), validation, encode)


def _whole(row: Row, column: str) -> NDArray[np.int64]:
    """The values of a row's column. Raises ValueError if one is missing or not a whole number."""
    values = np.asarray(row[column], np.float64)  # None becomes NaN
    if not np.array_equal(values, np.rint(values)):
        raise ValueError(f"a row's {column} are not whole numbers")
    return values.astype(np.int64)


def _streams(data: DataSettings, patterns: tuple[str, ...], columns: list[str]) -> tuple[Any, Any | None, list[str]]:
    """The training stream; the validation stream, which is None if the data has no such part; local training files."""
    if data.dataset is not None and not patterns:
        return *_hub(data.dataset, data.subset, columns), []
    found = sorted(corpora.matching_files(patterns).items())
    train = [str(path) for name, path in found if "validation" not in Path(name).name]
    held_out = [str(path) for name, path in found if "validation" in Path(name).name]
    if not train:
        raise ConfigError(f"only validation files match {', '.join(patterns)}")
    return _local(train, columns), _local(held_out, columns) if held_out else None, train


def _library() -> Any:
    """The module `datasets`, whose cache exists. Raises LocalError."""
    import datasets
    from fsspec.compression import register_compression
    from pyarrow import CompressedInputStream

    # The reader that fsspec would choose takes a file that is cut off for a shorter one.
    register_compression("zstd", lambda file, mode: CompressedInputStream(file, "zstd"), "zst", force=True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an error is raised as well, and says more
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"{cache}, the cache of datasets, cannot be made: {error.strerror}; set HF_HOME") from error
    return datasets


def _local(files: list[str], columns: list[str]) -> Any:
    """The rows of local files, whose reader depends on their extension. Raises ConfigError, LocalError."""
    datasets = _library()
    plain = (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path for path in map(Path, files))
    reader, *others = sorted({LAYOUTS.get(path.suffix.lower(), "text") for path in plain})
    if others:
        raise ConfigError(f"the data files are of several kinds ({', '.join((reader, *others))}): name only one kind")
    options = OPTIONS.get(reader, {}) | ({"columns": columns} if reader == "parquet" else {})
    with corpora.failing_as_local_error(f"{files[0]}{', …' if files[1:] else ''}"):
        if reader == "json":
            # Each file is a shard; if `columns` were a list, it would be divided as well.
            return datasets.IterableDataset.from_generator(_of_json, None, {"files": files, "columns": tuple(columns)})
        named = list(map(glob.escape, files))  # `datasets` takes names for globs
        stream = datasets.load_dataset(reader, data_files=named, split="train", streaming=True, **options)
        if reader == "text":
            return stream.batch(BLOCK_LINES).map(lambda block: {"text": "".join(block["text"])})
        return stream.select_columns(columns)


def _of_json(files: list[str], columns: Sequence[str]) -> Iterator[Row]:
    """These columns of files of JSON lines, or of an array each. `datasets` would want all other columns to have the
    same names and types in all files and blocks.

    A row without a column has None there, but not the first row of a file. Raises LocalError, naming the line.
    """
    from fsspec.implementations.local import LocalFileSystem

    for file in files:
        with LocalFileSystem().open(file, compression="infer") as unpacked, BufferedReader(unpacked) as opened:
            is_array = opened.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")  # also after a byte order mark
            lines = enumerate([opened.read()] if is_array else opened, 1)
            for count, (number, line) in enumerate((n, line) for n, line in lines if line.strip()):
                with corpora.failing_as_local_error(f"line {number} of {file}"):
                    found = json.loads(line)
                    for at, row in enumerate(found if isinstance(found, list) else [found]):
                        if not isinstance(row, dict):
                            raise ValueError(f"a row is {row!r:.60}")
                        yield {name: row.get(name) if count + at else row[name] for name in columns}


def _hub(name: str, subset: str | None, columns: list[str]) -> tuple[Any, Any | None]:
    datasets = _library()
    with corpora.failing_as_local_error(f"data set {name}", "opened"):
        names = {"train", *datasets.get_dataset_split_names(name, subset)} & {"train", "validation"}
        opened = {split: datasets.load_dataset(name, subset, split=split, streaming=True) for split in sorted(names)}
        streams = {split: stream.select_columns(columns) for split, stream in opened.items()}
        return streams["train"], streams.get("validation")
