"""A step as a plan knows it, in the form of a compiled one: the same terms, from predicted work and traffic.

What only a compiler knows is assumed: how often activations are read and written, and how much of the traffic moves
beside work. A time made of it has a wider range for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from redco_cli.chips.target import Target
from redco_cli.planning.options import Option
from redco_cli.sharding.compiled.events import HOST, Arrival, Event, Span, Transfer
from redco_cli.sharding.compiled.work import Work
from redco_cli.sharding.plan import AXES, TENSOR, Collective
from redco_cli.sharding.predict.collectives import PER_PASS
from redco_cli.sharding.program.flops import Products
from redco_cli.sharding.rings import ring_bytes

ATTENTION_BACKWARD = {"gpu": 2.5, "tpu": 3.5, "cpu": 2.5}
"""Of flash attention: five products in the backward pass for two in the forward one; the two kernels of TPUs have seven
between them."""
TOUCHED = {"gpu": 7.7, "tpu": 4.3, "cpu": 7.7}
TOUCHED_BY_TENSOR = 2.5
"""Bytes that elementwise operations read and write in a step for each byte that products write in a forward pass; and
as many more for each device along `tensor`, all of which have the features between blocks. By compiled steps: of
Llama-3.1-8B for 8 H100 10.9, 13.1 and 18.4 with `tensor` 1, 2 and 4, for 8 v6e 7.3, 10.1 and 14.8; of other models 9 to
11 and, for TPUs, 5.5 to 11. Recomputing adds nothing to them: XLA does it where the result is used."""
OVERLAPPED = 0.5
"""Share of the traffic of parameters and gradients that moves beside work: assumed; compiled steps have 0 to 0.8."""
SLOWER, FASTER = 1.3, 0.8
"""By how much a planned time may be off beyond the range of the speeds: assumed."""


def planned_events(option: Option, products: Products, passes: float, target: Target) -> tuple[Event, ...]:
    """What a way to run a workload does in a step, on one device.

    Args:
        option: the way.
        products: of the forward pass over the global batch, on all devices together.
        passes: how many times these a step has, without what is recomputed: three where all parameters are trained.
        target: the devices.
    """
    dtype, count, done = option.workload.dtype, target.devices, option.products
    plain, width = done.flops - done.attention, products.width
    first, once = min(products.flops - products.attention, plain), min(products.attention, done.attention)
    per_byte = TOUCHED[target.chip.platform] + TOUCHED_BY_TENSOR * option.plan.mesh.get(TENSOR, 1)
    touched = (int(per_byte * products.written) + 2 * done.summed) // count
    touched_first = int(touched / passes)
    product_dtype = "tensorfloat32" if dtype == "float32" else dtype
    forward: list[Event] = [
        Work("matmul", first // count, product_dtype, 0),
        Work("memory", 0, "", touched_first),
    ]
    backward: list[Event] = [
        Work("matmul", (plain - first) // count, product_dtype, 0),
        Work("memory", 0, "", touched - touched_first + _updated(option)),
    ]
    if option.update_flops:
        backward.append(Work("matmul", option.update_flops, "tensorfloat32", 0))
    if done.attention:
        pulled = int(ATTENTION_BACKWARD[target.chip.platform] * products.attention)
        forward.append(Work("attention", once // count, dtype, 0, width=width))
        backward.append(Work("attention", (done.attention - once) // count, dtype, 0, width=width))
        backward.append(Work("attention backward", pulled // count, dtype, 0, width=width))
    if option.memory.on_host:
        way = option.workload.passes(option.micro_batch_size) * option.memory.on_host
        forward, backward = _beside("to the host", way, forward), _beside("from the host", way, backward)
    beside, waited = list[Transfer](), list[Transfer]()
    for number, one in enumerate(option.plan.collectives):
        if one.what in PER_PASS:
            beside.append(_transfer(one, f"{number} beside", OVERLAPPED, option, target))
        share = 1 - OVERLAPPED if one.what in PER_PASS else 1.0
        waited.append(_transfer(one, f"{number}", share, option, target))
    exposed = [event for one in waited for event in (one, Arrival(one.name))]
    return (*beside, *forward, *backward, *(Arrival(one.name) for one in beside), *exposed)


def _beside(name: str, copied: int, work: Sequence[Event]) -> list[Event]:
    """Work that bytes are copied beside, to or from the memory of the host, and waited for."""
    return [Transfer(name, HOST, (), copied, Span(1, 1, ())), *work, Arrival(name)]


def _updated(option: Option) -> int:
    """Bytes that an update reads and writes: parameters and state of the optimizer both, gradients likewise."""
    memory = option.memory
    return 2 * (memory.parameters + memory.optimizer + memory.gradients)


def _transfer(one: Collective, name: str, share: float, option: Option, target: Target) -> Transfer:
    axes = tuple(axis for axis in AXES if axis in one.axis.split("+"))
    span = span_of(axes, option.plan.mesh, target)
    return Transfer(name, one.kind, axes, int(share * ring_bytes(one.kind, one.bytes, span.devices)), span)


def span_of(axes: Sequence[str], mesh: Mapping[str, int], target: Target) -> Span:
    """Which devices the groups along some axes join, `tensor` innermost, inner axes along the first dims of a torus.

    Args:
        axes: of the mesh.
        mesh: axis to size.
        target: the devices.

    Example:
        >>> from redco_cli.chips.target import parse_target
        >>> mesh = {"data": 2, "fsdp": 16, "tensor": 4}
        >>> span_of(("fsdp",), mesh, parse_target("2*v5p:4x4x4", "--target"))
        Span(devices=16, groups=1, extents=(4, 4))
        >>> span_of(("data", "fsdp"), mesh, parse_target("h100:128", "--target"))
        Span(devices=32, groups=16, extents=())
    """
    numbers, stride = [0], 1
    for axis in reversed(AXES):
        if axis in axes:
            numbers = [number + step * stride for number in numbers for step in range(mesh[axis])]
        stride *= mesh[axis]
    groups = len({number // target.of_a_group for number in numbers})
    inside = len(numbers) // groups
    return Span(len(numbers), groups, _extents(inside, target.sizes) if target.chip.torus else ())


def _extents(devices: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Dims of a torus that so many devices fill."""
    found = []
    for size in sizes:
        part = math.gcd(devices, size)
        devices //= part
        if part > 1:
            found.append(part)
    return tuple(found)
