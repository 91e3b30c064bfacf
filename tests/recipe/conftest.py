"""Recipes in a folder of their own, which is the working directory: places then read `r.yaml:3`."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from redco_cli.errors import RedcoError
from redco_cli.recipe.load import LoadedRecipe, load_recipe

BASE = "plugin: {module: causal_lm}\noutput_dir: runs/x\n"
Load = Callable[..., LoadedRecipe]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Load:
    """Writes `r.yaml` and loads it, from two lines that every recipe needs and those given, from line 3 on."""

    def write_and_load(
        text: str, *overrides: str, base: str = BASE, environ: Mapping[str, str] | None = None
    ) -> LoadedRecipe:
        (folder / "r.yaml").write_text(base + text)
        return load_recipe("r.yaml", overrides, environ or {})

    return write_and_load


@pytest.fixture
def refusal(load: Load) -> Callable[..., str]:
    """The whole text of the error that loading ends with."""

    def refused(text: str, *overrides: str, base: str = BASE, environ: Mapping[str, str] | None = None) -> str:
        with pytest.raises(RedcoError) as caught:
            load(text, *overrides, base=base, environ=environ)
        return str(caught.value)

    return refused


@pytest.fixture
def write(folder: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, text: str) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file
