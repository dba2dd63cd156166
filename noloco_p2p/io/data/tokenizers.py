"""Tokenizers: ByT5's numbering of bytes, or any tokenizer that AutoTokenizer can load. No data is read here.

transformers is imported only for a tokenizer other than `bytes`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from noloco_p2p.errors import ConfigError

Ids = npt.NDArray[np.int32]

BYTE_OFFSET = 3
"""ByT5 puts <pad>, </s> and <unk> in front of the 256 bytes (arXiv 2105.13626, §3.1)."""

BYTE_VOCABULARY = 384
"""3 + 256 ids and ByT5's 125 sentinels."""

PROBE = "The quick brown fox jumps over 13 lazy dogs."


class Tokenizer(NamedTuple):
    """Turns text into token ids."""

    eos: int
    """The id between two documents."""
    encode: Callable[[bytes], Ids]
    """Returns the token ids of UTF-8 text, without special tokens. All but `bytes` drop what is not valid UTF-8. Raises
    ValueError for an id that the model does not have."""


def byte_ids(text: bytes) -> Ids:
    """One id per byte: the ids of transformers' ByT5Tokenizer, a thousand times faster, and for arbitrary bytes."""
    return np.frombuffer(text, np.uint8).astype(np.int32) + np.int32(BYTE_OFFSET)


BYTES = Tokenizer(1, byte_ids)


def load_tokenizer(name: str, directory: str | None, vocabulary: int) -> Tokenizer:
    """Load the tokenizer `name` (a hub name, or `bytes`), from `directory` if given, for a model of `vocabulary` ids.

    Raises ConfigError if it cannot be loaded, has more ids than the model, or does not reproduce a text it has encoded.
    """
    if name == "bytes":
        if directory is not None:
            raise ConfigError("tokenizer_dir is set, but data.tokenizer is 'bytes', which has no files; unset one")
        if vocabulary < BYTE_VOCABULARY:
            raise ConfigError(f"the byte tokenizer has {BYTE_VOCABULARY} ids, the model's vocab_size is {vocabulary}")
        return BYTES
    if directory is not None and not Path(directory).is_dir():
        raise ConfigError(f"tokenizer_dir: there is no directory {directory}")
    return _from_transformers(name, directory, vocabulary)


def _from_transformers(name: str, directory: str | None, vocabulary: int) -> Tokenizer:
    from transformers import AutoTokenizer  # here, because importing it takes a second

    source = name if directory is None else directory
    how = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False, "verbose": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        returned = tokenizer.decode(tokenizer(PROBE, **how)["input_ids"])
    except Exception as error:  # `tokenizers` raises nothing more specific for a file of another version
        raise ConfigError(f"tokenizer {source} cannot be loaded: {first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer {source} has no end-of-text token to put between documents")
    # Text never yields special tokens other than EOS, so they need no place in the vocabulary (Llama 3 has 254 unused).
    needed = max(tokenizer.vocab_size, tokenizer.eos_token_id + 1)
    if needed > vocabulary:
        raise ConfigError(f"tokenizer {source} has {needed} ids, the model's vocab_size is {vocabulary}")

    def encode(text: bytes) -> Ids:
        """The ids of the text taken literally: what looks like a special token is encoded as text."""
        ids = np.asarray(tokenizer(text.decode("utf-8", errors="ignore"), **how)["input_ids"], np.int32)
        if ids.size and ids.max() >= vocabulary:
            raise ValueError(f"the tokenizer returned id {ids.max()}, but the model's vocab_size is {vocabulary}")
        return ids

    if "".join(returned.lower().split()) != "".join(PROBE.lower().split()):
        raise ConfigError(f"tokenizer {source} turns {PROBE!r} into {returned!r}: its files are empty or do not match")
    return Tokenizer(int(tokenizer.eos_token_id), encode)


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or all of it if that line introduces a list. Its type's name if it has
    no message."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
    return " ".join(str(error).split()) if line.endswith(":") else line
