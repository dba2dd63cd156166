"""Reads prompts with their completions from JSON lines, and pads them to batches.

This module does not import torch, so that bad data is found quickly. Shape legend: B examples per batch, T sequence.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from noloco_p2p.core.messages import Batch, HostTensor
from noloco_p2p.errors import NO_JSON, ConfigError
from noloco_p2p.io.data import corpora
from noloco_p2p.io.data.samples import IGNORED_TARGET
from noloco_p2p.io.data.tokenizers import Ids, Tokenizer


class Example(NamedTuple):
    """A prompt, its completion, and the end of text."""

    ids: Ids
    """T+1 ids: all but the last are inputs, all but the first are targets."""
    given: int
    """How many of the first ids are the prompt: at least one."""


def example(tokenizer: Tokenizer, prompt: str, completion: str) -> Example:
    """An example from texts, encoded separately as in generation. Raises ValueError for an id unknown to the model."""
    end = np.full(1, tokenizer.eos, np.int32)
    encoded = tokenizer.encode(prompt.encode())
    given = encoded if len(encoded) else end
    return Example(np.concatenate([given, tokenizer.encode(completion.encode()), end]), len(given))


def read_examples(patterns: Sequence[str], tokenizer: Tokenizer) -> list[Example]:
    """The examples in files of JSON lines, `{"prompt": "…", "completion": "…"}`, in the order of the files' names.

    Other keys and blank lines are ignored. Raises ConfigError, naming the file and the line.
    """
    found = []
    for name, path in sorted(corpora.matching_files(tuple(patterns)).items()):
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} cannot be read as UTF-8 text: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                found += [example(tokenizer, *_fields(line))] if line.strip() else []
            except NO_JSON as error:
                raise ConfigError(f"{name}, line {number}: {getattr(error, 'msg', error)}") from error
    if not found:
        raise ConfigError(f"{', '.join(patterns)}: no line has a prompt and a completion")
    return found


def _fields(line: str) -> tuple[str, str]:
    """(prompt, completion) of a line. Raises ValueError if it is anything else, invalid JSON included."""
    fields = json.loads(line)
    for name in ("prompt", "completion"):
        if not isinstance(fields, dict) or not isinstance(fields.get(name), str):
            raise ValueError(f"no `{name}`; every line must be an object with the texts `prompt` and `completion`")
    return fields["prompt"], fields["completion"]


def padded(examples: Sequence[Example]) -> Batch:
    """B×T inputs and targets, padded to the longest example; targets in prompts and padding are ignored.

    Padding is on the right, where no token that counts attends to it.
    """
    shape = len(examples), max(len(one.ids) for one in examples) - 1
    inputs_BT, targets_BT = np.zeros(shape, "<i4"), np.full(shape, IGNORED_TARGET, "<i4")
    for row, one in enumerate(examples):
        inputs_BT[row, : len(one.ids) - 1] = one.ids[:-1]
        targets_BT[row, one.given - 1 : len(one.ids) - 1] = one.ids[one.given :]
    tensors = (("inputs", inputs_BT), ("targets", targets_BT))
    return Batch(*(HostTensor(name, "int32", shape, memoryview(values.tobytes())) for name, values in tensors))
