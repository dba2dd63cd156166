"""Small data files of every kind that a run can be trained on."""

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow

ROWS_OF_TEXT = ("jsonl", "csv", "parquet", "arrow", "zst")
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
}


def write_text(folder: Path) -> tuple[str, ...]:
    """120 files of text."""
    for i in range(120):
        (folder / f"{i:03}.txt").write_text(f"<{i:03}>" * (20 + i % 7))
    return (str(folder / "*.txt"),)


def write_packed_text(kind: str, folder: Path) -> tuple[str, ...]:
    """One file of 150,000 lines; compressed text is read in blocks of 1,024."""
    text = "".join(f"<{n:05}>\n" for n in range(150_000))
    (folder / f"text.txt.{kind}").write_bytes(PACKED[kind](text.encode()))
    return (str(folder / f"*.{kind}"),)


def write_rows(kind: str, folder: Path) -> tuple[str, ...]:
    """Two files of 200 rows, in a format that pandas or pyarrow writes."""
    for part in range(2):
        rows = datasets.Dataset.from_dict({"text": [f"é{part}:{i}, " * 8 for i in range(200)], "n": list(range(200))})
        if kind == "arrow":
            rows.save_to_disk(folder / str(part))
        elif kind == "zst":
            packed = PACKED["zst"]("\n".join(map(json.dumps, rows)).encode())
            (folder / f"{part}.jsonl.zst").write_bytes(packed)
        else:
            write: dict[str, Any] = {"csv": rows.to_csv, "jsonl": rows.to_json, "parquet": rows.to_parquet}
            write[kind](folder / f"{part}.{kind}")
    return (str(folder / f"**/*.{kind}"),)


def write_ids(kind: str, folder: Path) -> tuple[str, ...]:
    """Rows of up to 29 token ids below 32, the last third of which is masked."""
    chance = random.Random(0)
    ids = [[chance.randrange(32) for _ in range(chance.randrange(1, 30))] for _ in range(600)]
    mask = [[1] * (len(row) - len(row) // 3) + [0] * (len(row) // 3) for row in ids]
    rows = datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": mask})
    if kind == "parquet":
        rows.to_parquet(folder / "reddit.parquet", batch_size=100)
    elif kind == "jsonl":
        rows.to_json(folder / "reddit.jsonl")
    else:
        rows.save_to_disk(folder)
    return (str(folder / f"*.{kind}"),)
