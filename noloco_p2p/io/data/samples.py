"""Draws samples from a corpus, by seed and peer: a stream's contents are a function of (manifest, peer, data) only.

Units of the corpus are read in the order of a permutation that is drawn from (seed, peer, pass) for each pass. About
half a million tokens make a pool. The pool's documents, each of which ends with EOS, are joined and cut into samples of
T+1 tokens. Neighbouring samples share one token, so that every token is a target once. Then the samples are permuted.
Padded kinds of data (parquet) make one sample of each document. What does not fill a sample at the end of a pool is
dropped. A place in the stream is where its pool began and how many of the pool's samples have been used: four numbers,
kept in checkpoints.

Shape legend: B microbatch, T sequence, N samples of a pool.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Batch, HostTensor, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data.corpora import EMPTY, Corpus, Mask, TokenizedDocument
from noloco_p2p.io.data.tokenizers import Ids

POOL_TOKENS = 1 << 19
VALIDATION_TOKENS = 1 << 17
"""The held-out samples are drawn from this many tokens, or from twice as many as they need if that is more."""

EMPTY_PASSES = 100
"""Passes over the data without a sample after which the data is considered to have none."""

IGNORED_TARGET = -100

Samples = list[TokenizedDocument]
"""Samples of T+1 ids each."""


class StreamPosition(NamedTuple):
    """A position in the stream: the first document of a pool, and how many of the pool's samples have been used."""

    pass_number: int = 0
    unit: int = 0
    document: int = 0
    sample: int = 0


class SampleStream:
    """An endless, seeded stream of microbatches, determined by its arguments and the data."""

    def __init__(self, corpus: Corpus, manifest: RunManifest, peer_id: PeerId) -> None:
        self._corpus = corpus
        self._manifest = manifest
        self._peer_id = peer_id

    def batches(self, start: StreamPosition) -> Iterator[tuple[Batch, StreamPosition]]:
        """Microbatches from `start` on, each with the place after it. Raises LocalError if the data cannot be read."""
        size = self._manifest.microbatch_size
        rows: Samples = []
        for row, place in self._samples(start):
            rows.append(row)
            if len(rows) == size:
                yield _batch(rows), place
                rows = []

    def validation(self) -> tuple[Batch, ...]:
        """Microbatches of the held-out part: as many as the manifest asks for, or fewer if there are not enough. Raises
        ConfigError if there is not even one."""
        length, size = self._manifest.sequence_length, self._manifest.microbatch_size
        wanted = self._manifest.evaluation.microbatches * size
        documents, held = [], 0
        for document in self._corpus.held_out():
            if document.mask is None or document.mask[1 : length + 1].any():
                documents.append(document)
                held += len(document.ids) if document.mask is None else min(len(document.ids), length + 1)
            if held >= max(VALIDATION_TOKENS, 2 * wanted * length):
                break
        pool = _cut(documents, length)
        generator(self._manifest.seed, "data", "validation").shuffle(pool)
        rows = pool[:wanted]
        if len(rows) < size:
            raise ConfigError(
                f"the held-out part of the data has {len(rows)} samples of {length + 1} tokens, fewer than one "
                f"microbatch ({size}): add data, or lower sequence_length or microbatch_size"
            )
        return tuple(_batch(rows[at : at + size]) for at in range(0, len(rows) - size + 1, size))

    def _samples(self, start: StreamPosition) -> Iterator[tuple[TokenizedDocument, StreamPosition]]:
        at, used = start._replace(sample=0), start.sample
        for pool, following in self._pools(at):
            generator(self._manifest.seed, "data", "pool", self._peer_id, *at[:3]).shuffle(pool)
            for n in range(used, len(pool)):
                yield pool[n], at._replace(sample=n + 1) if n + 1 < len(pool) else following
            at, used = following, 0

    def _pools(self, start: StreamPosition) -> Iterator[tuple[Samples, StreamPosition]]:
        length = self._manifest.sequence_length
        documents: list[TokenizedDocument] = []
        held = empty_passes = 0
        pass_number = start.pass_number
        for document, place in self._documents(start):
            if len(document.ids):
                documents.append(document)
                held += len(document.ids)
            ended = place.pass_number > pass_number
            pass_number = place.pass_number
            if held < POOL_TOKENS and not ended:
                continue
            if pool := _cut(documents, length):
                documents, held, empty_passes = [], 0, 0  # The pool has copied them.
                yield pool, place
                continue
            if document.mask is not None:
                documents, held = [], 0  # None of them has a target, whatever follows.
            empty_passes += ended
            if empty_passes == EMPTY_PASSES:
                raise LocalError(f"the data does not contain a single sample of {length + 1} tokens")

    def _documents(self, start: StreamPosition) -> Iterator[tuple[TokenizedDocument, StreamPosition]]:
        """All documents, pass after pass, each with the place after it; an empty document ends each pass."""
        pass_number, unit, document = start[:3]
        while True:
            order = list(range(self._corpus.units))
            generator(self._manifest.seed, "data", "pass", self._peer_id, pass_number).shuffle(order)
            while unit < len(order):
                take = self._take(pass_number, unit, document)
                for found in self._corpus.documents(order[unit], document, take):
                    document += 1
                    yield found, StreamPosition(pass_number, unit, document)
                unit, document = unit + 1, 0
            pass_number, unit = pass_number + 1, 0
            yield EMPTY, StreamPosition(pass_number)

    def _take(self, pass_number: int, unit: int, skip: int) -> Callable[[], bool]:
        chance = generator(self._manifest.seed, "data", "share", self._peer_id, pass_number, unit)
        for _ in range(skip):
            chance.random()
        return lambda: chance.random() < self._corpus.share


def _cut(documents: list[TokenizedDocument], length: int) -> Samples:
    """Samples of `length` + 1 ids: windows over the joined documents, or a padded sample of each masked document."""
    if any(document.mask is not None for document in documents):
        return list(_padded(documents, length))
    joined = np.concatenate([EMPTY.ids, *(document.ids for document in documents)])
    return [TokenizedDocument(joined[at : at + length + 1]) for at in range(0, len(joined) - length, length)]


def _padded(documents: list[TokenizedDocument], length: int) -> Iterator[TokenizedDocument]:
    """One sample per document that has a target."""
    for ids, mask in documents:
        if mask is not None and mask[1 : length + 1].any():
            missing = max(0, length + 1 - len(ids))
            yield TokenizedDocument(np.pad(ids[: length + 1], (0, missing)), np.pad(mask[: length + 1], (0, missing)))


def _batch(rows: Samples) -> Batch:
    """A microbatch of B samples: the first T ids of each are inputs, the last T are targets."""
    ids = np.stack([row.ids for row in rows])
    inputs, targets_BT = _tensor("inputs", "int32", ids[:, :-1]), ids[:, 1:]
    masks = [row.mask for row in rows if row.mask is not None]
    if not masks:
        return Batch(inputs, _tensor("targets", "int32", targets_BT))
    mask = np.stack(masks)
    targets_BT = np.where(mask[:, 1:] != 0, targets_BT, np.int32(IGNORED_TARGET))
    return Batch(inputs, _tensor("targets", "int32", targets_BT), _tensor("mask", "uint8", mask[:, :-1]))


def _tensor(name: str, dtype: str, values: Ids | Mask) -> HostTensor:
    little_endian = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return HostTensor(name, dtype, values.shape, memoryview(little_endian.tobytes()))
