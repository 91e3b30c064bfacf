"""A run that is small and exact."""

from pathlib import Path

import pytest

from tests.training.tiny import write_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny recipe, in the working directory."""
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
