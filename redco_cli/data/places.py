"""Where an example is from: file and line of JSON lines, file and row else; worked out only when something is wrong.

Nothing is kept per example. What is known of a failing one is its number in the source, and that leads to its file by
counting, at worst by reading the files once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redco_cli.data.jsonl import line_of
from redco_cli.errors import DataError, ExampleError, PluginError, RedcoError
from redco_cli.recipe.load import shown

Locate = Callable[[int], str]
"""From the number of a row or an example to its place: `train.jsonl:17`, `train.csv: row 17`."""


def place_of(examples: Any, number: int) -> str:
    """The place of an example.

    Args:
        examples: with a method `place`, or of a user's own: then it is the number itself.
        number: in the source, from 0.
    """
    place = getattr(examples, "place", None)
    return f"examples[{number}]" if place is None else str(place(number))


def placed(error: ExampleError | PluginError, locate: Locate) -> RedcoError:
    """The error with the place of the example that it is about, as far as it is about one."""
    if error.row is None:
        return error
    first, place = error.problems[0], locate(error.row)
    if isinstance(error, ExampleError):
        return DataError(place, first.problem, first.remedy)
    return PluginError(first.where, f"{first.problem}, from {place}", first.remedy)


def file_place(files: Sequence[str], form: str, number: int, count: Callable[[str], int]) -> str | None:
    """The place of an example in the files that it was read from; None when the files do not tell.

    Args:
        files: paths, in the order in which they are read.
        form: as `data.train.path` names it.
        number: of the example over all files, from 0.
        count: the number of examples in one file.
    """
    for name in files:
        if "://" in name:
            return None
        path = shown(Path(name))
        line, rows = line_of(name, number) if form == "json" else (None, None)
        if line is not None:
            return f"{path}:{line}"
        if rows is None:
            if name == files[-1]:
                return f"{path}: row {number + 1}"
            rows = _counted(name, count)
        if number < rows:
            return f"{path}: row {number + 1}"
        number -= rows
    return None


_counted = functools.lru_cache(maxsize=256)(lambda name, count: count(name))
