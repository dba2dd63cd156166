"""`noloco tasks`: five small generated tasks: addition, sorting, brackets, copying, recall.

An item is a prompt, its completion, and four choices of equal length, one of which is the completion. So a model can be
scored in two ways: by whether the text it generates is exactly right, and by whether the right choice is the likeliest.
Everything is ASCII and at most MAX_BYTES bytes long, including the end of text. The items of a task are all different,
and are determined by the seed.
"""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

from noloco_p2p.core.seeds import generator
from noloco_p2p.io.durable_files import writing
from noloco_p2p.launch import homes
from noloco_p2p.launch.homes import Home

CHOICES, MAX_BYTES = 4, 64
TRAIN = "train.jsonl"
LETTERS = "abcdefgh"
PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}


class TaskItem(NamedTuple):
    """One item of a task."""

    prompt: str
    completion: str
    choices: tuple[str, ...]
    answer: int
    """Index of the completion among the choices."""


Drawn = tuple[str, str, str]
"""Input, answer, and the characters that answers consist of."""


def addition(rng: Random) -> Drawn:
    """A number of up to three digits plus one of a single digit."""
    left, right = rng.randrange(1000), rng.randrange(10)
    return f"{left}+{right}", str(left + right), string.digits


def sorting(rng: Random) -> Drawn:
    """Letters; the answer has them in order."""
    letters = rng.choices(LETTERS, k=rng.randint(3, 6))
    return "".join(letters), "".join(sorted(letters)), LETTERS


def brackets(rng: Random) -> Drawn:
    """Brackets opened and partly closed; the answer closes the rest."""
    opened, text = "", ""
    while len(text) < 8 or len(opened) < 2:
        if opened and rng.random() < 0.4:
            text, opened = text + PAIRS[opened[-1]], opened[:-1]
        else:
            opened += rng.choice(list(PAIRS))
            text += opened[-1]
    return text, "".join(PAIRS[one] for one in reversed(opened)), "".join(PAIRS.values())


def copying(rng: Random) -> Drawn:
    """Letters; the answer repeats them."""
    letters = "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))
    return letters, letters, LETTERS


def recall(rng: Random) -> Drawn:
    """Ask for the value of one of three keys. The choices are the three stored values and one that was not stored."""
    keys, values = rng.sample(LETTERS, 3), "".join(rng.sample(string.digits, 4))
    stored = " ".join(f"{key}={value}" for key, value in zip(keys, values, strict=False))
    asked = rng.randrange(3)
    return f"{stored} {keys[asked]}", values[asked], values


TASKS = {task.__name__: task for task in (addition, sorting, brackets, copying, recall)}


def items(task: str, seed: int, count: int) -> list[TaskItem]:
    """`count` different items; a longer list starts with the shorter one. Raises ValueError if it finds fewer."""
    rng, found = generator(seed, "task", task), dict[str, TaskItem]()
    for _ in range(10 * count):
        given, right, alphabet = TASKS[task](rng)
        if given not in found:
            choices = _choices(rng, right, alphabet)
            found[given] = TaskItem(f"{task} {given}=", right, choices, choices.index(right))
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"{task} has only about {len(found):,} different items, not {count:,}")


def _choices(rng: Random, right: str, alphabet: str) -> tuple[str, ...]:
    """The right choice and others with one character changed, in random order."""
    found = [right]
    while len(found) < CHOICES:
        at = rng.randrange(len(right))
        wrong = right[:at] + rng.choice(alphabet) + right[at + 1 :]
        if wrong not in found:
            found.append(wrong)
    rng.shuffle(found)
    return tuple(found)


def write_tasks(out: Path, seed: int, train: int, test: int) -> dict[str, list[TaskItem]]:
    """Write TRAIN for `noloco finetune`, with `train` items of each task in turn. For each task, also write `test`
    other items and two tasks of lm-evaluation-harness that use them, NAME and NAME_choice. Returns the test items by
    task.

    Raises LocalError if the files cannot be written.
    """
    homes.require("", out, Home.TASKS, Home.EMPTY)
    made = {task: items(task, seed, train + test) for task in TASKS}
    tested = {task: found[:test] for task, found in made.items()}
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        trained = zip(*(found[test:] for found in made.values()), strict=True)
        _write_lines(out / TRAIN, [one for same in trained for one in same])
        for task, found in tested.items():
            _write_lines(out / f"{task}.jsonl", found)
            for name, settings in _harness_tasks(task, found).items():
                (out / f"{name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return tested


def _write_lines(path: Path, found: Sequence[TaskItem]) -> None:
    path.write_text("".join(json.dumps(one._asdict()) + "\n" for one in found), encoding="utf-8")


def _harness_tasks(task: str, found: Sequence[TaskItem]) -> dict[str, dict[str, Any]]:
    """Exact match by greedy decoding, and choice by likelihood. Paths are relative to the directory."""
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{task}.jsonl"}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "target_delimiter": "",
    }
    longest = max(len(one.completion) for one in found) + 1
    exact = {
        "output_type": "generate_until",
        "doc_to_target": "{{completion}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": longest},
        "metric_list": [{"metric": "exact_match"}],
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
    return {
        task: {"task": task, **shared, **exact},
        f"{task}_choice": {"task": f"{task}_choice", **shared, **choice, "metric_list": [{"metric": "acc"}]},
    }
