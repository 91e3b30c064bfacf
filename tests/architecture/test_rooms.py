"""Folders are rooms: few modules each, no prefix that is a folder in disguise, no way round in a circle."""

import ast
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, dotted, imports, modules, parsed, shown

MODULES = 14
TABLES = frozenset({"families", "plugins", "recipes"})
"""Folders with an entry a file, and the tests of the entries: they may have as many as there are."""
ABOUT_A_ROOM = 3
"""Lines that the docstring of a package has at least: what comes in, what goes out, where to start reading."""


def folders() -> dict[Path, list[str]]:
    """Every folder of the package and of the tests, to the names of modules and folders in it."""
    found: dict[Path, list[str]] = defaultdict(list)
    for top in (PACKAGE, "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.name not in ("__init__.py", "conftest.py"):
                found[path.parent].append(path.stem)
            for parent in path.parents[: len(path.relative_to(ROOT).parts) - 2]:
                if parent.name not in found[parent.parent]:
                    found[parent.parent].append(parent.name)
    return found


def packages() -> list[str]:
    return sorted({dotted(path) for path in modules() if path.name == "__init__.py" and path.parent.parent != ROOT})


def test_no_folder_is_a_hall():
    counts = {
        shown(folder): sum((folder / f"{name}.py").is_file() for name in names) for folder, names in folders().items()
    }
    assert {
        name: count for name, count in counts.items() if count > MODULES and TABLES.isdisjoint(Path(name).parts)
    } == {}


def test_no_prefix_is_a_folder_in_disguise():
    """Two siblings do not begin with the same word, nor one with the whole name of another."""
    wrong = []
    for folder, names in folders().items():
        plain = [name.removeprefix("test_") for name in names]
        starts = Counter(name.partition("_")[0] for name in set(plain))
        wrong += [f"{shown(folder)}: {start}" for start, count in starts.items() if count > 1]
    assert wrong == []


def test_every_package_says_what_it_is():
    """Three lines and more: what comes in, what goes out, where to start reading."""
    short = []
    for path in modules():
        if path.name == "__init__.py":
            lines = (ast.get_docstring(parsed(path)) or "").strip().splitlines()
            if len([line for line in lines if line]) < ABOUT_A_ROOM:
                short.append(shown(path))
    assert short == []


def test_no_cycle_of_files():
    """Imports for types only, and those inside of functions, included."""
    graph = {dotted(path): {name for _, name in imports(path)} - {PACKAGE} for path in modules()}
    check(graph)


@pytest.mark.parametrize("package", [PACKAGE, *packages()])
def test_no_cycle_of_rooms(package):
    """What lies directly in a package, modules and rooms, each as one."""
    graph = defaultdict(set)
    for path in modules():
        importer = child(package, dotted(path))
        for _, name in imports(path):
            imported = child(package, name)
            if importer and imported and importer != imported:
                graph[importer].add(imported)
    check(graph)


def test_no_module_imports_the_package_it_lies_in():
    wrong = [
        f"{shown(path)} imports {name}"
        for path in modules()
        for _, name in imports(path)
        if dotted(path).startswith(f"{name}.")
    ]
    assert wrong == []


def child(package: str, name: str) -> str:
    """Which direct child of a package a module lies in; empty where it lies elsewhere."""
    return name.removeprefix(f"{package}.").partition(".")[0] if name.startswith(f"{package}.") else ""


def check(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" > ".join(error.args[1]))
