"""What each device sends in a collective, which goes round a ring of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping

from redco_cli.sharding.plan import Collective


def ring_bytes(kind: str, result: int, devices: int) -> int:
    """What each of some devices sends so that all have the result of a collective, in a ring.

    See "Bandwidth optimal all-reduce algorithms for clusters of workstations" (Patarasuk and Yuan, 2009).

    Args:
        kind: such as `all-gather`.
        result: bytes of it, on one device.
        devices: that take part.

    Example:
        >>> [ring_bytes(kind, 800, 8) for kind in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute")]
        [700, 1400, 5600, 800]
    """
    if kind == "reduce-scatter":
        return result * (devices - 1)
    if kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
        return result * (devices - 1) // devices
    return 2 * result * (devices - 1) // devices if kind == "all-reduce" else result


def sent_bytes(one: Collective, mesh: Mapping[str, int]) -> int:
    """What each device sends in a step for one kind of collective.

    Args:
        one: with the bytes of its results.
        mesh: axis to size.

    Example:
        >>> sent_bytes(Collective("all-reduce", "data+fsdp", "gradients", 3, 800), {"data": 2, "fsdp": 4, "tensor": 1})
        1400
    """
    over = one.axis.split("+") if one.axis else mesh
    return ring_bytes(one.kind, one.bytes, one.devices or math.prod(mesh[axis] for axis in over))
