"""The quantised base of an adapter: which of its weights, and how they come to be quantised as they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.adapters.model import Adapter
from redco_cli.adapters.quantized.leaf import TILE, Form, is_quantized, quantized
from redco_cli.errors import RecipeError
from redco_cli.plugin.contract import Params

_REMEDY = "leave adapter.quantize out, or train such weights themselves: adapter.modules_to_save"


def kept_base(adapter: Adapter, dtype: str, where: Callable[[str], str]) -> Params:
    """The abstract parameters of a base as they are kept: quantised weights, and the rest in a type.

    Args:
        adapter: with its recipe section, which says how.
        dtype: of what is not quantised, and in which a program sees what is.
        where: dotted recipe key to its place.

    Raises:
        RecipeError: no weight can be quantised, or one of them cannot be.
    """
    kind, place = adapter.section.quantize, where("adapter.quantize")
    assert kind is not None
    flat: dict[str, Any] = {}
    for path, leaf in flatten_dict(adapter.base, sep="/").items():
        use = adapter.linear.get(path)
        if use is None:
            flat[path] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype))
            continue
        if use.inputs % TILE:
            problem = f"{path} has {use.inputs} inputs, and every {TILE} of them share a scale: they do not divide"
            raise RecipeError(place, problem, _REMEDY)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise RecipeError(place, f"{path} is {leaf.dtype}, and only floating types are quantised", _REMEDY)
        flat[path] = Form(kind, use, tuple(leaf.shape), dtype).abstract
    if not adapter.linear:
        problem = "the model has no weight that is multiplied with activations and followed by another"
        raise RecipeError(place, problem, "leave adapter.quantize out")
    return unflatten_dict(flat, sep="/")


def keeping(places: Any, dtype: str | None) -> Callable[[str, jax.Array], Any]:
    """What is made of each parameter once it is read, one at a time, so that not all ever exist in float32.

    Args:
        places: where the parameters of the model live as they are kept, a tree of shardings.
        dtype: of what is not quantised; None for the type that it has.

    Returns:
        A function of a path and an array, which it deletes where it returns another.
    """
    flat = flatten_dict(places, sep="/")

    def kept(path: str, leaf: jax.Array) -> Any:
        place = flat[path]
        if is_quantized(place):
            return quantized(place.form, leaf, place)
        if dtype is None or leaf.dtype == jnp.dtype(dtype):
            return leaf
        cast = jax.jit(lambda x: x.astype(dtype), out_shardings=place)(leaf)
        leaf.delete()
        return cast

    return kept
