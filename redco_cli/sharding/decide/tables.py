"""Tables whose rows move over `fsdp` where they are looked up, as that is less than the table; see `gather.rows`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from redco_cli.sharding.axes import factors
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.plan import DATA, FSDP
from redco_cli.sharding.program.reading import Reading

_SMALL = 2**20
"""Bytes of a table that is gathered as quickly as rows of it are exchanged."""


def are_fewer(rows: int, ways: int, table: int, nbytes: int) -> bool:
    """Whether moving rows is cheaper than moving the table that they are in.

    Args:
        rows: how many are looked up by all devices; times `fsdp` where it splits the rows.
        ways: devices that share the examples.
        table: how many rows it has.
        nbytes: of all of it.
    """
    return nbytes >= _SMALL and rows < table * ways


def dims_of_moving_rows(
    parameter: Parameter, reading: Reading, sizes: Mapping[str, int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Dims of a table that `fsdp` may split so that rows which are looked up move, and not the table.

    Returns:
        Those of its features, and those of its rows; none where what moves is no less than the table.
    """
    lookups, ways = reading.rows.get(parameter.path, ()), sizes[DATA] * sizes[FSDP]
    whole = {axis for lookup in lookups for dim in lookup.features for axis in factors(dim)}
    features = [place for place, dim in enumerate(parameter.dims) if dim and whole.issuperset(dim)]
    indexed = [place for place in range(len(parameter.shape)) if place not in features]
    rows = math.prod(parameter.shape[place] for place in indexed)

    def is_cheaper(times: int) -> bool:
        few = [are_fewer(times * lookup.rows, ways, rows, parameter.bytes) for lookup in lookups]
        return bool(few) and all(few)

    return features if is_cheaper(1) else (), indexed if is_cheaper(sizes[FSDP]) else ()
