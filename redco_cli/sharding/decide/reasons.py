"""Why a parameter is split as it is, in the model's terms."""

from __future__ import annotations

import math
from collections.abc import Mapping

from redco_cli.sharding.axes import Axis, factors
from redco_cli.sharding.decide.choose import Chain
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.plan import DATA, FSDP
from redco_cli.sharding.program.reading import Reading


def called(axis: Axis, reading: Reading) -> str:
    """What an axis is, in the model's terms."""
    if axis in reading.heads:
        return "heads"
    if axis in reading.experts:
        return "experts"
    return "rows" if axis in reading.lookup_axes else "features"


def split_reason(parameter: Parameter, place: int, chain: Chain, reading: Reading, tensor: int) -> str:
    """Of one whose dim at `place` is split by a chosen axis."""
    size, what = math.prod(axis.size for axis in chain), called(chain[0], reading)
    each = f"{size} {what}, {size // tensor} on each device"
    if what == "experts":
        return each
    if chain[0] in reading.by_hand:
        return f"split by a shard_map: {parameter.shape[place]}, {parameter.shape[place] // tensor} on each device"
    matmuls = reading.matmuls.get(parameter.path, ())
    mine = set(chain)
    if any(mine & set(factors(dim)) for matmul in matmuls for dim in matmul.contracted):
        tied = any(mine & set(factors(dim)) for matmul in matmuls for dim in matmul.produced) or what == "rows"
        return f"{'columns and rows' if tied else 'rows'}: sums over {each}"
    if matmuls:
        return f"columns: makes {each}"
    return f"table: {each}" if what == "rows" else f"follows its matmul: {each}"


def reason_without_tensor(parameter: Parameter, sizes: Mapping[str, int]) -> str:
    """Where the mesh has no tensor axis, `fsdp` alone decides."""
    if sizes[FSDP] == 1:
        return "whole: data splits the batch, not parameters" if sizes[DATA] > 1 else "whole: there is one device"
    if parameter.is_vector:
        return "vector: whole, too small to be worth gathering"
    return f"first dim over fsdp {sizes[FSDP]}, gathered where it is used"


def whole_reason(parameter: Parameter, reading: Reading, tensor: int) -> str:
    """Of one that no chosen axis splits."""
    if parameter.is_vector:
        return "vector of the residual stream"
    if parameter.axes & (reading.lookup_axes - reading.weight_axes):
        return "table that is only looked up"
    return f"no axis that divides and is cheap to split over tensor {tensor}"
