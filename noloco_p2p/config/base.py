"""The base class and the field types that all settings share."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1, le=2**53), WithJsonSchema({"type": "integer", "minimum": 1})]
"""A count that a float holds exactly, as clocks and rates are floats. The tables of settings leave its limit out."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def one_or_more(given: Any) -> Any:
    """Wraps a single string in a tuple, turns a list into a tuple, None into (), and leaves anything else as it is."""
    return (given,) if isinstance(given, str) else tuple(given or ()) if isinstance(given, list | None) else given


OneOrMore = BeforeValidator(one_or_more)
"""Validator for a list of strings: a single string stands for a list of one, null for an empty one."""


def matching(pattern: str, form: str) -> AfterValidator:
    """Validator for a string that must match all of `pattern`. The error message says that it must be `form`."""
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise PydanticCustomError("form", "must be {form}", {"form": form})
        return text

    return AfterValidator(check)


class Settings(BaseModel):
    """Base of all settings: immutable; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )
