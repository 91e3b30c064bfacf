"""Batches on their way to the devices: read and collated by threads, copied ahead of the step that needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

import jax
from jax.sharding import Mesh

from redco_cli.data.batch import BatchPlan
from redco_cli.data.loader import train_batches
from redco_cli.job import Job, micro_batch_size
from redco_cli.runtime.mesh import over_data, put
from redco_cli.training.metrics import Meter

READ_AHEAD = 2
"""Batches that are on the devices, or on their way, before they are needed."""
Fed = tuple[dict[str, jax.Array], tuple[int, int | None]]
"""Arrays with leading dims [micro-batches, examples], and how many examples and tokens they hold (None: no tokens)."""


def feed(job: Job, mesh: Mesh, meter: Meter, examples: Any, steps: range, seed: int) -> Generator[Fed, None, None]:
    """The global batches of `steps`, split over the data axis.

    Args:
        meter: told of the time spent waiting for a batch.
        examples: a sequence, or an iterable of unknown length.
        steps: which batches of the endless, shuffled stream of `examples`.
        seed: of the order.
    """
    recipe = job.recipe
    plan = BatchPlan(recipe.train.global_batch_size, micro_batch_size(recipe), jax.process_index(), jax.process_count())
    host = train_batches(
        examples,
        job.collate("train"),
        plan,
        where=job.collate_place,
        seed=seed,
        shuffle=recipe.data.shuffle,
        shuffle_buffer=recipe.data.shuffle_buffer,
        start_step=steps.start,
        stop_step=steps.stop,
        workers=recipe.data.workers,
    )
    ahead: deque[Fed] = deque()
    with closing(host):
        while True:
            while len(ahead) < READ_AHEAD:
                with meter.waiting():
                    batch = next(host, None)
                if batch is None:
                    break
                ahead.append((put(batch, over_data(mesh, dim=1)), (plan.global_batch_size, _tokens(batch))))
            if not ahead:
                return
            yield ahead.popleft()


def _tokens(batch: Mapping[str, Any]) -> int | None:
    """Real tokens of a batch over all processes; None for batches that hold none."""
    if "input_ids" not in batch:
        return None
    mask = batch.get("attention_mask")
    local = int(batch["input_ids"].size if mask is None else mask.sum())
    return local * int(jax.process_count())
