"""The compiled `prepare_fn` of a job, over every example of its losses once, before the first step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from redco_cli.batch_sizes import inference_batch_size
from redco_cli.console import warn
from redco_cli.data.collate import Collate
from redco_cli.data.loader import predict_batches
from redco_cli.encoding.prepared import Prepared
from redco_cli.job import Job
from redco_cli.placement import Placement
from redco_cli.plugin.contract import Batch
from redco_cli.plugin.state import Variables
from redco_cli.runtime.batch_shapes import BatchShapes
from redco_cli.runtime.mesh import batch_sharding, data_shards, local_rows, put, replicated
from redco_cli.runtime.peers.agreement import sum_over_processes
from redco_cli.runtime.program import Announce, Program

Done = Callable[[int, int], None]
"""Told how many examples are prepared, of how many."""


def with_columns(job: Job, placement: Placement, variables: Variables, announce: Announce, done: Done) -> Job:
    """The job whose losses read what `prepare_fn` computes; the same where the plugin has none.

    The columns stay in the memory of every process. They follow from models that are never updated, so that a run that
    continues computes the same again.

    Args:
        job: with columns of zeros.
        placement: where everything lives.
        variables: on the mesh.
        announce: told of the compilation.
        done: told of the progress.
    """
    if job.plugin.prepare_fn is None:
        return job

    def prepare_step(variables: Variables, batch: Batch) -> Any:
        return job.prepared(variables, batch)

    shapes = BatchShapes(job.collate_place, warn)
    everywhere = replicated(placement.mesh)
    step = Program("preparation", placement.gathering(prepare_step), announce, shapes=shapes, out_shardings=everywhere)

    def filled(rows: Any) -> Any:
        return _filled(job, placement, functools.partial(step, variables), rows, done)

    return replace(job, train_rows=filled(job.train_rows), eval_rows=filled(job.eval_rows))


def _filled(job: Job, placement: Placement, step: Callable[[Batch], Any], rows: Any, done: Done) -> Any:
    """Rows with the values of their columns; the same where they have none, as in an evaluation those to train on."""
    if not isinstance(rows, Prepared):
        return rows
    mesh, size = placement.mesh, len(rows)
    shards = data_shards(mesh)
    batch_size = min(inference_batch_size(job, mesh, "eval"), -(-size // shards) * shards)
    columns: dict[str, NDArray[Any]] = {
        name: np.empty((size, *blank.shape[1:]), blank.dtype) for name, blank in rows.columns.items()
    }
    collate = job.collate("prepare")

    def arrange(places: range) -> tuple[Sequence[int], Collate]:
        return places, collate

    mine, workers = functools.partial(local_rows, mesh), job.recipe.data.workers
    batches = predict_batches(rows.examples, arrange, batch_size, 0, mine, where=job.collate_place, workers=workers)
    with closing(batches):
        for places, indices, batch in batches:
            sum_over_processes("prepared batch", batch, 1, job.collate_place)
            outputs = jax.device_get(step(put(batch, batch_sharding(mesh))))
            for name, column in columns.items():
                column[places.start : places.stop] = outputs[name][: len(indices)]
            done(places.stop, size)
    return Prepared(rows.examples, columns)
