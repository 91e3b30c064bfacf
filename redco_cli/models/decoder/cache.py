"""Keys and values of earlier tokens, from which generation goes on.

Shapes: B batch, Q queries, K keys, G key and value heads, D dims of a head, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.models.decoder.config import DecoderConfig

Array = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of earlier tokens.

    Attributes:
        keys: [B, G, K, D] per layer, stacked over layers outside of them.
        values: likewise.
        length: how many of K are filled: where the next token goes.
    """

    keys: Array
    values: Array
    length: Array

    @property
    def capacity(self) -> int:
        """K. Where it is 0, queries see each other only."""
        return int(self.keys.shape[-2])


def empty_cache(config: DecoderConfig, batch: int, length: int, dtype: Any) -> KVCache:
    """A cache for `length` tokens in each of `batch` rows."""
    shape = (config.layers, batch, config.kv_heads, length, config.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))


def extended(cache: KVCache, new: KVCache) -> KVCache:
    """The cache with the next tokens in it.

    Args:
        cache: stacked over layers, with room for them.
        new: their keys and values [L, B, G, Q, D].
    """
    start = (0, 0, 0, cache.length, 0)
    keys = jax.lax.dynamic_update_slice(cache.keys, new.keys.astype(cache.keys.dtype), start)
    values = jax.lax.dynamic_update_slice(cache.values, new.values.astype(cache.values.dtype), start)
    return KVCache(keys, values, cache.length + new.capacity)
