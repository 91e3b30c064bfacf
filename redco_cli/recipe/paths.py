"""Relative paths of a recipe, made absolute: a resolved recipe then means the same from anywhere."""

from __future__ import annotations

import glob
import os
from dataclasses import replace
from pathlib import Path

from redco_cli.recipe.load import LoadedRecipe
from redco_cli.recipe.schema import SourceSection


def pin_paths(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with every relative path that exists made absolute: plugin file, data files, model directories.

    A path is searched from the recipe's folder, then from the working directory. `output_dir` stays as it is, and
    `model.params` is absolute even when it is gone: a run that continues needs it no more.
    """
    recipe, directory = loaded.recipe, loaded.directory
    plugin = recipe.plugin
    if plugin.module.endswith(".py"):
        plugin = plugin.model_copy(update={"module": _pinned(plugin.module, directory)})
    model = recipe.model.model_copy(
        update={
            key: str(Path(name).resolve())
            for key in ("name", "tokenizer")
            if (name := getattr(recipe.model, key)) is not None and Path(name).is_dir()
        }
    )
    if model.params is not None:
        model = model.model_copy(update={"params": str(find_params(model.params, directory))})
    data = recipe.data.model_copy(
        update={
            split: _pinned_source(source, directory)
            for split in ("train", "eval")
            if (source := getattr(recipe.data, split)) is not None
        }
    )
    predict = recipe.predict
    if predict.input is not None:
        predict = predict.model_copy(update={"input": _pinned(predict.input, directory)})
    update = {"plugin": plugin, "model": model, "data": data, "predict": predict}
    return replace(loaded, recipe=recipe.model_copy(update=update))


def find_params(name: str, directory: Path) -> Path:
    """The absolute path of `model.params`: seen from the recipe's folder, else from the working directory."""
    given = os.path.expanduser(name)
    return Path(os.path.abspath(directory / given if os.path.isdir(directory / given) else given))


def _pinned_source(source: SourceSection, directory: Path) -> SourceSection:
    update: dict[str, object] = {}
    if Path(source.path).is_dir():
        update["path"] = str(Path(source.path).resolve())
    if isinstance(source.data_files, str):
        update["data_files"] = _pinned(source.data_files, directory)
    elif source.data_files is not None:
        update["data_files"] = tuple(_pinned(pattern, directory) for pattern in source.data_files)
    return source.model_copy(update=update)


def _pinned(pattern: str, directory: Path) -> str:
    for base in (directory, Path()):
        if glob.glob(str(base / pattern), recursive=True):
            return str((base / pattern).absolute())
    return pattern
