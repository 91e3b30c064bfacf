"""Our attention kernels on the GPU that is there: their errors, and their speed beside cuDNN's.

    python tests/bench/gpu/attention.py [--dtype float16] [--errors]

Errors are relative, of results and gradients in 16 bits beside the formula in float32: bfloat16 itself rounds by up
to 4e-3, float16 by up to 5e-4. Times are medians of 8 calls; FLOPs are those of a causal mask, of packed rows too,
whose texts meet less. A GPU needs minutes, most of them for compiling.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[3]))

from redco_cli.models.kernels.flash.attend import attend
from tests.models.kernels.test_flash import formula, packed

CASES = [
    # dims of a head, length, window, soft-cap, packed rows, sinks
    (64, 1000, None, None, True, False),
    (128, 1024, None, None, True, False),
    (128, 777, 150, 3.0, True, True),
    (256, 600, 130, None, True, True),
    (256, 512, None, 50.0, False, False),
    (80, 512, None, None, True, False),
    (96, 640, 130, 2.0, False, False),
    (8, 300, None, None, False, False),
    (128, 2048, 1, None, False, True),
]
TIMED = [(4, 4096, 32, 8, 64), (4, 4096, 32, 8, 128), (2, 8192, 32, 8, 128), (2, 4096, 16, 8, 256)]
"""Rows, length, heads, heads of keys, dims of a head."""
CALLS = 8


def main() -> None:
    """Prints the errors, then the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--errors", action="store_true", help="print these alone")
    arguments = parser.parse_args()
    dtype = jnp.dtype(arguments.dtype)
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {dtype}")
    for case in CASES:
        found = " ".join(f"{error:.1e}" for error in errors(*case, dtype))
        print(f"dims, length, window, cap, packed, sinks {case}: {found}", flush=True)
    for shape in () if arguments.errors else TIMED:
        for name, milliseconds, rate in times(*shape, dtype):
            print(
                f"rows, length, heads, keys, dims {shape}: {name} {milliseconds:.2f} ms, {rate:.0f} TFLOP/s", flush=True
            )


def errors(
    dims: int, length: int, window: int | None, softcap: float | None, is_packed: bool, has_sinks: bool, dtype: Any
) -> list[float]:
    """Of the result, and of the gradients of queries, keys, values and sinks."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    normal = partial(_normal, keys, dtype)
    q, k, v = normal(2, length, 8, dims) * dims**-0.5, normal(2, length, 2, dims), normal(2, length, 2, dims)
    weights = normal(2, length, 8, dims).astype(jnp.float32)
    segments, sinks = packed(length) if is_packed else None, normal(8).astype(jnp.float32) if has_sinks else None
    bias = normal(1, 8, length).astype(jnp.float32) if window else None

    def result(compute: Callable[..., jax.Array], wide: bool, *given: Any) -> jax.Array:
        arrays = [x.astype(jnp.float32) if wide else x for x in given[:3]]
        with jax.default_matmul_precision("highest"):
            return compute(*arrays, segments, given[3], bias, window=window, softcap=softcap)

    def loss(compute: Callable[..., jax.Array], wide: bool, *given: Any) -> jax.Array:
        return (result(compute, wide, *given).astype(jnp.float32) * weights).sum()

    found = []
    for compute, wide in ((attend, False), (formula, True)):
        gradients = jax.jit(jax.grad(partial(loss, compute, wide), (0, 1, 2, 3) if has_sinks else (0, 1, 2)))
        found.append([jax.jit(partial(result, compute, wide))(q, k, v, sinks), *gradients(q, k, v, sinks)])
    return [_relative(one, right) for one, right in zip(*found, strict=True)]


def times(rows: int, length: int, heads: int, of_keys: int, dims: int, dtype: Any) -> list[tuple[str, float, float]]:
    """What was computed, its milliseconds, and TFLOP/s: ours on whole and packed rows, and cuDNN's."""
    keys = iter(jax.random.split(jax.random.key(0), 3))
    q, k, v = (_normal(keys, dtype, rows, length, n, dims) for n in (heads, of_keys, of_keys))
    segments = jnp.zeros((rows, length), jnp.int32).at[:, length // 2 :].set(1)
    ours = partial(attend, sinks=None, bias=None, window=None, softcap=None)
    variants: dict[str, Callable[..., jax.Array]] = {
        "ours": partial(ours, segments=None),
        "ours, two texts a row": partial(ours, segments=segments),
        "cuDNN": partial(jax.nn.dot_product_attention, is_causal=True, scale=1.0, implementation="cudnn"),
    }
    flops, found = 2 * rows * heads * length**2 * dims, []
    for name, compute in variants.items():
        gradients = jax.grad(lambda *given, compute=compute: compute(*given).astype(jnp.float32).sum(), (0, 1, 2))
        for what, call, products in (("forward", compute, 1.0), ("and backward", gradients, 3.5)):
            seconds = _median(jax.jit(call), (q, k, v))
            found.append((f"{name}, {what}", seconds * 1e3, products * flops / seconds / 1e12))
    return found


def _normal(keys: Any, dtype: Any, *shape: int) -> jax.Array:
    return jax.random.normal(next(keys), shape, dtype)


def _relative(one: jax.Array, right: jax.Array) -> float:
    one, right = one.astype(jnp.float32), right.astype(jnp.float32)
    return float(jnp.linalg.norm((one - right).ravel()) / jnp.linalg.norm(right.ravel()))


def _median(call: Callable[..., Any], arrays: Sequence[jax.Array]) -> float:
    jax.block_until_ready(call(*arrays))
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
