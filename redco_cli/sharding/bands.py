"""Which part of its scores attention computes that leaves out what no token sees."""

from __future__ import annotations


def window_share(blocks: int, window: int) -> float:
    """Which share of blocks x blocks lies in a band below the diagonal, so many blocks wide.

    >>> window_share(4, 4), window_share(4, 2)
    (0.625, 0.4375)
    """
    return (blocks * window - window * (window - 1) / 2) / blocks**2
