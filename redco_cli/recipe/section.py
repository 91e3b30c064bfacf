"""What all sections of a recipe share: closed (an unknown key is refused), frozen, and strict (`"3"` is no integer).

And the types of their values that need more than a name.
"""

from __future__ import annotations

import os
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

Strings = Annotated[tuple[str, ...], Field(strict=False)]
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Task = Literal[
    "auto",
    "causal_lm",
    "masked_lm",
    "seq2seq",
    "sequence_classification",
    "token_classification",
    "question_answering",
    "image_classification",
    "vision_to_sequence",
    "speech_to_sequence",
    "clip",
    "text_encoder",
]
Remat = Literal["auto", "none", "dots", "attention", "offload", "full"]

_LONGEST_TEMPLATE = 2**20
"""Bytes of a file that may be a chat template."""


def _as_template(given: str, info: ValidationInfo) -> str:
    """The text of a chat template: what was given, or what the file of that name holds."""
    if "{{" in given or "{%" in given:
        return given
    name = os.path.expanduser(given)
    directory = (info.context or {}).get("directory", Path())
    found = [path for path in (directory / name, Path(name)) if os.path.isfile(path)]  # which bears any name
    if not found:
        raise ValueError("it is neither Jinja text nor a file beside the recipe or in the working directory")
    try:
        if found[0].stat().st_size > _LONGEST_TEMPLATE:
            raise ValueError("the file is larger than any chat template")
        text = found[0].read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8") from None
    if "\0" in text or ("{{" not in text and "{%" not in text):
        raise ValueError("the file holds no Jinja text" + (": neither {{ nor {%" if "\0" not in text else ""))
    return text


def _each_once(tokens: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({token for token in tokens if tokens.count(token) > 1})
    if twice or "" in tokens:
        raise ValueError(f"{twice[0]!r} is in it twice" if twice else "a token has at least one letter")
    return tokens


ChatTemplate = Annotated[str, AfterValidator(_as_template)]
"""Jinja text; where it was given as a file, the text that this held when the recipe was read."""
NewTokens = Annotated[tuple[str, ...], Field(strict=False, min_length=1), AfterValidator(_each_once)]
"""Texts that each become one token."""


def _refuse_8_bits(given: Any) -> Any:
    """Names of an optimizer that other trainers have, and whoever comes from them asks for."""
    if isinstance(given, str) and given.lower().replace("_", "").replace("-", "").endswith("8bit"):
        problem = f"{given} asks for moments of 8 bits, which no library for JAX that is kept up offers"
        remedy = "take adafactor, whose state is smallest, or lion; with an adapter the state of adamw is small anyway"
        raise contradiction("train.optimizer", problem, f"{remedy} (known: {', '.join(typing.get_args(_OPTIMIZERS))})")
    return given


_OPTIMIZERS = Literal["adamw", "lion", "adafactor", "sgd", "muon"]
Optimizer = Annotated[_OPTIMIZERS, BeforeValidator(_refuse_8_bits)]
"""What `train.optimizer` may name."""


class Section(BaseModel):
    """What all sections share: closed, frozen, strict, documented."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def contradiction(key: str, problem: str, remedy: str) -> PydanticCustomError:
    """An error about one dotted `key` that only the whole recipe can show."""
    return PydanticCustomError("contradiction", "{problem}", {"key": key, "problem": problem, "remedy": remedy})
