"""Which code decides about training, and which about predictions."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from pathlib import Path

from redco_cli.plugin.code.modules import modules_of
from redco_cli.plugin.code.reach import Reach
from redco_cli.plugin.load import LoadedPlugin

_TRAINING = (
    *("encode_fn", "prepare_fn", "collate_fn", "loss_fn", "build_model", "init_batch", "optimizer_fn"),
    *("load_examples", "init_state", "update_state", "run_fn", "Options", "whole_batch"),
)
_PREDICTION = (
    *("encode_fn", "collate_fn", "predict_fn", "output_fn", "build_model", "init_batch", "init_state", "Options"),
)
_ENCODING = ("encode_fn", "Options")
_FREE = frozenset({"predict_fn", "output_fn", "metric_fn"})


def training_code(plugin: LoadedPlugin) -> dict[str, str]:
    """Digests of what the training functions of a plugin reach, by file and name: `{"plugin.py: loss_fn": "3f..."}`.

    `predict_fn`, `output_fn` and `metric_fn` are none, unless `run_fn` goes on with what they made: it predicts, or
    uses what an evaluation returned.
    """
    looped = _reach(plugin, ("run_fn",)) if plugin.run_fn is not None else None
    uses = set() if looped is None else _used_of_run(looped)
    predicts, measures = ("predict_fn", "output_fn") if uses else (), ("metric_fn",) if "evaluate" in uses else ()
    found = _reach(plugin, (*_TRAINING, *predicts, *measures))
    return {} if found is None else found.digests()


def prediction_code(plugin: LoadedPlugin) -> dict[str, str]:
    """Digests of what the functions reach that decide about predictions, by file and name."""
    found = _reach(plugin, _PREDICTION)
    return {} if found is None else found.digests()


def encoding_code(plugin: LoadedPlugin) -> dict[str, str]:
    """Digests of what `encode_fn` reaches, by file and name."""
    found = _reach(plugin, _ENCODING)
    return {} if found is None else found.digests()


def _reach(plugin: LoadedPlugin, roots: Sequence[str]) -> Reach | None:
    modules, main = modules_of(plugin)
    if main is None:  # it was Python when it was imported: it is just being written
        return None
    reach = Reach(modules, main, _FREE)
    reach.follow(roots)
    for root in roots:  # a function may be from a file that no import names
        function = getattr(plugin, root, None)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        file = Path(code.co_filename).resolve() if code is not None else None
        if file is not None and modules.is_users(file) and not modules.has(file):
            reach.add_file(file)
    return reach


def _used_of_run(reach: Reach) -> set[str]:
    """Whether an outer loop predicts, and whether it looks at what an evaluation returns."""
    nodes = list(reach.nodes())
    calls = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    dropped = [call.func for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "evaluate"]
    taken = {node.attr for node in nodes if isinstance(node, ast.Attribute) and node not in dropped}
    said = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {"predict", "evaluate"} & (taken | said)
