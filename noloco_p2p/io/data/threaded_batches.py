"""The Batches port over real data: a thread reads ahead, and every microbatch comes with the place after it."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Batch, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data import corpora, hub_corpora, tokenizers
from noloco_p2p.io.data.samples import SampleStream, StreamPosition

READ_AHEAD = 8
"""Most microbatches that wait in memory; when there are that many, the reading thread pauses."""


class ThreadedBatches:
    """Implements `ports.Batches`: a thread fills a bounded queue of (microbatch, place after it)."""

    def __init__(self, stream: SampleStream, validation: tuple[Batch, ...], start: StreamPosition, units: int) -> None:
        self._stream = stream
        self._validation = validation
        self._place = start
        self._units = units
        self._changed = threading.Condition()
        self._ready: deque[tuple[Batch, StreamPosition]] = deque()
        self._waiters: list[Future[None]] = []
        self._ended: LocalError | None = None
        self._thread: threading.Thread | None = None

    async def next(self) -> Batch:
        """The next microbatch. Raises LocalError if the data cannot be read, and after `close`."""
        if self._thread is None and self._ended is None:
            self._thread = threading.Thread(target=self._read, args=(self._place,), name="batches", daemon=True)
            self._thread.start()
        while True:
            with self._changed:
                if self._ready:
                    batch, self._place = self._ready.popleft()
                    self._changed.notify()
                    return batch
                if self._ended is not None:
                    raise self._ended
                arrival: Future[None] = Future()
                self._waiters.append(arrival)
            await asyncio.wrap_future(arrival)

    def validation(self) -> Iterator[Batch]:
        """The held-out microbatches."""
        return iter(self._validation)

    @property
    def cursor(self) -> dict[str, object]:
        """The place after the last microbatch returned, and the number of units in the corpus."""
        return {"units": self._units, **self._place._asdict()}

    def close(self) -> None:
        """Stop the reading thread. If it hangs in a read, it is abandoned after a second (it is a daemon thread)."""
        self._end(LocalError("the data is closed"))
        with self._changed:
            self._ready.clear()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _read(self, start: StreamPosition) -> None:
        reason = LocalError("the thread that reads the data has died")
        try:
            for item in self._stream.batches(start):
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < READ_AHEAD or self._ended is not None)
                    if self._ended is not None:
                        return
                    self._ready.append(item)
                    self._wake()
        except (LocalError, ConfigError) as error:
            reason = LocalError(str(error))
        finally:
            self._end(reason)

    def _end(self, reason: LocalError) -> None:
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()
            self._wake()

    def _wake(self) -> None:
        """Wake every waiter. The lock must be held."""
        for arrival in self._waiters:
            if arrival.set_running_or_notify_cancel():
                arrival.set_result(None)
        self._waiters.clear()


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
