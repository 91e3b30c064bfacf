"""What JAX, when it starts, is to look for and to take: a CPU as many devices, the CPU alone, the memory of GPUs.

Imports no JAX.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from glob import glob
from importlib.util import find_spec
from pathlib import Path

from redco_cli.chips.table import GPU_POOL
from redco_cli.runtime.cores import own_cores

# What Linux shows of NVIDIA's GPUs (under WSL dxg, on Jetson the last two), and of TPUs before and since they use vfio.
_DEVICE_FILES = ("/dev/nvidia*", "/dev/dxg", "/dev/nvgpu*", "/dev/nvmap", "/dev/accel*", "/dev/vfio/*")
_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
_GPUS = "/proc/driver/nvidia/gpus/*/information"
_PCI_VENDORS = "/sys/bus/pci/devices/*/vendor"
_GOOGLE, _NVIDIA = "0x1ae0", "0x10de"
_WAITING = 4
"""Collectives of one device, independent of each other, that may wait at once; two were seen."""
_LARGE_PAGES = "glibc.malloc.hugetlb"
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIMULATED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def simulate_devices(count: int) -> None:
    """Makes JAX, when it starts, find so many CPU devices and nothing else."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={count}"])
    leave_devices_alone()
    spare_threads()


def spare_threads() -> None:
    """Makes JAX, when it starts, have threads to spare for CPU devices that wait for others.

    A collective takes a thread of its process until all devices have come. XLA has as many threads as devices or cores:
    where half of them wait in one collective and half in another that is independent of it (a sum of weights, a gather
    in a loop), none is left to come, and after a minute the process aborts.
    """
    wanted, given = _WAITING * _simulated(), os.environ.get("PJRT_NPROC", "")
    if wanted > (int(given) if given.isdecimal() else own_cores()):
        os.environ["PJRT_NPROC"] = str(wanted)


def _simulated() -> int:
    found = _SIMULATED.search(os.environ.get("XLA_FLAGS", ""))
    return int(found[1]) if found else 1


def leave_devices_alone() -> None:
    """Makes JAX, when it starts, find the CPU and nothing else.

    For a process that plans for other devices: one that has loaded libtpu, even where there is no TPU, keeps its lock,
    and the process that compiles gets none.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"


def set_up() -> None:
    """What holds for every command, before JAX starts."""
    leave_out_missing_devices()
    take_gpu_memory()
    if _simulated() > 1:
        spare_threads()


def leave_out_missing_devices() -> None:
    """Makes JAX, when it starts, not try compilers of chips that this machine does not have.

    With `redco[tpu]` or `redco[cuda12]` a laptop compiles for chips elsewhere; JAX would look for them in it too, and
    print tracebacks when it finds none. Left to JAX: what JAX_PLATFORMS asks for, systems other than Linux, plugins
    of other makers, and a machine in which anything may be a GPU or TPU, whether its driver works or not.
    """
    if "JAX_PLATFORMS" not in os.environ and sys.platform == "linux" and _are_known(_plugins()) and not _has_chip():
        leave_devices_alone()


def take_gpu_memory() -> None:
    """Makes JAX, when it starts, take as much of a GPU as plans fill: by itself it leaves a quarter to nobody.

    Not where the environment says what it may have.
    """
    if not any(name in os.environ for name in _MEMORY):
        os.environ[_MEMORY[0]] = str(GPU_POOL)


def begin_again_with_large_pages() -> None:
    """Starts this process anew, as it was started, with large pages for its memory; returns where that changes nothing.

    On a CPU XLA allocates what a step takes anew for each step. glibc maps it, and Linux fills it with zeros page by
    page: 119,000 pages of 4 KiB a step of a BERT of 4 million parameters. glibc reads whether to ask for larger ones
    when a process starts, and only then. Left alone: a process that may compute elsewhere, one whose environment says
    which pages it wants, and a system that gives large ones to all or to none.
    """
    given = os.environ.get("GLIBC_TUNABLES", "")
    if _LARGE_PAGES in given or not _PAGES.exists() or "[madvise]" not in _PAGES.read_text():
        return
    if os.environ.get("JAX_PLATFORMS") != "cpu" and _has_chip():
        return
    os.environ["GLIBC_TUNABLES"] = f"{given}:{_LARGE_PAGES}=1".lstrip(":")
    with suppress(OSError):  # it runs all the same
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - itself


def gpus_here() -> list[str]:
    """What each NVIDIA GPU of this machine is called, as its driver says: `jax.Device.device_kind`.

    As many as CUDA_VISIBLE_DEVICES names; all where they differ, since which these are is not known. Asked without JAX,
    which would take their memory.
    """
    described = [Path(file).read_text() for file in sorted(glob(_GPUS))]
    names = [match[1].strip() for text in described if (match := re.search(r"^Model:(.*)$", text, re.MULTILINE))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or len({*names}) > 1:
        return names
    return names[: sum(one.strip() not in ("", "-1") for one in visible.split(","))]


def _plugins() -> list[str]:
    """Modules of JAX's namespace of plugins: `xla_cuda12`."""
    spec = find_spec("jax_plugins")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return [path.name for folder in folders for path in Path(folder).iterdir() if not path.name.startswith("_")]


def _are_known(plugins: Iterable[str]) -> bool:
    return all(name.startswith("xla_cuda") for name in plugins)


def _has_chip() -> bool:
    vendors = {Path(file).read_text().strip() for file in glob(_PCI_VENDORS)}
    return bool({_GOOGLE, _NVIDIA} & vendors) or any(glob(pattern) for pattern in _DEVICE_FILES)
