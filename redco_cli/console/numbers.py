"""Numbers as people read them."""

from __future__ import annotations

import math


def readable(value: object) -> str:
    """A value in a table: four digits of a float, `yes` or `no`, nothing for None, anything else as text.

    >>> readable(1.2345), readable(0.00012345), readable(120), readable(None)
    ('1.234', '0.0001234', '120', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:#.4g}".rstrip(".") if math.isfinite(value) else str(value)
    return str(value)


def compact(value: float) -> str:
    """Three digits and a suffix.

    >>> compact(48.1), compact(12_345), compact(999_700)
    ('48.1', '12.3k', '1M')
    """
    for suffix in ("", "k", "M", "G"):
        if not abs(value) >= 999.5:  # so that nan needs no suffix
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g}T"


def duration(seconds: float) -> str:
    """A time span in its two largest units.

    >>> duration(1.25), duration(45), duration(200), duration(7_500), duration(100_000)
    ('1.2s', '45s', '3m20s', '2h05m', '1d03h')
    """
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"


def format_bytes(count: float) -> str:
    """An amount of memory with three digits.

    >>> format_bytes(0), format_bytes(1023), format_bytes(1_643_000_000), format_bytes(2**35), format_bytes(2**20 - 1)
    ('0 B', '1023 B', '1.53 GiB', '32 GiB', '1 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(count) >= 1023.5 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} {units[0]}" if abs(count) >= 100 else f"{count:.3g} {units[0]}"
