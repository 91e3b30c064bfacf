"""What `redco predict` is given: a recipe, a run, or a model alone, with which a built-in plugin predicts."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redco_cli.console import note
from redco_cli.errors import ModelError, UsageError
from redco_cli.recipe.load import RESOLVED_NAME, LoadedRecipe, find_run, load_recipe, shown

_BARE = Path(__file__).parent / "model" / "predict.yaml"
"""The recipe of a model alone. Nothing lies beside it: relative paths are searched there first."""
_PLUGINS = {
    "causal_lm": ("causal_lm", "it continues texts; plugin.module=instruct answers conversations"),
    "seq2seq": ("seq2seq", "it reads the column source; plugin.options.source=NAME reads another"),
    "sequence_classification": ("text_classification", "it reads the column text; plugin.options.text=NAME another"),
}
"""Task of a model to the plugin that predicts with it, and what there is to know of that."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LONGEST = 4096
_PADDED = 512
"""Tokens: texts are padded to a few lengths up to the first by a plugin with `encode_fn`, and all to the second."""


def load_target(target: str | os.PathLike[str], overrides: Sequence[str] = ()) -> tuple[LoadedRecipe, Path]:
    """The recipe to predict by, and its output directory.

    Args:
        target: a recipe file, the name of a shipped recipe, the output directory of a run; or a model: a directory
            with a `config.json`, or a hub id, for which the built-in plugin of its task is taken.
        overrides: `dotted.key=value` strings.

    Raises:
        UsageError: there is no such thing; or a model is given twice, or another one than `output_dir` has.
        RecipeError: the recipe is wrong.
        ModelError: the model cannot be read, or no built-in plugin predicts with it.
    """
    if _is_model(str(target)):
        loaded = _of_model(str(target), overrides)
        return loaded, Path(loaded.recipe.output_dir)
    recipe, directory = find_run(target)
    loaded = load_recipe(recipe, overrides)
    return loaded, directory or Path(loaded.recipe.output_dir)


def _is_model(target: str) -> bool:
    """Whether a model is named. What stands below a folder that is there is none of a hub, but a misspelt path.

    So is what stands below `runs`, where the recipes write.
    """
    path = Path(target)
    if os.path.isdir(path):
        return (path / "config.json").is_file() and not (path / RESOLVED_NAME).is_file()
    is_id = _HUB_ID.fullmatch(target) is not None and not target.endswith((".yaml", ".yml"))
    return is_id and path.parts[0] != "runs" and not os.path.isfile(path) and not os.path.isdir(path.parent)


def _of_model(name: str, overrides: Sequence[str]) -> LoadedRecipe:
    for override in overrides:
        if override.partition("=")[0] in ("model.name", "model.config"):
            remedy = "leave one of them out"
            raise UsageError(f"command line: {override.partition('=')[0]}", f"{name} is the model already", remedy)
    own = [f"model.name={name}"]
    loaded = load_recipe(_BARE, [*own, *overrides])
    own += [
        f"{key}={value}"
        for key, value in {"output_dir": f"runs/predict/{Path(name).resolve().name}", **_fitting(loaded)}.items()
        if not _is_said(loaded, key)
    ]
    found = load_recipe(_BARE, [*own, *overrides])
    output = Path(found.recipe.output_dir)
    if any(output.glob("checkpoint-*")):
        problem = f"{shown(output)} holds checkpoints, and their parameters would be those of {name}"
        raise UsageError(found.where("output_dir"), problem, f"redco predict {shown(output)}; or leave output_dir out")
    return found


def _is_said(loaded: LoadedRecipe, key: str) -> bool:
    """Whether the command line or the environment gives a key."""
    return loaded.origins.get(key, "").startswith(("command line", "environment"))


def _fitting(loaded: LoadedRecipe) -> dict[str, Any]:
    """The plugin of a model, and the texts that it has room for, by recipe key."""
    from redco_cli.models.config.read import read_config
    from redco_cli.models.decoder.config import DecoderConfig
    from redco_cli.models.families.registry import text_part
    from redco_cli.models.flax.limits import sequence_limit
    from redco_cli.models.resolve import choose

    recipe = loaded.recipe
    config = text_part(read_config(recipe.model, where=loaded.where))
    task = choose(recipe.model, config, where=loaded.where)
    if isinstance(task, DecoderConfig):
        task = "sequence_classification" if task.num_labels else "causal_lm"
    chosen = _is_said(loaded, "plugin.module")
    if task not in _PLUGINS and not chosen:
        name, known = recipe.model.name, ", ".join(sorted(_PLUGINS))
        problem = f"{name} is a {task} model, and the built-in plugins predict with models alone that are of {known}"
        remedy = f"write a recipe with model: {{name: {name}}} and a plugin; or name one here: plugin.module=PLUGIN.py"
        raise ModelError(loaded.where("model.name"), problem, remedy)
    written = recipe.predict.generation.max_new_tokens if task == "causal_lm" else 0
    most = _LONGEST if task == "causal_lm" else _PADDED
    limit = sequence_limit(config, "input_ids")
    length = max(1, min(most, limit[0] - written)) if limit is not None else most
    if chosen:
        return {"data.max_length": length}
    module, more = _PLUGINS[task]
    _tell(f"{recipe.model.name} predicts with the built-in plugin {module}: {more}")
    return {"plugin.module": module, "data.max_length": length}


@functools.cache
def _tell(text: str) -> None:
    """Says it once, however often a command loads its recipe."""
    note(text)
