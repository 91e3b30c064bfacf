"""The plugin's functions as the core calls them: what they raise gets a place, what they return is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.errors import ExampleError, PluginError
from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.guard import guarded
from redco_cli.plugin.load import LoadedPlugin
from redco_cli.plugin.state import Stats, Variables, read_only, stat_sums
from redco_cli.row_notes import noting

SCALAR_OR_LOSS = "expected a scalar mean or Loss(sum, weight, metrics={...}) of scalars"
_RETURNED = "its return value"
_OF_STEPS = ("loss", "weight", "grad_norm", "learning_rate", "skipped", "streak", "compilations", "loss_scale")
_OF_RECORDS = ("step", "kind", "time", "nonfinite", "examples_per_second", "tokens_per_second", "input_wait", "padding")
_UNPREDICTED = 'add it to the examples; or, where only a loss needs it, read it only where ctx.stage != "predict"'
OWN_METRICS = frozenset(_OF_STEPS + _OF_RECORDS)
"""What the core itself records of a step: a plugin's metric of the same name would hide it, or be hidden."""


def describe(batch: Any) -> str:
    """The arrays of a batch in a line: `input_ids int32[8, 128], labels int32[8, 128]`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(batch)
    return ", ".join(
        f"{jax.tree_util.keystr(path, simple=True, separator='.')} {jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in flat
    )


def call_encode(plugin: LoadedPlugin, ctx: Context, example: Example) -> dict[str, np.ndarray] | None:
    """`encode_fn` on one example: 1-D arrays, int32 or float32, with labels unless it is for prediction; None without.

    Raises:
        ExampleError: the example cannot be used.
        PluginError: the function raised, or returned something else.
    """
    where = f"{plugin.file}: encode_fn"
    assert plugin.encode_fn is not None
    with guarded(where, "encode_fn", plugin.file, f"\n  on an example with keys {_keys(example)}"):
        found = plugin.encode_fn(ctx, example)
    if found is None:
        return None
    remedy = 'return {"input_ids": ids, "labels": labels}, lists of numbers that are not padded'
    if not isinstance(found, Mapping) or "input_ids" not in found:
        raise PluginError(where, f"returned {found!r:.60}, no dict with input_ids", remedy)
    fields = {str(name): _numbers(name, value, where, remedy) for name, value in found.items()}
    if ctx.stage != "predict":
        fields.setdefault("labels", fields["input_ids"])
    return fields


def _numbers(name: Any, value: Any, where: str, remedy: str) -> np.ndarray:
    """A field of an encoded example as a 1-D array."""
    try:
        array = np.asarray(value)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "biuf"):
            raise ValueError(f"shape {list(array.shape)} and type {array.dtype}")
        narrow = array.astype(np.float32 if array.dtype.kind == "f" and array.size else np.int32)
        if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
            raise ValueError("numbers beyond 32 bits")
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"the field {name!r} is {value!r:.60}: {error}"
        raise PluginError(where, problem, remedy) from None
    return narrow


def call_collate(plugin: LoadedPlugin, ctx: Context, examples: Sequence[Example]) -> Any:
    """`collate_fn` on examples; what it returns is unchecked here.

    Raises:
        ExampleError: an example cannot be used; its `row` says which one.
        PluginError: the function raised; its `row` says on which example, where it raises on some of them only.
    """

    def call(part: Sequence[Example], given: str) -> Any:
        known, missing = ({"the example": part[0]}, _UNPREDICTED) if ctx.stage == "predict" else ({}, "")
        with guarded(f"{plugin.file}: collate_fn", "collate_fn", plugin.file, given, known, missing):
            return plugin.collate_fn(ctx, part)

    try:
        return call(examples, f"\n  on {len(examples)} examples, the first with keys {_keys(examples[0])}")
    except ExampleError as error:
        if error.row is None:
            error.row = next((row for row, one in enumerate(_alone(call, examples)) if one is not None), None)
        raise
    except PluginError as error:
        if error.__cause__ is None:  # the plugin's own words, which may be about all of them
            raise
        failed = [(row, one) for row, one in enumerate(_alone(call, examples)) if one is not None]
        if not failed or len(failed) == len(examples):
            raise
        row, one = failed[0]
        one.row = row
        raise one from error.__cause__


def _alone(call: Callable[[Sequence[Example], str], Any], examples: Sequence[Example]) -> Iterator[Any]:
    """What `collate_fn` raises on each example alone, or None: that tells which of them is at fault."""
    for row, example in enumerate(examples):
        try:
            with noting():
                call([example], f"\n  on example {row + 1} of {len(examples)}, with keys {_keys(example)}")
        except (ExampleError, PluginError) as error:
            yield error
        else:
            yield None


def _keys(example: Example) -> str:
    return ", ".join(map(str, example))


def call_loss(plugin: LoadedPlugin, ctx: Context, params: Params, batch: Batch, rng: Any, *, train: bool) -> Loss:
    """`loss_fn` on a batch, traced; always a `Loss` of float32 scalars, each metric a pair (sum, weight).

    Stats are such pairs too, their sums of any shape; there are none unless `train`: only an update takes them.

    A scalar mean becomes Loss(mean * B, B): each example of the batch weighs the same.

    Raises:
        PluginError: the function raised, or did not return a scalar or a `Loss` of scalars.
    """
    where = f"{plugin.file}: loss_fn"
    known = {"batch": batch, "params": params, "ctx.state": ctx.state}
    with (
        read_only(ctx.state, where),
        guarded(where, "loss_fn", plugin.file, f"\n  on the batch {describe(batch)}", known),
    ):
        value = plugin.loss_fn(ctx, params, batch, rng, train)
    if not isinstance(value, Loss):
        mean = _differentiable(value, where, _RETURNED, batch)
        examples = jnp.float32(jax.tree.leaves(batch)[0].shape[0])
        return Loss(mean * examples, examples)
    weight = jax.lax.stop_gradient(_scalar(value.weight, where, "Loss.weight", batch))
    metrics = {}
    for name, metric in _named(value.metrics, where).items():
        pair = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric, weight)
        metrics[name] = tuple(jax.lax.stop_gradient(_scalar(part, where, f"the metric {name}", batch)) for part in pair)
    stats = stat_sums(plugin, value.stats, weight) if train else {}
    return Loss(_differentiable(value.sum, where, "Loss.sum", batch), weight, metrics, stats)


def _named(metrics: Any, where: str) -> Mapping[str, Any]:
    """Metrics by name, none of which the core uses itself."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise PluginError(where, f"the metrics are {metrics!r:.60}, no dict by name", "return a dict of name to number")
    taken = sorted(OWN_METRICS.intersection(metrics))
    if taken:
        raise PluginError(where, f"redco records {taken[0]} itself", f"give the metric {taken[0]} another name")
    return metrics


def _differentiable(value: Any, where: str, what: str, batch: Batch) -> jax.Array:
    dtype = jnp.result_type(value) if isinstance(value, int | float) or hasattr(value, "dtype") else jnp.float32
    if not jnp.issubdtype(dtype, jnp.floating):
        problem = f"{what} is {dtype.name} on the batch {describe(batch)}, which has no gradient"
        raise PluginError(where, problem, "return a float; count errors in metrics={...}")
    return _scalar(value, where, what, batch)


def _scalar(value: Any, where: str, what: str, batch: Batch) -> jax.Array:
    shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
    if shape is None:
        raise PluginError(where, f"{what} is {type(value).__name__}; {SCALAR_OR_LOSS}", "return one number per batch")
    if shape != ():
        problem = f"{what} has shape {list(shape)} on the batch {describe(batch)}; {SCALAR_OR_LOSS}"
        raise PluginError(where, problem, f"reduce it with {'.mean()' if what == _RETURNED else '.sum()'}")
    return jnp.asarray(value, jnp.float32)


def call_prepare(plugin: LoadedPlugin, ctx: Context, params: Params, batch: Batch) -> dict[str, Any]:
    """`prepare_fn` on a batch, traced: columns by name, each [B, ...].

    Raises:
        PluginError: the function raised, or returned something else.
    """
    where, remedy = f"{plugin.file}: prepare_fn", "return a dict of arrays whose leading dim is the batch"
    assert plugin.prepare_fn is not None
    with guarded(where, "prepare_fn", plugin.file, f"\n  on the batch {describe(batch)}"):
        found = plugin.prepare_fn(ctx, params, batch)
    size = jax.tree.leaves(batch)[0].shape[0]
    if not isinstance(found, Mapping) or not found or not all(isinstance(name, str) for name in found):
        raise PluginError(where, f"returned {found!r:.60}, no dict of columns by name", remedy)
    for name, column in found.items():
        if getattr(column, "shape", ())[:1] != (size,):
            shape = list(getattr(column, "shape", ()))
            raise PluginError(where, f"the column {name!r} has shape {shape} on the batch {describe(batch)}", remedy)
    return dict(found)


def call_predict(plugin: LoadedPlugin, ctx: Context, params: Params, batch: Batch, rng: Any) -> Any:
    """`predict_fn` on a batch, traced.

    Raises:
        PluginError: the function raised, or an output has no leading dim B.
    """
    where, known = f"{plugin.file}: predict_fn", {"batch": batch, "params": params, "ctx.state": ctx.state}
    with (
        read_only(ctx.state, where),
        guarded(where, "predict_fn", plugin.file, f"\n  on the batch {describe(batch)}", known),
    ):
        outputs = plugin.predict_fn(ctx, params, batch, rng)
    size, leaves = jax.tree.leaves(batch)[0].shape[0], jax.tree.leaves(outputs)
    if not leaves or any(getattr(leaf, "shape", ())[:1] != (size,) for leaf in leaves):
        found = ", ".join(str(list(getattr(leaf, "shape", ()))) for leaf in leaves)
        problem = f"it returned {f'shapes {found}' if leaves else 'nothing'} on the batch {describe(batch)}"
        raise PluginError(where, problem, f"return arrays whose leading dim is the batch, {size} here")
    if plugin.output_fn is None and any(map(jnp.iscomplexobj, leaves)):
        problem = "it returned complex numbers, which JSON cannot hold"
        raise PluginError(where, problem, "return real and imaginary parts, or define an output_fn that writes them")
    return outputs


def call_output(plugin: LoadedPlugin, ctx: Context, outputs: Any, size: int) -> list[Any]:
    """JSON-able predictions from the numpy arrays of one batch; without an `output_fn`, each row as (nested) lists.

    Raises:
        PluginError: the function raised, returned another number of predictions, or something JSON cannot hold.
    """
    if plugin.output_fn is None:
        return [jax.tree.map(lambda leaf, row=row: leaf[row].tolist(), outputs) for row in range(size)]
    where = f"{plugin.file}: output_fn"
    with guarded(where, "output_fn", plugin.file, f"\n  on the outputs {describe(outputs)}"):
        returned = plugin.output_fn(ctx, outputs)
        if not isinstance(returned, Iterable) or isinstance(returned, str | Mapping):
            raise PluginError(where, f"it returned {type(returned).__name__}", "return a list, one prediction per row")
        predictions = list(returned)
    if len(predictions) != size:
        problem = f"it returned {len(predictions)} predictions for {size} examples"
        raise PluginError(where, problem, "return exactly one prediction per row")
    for prediction in predictions:
        try:
            json.dumps(prediction)
        except (TypeError, ValueError) as error:
            problem = f"a prediction cannot be written as JSON: {error}"
            raise PluginError(where, problem, "return text, numbers, lists and dicts (.tolist(), float())") from None
    return predictions


def call_metric(
    plugin: LoadedPlugin, ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]
) -> dict[str, float]:
    """`metric_fn` over all examples; nothing without one.

    Raises:
        PluginError: the function raised or did not return a mapping of names to finite-or-NaN numbers.
    """
    if plugin.metric_fn is None:
        return {}
    where = f"{plugin.file}: metric_fn"
    with guarded(where, "metric_fn", plugin.file):
        metrics = plugin.metric_fn(ctx, examples, predictions)
    return {name: _number(name, value, where) for name, value in _named(metrics, where).items()}


def _number(name: str, value: Any, where: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        problem = f"the metric {name} is {value!r:.60}, which is no number"
        raise PluginError(where, problem, "return a dict of name to number") from None


def prove(
    compute: Callable[[Variables, Batch, Any], Any],
    variables: Variables,
    batch: Batch,
    *,
    update: Callable[[Variables, Stats], Any] | None = None,
) -> Any:
    """Traces what calls `loss_fn` or `predict_fn` over abstract values: nothing is computed.

    Args:
        compute: a function of (variables, batch, key).
        variables: abstract ones.
        batch: one real or abstract batch.
        update: of a loss that is trained, a function of (variables, stats) that calls `update_state`.

    Returns:
        The abstract `Loss` or outputs.

    Raises:
        PluginError: as `call_loss`, `call_predict` and `update_state`; also when the loss is an integer.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    found = jax.eval_shape(compute, variables, abstract, key)
    if update is not None:
        jax.eval_shape(update, variables, found.stats)
    return found
