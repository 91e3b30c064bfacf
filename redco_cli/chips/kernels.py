"""What JAX asks the local device before it takes a kernel, answered for the devices that a program is for.

`jax.nn.dot_product_attention` looks for cuDNN and for the GPU of this process while it is traced, although what it
makes is compiled for other devices (jax/_src/cudnn/fused_attention_stablehlo.py, JAX 0.10.2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from redco_cli.chips.table import Multiprocessors

CUDNN = (9, 10)
"""The version that programs for GPUs are compiled for: which attention is fused depends on it."""


@contextlib.contextmanager
def cudnn_of(cores: Multiprocessors) -> Iterator[None]:
    """Within it, JAX takes the kernels of cuDNN for such a GPU to be at hand."""
    from jax._src.cudnn import fused_attention_stablehlo as asking

    version = CUDNN[0] * 10_000 + CUDNN[1] * 100

    def parsed(capability: str) -> tuple[int, ...]:
        return tuple(int(part) for part in capability.split("."))

    with (
        mock.patch.object(asking, "check_cudnn_version", return_value=version),
        mock.patch.object(asking, "check_compute_capability", lambda least: cores.capability >= parsed(least)),
        mock.patch.object(asking, "is_cuda_compute_capability_equal", lambda one: cores.capability == parsed(one)),
    ):
        yield
