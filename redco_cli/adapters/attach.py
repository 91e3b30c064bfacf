"""An adapter among the models of a run, and the plugin's functions computed with it.

The plugin sees its model's parameters as without an adapter: it is put into what the plugin computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.adapters.low_rank import adapting
from redco_cli.adapters.model import ADAPTER, Adapter, adapter_of
from redco_cli.adapters.quantized.base import kept_base
from redco_cli.adapters.quantized.program import dense_params, dequantizing
from redco_cli.adapters.source import filled
from redco_cli.console import note
from redco_cli.errors import RecipeError
from redco_cli.models.several import MAIN, Models, constant_of, members_of, without
from redco_cli.plugin.contract import Params
from redco_cli.plugin.state import Variables
from redco_cli.recipe.load import LoadedRecipe
from redco_cli.sharding.tensor_split import summed_by_others, tensor_split


def with_adapter(model: Any, loaded: LoadedRecipe) -> tuple[Any, LoadedRecipe]:
    """The models of a run with the adapter that its recipe asks for; unchanged where it asks for none.

    Args:
        model: of the run, or several.
        loaded: the recipe with its `adapter`.

    Returns:
        The models, and the recipe with what `adapter.from` says of the adapter.

    Raises:
        RecipeError: there is no model to adapt, it has no such weights, or `adapter.from` says something else.
        ModelError, StorageError: what `adapter.from` names cannot be read.
    """
    recipe, where, members = loaded.recipe, loaded.where, members_of(model)
    section = recipe.adapter
    if section is None:
        return model, loaded
    if MAIN not in members:
        problem = f"it adapts the model {MAIN}, but build_model returns {', '.join(members)}"
        raise RecipeError(where("adapter"), problem, f"call the one that it adapts {MAIN}")
    if ADAPTER in members:
        problem = f"build_model returns a module called {ADAPTER}, which is the name of the adapter itself"
        raise RecipeError(where("adapter"), problem, "give the module another name")
    section = filled(section, members[MAIN], loaded)
    adapter = adapter_of(members[MAIN], section, where)
    dtype = recipe.model.dtype if section.base_dtype == "auto" else section.base_dtype
    constant = {MAIN: dtype, **constant_of(model)}
    kept = {MAIN: kept_base(adapter, constant[MAIN], where)} if section.quantize else {}
    loaded = replace(loaded, recipe=recipe.model_copy(update={"adapter": section}))
    return Models({**members, ADAPTER: adapter}, constant, isinstance(model, Models), kept), loaded


def adapter_in(model: Any) -> Adapter | None:
    """The adapter among the models of a run."""
    found = members_of(model).get(ADAPTER)
    return found if isinstance(found, Adapter) else None


def seen_models(model: Any) -> dict[str, Any]:
    """The models of a run by name, as a plugin sees them."""
    members = dict(members_of(model))
    return members if adapter_in(model) is None else without(members, {ADAPTER})


def merged_params(model: Any, params: Params) -> Params:
    """The parameters of the model that an adapter was trained for, merged with it; in the types of the model."""
    adapter = adapter_in(model)
    assert adapter is not None
    if adapter.section.quantize:
        note(f"the adapter is merged into what {adapter.section.quantize} has made of the weights, dequantised")
    abstract = members_of(model)[MAIN].abstract

    def merge(base: Params, own: Params) -> Params:
        dense = dense_params(base, jnp.float32)
        wide = jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), dense, abstract)
        return adapter.merged(wide, own)

    return jax.jit(merge)(params[MAIN], params[ADAPTER])


def computed(
    model: Any,
    function: Callable[..., Any],
    variables: Variables,
    *others: Any,
    dropout: Any = None,
    repeats: bool = False,
) -> Any:
    """What a function of (variables, *others) computes of parameters as the plugin sees them.

    Args:
        model: of the run, or several.
        function: any that JAX can trace.
        variables: those of the run.
        others: arrays.
        dropout: the random key of the adapter's dropout; None where nothing is dropped.
        repeats: whether the function uses weights again and again, as generation does for each token. What only
            parameters tell is computed once before it then.
    """
    adapter = adapter_in(model)
    if adapter is None:
        return function(variables, *others)
    rest = without(variables.params, {ADAPTER})
    alone = not model.is_named
    prefix = "" if alone else f"{MAIN}/"

    def plain(params: Any, state: Any, step: Any, *others: Any) -> Any:
        with summed_by_others(f"{MAIN}/{path}" for path in adapter.adapters):
            return function(Variables(params, state, step), *others)

    adapters = {f"{prefix}{path}": how for path, how in adapter.adapters.items()}
    splits = {f"{prefix}{path}": split for path in adapter.adapters if (split := tensor_split(f"{MAIN}/{path}"))}
    adapted = adapting(plain, adapters, splits)
    found = adapter.factors(variables.params[ADAPTER])
    if repeats and not adapter.section.quantize:  # of a layer at a time, which quantised weights come in no other way
        found = adapter.prepared(variables.params[MAIN], found)
    factors = {f"{prefix}{path}": one for path, one in found.items()}
    key = None if dropout is None else jax.random.fold_in(dropout, _STREAM)
    params = rest[MAIN] if alone else rest
    return dequantizing(adapted)(params, factors, key, variables.state, variables.step, *others)


_STREAM = 0x61646170
"""Keeps the adapter's dropout apart from what a plugin draws from the same key."""
