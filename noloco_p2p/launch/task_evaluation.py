"""`noloco eval --tasks`: evaluates an exported model on tasks of lm-evaluation-harness, from local files and offline.

The harness (https://github.com/EleutherAI/lm-evaluation-harness) comes with the extra `eval`.
"""

import contextlib
import importlib.util
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noloco_p2p.errors import ConfigError
from noloco_p2p.io.data.tokenizers import first_line
from noloco_p2p.launch import export

BATCH_SIZE = 32


def run_tasks(out: Path, tasks: Sequence[str], directory: Path, *, device: str) -> dict[str, dict[str, float]]:
    """For each task, the number of its `items` and its metrics; NAME_stderr is the standard error of the metric NAME.

    `directory` holds the YAML files of the tasks; paths to data in them are relative to it. Raises ConfigError.
    """
    manifest, _ = export.read_record(out)
    if not directory.is_dir():
        raise ConfigError(f"--task-dir: there is no directory {directory}")
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs lm-evaluation-harness: pip install '.[eval]' in a checkout")

    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from noloco_p2p.compute.exported_model import ExportedModel, silence_transformers, tokenizer_in

    silence_transformers()
    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=str(directory.resolve()), include_defaults=False)
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        there = ", ".join(sorted(manager.all_tasks)) or "none"
        raise ConfigError(f"{directory} has no task {', '.join(unknown)}; there are: {there}")
    model = HFLM(
        ExportedModel.load(out, device).causal,
        tokenizer=tokenizer_in(out),
        max_length=manifest.sequence_length,
        batch_size=BATCH_SIZE,
        # Otherwise ByT5's tokenizer would put the end of text between a prompt and its completion.
        add_bos_token=False,
    )
    try:
        with contextlib.chdir(directory):
            found = simple_evaluate(model, tasks=list(tasks), task_manager=manager, log_samples=False)
        return {task: _numbers(found["results"][task]) for task in tasks}  # a tag has no results, and a group no items
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{directory}: a task cannot be evaluated: {first_line(error)}") from error


def task_lines(figures: dict[str, dict[str, float]]) -> list[str]:
    """A line for each metric of each task."""
    width = max(map(len, figures))
    return [
        f"{task:{width}}  {name} {value:.4f} ± {found.get(f'{name}_stderr', 0):.4f}  {found['items']:,} items"
        for task, found in figures.items()
        for name, value in found.items()
        if name != "items" and not name.endswith("_stderr")
    ]


def _numbers(result: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a result, with `exact_match,none` as `exact_match`; others, as `alias`, are left out."""
    numbers = {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
    items = int(numbers.pop("sample_len"))
    return {"items": items} | {name.removesuffix(",none"): v for name, v in numbers.items() if math.isfinite(v)}
