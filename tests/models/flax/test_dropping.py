"""What is dropped at random in training: layers anew in every step, spans of sounds as SpecAugment draws them."""

from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from redco_cli.errors import ModelError
from redco_cli.models.flax.dropping import dropping, masked_spans, with_layer_drop
from tests.models.flax.tiny import CONFIGS, config_for


class Layer(nn.Module):
    """Adds one."""

    @nn.compact
    def __call__(self, hidden_states):
        return hidden_states + 1, None


class Layers(nn.Module):
    """Two hundred of them, by their numbers."""

    def setup(self):
        self.all = [Layer(name=str(number)) for number in range(200)]

    def __call__(self, hidden_states):
        for layer in self.all:
            hidden_states = layer(hidden_states)[0]
        return hidden_states


class Decoder(nn.Module):
    """As the classes name them."""

    def setup(self):
        self.layers = Layers()

    def __call__(self, hidden_states):
        return self.layers(hidden_states)


class Model(nn.Module):
    """As the classes name them."""

    def setup(self):
        self.decoder = Decoder()

    def __call__(self, hidden_states):
        return self.decoder(hidden_states)


def applied(rng, **rates):
    config = SimpleNamespace(sub_configs={}, **rates)
    with dropping(config, rng, "recipe.yaml:3: model.config"):
        return float(Model().apply({}, 0.0))


@pytest.mark.parametrize("name", ["layerdrop", "decoder_layerdrop"])
def test_layers_are_dropped_anew_for_every_key(name):
    found = {applied(jax.random.key(seed), **{name: 0.25}) for seed in range(3)}
    assert len(found) == 3
    assert all(120 < one < 180 for one in found)


def test_the_layers_of_the_other_side_stay():
    assert applied(jax.random.key(0), encoder_layerdrop=0.25) == 200


def test_a_key_is_asked_for():
    with pytest.raises(ModelError) as caught:
        applied(None, layerdrop=0.25)
    assert str(caught.value) == (
        "recipe.yaml:3: model.config: training this model needs a key for what is dropped\n"
        "  -> pass rng= to ctx.model, as loss_fn got it"
    )


def test_the_class_drops_no_layers_itself_and_the_config_keeps_what_it_says():
    encoder = CONFIGS["speech-encoder-decoder"]["encoder"] | {"layerdrop": 0.25}
    values = config_for("speech-encoder-decoder", "speech_to_sequence", encoder=encoder)
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    without = with_layer_drop(config)
    assert (config.encoder.layerdrop, without.encoder.layerdrop) == (0.25, 0)
    assert with_layer_drop(without, like=config).encoder.layerdrop == 0.25


def test_layers_that_shorten_a_sound_are_not_dropped():
    class FlaxWav2Vec2Module(nn.Module):
        config: Any

        def __call__(self, sounds):
            return sounds

    encoder = SimpleNamespace(add_adapter=True, layerdrop=0.1)
    with pytest.raises(ModelError) as caught, dropping(SimpleNamespace(sub_configs={}), None, "recipe.yaml:3: model"):
        FlaxWav2Vec2Module(encoder).apply({}, jnp.ones((1, 9)))
    assert str(caught.value) == (
        "recipe.yaml:3: model: layerdrop: 0.1 with add_adapter changes how long a sound is, from step to step\n"
        "  -> set layerdrop: 0 in the config of the encoder"
    )


def test_spans_are_within_the_sound_and_as_many_as_asked_for():
    lengths = jnp.array([200, 150, 5, 3])
    found = np.stack([masked_spans(jax.random.key(seed), lengths, 200, 0.5, 5, 2) for seed in range(20)])
    assert not any(found[:, row, length:].any() for row, length in enumerate(lengths))
    assert found[:, 2, :5].all()  # one span is all that fits
    assert not found[:, 3].any()
    begins = found[:, 0] & ~np.pad(found[:, 0], ((0, 0), (1, 0)))[:, :-1]
    assert found[:, 0].sum(1).max() <= 100
    assert (found[:, 0].sum(1) >= 5 * begins.sum(1)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("share", "span", "least"), [(0.05, 10, 2), (0.5, 5, 0), (0.02, 10, 0)])
def test_as_much_is_masked_as_in_pytorch(share, span, least):
    import torch
    from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices

    np.random.seed(0)
    lengths = np.array([200, 150, 60])
    mask = np.arange(200) < lengths[:, None]
    theirs = [
        _compute_mask_indices((3, 200), share, span, torch.from_numpy(mask).long(), least).sum(1) for _ in range(400)
    ]
    drawn = jax.jit(lambda key: masked_spans(key, jnp.asarray(lengths), 200, share, span, least).sum(1))
    ours = [np.asarray(drawn(jax.random.key(seed))) for seed in range(400)]
    np.testing.assert_allclose(np.mean(ours, 0), np.mean(theirs, 0), atol=4 * np.std(theirs, 0).max() / 20)
