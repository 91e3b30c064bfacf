"""What all sections of a recipe share: closed (an unknown key is refused), frozen, and strict (`"3"` is no integer)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Strings = Annotated[tuple[str, ...], Field(strict=False)]
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """What all sections share: closed, frozen, strict, documented."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def contradiction(key: str, problem: str, remedy: str) -> PydanticCustomError:
    """An error about one dotted `key` that only the whole recipe can show."""
    return PydanticCustomError("contradiction", "{problem}", {"key": key, "problem": problem, "remedy": remedy})
