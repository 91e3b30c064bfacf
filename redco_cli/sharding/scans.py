"""What the parameters of a `scan` say, in every version of JAX."""

from __future__ import annotations

from typing import Any


def scan_counts(params: Any) -> tuple[int, int]:
    """How many operands of a `scan` are its constants, and how many its carry; the others it goes through in slices.

    JAX from 0.11 tells them by the trees of its operands, before by their numbers.
    """
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)
