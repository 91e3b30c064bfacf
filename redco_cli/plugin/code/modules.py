"""Where the user's own modules are: everything that a plugin can import and that is neither installed nor redco's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from redco_cli.plugin.code.syntax import Module, read_module
from redco_cli.plugin.importing import is_installed
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.recipe.shipped import shipped_plugins

_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass
class UserModules:
    """The modules of a plugin's author, read when they are asked for.

    Attributes:
        root: the folder that the plugin's own imports start from.
        own: the name of the plugin's own module or outermost package, which counts though it is installed.
        unreadable: files of theirs that are no Python.
    """

    root: Path
    own: str = ""
    unreadable: set[Path] = field(default_factory=set)
    _read: dict[Path, Module | None] = field(default_factory=dict)
    _found: dict[str, Path | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        importlib.invalidate_caches()

    def find(self, dotted: str) -> Path | None:
        """The file of a module; None for one that is not the user's, or not there, and for a folder without a file."""
        if dotted not in self._found:
            self._found[dotted] = self._find(dotted) if all(dotted.split(".")) else None
        return self._found[dotted]

    def load(self, dotted: str) -> Module | None:
        """A module of the user, read; None for any other, and for one that is no Python."""
        file = self.find(dotted)
        return None if file is None else self.read(file, dotted)

    def read(self, file: Path, dotted: str) -> Module | None:
        """A file as the module of a name, whatever its place; None, and noted, for one that is no Python."""
        if file not in self._read:
            key = dotted.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else file.suffix)
            while any(known is not None and known.key == key for known in self._read.values()):
                key = f"other {key}"
            try:
                self._read[file] = read_module(key, dotted, file, file.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError):
                self._read[file] = None
                self.unreadable.add(file)
        return self._read[file]

    def has(self, file: Path) -> bool:
        """Whether a file was read as a module."""
        return file in self._read

    def is_users(self, file: Path) -> bool:
        """Whether a file is the user's: not installed, not redco's, not Python's."""
        elsewhere = (_PACKAGE, Path(sysconfig.get_path("stdlib")).resolve())
        return file.is_file() and not is_installed(file) and not any(file.is_relative_to(one) for one in elsewhere)

    def _find(self, dotted: str) -> Path | None:
        top, *rest = dotted.split(".")
        if top == "redco_cli" or (top in sys.stdlib_module_names and top != self.own):
            return None
        spec = PathFinder.find_spec(top, [*sys.path, str(self.root)]) or _edited_in_place(top)
        if spec is None:
            return None
        places = [Path(one).resolve() for one in spec.submodule_search_locations or ()]
        bases = [place.joinpath(*rest) for place in places]
        files = [file for base in bases for file in (base / "__init__.py", base.with_suffix(".py"))]
        if not places and not rest and spec.origin is not None:
            files = [Path(spec.origin).resolve()]
        found = next((file for file in files if file.is_file()), None)
        return found if found is not None and (top == self.own or self.is_users(found)) else None


def modules_of(plugin: LoadedPlugin) -> tuple[UserModules, Module | None]:
    """The modules of a plugin's author, and the plugin's own among them; None where that is no Python.

    Names and places of modules do not depend on where the project is.
    """
    file = Path(plugin.file).resolve()
    if plugin.name in shipped_plugins() or plugin.name.endswith(".py"):
        modules = UserModules(file.parent)
        return modules, modules.read(file, file.stem)
    depth = plugin.name.count(".") + (file.name == "__init__.py")
    modules = UserModules(file.parents[depth], plugin.name.partition(".")[0])
    return modules, modules.read(file, plugin.name)


def python_files(folder: Path) -> Sequence[Path]:
    """The files of Python directly in a folder."""
    return sorted(folder.glob("*.py"))


def _edited_in_place(top: str) -> ModuleSpec | None:
    """A package that was installed such that its source is used where it is."""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        return importlib.util.find_spec(top)
    return None
