"""Evaluation: the loss over every example exactly once, the last batch at its own size rather than padded.

A padded row would have to be masked inside every plugin's loss; a batch of the right size needs nothing from anyone.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from redco_cli.batch_sizes import inference_batch_size
from redco_cli.console import warn
from redco_cli.data.batch import Slice, eval_slices
from redco_cli.data.encoded.buckets import LENGTHS
from redco_cli.data.loader import eval_batches
from redco_cli.errors import DataError, RecipeError
from redco_cli.job import Job
from redco_cli.placement import Placement
from redco_cli.plugin.calls import call_metric
from redco_cli.plugin.contract import Example, Loss
from redco_cli.plugin.state import Variables
from redco_cli.runtime.batch_shapes import BatchShapes
from redco_cli.runtime.mesh import batch_sharding, data_shards, local_rows, put, replicated
from redco_cli.runtime.peers.agreement import sum_over_processes
from redco_cli.runtime.peers.multihost import is_main_process
from redco_cli.runtime.program import Announce, Program
from redco_cli.runtime.stopping.signals import stopping_point
from redco_cli.training.step import make_eval_step

IN_FLIGHT = 2
"""Batches whose result is not waited for: the next is read while the device computes."""

BATCHES_PER_LENGTH = 8
"""So many batches are worth compiling the eval step for one more length of rows."""


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation by itself found.

    Attributes:
        parameters: where they are from: the directory of a checkpoint, or `model.name`.
        examples: how many, each once.
        values: `loss`, the plugin's metrics, and with `eval.predict` those of its `metric_fn`.
    """

    parameters: str
    examples: int
    values: Mapping[str, float]


def evaluate(
    job: Job,
    mesh: Mesh,
    step: Program,
    variables: Variables,
    examples: Sequence[Example] | None,
    done: Callable[[int, int], None],
    predict: Callable[[Variables, Sequence[Example]], Sequence[Any]] | None,
) -> dict[str, float]:
    """Mean loss and metrics over examples: Σ sum / Σ weight over all batches, added in float64.

    Args:
        step: the compiled eval step.
        variables: what it computes with, on the mesh.
        examples: None for those of the recipe.
        done: told how many examples are evaluated, of how many.
        predict: predictions of examples, of which the plugin's `metric_fn` makes further metrics; None for none.

    Raises:
        DataError: the recipe has none.
        Stopped: a signal asked to end between two batches.
    """
    chosen = job.eval_examples if examples is None else examples
    if chosen is None:
        raise no_eval_data(job)
    rows = job.eval_rows if examples is None else job.rows_of(examples, "eval")
    values = _mean(job, mesh, step, variables, rows, lambda count: done(count, len(rows)))
    if predict is not None:
        values |= call_metric(job.plugin, job.context("predict"), chosen, predict(variables, chosen))
    return values


def compiled_evaluation(job: Job, placement: Placement, announce: Announce) -> Program:
    """The eval step of a job on its devices; compiles nothing yet."""
    step = make_eval_step(placement.loss(job))
    shapes = BatchShapes(job.collate_place, warn, limit=job.recipe.train.max_compilations)
    return Program("eval step", step, announce, shapes=shapes, out_shardings=replicated(placement.mesh))


def no_eval_data(job: Job) -> DataError:
    """The error for what needs eval examples where there are none."""
    return DataError(job.where("data.eval"), "there is no eval data", "add data.eval")


def check_has(values: Mapping[str, float], metric: str, job: Job) -> None:
    """Refuses an evaluation without the metric that ranks it.

    Raises:
        RecipeError: naming those it has.
    """
    if metric not in values:
        known = ", ".join(values)
        raise RecipeError(job.where("eval.best_metric"), f"evaluation gives no {metric}", f"it gives {known}")


def _mean(
    job: Job, mesh: Mesh, step: Program, variables: Variables, examples: Sequence[Example], done: Callable[[int], None]
) -> dict[str, float]:
    batch_size = inference_batch_size(job, mesh, "eval")
    slices = eval_slices(len(examples), batch_size, data_shards(mesh))
    order, lengths = _arranged(job, examples, slices, batch_size)
    collate = job.collate("eval")
    sums: dict[str, tuple[float, float]] = {}
    pending: deque[tuple[int, Loss]] = deque()
    batches = eval_batches(
        examples,
        lambda number: functools.partial(collate, length=lengths[number]),
        slices,
        functools.partial(local_rows, mesh),
        where=job.collate_place,
        workers=job.recipe.data.workers,
        order=order,
    )
    with closing(batches):
        for (part, batch), length in zip(batches, lengths, strict=True):
            stopping_point()
            sum_over_processes("eval batch", batch, 1, job.collate_place)
            sharding = batch_sharding(mesh) if part.sharded else replicated(mesh)
            pending.append((part.stop, step(variables, put(batch, sharding), length=length)))
            if len(pending) > IN_FLIGHT:
                _add(sums, *pending.popleft(), done)
    while pending:
        _add(sums, *pending.popleft(), done)
    return _divided(job, sums)


def _divided(job: Job, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Each sum by its weight. A metric that counted nothing has no value: it is left out, and said to be.

    The loss, and what ranks checkpoints, stay as nan: a run whose one evaluation lacks them goes on.
    """
    found = {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}
    for name in [name for name, (_, weight) in sums.items() if not weight]:
        kept = name in ("loss", job.recipe.eval.best_metric)
        if is_main_process():
            said = "has no value" if kept else "is left out"
            warn(f"{job.plugin.file}: loss_fn: {name} {said}: its weight is 0 over the whole evaluation")
        if not kept:
            del found[name]
    return found


def _arranged(
    job: Job, examples: Sequence[Example], slices: Sequence[Slice], batch_size: int
) -> tuple[Sequence[int] | None, Sequence[int | None]]:
    """The order in which examples are evaluated, rows of like length together, and the length of each slice of it."""
    rows = len(job.eval_rows or ())  # not of these examples: run_fn may evaluate many, which share a few lengths
    buckets = job.buckets(examples, "eval", max(1, min(LENGTHS, rows // batch_size // BATCHES_PER_LENGTH)))
    if buckets is None:
        return None, [None] * len(slices)
    order = buckets.by_length()
    return order.tolist(), [buckets.of(order[part.start : part.stop]) for part in slices]


def _add(sums: dict[str, tuple[float, float]], stop: int, loss: Loss, done: Callable[[int], None]) -> None:
    host = jax.device_get(loss)
    for name, (total, weight) in {"loss": (host.sum, host.weight), **host.metrics}.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + float(total), before[1] + float(weight))
    done(stop)
