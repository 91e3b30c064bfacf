"""The U-Net of Stable Diffusion (`UNet2DConditionModel`): what is noise in latents, at a time and for a prompt.

Shapes: B batch, Y height and X width of the latents, C channels, L tokens of a prompt, D size of their states.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp

from redco_cli.models.diffusion.blocks import (
    Array,
    Downsample,
    ImageTransformer,
    Residual,
    Upsample,
    conv3x3,
    group_norm,
)
from redco_cli.models.diffusion.config import UNetConfig

Remat = Literal["none", "full"]

_LONGEST_PERIOD = 10_000


class UNet(nn.Module):  # type: ignore[misc]
    """Down through the resolutions, and up again beside what was seen on the way.

    Attributes:
        config: which parts it has.
        dtype: compute type.
        remat: `full` keeps only what residual blocks and transformers take, and recomputes the rest.
    """

    config: UNetConfig
    dtype: Any
    remat: Remat = "none"

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, latents: Array, timestep: Array, states: Array) -> Array:
        """Latents [B, Y, X, C], times [B] and states [B, L, D] to what is predicted [B, Y, X, out], float32."""
        c = self.config
        time = _Time(c, self.dtype, name="time_embedding")(timestep)
        states = states.astype(self.dtype)
        part: Any = partial(dict, config=c, dtype=self.dtype, remat=self.remat)
        x = conv3x3(c.block_out_channels[0], dtype=self.dtype, name="conv_in")(latents.astype(self.dtype))
        passed, levels = [x], range(len(c.block_out_channels))
        for level in levels:
            x, made = _Down(**part(level=level, name=f"down_blocks_{level}"))(x, time, states)
            passed += made
        x = _Middle(**part(name="mid_block"))(x, time, states)
        for index, level in enumerate(reversed(levels)):
            passed, beside = passed[: -c.layers_per_block - 1], passed[-c.layers_per_block - 1 :]
            like = passed[-1] if passed else None
            x = _Up(**part(level=level, name=f"up_blocks_{index}"))(x, beside[::-1], time, states, like)
        x = nn.silu(group_norm(c.norm_num_groups, c.norm_eps, self.dtype, "conv_norm_out")(x))
        return conv3x3(c.out_channels, dtype=self.dtype, name="conv_out")(x).astype(jnp.float32)


class _Time(nn.Module):  # type: ignore[misc]
    """The embedding of a time: sines and cosines of many frequencies, and two matrices."""

    config: UNetConfig
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, timestep: Array) -> Array:
        """Times [B] to [B, 4 C], C channels of the finest resolution."""
        c, width = self.config, self.config.block_out_channels[0]
        powers = -math.log(_LONGEST_PERIOD) * jnp.arange(width // 2, dtype=jnp.float32) / (width // 2 - c.freq_shift)
        angles = timestep.astype(jnp.float32)[:, None] * jnp.exp(powers)
        waves = [jnp.cos(angles), jnp.sin(angles)] if c.flip_sin_to_cos else [jnp.sin(angles), jnp.cos(angles)]
        embedded = jnp.concatenate(waves, axis=-1).astype(self.dtype)
        embedded = nn.silu(nn.Dense(4 * width, dtype=self.dtype, name="linear_1")(embedded))
        return nn.Dense(4 * width, dtype=self.dtype, name="linear_2")(embedded)


class _Down(nn.Module):  # type: ignore[misc]
    """One resolution on the way down."""

    config: UNetConfig
    dtype: Any
    remat: Remat
    level: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array, time: Array, states: Array) -> tuple[Array, list[Array]]:
        """`x` [B, Y, X, C] at the next resolution, and all that was made on the way to it."""
        c = self.config
        made: list[Array] = []
        for index in range(c.layers_per_block):
            x = _residual(self, self.level, index)(x, time)
            if c.attends_down[self.level]:
                x = _transformer(self, self.level, index)(x, states)
            made.append(x)
        if self.level < len(c.heads) - 1:
            x = Downsample((1, 1), self.dtype, name="downsamplers_0")(x)
            made.append(x)
        return x, made


class _Middle(nn.Module):  # type: ignore[misc]
    """The coarsest resolution, between the ways."""

    config: UNetConfig
    dtype: Any
    remat: Remat

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array, time: Array, states: Array) -> Array:
        """`x` [B, Y, X, C] to the same shape."""
        x = _residual(self, -1, 0)(x, time)
        x = _transformer(self, -1, 0)(x, states)
        return _residual(self, -1, 1)(x, time)


class _Up(nn.Module):  # type: ignore[misc]
    """One resolution on the way up."""

    config: UNetConfig
    dtype: Any
    remat: Remat
    level: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array, beside: list[Array], time: Array, states: Array, like: Array | None) -> Array:
        """`x` [B, Y, X, C] at the next resolution, that of `like`; `beside` is what the way down made here."""
        c = self.config
        for index in range(c.layers_per_block + 1):
            x = _residual(self, self.level, index)(jnp.concatenate([x, beside[index]], axis=-1), time)
            if c.attends_up[self.level]:
                x = _transformer(self, self.level, index)(x, states)
        return Upsample(self.dtype, name="upsamplers_0")(x, like) if self.level else x


def _residual(part: Any, level: int, index: int) -> nn.Module:
    """A residual block of one of the modules above."""
    made, c = nn.remat(Residual) if part.remat == "full" else Residual, part.config
    return made(c.block_out_channels[level], c.norm_num_groups, c.norm_eps, part.dtype, name=f"resnets_{index}")


def _transformer(part: Any, level: int, index: int) -> nn.Module:
    """A transformer of one of the modules above."""
    made, c = nn.remat(ImageTransformer) if part.remat == "full" else ImageTransformer, part.config
    return made(c.heads[level], c.norm_num_groups, part.dtype, name=f"attentions_{index}")
