"""Nothing large is ever whole on every device in silence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from redco_cli.errors import DeviceError
from redco_cli.sharding.decide.choose import Candidate, leading
from redco_cli.sharding.decide.placed import Layout
from redco_cli.sharding.parameter import Parameter
from redco_cli.sharding.plan import AXES, FSDP, TENSOR
from redco_cli.sharding.program.reading import Reading

WARN_ABOVE = 0.02
REFUSE_ABOVE = 0.10
"""Shares of all parameter bytes that are whole on every device of an axis that should split them."""
SMALL = 2**20
"""Bytes of parameters that may be whole whatever their share: of a small model even its biases are a large part."""

Where = Callable[[str], str]
"""From a dotted recipe key to its place; `str` where there is no recipe."""


def checked_sizes(mesh: Mapping[str, int], where: Where) -> dict[str, int]:
    """All three axes with their sizes; an axis that is not named has size one.

    Raises:
        DeviceError: an axis of another name, or a size that is no positive number.
    """
    for axis, size in mesh.items():
        if axis not in AXES:
            raise DeviceError(where("mesh"), f"there is no mesh axis {axis!r}", f"the axes are {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise DeviceError(where(f"mesh.{axis}"), f"{size!r} is no number of devices", "give 1 or more")
    return {axis: mesh.get(axis, 1) for axis in AXES}


def guard(
    reading: Reading,
    chosen: Sequence[Candidate],
    layouts: Sequence[Layout],
    sizes: Mapping[str, int],
    where: Where,
) -> tuple[str, ...]:
    """What a user should know about a plan.

    Returns:
        Warnings.

    Raises:
        DeviceError: attention heads do not divide over `tensor`, or too many bytes are whole on every device.
    """
    warnings = _heads(reading, chosen, sizes, where)
    total = sum(parameter.bytes for parameter in reading.parameters) or 1
    for axis in (FSDP, TENSOR):
        whole = [
            (parameter, layout.reason)
            for parameter, layout in zip(reading.parameters, layouts, strict=True)
            if not any(axis in dim for dim in layout.stored)
        ]
        held = sum(parameter.bytes for parameter, _ in whole)
        share = held / total
        if sizes[axis] == 1 or share <= WARN_ABOVE or held < SMALL:
            continue
        problem = f"{share:.1%} of the parameter bytes are whole on every {axis} device: {_largest(whole)}"
        remedy = f"lower {axis}, or split them with sharding.override"
        if share > REFUSE_ABOVE:
            raise DeviceError(where(f"mesh.{axis}"), problem, remedy)
        warnings.append(f"{problem}; {remedy}")
    warnings += [
        f"no rule for the primitive {name} (met {count} times): its operands count as needed whole; "
        "if it is a kernel, redco_cli.sharding.register_reference tells what it computes"
        for name, count in reading.unknown
    ]
    return tuple(warnings)


def _heads(reading: Reading, chosen: Sequence[Candidate], sizes: Mapping[str, int], where: Where) -> list[str]:
    """Attention that cannot be split into whole heads."""
    tensor = sizes[TENSOR]
    forbidden = reading.within_heads | reading.input_axes
    taken = {axis for candidate in chosen for axis in candidate.chain}
    total = sum(parameter.bytes for parameter in reading.parameters) or 1
    whole: dict[int, list[tuple[Parameter, str]]] = {}
    queries = False
    for parameter in reading.parameters:
        heads = parameter.axes & reading.heads
        if tensor == 1 or not heads:
            continue
        cut = any(leading(dim, tensor, forbidden) for dim in parameter.dims if heads & set(dim))
        queries |= cut
        if not heads & taken and not cut:
            size = max(math.prod(axis.size for axis in dim if axis in heads) for dim in parameter.dims)
            whole.setdefault(size, []).append((parameter, f"{size} heads"))
    warnings = []
    for size, parameters in sorted(whole.items(), reverse=True):
        if queries and size < tensor and tensor % size == 0:  # keys and values, which are placed with their queries
            continue
        share = sum(parameter.bytes for parameter, _ in parameters) / total
        relation = f"more shards ({tensor}) than heads ({size})" if size < tensor else f"{size} heads do not divide"
        problem = f"{relation} over tensor {tensor}; each device would compute {_largest(parameters)}"
        divisors = [n for n in range(1, tensor) if size % n == 0 and tensor % n == 0]
        remedy = f"take tensor {divisors[-1]} and give the other devices to fsdp or data"
        if share > REFUSE_ABOVE:
            raise DeviceError(where(f"mesh.{TENSOR}"), problem, remedy)
        if share > WARN_ABOVE:
            warnings.append(f"{problem}; {remedy}")
    return warnings


def _largest(parameters: Sequence[tuple[Parameter, str]]) -> str:
    ordered = sorted(parameters, key=lambda one: -one[0].bytes)
    named = [f"{parameter.path} {list(parameter.shape)} ({reason})" for parameter, reason in ordered[:3]]
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(named) + more
