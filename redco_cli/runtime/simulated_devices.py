"""Simulated devices: a CPU that JAX takes for many. Imports no JAX, which reads this when it starts."""

from __future__ import annotations

import os


def simulate_devices(count: int) -> None:
    """Makes JAX, when it starts, find so many CPU devices and nothing else."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={count}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
