"""What would make a step fit that does not: smaller micro-batches, more devices, other optimizers, shorter examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from redco_cli.console.numbers import format_bytes
from redco_cli.errors import DeviceError
from redco_cli.planning.devices import Devices
from redco_cli.planning.options import Option
from redco_cli.planning.report import Compiled
from redco_cli.planning.search.ways import options
from redco_cli.planning.workload import Workload

_ROOMY = 7 / 8
"""Of the memory, and of what a way needs by plan that did not fit, at most."""


def does_fit(planned: int, compiled: Compiled | None, limit: int | None) -> bool | None:
    """Whether a step fits into so many bytes of a device: as compiled for a target, else by its plan.

    None where nobody said how many there are. What a CPU makes of a step says nothing about other devices.
    """
    if limit is None:
        return None
    if compiled is None or compiled.target is None:
        return planned <= limit
    return compiled.too_large is None and (compiled.memory or planned) <= limit


def remedies_for(
    workload: Workload, best: Option, machine: Devices, sizes: Mapping[str, int] | None = None
) -> list[str]:
    """What would make a workload fit, with what it would need then.

    Args:
        workload: what does not fit.
        best: of the ways to run it; it does not fit by plan, or as compiled.
        machine: the devices, whose memory is known.
        sizes: of the mesh, where it is decided.
    """
    found = []
    assert machine.memory is not None
    room = int(_ROOMY * min(machine.memory, best.memory.total))
    roomy = _least(workload, replace(machine, memory=room), sizes) if best.fits(machine.memory) else None
    if roomy is not None and roomy.fits(room):
        of_mesh = ",".join(f"{axis}={size}" for axis, size in roomy.plan.mesh.items())
        how = f"remat {roomy.workload.remat}, micro-batch {roomy.micro_batch_size}"
        found.append(f"mesh {of_mesh} with {how} needs {format_bytes(roomy.memory.total)} by plan")
    if workload.micro_batch_size is not None and not workload.whole_batch:
        way = _least(replace(workload, micro_batch_size=None), machine, best.plan.mesh)
        if way is not None and way.memory.total < best.memory.total:
            needs = format_bytes(way.memory.total)
            found.append(f"train.micro_batch_size: {way.micro_batch_size} needs {needs}")
    for factor in (2, 4, 8, 16):
        more = replace(machine, count=machine.count * factor, hosts=machine.hosts * factor)
        way = _least(replace(best.workload, mesh=None, recomputing=None), more, None)
        if way is not None and way.fits(machine.memory):
            found.append(f"{more.count} devices need {format_bytes(way.memory.total)} each")
            break
    state = best.memory.optimizer
    if 2 * state > best.memory.gradients:  # otherwise it is factored already, or there is none
        found.append(f"train.optimizer: adafactor saves most of {format_bytes(state)} of optimizer state")
    passing = best.memory.activations + best.memory.logits
    if workload.seq_length is not None and passing > best.memory.total // 10:
        found.append(f"half the sequence length saves about {format_bytes(passing // 2)}")
    return found


def _least(workload: Workload, machine: Devices, sizes: Mapping[str, int] | None) -> Option | None:
    """The best way, if there is any."""
    try:
        return options(workload, machine, sizes, wanted=1)[0][0]
    except DeviceError:  # these devices cannot share such a batch, or such a model
        return None
