"""The building blocks of `parts` that look at the rows of a batch: their columns, and what is cut or empty.

What they refuse is about one example and says nothing of its place: redco finds out which it is, and where it is from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from redco_cli.errors import ExampleError
from redco_cli.plugin.contract import IGNORED_LABEL, Example
from redco_cli.row_notes import WITHOUT_LOSS, note_rows

_EXPECTED: dict[type, tuple[type | tuple[type, ...], str]] = {
    str: (str, "text"),
    int: ((int, np.integer), "a whole number"),
    float: ((int, float, np.integer, np.floating), "a number"),
    list: ((list, tuple), "a list"),
}
_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
_LONGEST_SHOWN = 60


def column(examples: Sequence[Example], name: str, kind: type | None = None) -> list[Any]:
    """The value of one column in every example.

    Args:
        examples: all of a batch.
        name: of the column.
        kind: what each value has to be: `str`, `int`, `float` (any number) or `list`; None takes whatever is there.
            Empty texts are counted.

    Raises:
        ExampleError: an example does not have it, or holds something else there.
    """
    for example in examples:
        if name not in example:
            raise ExampleError(
                "collate_fn",
                f"an example has no column {name!r}; it has {', '.join(map(repr, sorted(example))) or 'none'}",
                "name the right column in plugin.options, or rename it in the data",
            )
        if kind is not None:
            check_kind(example[name], kind, f"the column {name!r}")
    values = [example[name] for example in examples]
    if kind is str:
        note_rows(f"with an empty {name!r}", [row for row, value in enumerate(values) if not value.strip()])
    return values


def check_kind(value: Any, kind: type, what: str) -> None:
    """Refuses a value of an example that is of another kind.

    Args:
        value: any.
        kind: `str`, `int`, `float` (any number) or `list`; true and false are no numbers.
        what: where it stands in the example, such as `the column 'text'`.

    Raises:
        ExampleError: naming the value.
    """
    types, expected = _EXPECTED[kind]
    if isinstance(value, types) and not isinstance(value, bool):
        return
    found = "is null or missing"
    if value is not None:
        shown = repr(value)[:_LONGEST_SHOWN]
        found = f"holds {shown}, {_KINDS.get(type(value), f'of type {type(value).__name__}')}"
    remedy = "correct that row or leave it out, or name another column in plugin.options"
    raise ExampleError("collate_fn", f"{what} {found}, but {expected} is expected", remedy)


def cut(
    rows: Sequence[Sequence[int]],
    length: int,
    *,
    keep: Literal["start", "end"] = "start",
    name: str = "data.max_length",
) -> list[list[int]]:
    """Rows of a batch cut to a length. Those that were longer are counted: `redco train` and `validate` say how many.

    Args:
        rows: token ids, one row for each example of the batch, in their order.
        length: the most tokens that a row keeps.
        keep: which end of a longer row stays.
        name: what sets the length.

    >>> cut([[1, 2, 3], [4]], 2, keep="end")
    [[2, 3], [4]]
    """
    note_rows(f"longer than {name} {length}, and cut", [row for row, ids in enumerate(rows) if len(ids) > length])
    return [list(ids[:length]) if keep == "start" else list(ids[max(len(ids) - length, 0) :]) for ids in rows]


def note_without_loss(labels: NDArray[np.int32]) -> None:
    """Counts the rows of a batch that cannot teach a next-token loss anything.

    Args:
        labels: [B, L], aligned with the input; the first of each row never counts.
    """
    note_rows(WITHOUT_LOSS, np.flatnonzero((labels[:, 1:] == IGNORED_LABEL).all(axis=1)).tolist())
