"""From the recipe's `model` section to a model: abstract first, no weights read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from redco_cli.errors import ModelError
from redco_cli.models.config.read import model_directory, read_config
from redco_cli.models.config.tasks import GENERATING, choose_task, flax_class_names
from redco_cli.models.config.tokenizer import add_rows
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.model import DecoderModel, build_decoder
from redco_cli.models.diffusion.config import ComponentConfig
from redco_cli.models.diffusion.model import DiffusionModel, build_component
from redco_cli.models.example_inputs import AnyModel, example_inputs, example_loss
from redco_cli.models.families.registry import family_of, text_part
from redco_cli.models.flax.model import HfFlaxModel, build_model
from redco_cli.models.flax.refusals import refuse_unsupported
from redco_cli.models.hf_config import decoder_config
from redco_cli.models.weights.load import check_checkpoint, checkpoint_directory, load_params
from redco_cli.plugin.contract import Params
from redco_cli.recipe.schema import ModelSection
from redco_cli.recipe.section import Remat
from redco_cli.sharding.derive import convolves, make_plan
from redco_cli.sharding.plan import AXES
from redco_cli.sharding.program.reading import read

_ALL_OR_NOTHING = ("auto", "none", "full")
"""What may be recomputed of models that are not our decoder."""
_DECODER_TASKS = ("causal_lm", "sequence_classification")
_CLASSIFIER = "ForSequenceClassification"
_DIMS_OF_A_MATRIX = 2
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
"""How the names of architectures end that are a language model."""


def resolve_model(
    section: ModelSection, *, where: Callable[[str], str], remat: Remat = "auto"
) -> HfFlaxModel | DecoderModel | DiffusionModel:
    """The model that a recipe names or describes. Reads its config only, and allocates no parameters.

    `implementation: auto` takes our decoder for the causal models that it covers. Where it refuses a config by name
    that the Flax class of transformers honours, and for everything else, it takes that.

    Args:
        section: `model` of the recipe.
        where: dotted recipe key to its place: `where("model.name")` is `recipes/x.yaml:3: model.name`.
        remat: `train.remat` of the recipe; `auto` and `none` keep all activations.

    Raises:
        ModelError: no such model, a config that cannot be used or asks for what no implementation honours, a task
            that the model type does not have.
    """
    config = read_config(section, where=where)
    if isinstance(config, ComponentConfig):
        return _component(section, config, where, remat)
    config = text_part(config)
    added = add_rows(config, section, where=where)
    model = _built(section, config, where, remat)
    return model if added is None else replace(model, added=added)


def _built(section: ModelSection, config: Any, where: Callable[[str], str], remat: Remat) -> HfFlaxModel | DecoderModel:
    chosen = choose(section, config, where=where)
    if isinstance(chosen, DecoderConfig):
        return _decoder(section, config, chosen, where, remat)
    return _flax(section, config, chosen, where, remat)


def _component(
    section: ModelSection, config: ComponentConfig, where: Callable[[str], str], remat: Remat
) -> DiffusionModel:
    """A model of a diffusion pipeline: it has no head, and one implementation."""
    if section.task != "auto":
        raise ModelError(where("model.task"), f"{config.model_type} has no {section.task} head", "leave it out")
    if section.implementation != "auto":
        problem = f"{section.implementation} has no {config.model_type}"
        raise ModelError(where("model.implementation"), problem, "leave it out")
    if section.added_tokens is not None:
        raise ModelError(where("model.added_tokens"), f"{config.model_type} reads no tokens", "leave them out")
    if remat not in _ALL_OR_NOTHING:
        problem = f"{remat}, but {config.model_type} recomputes blocks or nothing"
        raise ModelError(where("train.remat"), problem, "take full or none")
    place = where("model.name" if section.name is not None else "model.config")
    return build_component(config, dtype=section.dtype, where=place, remat="full" if remat == "full" else "none")


def choose(section: ModelSection, config: Any, *, where: Callable[[str], str]) -> DecoderConfig | str:
    """What is built of a config: the decoder's own config, or the task of a Flax class. Reads only.

    Args:
        section: `model` of the recipe.
        config: the transformers config; a Flax class gets the `num_labels` of the recipe.
        where: dotted recipe key to its place.

    Raises:
        ModelError: as `resolve_model`, but for what only building finds.
    """
    if section.implementation == "decoder":
        return _decoder_config(section, config, where)
    family = family_of(config.model_type)
    if section.implementation == "hf_flax" or family is None or not _is_covered(section, config, where):
        return _flax_task(section, config, where)
    try:
        return _decoder_config(section, config, where)
    except ModelError as refusal:
        if family.flax_honours is None or not getattr(config, family.flax_honours, None):
            raise
        try:
            return _flax_task(section, config, where)
        except ModelError:
            raise refusal from None


def _is_covered(section: ModelSection, config: Any, where: Callable[[str], str]) -> bool:
    """Whether a head is meant that the decoder has, of a type that it covers."""
    if section.task != "auto":
        return section.task in _DECODER_TASKS
    if _classifies(config):
        return True
    if flax_class_names(config.model_type) and choose_task("auto", config, where=where) != "causal_lm":
        return False
    others = [name for name in config.architectures or () if not _is_language_model(name)]
    if others:
        raise ModelError(
            where("model.task"),
            f"the config's architecture is {others[0]}, and {config.model_type} has no such head here",
            "set model.task: causal_lm to take the language model in it",
        )
    return True


def _classifies(config: Any) -> bool:
    """Whether the architectures of a config say that it classifies texts."""
    return any(name.endswith(_CLASSIFIER) for name in config.architectures or ())


def _is_language_model(architecture: str) -> bool:
    """Whether a class is a language model, or the bare model of one."""
    is_bare = architecture.endswith("Model") and "For" not in architecture
    return is_bare or architecture.endswith(_LANGUAGE_MODELS)


def _flax_task(section: ModelSection, config: Any, where: Callable[[str], str]) -> str:
    task = choose_task(section.task, config, where=where)
    if section.num_labels is not None:
        config.num_labels = section.num_labels
    refuse_unsupported(config, task, place=_setting_place(section, where))
    return task


def _flax(section: ModelSection, config: Any, task: str, where: Callable[[str], str], remat: Remat) -> HfFlaxModel:
    if remat not in _ALL_OR_NOTHING:
        problem = f"{remat}, but the Flax classes of transformers recompute everything or nothing"
        raise ModelError(where("train.remat"), problem, "take full or none, or a model that our decoder covers")
    return build_model(
        config,
        task,
        dtype=section.dtype,
        generation_config=_generation_config(section) if task in GENERATING else None,
        where=where("model.name" if section.name is not None else "model.config"),
        remat="full" if remat == "full" else "none",
    )


def _decoder_config(section: ModelSection, config: Any, where: Callable[[str], str]) -> DecoderConfig:
    if section.task not in ("auto", *_DECODER_TASKS):
        problem = f"the decoder has no {section.task} head"
        remedy = f"it has: {', '.join(_DECODER_TASKS)}; or set model.implementation: hf_flax"
        raise ModelError(where("model.task"), problem, remedy)
    task = section.task
    if task == "auto":
        task = "sequence_classification" if _classifies(config) else "causal_lm"
    if task == "sequence_classification":
        _check_classifier(config, where)
        if section.num_labels is not None:
            config.num_labels = section.num_labels
    return decoder_config(config, where=_setting_place(section, where), task=task)


def _decoder(
    section: ModelSection, config: Any, own: DecoderConfig, where: Callable[[str], str], remat: Remat
) -> DecoderModel:
    return build_decoder(
        own,
        config=config,
        dtype=section.dtype,
        generation_config=None if own.num_labels else _generation_config(section),
        where=where("model.name" if section.name is not None else "model.config"),
        remat="none" if remat == "auto" else remat,
    )


def _check_classifier(config: Any, where: Callable[[str], str]) -> None:
    """Refuses a head that transformers does not have for this type: what is trained could not go back there."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        problem = f"transformers has no sequence_classification head for {config.model_type}"
        raise ModelError(where("model.task"), problem, "choose a model of another type, such as llama or qwen3")


def _setting_place(section: ModelSection, where: Callable[[str], str]) -> Callable[[str], str]:
    """A setting of the config to its place: a line of the recipe, or the model that brings its own config."""
    return lambda key: where("model.name" if section.name is not None else f"model.config.{key}")


def _generation_config(section: ModelSection) -> Any:
    """The generation config saved with a named model; None when it has none, and the config implies it."""
    if section.name is None:
        return None
    from transformers import GenerationConfig

    try:
        directory = model_directory(section)
        inside = {"subfolder": section.subfolder or ""} if directory is None else {}
        return GenerationConfig.from_pretrained(directory or section.name, revision=section.revision, **inside)
    except OSError:  # most checkpoints before 2023 have none
        return None


def load_named_model(
    section: ModelSection, mesh: Mesh | None, where: Callable[[str], str]
) -> tuple[HfFlaxModel | DecoderModel | DiffusionModel, Params]:
    """A saved model of a hub or a directory, with its parameters; see `redco_cli.trained.load_model`.

    Raises:
        ModelError: there is no such model, or it cannot be loaded as it is.
        DeviceError: its parameters cannot be split over the mesh.
    """
    model = resolve_model(section, where=where)
    directory = checkpoint_directory(section, where=where)
    check_checkpoint(model, directory)
    return model, load_params(model, directory, model_shardings(model, mesh, where)).params


def model_shardings(model: AnyModel, mesh: Mesh | None, where: Callable[[str], str]) -> Params:
    """Where each parameter of a model lives that is loaded for use from Python: a sharding for each.

    It is called by whatever the user compiles, without the gathering of a training step. Kernels of convolutions are
    therefore whole over `fsdp`: see `sharding.derive.convolves`.

    Args:
        model: any; its parameters are abstract.
        mesh: as for `redco_cli.trained.load_model`.
        where: dotted recipe key to its place.

    Raises:
        DeviceError: the parameters cannot be split over the mesh.
    """
    if mesh is None:
        one = SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda _: one, model.abstract)
    if not set(mesh.axis_names) <= set(AXES):
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda _: whole, model.abstract)
    sizes = {axis: int(size) for axis, size in mesh.shape.items()}
    rows = sizes.get("data", 1) * sizes.get("fsdp", 1)
    batch = example_inputs(model, rows)
    reading = read(lambda params, batch: example_loss(model, params, batch), model.abstract, batch)
    plan = make_plan(reading, sizes, where=where, gathers=False)
    has_kernels = convolves(reading)

    def placed(leaf: jax.ShapeDtypeStruct, lives: PartitionSpec, used: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, used if has_kernels and leaf.ndim > _DIMS_OF_A_MATRIX else lives)

    return jax.tree.map(placed, model.abstract, plan.specs, plan.gathered)
