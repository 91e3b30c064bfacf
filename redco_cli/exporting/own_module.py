"""The model of a plugin's `build_model` as a directory that `load_model` reads, anywhere, and how it is read.

    model.safetensors         parameters under their paths (`hidden/kernel`), and variables of other collections under
                              theirs (`batch_stats/norm/mean`); or several files and an index
    recipe.yaml               the resolved recipe, without the folders of the machine that trained
    batch_shapes.json         names, shapes without the batch dim and types of the batch that the model is built with,
                              and its name, where the plugin builds several
    plugin/                   the plugin's file, and what it imports from its own directory
    tokenizer/                where the recipe names one other than `byte`

Reading it runs the plugin in it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.console import note
from redco_cli.errors import ModelError
from redco_cli.exporting.check import TOLERANCE, check_shared, is_mixed, narrowest_of, outputs_of, rounded
from redco_cli.exporting.export import Exported, write_whole
from redco_cli.exporting.files import WRITTEN
from redco_cli.exporting.tensors import Tensor, parameter_tensors
from redco_cli.job import Job, prepare
from redco_cli.models.config import byte_tokenizer
from redco_cli.models.config.byte_tokenizer import ByteTokenizer
from redco_cli.models.own_module import ModuleModel
from redco_cli.models.several import members_of
from redco_cli.models.weights.files import Checkpoint, leads_out, open_checkpoint, some
from redco_cli.models.weights.shards import Source, fill
from redco_cli.plugin.contract import Params
from redco_cli.plugin.importing import importing_from
from redco_cli.plugin.shapes import Shapes, read_shapes
from redco_cli.plugin.sources import plugin_files
from redco_cli.recipe.load import load_recipe, shown
from redco_cli.recipe.paths import without_folders
from redco_cli.recipe.redaction import filled
from redco_cli.recipe.schema import Recipe
from redco_cli.recipe.yaml12 import dump_yaml
from redco_cli.version import __version__

SHAPES_NAME = "batch_shapes.json"
_RECIPE = "recipe.yaml"
"""Not as in a run, for which nothing must take this directory."""
_PLUGIN, _TOKENIZER = "plugin", "tokenizer"
_AGAIN = "export the run again, or take its files as they were exported"


def export_own_module(
    job: Job,
    name: str,
    params: Params,
    kept: Mapping[str, Any],
    directory: Path,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> Exported:
    """Writes the model of a plugin's `build_model` with all that building it again takes, and proves it by doing so.

    As `export_model` does: all processes call this, the first one writes, a second set of parameters is loaded.

    Args:
        job: its model, plugin, recipe and tokenizer.
        name: of the model, where the job has several.
        params: of the model.
        kept: collection to nested dict of arrays: what the model keeps besides them.
        directory: a new or empty one.
        dtype: of parameters of floating point; None for that of each.

    Raises:
        StorageError: the directory is not empty, or cannot be written.
        ModelError: a parameter is not finite in this type, or of one that no file holds; or what is read back is
            another model.
        PluginError: the plugin imports what cannot go along, or does not work away from its own directory.
    """
    directory, files, model = directory.absolute(), plugin_files(job.plugin), members_of(job.model)[name]
    built = next(one for one, other in members_of(job.model).items() if other is model)
    both = [path for path in kept if path in params]
    if both:
        problem = f"{both[0]} is the name of a collection of variables and of a submodule"
        raise ModelError(model.where, problem, "name the submodule otherwise")
    tensors = parameter_tensors({**params, **kept}, dtype)
    unwritten = [f"{tensor.name} ({tensor.dtype})" for tensor in tensors if tensor.dtype not in WRITTEN]
    if unwritten:
        problem = f"{len(unwritten)} parameters of a type that safetensors does not hold here: {some(unwritten)}"
        raise ModelError(model.where, problem, "keep parameters in float32, bfloat16 or float16")

    def describe(partial: Path) -> None:
        for relative, file in files.items():
            (partial / _PLUGIN / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, partial / _PLUGIN / relative)
        if _has_own_tokenizer(job):
            job.tokenizer.save_pretrained(partial / _TOKENIZER)
        text = dump_yaml(_portable(job, moved=bool(files)).model_dump(mode="json"))
        first = f"# of an exported model, by redco {__version__}; paths are without the folders they were in\n"
        (partial / _RECIPE).write_text(first + text, encoding="utf-8")
        document = {"model": built, "batch": job.init_shapes}
        (partial / SHAPES_NAME).write_text(json.dumps(document) + "\n", encoding="utf-8")

    return write_whole(
        tensors,
        directory,
        "flax",
        describe,
        lambda made: _difference(job, replace(model, kept=kept), params, tensors, made),
    )


def is_own_module(directory: Path) -> bool:
    """Whether a directory holds what `export_own_module` writes."""
    return (directory / SHAPES_NAME).is_file()


def tell_left(state: Any, kept: Container[str | None]) -> None:
    """Says what of a plugin's state no export has: a module comes with its parameters and variables alone.

    Args:
        state: nested dicts; None without one.
        kept: names in it that are exported, as variables of the module or as its parameters.
    """
    left = [name for name in state or {} if name not in kept]
    if left:
        note(f"not exported: {', '.join(left)} of ctx.state, which the plugin keeps and not the module")


def read_own_module(
    directory: Path,
    shardings: Callable[[ModuleModel], Params],
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[ModuleModel, Params]:
    """The model in a directory that `export_own_module` wrote, with its parameters. Runs the plugin in it.

    Args:
        directory: the directory.
        shardings: gives where each parameter lives.
        overrides: `dotted.key=value` strings.
        options: of the plugin, for the secrets among them, which are in no file.

    Raises:
        ModelError: a file is damaged, or the parameters are not those of the model.
        PluginError: the plugin in it cannot be used here.
    """
    try:
        document = json.loads((directory / SHAPES_NAME).read_bytes())
        shapes, name = read_shapes(document["batch"]), str(document["model"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(str(directory / SHAPES_NAME), f"cannot be read: {error}", _AGAIN) from None
    model, stored = _build(directory, name, shapes, overrides, options or {}), open_checkpoint(directory)
    kept = flatten_dict(jax.eval_shape(model.init_variables) if model.collections else {}, sep="/")
    params = flatten_dict(model.abstract, sep="/")
    _check_same(params | kept, stored, directory)
    values = {path: stored.read(path, ()).astype(leaf.dtype) for path, leaf in kept.items()}
    model = replace(model, kept=unflatten_dict(values, sep="/"))
    places = flatten_dict(shardings(model), sep="/")
    read = {path: fill(_source(stored, path, leaf), places[path]) for path, leaf in params.items()}
    return model, unflatten_dict(read, sep="/")


def _build(
    directory: Path, name: str, shapes: Shapes, overrides: Sequence[str], options: Mapping[str, Any]
) -> ModuleModel:
    loaded = load_recipe(directory / _RECIPE, overrides, environ={})
    section, plugin = loaded.recipe.model, loaded.recipe.plugin
    for key, given in (("plugin.module", plugin.module), ("model.tokenizer", section.tokenizer)):
        if given is not None and not _goes_along(directory, key, given):
            raise ModelError(loaded.where(key), f"{given} is not in {shown(directory)}", _AGAIN)
    plugin = plugin.model_copy(update={"options": filled(plugin.options, options)})
    loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"plugin": plugin}))
    if section.tokenizer == _TOKENIZER and (directory / _TOKENIZER).is_dir():
        section = section.model_copy(update={"tokenizer": str(directory.absolute() / _TOKENIZER)})
        recipe = loaded.recipe.model_copy(update={"model": section})
        loaded = replace(loaded, recipe=recipe)
    with importing_from(directory.absolute() / _PLUGIN, first=True), _leaving_no_bytecode():
        members = members_of(prepare(loaded, stages=(), given=(), init_shapes=shapes).model)
    if name not in members:
        problem = f"its plugin builds {', '.join(members)}, and not {name}"
        raise ModelError(str(directory / SHAPES_NAME), problem, _AGAIN)
    model: ModuleModel = members[name]
    return model


def _goes_along(directory: Path, key: str, name: str) -> bool:
    """Whether what the recipe of an export names is in its directory, or comes with a package."""
    if key == "model.tokenizer":
        return name == byte_tokenizer.NAME or (name == _TOKENIZER and not leads_out(directory, name))
    return not name.endswith(".py") or ((directory / name).is_file() and not leads_out(directory, name))


@contextlib.contextmanager
def _leaving_no_bytecode() -> Iterator[None]:
    """Importing the plugin adds nothing to the directory."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _check_same(wanted: Mapping[str, Any], stored: Checkpoint, directory: Path) -> None:
    """Refuses files that do not hold the arrays of a model, given by their paths."""
    shapes = {path: tuple(leaf.shape) for path, leaf in wanted.items()}
    names = sorted(shapes.keys() | stored.shapes.keys())
    wrong = [name for name in names if shapes.get(name) != stored.shapes.get(name)]
    if wrong:
        problem = f"{len(wrong)} parameters are missing, of another shape, or not of the model that its plugin builds"
        raise ModelError(shown(directory), f"{problem}: {some(wrong)}", _AGAIN)


def _source(stored: Checkpoint, path: str, leaf: Any) -> Source:
    order = tuple(range(len(leaf.shape)))
    return Source(leaf.shape, leaf.dtype, order, order, lambda box: stored.read(path, box))


def _difference(job: Job, model: ModuleModel, params: Params, tensors: Sequence[Tensor], directory: Path) -> float:
    """The largest difference between outputs of the model and of what is read from a directory.

    Raises:
        ModelError: there is one.
    """
    check_shared(directory)
    narrowest = narrowest_of(tensors)
    expected = outputs_of(replace(model, kept=rounded(model.kept, narrowest)), rounded(params, narrowest))
    places, options = jax.tree.map(lambda leaf: leaf.sharding, params), job.recipe.plugin.options
    again, read = read_own_module(directory, lambda _: places, options=options)
    finer = narrowest if is_mixed(tensors) else None
    found = outputs_of(replace(again, kept=rounded(again.kept, finer)), rounded(read, finer))
    difference = max((_distance(one, other) for one, other in zip(expected, found, strict=True)), default=0.0)
    if not difference <= TOLERANCE:
        problem = f"what was exported gives other outputs than the model: they differ by {difference:.1e}"
        raise ModelError(str(directory), problem, "let the outputs follow from parameters and inputs alone")
    return difference


def _distance(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """The largest difference where they differ: a model may give what is not finite for made-up inputs."""
    differing = ~((one == other) | (np.isnan(one) & np.isnan(other)))
    return float(np.abs(one[differing] - other[differing]).max(initial=0.0))


def _has_own_tokenizer(job: Job) -> bool:
    return job.tokenizer is not None and not isinstance(job.tokenizer, ByteTokenizer)


def _portable(job: Job, *, moved: bool) -> Recipe:
    """The recipe as it is kept beside an exported model.

    Args:
        job: its recipe.
        moved: whether the plugin goes along.
    """
    recipe = without_folders(job.recipe)
    predict = recipe.predict.model_copy(update={"use": None})  # what it means is what is exported
    recipe = recipe.model_copy(update={"models": {}, "predict": predict})
    if moved and job.plugin.name.endswith(".py"):
        module = f"{_PLUGIN}/{Path(job.plugin.file).name}"
        recipe = recipe.model_copy(update={"plugin": recipe.plugin.model_copy(update={"module": module})})
    if _has_own_tokenizer(job):
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"tokenizer": _TOKENIZER})})
    return recipe
