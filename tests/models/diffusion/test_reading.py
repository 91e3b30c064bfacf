"""Configs of diffusers: what is followed, what is refused by its name, and how large the published models are."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from redco_cli.errors import ModelError
from redco_cli.models.diffusion.naming import entries
from redco_cli.models.diffusion.reading import read_component
from redco_cli.models.presets import preset
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection

SMALL = {
    "_class_name": "UNet2DConditionModel",
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 16,
}
AUTOENCODER = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}
"""That of Stable Diffusion 1.5 and 2.1."""
REFUSED = "is not computed here\n  -> choose another model"


def place(key):
    return f"r.yaml:3: model.config.{key}"


def refusal(**changed):
    with pytest.raises(ModelError) as caught:
        read_component({**SMALL, **changed}, place=place, inline=True)
    return str(caught.value)


def model_of(config):
    return resolve_model(ModelSection(config=dict(config)), where=lambda key: key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tensors", "parameters"),
    [
        (preset("stable-diffusion-1.5").config, 686, 859_520_964),
        (preset("stable-diffusion-2.1").config, 686, 865_910_724),
        (AUTOENCODER, 248, 83_653_863),
    ],
)
def test_published_models_have_so_many_tensors_and_parameters(config, tensors, parameters):
    model = model_of(config)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(model.abstract).items()}
    found = entries(model.config, shapes)
    assert len(found) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters
    assert sum(math.prod(entry.stored_shape) for entry in found) == parameters


def test_attention_head_dim_is_the_number_of_heads():
    read = read_component({**SMALL, "attention_head_dim": 8}, place=place, inline=True)
    assert read.heads == (8, 8)
    read = read_component({**SMALL, "attention_head_dim": [2, 4]}, place=place, inline=True)
    assert read.heads == (2, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("class_embed_type", "timestep"),
        ("addition_embed_type", "text_time"),
        ("resnet_time_scale_shift", "scale_shift"),
        ("transformer_layers_per_block", [1, 2]),
        ("only_cross_attention", True),
        ("dropout", 0.1),
        ("act_fn", "gelu"),
        ("mid_block_type", "UNetMidBlock2D"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(key, value):
    expected = f"r.yaml:3: model.config.{key}: UNet2DConditionModel with {key}: {value} {REFUSED}"
    assert refusal(**{key: value}) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"block_out_channel": [32]},
            "r.yaml:3: model.config.block_out_channel: UNet2DConditionModel has no such setting\n"
            "  -> did you mean block_out_channels?",
        ),
        (
            {"_class_name": "UNet3DConditionModel"},
            "r.yaml:3: model.config._class_name: 'UNet3DConditionModel' is no model of diffusers that is covered\n"
            "  -> choose UNet2DConditionModel or AutoencoderKL",
        ),
        (
            {"attention_head_dim": [3, 4]},
            "r.yaml:3: model.config.attention_head_dim: 32 channels and 3 heads: heads must divide channels\n"
            "  -> correct the config",
        ),
        (
            {"block_out_channels": [40, 64]},
            "r.yaml:3: model.config.block_out_channels: 40 channels cannot be cut into 32 groups (norm_num_groups)\n"
            "  -> take multiples of norm_num_groups",
        ),
        (
            {"layers_per_block": [1, 2]},
            "r.yaml:3: model.config.layers_per_block: [1, 2] given, but a number from 1 is expected\n"
            "  -> correct the config",
        ),
        (
            {"down_block_types": ["DownBlock2D"]},
            "r.yaml:3: model.config.down_block_types: ['DownBlock2D'] given, but a list of 2 is expected, one for each "
            "of block_out_channels\n  -> correct the config",
        ),
        (
            {"up_block_types": ["UpBlock2D", "AttnUpBlock2D"]},
            "r.yaml:3: model.config.up_block_types: UNet2DConditionModel with AttnUpBlock2D is not computed here\n"
            "  -> it may have: CrossAttnUpBlock2D, UpBlock2D",
        ),
    ],
)
def test_configs_that_make_no_sense(changed, message):
    assert refusal(**changed) == message


def test_settings_of_a_published_config_that_nobody_knows_are_a_warning(capsys):
    read = read_component({**SMALL, "sized": 3, "sample_size": None}, place=place, inline=False)
    assert read.sample_size == 64
    warned = "r.yaml:3: model.config.sized: nothing reads these settings of UNet2DConditionModel: sized"
    assert warned in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "clip"}, "model.task: UNet2DConditionModel has no clip head\n  -> leave it out"),
        (
            {"implementation": "decoder"},
            "model.implementation: decoder has no UNet2DConditionModel\n  -> leave it out",
        ),
        (
            {"added_tokens": ("<one>",)},
            "model.added_tokens: UNet2DConditionModel reads no tokens\n  -> leave them out",
        ),
    ],
)
def test_what_a_u_net_has_not(changed, message):
    with pytest.raises(ModelError) as caught:
        resolve_model(ModelSection(config=SMALL, **changed), where=lambda key: key)
    assert str(caught.value) == message


def test_inputs_of_another_shape_are_refused_with_the_one_that_is_taken():
    model = model_of(SMALL)
    latents, states = np.zeros((2, 4, 4, 4)), np.zeros((2, 3, 16))
    for given, message in (
        ((latents[..., :3], np.zeros(2), states), "latents has shape [2, 4, 4, 3], but the U-Net takes"),
        ((latents, 5, states), "timestep has shape [], but the U-Net takes [B]"),
        ((latents, np.zeros(2), states[..., :8]), "states has shape [2, 3, 8], but the U-Net takes [B, L, 16]"),
    ):
        with pytest.raises(ModelError) as caught:
            jax.eval_shape(model, model.abstract, *map(jnp.asarray, given))
        assert message in str(caught.value)
