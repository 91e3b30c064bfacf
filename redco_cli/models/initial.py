"""The first parameters of a model, born on their devices: read from saved weights, or initialised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from redco_cli.models.config.read import local_directory
from redco_cli.models.weights.load import check_checkpoint, checkpoint_directory, load_params
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import ModelSection


def check_initial(model: Any, section: ModelSection) -> None:
    """Finds out what is wrong with the weights of a local `model.name` from the headers of its files: none is read.

    Raises:
        ModelError: there are none, they are cut off, or they do not fit the model.
    """
    directory = None if section.name is None else local_directory(section.name)
    if directory is not None:
        check_checkpoint(model, directory)


def initial_params(
    model: Any, section: ModelSection, shardings: Any, *, key: Any, where: Callable[[str], str]
) -> tuple[Params, tuple[str, ...]]:
    """Parameters from `model.name`, or fresh ones where a model has no name.

    Args:
        model: what `resolve_model` or `module_model` returned.
        section: the recipe's `model`.
        shardings: of the parameters, a tree like `model.abstract`.
        key: of whatever is initialised.
        where: dotted recipe key to its place.

    Returns:
        The parameters, and the paths of those that the checkpoint lacks and that were initialised: a new head.

    Raises:
        ModelError: the weights cannot be found, are damaged, or do not fit.
    """
    if section.name is None:
        return jax.jit(model.init, out_shardings=shardings)(key), ()
    loaded = load_params(model, checkpoint_directory(section, where=where), shardings, rng=key)
    return loaded.params, loaded.fresh
