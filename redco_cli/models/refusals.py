"""Settings of a config that a Flax class ignores, or computes differently from PyTorch: refused by name, never run."""

from __future__ import annotations
from collections.abc import Callable
from typing import Any


def refuse_unsupported(config: Any, task: str, *, where: Callable[[str], str]) -> None:
    """todo"""
