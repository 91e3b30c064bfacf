"""The program by which the rooms of `sharding` explain themselves: an MLP of two matmuls, its parameters abstract.

Shapes: B batch 32, D model width 64, F hidden width 256.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def loss_fn(params: dict[str, Array], batch: dict[str, Array]) -> Array:
    """The loss of x [B, D] through `up` [D, F] and `down` [F, D], a scalar."""
    hidden = jax.nn.gelu(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"]) ** 2)


params = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32), "down": jax.ShapeDtypeStruct((256, 64), jnp.float32)}
batch = {"x": jax.ShapeDtypeStruct((32, 64), jnp.float32)}
mesh = {"data": 1, "fsdp": 2, "tensor": 4}
