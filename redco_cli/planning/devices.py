"""The devices that a workload is planned for, and what they reach of what their kind could."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from redco_cli.chips.speeds import SPEEDS
from redco_cli.chips.table import Chip
from redco_cli.chips.target import chip_of

FLOPS = 150e12
"""Of one device of an unknown kind, as an A100 or a TPU v4 reaches in bfloat16 training."""
FAST_LINK, SLOW_LINK = 200e9, 25e9
"""Bytes per second of one device within a host (NVLink, ICI) and between hosts (a 200 Gbit/s network)."""
WAIT = 10e-6
"""Seconds that a transfer between activations takes at least, whatever its bytes: assumed, as NCCL's within a host."""
REACHED, REACHED_LINK = 0.5, 0.7
"""Of the peaks of a known chip, what training reaches: guesses by which ways are ranked."""


@dataclass(frozen=True)
class Devices:
    """What a workload is to run on.

    Attributes:
        count: of all hosts.
        hosts: their number.
        memory: bytes of one device; None when it is not known.
        eager: whether it computes everything as soon as it can, as a CPU does.
        chip: its kind, where that is known.
    """

    count: int
    hosts: int
    memory: int | None
    eager: bool = False
    chip: Chip | None = None

    def flops(self, dtype: str) -> float:
        """Operations a second that one device reaches."""
        if self.chip is None:
            return FLOPS
        return REACHED * self.chip.flops.get(dtype, self.chip.flops["bfloat16"])

    @property
    def tpu_backend(self) -> bool:
        """Whether products compute what is elementwise among their operands, as XLA has it for TPUs."""
        return self.chip is not None and self.chip.platform == "tpu"

    @property
    def groups(self) -> str:
        """What has a fast network inside, in a word."""
        return "slices" if self.chip is not None and self.chip.torus else "hosts"

    @property
    def host_link(self) -> float | None:
        """Bytes a second between one device and its host's memory; None where that is not known, as of CPUs."""
        return None if self.chip is None or self.chip.name not in SPEEDS else SPEEDS[self.chip.name].host.typical

    @property
    def links(self) -> tuple[float, float]:
        """Bytes a second of one device within its host or slice, and beyond."""
        if self.chip is None:
            return FAST_LINK, SLOW_LINK
        ways = 2 if self.chip.torus else 1  # a ring along a dim of a torus goes both ways round
        return REACHED_LINK * ways * self.chip.link, REACHED_LINK * self.chip.network


def devices_here(count: int, memory: int | None, *, eager: bool = False) -> Devices:
    """Some of the devices of all processes, with what is known of their kind.

    Args:
        count: how many.
        memory: bytes of one; None when it is not known.
        eager: see `Devices`.
    """
    found = jax.devices()
    chip = chip_of(found[0].device_kind)
    is_torus = chip is not None and chip.torus > 0  # its hosts are within the slice, on the same links
    groups = len({one.slice_index for one in found}) if is_torus else jax.process_count()
    return Devices(count, groups, memory, eager, chip)
