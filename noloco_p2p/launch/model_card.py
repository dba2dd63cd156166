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

`noloco generate PATH --prompt TEXT` prints a continuation, `noloco eval PATH` the loss on held-out data. `noloco.json`
contains every setting of the run, and names the replicas that the weights come from.
"""


MERGED = {
    "mean": "the mean of the replicas",
    "trimmed": "the mean of the replicas without the outermost values",
    "one": "one replica",
}


def model_card(record: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The text of the card, from the content of `noloco.json`, and `tokens` and `validation_loss` of the run's summary.

    `tokens` is left out for a resumed run, whose summary only counts those since it was resumed, and if the weights are
    more than a round beyond the steps of the summary: the run has been resumed, and not ended since. The loss is left
    out for a run that is not completed: it may have continued since, and its checkpoints are of another step. Both are
    left out if the run is completed but the weights are of an earlier step.
    """
    manifest = record["manifest"]
    if summary.get("completed") and record["step"] < manifest["steps"]:
        summary = {}
    later = record["step"] > (summary.get("inner_steps") or manifest["steps"]) + manifest["outer"]["inner_steps"]
    tokens = None if later or summary.get("resumed_from_step") is not None else summary.get("tokens")
    data, loss = manifest["data"], summary.get("validation_loss") if summary.get("completed") else None
    merged, nodes = MERGED[record["merge"]], humanize.plural(sum(map(len, record["stages"])), "node")
    rows = {
        "data": data["dataset"] or DATA.get(data["kind"], data["kind"]),
        "tokenizer": data["tokenizer"],
        "steps": f"{record['step']:,} of {manifest['steps']:,}, outer round {record['round']:,}",
        "tokens": humanize.count(tokens) if tokens else "",
        "validation loss": f"{humanize.loss(loss)} nats per token" if loss is not None else "",
        "swarm": f"{humanize.plural(manifest['stages'], 'stage')}, outer rule {manifest['outer']['rule']}",
        "weights": f"{merged} of each stage that had this round, {nodes} in all",
        "run": record["run_id"],
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    loader = "ByT5Tokenizer" if data["tokenizer"] == "bytes" and data["kind"] != "parquet" else "AutoTokenizer"
    names = {"name": manifest["name"], "family": manifest["model"]["family"], "version": record["version"]}
    return TEXT.format(**names, rows=lines, loader=loader)
