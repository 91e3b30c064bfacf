"""Lengths of a run in the units people think in, converted to optimizer steps once; and times on a clock."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic_core import CoreSchema, core_schema

_TEXT = re.compile(r"(?P<amount>\d{1,12}(?:\.\d+)?)\s*(?P<unit>%|steps?|epochs?)")
_NEGATIVE = re.compile(r"-\s*[\d.]")
_EXPECTED = "expected a number of optimizer steps (200), a share of the run (10%) or epochs (1 epoch)"
_EXPECTED_OF_RUN = "expected a number of optimizer steps (1000) or epochs (3 epochs)"


@dataclass(frozen=True)
class Duration:
    """A length of training.

    Attributes:
        amount: how many of `unit`; never negative.
        unit: `steps` are optimizer steps, `epochs` are passes over the training data, `%` is a share of all steps.
    """

    amount: float
    unit: Literal["steps", "epochs", "%"]

    @classmethod
    def parse(cls, value: object, expected: str = _EXPECTED) -> Duration:
        """Reads `200`, `"200 steps"`, `"1 epoch"`, `"0.5 epochs"` or `"10%"`.

        Args:
            value: as it was given.
            expected: what to say was expected, when it is none of these.

        Raises:
            ValueError: when `value` is none of these.
        """
        if isinstance(value, Duration):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value, "steps")
        match = _TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"it is negative: {expected}" if _is_negative(value) else expected)
        amount, unit = float(match["amount"]), match["unit"]
        if unit == "%":
            if amount > 100:
                raise ValueError("a share of the run cannot exceed 100%")
            return cls(amount, "%")
        if unit.startswith("epoch"):
            return cls(amount, "epochs")
        if amount != int(amount):
            raise ValueError("a number of steps must be whole")
        return cls(int(amount), "steps")

    def in_steps(self, *, total_steps: int | None = None, steps_per_epoch: Fraction | None = None) -> int:
        """The same length in optimizer steps, rounded up. Exact: 7% of 100 steps are 7, which floats make 8.

        Args:
            total_steps: the length of the whole run, needed for `%`.
            steps_per_epoch: examples per epoch / global batch size, needed for `epochs`; None when the data
                has no known length.

        Raises:
            ValueError: when the unit cannot be converted with what is given.
        """
        if self.unit == "steps":
            return int(self.amount)
        if self.unit == "epochs":
            if steps_per_epoch is None:
                raise ValueError("the data has no known length, so epochs cannot be counted; give steps")
            return math.ceil(self._exact * steps_per_epoch)
        if total_steps is None:
            raise ValueError("a share needs a whole: give the length of the run in steps or epochs")
        return math.ceil(self._exact * total_steps / 100)

    @property
    def _exact(self) -> Fraction:
        """The amount as it was written, in decimals."""
        return Fraction(str(self.amount))

    def __str__(self) -> str:
        amount = f"{Decimal(str(self.amount)).normalize():f}"
        if self.unit == "%":
            return f"{amount}%"
        return amount if self.unit == "steps" else f"{amount} epoch{'' if self.amount == 1 else 's'}"

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(cls._plain)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: CoreSchema, _handler: Any) -> dict[str, Any]:
        return _json_schema(_TEXT.pattern, 0)

    def _plain(self) -> int | str:
        return int(self.amount) if self.unit == "steps" else str(self)


class _OfTheRun:
    """The length of the run itself: what is expected of it is positive, and no share."""

    def __get_pydantic_core_schema__(self, _source: Any, handler: Any) -> CoreSchema:
        of_any_length = handler(Duration)
        return core_schema.no_info_plain_validator_function(_parse_run, serialization=of_any_length["serialization"])

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: Any) -> dict[str, Any]:
        return _json_schema(_TEXT.pattern.replace("%|", ""), 1)


RunLength = Annotated[Duration, _OfTheRun()]
"""A duration that is the length of the run."""


def _parse_run(value: object) -> Duration:
    if _is_negative(value):
        raise ValueError(_EXPECTED_OF_RUN.replace("expected a number", "expected a positive number"))
    return Duration.parse(value, _EXPECTED_OF_RUN)


def _is_negative(value: object) -> bool:
    return value < 0 if isinstance(value, int | float) else bool(_NEGATIVE.match(str(value).strip()))


def _json_schema(pattern: str, least: int) -> dict[str, Any]:
    text = {"type": "string", "pattern": f"^{pattern.replace('?P<amount>', '?:').replace('?P<unit>', '?:')}$"}
    return {"anyOf": [{"type": "integer", "minimum": least}, text]}


_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_WALL_TIME = re.compile(r"(?=.)" + r"\s*".join(rf"(?:(?P<{unit}>\d{{1,6}}(?:\.\d{{1,6}})?){unit})?" for unit in _UNITS))


@dataclass(frozen=True)
class WallTime:
    """A length of time as a clock measures it.

    Attributes:
        seconds: more than zero.
    """

    seconds: float

    @classmethod
    def parse(cls, value: object) -> WallTime:
        """Reads `"8h"`, `"90m"`, `"1h 30m"`, `"1.5d"` or `"45s"`.

        Raises:
            ValueError: when `value` is none of these.
        """
        if isinstance(value, WallTime):
            return value
        match = _WALL_TIME.fullmatch(value.strip()) if isinstance(value, str) else None
        seconds = sum(float(match[unit] or 0) * size for unit, size in _UNITS.items()) if match else 0.0
        if seconds <= 0:
            raise ValueError("expected a time with its unit, more than none (8h, 90m, 1h 30m, 2d)")
        return cls(seconds)

    def __str__(self) -> str:
        left, parts = self.seconds, []
        for unit, size in _UNITS.items():
            count, left = divmod(left, size) if size > 1 else (left, 0.0)
            parts += [f"{count:.6f}".rstrip("0").rstrip(".") + unit] if count else []
        return " ".join(parts)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: CoreSchema, _handler: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": "^" + re.sub(r"\?P<\w>", "?:", _WALL_TIME.pattern) + "$"}
