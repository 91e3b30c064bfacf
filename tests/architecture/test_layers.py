"""One direction: a module imports only from the rows below its own, wherever in it the import stands."""

from tests.architecture.source import PACKAGE, dotted, imports, modules, shown

ROWS = [
    {"__main__"},
    {"cli"},
    {"reports"},
    {"run", "trained", "shell", "launch"},
    {"planning"},  # rehearses what training does, with its timeline and its state
    {"training", "prediction", "exporting"},
    {"placement"},
    {"batch_sizes"},
    {"job"},
    {"encoding", "examples"},
    {"adapters", "privacy"},
    {"models"},
    {"plugin", "data", "runtime", "console"},
    {"chips"},
    {"recipe"},
    {"sharding"},
    {"errors", "version", "row_notes"},
]
"""From top to bottom. A module may import its own package, and whatever is in a row further down."""


def unit(name: str) -> str:
    """`redco_cli.recipe.load` as `recipe`."""
    return name.removeprefix(f"{PACKAGE}.").partition(".")[0]


def row(name: str) -> int:
    return next(index for index, units in enumerate(ROWS) if unit(name) in units)


PACKAGE_MODULES = [path for path in modules() if dotted(path).startswith(f"{PACKAGE}.")]


def test_every_module_has_a_row_and_every_row_a_module():
    assert {unit(dotted(path)) for path in PACKAGE_MODULES} == set().union(*ROWS)


def test_imports_go_downward():
    wrong = [
        f"{shown(path)}:{line} imports {name}"
        for path in PACKAGE_MODULES
        for line, name in imports(path)
        if unit(name) != unit(dotted(path)) and row(name) <= row(dotted(path))
    ]
    assert wrong == []


def test_plugins_use_what_plugin_authors_may_use():
    own = ("contract", "diffusion", "environments", "parts")
    allowed = {"redco_cli.errors", *(f"redco_cli.plugin.{name}" for name in own)}
    plugins = [path for path in modules() if path.parent.name == "plugins"]
    wrong = [
        f"{shown(path)}:{line} imports {name}"
        for path in plugins
        for line, name in imports(path)
        if name not in allowed
    ]
    assert plugins
    assert wrong == []
