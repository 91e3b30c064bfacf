"""A tiny classifier and its plugin written to disk, as a user would have them."""

from pathlib import Path

import pytest

from tests.projects import write_classifier


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `recipe.yaml` and `plugin.py`, made the working directory."""
    write_classifier(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
