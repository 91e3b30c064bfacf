"""Trained models for other tools: `export`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from redco_cli.console import note
from redco_cli.errors import ModelError, StorageError
from redco_cli.exporting.export import SETS_AT_ONCE, Exported, check_place, export_model
from redco_cli.job import Job, prepare
from redco_cli.models.example_inputs import example_inputs, example_loss
from redco_cli.models.weights.load import checkpoint_directory
from redco_cli.placement import Placement, place
from redco_cli.planning.choice import memory_of_a_device
from redco_cli.planning.out_of_memory import explaining_out_of_memory
from redco_cli.recipe.load import LoadedRecipe, find_run, load_recipe, shown
from redco_cli.runtime.cache import enable_compilation_cache
from redco_cli.sharding.plan import DATA, FSDP, TENSOR
from redco_cli.sharding.program.reading import parameters_only, read
from redco_cli.training.saving.parameters import trained_variables
from redco_cli.training.saving.selection import own_checkpoints

Name = str | os.PathLike[str]


def export(
    target: Name,
    overrides: Sequence[str] = (),
    *,
    output: Name,
    checkpoint: str = "last",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> Exported:
    """Writes a trained model as a directory that transformers and vLLM load, and proves it by loading it again.

    Needs no data. Whatever the recipe's mesh, one device holds the parameters where there is room, else all share them.

    Args:
        target: the output directory of a run, a recipe file, or the name of a shipped recipe. A recipe exports the
            newest checkpoint in its `output_dir`; without one, `model.params` or the weights of `model.name`.
        overrides: `dotted.key=value` strings.
        output: a new or empty directory.
        checkpoint: `last`, `best`, or the path of a `checkpoint-<step>` directory.
        dtype: of all weights; default: of each what it has in `model.name`, else float32.

    Returns:
        What was written, and how far its logits are from those of the model.

    Raises:
        RedcoError: with place, problem and remedy.
    """
    recipe, directory = find_run(target)
    loaded = load_recipe(recipe, overrides)
    section = loaded.recipe.model
    check_place(Path(output).absolute())
    _check_exportable(loaded, directory, checkpoint)
    enable_compilation_cache()
    job = prepare(loaded, stages=(), given=())
    placement = _spread(job)
    with explaining_out_of_memory(job, placement, "export"):
        variables, origin = trained_variables(job, placement, directory or Path(loaded.recipe.output_dir), checkpoint)
        note(f"exporting the parameters of {origin}")
        source = None if section.name is None else checkpoint_directory(section, where=job.where)
        tokenizer = job.tokenizer if source is None or section.tokenizer is not None else None
        return export_model(
            job.model,
            variables.using(job.recipe.predict.use).params,
            Path(output),
            source=source,
            began_there=section.params is None,
            tokenizer=tokenizer,
            dtype=dtype,
        )


def _check_exportable(loaded: LoadedRecipe, directory: Path | None, checkpoint: str) -> None:
    """Refuses a model that only its plugin knows, and a run that has not been trained."""
    section = loaded.recipe.model
    if section.name is None and section.config is None:
        problem = "the model is the plugin's own (build_model), which transformers does not know"
        raise ModelError(loaded.where("model"), problem, "only models of model.name or model.config can be exported")
    if (
        directory is not None
        and checkpoint == "last"
        and not own_checkpoints(directory.resolve(), loaded.recipe).steps()
    ):
        raise StorageError(shown(directory), "holds no checkpoint", "train first: redco train")


def _spread(job: Job) -> Placement:
    """Parameters on one device where it has room for those of an export and of its check; else over all devices."""
    memory, count = memory_of_a_device(), len(jax.devices())
    needed = SETS_AT_ONCE * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(job.model.abstract))
    if jax.process_count() == 1 and (memory is None or needed <= memory):
        count = 1
    inputs = example_inputs(job.model, count)
    reading = parameters_only(job.model.abstract)
    if count > 1:
        reading = read(lambda params, batch: example_loss(job.model, params, batch), job.model.abstract, inputs)
    return place(job, reading, {DATA: 1, FSDP: count, TENSOR: 1})
