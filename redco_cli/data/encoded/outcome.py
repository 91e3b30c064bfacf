"""What becomes of one example when it is encoded, in this process or in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redco_cli.data.examples import Example
from redco_cli.errors import ExampleError, PluginError
from redco_cli.row_notes import noting

Encode = Callable[[Example], Mapping[str, NDArray[Any]] | None]
"""One example to 1-D arrays by name; None leaves it out."""
Outcome = tuple[Mapping[str, NDArray[Any]] | ExampleError | PluginError | None, tuple[str, ...]]
"""What became of an example, and what was noted of it."""


def outcome_of(encode: Encode, example: Example) -> Outcome:
    """What becomes of an example, be it an error."""
    with noting() as noted:
        try:
            return encode(example), tuple(noted)
        except (ExampleError, PluginError) as error:
            return error, ()


def is_error(outcome: Outcome) -> bool:
    """Whether the example could not be encoded."""
    return isinstance(outcome[0], ExampleError | PluginError)


def same_outcome(one: Outcome, other: Outcome) -> bool:
    """Whether two outcomes are equal in every number and note; of errors, whether both are."""
    (text, notes), (second, second_notes) = one, other
    if is_error(one) or is_error(other) or text is None or second is None:
        return (is_error(one), text is None) == (is_error(other), second is None) and notes == second_notes
    assert isinstance(text, Mapping)
    assert isinstance(second, Mapping)
    return (
        notes == second_notes and text.keys() == second.keys() and all(_same(text[name], second[name]) for name in text)
    )


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
