"""A real node trains on data files of every kind that is accepted, and evaluates on the held-out part of it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from processes import SMALL, node_processes, settings
from row_files import PACKED, ROWS_OF_TEXT, write_ids, write_packed_text, write_rows, write_text
from soak import soak

STEPS = 30
KINDS: dict[str, tuple[str, Callable[[Path], tuple[str, ...]]]] = {
    "text": ("text", write_text),
    **{f"text.{kind}": ("text", partial(write_packed_text, kind)) for kind in PACKED},
    **{f"rows.{kind}": ("text", partial(write_rows, kind)) for kind in ROWS_OF_TEXT},
    **{f"ids.{kind}": ("parquet", partial(write_ids, kind)) for kind in ("parquet", "arrow", "jsonl")},
}


ALWAYS = ["ids.arrow", "rows.csv"]
"""The others differ only in what the tests of the data reader cover."""


@pytest.mark.parametrize("name", [*ALWAYS, *soak(sorted(set(KINDS) - set(ALWAYS)))])
def test_a_node_trains_on_files_of_this_kind(name: str, tmp_path: Path) -> None:
    kind, write = KINDS[name]
    (tmp_path / "data").mkdir()
    (files,) = write(tmp_path / "data")
    run = settings(stages="1", start_replicas="1", steps=str(STEPS), data__kind=kind)
    run += settings(inner__peak_learning_rate="0.01", inner__warmup_steps="2")
    with node_processes(tmp_path) as nodes:
        node = nodes.start(*SMALL, *run, *settings(data_files=f"['{files}']"), own_dir="node")
        assert node.end() == 0, node.logged() + node.printed()
        summary = node.summary()
        nodes.nothing_left()
    assert (summary["state"], summary["inner_steps"], summary["dropped"]) == ("finished", STEPS, {})
    assert summary["final_loss"] < summary["first_loss"] - 1
    assert summary["validation_loss"] < summary["first_loss"] - 1
