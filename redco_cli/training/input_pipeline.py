"""Batches on their way to the devices: read and collated by threads, copied ahead of the step that needs them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from redco_cli.batch_sizes import micro_batch_size
from redco_cli.console import note, warn
from redco_cli.data.batch import BatchPlan
from redco_cli.data.encoded.windows import RowStream
from redco_cli.data.loader import train_batches
from redco_cli.job import Job
from redco_cli.row_notes import Notes, RowCounts
from redco_cli.runtime.mesh import batch_sharding, counted_rows, local_rows, put
from redco_cli.runtime.peers.agreement import sum_over_processes
from redco_cli.runtime.peers.census import RowCensus
from redco_cli.runtime.peers.multihost import is_main_process
from redco_cli.training.records.speed import Meter

READ_AHEAD = 2
"""Batches that are on the devices, or on their way, before they are needed."""
DeviceBatch = tuple[dict[str, jax.Array], tuple[int, int | None, int]]
"""Arrays with leading dims [micro-batches, examples], and how many examples and tokens they hold (None: no tokens), in
how many positions."""


def open_census(job: Job, steps: int, step: int) -> RowCensus:
    """A census of the run's own data.

    Args:
        job: recipe and data.
        steps: where the run ends.
        step: where it begins or goes on.
    """
    size = job.recipe.train.global_batch_size
    epoch = steps * size if job.train_size is None else step * size + job.train_size

    def tell(counts: RowCounts) -> None:
        if line := counts.line():
            say = warn if counts.rows in counts.noted.values() and is_main_process() else note
            say(f"{job.where('data.train')}: {line}")

    read = job.train_rows.counts if isinstance(job.train_rows, RowStream) else None
    return RowCensus(min(epoch, steps * size), tell, read)


def device_batches(
    job: Job,
    mesh: Mesh,
    meter: Meter,
    examples: Any,
    steps: range,
    seed: int,
    census: RowCensus | None = None,
    *,
    done: int = 0,
) -> Generator[DeviceBatch, None, None]:
    """The global batches of `steps`, split over the data axis.

    Args:
        meter: told of the time spent waiting for a batch.
        examples: a sequence, or an iterable of unknown length.
        steps: which batches of the endless, shuffled stream of `examples`.
        seed: of the order.
        census: takes what is noted of rows, where these are counted.
        done: optimizer steps before the first batch of the stream.
    """
    recipe, collate, micro = job.recipe, job.collate("train"), micro_batch_size(job.recipe)
    plan = BatchPlan(recipe.train.global_batch_size, micro, functools.partial(local_rows, mesh))
    counted = np.array(counted_rows(mesh, micro))

    def told(positions: Sequence[int], notes: Notes) -> None:
        if census is not None:
            census.add(np.tile(counted, plan.n_micro).tolist(), positions, notes)

    host = train_batches(
        examples,
        lambda step: functools.partial(collate, step=step + done),
        plan,
        where=job.collate_place,
        seed=seed,
        shuffle=recipe.data.shuffle and not isinstance(examples, RowStream),
        shuffle_buffer=recipe.data.shuffle_buffer,
        start_step=steps.start,
        stop_step=steps.stop,
        workers=recipe.data.workers,
        told=told,
    )
    step = steps.start
    ahead: deque[DeviceBatch] = deque()
    with closing(host):
        while True:
            while len(ahead) < READ_AHEAD:
                with meter.waiting():
                    batch = next(host, None)
                if batch is None:
                    break
                tokens = sum_over_processes("train batch", batch, 2, job.collate_place, _tokens(batch, counted))
                step += 1
                if census is not None and step * plan.global_batch_size >= census.stop:
                    census.finish()
                counts = plan.global_batch_size, tokens, _positions(batch, plan)
                ahead.append((put(batch, batch_sharding(mesh, dim=1)), counts))
            if not ahead:
                return
            yield ahead.popleft()


def _positions(batch: Mapping[str, Any], plan: BatchPlan) -> int:
    """Positions for tokens in a global batch, of all processes."""
    return plan.global_batch_size * int(np.prod(np.shape(batch.get("input_ids", ()))[2:], dtype=np.int64))


def _tokens(batch: Mapping[str, Any], counted: np.ndarray[Any, Any]) -> int | None:
    """Real tokens in the `counted` rows of a batch [micro-batches, rows, ...]; None for batches that hold none."""
    if "input_ids" not in batch:
        return None
    mask = batch.get("attention_mask")
    return int(batch["input_ids"][:, counted].size if mask is None else mask[:, counted].sum())
