"""The configuration reference of the README, made from the models of config.py."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.launch.yaml_entries import fields

NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "none"}
BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def reference_markdown() -> str:
    """Two tables, one for each model: key, type, default, sentence."""
    parts = []
    for title, model in (("Run manifest: equal on all nodes", RunManifest), ("Node: local", NodeConfig)):
        parts += [f"### {title}", "", "| key | type | default | |", "|---|---|---|---|", *_rows(model), ""]
    return "\n".join(parts)


def _rows(model: type[BaseModel]) -> list[str]:
    rows = []
    for key, field in fields(model):
        sentence = " ".join((field.description or "").split())
        cells = (f"`{'.'.join(key)}`", _type(field.annotation, field.metadata), _default(field), sentence)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _default(field: FieldInfo) -> str:
    return "none" if field.default is None else f"`{to_json(field.default).decode()}`"


def _type(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _type(inner, [part for each in more for part in getattr(each, "metadata", [each])])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(each, []) for each in get_args(annotation)))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin is tuple:
        return f"list of {_type(get_args(annotation)[0], [])}"
    if origin is dict:
        return "section"
    bounds = [f"{sign} {getattr(each, name)}" for name, sign in BOUNDS for each in metadata if hasattr(each, name)]
    return " ".join([NAMES[annotation], ", ".join(bounds)]).strip()
