"""Imports from the folder of a plugin, which need not be on Python's path, without confusing the modules of two."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_INSTALLED = frozenset({"site-packages", "dist-packages"})


@contextlib.contextmanager
def importing_from(directory: Path, *, first: bool = False) -> Iterator[None]:
    """Finds modules in a folder too, and takes none of the same name from elsewhere for one that is in it.

    What was imported from elsewhere before is there again afterwards.

    Args:
        directory: absolute; where there is none, nothing changes.
        first: it comes before every other folder, as only a copy must, and its modules are forgotten afterwards: the
            next import of that name is that of the original.
    """
    entries = list(directory.iterdir()) if directory.is_dir() else []
    names = {entry.stem for entry in entries if entry.is_dir() or entry.suffix == ".py"}
    names -= sys.stdlib_module_names | {"__main__", "redco_cli"}
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    elsewhere = {
        name: one
        for name, one in loaded.items()
        if not _lies_in(directory, one) and not is_installed(_place_of(one) or "")
    }
    for name in elsewhere:
        del sys.modules[name]
    cwd, place = str(Path.cwd()), f"{directory}"
    added = [place] if cwd in sys.path or not first else [place, cwd]  # for modules that are searched there anyway
    sys.path[0 if first else len(sys.path) :] = [*added, *(sys.path if first else [])]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if not any(entry is one for one in added)]
        for name in [name for name in sys.modules if first and name.partition(".")[0] in names]:
            if _lies_in(directory, sys.modules[name]):
                del sys.modules[name]
        sys.modules.update(elsewhere)


def is_installed(file: str | Path) -> bool:
    """Whether a file is one of an installed package."""
    return not _INSTALLED.isdisjoint(Path(file).parts)


def _lies_in(directory: Path, module: ModuleType) -> bool:
    place = _place_of(module)
    return place is not None and Path(place).is_relative_to(directory)


def _place_of(module: ModuleType) -> str | None:
    """Its file, or its folder where it is a package without one."""
    return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
