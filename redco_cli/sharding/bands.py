"""Which part of its scores attention computes that leaves out what no token sees."""

from __future__ import annotations

import re


def window_share(blocks: int, window: int) -> float:
    """Which share of blocks x blocks lies in a band below the diagonal, so many blocks wide.

    >>> window_share(4, 4), window_share(4, 2)
    (0.625, 0.4375)
    """
    return (blocks * window - window * (window - 1) / 2) / blocks**2


def causal_share(length: int, window: int | None) -> float:
    """Which share of the scores of so many tokens a kernel computes that leaves out what is later, or out of a window.

    >>> causal_share(1024, None), causal_share(1024, 128)
    (0.5, 0.125)
    """
    return min(0.5, window / length) if window else 0.5


def flash_share(kernel: str, length: int) -> float | None:
    """Which share of the scores of so many tokens a kernel of flash attention computes, by its name; None for others.

    Texts that share a row leave out more, which no name says.

    >>> flash_share("flash_forward", 1024), flash_share("flash_backward_dq_window_128", 1024), flash_share("gemm", 1024)
    (0.5, 0.125, None)
    """
    named = re.match(r"flash_(?:forward|backward_dkv|backward_dq)(?:_window_(\d+))?$", kernel)
    if named is None:
        return None
    return causal_share(length, int(named[1]) if named[1] else None)
