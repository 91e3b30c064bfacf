"""The recipes and plugins that come with redco: in the source tree beside the package, in a wheel inside it.

A recipe is named by its file, or by its name among these.
"""

from __future__ import annotations

import os
from pathlib import Path

from redco_cli.errors import UsageError
from redco_cli.recipe.explain import did_you_mean


def shipped_directory() -> Path:
    """The directory that holds `recipes/` and `plugins/`."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent


def shipped_recipes() -> dict[str, Path]:
    """Name to file of every shipped recipe, sorted by name."""
    return {path.stem: path for path in sorted((shipped_directory() / "recipes").glob("*.yaml"))}


def shipped_plugins() -> dict[str, Path]:
    """Name to file of every built-in plugin, sorted by name."""
    files = sorted((shipped_directory() / "plugins").glob("*.py"))
    return {path.stem: path for path in files if not path.stem.startswith("_")}


def find_recipe(name: str | os.PathLike[str]) -> Path:
    """The file of a recipe given by path or shipped name.

    Raises:
        UsageError: there is none.
    """
    path = Path(name)
    if os.path.isfile(path):  # which, unlike Path.is_file, is no traceback for a name that no file can have
        return path
    recipes = shipped_recipes()
    if str(name) in recipes:
        return recipes[str(name)]
    if os.path.isdir(path):
        raise UsageError(str(name), "is a directory, not a recipe", "name the .yaml file in it")
    remedy = did_you_mean(path.stem, list(recipes))
    raise UsageError(str(name), "no such recipe, neither a file nor shipped with redco", remedy)
