"""redco: distributed JAX training and inference from a YAML recipe and three functions.

`train`, `predict`, `export` and `inspect_sharding` do what the commands do; `load_model` gives a model and its
parameters, and `redco_cli.sharding.derive` the sharding of any JAX program:

    from redco_cli import export, inspect_sharding, load_model, predict, train
    from redco_cli.sharding import derive
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from redco_cli.version import __version__

if TYPE_CHECKING:
    from redco_cli.exporting.export import Exported
    from redco_cli.planning.inspect import inspect_sharding
    from redco_cli.run import evaluate, predict, predict_examples, train
    from redco_cli.trained import export, load_model
    from redco_cli.training.evaluate import EvalResult
    from redco_cli.training.outcome import TrainResult

__all__ = [
    "EvalResult",
    "Exported",
    "TrainResult",
    "__version__",
    "evaluate",
    "export",
    "inspect_sharding",
    "load_model",
    "predict",
    "predict_examples",
    "train",
]

_HOMES = {
    "Exported": "redco_cli.exporting.export",
    "load_model": "redco_cli.trained",
    "TrainResult": "redco_cli.training.outcome",
    "EvalResult": "redco_cli.training.evaluate",
    "evaluate": "redco_cli.run",
    "export": "redco_cli.trained",
    "inspect_sharding": "redco_cli.planning.inspect",
    "predict": "redco_cli.run",
    "predict_examples": "redco_cli.run",
    "train": "redco_cli.run",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: the command line must not pay for JAX before it needs it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
