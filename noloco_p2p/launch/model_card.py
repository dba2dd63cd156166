"""The model card of an export: what the model is, what it was trained on, and how to load it."""

from collections.abc import Mapping
from typing import Any

from noloco_p2p import humanize

CARD = "README.md"
DATA = {"stdlib": "the source text of Python's standard library", "text": "local text files"}
TEXT = """---
library_name: transformers
pipeline_tag: text-generation
tags: [noloco]
---

# {name}

A language model of the family {family}, trained by a swarm of peers with noloco_p2p {version}.

| | |
|---|---|
{rows}

```python
from transformers import AutoModelForCausalLM, {loader}

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = {loader}.from_pretrained("PATH")
```

`noloco generate PATH --prompt TEXT` prints what it says, `noloco eval PATH` its loss on held-out data. `noloco.json`
has every setting of the run, and says which replicas the weights are from.
"""


MERGED = {
    "mean": "the mean of all replicas",
    "trimmed": "the mean of all replicas without the outermost values",
    "one": "one replica",
}


def model_card(record: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """From what `noloco.json` has, and the summary of the run where it is known: its `tokens` and `validation_loss`.

    The summary of a resumed run has only the tokens since it was resumed, which are left out. The loss of a run that is
    not completed is left out too: it may have gone on since, and its checkpoints are of another step. Of a completed
    run both are left out for weights of an earlier step than its last.
    """
    manifest = record["manifest"]
    if summary.get("completed") and record["step"] < manifest["steps"]:
        summary = {}
    tokens = summary.get("tokens") if summary.get("resumed_from_step") is None else None
    data, loss = manifest["data"], summary.get("validation_loss") if summary.get("completed") else None
    merged = MERGED[record["merge"]]
    rows = {
        "data": data["dataset"] or DATA.get(data["kind"], data["kind"]),
        "tokenizer": data["tokenizer"],
        "steps": f"{record['step']:,} of {manifest['steps']:,}, outer round {record['round']:,}",
        "tokens": humanize.count(tokens) if tokens else "",
        "validation loss": f"{humanize.loss(loss)} nats per token" if loss is not None else "",
        "swarm": f"{humanize.plural(manifest['stages'], 'stage')}, outer rule {manifest['outer']['rule']}",
        "weights": f"{merged} of each stage, of {sum(map(len, record['stages']))} nodes",
        "run": record["run_id"],
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    loader = "ByT5Tokenizer" if data["tokenizer"] == "bytes" and data["kind"] != "parquet" else "AutoTokenizer"
    names = {"name": manifest["name"], "family": manifest["model"]["family"], "version": record["version"]}
    return TEXT.format(**names, rows=lines, loader=loader)
