"""The U-Net and the autoencoder against those of diffusers: outputs, and gradients of all parameters."""

import jax
import numpy as np
import pytest
import torch

from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from tests.models.diffusion.tiny import (
    AUTOENCODER,
    UNET,
    UNET_2,
    channels_first,
    channels_last,
    faults,
    images,
    latents,
    opened,
    redco_run,
    saved,
    torch_run,
    where,
)

THREE = {
    **UNET,
    "block_out_channels": [16, 32, 32],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": [2, 4, 8],
}


def predicted(torch_model, noisy, timestep, states):
    return torch_model(channels_first(noisy), torch.from_numpy(timestep), torch.from_numpy(states)).sample


@pytest.mark.slow
def test_the_u_net_predicts_what_that_of_diffusers_predicts(tmp_path):
    given = latents()
    torch_model = saved(UNET, tmp_path)
    with torch.no_grad():
        expected = channels_last(predicted(torch_model, *given))
    model, params = opened(tmp_path)
    found = jax.jit(model)(params, *given)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({**UNET, "layers_per_block": 2}, (8, 8)),
        (UNET_2, (8, 8)),
        (THREE, (8, 12)),
        (THREE, (10, 7)),  # the way up ends with a row or a column less than twice as many
        ({**UNET, "attention_head_dim": 2, "flip_sin_to_cos": False, "freq_shift": 1}, (8, 8)),
        ({**UNET, "norm_eps": 0.1, "act_fn": "swish"}, (8, 8)),
        ({**UNET, "in_channels": 5, "out_channels": 3}, (8, 8)),
    ],
)
def test_outputs_and_gradients_of_a_u_net_are_those_of_diffusers(config, size, tmp_path):
    noisy, timestep, states = latents(*size)
    noisy = np.concatenate([noisy] * 2, axis=-1)[..., : config.get("in_channels", 4)]
    torch_model = saved(config, tmp_path)
    expected, gradients = torch_run(torch_model, predicted(torch_model, noisy, timestep, states))
    model, params = opened(tmp_path)
    found, ours = redco_run(model, params, lambda params: model(params, noisy, timestep, states))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert faults(gradients, ours) == []


@pytest.mark.slow
@pytest.mark.parametrize("config", [UNET, AUTOENCODER])
def test_recomputing_changes_no_gradient(config, tmp_path):
    saved(config, tmp_path)
    given = latents() if config is UNET else (images(),)
    model, params = opened(tmp_path)
    again = resolve_model(ModelSection(name=str(tmp_path)), where=where, remat="full")
    (_, kept), (_, recomputed) = (
        redco_run(one, params, lambda params, one=one: one(params, *given)) for one in (model, again)
    )
    assert again.module.remat == "full"
    assert faults(kept, recomputed) == []


def test_the_autoencoder_encodes_and_decodes_what_that_of_diffusers_does(tmp_path):
    torch_model, given = saved(AUTOENCODER, tmp_path), images()
    with torch.no_grad():
        distribution = torch_model.encode(channels_first(given)).latent_dist
        decoded = channels_last(torch_model.decode(distribution.mean).sample)
    model, params = opened(tmp_path)

    def both(params, given):
        mean, log_variance = model.encode(params, given)
        return mean, log_variance, model.decode(params, mean)

    for found, expected in zip(
        jax.jit(both)(params, given),
        (channels_last(distribution.mean), channels_last(distribution.logvar), decoded),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_gradients_of_the_autoencoder_are_those_of_diffusers(tmp_path):
    """Through images that are encoded and decoded by the means of their latents."""
    torch_model, given = saved({**AUTOENCODER, "layers_per_block": 2}, tmp_path), images()
    mean = torch_model.encode(channels_first(given)).latent_dist.mode()
    expected, gradients = torch_run(torch_model, torch_model.decode(mean).sample)
    model, params = opened(tmp_path)
    found, ours = redco_run(model, params, lambda params: model(params, given))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert faults(gradients, ours) == []


@pytest.mark.slow
def test_log_variances_are_kept_within_bounds(tmp_path):
    torch_model = saved(AUTOENCODER, tmp_path / "before")
    with torch.no_grad():
        torch_model.quant_conv.bias[4:] = torch.tensor([100.0, -100.0, 0.0, 0.0])
    torch_model.save_pretrained(tmp_path)
    model, params = opened(tmp_path)
    log_variance = np.asarray(jax.jit(model.encode)(params, images())[1])
    assert (log_variance[..., 0] == 20).all()
    assert (log_variance[..., 1] == -30).all()
