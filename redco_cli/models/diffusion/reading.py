"""Reads diffusers' `config.json` of a U-Net or an autoencoder; what is not computed here is refused by name.

The keys are those of `UNet2DConditionModel` and `AutoencoderKL` in diffusers 0.39. `attention_head_dim` of a U-Net is
the number of heads, not their size: diffusers named it wrongly once, and the checkpoints kept it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from redco_cli.console import warn
from redco_cli.errors import ModelError
from redco_cli.models.diffusion.config import AutoencoderConfig, ComponentConfig, UNetConfig
from redco_cli.recipe.explain import did_you_mean

CLASS_NAME = "_class_name"
"""The key of a `config.json` by which diffusers knows its classes; configs of transformers have none."""

_UNET_USUAL: Mapping[str, Any] = {
    "act_fn": "silu",
    "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280],
    "cross_attention_dim": 1280,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": 4,
    "layers_per_block": 2,
    "norm_eps": 1e-5,
    "norm_num_groups": 32,
    "out_channels": 4,
    "sample_size": 64,
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "use_linear_projection": False,
}
"""Settings of a U-Net that are followed, with what diffusers takes where they are missing."""
_UNET_FIXED: Mapping[str, Any] = {
    "addition_embed_type": None,
    "addition_time_embed_dim": None,
    "attention_type": "default",
    "center_input_sample": False,
    "class_embed_type": None,
    "class_embeddings_concat": False,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "cross_attention_norm": None,
    "downsample_padding": 1,
    "dropout": 0.0,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "mid_block_only_cross_attention": None,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "num_attention_heads": None,
    "num_class_embeds": None,
    "only_cross_attention": False,
    "projection_class_embeddings_input_dim": None,
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "resnet_time_scale_shift": "default",
    "reverse_transformer_layers_per_block": None,
    "time_cond_proj_dim": None,
    "time_embedding_act_fn": None,
    "time_embedding_dim": None,
    "time_embedding_type": "positional",
    "timestep_post_act": None,
    "transformer_layers_per_block": 1,
}
"""Settings of a U-Net that change its numbers, with the only value that is computed here."""
_AUTOENCODER_USUAL: Mapping[str, Any] = {
    "act_fn": "silu",
    "block_out_channels": [64],
    "down_block_types": ["DownEncoderBlock2D"],
    "in_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 32,
    "out_channels": 3,
    "sample_size": 32,
    "scaling_factor": 0.18215,
    "up_block_types": ["UpDecoderBlock2D"],
}
_AUTOENCODER_FIXED: Mapping[str, Any] = {
    "latents_mean": None,
    "latents_std": None,
    "mid_block_add_attention": True,
    "shift_factor": None,
    "use_post_quant_conv": True,
    "use_quant_conv": True,
}
_IMMATERIAL = frozenset({"addition_embed_type_num_heads", "force_upcast", "upcast_attention"})
"""Of parts that are refused, and of precision: shares of attention are always reckoned in float32 here."""
_ACTIVATIONS = ("silu", "swish")
_BLOCKS = {"CrossAttnDownBlock2D": True, "DownBlock2D": False, "CrossAttnUpBlock2D": True, "UpBlock2D": False}
"""Kinds of blocks of a U-Net to whether they attend to the prompt."""


def read_component(given: Mapping[str, Any], *, place: Callable[[str], str], inline: bool) -> ComponentConfig:
    """What a config of diffusers describes.

    Args:
        given: it; `_class_name` says of which class.
        place: a setting's name to its place, for errors.
        inline: written by hand: a setting that nobody knows is refused, where in a published config it is a warning.

    Raises:
        ModelError: another class, a setting that makes no sense, or one that is not computed here.
    """
    name = given[CLASS_NAME]
    if name == UNetConfig.model_type:
        return _read_unet(_settings(given, _UNET_USUAL, _UNET_FIXED, place, inline))
    if name == AutoencoderConfig.model_type:
        return _read_autoencoder(_settings(given, _AUTOENCODER_USUAL, _AUTOENCODER_FIXED, place, inline))
    problem = f"{name!r} is no model of diffusers that is covered"
    raise ModelError(place(CLASS_NAME), problem, f"choose {UNetConfig.model_type} or {AutoencoderConfig.model_type}")


def _settings(
    given: Mapping[str, Any],
    usual: Mapping[str, Any],
    fixed: Mapping[str, Any],
    place: Callable[[str], str],
    inline: bool,
) -> _Settings:
    """The settings that are followed, once the others are known to change nothing."""
    settings = _Settings(str(given[CLASS_NAME]), given, usual, place)
    known = {*usual, *fixed, *_IMMATERIAL}
    unknown = sorted(key for key in given if key not in known and not key.startswith("_"))
    if unknown and inline:
        settings.refuse(unknown[0], f"{settings.name} has no such setting", did_you_mean(unknown[0], sorted(known)))
    if unknown:
        warn(f"{place(unknown[0])}: nothing reads these settings of {settings.name}: {', '.join(unknown)}")
    others = [key for key, value in fixed.items() if given.get(key, value) != value]
    others += ["act_fn"] if settings["act_fn"] not in _ACTIVATIONS else []
    for key in others:
        settings.refuse(key, f"{settings.name} with {key}: {given[key]} is not computed here", "choose another model")
    return settings


@dataclass(frozen=True)
class _Settings:
    """The settings of a config, each proved when it is read.

    Attributes:
        name: of the class.
        given: the config.
        usual: settings that are followed, as diffusers takes them where they are missing.
        place: a setting's name to its place.
    """

    name: str
    given: Mapping[str, Any]
    usual: Mapping[str, Any]
    place: Callable[[str], str]

    def __getitem__(self, key: str) -> Any:
        return self.given.get(key, self.usual[key])

    def refuse(self, key: str, problem: str, remedy: str) -> NoReturn:
        """Raises an error about a setting."""
        raise ModelError(self.place(key), problem, remedy)

    def whole(self, key: str) -> int:
        """A number of something."""
        value = self[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, f"{value!r} given, but a number from 1 is expected", "correct the config")
        return int(value)

    def number(self, key: str) -> float:
        """A fraction, or 0."""
        value = self[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(key, f"{value!r} given, but a number is expected", "correct the config")
        return float(value)

    def switch(self, key: str) -> bool:
        """True or false."""
        if not isinstance(self[key], bool):
            self.refuse(key, f"{self[key]!r} given, but true or false is expected", "correct the config")
        return bool(self[key])

    def side(self) -> int:
        """Height and width, which are equal."""
        value = self["sample_size"]
        return int(self.usual["sample_size"]) if value is None else self.whole("sample_size")

    def wholes(self, key: str, count: int | None = None) -> tuple[int, ...]:
        """A number for each resolution; where `count` is given, one may stand for all."""
        value = self[key]
        listed = [value] * count if count is not None and not isinstance(value, list | tuple) else value
        fits = isinstance(listed, list | tuple) and listed and len(listed) == (count or len(listed))
        if not fits or any(not isinstance(one, int) or isinstance(one, bool) or one < 1 for one in listed):
            wanted = "a list of numbers from 1" + (f", one for each of {count} resolutions" if count else "")
            self.refuse(key, f"{value!r} given, but {wanted} is expected", "correct the config")
        return tuple(listed)

    def kinds(self, key: str, known: Collection[str], count: int) -> tuple[str, ...]:
        """The kind of block at each resolution."""
        value = self[key]
        if not isinstance(value, list | tuple) or len(value) != count:
            problem = f"{value!r} given, but a list of {count} is expected, one for each of block_out_channels"
            self.refuse(key, problem, "correct the config")
        for one in value:
            if one not in known:
                self.refuse(key, f"{self.name} with {one} is not computed here", f"it may have: {', '.join(known)}")
        return tuple(value)

    def groups(self, channels: tuple[int, ...]) -> int:
        """Of group norms, which must divide channels."""
        groups = self.whole("norm_num_groups")
        wrong = [one for one in channels if one % groups]
        if wrong:
            problem = f"{wrong[0]} channels cannot be cut into {groups} groups (norm_num_groups)"
            self.refuse("block_out_channels", problem, "take multiples of norm_num_groups")
        return groups


def _read_unet(settings: _Settings) -> UNetConfig:
    channels = settings.wholes("block_out_channels")
    down = settings.kinds("down_block_types", [one for one in _BLOCKS if "Down" in one], len(channels))
    up = settings.kinds("up_block_types", [one for one in _BLOCKS if "Up" in one], len(channels))
    heads = settings.wholes("attention_head_dim", len(channels))
    wrong = [
        f"{width} channels and {count} heads" for width, count in zip(channels, heads, strict=True) if width % count
    ]
    if wrong:
        settings.refuse("attention_head_dim", f"{wrong[0]}: heads must divide channels", "correct the config")
    return UNetConfig(
        stored=settings.given,
        sample_size=settings.side(),
        in_channels=settings.whole("in_channels"),
        out_channels=settings.whole("out_channels"),
        block_out_channels=channels,
        attends_down=tuple(_BLOCKS[one] for one in down),
        attends_up=tuple(_BLOCKS[one] for one in reversed(up)),
        heads=heads,
        layers_per_block=settings.whole("layers_per_block"),
        cross_attention_dim=settings.whole("cross_attention_dim"),
        use_linear_projection=settings.switch("use_linear_projection"),
        norm_num_groups=settings.groups(channels),
        norm_eps=settings.number("norm_eps"),
        flip_sin_to_cos=settings.switch("flip_sin_to_cos"),
        freq_shift=settings.number("freq_shift"),
    )


def _read_autoencoder(settings: _Settings) -> AutoencoderConfig:
    channels = settings.wholes("block_out_channels")
    settings.kinds("down_block_types", ["DownEncoderBlock2D"], len(channels))
    settings.kinds("up_block_types", ["UpDecoderBlock2D"], len(channels))
    return AutoencoderConfig(
        stored=settings.given,
        sample_size=settings.side(),
        in_channels=settings.whole("in_channels"),
        out_channels=settings.whole("out_channels"),
        latent_channels=settings.whole("latent_channels"),
        block_out_channels=channels,
        layers_per_block=settings.whole("layers_per_block"),
        norm_num_groups=settings.groups(channels),
        scaling_factor=settings.number("scaling_factor"),
    )
