"""The small parts of a decoder: projections, norms, activations, the MLP.

Parameters are float32; they are cast to the compute type where they are used. Shapes: E in, F out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_cli.models.decoder.config import DecoderConfig

Array = Any


def _quick_gelu(x: Array) -> Array:
    return x * jax.nn.sigmoid(1.702 * x)


def _squared_relu(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


_gelu_exact = partial(jax.nn.gelu, approximate=False)
_gelu_tanh = partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    **dict.fromkeys(("gelu", "gelu_python"), _gelu_exact),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), _gelu_tanh),
    **dict.fromkeys(("silu", "swish"), jax.nn.silu),
    "quick_gelu": _quick_gelu,
    "relu": jax.nn.relu,
    "relu2": _squared_relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "mish": jax.nn.mish,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "linear": lambda x: x,
}
"""Activations by their name in transformers."""

recomputed = partial(jax.checkpoint, prevent_cse=False)
"""Of an elementwise function: the backward pass computes it again, and only its arguments are kept for it.

What is computed again costs little; kept by a loop over layers, it would be written to memory and read from there.
"""


class Dense(nn.Module):  # type: ignore[misc]
    """A projection of the last dim, with a kernel [E, F].

    Attributes:
        features: F.
        bias: whether one is added.
        dtype: compute type.
        init_std: standard deviation of a fresh kernel.
    """

    features: int
    bias: bool
    dtype: Any
    init_std: float

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        """`x` [..., E] to [..., F]. Leading dims are one in the product: XLA on CPU copies activations otherwise."""
        kernel = self.param("kernel", nn.initializers.normal(self.init_std), (x.shape[-1], self.features))
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype) @ kernel.astype(self.dtype)
        if self.bias:
            flat = flat + self.param("bias", nn.initializers.zeros, (self.features,)).astype(self.dtype)
        return flat.reshape(*x.shape[:-1], self.features)


class Norm(nn.Module):  # type: ignore[misc]
    """A norm of the last dim, computed in float32.

    Attributes:
        config: names the kind.
        dtype: type of the result.
    """

    config: DecoderConfig
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        """`x` [..., E] to the same shape."""
        kind, width = self.config.norm, (x.shape[-1],)
        start = nn.initializers.zeros if kind == "rms_plus_one" else nn.initializers.ones
        scale = self.param("scale", start, width)
        bias = self.param("bias", nn.initializers.zeros, width) if kind == "layer" else None

        def normed(x: Array, scale: Array, bias: Array | None) -> Array:
            x = x.astype(jnp.float32)
            if bias is not None:
                x = x - x.mean(-1, keepdims=True)
            x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.config.norm_eps)
            x = x * (1 + scale if kind == "rms_plus_one" else scale)
            return (x if bias is None else x + bias).astype(self.dtype)

        result: Array = recomputed(normed)(x, scale, bias)
        return result


class Mlp(nn.Module):  # type: ignore[misc]
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))`.

    Attributes:
        config: the decoder's.
        width: between the projections.
        dtype: compute type.
    """

    config: DecoderConfig
    width: int
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        """`x` [..., E] to the same shape."""
        c = self.config
        act = ACTIVATIONS[c.activation]
        widen = partial(Dense, self.width, c.mlp_bias, self.dtype, c.initializer_range)
        if c.gated:
            gate, up = widen(name="gate")(x), widen(name="up")(x)
            inner = recomputed(lambda gate, up: act(gate) * up)(gate, up)
        else:
            inner = recomputed(act)(widen(name="up")(x))
        return Dense(x.shape[-1], c.mlp_bias, self.dtype, output_std(c), name="down")(inner)


def output_std(config: DecoderConfig) -> float:
    """Standard deviation of fresh kernels that write to the residual stream."""
    depth = 2 * config.layers if config.scaled_output_init else 1
    return config.initializer_range / math.sqrt(depth)
