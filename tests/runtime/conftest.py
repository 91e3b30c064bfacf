"""A tiny classifier for whole runs of several processes."""

from pathlib import Path

import pytest

from tests.projects import write_classifier


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `recipe.yaml` and `plugin.py`, made the working directory."""
    write_classifier(tmp_path, wide=True, steps=12, every=4, keep=3, at_start=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path
