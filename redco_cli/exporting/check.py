"""Whether an exported model is the model: it is loaded as anyone would load it, and both compute logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from redco_cli.errors import ModelError, StorageError
from redco_cli.exporting.tensors import Model, Tensor
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.diffusion.model import DiffusionModel
from redco_cli.models.example_inputs import example_inputs
from redco_cli.models.flax.model import HfFlaxModel
from redco_cli.models.own_module import ModuleModel
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import ModelSection

TOLERANCE = 1e-5
"""How far the logits may be apart.

The model's parameters are rounded to the type that was written before they are used: it holds for half precision too.
"""
_NARROW = ("bfloat16", "float16")
"""Types narrower than that of parameters, the coarsest first."""


def difference_of(model: Model, params: Params, tensors: Sequence[Tensor], directory: Path) -> float:
    """The largest difference between logits of the model and of what is loaded from a directory.

    The devices hold a second set of parameters meanwhile.

    Args:
        model: the model.
        params: its parameters; the others are split like them.
        tensors: what was written.
        directory: where.

    Raises:
        ModelError: it is larger than `TOLERANCE`, or the directory cannot be loaded.
        StorageError: a process does not see the directory.
    """
    check_shared(directory)
    loaded = resolve_model(_section_of(model, directory), where=lambda key: f"{directory}: {key}")
    narrowest = narrowest_of(tensors)
    outputs = outputs_of(model, rounded(params, narrowest))
    shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), params)
    again = load_params(loaded, directory, shardings).params
    found = outputs_of(loaded, rounded(again, narrowest if is_mixed(tensors) else None))
    difference = max(float(np.abs(one - other).max()) for one, other in zip(outputs, found, strict=True))
    if not difference <= TOLERANCE:
        raise ModelError(
            str(directory),
            f"what was exported gives other logits than the model: they differ by {difference:.1e}",
            "report this model: its export is wrong",
        )
    return difference


def _section_of(model: Model, directory: Path) -> ModelSection:
    """The `model` of a recipe that means a model in a directory, computed as `model` is."""
    compute = model.flax.dtype if isinstance(model, HfFlaxModel) else model.module.dtype
    given = {"name": str(directory), "dtype": jnp.dtype(compute).name}
    if not isinstance(model, DiffusionModel):
        kind = "decoder" if isinstance(model, DecoderModel) else "hf_flax"
        given |= {"task": model.task, "implementation": kind}
    return ModelSection.model_validate(given)


def check_shared(directory: Path) -> None:
    """Refuses a directory that not every process sees.

    Raises:
        StorageError: one does not.
    """
    if jax.process_count() > 1 and not np.all(multihost_utils.process_allgather(np.asarray(directory.is_dir()))):
        problem = "the directory is not seen by all processes"
        raise StorageError(str(directory), problem, "choose one on a file system that they share")


def narrowest_of(tensors: Sequence[Tensor]) -> str | None:
    """The narrowest type among tensors, where it is narrower than that of parameters."""
    written = {tensor.dtype for tensor in tensors}
    return next((name for name in _NARROW if name in written), None)


def is_mixed(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have several types: then some of what is loaded is finer than the narrowest."""
    return len({tensor.dtype for tensor in tensors}) > 1


def outputs_of(model: Model | ModuleModel, params: Params) -> list[np.ndarray[Any, Any]]:
    """What a model gives for made-up inputs, as float32; nothing of it is complex."""

    def run(params: Params, inputs: Any) -> list[Any]:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(model(params, **inputs))]
        return [leaf.astype(jnp.float32) for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.complexfloating)]

    outputs = jax.jit(run)(params, example_inputs(model, 1))
    return [
        np.asarray(one if one.is_fully_addressable else multihost_utils.process_allgather(one, tiled=True))
        for one in outputs
    ]


def rounded(params: Params, dtype: str | None) -> Params:
    """Parameters that this type can hold, still float32. Not under `jit`: a compiler may leave out such casts."""
    if dtype is None:
        return params
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params
    )
