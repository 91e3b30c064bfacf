"""Which code computes the attention of a decoder."""

from __future__ import annotations

from typing import Literal

from redco_cli.chips.target import current_platform, widest_fused_head
from redco_cli.models.kernels.flash.blocks import WIDEST

Kernel = Literal["plain", "xla", "cudnn", "flash", "splash"]
"""`plain` is a formula, `flash` our kernels for GPUs, `splash` JAX's for TPUs; the others are what
`jax.nn.dot_product_attention` calls so. With `cudnn`, `flash` does what cuDNN's has no form or only a mask for."""


def best_kernel(head_dim: int, dtype: str) -> Kernel:
    """The best for the devices that programs are for: splash on TPUs; on NVIDIA GPUs, in 16 bits, cuDNN's or ours.

    Args:
        head_dim: dims of a head.
        dtype: compute type.
    """
    if current_platform() == "tpu":
        return "splash"
    if dtype not in ("bfloat16", "float16") or not widest_fused_head():
        return "plain"
    fits_cudnn = head_dim % 8 == 0 and head_dim <= widest_fused_head()
    return "cudnn" if fits_cudnn else "flash" if head_dim <= WIDEST else "plain"
