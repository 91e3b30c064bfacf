"""What a U-Net and an autoencoder are made of, as far as it differs from one Stable Diffusion to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """A `UNet2DConditionModel`. One entry of a tuple for each resolution, the finest first.

    Attributes:
        stored: the whole config as it was given, for export.
        sample_size: height and width of the latents it was trained for.
        in_channels: of the latents.
        out_channels: of what it predicts.
        block_out_channels: channels.
        attends_down: whether the way down attends to the prompt there.
        attends_up: likewise on the way up.
        heads: of attention.
        layers_per_block: residual blocks on the way down; one more on the way up.
        cross_attention_dim: size of the text encoder's hidden states.
        use_linear_projection: whether the projections around attention are stored as matrices, not as convolutions.
        norm_num_groups: of group norms.
        norm_eps: of group norms, but for those before attention.
        flip_sin_to_cos: whether cosines come first in the embedding of a time.
        freq_shift: subtracted from the number of frequencies there.
    """

    model_type: ClassVar[str] = "UNet2DConditionModel"

    stored: Mapping[str, Any] = field(repr=False, compare=False)
    sample_size: int
    in_channels: int
    out_channels: int
    block_out_channels: tuple[int, ...]
    attends_down: tuple[bool, ...]
    attends_up: tuple[bool, ...]
    heads: tuple[int, ...]
    layers_per_block: int
    cross_attention_dim: int
    use_linear_projection: bool
    norm_num_groups: int
    norm_eps: float
    flip_sin_to_cos: bool
    freq_shift: float


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """An `AutoencoderKL`.

    Attributes:
        stored: the whole config as it was given, for export.
        sample_size: height and width of the images it was trained for.
        in_channels: of the images that are encoded.
        out_channels: of those that are decoded.
        latent_channels: of the latents.
        block_out_channels: channels at each resolution, the finest first; each next one has half the height and width.
        layers_per_block: residual blocks at each resolution of the encoder; the decoder has one more.
        norm_num_groups: of group norms.
        scaling_factor: multiplies latents to give them unit variance; for a plugin to do.
    """

    model_type: ClassVar[str] = "AutoencoderKL"

    stored: Mapping[str, Any] = field(repr=False, compare=False)
    sample_size: int
    in_channels: int
    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    norm_num_groups: int
    scaling_factor: float

    @property
    def reduction(self) -> int:
        """How many pixels of an image stand behind one of its latents, in height and width."""
        return int(2 ** (len(self.block_out_channels) - 1))


ComponentConfig = UNetConfig | AutoencoderConfig
