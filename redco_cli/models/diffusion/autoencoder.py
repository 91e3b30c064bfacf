"""The autoencoder of Stable Diffusion (`AutoencoderKL`): images to the distribution of their latents, and back.

Shapes: B batch, Y height and X width, C channels.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from redco_cli.models.diffusion.blocks import (
    Array,
    Downsample,
    ImageAttention,
    Residual,
    Upsample,
    conv3x3,
    group_norm,
)
from redco_cli.models.diffusion.config import AutoencoderConfig

_EPS = 1e-6
_LOG_VARIANCES = (-30.0, 20.0)
"""Between which those of latents are kept."""


class Autoencoder(nn.Module):  # type: ignore[misc]
    """Encoder and decoder, with a matrix behind the one and before the other.

    Attributes:
        config: which parts they have.
        dtype: compute type.
        remat: `full` keeps only what residual blocks take, and recomputes the rest.
    """

    config: AutoencoderConfig
    dtype: Any
    remat: str = "none"

    def setup(self) -> None:
        """Both halves, and the matrices at the latents."""
        c, part = self.config, (self.config, self.dtype, self.remat)
        self.encoder, self.decoder = _Encoder(*part), _Decoder(*part)
        self.quant_conv = nn.Dense(2 * c.latent_channels, dtype=self.dtype)
        self.post_quant_conv = nn.Dense(c.latent_channels, dtype=self.dtype)

    def encode(self, images: Array) -> tuple[Array, Array]:
        """Images [B, Y, X, C] to mean and logarithm of the variance of their latents, float32."""
        moments = self.quant_conv(self.encoder(images.astype(self.dtype))).astype(jnp.float32)
        mean, log_variance = jnp.split(moments, 2, axis=-1)
        return mean, log_variance.clip(*_LOG_VARIANCES)

    def decode(self, latents: Array) -> Array:
        """Latents [B, Y, X, C] to images, float32."""
        return self.decoder(self.post_quant_conv(latents.astype(self.dtype))).astype(jnp.float32)

    def __call__(self, images: Array) -> Array:
        """Images by way of the means of their latents."""
        return self.decode(self.encode(images)[0])


class _Encoder(nn.Module):  # type: ignore[misc]
    config: AutoencoderConfig
    dtype: Any
    remat: str

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        c = self.config
        x = conv3x3(c.block_out_channels[0], dtype=self.dtype, name="conv_in")(x)
        last = len(c.block_out_channels) - 1
        for level, channels in enumerate(c.block_out_channels):
            way = "down" if level < last else None
            x = _Level(c, self.dtype, self.remat, channels, c.layers_per_block, way, name=f"down_blocks_{level}")(x)
        x = _Middle(c, self.dtype, self.remat, name="mid_block")(x)
        x = nn.silu(group_norm(c.norm_num_groups, _EPS, self.dtype, "conv_norm_out")(x))
        return conv3x3(2 * c.latent_channels, dtype=self.dtype, name="conv_out")(x)


class _Decoder(nn.Module):  # type: ignore[misc]
    config: AutoencoderConfig
    dtype: Any
    remat: str

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        c = self.config
        x = conv3x3(c.block_out_channels[-1], dtype=self.dtype, name="conv_in")(x)
        x = _Middle(c, self.dtype, self.remat, name="mid_block")(x)
        last = len(c.block_out_channels) - 1
        for index, channels in enumerate(reversed(c.block_out_channels)):
            way = "up" if index < last else None
            x = _Level(c, self.dtype, self.remat, channels, c.layers_per_block + 1, way, name=f"up_blocks_{index}")(x)
        x = nn.silu(group_norm(c.norm_num_groups, _EPS, self.dtype, "conv_norm_out")(x))
        return conv3x3(c.out_channels, dtype=self.dtype, name="conv_out")(x)


class _Level(nn.Module):  # type: ignore[misc]
    """The residual blocks of one resolution, and the way to the next one."""

    config: AutoencoderConfig
    dtype: Any
    remat: str
    channels: int
    count: int
    way: str | None

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        for index in range(self.count):
            x = _residual(self, self.channels, index)(x)
        if self.way == "down":
            return Downsample((0, 1), self.dtype, name="downsamplers_0")(x)
        return Upsample(self.dtype, name="upsamplers_0")(x) if self.way else x


class _Middle(nn.Module):  # type: ignore[misc]
    """The coarsest resolution, whose places look at each other."""

    config: AutoencoderConfig
    dtype: Any
    remat: str

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        x = _residual(self, x.shape[-1], 0)(x)
        x = ImageAttention(self.config.norm_num_groups, self.dtype, name="attentions_0")(x)
        return _residual(self, x.shape[-1], 1)(x)


def _residual(part: Any, channels: int, index: int) -> nn.Module:
    """A residual block of one of the modules above."""
    made = nn.remat(Residual) if part.remat == "full" else Residual
    return made(channels, part.config.norm_num_groups, _EPS, part.dtype, name=f"resnets_{index}")
