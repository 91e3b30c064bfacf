"""Plugins written to a folder of their own, which is the working directory: places then read `p.py:3`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redco_cli.errors import PluginError
from redco_cli.plugin.load import LoadedPlugin, load_plugin
from redco_cli.recipe.schema import PluginSection

FUNCTIONS = """\
def collate_fn(ctx, examples): return {}
def loss_fn(ctx, params, batch, rng, train): return 0.0
def predict_fn(ctx, params, batch, rng): return 0
"""
"""What every plugin needs, on three lines."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Callable[..., LoadedPlugin]:
    """Writes `p.py` unless the text is None, and loads a plugin of a recipe in `recipes/`."""

    def write_and_load(text: str | bytes | None, module: str = "p.py", **options: Any) -> LoadedPlugin:
        if text is not None:
            (folder / "p.py").write_bytes(text if isinstance(text, bytes) else text.encode())
        section = PluginSection(module=module, options=options)
        return load_plugin(section, folder / "recipes", lambda key: f"r.yaml:1: {key}")

    return write_and_load


@pytest.fixture
def refusal(load: Callable[..., LoadedPlugin]) -> Callable[..., str]:
    """The whole text of the error that loading ends with."""

    def refused(text: str | bytes | None, module: str = "p.py", **options: Any) -> str:
        with pytest.raises(PluginError) as caught:
            load(text, module, **options)
        return str(caught.value)

    return refused
