"""The first parameters of a model, born on their devices: read from saved weights, or initialised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.console import note
from redco_cli.models.config.read import model_directory
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.families.registry import names_of
from redco_cli.models.weights.files import some
from redco_cli.models.weights.load import Keeping, check_checkpoint, checkpoint_directory, load_params
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import ModelSection


def check_initial(model: Any, section: ModelSection) -> None:
    """Finds out what is wrong with the weights of a local `model.name` from the headers of its files: none is read.

    Raises:
        ModelError: there are none, they are cut off, or they do not fit the model.
    """
    directory = None if section.name is None else model_directory(section)
    if directory is not None:
        check_checkpoint(model, directory)


def initial_params(
    model: Any,
    section: ModelSection,
    shardings: Any,
    *,
    key: Any,
    where: Callable[[str], str],
    keeping: Keeping = lambda _, leaf: leaf,
) -> tuple[Params, tuple[str, ...]]:
    """Parameters from `model.name`, or fresh ones where a model has no name.

    Args:
        model: what `resolve_model` or `module_model` returned.
        section: the recipe's `model`.
        shardings: of the parameters, a tree like `model.abstract`.
        key: of whatever is initialised.
        where: dotted recipe key to its place.
        keeping: what is made of each parameter, given its path, once it is read.

    Returns:
        The parameters, and the paths of those that the checkpoint lacks and that were initialised: a new head.

    Raises:
        ModelError: the weights cannot be found, are damaged, or do not fit.
    """
    if section.name is None:
        return kept_each(jax.jit(model.init, out_shardings=shardings)(key), keeping), ()
    directory = checkpoint_directory(section, where=where)
    loaded = load_params(model, directory, shardings, rng=key, keeping=keeping)
    if isinstance(model, DecoderModel) and names_of(model.decoder).within and loaded.unused:
        left = f"{len(loaded.unused)} tensors of other parts are left out ({some(list(loaded.unused))})"
        note(f"{where('model.name')}: the language model of {section.name} is taken; {left}")
    return loaded.params, loaded.fresh


def kept_each(params: Params, keeping: Keeping) -> Params:
    """Parameters with what is made of each, given its path; one after the other."""
    flat = flatten_dict(params, sep="/")
    for path in flat:
        flat[path] = keeping(path, flat[path])
    return unflatten_dict(flat, sep="/")
