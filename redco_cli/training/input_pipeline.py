"""Batches on their way to the devices: read and collated by threads, copied ahead of the step that needs them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from redco_cli.batch_sizes import micro_batch_size
from redco_cli.console import note, warn
from redco_cli.data.batch import BatchPlan
from redco_cli.data.collate import Collate, Measure, collated
from redco_cli.data.encoded.windows import EncodedStream, RowStream, looked_at
from redco_cli.data.examples import is_indexed
from redco_cli.data.loader import order, train_batches
from redco_cli.data.places import place_of
from redco_cli.encoding.collate import bound_measure
from redco_cli.job import PROBED_EXAMPLES, Job
from redco_cli.row_notes import Notes, RowCounts
from redco_cli.runtime.mesh import batch_sharding, counted_rows, local_rows, put
from redco_cli.runtime.peers.agreement import sum_over_processes
from redco_cli.runtime.peers.census import RowCensus
from redco_cli.runtime.peers.multihost import is_main_process
from redco_cli.runtime.program import Program
from redco_cli.training.records.speed import Meter

LOOKED_AT = 100_000
"""Rows whose lengths are looked at before a run, to tell which of the lengths it needs."""
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
    recipe, micro = job.recipe, micro_batch_size(job.recipe)
    plan = BatchPlan(recipe.train.global_batch_size, micro, functools.partial(local_rows, mesh))
    counted = np.array(counted_rows(mesh, micro))

    def told(positions: Sequence[int], notes: Notes) -> None:
        if census is not None:
            census.add(np.tile(counted, plan.n_micro).tolist(), positions, notes)

    host = train_batches(
        examples,
        _collates(job, examples, seed, done),
        plan,
        where=job.collate_place,
        seed=seed,
        shuffle=recipe.data.shuffle and not isinstance(examples, RowStream),
        shuffle_buffer=recipe.data.shuffle_buffer,
        start_step=steps.start,
        stop_step=steps.stop,
        workers=recipe.data.workers,
        measure=_measure(job, examples),
        told=told,
    )
    step, ahead = steps.start, deque[DeviceBatch]()
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


def compile_ahead(job: Job, mesh: Mesh, step: Program, state: Any, examples: Any, steps: range, seed: int) -> None:
    """Compiles the train step for every length that the rows of a run will be padded to, and says so once.

    The longest comes first: what does not fit into a device is told before anything is trained.

    Args:
        job: the job.
        mesh: the devices.
        step: the train step, of a state and a batch.
        state: on the mesh; stays as it is.
        examples: as for `device_batches`, like the two below.
        steps: which batches.
        seed: of the order.

    Raises:
        DeviceError: the devices have too little memory.
    """
    buckets, known, size = job.buckets(examples, "train"), looked_at(examples), job.recipe.train.global_batch_size
    missing = () if buckets is None else [one for one in buckets.lengths if one not in step.lengths]
    if buckets is None or known is None or not missing or not steps:
        return
    lengths, by = missing, ""
    if is_indexed(examples):
        needed = _needed_lengths(_step_lengths(job, examples, seed), missing, steps[: -(-LOOKED_AT // size)])
        lengths = [one for one in missing if one in needed or size * len(steps) > LOOKED_AT]
    elif job.recipe.data.buckets == "auto":
        by = f", chosen by the first {len(known.encoded)} examples"
    chosen, collate = buckets.shortest(min(size, PROBED_EXAMPLES)), job.collate("train")
    rows = [known[index] for index in chosen]
    count, micro, sharding = size // micro_batch_size(job.recipe), micro_batch_size(job.recipe), batch_sharding(mesh, 1)

    def shaped(length: int) -> dict[str, jax.ShapeDtypeStruct]:
        bound = functools.partial(collate, step=steps.start, length=length)
        batch = collated(bound, rows, job.collate_place, lambda row: place_of(known, chosen[row]))
        shapes = {name: (count, micro, *leaf.shape[1:]) for name, leaf in batch.items()}
        return {name: jax.ShapeDtypeStruct(shapes[name], leaf.dtype, sharding=sharding) for name, leaf in batch.items()}

    batches = {length: shaped(length) for length in reversed(lengths)}
    programs = len({str(batch) for batch in batches.values()})  # a collate_fn may pad to data.max_length regardless
    if programs > 1 and not step.lengths:
        *others, last = map(str, lengths)
        note(f"rows of {', '.join(others)} or {last} tokens{by}: {programs} train steps are compiled")
    for length, batch in batches.items():
        step.compiled(state, batch, length=length)


def _needed_lengths(padded: Callable[[int], int | None], lengths: Sequence[int], steps: range) -> set[int | None]:
    """Those of the lengths that steps have, which are looked at until all are found."""
    needed = set[int | None]()
    for step in steps:
        needed.add(padded(step))
        if needed.issuperset(lengths):
            break
    return needed


def _collates(job: Job, examples: Any, seed: int, done: int) -> Callable[[int, int], Collate]:
    """Of a step, and of the longest row of other processes in it, what makes its batch; see `device_batches`."""
    collate, buckets = job.collate("train"), job.buckets(examples, "train")
    if buckets is None or is_indexed(examples):
        padded = _step_lengths(job, examples, seed)
        return lambda step, longest: functools.partial(collate, step=step + done, length=padded(step))

    def of_step(step: int, longest: int) -> Collate:
        return functools.partial(collate, step=step + done, length=lambda own: buckets.holding(max(own, longest)))

    return of_step


def _measure(job: Job, examples: Any) -> Measure | None:
    """The lengths of examples that other processes collate, where these are not known beforehand and count."""
    if not isinstance(examples, EncodedStream) or job.buckets(examples, "train") is None:
        return None
    return bound_measure(job.plugin, job.context("train"))


def _step_lengths(job: Job, examples: Any, seed: int) -> Callable[[int], int | None]:
    """Of a step of examples of known length, what its rows are padded to; None where that does not vary."""
    buckets, size = job.buckets(examples, "train"), job.recipe.train.global_batch_size
    if buckets is None:
        return lambda step: None
    index = order(len(examples), seed=seed, shuffle=job.recipe.data.shuffle)
    return lambda step: buckets.of([index(step * size + row) for row in range(size)])


def _positions(batch: Mapping[str, Any], plan: BatchPlan) -> int:
    """Positions for tokens in a global batch, of all processes."""
    return plan.global_batch_size * int(np.prod(np.shape(batch.get("input_ids", ()))[2:], dtype=np.int64))


def _tokens(batch: Mapping[str, Any], counted: np.ndarray[Any, Any]) -> int | None:
    """Real tokens in the `counted` rows of a batch [micro-batches, rows, ...]; None for batches that hold none."""
    if "input_ids" not in batch:
        return None
    mask = batch.get("attention_mask")
    return int(batch["input_ids"][:, counted].size if mask is None else mask[:, counted].sum())
