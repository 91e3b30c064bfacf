"""A recipe and a plugin to start from: shipped ones, copied out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from redco_cli.errors import StorageError, UsageError
from redco_cli.recipe.explain import did_you_mean
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.shipped import shipped_plugins, shipped_recipes

SCHEMA_NAME = "recipe.schema.json"
"""The JSON Schema that the recipes beside it point editors to: the output of `redco schema`."""


def copy_starter(directory: Path, name: str) -> list[Path]:
    """Copies a shipped recipe, its plugin and its data files into a directory, which is made if need be.

    The copied recipe names the copied plugin, so that editing either has an effect.

    Returns:
        The files written, the recipe first.

    Raises:
        UsageError: no such recipe.
        StorageError: a file is there already, or cannot be written.
    """
    recipes = shipped_recipes()
    if name not in recipes:
        raise UsageError(name, "no such shipped recipe", did_you_mean(name, list(recipes)))
    source = recipes[name]
    plugin = shipped_plugins()[load_recipe(source, environ={}).recipe.plugin.module]
    companions = [path for path in source.parent.glob(f"{name}_*") if path.suffix != ".yaml"]
    companions.append(source.parent / SCHEMA_NAME)
    files = {directory / source.name: source, directory / "plugins" / plugin.name: plugin}
    files |= {directory / path.name: path for path in companions}
    present = [str(path) for path in files if path.exists()]
    if present:
        raise StorageError(present[0], "is there already", "choose an empty directory: redco init DIR")
    text = source.read_text(encoding="utf-8")
    text = re.sub(rf"\bmodule: {plugin.stem}\b", f"module: plugins/{plugin.name}", text)
    try:
        (directory / "plugins").mkdir(parents=True, exist_ok=True)
        for target, original in files.items():
            shutil.copyfile(original, target)
        (directory / source.name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            str(directory), f"cannot be written: {error.strerror}", "choose another directory"
        ) from error
    return list(files)
