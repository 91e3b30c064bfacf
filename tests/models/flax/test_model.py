"""What the Flax classes have in common once they are behind the `Model` interface."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.errors import ModelError
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from tests.models.flax.tiny import config_for, inputs_for, where


def resolved(model_type, task, **changed):
    return resolve_model(
        ModelSection(config=config_for(model_type, task, **changed), task=task, implementation="hf_flax"), where=where
    )


@pytest.mark.parametrize(
    ("model_type", "task", "changed"),
    [
        pytest.param("opt", "causal_lm", {"dropout": 0.5, "num_hidden_layers": 1}, marks=pytest.mark.slow),
        ("bert", "masked_lm", {"hidden_dropout_prob": 0.5, "num_hidden_layers": 1}),
    ],
)
def test_dropout_follows_train_and_its_key(model_type, task, changed):
    model = resolved(model_type, task, **changed)
    params = jax.jit(model.init)(jax.random.key(0))
    inputs = inputs_for(model_type, task)

    @jax.jit
    def trained(params, key):
        return model(params, **inputs, rng=key, train=True)

    one, again, other = (np.asarray(trained(params, jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3
    assert "random_bits" in str(jax.make_jaxpr(trained)(params, jax.random.key(1)))
    still = jax.make_jaxpr(lambda params, key: model(params, **inputs, rng=key))(params, jax.random.key(1))
    assert "random_bits" not in str(still)
    with pytest.raises(ModelError) as caught:
        jax.eval_shape(lambda params: model(params, **inputs, train=True), params)
    assert str(caught.value) == (
        "recipe.yaml:3: model.config: training this model needs a key for dropout\n"
        "  -> pass rng= to ctx.model, as loss_fn got it"
    )


def test_running_averages_are_parameters_that_are_frozen_and_used_in_training():
    model = resolved("resnet", "image_classification")
    assert model.frozen == ("batch_stats/.*",)
    assert set(model.abstract) == {"params", "batch_stats"}
    inputs = inputs_for("resnet", "image_classification")
    programs = [
        jax.make_jaxpr(lambda params, train=train: model(params, **inputs, train=train))(model.abstract)
        for train in (True, False)
    ]
    assert str(programs[0]) == str(programs[1])


def test_the_sinusoids_of_whisper_are_frozen():
    model = resolved("whisper", "speech_to_sequence")
    assert model.frozen == ("model/encoder/embed_positions/.*",)
    assert "embed_positions" in model.abstract["model"]["encoder"]


def test_decoder_inputs_start_and_pad():
    labels = jnp.array([[5, 6, 2, -100], [7, 2, -100, -100]])
    model = resolved("bart", "seq2seq")
    np.testing.assert_array_equal(model.decoder_inputs(labels), [[2, 5, 6, 2], [2, 7, 2, 1]])
    language = jnp.array([[5, 2, 40, -100], [7, 8, 2, 41]])
    model = resolved("mbart", "seq2seq")
    np.testing.assert_array_equal(model.decoder_inputs(language), [[40, 5, 2, 40], [41, 7, 8, 2]])
    with pytest.raises(ModelError) as caught:
        resolved("t5", "seq2seq", decoder_start_token_id=None).decoder_inputs(labels)
    assert str(caught.value) == (
        "recipe.yaml:3: model.config: the config has no decoder_start_token_id\n"
        "  -> add decoder_start_token_id to the model's config"
    )


def test_half_precision_computes_over_float32_parameters():
    section = ModelSection(config=config_for("llama", "causal_lm"), dtype="bfloat16", implementation="hf_flax")
    model = resolve_model(section, where=where)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.abstract)} == {jnp.dtype("float32")}
    logits = jax.eval_shape(lambda params: model(params, jnp.ones((2, 4), int)), model.abstract)
    assert (logits.shape, logits.dtype) == ((2, 4, 64), jnp.bfloat16)


def test_heads_with_several_outputs_return_them():
    model = resolved("distilbert", "question_answering")
    outputs = jax.eval_shape(lambda params: model(params, jnp.ones((2, 4), int)), model.abstract)
    assert outputs.start_logits.shape == outputs.end_logits.shape == (2, 4)


@pytest.mark.parametrize(
    ("model_type", "task", "inputs", "message"),
    [
        (
            "llama",
            "causal_lm",
            {"input_ids": (2, 41)},
            "input_ids has 41 tokens, but the model has positions for 40 (max_position_embeddings)\n"
            "  -> make sequences shorter: data.max_length, predict.generation.max_new_tokens",
        ),
        (
            "roberta",
            "masked_lm",
            {"input_ids": (2, 39)},
            "input_ids has 39 tokens, but the model has positions for 38 (max_position_embeddings)\n"
            "  -> make sequences shorter: data.max_length, predict.generation.max_new_tokens",
        ),
        (
            "whisper",
            "speech_to_sequence",
            {"input_features": (2, 8, 20), "decoder_input_ids": (2, 21)},
            "decoder_input_ids has 21 tokens, but the model has positions for 20 (max_target_positions)\n"
            "  -> make sequences shorter: data.max_length, predict.generation.max_new_tokens",
        ),
        (
            "vit",
            "image_classification",
            {"pixel_values": (2, 3, 32, 32)},
            "pixel_values have shape [2, 3, 32, 32], but the model takes [B, 3, 16, 16]\n"
            "  -> resize the images, or set image_size in the model's config",
        ),
        (
            "t5",
            "seq2seq",
            {"input_ids": (2, 8)},
            "FlaxT5ForConditionalGeneration needs decoder_input_ids\n"
            "  -> make them with ctx.model.decoder_inputs(labels)",
        ),
        (
            "llama",
            "causal_lm",
            {"input_ids": (2, 8), "labels": (2, 8)},
            "FlaxLlamaForCausalLM takes no input labels\n  -> its inputs are: input_ids, attention_mask, position_ids",
        ),
        (
            "llama",
            "causal_lm",
            {},
            "FlaxLlamaForCausalLM needs input_ids\n  -> its inputs are: input_ids, attention_mask, position_ids",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(model_type, task, inputs, message):
    model = resolved(model_type, task)
    arrays = {name: np.ones(shape, np.float32 if len(shape) > 2 else np.int32) for name, shape in inputs.items()}
    with pytest.raises(ModelError) as caught:
        jax.eval_shape(lambda params: model(params, **arrays), model.abstract)
    assert str(caught.value) == f"recipe.yaml:3: model.config: {message}"
