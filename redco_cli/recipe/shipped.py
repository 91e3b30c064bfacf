"""The recipes and plugins that come with redco: in the source tree beside the package, in a wheel inside it."""

from __future__ import annotations

from pathlib import Path


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
