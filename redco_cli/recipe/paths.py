"""Relative paths of a recipe, made absolute: a resolved recipe then means the same from anywhere."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from redco_cli.recipe.data import SourceSection
from redco_cli.recipe.load import LoadedRecipe
from redco_cli.recipe.schema import ModelSection, OtherModelSection, Recipe

Model = TypeVar("Model", ModelSection, OtherModelSection)

_PATH_KEYS = (
    "plugin.module",
    "model.name",
    "model.tokenizer",
    "model.params",
    "adapter.from",
    "data.train.path",
    "data.train.data_files",
    "data.eval.path",
    "data.eval.data_files",
)
"""Keys whose value may be a path, apart from those that a run may change anyway."""


def pin_paths(loaded: LoadedRecipe, before: Mapping[str, Any] | None = None) -> LoadedRecipe:
    """The recipe with every relative path that exists made absolute: plugin file, data files, model directories.

    A path is searched from the recipe's folder, then from the working directory. `output_dir` stays as it is, and
    `model.params` and `adapter.from` are absolute even when they are gone: a run that continues needs them no more.
    Where they were is known from `before` then, the recipe of the checkpoint that is continued.
    """
    recipe, directory = loaded.recipe, loaded.directory
    known = {name: section.get("params") for name, section in ((before or {}).get("models") or {}).items()}
    plugin = recipe.plugin
    if plugin.module.endswith(".py"):
        plugin = plugin.model_copy(update={"module": _pinned(plugin.module, directory)})
    model = _pinned_model(recipe.model, directory, ((before or {}).get("model") or {}).get("params"))
    models = {name: _pinned_model(section, directory, known.get(name)) for name, section in recipe.models.items()}
    splits = {split: _pinned_sources(getattr(recipe.data, split), directory) for split in ("train", "eval")}
    data = recipe.data.model_copy(update=splits)
    predict = recipe.predict
    if predict.input is not None:
        predict = predict.model_copy(update={"input": _pinned(predict.input, directory)})
    adapter = recipe.adapter
    if adapter is not None and adapter.source is not None:
        begun = ((before or {}).get("adapter") or {}).get("from")
        adapter = adapter.model_copy(update={"from": str(find_params(adapter.source, directory, begun))})
    sections = {"plugin": plugin, "model": model, "models": models, "adapter": adapter}
    update = {**sections, "data": data, "predict": predict}
    return replace(loaded, recipe=recipe.model_copy(update=update))


def _pinned_model(section: Model, directory: Path, before: str | None) -> Model:
    update = {key: str(Path(name).resolve()) for key, name in _folders(section, directory).items()}
    if section.params is not None:
        update["params"] = str(find_params(section.params, directory, before))
    return section.model_copy(update=update) if update else section


def _folders(section: Model, directory: Path) -> dict[str, str]:
    """Those of a model and its tokenizer that are directories, seen from the recipe's folder, or the working one."""
    given = {key: os.path.expanduser(name) for key in ("name", "tokenizer") if (name := getattr(section, key, None))}
    beside = {key: os.path.join(directory, name) for key, name in given.items()}
    found = {key: beside[key] if os.path.isdir(beside[key]) else name for key, name in given.items()}
    return {key: name for key, name in found.items() if os.path.isdir(name)}


def find_models(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with the models that lie beside it under the names by which they are found from here."""

    def found(section: Model) -> Model:
        there = {key: os.path.relpath(name) for key, name in _folders(section, loaded.directory).items()}
        changed = {
            key: name for key, name in there.items() if not os.path.isdir(os.path.expanduser(getattr(section, key)))
        }
        return section.model_copy(update=changed) if changed else section

    recipe = loaded.recipe
    update = {"model": found(recipe.model), "models": {name: found(section) for name, section in recipe.models.items()}}
    return replace(loaded, recipe=recipe.model_copy(update=update))


def find_params(name: str, directory: Path, before: str | None = None) -> Path:
    """The absolute path of `model.params` or `adapter.from`, seen from the recipe's folder, else the working one.

    Where there is neither any more, it is `before` if that is one of the two.
    """
    given = os.path.expanduser(name)
    beside, here = (os.path.abspath(one) for one in (directory / given, given))
    return Path(beside if os.path.isdir(beside) or (beside == before and not os.path.isdir(here)) else here)


def moved(before: Mapping[str, Any], directory: Path, now: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe of an earlier run, with the present value of each path that only the move of its project has changed.

    The output directory tells of the move: where it was `/old/runs/x` and is `/new/runs/x`, `/old` has become `/new`.
    Where it did not move, no path changes, so that another file of the same project is never taken for a moved one.

    Args:
        before: plain data with pinned paths; nothing is known of a move where its `output_dir` is relative.
        directory: where its output directory is now; absolute.
        now: the present recipe, as plain data with pinned paths.
    """
    old, new = _move(before, directory)
    return before if old == new else _moved(before, now, old, new, "")


def found_again(before: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The recipe of a run that was moved with its project: what is gone of plugin and model, where it is now.

    Args:
        before: plain data with pinned paths.
        directory: where its output directory is now; absolute.
    """
    old, new = _move(before, directory)
    found = {section: dict(before[section]) for section in ("plugin", "model")}
    for section, name in (("plugin", "module"), ("model", "name"), ("model", "tokenizer"), ("model", "params")):
        value = found[section].get(name)
        if isinstance(value, str) and not os.path.exists(value) and os.path.exists(now := _rebased(value, old, new)):
            found[section][name] = now
    return {**before, **found}


def without_folders(recipe: Recipe) -> Recipe:
    """A recipe that says nothing of the machine it was used on: of each absolute path it keeps the last name."""
    plain = recipe.model_dump(mode="json")
    for key in (*_PATH_KEYS, "predict.input", "checkpoint.resume", "output_dir"):
        *sections, name = key.split(".")
        found: Any = plain
        for one in sections:
            found = found[one]
        for section in found if isinstance(found, list) else [found]:
            if isinstance(section, dict) and name in section:
                section[name] = _last_name(section[name])
    return Recipe.model_validate(plain)


def _last_name(value: Any) -> Any:
    if isinstance(value, list):
        return [_last_name(one) for one in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _move(before: Mapping[str, Any], directory: Path) -> tuple[Path, Path]:
    """The folders between which a run was moved; twice the same where it was not, or nothing is known of it."""
    old, new = Path(before["output_dir"]), directory
    if old == new or not old.is_absolute():
        return new, new
    while old.name == new.name and old.name:
        old, new = old.parent, new.parent
    return old, new


def _moved(before: Mapping[str, Any], now: Any, old: Path, new: Path, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in before.items():
        key, present = f"{prefix}{name}", now.get(name) if isinstance(now, Mapping) else None
        has_paths = any(one.startswith(f"{key}.") for one in _PATH_KEYS)
        if has_paths and isinstance(value, Mapping):
            found[name] = _moved(value, present, old, new, f"{key}.")
        elif has_paths and isinstance(value, list):  # of datasets
            others = itertools.chain(present if isinstance(present, list) else (), itertools.repeat(None))
            found[name] = [_moved(one, other, old, new, f"{key}.") for one, other in zip(value, others, strict=False)]
        elif key == "models":
            main = now["model"]["params"] if isinstance(now, Mapping) else None
            found[name] = {one: _moved_model(section, present, one, old, new, main) for one, section in value.items()}
        else:
            rebased = _rebased(value, old, new)
            within = (
                key in ("model.params", "adapter.from") and rebased and str(Path(rebased).parent) == present
            )  # a pinned checkpoint
            found[name] = rebased if key in _PATH_KEYS and (rebased == present or within) else value
    return found


def _moved_model(
    section: Mapping[str, Any], now: Any, name: str, old: Path, new: Path, main: str | None
) -> Mapping[str, Any]:
    """One of `models`, whose `params` may name a checkpoint in what the present recipe, or its `model`, names."""
    present = (now.get(name) if isinstance(now, Mapping) else None) or {}
    known = {"name": present.get("name"), "params": present.get("params") or main}
    rebased = {key: _rebased(section.get(key), old, new) for key in known}
    within = rebased["params"] and str(Path(rebased["params"]).parent) == known["params"]
    same = {key: value for key, value in rebased.items() if value == known[key] or (key == "params" and within)}
    return {**section, **same}


def _rebased(value: Any, old: Path, new: Path) -> Any:
    if isinstance(value, list):
        return [_rebased(one, old, new) for one in value]
    inside = isinstance(value, str) and Path(value).is_relative_to(old)
    return str(new / Path(value).relative_to(old)) if inside else value


def _pinned_sources(given: Any, directory: Path) -> Any:
    """One dataset or several; what is neither, such as a share of the training examples, names no file."""
    if isinstance(given, tuple):
        return tuple(_pinned_source(source, directory) for source in given)
    return _pinned_source(given, directory) if isinstance(given, SourceSection) else given


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
