"""Corpora that are streams of the `datasets` library: C4's JSON lines, and parquet of token ids, local or from a hub.

`datasets` is imported only here, and only when such data is opened (1.7 s).
"""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from noloco_p2p.config import DataSettings
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data import corpora
from noloco_p2p.io.data.corpora import EMPTY, READ_ERRORS, TakeDocument, TokenizedDocument
from noloco_p2p.io.data.tokenizers import Tokenizer, first_line


class StreamCorpus:
    """Rows of a streaming data set of the `datasets` library."""

    def __init__(
        self, train: Any, validation: Any | None, encode: Callable[[dict[str, Any]], TokenizedDocument]
    ) -> None:
        self.units = int(train.num_shards)
        self.share = corpora.THIN_SHARE if self.units < corpora.FEW_UNITS else 1.0
        self._train = train
        self._validation = validation
        self._encode = encode

    def documents(self, unit: int, skip: int, take: TakeDocument) -> Iterator[TokenizedDocument]:
        """One document per row of the shard."""
        for document in self._read(self._train.shard(self.units, unit).skip(skip), take):
            yield EMPTY if self._validation is None and _is_held_out(document) else document

    def held_out(self) -> Iterator[TokenizedDocument]:
        """The validation split, or where there is none the rows with crc32(int32 ids) % 50 == 0, shard by shard."""
        if self._validation is not None:
            return self._read(self._validation, lambda: True)
        return filter(_is_held_out, self._read(self._train, lambda: True))

    def _read(self, rows: Any, take: TakeDocument) -> Iterator[TokenizedDocument]:
        try:
            for row in rows:
                yield self._encode(row) if take() else EMPTY
        except READ_ERRORS as error:
            raise LocalError(f"the data cannot be read: {first_line(error)}") from error


def _is_held_out(document: TokenizedDocument) -> bool:
    return zlib.crc32(document.ids.tobytes()) % corpora.HELD_OUT_EVERY == 0


def c4_corpus(data: DataSettings, patterns: tuple[str, ...], tokenizer: Tokenizer) -> StreamCorpus:
    """JSON lines with `text` (C4's layout): one document a row, with the tokenizer's EOS after it."""
    end = np.int32(tokenizer.eos)

    def encode(row: dict[str, Any]) -> TokenizedDocument:
        return TokenizedDocument(np.append(tokenizer.encode(row["text"].encode()), end))

    train, validation = _streams("json", data, patterns, ["text"])
    return StreamCorpus(train, validation, encode)


def parquet_corpus(data: DataSettings, patterns: tuple[str, ...], vocabulary: int) -> StreamCorpus:
    """Rows that are token ids already, with an attention mask: one sample a row."""

    def encode(row: dict[str, Any]) -> TokenizedDocument:
        ids = np.asarray(row["input_ids"], np.int64)
        mask = np.asarray(row["attention_mask"], np.int64) != 0
        if ids.shape != mask.shape or ids.ndim != 1:
            raise ValueError(f"a row has {ids.shape} ids and {mask.shape} mask values")
        if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise ValueError(f"a row has token ids from {ids.min()} to {ids.max()}, vocab_size is {vocabulary}")
        return TokenizedDocument(ids.astype(np.int32), mask.astype(np.uint8))

    train, validation = _streams("parquet", data, patterns, ["input_ids", "attention_mask"])
    return StreamCorpus(train.reshard(), validation, encode)


def _streams(layout: str, data: DataSettings, patterns: tuple[str, ...], columns: list[str]) -> tuple[Any, Any | None]:
    """The training stream and the validation stream, None where the data has no such part."""
    if patterns:
        found = corpora.matching_files(patterns)
        names = sorted(found)
        chosen = [name for name in names if "validation" in Path(name).name]
        train = [str(found[name]) for name in names if name not in chosen]
        if not train:
            raise ConfigError(f"data_files: only validation files match {', '.join(patterns)}")
        held_out = [str(found[name]) for name in chosen]
        return _local(layout, train, columns), _local(layout, held_out, columns) if held_out else None
    if data.dataset is None:
        raise ConfigError(f"data.kind '{data.kind}' needs data_files, or data.dataset for a data set on the hub")
    return _hub(data.dataset, data.subset, columns)


def _local(layout: str, files: list[str], columns: list[str]) -> Any:
    import datasets

    try:
        stream = datasets.load_dataset(layout, data_files=files, split="train", streaming=True)
        if stream.features is not None and "timestamp" in stream.features:  # a type that pyarrow guesses block by block
            features = stream.features.copy()
            features["timestamp"] = datasets.Value("string")
            stream = datasets.load_dataset(layout, data_files=files, split="train", streaming=True, features=features)
        return stream.select_columns(columns)
    except READ_ERRORS as error:
        raise LocalError(f"data_files ({files[0]}, …) cannot be read: {first_line(error)}") from error


def _hub(name: str, subset: str | None, columns: list[str]) -> tuple[Any, Any | None]:
    import datasets

    try:
        names = {"train", *datasets.get_dataset_split_names(name, subset)} & {"train", "validation"}
        opened = {split: datasets.load_dataset(name, subset, split=split, streaming=True) for split in sorted(names)}
        streams = {split: stream.select_columns(columns) for split, stream in opened.items()}
        return streams["train"], streams.get("validation")
    except READ_ERRORS as error:
        raise LocalError(f"data set {name} cannot be opened: {first_line(error)}") from error
