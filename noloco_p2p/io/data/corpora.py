"""Where documents come from: what a corpus is, and the one made of text files. Nothing is drawn or cut here.

A corpus is a list of units (a piece of a file, a shard), each of which gives documents in a fixed order, so that a
place in it is two numbers. A held-out document comes out empty: every document counts for the place.
"""

import glob
import gzip
import itertools
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data.tokenizers import Ids, Tokenizer

HELD_OUT_EVERY = 50
"""One file (document, piece) in this many is held out for validation."""

SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests"})

PIECE_BYTES = 8_192
MOST_PIECES = 65_536
"""Files are read in pieces of 8 KiB, or a 65,536th of the whole, so that a permutation of pieces mixes even a few."""

BLOCK_BYTES = 1 << 20
"""A .gz file cannot be entered in the middle: it is one unit, which gives documents of this many bytes."""

FEW_UNITS = 64
THIN_SHARE = 0.125
"""With few units (FEW_UNITS) that can only be read from their start, a replica takes each document of a pass with this
probability; otherwise replicas that happen to read the same unit would all read the same documents."""

READ_ERRORS = (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error)
"""What gzip, pyarrow and datasets raise for files that are missing, cut short or not what they should be."""


Mask = npt.NDArray[np.uint8]


class TokenizedDocument(NamedTuple):
    """Token ids, int32, and for padded kinds the attention mask, uint8, of the same length."""

    ids: Ids
    mask: Mask | None = None


TakeDocument = Callable[[], bool]

EMPTY = TokenizedDocument(np.empty(0, np.int32))


class Corpus(Protocol):
    """Documents in units. Used by the reading thread."""

    units: int
    share: float
    """Probability with which a replica takes a document of a pass."""

    def documents(self, unit: int, skip: int, take: TakeDocument) -> Iterator[TokenizedDocument]:
        """The documents of a unit from the `skip`-th on; held-out ones and those not taken are empty.

        Asks `take` once for each of them. Raises LocalError.
        """
        ...

    def held_out(self) -> Iterator[TokenizedDocument]:
        """The held-out documents, in an order that is equal on all nodes. Raises LocalError."""
        ...


class FileSpan(NamedTuple):
    """Part of a file: bytes start to stop, or all of a .gz file (stop None)."""

    path: Path
    start: int
    stop: int | None
    last: bool


class FileCorpus:
    """Text files, encoded when they are read, with the tokenizer's EOS after each file."""

    def __init__(self, train: list[FileSpan], held_out: list[FileSpan], tokenizer: Tokenizer) -> None:
        self.units = len(train)
        only_from_start = any(piece.stop is None for piece in train)
        self.share = THIN_SHARE if only_from_start and len(train) < FEW_UNITS else 1.0
        self._train = train
        self._held_out = held_out
        self._tokenizer = tokenizer

    def documents(self, unit: int, skip: int, take: TakeDocument) -> Iterator[TokenizedDocument]:
        """One document per piece; a .gz file gives one for each MiB."""
        return self._read(self._train[unit], skip, take)

    def held_out(self) -> Iterator[TokenizedDocument]:
        """Held-out pieces, sorted by relative path."""
        for piece in self._held_out:
            yield from self._read(piece, 0, lambda: True)

    def _read(self, piece: FileSpan, skip: int, take: TakeDocument) -> Iterator[TokenizedDocument]:
        blocks = _plain(piece) if piece.stop is not None else _unpacked(piece.path)
        try:
            for text, last in itertools.islice(blocks, skip, None):
                yield self._encode(text, last) if take() else EMPTY
        except READ_ERRORS as error:
            raise LocalError(f"{piece.path} cannot be read: {error}") from error

    def _encode(self, text: bytes, last: bool) -> TokenizedDocument:
        ids = self._tokenizer.encode(text)
        return TokenizedDocument(np.append(ids, np.int32(self._tokenizer.eos)) if last else ids)


def _plain(piece: FileSpan) -> Iterator[tuple[bytes, bool]]:
    with piece.path.open("rb") as file:
        file.seek(piece.start)
        yield file.read((piece.stop or 0) - piece.start), piece.last


def _unpacked(path: Path) -> Iterator[tuple[bytes, bool]]:
    with gzip.open(path) as file:
        blocks = itertools.chain(iter(lambda: file.read(BLOCK_BYTES), b""), [b""])
        for block, following in itertools.pairwise(blocks):
            yield block, not following


def stdlib_corpus(tokenizer: Tokenizer) -> FileCorpus:
    """The running Python's own library. Raises ConfigError where it has no source files."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, Path] = {}
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED_DIRECTORIES]
        paths = (Path(directory, name) for name in files if name.endswith(".py"))
        found |= {path.relative_to(root).as_posix(): path for path in paths}
    if not found:
        raise ConfigError(f"data.kind 'stdlib': there are no *.py files under {root}; set data.kind to 'text'")
    return file_corpus(found, tokenizer)


def matching_files(patterns: tuple[str, ...]) -> dict[str, Path]:
    """Name → path of the files that the globs match. Raises ConfigError for a glob that matches none.

    A file is named by its path relative to the part of the glob without wildcards.
    """
    if not patterns:
        raise ConfigError("this kind of data needs data_files (files or globs), or data.dataset for a hub data set")
    found: dict[str, Path] = {}
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        parts = Path(expanded).parts
        fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
        paths = [Path(name) for name in glob.glob(expanded, recursive=True) if os.path.isfile(name)]
        if not paths:
            raise ConfigError(f"data_files: no file matches {pattern}")
        found.update({Path(*path.parts[fixed:]).as_posix(): path for path in paths})
    return found


def file_corpus(found: dict[str, Path], tokenizer: Tokenizer) -> FileCorpus:
    """Files split into held-out ones, crc32(relative path) % 50 == 0, and the others.

    Where that holds out none or all, every fiftieth piece is held out instead, from the first on.
    """
    names = sorted(found)
    try:
        sizes = {name: found[name].stat().st_size for name in names}
    except OSError as error:
        raise LocalError(f"cannot read {error.filename}: {error.strerror}") from error
    length = max(PIECE_BYTES, -(-sum(sizes.values()) // MOST_PIECES))
    chosen = {name for name in names if zlib.crc32(name.encode()) % HELD_OUT_EVERY == 0}
    pieces = {name: _pieces(found[name], sizes[name], length) for name in names}
    if chosen and len(chosen) < len(names):
        train = [piece for name in names if name not in chosen for piece in pieces[name]]
        held_out = [piece for name in names if name in chosen for piece in pieces[name]]
    else:
        every = [piece for name in names for piece in pieces[name]]
        train = [piece for i, piece in enumerate(every) if i % HELD_OUT_EVERY]
        held_out = every[::HELD_OUT_EVERY]
    if not train or not held_out:
        raise ConfigError(
            f"the data ({names[0]}, …) is too small: one piece to train on and one to hold out are needed"
        )
    return FileCorpus(train, held_out, tokenizer)


def _pieces(path: Path, size: int, length: int) -> list[FileSpan]:
    if path.suffix == ".gz":
        return [FileSpan(path, 0, None, True)]
    return [FileSpan(path, at, min(at + length, size), at + length >= size) for at in range(0, size, length)]
