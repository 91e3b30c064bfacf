"""The cache of compiled programs, so that the second run of a recipe starts at once."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def cache_directory() -> Path:
    """Where compiled programs are kept: `REDCO_CACHE`, else `XDG_CACHE_HOME/redco`, else `~/.cache/redco`."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "redco"
    return Path(os.environ.get("REDCO_CACHE", default)) / "compiled"


def enable_compilation_cache() -> None:
    """Turns the cache on, unless the user chose a directory through JAX's own settings."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
