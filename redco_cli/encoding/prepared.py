"""Columns that a plugin's `prepare_fn` computes of its examples, joined to them: zeros at first, of the right shapes.

What reads the rows of a loss (its proof, the plan of its parameters) needs shapes only; the values are there before the
first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redco_cli.data.examples import Indexed, is_indexed
from redco_cli.data.loader import fetch
from redco_cli.data.places import place_of
from redco_cli.errors import DataError, PluginError, RecipeError
from redco_cli.plugin.contract import Example
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.recipe.schema import Recipe


class Prepared(Indexed):
    """Examples with further columns, which take precedence over their own of the same name.

    Attributes:
        examples: as they were.
        columns: name to an array, one row for each example.
    """

    def __init__(self, examples: Sequence[Example], columns: Mapping[str, NDArray[Any]]) -> None:
        """Copies nothing."""
        self.examples, self.columns = examples, columns

    def __len__(self) -> int:
        return len(self.examples)

    def one(self, index: int) -> Example:
        """The example of a number, with its columns."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        read = fetch(self.examples, indices)
        return [
            {**example, **{name: column[index] for name, column in self.columns.items()}}
            for index, example in zip(indices, read, strict=True)
        ]

    def place(self, number: int) -> str:
        """The place of an example."""
        return place_of(self.examples, number)


def blank(examples: Sequence[Example], outputs: Mapping[str, Any]) -> Prepared:
    """The examples with columns of zeros, which take no memory.

    Args:
        examples: of a split.
        outputs: name to an abstract array [B, ...], of any batch.
    """
    zeros = {name: np.zeros((1, *one.shape[1:]), one.dtype) for name, one in outputs.items()}
    return Prepared(
        examples, {name: np.broadcast_to(one, (len(examples), *one.shape[1:])) for name, one in zeros.items()}
    )


def refuse_unprepared(
    plugin: LoadedPlugin, recipe: Recipe, examples: Any, where: Callable[[str], str], split: str
) -> None:
    """Refuses what columns cannot be computed for before the first step.

    Args:
        plugin: with a `prepare_fn`.
        recipe: its `models`.
        examples: of a split.
        where: dotted recipe key to its place.
        split: its name.

    Raises:
        PluginError: it makes rows or examples besides.
        RecipeError: no model is there that stays as it is.
        DataError: examples have no known length.
    """
    beside = [name for name in ("encode_fn", "run_fn") if getattr(plugin, name) is not None]
    if beside:
        problem = f"has prepare_fn and {beside[0]}, but columns are joined to the examples of the recipe alone"
        raise PluginError(plugin.file, problem, f"leave out one of the two, or compute the columns in {beside[0]}")
    if not any(one.frozen for one in recipe.models.values()):
        problem = f"prepare_fn of {plugin.file} computes with models that are never updated, and there are none"
        raise RecipeError(where("models"), problem, "name one in models, which is frozen unless it says otherwise")
    if not is_indexed(examples):
        problem = (
            f"prepare_fn of {plugin.file} computes columns of every example beforehand; these have no known length"
        )
        raise DataError(where(f"data.{split}"), problem, "leave out data.streaming")
