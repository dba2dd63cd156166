"""The Batches port over real data: a thread reads ahead, and every microbatch comes with the place after it."""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Batch, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data import corpora, hub_corpora, tokenizers
from noloco_p2p.io.data.samples import SampleStream, StreamPosition

READ_AHEAD = 8
"""Most microbatches that wait in memory."""


class ThreadedBatches:
    """Implements `ports.Batches`: a thread reads ahead of `next`, which may be called once at a time."""

    def __init__(self, stream: SampleStream, validation: tuple[Batch, ...], start: StreamPosition, units: int) -> None:
        self._items = stream.batches(start)
        self._validation = validation
        self._place = start
        self._units = units
        self._thread = ThreadPoolExecutor(1, "batches")
        self._ahead: deque[Future[tuple[Batch, StreamPosition]]] = deque()
        """The next microbatches and the places after them. One that cannot be read stays the first."""
        self._closed = False

    async def next(self) -> Batch:
        """The next microbatch. Raises LocalError if the data cannot be read, and after `close`."""
        if self._closed:
            raise LocalError("the data is closed")
        while len(self._ahead) <= READ_AHEAD:
            self._ahead.append(self._thread.submit(next, self._items))
        batch, self._place = await asyncio.shield(asyncio.wrap_future(self._ahead[0]))
        self._ahead.popleft()
        return batch

    def validation(self) -> Iterator[Batch]:
        """The held-out microbatches."""
        return iter(self._validation)

    @property
    def cursor(self) -> dict[str, object]:
        """The place after the last microbatch returned, and the number of units in the corpus."""
        return {"units": self._units, **self._place._asdict()}

    def close(self) -> None:
        """Stop reading. A read that hangs is abandoned."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


def make_batches(
    manifest: RunManifest, node_config: NodeConfig, peer_id: PeerId, cursor: Mapping[str, object] | None = None
) -> ThreadedBatches:
    """The data of a stage-0 replica, from its beginning or from a `cursor`. Blocks while it reads the held-out part.

    Raises ConfigError for a glob without files, a tokenizer or data set that does not fit, too little data, or a cursor
    of other data; LocalError for data that cannot be read. Training data is not read before the first `next`.
    """
    corpus = _corpus(manifest, node_config)
    if isinstance(corpus, corpora.FileCorpus):
        # Only the first pieces are read, which would otherwise all be of the first files.
        generator(manifest.seed, "data", "held out").shuffle(corpus.held_out_pieces)
    stream = SampleStream(corpus, manifest, peer_id)
    start = StreamPosition() if cursor is None else _place(cursor, corpus.units)
    return ThreadedBatches(stream, stream.validation(), start, corpus.units)


def _corpus(manifest: RunManifest, node_config: NodeConfig) -> corpora.Corpus:
    data, files = manifest.data, node_config.data_files
    vocabulary = manifest.model.config.get("vocab_size")
    if not isinstance(vocabulary, int) or isinstance(vocabulary, bool):
        raise ConfigError("model.config.vocab_size must be set, so that the tokenizer can be checked against it")
    if data.dataset is not None and data.kind in ("stdlib", "text"):
        raise ConfigError(f"data.dataset is set, but data.kind '{data.kind}' reads local files; use c4 or parquet")
    if data.kind == "parquet":
        return hub_corpora.parquet_corpus(data, files, vocabulary)
    tokenizer = tokenizers.load_tokenizer(data.tokenizer, node_config.tokenizer_dir, vocabulary)
    if data.kind != "stdlib":
        found = corpora.matching_files(files) if data.kind == "text" else {}
        if found and all(map(hub_corpora.is_plain_text, found.values())):
            return corpora.file_corpus(found, tokenizer)
        return hub_corpora.text_corpus(data, files, tokenizer)
    if files:
        raise ConfigError("data_files is set, but data.kind 'stdlib' reads Python's own library; set data.kind: text")
    return corpora.stdlib_corpus(tokenizer)


def _place(cursor: Mapping[str, object], units: int) -> StreamPosition:
    numbers = [cursor.get(name) for name in ("units", *StreamPosition._fields)]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ConfigError("the checkpoint's position in the data is damaged")
    if numbers[0] != units:
        made = f"the checkpoint was made with data of {numbers[0]} parts (shards, or pieces of files)"
        raise ConfigError(f"{made}, but the data here has {units}: give this node the same data as before")
    return StreamPosition(*(int(str(number)) for number in numbers[1:]))
