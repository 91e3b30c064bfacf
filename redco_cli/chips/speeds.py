"""What programs reach of what a chip could: shares of its peaks, and what each kernel and collective costs beside.

Every constant has a range, within which it is believed to lie, and says where it is from:

    measured    published by others, of programs that do little else; B, F and N as remembered, not looked up again
    assumed     of no source
    fitted      so that published training steps are met; one for each kind of chip

Sources, by the letters behind the entries:

    B  "Maximum achievable matmul FLOPS" in Stas Bekman's "Machine Learning Engineering" (stas00/ml-engineering,
       compute/accelerator): 0.86 of an A100's peak, 0.80 of an H100's, 0.78 of a B200's, by the best of many shapes
    F  FlashAttention-3 (arXiv:2407.08608), figures 5 and 6: causal attention of cuDNN and FlashAttention on an H100,
       head dim 128, lengths of 4k to 16k: 0.50 to 0.65 of the peak forward, 0.40 to 0.55 backward
    N  NCCL tests (github.com/NVIDIA/nccl-tests): all-gathers and reduce-scatters of large arrays among 8 H100s reach
       0.75 to 0.85 of 450 GB/s, over 400 Gbit/s networks much the same share
    S  a walk over a Llama-3.1-8B step of MaxText's kind, compiled for v6e, beside its published time: 0.91 to 0.95 of
       the peak for its products, 0.85 of the bandwidth for elementwise operations
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from redco_cli.chips.table import Chip


@dataclass(frozen=True)
class Range:
    """A constant.

    Attributes:
        slow: its value where things go slowly.
        typical: what is believed.
        fast: its value where things go well.
        origin: `measured`, `assumed` or `fitted`, with the letter of its source.
    """

    slow: float
    typical: float
    fast: float
    origin: str


@dataclass(frozen=True)
class Speeds:
    """What is reached on one kind of chip.

    Attributes:
        matmul: share of the peak by dtype, of large matrix products.
        attention: the same of a library's attention, forward.
        attention_backward: backward.
        memory: share of the bandwidth of its memory, of what only reads and writes.
        link: share of a link's bandwidth within a host or slice.
        network: share of the network's between hosts or slices.
        host: bytes a second between a device and its host's memory.
        kernel: seconds that a kernel costs beside its work.
        collective: seconds that a collective costs beside its bytes.
        time: what the whole is multiplied with.
    """

    matmul: Range
    attention: Range
    attention_backward: Range
    memory: Range
    link: Range
    network: Range
    host: Range
    kernel: Range
    collective: Range
    time: Range

    @property
    def constants(self) -> Mapping[str, Range]:
        """All of them, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_UNFITTED = Range(1.0, 1.0, 1.0, "not fitted: no published step of this chip could be compared")

_V6E = Range(1.116, 1.031, 0.952, "fitted, on MaxText's Llama-3.1-8B on 8 and 70B on 64 v6e, rows 1 and 8")
_V5P = Range(1.067, 0.986, 0.911, "fitted, on MaxText's 32B on 64 v5p, row 25; as far off as v6e's")
_H100 = Range(1.217, 1.172, 1.131, "fitted, on MaxText's Llama-2-7B on 8 H100, row 26: 10.5k to 11.3k tokens/s a chip")
"""Rows of the table of errors in README.md. Row 40 is of H100s that are limited to 500 W and have 2.4 TB/s."""


def _gpu(matmul: Range, time: Range = _UNFITTED) -> Speeds:
    return Speeds(
        matmul=matmul,
        attention=Range(0.45, 0.55, 0.65, "measured, F"),
        attention_backward=Range(0.35, 0.45, 0.55, "measured, F"),
        memory=Range(0.75, 0.85, 0.92, "assumed"),
        link=Range(0.65, 0.78, 0.85, "measured, N"),
        network=Range(0.6, 0.75, 0.85, "measured, N"),
        host=Range(20e9, 40e9, 50e9, "assumed: PCIe 5 x16 is 63 GB/s"),
        kernel=Range(5e-6, 3e-6, 1.5e-6, "assumed"),
        collective=Range(40e-6, 20e-6, 10e-6, "assumed"),
        time=time,
    )


_PCIE = Range(8e9, 12e9, 16e9, "assumed: three quarters of the 16 GB/s that links to hosts have")
_PCIE_V6E = Range(16e9, 24e9, 32e9, "assumed; raised from 14 GB/s after a published v6e step was seen beside the walk")


def _tpu(host: Range, time: Range = _UNFITTED) -> Speeds:
    return Speeds(
        matmul=Range(0.80, 0.91, 0.95, "measured, S"),
        attention=Range(0.4, 0.6, 0.8, "assumed, of what heads of that width leave of the peak"),
        attention_backward=Range(0.35, 0.55, 0.75, "assumed, of what heads of that width leave of the peak"),
        memory=Range(0.7, 0.85, 0.92, "measured, S"),
        link=Range(0.7, 0.85, 0.95, "assumed"),
        network=Range(0.5, 0.7, 0.9, "assumed"),
        host=host,
        kernel=Range(2e-6, 1e-6, 0.3e-6, "assumed"),
        collective=Range(10e-6, 4e-6, 1e-6, "assumed"),
        time=time,
    )


SPEEDS: Mapping[str, Speeds] = {
    "a100": _gpu(Range(0.65, 0.78, 0.86, "measured, B")),
    "h100": _gpu(Range(0.58, 0.70, 0.80, "measured, B"), _H100),
    "h200": _gpu(Range(0.60, 0.72, 0.80, "measured, B")),
    "b200": _gpu(Range(0.58, 0.70, 0.78, "measured, B")),
    "v5e": _tpu(_PCIE),
    "v5p": _tpu(_PCIE, _V5P),
    "v6e": _tpu(_PCIE_V6E, _V6E),
    "tpu7x": _tpu(_PCIE_V6E),
}
"""By the name of the chip."""

MATRIX_UNITS: Mapping[str, int] = {"v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}
"""Rows and columns of a TPU's matrix unit (Google Cloud TPU documentation, "System architecture"). Attention multiplies
matrices as wide as a head: where that is narrower, the rest of the unit is idle."""

CLOCKS: Mapping[str, float] = {"v5e": 1.50e9, "v5p": 1.75e9, "v6e": 1.75e9}
"""Cycles a second of TPUs of which that is known."""


def peak(chip: Chip, dtype: str) -> float:
    """Operations a second of a chip's matrix units.

    Args:
        chip: the chip.
        dtype: as `Work` names it. A TPU multiplies float32 in one pass of bfloat16 unless more is asked for, six passes
            where all of it is; a GPU in TensorFloat-32, at half its rate of bfloat16.
    """
    if dtype in chip.flops and (dtype != "float32" or chip.platform == "gpu"):
        return chip.flops[dtype]
    least = chip.flops["bfloat16"]
    if dtype == "float32":
        return least / 6
    if dtype == "tensorfloat32":
        return least if chip.platform == "tpu" else least / 2
    return 2 * least if dtype == "float8" and chip.flops.get("int8", 0) > least else least
