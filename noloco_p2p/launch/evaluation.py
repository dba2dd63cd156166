"""`noloco eval` and `noloco generate`: the loss of an exported model, and text that it writes.

Shape legend: T sequence length, N samples.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite, log
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from noloco_p2p.compute.exported_model import ExportedModel, chat_ids, load_decoder, silence_transformers
from noloco_p2p.config import DataSettings, NodeConfig, RunManifest
from noloco_p2p.core.messages import Batch
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data import corpora, hub_corpora
from noloco_p2p.io.data.samples import IGNORED_TARGET
from noloco_p2p.io.data.threaded_batches import make_batches
from noloco_p2p.io.data.tokenizers import BYTE_OFFSET, Ids, Tokenizer
from noloco_p2p.launch.examples import Example, padded
from noloco_p2p.launch.export import REPLICAS, TOKENIZER, exported_tokenizer, read_record, recorded_data
from noloco_p2p.launch.progress_line import counted
from noloco_p2p.launch.swarm_summary import perplexity

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Returned by decoders for an incomplete character, and for bytes that are not UTF-8."""


def run_eval(
    out: Path, data: Sequence[str], *, held_out: bool, microbatches: int | None, device: str
) -> dict[str, Any]:
    """The figures of an exported directory: of the merged model, and the mean over its replicas if it has any.

    `data` is `stdlib`, files or globs; if empty, the data of the run. All tokens of files are used, or with `held_out`
    only those that the run would hold out. Raises ConfigError, LocalError.
    """
    manifest, replicas = read_record(out)
    silence_transformers()
    batches = _batches(manifest, out, data, held_out, microbatches)
    if not batches:
        raise ConfigError(f"{', '.join(data)}: no text to evaluate on")
    with counted("evaluating", len(batches) * (1 + replicas)) as done:
        merged, tokens = _loss(out, batches, device, done)
        single = [_loss(out / REPLICAS / str(i), batches, device, done)[0] for i in range(replicas)]
    size = _bytes_of(manifest, out, batches)
    bits_per_nat = tokens / size / log(2) if size else None
    figures = {"merged": _figures(merged, bits_per_nat), "tokens": tokens, "bytes": size, "microbatches": len(batches)}
    if single:
        figures |= {"replica_mean": _figures(fmean(single), bits_per_nat), "replica_losses": single}
    return figures


def table_lines(figures: dict[str, Any]) -> list[str]:
    """The figures for people: merged model and mean of the replicas, side by side."""
    heads = {"merged": "merged", "replica_mean": f"mean of {len(figures.get('replica_losses', []))} replicas"}
    columns = [name for name in heads if name in figures]
    rows = {"loss": "loss (nats/token)", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
    lines = [f"{'':18}" + "".join(f"{heads[name]:>20}" for name in columns)]
    for key, title in rows.items():
        values = [figures[name][key] for name in columns]
        lines.append(f"{title:18}" + "".join(f"{'-' if value is None else f'{value:.5f}':>20}" for value in values))
    size = "" if figures["bytes"] is None else f", {figures['bytes']:,} bytes of text"
    return [*lines, f"{figures['tokens']:,} tokens{size}"]


def run_generate(
    out: Path, prompt: str, *, tokens: int, temperature: float, seed: int, device: str, chat: bool = False
) -> Iterator[str]:
    """The merged model's continuation of `prompt`, in pieces: at most `tokens` ids, fewer if it ends the text.

    `chat`: its answer to `prompt` under the chat template. Raises ConfigError, LocalError.
    """
    manifest, _ = read_record(out)
    silence_transformers()
    tokenizer = exported_tokenizer(manifest, out)
    decode = load_decoder(out)
    # A command line may contain bytes that are not UTF-8. They are used as they are.
    with corpora.failing_as_local_error("the prompt", "encoded"):
        given = chat_ids(out, prompt) if chat else tokenizer.encode(prompt.encode(errors="surrogateescape")).tolist()
    given = given or [tokenizer.eos]
    if max(given) >= int(str(manifest.model.config["vocab_size"])):
        raise ConfigError(f"{out}: the chat template uses tokens that the model does not know")
    endless = ExportedModel.load(out, device).continuation(given, manifest.sequence_length, temperature, seed)
    ids = itertools.takewhile(lambda one: one != tokenizer.eos, itertools.islice(endless, tokens))
    return pieces(decode, given, ids)


def pieces(decode: Callable[[Sequence[int]], str], given: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
    """The text of `ids` after `given`, in pieces, as the ids come. A character may take several ids.

    Decoders drop a space at the beginning of a text. So each piece is decoded together with the piece before it, but
    not with everything before, which would take ever longer.
    """
    seen, since, said = list(given), 0, len(given)
    for one in ids:
        seen.append(one)
        before, text = decode(seen[since:said]), decode(seen[since:])
        if len(text) > len(before) and not text.endswith(UNFINISHED):
            yield text[len(before) :]
            since, said = said, len(seen)
    if said < len(seen):
        yield decode(seen[since:])[len(decode(seen[since:said])) :]


def _loss(directory: Path, batches: Sequence[Batch], device: str, done: Callable[[], None]) -> tuple[float, int]:
    """(nats per token over all microbatches, number of tokens). Raises LocalError if the loss is not finite."""
    model = ExportedModel.load(directory, device)
    nats, tokens = 0.0, 0
    for batch in batches:
        one = model.loss(batch)
        nats, tokens = nats + one.loss_sum, tokens + one.tokens
        done()
    if not isfinite(nats):
        raise LocalError(f"{directory}: the model's loss is not finite: its weights are broken")
    return nats / tokens, tokens


def _figures(loss: float, bits_per_nat: float | None) -> dict[str, float | None]:
    """The figures for a loss in nats per token. A perplexity beyond the range of a float is None."""
    return {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": bits_per_nat and loss * bits_per_nat}


def _batches(
    manifest: RunManifest, out: Path, data: Sequence[str], held_out: bool, microbatches: int | None
) -> tuple[Batch, ...]:
    """The microbatches to evaluate on. Raises ConfigError, LocalError."""
    files = () if tuple(data) == ("stdlib",) else tuple(data)
    if files and not held_out:
        return tuple(itertools.islice(_all_of(files, manifest, exported_tokenizer(manifest, out)), microbatches))
    used = manifest.data
    if data:
        kind = "stdlib" if not files else "text" if used.kind == "stdlib" else used.kind
        used = DataSettings(kind=kind, tokenizer=used.tokenizer)
    elif used.kind != "stdlib" and used.dataset is None:
        files = recorded_data(out)
        if not files:
            raise ConfigError("the run read local files: name them with --data; --held-out uses what it held out")
    measure = manifest.evaluation.model_copy(update={"microbatches": microbatches} if microbatches else {})
    changed = manifest.model_copy(update={"data": used, "evaluation": measure})
    local = NodeConfig(data_files=files, tokenizer_dir=None if used.tokenizer == "bytes" else str(out))
    return tuple(make_batches(changed, local, "").validation())


def _all_of(files: tuple[str, ...], manifest: RunManifest, tokenizer: Tokenizer) -> Iterator[Batch]:
    """Batches with every token of the files as a target once, in the order of the files' names.

    An end of text precedes the first token. Raises ConfigError, LocalError.
    """
    size, length = manifest.microbatch_size * manifest.sequence_length, manifest.sequence_length
    waiting = np.full(1, tokenizer.eos, np.int32)
    for _, path in sorted(corpora.matching_files(files).items()):
        for document in hub_corpora.documents_of(path, tokenizer):  # the last id of each is the end of text
            waiting = np.concatenate([waiting, document.ids])
            while len(waiting) > size:
                yield _batch(waiting[: size + 1], length)
                waiting = waiting[size:]
    if len(waiting) > 1:
        yield _batch(waiting, length)


def _batch(ids: Ids, length: int) -> Batch:
    """N×T inputs and targets of consecutive samples. The last one may be shorter, and is padded."""
    return padded([Example(ids[at : at + length + 1], 1) for at in range(0, len(ids) - 1, length)])


def _bytes_of(manifest: RunManifest, out: Path, batches: Sequence[Batch]) -> int | None:
    """Bytes of text that the targets stand for; None if there is no tokenizer to decode them."""
    if not (out / TOKENIZER).exists():
        return None
    rows = [row for batch in batches for row in np.frombuffer(batch.targets.data, "<i4").reshape(batch.targets.shape)]
    heads = [one for batch in batches for one in np.frombuffer(batch.inputs.data, "<i4")[:: batch.inputs.shape[1]]]
    if manifest.data.tokenizer == "bytes" and manifest.data.kind != "parquet":
        return sum(int(((row >= BYTE_OFFSET) & (row < BYTE_OFFSET + 256)).sum()) for row in rows)
    decode = load_decoder(out)
    # With the id before them: a character may begin in it, and decoders drop a space at the beginning of a text.
    texts = ([int(one) for one in (head, *row) if one != IGNORED_TARGET] for head, row in zip(heads, rows, strict=True))
    return sum(len(decode(ids).encode()) - len(decode(ids[:1]).encode()) for ids in texts)
