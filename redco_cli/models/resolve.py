"""From the recipe's `model` section to a model: abstract first, no weights read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from redco_cli.models.configs import local_directory, read_config
from redco_cli.models.hf_flax import HfFlaxModel, build_model
from redco_cli.models.refusals import refuse_unsupported
from redco_cli.models.tasks import GENERATING, choose_task
from redco_cli.models.weights import checkpoint_directory, load_params
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import ModelSection


def resolve_model(
    section: ModelSection, *, where: Callable[[str], str], remat: Literal["auto", "none", "full"] = "auto"
) -> HfFlaxModel:
    """The model that a recipe names or describes. Reads its config only, and allocates no parameters.

    Args:
        section: `model` of the recipe.
        where: dotted recipe key to its place: `where("model.name")` is `recipes/x.yaml:3: model.name`.
        remat: `full` recomputes activations in the backward pass; `auto` and `none` keep them.

    Raises:
        ModelError: no such model, a config that cannot be used or asks for what its Flax class does not honour, a task
            that the model type does not have.
    """
    config = read_config(section, where=where)
    task = choose_task(section.task, config, where=where)
    if section.num_labels is not None:
        config.num_labels = section.num_labels
    source = "model.name" if section.name is not None else "model.config"
    refuse_unsupported(config, task, place=lambda key: where(source if section.name is not None else f"{source}.{key}"))
    generation_config = _generation_config(section) if task in GENERATING else None
    return build_model(
        config, task, dtype=section.dtype, generation_config=generation_config, where=where(source), remat=remat
    )


def _generation_config(section: ModelSection) -> Any:
    """The generation config saved with a named model; None when it has none, and the config implies it."""
    if section.name is None:
        return None
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(
            local_directory(section.name) or section.name, revision=section.revision
        )
    except OSError:  # most checkpoints before 2023 have none
        return None


def load_model(
    name_or_path: str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    implementation: Literal["auto", "hf_flax"] = "auto",
) -> tuple[HfFlaxModel, Params]:
    """A saved model with its parameters, for use from Python.

    Args:
        name_or_path: hub id, or a local directory with `config.json`.
        mesh: devices that each get all parameters; None for the first device alone.
        dtype: compute type, float32 by default; parameters are float32.
        implementation: which code runs the model.

    Returns:
        The model and its parameters: `model(params, input_ids)`, `model.generate(params, input_ids)`.

    Raises:
        ModelError: there is no such model, or it cannot be loaded as it is.
    """
    section = ModelSection(name=name_or_path, dtype=dtype or "float32", implementation=implementation)

    def where(key: str) -> str:
        return f"load_model({name_or_path!r}): {key}"

    model = resolve_model(section, where=where)
    sharding: jax.sharding.Sharding = (
        jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        if mesh is None
        else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    shardings = jax.tree.map(lambda _: sharding, model.abstract)
    return model, load_params(model, checkpoint_directory(section, where=where), shardings).params
