"""Corpora, the sources of documents: the protocol, and the corpus made of plain text files. Sampling is in `samples`.

A corpus is a list of units (pieces of files, or shards). Each yields documents in a fixed order, so a place in the
corpus is two numbers. A held-out document is yielded empty, because every document counts towards the place.
"""

import glob
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from noloco_p2p.errors import NO_JSON, ConfigError, LocalError
from noloco_p2p.io.data.tokenizers import Ids, Tokenizer, first_line

HELD_OUT_EVERY = 50
"""One in this many files (or documents, or pieces) is held out for validation."""

SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests"})

PIECE_BYTES = 8_192
MAX_PIECES = 65_536
"""Files are read in pieces of PIECE_BYTES, or of 1 / MAX_PIECES of all data if that is more, so that a permutation of
the pieces mixes the data even if there are only a few files."""

FEW_UNITS = 64
THIN_SHARE = 0.125
"""If a stream has fewer than FEW_UNITS units, with many documents each, a replica takes each document of a pass with
probability THIN_SHARE. Otherwise replicas that happen to read the same unit would all read the same documents."""

ESCAPED = re.compile(r"\[[*?[]\]")
"""A character that would be a wildcard of a glob, as `glob.escape` writes it."""

_UNREAD = OSError, ImportError, EOFError, TypeError, *NO_JSON, NotImplementedError, MemoryError, OverflowError
"""Errors that Python, numpy, pyarrow and datasets raise for files that are missing, cut off, damaged or of another
format, or of one for which a package is missing."""
_UNPACKED = zlib.error, LZMAError
"""The same for archives."""


Mask = npt.NDArray[np.uint8]


class TokenizedDocument(NamedTuple):
    """Token ids (int32), and for padded kinds of data the attention mask (uint8) of the same length."""

    ids: Ids
    mask: Mask | None = None


TakeDocument = Callable[[], bool]

EMPTY = TokenizedDocument(np.empty(0, np.int32))


class Corpus(Protocol):
    """Documents, grouped into units. Used by the reading thread."""

    units: int
    share: float
    """Probability with which a replica takes a document of a pass."""

    def documents(self, unit: int, skip: int, take: TakeDocument) -> Iterator[TokenizedDocument]:
        """The documents of a unit after the first `skip`; held-out ones, and those that are not taken, are empty.

        Calls `take` once for each of them. Raises LocalError.
        """

    def held_out(self) -> Iterator[TokenizedDocument]:
        """The held-out documents, in the same order on all nodes. Raises LocalError."""


@contextmanager
def failing_as_local_error(what: str, outcome: str = "read") -> Iterator[None]:
    """Raises LocalError if reading a file fails, or `datasets` or a library that it uses."""
    try:
        yield
    except StopIteration as error:  # raised by `datasets` for JSON without rows
        raise LocalError(f"{what} cannot be {outcome}: it is empty") from error
    except KeyError as error:
        raise LocalError(f"{what} cannot be {outcome}: there is no column {error}") from error
    except (*_UNREAD, *_UNPACKED) as error:
        reason = getattr(error, "strerror", None) or first_line(getattr(error, "msg", error))
        raise LocalError(f"{what} cannot be {outcome}: {reason}") from error


class FileSpan(NamedTuple):
    """The bytes of a file from `start` to `stop`; `last` says whether they are its last ones."""

    path: Path
    start: int
    stop: int
    last: bool


class FileCorpus:
    """Text files, tokenized as they are read, with the tokenizer's EOS after each file. Every piece is a document."""

    share = 1.0

    def __init__(self, train: list[FileSpan], held_out: list[FileSpan], tokenizer: Tokenizer) -> None:
        self.units = len(train)
        self.pieces = train
        self.held_out_pieces = held_out
        self._tokenizer = tokenizer

    def documents(self, unit: int, skip: int, take: TakeDocument) -> Iterator[TokenizedDocument]:
        """The only document of the unit, unless it is to be skipped."""
        if skip == 0:
            yield self._read(self.pieces[unit]) if take() else EMPTY

    def held_out(self) -> Iterator[TokenizedDocument]:
        """The held-out pieces, in their order."""
        return map(self._read, self.held_out_pieces)

    def _read(self, piece: FileSpan) -> TokenizedDocument:
        with failing_as_local_error(str(piece.path)), piece.path.open("rb") as file:
            file.seek(piece.start)
            ids = self._tokenizer.encode(file.read(piece.stop - piece.start))
        return TokenizedDocument(np.append(ids, np.int32(self._tokenizer.eos)) if piece.last else ids)


def stdlib_corpus(tokenizer: Tokenizer) -> FileCorpus:
    """The source code of the running Python's standard library. Raises ConfigError if it has no source files."""
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

    A file belongs to the first glob that matches it, and is named by its path relative to the part of that glob without
    wildcards. A "+" is appended if a file of an earlier glob already has that name.
    """
    if not patterns:
        raise ConfigError("this kind of data needs data_files (files or globs), or data.dataset for a hub data set")
    found: dict[str, Path] = {}
    for pattern in patterns:
        named = os.path.expanduser(pattern)
        expanded = glob.escape(named) if os.path.isfile(named) else named  # a file's name may look like a glob
        parts = Path(expanded).parts
        fixed = next((i for i, part in enumerate(parts) if glob.has_magic(ESCAPED.sub("", part))), len(parts) - 1)
        paths = [Path(name) for name in glob.glob(expanded, recursive=True) if os.path.isfile(name)]
        if not paths:
            if os.path.isdir(named):
                raise ConfigError(f"{pattern} is a directory: name its files, for example {pattern.rstrip('/')}/*")
            raise ConfigError(f"no data file matches {pattern}")
        for path in paths:
            name = Path(*path.parts[fixed:]).as_posix()
            while name in found and not found[name].samefile(path):
                name += "+"
            found[name] = path
    first = {os.path.abspath(path): name for name, path in reversed(found.items())}
    return {name: path for name, path in found.items() if first[os.path.abspath(path)] == name}


def file_corpus(found: dict[str, Path], tokenizer: Tokenizer) -> FileCorpus:
    """A corpus of files, of which those with crc32(name) % HELD_OUT_EVERY == 0 are held out. Empty files do not count.

    If that would hold out no file or all of them, every HELD_OUT_EVERY-th piece is held out instead, starting with the
    first. Raises ConfigError if there is too little data, LocalError if a file cannot be read.
    """
    sizes = {}
    for name, path in found.items():
        with failing_as_local_error(str(path)), path.open("rb") as file:
            sizes[name] = file.seek(0, os.SEEK_END)
    length = max(PIECE_BYTES, -(-sum(sizes.values()) // MAX_PIECES))
    every = [(name, piece) for name in sorted(found) for piece in pieces(found[name], sizes[name], length)]
    chosen = [zlib.crc32(os.fsencode(name)) % HELD_OUT_EVERY == 0 for name, _ in every]
    if len(set(chosen)) < 2:
        chosen = [number % HELD_OUT_EVERY == 0 for number in range(len(every))]
    train = [piece for (_, piece), held in zip(every, chosen, strict=True) if not held]
    held_out = [piece for (_, piece), held in zip(every, chosen, strict=True) if held]
    if not train or not held_out:
        raise ConfigError(f"the data ({min(found)}, …) is too small: it needs a piece to train on and one to hold out")
    return FileCorpus(train, held_out, tokenizer)


def pieces(path: Path, size: int, length: int) -> list[FileSpan]:
    """The bytes of a file of `size` bytes, in pieces of `length`; an empty file has none."""
    return [FileSpan(path, at, min(at + length, size), at + length >= size) for at in range(0, size, length)]
