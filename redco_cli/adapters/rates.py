"""LoRA+ (arXiv 2402.12354): the learning rate of B is larger than that of A.

In a wide model equal steps of both change what it computes by unlike amounts, since A sums over its inputs and B over
the rank alone. Which parameters have which rate is as in PEFT 0.21 (`optimizers/loraplus.py`), but for
parameters that are trained themselves: their biases have the plain rate like their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax.traverse_util import flatten_dict

from redco_cli.adapters.attach import adapter_in
from redco_cli.adapters.model import ADAPTER
from redco_cli.errors import RecipeError
from redco_cli.recipe.schema import Recipe

LOOKUPS = 1e-6
"""Peak learning rate of the factors of tables of which rows are looked up (PEFT: `loraplus_lr_embedding`)."""


def relative_rates(
    model: Any, recipe: Recipe, where: Callable[[str], str], own_optimizer: str | None
) -> dict[str, float]:
    """By path of a parameter, by how much its learning rate is multiplied; 1 for all others.

    Args:
        model: of the run, or several.
        recipe: with its `adapter`.
        where: dotted recipe key to its place.
        own_optimizer: the plugin, where its `optimizer_fn` takes the place of the recipe's optimizer.

    Raises:
        RecipeError: rates are asked for of an optimizer that is the plugin's.
    """
    section, adapter = recipe.adapter, adapter_in(model)
    if section is None or adapter is None or section.lr_ratio is None:
        return {}
    if own_optimizer is not None:
        problem = f"{own_optimizer} has an optimizer_fn, which alone says how large its steps are"
        remedy = "leave it out, and give parameters whose path ends in /B a learning rate of their own there"
        raise RecipeError(where("adapter.lr_ratio"), problem, remedy)
    peak = recipe.train.learning_rate
    found: dict[str, float] = {}
    for name in flatten_dict(adapter.abstract, sep="/"):
        path, _, part = name.rpartition("/")
        if path in adapter.uses and adapter.uses[path].kind == "lookup":
            found[f"{ADAPTER}/{name}"] = LOOKUPS / peak if peak else 1.0
        elif part in ("B", "magnitude"):
            found[f"{ADAPTER}/{name}"] = section.lr_ratio
    return found
