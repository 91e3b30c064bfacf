"""The files that a plugin consists of.

They are its own file and those that it imports from its own directory, found by reading their imports: what goes along
when a model is exported. What is installed, or comes with redco, is expected wherever the copy is used.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from redco_cli.errors import PluginError
from redco_cli.plugin.importing import is_installed
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.recipe.shipped import shipped_plugins


def plugin_files(plugin: LoadedPlugin) -> dict[str, Path]:
    """The files of a loaded plugin by their path in its own directory: that of its file, or of its outermost package.

    Returns:
        Nothing for a plugin that comes with redco or is installed.

    Raises:
        PluginError: it imports a file that is neither in its own directory nor installed.
    """
    if plugin.name in shipped_plugins():
        return {}
    file = Path(plugin.file).resolve()
    depth = 0 if plugin.name.endswith(".py") else plugin.name.count(".") + (file.name == "__init__.py")
    root = file.parents[depth]
    if is_installed(file):
        return {}
    found: dict[str, Path] = {}
    _collect(file, root, found)
    return found


def _collect(file: Path, root: Path, found: dict[str, Path]) -> None:
    """Adds a file below `root`, and what it imports from there."""
    name = file.relative_to(root).as_posix()
    if name in found:
        return
    found[name] = file
    for package in file.relative_to(root).parents:
        if (root / package / "__init__.py").is_file() and package.parts:
            _collect(root / package / "__init__.py", root, found)
    for line, module in _imports(file, root):
        place = _place_of(module.partition(".")[0], root)
        if place is None:
            continue
        if not place.is_relative_to(root):
            problem = f"imports {module} from {place}, which is not in the plugin's own directory"
            raise PluginError(f"{file}:{line}", problem, f"move it to {root}, or make it a package and install it")
        path = root.joinpath(*module.split("."))
        for own in (path / "__init__.py", path.with_suffix(".py")):
            if own.is_file():
                _collect(own, root, found)
                break


def _imports(file: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that a file imports; what may be a name in a module is among them."""
    package = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            names = [base, *(".".join(filter(None, (base, alias.name))) for alias in node.names)]
        else:
            continue
        for name in filter(None, names):
            parts = name.split(".")
            yield from ((node.lineno, ".".join(parts[: end + 1])) for end in range(len(parts)))


def _place_of(top: str, root: Path) -> Path | None:
    """Where a package or module is found; None for what is part of Python or redco, installed, or not found at all."""
    if top == "redco_cli" or top in sys.stdlib_module_names:
        return None
    spec = PathFinder.find_spec(top, [*sys.path, str(root)])
    if spec is None:
        return None
    places = [Path(one).resolve() for one in spec.submodule_search_locations or [spec.origin or ""]]
    place = next((one for one in places if one.is_relative_to(root)), places[0])
    is_edited_in_place = not place.is_relative_to(root) and top in importlib.metadata.packages_distributions()
    return None if is_installed(place) or is_edited_in_place else place
