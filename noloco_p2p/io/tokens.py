"""Tokenizers: bytes as ByT5 numbers them, or any that AutoTokenizer can load. No data is read here.

transformers is imported only when a tokenizer other than `bytes` is asked for.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from noloco_p2p.errors import ConfigError

Ids = npt.NDArray[np.int32]

BYTE_OFFSET = 3
"""ByT5 puts <pad>, </s> and <unk> before the 256 bytes (arXiv 2105.13626, §3.1)."""

BYTE_VOCABULARY = 384
"""3 + 256 ids and ByT5's 125 sentinels."""

PROBE = "The quick brown fox jumps over 13 lazy dogs."


class Tokenizer(Protocol):
    """Text in, token ids out."""

    eos: int
    """Id that stands between two documents."""

    def encode(self, text: bytes) -> Ids:
        """Token ids of UTF-8 text, without special tokens; what is not UTF-8 is left out by all but `bytes`."""
        ...


class ByteTokenizer:
    """Equal to transformers' ByT5Tokenizer on text, a thousand times faster, and total on any bytes."""

    eos = 1

    def encode(self, text: bytes) -> Ids:
        """One id per byte."""
        return np.frombuffer(text, np.uint8).astype(np.int32) + np.int32(BYTE_OFFSET)


class HubTokenizer:
    """A tokenizer of transformers. Made by `load_tokenizer`."""

    def __init__(self, tokenizer: Any, eos: int) -> None:
        self._tokenizer = tokenizer
        self.eos = eos

    def encode(self, text: bytes) -> Ids:
        """Ids without special tokens."""
        decoded = text.decode("utf-8", errors="ignore")
        ids = self._tokenizer(decoded, add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return np.asarray(ids, np.int32)


def load_tokenizer(name: str, directory: str | None, vocabulary: int) -> Tokenizer:
    """The tokenizer `name` (a hub name, or `bytes`), from `directory` if given, for a model of `vocabulary` ids.

    Raises ConfigError when it cannot be loaded, has more ids than the model, or does not give back what it was given.
    """
    if name == "bytes":
        if directory is not None:
            raise ConfigError("tokenizer_dir is set, but data.tokenizer is 'bytes', which has no files; unset one")
        if vocabulary < BYTE_VOCABULARY:
            raise ConfigError(f"the byte tokenizer has {BYTE_VOCABULARY} ids, the model's vocab_size is {vocabulary}")
        return ByteTokenizer()
    if directory is not None and not Path(directory).is_dir():
        raise ConfigError(f"tokenizer_dir: there is no directory {directory}")
    return _from_transformers(name, directory, vocabulary)


def _from_transformers(name: str, directory: str | None, vocabulary: int) -> Tokenizer:
    from transformers import AutoTokenizer  # here, because importing it takes a second

    source = name if directory is None else directory
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"tokenizer {source} cannot be loaded: {_first_line(error)}") from error
    if len(tokenizer) > vocabulary:
        raise ConfigError(f"tokenizer {source} has {len(tokenizer)} ids, the model's vocab_size is {vocabulary}")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer {source} has no end-of-text token to put between documents")
    made = HubTokenizer(tokenizer, int(tokenizer.eos_token_id))
    returned = tokenizer.decode(made.encode(PROBE.encode()).tolist())
    if "".join(returned.lower().split()) != "".join(PROBE.lower().split()):
        raise ConfigError(f"tokenizer {source} turns {PROBE!r} into {returned!r}: its files are empty or do not fit")
    return made


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
