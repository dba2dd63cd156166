"""Makes the tables of all settings and all metrics in the repository's READMEs from the code:

    python tests/support/readme_tables.py

In a README, such a table is between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model
from pydantic_core import to_json

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.launch.yaml_entries import fields

FILES = ("configs/README.md", "docker/README.md")
BLOCK = re.compile(r"(?s)(<!-- table: (\w+) -->\n).*?(<!-- end -->)")

TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
TYPES |= {"null": "none", "object": "section"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def update_files(root: Path) -> list[Path]:
    """Rewrite the tables in the repository at `root`. Returns the files that changed."""
    texts = {root / name: (root / name).read_text("utf-8") for name in FILES}
    changed = [path for path, text in texts.items() if updated(text) != text]
    for path in changed:
        path.write_text(updated(texts[path]), "utf-8")
    return changed


def updated(text: str) -> str:
    """The text of a README with its tables made anew from the code."""
    tables = {"configuration": configuration_markdown, "metrics": metrics_markdown}
    return BLOCK.sub(lambda found: f"{found[1]}{tables[found[2]]()}{found[3]}", text)


def configuration_markdown() -> str:
    """Two tables, one for each model of `config`: key, type, default, description."""
    parts = []
    for title, model in (("Run manifest: equal on all nodes", RunManifest), ("Node: local", NodeConfig)):
        parts += [f"### {title}", "", "| key | type | default | |", "|---|---|---|---|", *_rows(model), ""]
    return "\n".join(parts)


def _rows(model: type[BaseModel]) -> list[str]:
    rows = []
    for key, field in fields(model):
        one: Any = (field.annotation, field)
        schema = create_model("One", value=one).model_json_schema()["properties"]["value"]
        default = "none" if field.default is None else f"`{to_json(field.default).decode()}`"
        cells = (f"`{'.'.join(key)}`", _type(schema), default, " ".join((field.description or "").split()))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def metrics_markdown() -> str:
    """A table of a node's own metrics: name, type, labels with the values known in advance, meaning."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    endings = {"counter": "_total", "info": "_info"}
    fresh, used = _node_metrics()
    for name, family in used.items():
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        known = {label: _known(fresh[name], label) if name in fresh else [] for label in labels}
        cells = (f"`{label}`" + (f" ({', '.join(values)})" if values else "") for label, values in known.items())
        ending = endings.get(family.type, "")
        rows.append(f"| `{name}{ending}` | {family.type} | {'; '.join(cells)} | {family.documentation} |")
    return "\n".join(rows) + "\n"


def _known(family: Any, label: str) -> list[str]:
    """The values of a label that a fresh node already has, without numbers and values that depend on the node."""
    values = dict.fromkeys(sample.labels.get(label, "") for sample in family.samples)
    return [f"`{value}`" for value in values if value.isidentifier() and family.type != "info"]


def _node_metrics() -> tuple[dict[str, Any], dict[str, Any]]:
    """(metric families of a fresh node, of one in use). In the second, every metric with labels has a sample."""
    from noloco_p2p.core.messages import Advert
    from noloco_p2p.core.status import Status, Trouble
    from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry

    def families() -> dict[str, Any]:
        return {f.name: f for f in telemetry.registry.collect() if f.name.startswith("noloco_")}

    telemetry = PrometheusTelemetry(1)
    try:
        fresh, trouble = families(), Trouble("disk", "full", 1.0)
        telemetry.identify(peer_id="p", run_id="r", stage="0", version="1")
        telemetry.watch(lambda: Status(Advert("P", "ab", 0, ()), "tiny", 1, 9, 0, troubles=(trouble,)), Path())
        telemetry.measure_memory(None)
        telemetry.event("guards", rounds={0: 1})
        telemetry.event("bytes", direction="in", kind="snapshot", bytes=1)
        telemetry.event("membership", counts={(0, "training"): 1})
        return fresh, families()
    finally:
        telemetry.close()


def _type(schema: Mapping[str, Any]) -> str:
    """The type of a key in words, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    bounds = [f"{sign} {schema[name]}".removesuffix(".0") for name, sign in BOUNDS.items() if name in schema]
    return " ".join([TYPES[schema["type"]], ", ".join(bounds)]).strip()


if __name__ == "__main__":
    for written in update_files(Path(__file__).parents[2]):
        print(f"wrote {written}")  # noqa: T201
