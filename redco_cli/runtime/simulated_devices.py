"""Devices that JAX, when it starts, is to find: a CPU that it takes for many, or the CPU alone. Imports no JAX."""

from __future__ import annotations

import os


def simulate_devices(count: int) -> None:
    """Makes JAX, when it starts, find so many CPU devices and nothing else."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={count}"])
    leave_devices_alone()


def leave_devices_alone() -> None:
    """Makes JAX, when it starts, find the CPU and nothing else.

    For a process that plans for other devices: one that has loaded libtpu, even where there is no TPU, keeps its lock,
    and the process that compiles gets none.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
