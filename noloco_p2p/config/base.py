"""What all settings have in common."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def one_or_more(given: Any) -> Any:
    """A text that stands alone as a list of one; anything else as it is."""
    return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given


OneOrMore = BeforeValidator(one_or_more)
"""For a list of texts."""


def matching(pattern: str, form: str) -> AfterValidator:
    """For a text that matches the pattern as a whole; `form` says in words what that is."""
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise PydanticCustomError("form", "must be {form}", {"form": form})
        return text

    return AfterValidator(check)


class Settings(BaseModel):
    """Frozen values; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )
