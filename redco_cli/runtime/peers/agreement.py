"""What all processes must find alike before their devices compute together: they would wait for ever otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redco_cli.errors import PluginError
from redco_cli.runtime.peers.multihost import current_connection, process_allgather


def sum_over_processes(
    name: str, batch: Mapping[str, Any], dims: int, where: str, count: int | None = None
) -> int | None:
    """The sum of a count over all processes, of which each has made its share of one batch.

    Args:
        name: which kind of batch; see `Connection.gather`.
        batch: numpy arrays with the rows of this process.
        dims: how many of the leading dims count examples, and may differ.
        where: the place of `collate_fn`.
        count: None on all processes where nothing is to be counted.

    Raises:
        PluginError: on all processes, when the examples of some have another shape.
    """
    if current_connection() is None:
        return count
    every = process_allgather(name, {"shapes": arrays_per_example(batch, dims), "count": count})
    first = every[0]["shapes"]
    for process, other in enumerate(every):
        for key in {**first, **other["shapes"]}:
            here, there = first.get(key, "missing"), other["shapes"].get(key, "missing")
            if here != there:
                problem = f"batch[{key!r}] is {here} per example on process 0, but {there} on process {process}"
                remedy = "give all batches one shape: pad to data.max_length, not to the longest of the examples"
                raise PluginError(where, problem, remedy)
    return None if count is None else sum(one["count"] for one in every)


def arrays_per_example(batch: Mapping[str, Any], dims: int) -> dict[str, str]:
    """What each array of a batch holds of one example, such as `[128] int32`.

    Args:
        batch: arrays by name.
        dims: how many of the leading dims count examples.
    """
    return {key: f"{list(leaf.shape[dims:])} {leaf.dtype}" for key, leaf in sorted(batch.items())}
