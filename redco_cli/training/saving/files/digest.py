"""Digests of parameters: the same on every mesh, so that what is in no checkpoint can be told from another."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from redco_cli.adapters.quantized.leaf import is_quantized
from redco_cli.console import note
from redco_cli.errors import ModelError
from redco_cli.models.several import MAIN
from redco_cli.plugin.contract import Params
from redco_cli.runtime.mesh import replicated
from redco_cli.training.saving.meta import Meta

_ODD = 2654435761
"""Multiplies places, so that two arrays that differ in the order of their elements differ in their sums."""


def digests(constants: Mapping[str, Params], mesh: Mesh | None, dtype: str | None = None) -> dict[str, str]:
    """By name of a model, a hash of all its parameters: the same on every mesh.

    Sums of integers do not depend on their order, so each device adds up its own part.

    Args:
        constants: by name, on the mesh.
        mesh: the devices; None for one.
        dtype: the type as which floating-point parameters are looked at; None for their own.
    """
    add_up = jax.jit(
        lambda x: _weighted_sum(_seen_as(x, dtype)), out_shardings=None if mesh is None else replicated(mesh)
    )
    found = {}
    for name, params in constants.items():
        text = hashlib.sha256()
        for path, leaf in jax.tree.leaves_with_path(params):
            kind = jax.eval_shape(lambda x: _seen_as(x, dtype), leaf).dtype
            text.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {kind} {int(add_up(leaf))};".encode())
        found[name] = text.hexdigest()
    return found


def refuse_other_base(base: Params, mesh: Mesh | None, meta: Meta, where: str, name: str) -> None:
    """Refuses a model other than the one that an adapter was trained for.

    Narrower numbers than those it was trained with do not tell, nor do weights that are quantised here and not there:
    a note says so.

    Args:
        base: its parameters.
        mesh: the devices; None for one.
        meta: what a checkpoint of the adapter says of itself.
        where: the place for errors.
        name: of the checkpoint.

    Raises:
        ModelError: it is another.
    """
    known, section = meta.digests.get(MAIN), meta.recipe.get("adapter") or {}
    dtype, codes = section.get("base_dtype"), section.get("quantize")
    leaves = jax.tree.leaves(base, is_leaf=is_quantized)
    forms = {leaf.form.kind for leaf in leaves if is_quantized(leaf)}
    kinds = {str(leaf.dtype) for leaf in leaves if not is_quantized(leaf)}
    comparable = kinds == {dtype} or (kinds == {"float32"} and codes is None)
    if known is None or dtype not in ("float32", "bfloat16") or forms != ({codes} - {None}) or not comparable:
        note(f"whether {name} was trained for this model is not known: its numbers are kept in another type here")
    elif digests({MAIN: base}, mesh, None if codes else dtype)[MAIN] != known:  # scales stay float32
        problem = f"the adapter in {name} was trained for a model with other parameters"
        raise ModelError(where, problem, "name the model that it was trained for, by its name or model.params")


def _seen_as(x: Any, dtype: str | None) -> Any:
    return x.astype(dtype) if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x


def _weighted_sum(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        stride = math.prod(x.shape[dim + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride)
    return (x.astype(jnp.uint32) * (2 * place * jnp.uint32(_ODD) + 1)).sum(dtype=jnp.uint32)
