"""Examples to one checked batch: what is wrong with one of them gets its place, and what is noted of rows is heard.

`collate` runs in one thread at a time, because what it calls need not be thread-safe: a fast tokenizer whose padding or
truncation changes between two calls is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from redco_cli.data.batch import check_batch
from redco_cli.data.examples import Example
from redco_cli.data.places import Locate, placed
from redco_cli.errors import ExampleError, PluginError
from redco_cli.row_notes import Notes, noting

Arrays = dict[str, np.ndarray]
Collate = Callable[[list[Example]], Mapping[str, Any]]
"""Examples to a batch: the plugin's `collate_fn`, bound to its context."""

Measure = Callable[[list[Example]], list[int]]
"""Examples to how long a batch must be for each of them: what the longest of its fields needs."""

_collating = threading.Lock()


def collated(
    collate: Collate, examples: list[Example], where: str, locate: Locate, noted: Callable[[Notes], None] | None = None
) -> Arrays:
    """One checked batch.

    Args:
        collate: as for `train_batches`.
        examples: of the batch.
        where: the place of `collate_fn`, for errors.
        locate: from a row of the batch to the place that its example is from.
        noted: takes what is noted of rows. One call at a time.

    Raises:
        DataError, PluginError: an example, or what `collate_fn` returned, cannot be used.
    """
    with _collating, noting() as notes:
        try:
            batch = collate(examples)
        except (ExampleError, PluginError) as error:
            raise placed(error, locate) from error.__cause__
        if noted is not None:
            noted(notes)
    return check_batch(batch, len(examples), where)


def measured(measure: Measure, examples: list[Example], locate: Locate) -> list[int]:
    """The lengths of examples that will be collated: what is noted of them is heard then.

    Raises:
        DataError, PluginError: an example cannot be used.
    """
    with _collating, noting():
        try:
            return measure(examples)
        except (ExampleError, PluginError) as error:
            raise placed(error, locate) from error.__cause__
