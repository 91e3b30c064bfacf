"""A tiny classifier and its plugin written to disk, as a user would have them."""

from pathlib import Path

import pytest

from tests.projects import write_classifier
from tests.training.tiny import write_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `recipe.yaml` and `plugin.py`, made the working directory."""
    write_classifier(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with the run of `tests.training.tiny`, which is exact."""
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
