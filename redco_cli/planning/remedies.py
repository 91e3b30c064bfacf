"""What would make a step fit that does not: smaller micro-batches, more devices, other optimizers, shorter examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from redco_cli.console.numbers import format_bytes
from redco_cli.errors import DeviceError
from redco_cli.planning.devices import Devices
from redco_cli.planning.options import Option, options
from redco_cli.planning.workload import Workload


def remedies_for(workload: Workload, best: Option, machine: Devices) -> list[str]:
    """What would make a workload fit, with what it would need then.

    Args:
        workload: what does not fit.
        best: the way that needs least memory.
        machine: the devices, whose memory is known.
    """
    found = []
    assert machine.memory is not None
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
        return options(workload, machine, sizes)[0][0]
    except DeviceError:  # these devices cannot share such a batch, or such a model
        return None
