"""A plugin and what lies beside it: imported from there, not confused with another's, and found as its files."""

import os
import sys
from pathlib import Path

import pytest

from redco_cli.errors import PluginError
from redco_cli.plugin.importing import importing_from
from redco_cli.plugin.load import load_plugin
from redco_cli.plugin.sources import plugin_files
from redco_cli.recipe.schema import PluginSection
from tests.plugin.conftest import FUNCTIONS

BESIDE = f"""\
import beside_it
from deep_beside.inner import WHO
{FUNCTIONS}
def build_model(ctx): return beside_it.NAME + WHO
"""


def write(folder, name):
    """A plugin with a module and a package beside it, each of which says the folder's name."""
    directory = folder / name
    (directory / "deep_beside").mkdir(parents=True)
    (directory / "p.py").write_text(BESIDE)
    (directory / "beside_it.py").write_text(f"NAME = {name!r}\n")
    (directory / "deep_beside" / "__init__.py").write_text("")
    (directory / "deep_beside" / "inner.py").write_text("from . import innermost\nWHO = innermost.WHO\n")
    (directory / "deep_beside" / "innermost.py").write_text(f"import json\nWHO = {name.upper()!r}\n")
    (directory / "unused.py").write_text("")
    return directory


def loaded(module, directory=Path()):
    return load_plugin(PluginSection(module=str(module)), directory, lambda key: f"r.yaml:1: {key}")


def test_two_plugins_have_each_its_own_neighbours(folder):
    path = list(sys.path)
    first, second = (loaded(write(folder, name) / "p.py") for name in ("one", "two"))
    assert [plugin.build_model(None) for plugin in (first, second)] == ["oneONE", "twoTWO"]
    assert sys.path == path
    assert sys.modules["beside_it"].NAME == "one"


def test_what_is_on_the_path_comes_first_unless_it_is_a_copy(folder):
    directory = write(folder, "copy")
    (folder / "beside_it.py").write_text("NAME = 'path'\n")
    assert loaded(directory / "p.py").build_model(None) == "pathCOPY"
    with importing_from(directory, first=True):
        assert loaded(directory / "p.py").build_model(None) == "copyCOPY"
    assert "deep_beside" not in sys.modules or sys.modules["deep_beside"].__path__ != [str(directory / "deep_beside")]


def test_an_edit_of_the_same_second_and_length_counts(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for number in (1, 2):
        (folder / "p.py").write_text(f"{FUNCTIONS}\ndef build_model(ctx): return {number}\n")
        os.utime("p.py", (1_700_000_000, 1_700_000_000))
        assert loaded("p.py").build_model(None) == number
    assert not (folder / "__pycache__").exists()


def test_the_path_keeps_what_a_plugin_adds_to_it(folder):
    (folder / "p.py").write_text(f"import sys\nsys.path.append({str(folder / 'more')!r})\n{FUNCTIONS}")
    loaded("p.py")
    assert sys.path[-1] == str(folder / "more")


def test_the_files_of_a_plugin_are_what_it_imports_from_its_own_directory(folder):
    directory = write(folder, "whole")
    assert plugin_files(loaded(directory / "p.py")) == {
        name: directory / name
        for name in (
            "p.py",
            "beside_it.py",
            "deep_beside/__init__.py",
            "deep_beside/inner.py",
            "deep_beside/innermost.py",
        )
    }


def test_a_dotted_plugin_goes_with_its_packages(folder):
    (folder / "outermost" / "inside").mkdir(parents=True)
    for package in ("outermost", "outermost/inside"):
        (folder / package / "__init__.py").write_text("")
    (folder / "outermost" / "inside" / "p.py").write_text(f"def late(): from .. import needed\n{FUNCTIONS}")
    (folder / "outermost" / "needed.py").write_text("import numpy, redco_cli.errors\n")
    assert sorted(plugin_files(loaded("outermost.inside.p"))) == [
        "outermost/__init__.py",
        "outermost/inside/__init__.py",
        "outermost/inside/p.py",
        "outermost/needed.py",
    ]


def test_a_built_in_plugin_has_no_files_of_its_own():
    assert plugin_files(loaded("causal_lm")) == {}


def test_what_is_neither_beside_it_nor_installed_is_refused(folder):
    (folder / "elsewhere.py").write_text("")
    (folder / "own").mkdir()
    (folder / "own" / "p.py").write_text(f"import numpy\nimport elsewhere\n{FUNCTIONS}")
    with pytest.raises(PluginError) as caught:
        plugin_files(loaded("own/p.py"))
    assert str(caught.value) == (
        f"{folder}/own/p.py:2: imports elsewhere from {folder}/elsewhere.py, "
        "which is not in the plugin's own directory\n"
        f"  -> move it to {folder}/own, or make it a package and install it"
    )
