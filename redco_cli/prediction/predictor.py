"""The compiled `predict_fn` of a job: each example once, in order, whatever the last batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from redco_cli.batch_sizes import inference_batch_size
from redco_cli.console import warn
from redco_cli.data.loader import predict_batches
from redco_cli.job import Job
from redco_cli.placement import Placement
from redco_cli.plugin.calls import call_output
from redco_cli.plugin.contract import Example
from redco_cli.plugin.state import Variables
from redco_cli.prediction.windows import Windows
from redco_cli.runtime.batch_shapes import BatchShapes
from redco_cli.runtime.mesh import batch_sharding, counted_rows, data_shards, local_rows, put, replicated
from redco_cli.runtime.peers.agreement import sum_over_processes
from redco_cli.runtime.peers.census import RowCensus
from redco_cli.runtime.program import Announce, Program
from redco_cli.runtime.stopping.signals import stopping_point

Done = Callable[[int], None]
"""Told how many examples are predicted so far."""


class Predictor:
    """The compiled `predict_fn` of a job on a mesh."""

    def __init__(self, job: Job, placement: Placement, announce: Announce) -> None:
        """Compiles nothing yet."""
        self._job = job
        self._mesh = placement.mesh
        self._largest = inference_batch_size(job, placement.mesh, "predict")

        def predict_step(variables: Variables, key_data: jax.Array, first: jax.Array, batch: Any) -> Any:
            key = jax.random.fold_in(jax.random.wrap_key_data(key_data), first)
            return job.prediction(variables, batch, key)

        self._key = jax.random.key(job.recipe.seed)

        gathers, everywhere = placement.gathering(predict_step), replicated(placement.mesh)
        shapes = BatchShapes(job.collate_place, warn)
        self._step = Program("prediction", gathers, announce, shapes=shapes, out_shardings=everywhere)

    def __call__(
        self,
        variables: Variables,
        examples: Sequence[Example],
        start: int = 0,
        census: RowCensus | None = None,
        salt: Sequence[int] = (),
    ) -> Iterator[tuple[int, Any]]:
        """Index and prediction of each example from `start` on, in order, drawn as no other salt draws.

        The sampling key of a batch follows from (seed, salt, its first place), and windows are cut from index 0:
        starting elsewhere changes no prediction. A census, if there is one, counts the rows of all batches.

        Raises:
            Stopped: a signal asked to end; whole windows have been yielded.
        """
        batch_size = self.batch_size(len(examples))
        windows, ctx = Windows(self._job, examples, batch_size), self._job.context("predict")
        aligned = start // windows.size * windows.size
        told = None if census is None else functools.partial(census.add, counted_rows(self._mesh, batch_size))
        mine, workers = functools.partial(local_rows, self._mesh), self._job.recipe.data.workers
        batches = predict_batches(
            examples,
            windows.arrange,
            batch_size,
            aligned,
            mine,
            where=self._job.collate_place,
            workers=workers,
            told=told,
        )
        chosen = variables.using(self._job.recipe.predict.use)
        key_data = np.asarray(jax.random.key_data(functools.reduce(jax.random.fold_in, salt, self._key)))
        ready: dict[int, Any] = {}
        with contextlib.closing(batches):
            for places, indices, batch in batches:
                stopping_point()
                sum_over_processes("predict batch", batch, 1, self._job.collate_place)
                arrays = put(batch, batch_sharding(self._mesh))
                drawn = put({"key": key_data, "first": np.int32(places.start)}, replicated(self._mesh))
                length = windows.batch(places)[1]
                outputs = jax.device_get(self._step(chosen, *drawn.values(), arrays, length=length))
                size = len(indices)
                rows = jax.tree.map(lambda leaf, size=size: leaf[:size], outputs)
                ready |= zip(indices, call_output(self._job.plugin, ctx, rows, size), strict=True)
                if windows.ends(places):
                    yield from ((index, ready[index]) for index in sorted(ready) if index >= start)
                    ready = {}

    def batch_size(self, count: int) -> int:
        """Examples per batch when `count` are predicted: no more than they fill, and a multiple of the devices."""
        shards = data_shards(self._mesh)
        return min(self._largest, -(-count // shards) * shards)

    def all(self, variables: Variables, examples: Sequence[Example], done: Done, salt: Sequence[int] = ()) -> list[Any]:
        """The predictions of all examples, in order; see a call."""
        predictions = []
        for index, prediction in self(variables, examples, salt=salt):
            predictions.append(prediction)
            done(index + 1)
        return predictions
