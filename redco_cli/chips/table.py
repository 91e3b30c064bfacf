"""What is known of each chip. All figures are of one device as JAX counts them: half a chip where a chip is two.

Sources, by the letters behind the entries:

    N  NVIDIA data sheets: H100 (SXM5, 2023), H200 (SXM, 2024), HGX B200 (2025), A100 (SXM4 80GB, 2021); dense rates
    T  Google Cloud TPU documentation, "System architecture": v5e, v5p, v6e, TPU7x
    S  "How to Scale Your Model" (jax-ml.github.io/scaling-book, 2025), table of TPU specs: links in one direction, DCN
    X  XLA: what its compiler prints of a TPU's memory when a program does not fit (v6e; of the others from memory, not
       seen here), and the descriptions of GPUs that it ships (openxla/xla, xla/backends/gpu/target_config/specs, 2026)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Platform = Literal["cpu", "gpu", "tpu"]
GIB = 2**30


@dataclass(frozen=True)
class Multiprocessors:
    """What XLA's compiler asks of a GPU, as `GpuDeviceInfoProto` names it.

    Attributes:
        cores: streaming multiprocessors.
        fpus: of each.
        shared: bytes of memory that the threads of one share.
        shared_of_a_block: bytes of it that one block may ask for.
        cache: bytes of L2.
        clock: in GHz.
        capability: of CUDA, major and minor.
    """

    cores: int
    fpus: int
    shared: int
    shared_of_a_block: int
    cache: int
    clock: float
    capability: tuple[int, int]


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator. All amounts are of one device.

    Attributes:
        name: as it is typed.
        platform: of JAX.
        kinds: what JAX calls it, `jax.Device.device_kind`.
        memory: bytes that a program may use.
        flops: operations a second at peak, by dtype: `bfloat16`, `float32`, `int8`.
        bandwidth: bytes a second between its memory and its units.
        link: bytes a second, in one direction, to the devices of its host (GPU) or along one dim of its torus (TPU).
        network: bytes a second, in one direction, to devices of other hosts (GPU) or other slices (TPU).
        of_a_host: how many devices share a host.
        torus: how many dims its slices have; 0 where every device of a host reaches every other at once.
        of_a_chip: how many devices are one chip, by which slices are counted and prices given.
        pool: share of its memory that a plan may fill; the rest is for what no plan sees.
        multiprocessors: of a GPU.
    """

    name: str
    platform: Platform
    kinds: tuple[str, ...]
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    network: float
    of_a_host: int
    torus: int = 0
    of_a_chip: int = 1
    pool: float = 1.0
    multiprocessors: Multiprocessors | None = None

    @property
    def usable(self) -> int:
        """Bytes of its memory that a plan may fill."""
        return int(self.memory * self.pool)


_HOPPER = Multiprocessors(132, 128, 233_472, 232_448, 52_428_800, 1.98, (9, 0))
GPU_POOL = 0.95
"""Of a GPU's memory. The rest, of no source: CUDA's context and graphs, buffers of NCCL. JAX by itself takes 0.75."""

CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "a100",
            "gpu",
            ("NVIDIA A100-SXM4-80GB",),
            memory=85_100_068_864,
            flops={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "int8": 624e12},
            bandwidth=2.039e12,
            link=300e9,
            network=25e9,  # 200 Gbit/s for each device
            of_a_host=8,
            pool=GPU_POOL,
            multiprocessors=Multiprocessors(108, 64, 167_936, 166_912, 41_943_040, 1.41, (8, 0)),
        ),  # N, X (memory, multiprocessors)
        Chip(
            "h100",
            "gpu",
            ("NVIDIA H100 80GB HBM3",),
            memory=84_942_979_072,
            flops={"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 67e12, "int8": 1979e12},
            bandwidth=3.35e12,
            link=450e9,
            network=50e9,  # 400 Gbit/s for each device
            of_a_host=8,
            pool=GPU_POOL,
            multiprocessors=_HOPPER,
        ),  # N, X (memory, multiprocessors)
        Chip(
            "h200",
            "gpu",
            ("NVIDIA H200",),
            memory=151_397_597_184,
            flops={"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 67e12, "int8": 1979e12},
            bandwidth=4.8e12,
            link=450e9,
            network=50e9,
            of_a_host=8,
            pool=GPU_POOL,
            multiprocessors=_HOPPER,
        ),  # N, X (memory, multiprocessors)
        Chip(
            "b200",
            "gpu",
            ("NVIDIA B200",),
            memory=191_514_411_008,
            flops={"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12, "int8": 4500e12},
            bandwidth=7.672e12,
            link=900e9,
            network=50e9,
            of_a_host=8,
            pool=GPU_POOL,
            multiprocessors=Multiprocessors(148, 128, 233_472, 232_448, 132_644_864, 1.965, (10, 0)),
        ),  # N, X (memory, multiprocessors)
        Chip(
            "v5e",
            "tpu",
            ("TPU v5 lite", "TPU v5e"),
            memory=int(15.75 * GIB),
            flops={"bfloat16": 197e12, "int8": 394e12},
            bandwidth=819e9,
            link=45e9,
            network=3.1e9,
            of_a_host=8,
            torus=2,
        ),  # T, S, X (memory)
        Chip(
            "v5p",
            "tpu",
            ("TPU v5p", "TPU v5"),
            memory=int(95.74 * GIB),
            flops={"bfloat16": 459e12, "int8": 918e12},
            bandwidth=2765e9,
            link=90e9,
            network=6.2e9,
            of_a_host=4,
            torus=3,
        ),  # T, S, X (memory)
        Chip(
            "v6e",
            "tpu",
            ("TPU v6 lite", "TPU v6e"),
            memory=int(31.25 * GIB),
            flops={"bfloat16": 918e12, "int8": 1836e12},
            bandwidth=1640e9,
            link=90e9,
            network=12.5e9,
            of_a_host=8,
            torus=2,
        ),  # T, S, X (memory)
        Chip(
            "tpu7x",
            "tpu",
            ("TPU7x",),
            memory=int(94.75 * GIB),
            flops={"bfloat16": 2307e12 / 2, "float8": 4614e12 / 2},
            bandwidth=7380e9 / 2,
            link=100e9,
            network=6.2e9,
            of_a_host=8,
            torus=3,
            of_a_chip=2,
        ),  # T, X (memory)
    )
}
"""By name. Peaks are without sparsity."""
