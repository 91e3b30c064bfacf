"""Token ids, positions and masks that a model has no place for: errors where their values or shapes are known."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.encoding.collate import bound_collate
from redco_cli.errors import ExampleError, ModelError
from redco_cli.models.bounds import Rows, check_batch
from redco_cli.models.resolve import resolve_model
from redco_cli.plugin.contract import Context
from redco_cli.recipe.schema import ModelSection
from tests.models.flax.tiny import config_for, where

GOOD = np.full((2, 8), 5, np.int32)


def resolved(model_type, task, **changed):
    config = config_for(model_type, task, **changed)
    return resolve_model(ModelSection(config=config, task=task), where=where)


@pytest.fixture(scope="module")
def gpt2():
    return resolved("gpt2", "causal_lm", n_layer=1)


def message(caught):
    return str(caught.value).removeprefix("recipe.yaml:3: model.config: ")


def with_one(value, row=1, dtype=np.int32):
    array = GOOD.astype(dtype)
    array[row, 3] = value
    return array


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            {"input_ids": with_one(64)},
            "input_ids has the token 64, but the model has 64 (vocab_size)\n"
            "  -> take the tokenizer of the model, or add its tokens with model.added_tokens",
        ),
        (
            {"input_ids": with_one(-100)},
            "input_ids has the token -100, but the model has 64 (vocab_size)\n"
            "  -> -100 marks labels that carry no loss; fill inputs with the padding id",
        ),
        (
            {"input_ids": GOOD, "position_ids": with_one(40)},
            "position_ids has the position 40, but the model has 40 (max_position_embeddings)\n"
            "  -> make sequences shorter: data.max_length; positions begin at 0",
        ),
        (
            {"input_ids": GOOD, "attention_mask": GOOD[:, :7]},
            "attention_mask has shape [2, 7], but input_ids [2, 8]\n  -> give them the same shape",
        ),
    ],
)
def test_calls_are_checked_where_there_are_values(gpt2, inputs, text):
    with pytest.raises(ModelError) as caught:
        gpt2(gpt2.abstract, **inputs)
    assert message(caught) == text


def test_a_decoder_that_classifies_is_checked_and_its_classes_are_no_tokens():
    model = resolved("gpt2", "sequence_classification", n_layer=1, num_labels=100, pad_token_id=0)
    with pytest.raises(ModelError, match="input_ids has the token 64, but the model has 64"):
        model(model.abstract, with_one(64))
    with pytest.raises(ModelError, match="position_ids has the position 40, but the model has 40"):
        model(model.abstract, GOOD, position_ids=with_one(40))
    check_batch(model.rows, {"input_ids": GOOD, "labels": with_one(90)})


def test_prompts_are_checked(gpt2):
    with pytest.raises(ModelError, match="input_ids has the token 70, but the model has 64"):
        gpt2.generate(gpt2.abstract, with_one(70), eos_token_id=2)


def test_in_a_trace_shapes_are_checked_and_values_are_not(gpt2):
    shape = jax.eval_shape(lambda params, ids: gpt2(params, ids), gpt2.abstract, with_one(64)).shape
    assert shape == (2, 8, 64)
    with pytest.raises(ModelError, match="position_ids has shape"):
        jax.eval_shape(lambda params, ids: gpt2(params, ids, position_ids=ids[:, :3]), gpt2.abstract, GOOD)


@pytest.mark.parametrize(
    ("model_type", "task", "inputs", "text"),
    [
        (
            "bart",
            "seq2seq",
            {"input_ids": GOOD, "decoder_input_ids": with_one(99)},
            "decoder_input_ids has the token 99, but the model has 64 (vocab_size)",
        ),
        (
            "encoder-decoder",
            "seq2seq",
            {"input_ids": GOOD, "attention_mask": GOOD[:, :3], "decoder_input_ids": GOOD},
            "attention_mask has shape [2, 3], but input_ids [2, 8]",
        ),
        (
            "speech-encoder-decoder",
            "speech_to_sequence",
            {"inputs": np.zeros((2, 200), np.float32), "attention_mask": GOOD, "decoder_input_ids": GOOD},
            "attention_mask has shape [2, 8], but inputs [2, 200]",
        ),
        (
            "speech-encoder-decoder",
            "speech_to_sequence",
            {"inputs": np.zeros((2, 19), np.float32), "decoder_input_ids": GOOD},
            "inputs have 19 samples, but the convolutions of wav2vec2 take 20 at least",
        ),
        (
            "whisper",
            "speech_to_sequence",
            {"input_features": np.zeros((2, 8, 19), np.float32), "decoder_input_ids": GOOD},
            "input_features have shape [2, 8, 19], but the model takes [B, 8, 20]",
        ),
    ],
)
def test_inputs_of_the_flax_classes_are_checked(model_type, task, inputs, text):
    model = resolved(model_type, task)
    with pytest.raises(ModelError) as caught:
        model(model.abstract, **inputs)
    assert message(caught).splitlines()[0] == text


def test_batches_are_checked_row_by_row(gpt2):
    check_batch(gpt2.rows, {"input_ids": GOOD, "labels": with_one(-100), "scores": with_one(1000)})
    for name in ("input_ids", "labels"):
        with pytest.raises(ExampleError) as caught:
            check_batch(gpt2.rows, {"input_ids": GOOD, name: with_one(64)})
        assert caught.value.row == 1
        assert str(caught.value).startswith(f"collate_fn: {name} has the token 64, but the model has 64 (vocab_size)")
    classifier = resolved("bert", "sequence_classification", num_labels=100, num_hidden_layers=1)
    check_batch(classifier.rows, {"input_ids": GOOD, "labels": with_one(90)})


LARGER = SimpleNamespace(rows={"input_ids": Rows(65, "vocab_size")})
UNBOUNDED = SimpleNamespace()


@pytest.mark.parametrize(
    ("others", "token", "message"),
    [
        ((), 64, "input_ids has the token 64, but the model has 64 "),
        ((LARGER,), 65, "input_ids has the token 65, but the model has 65 "),
        ((LARGER,), 64, None),
        ((UNBOUNDED,), 64, None),
    ],
)
def test_what_a_plugin_collates_is_checked_against_the_largest_of_its_models(gpt2, others, token, message):
    """Which of several reads a batch is not known, but a token that none of them has is wrong in any case."""
    plugin = SimpleNamespace(
        encode_fn=None, collate_fn=lambda ctx, examples: {"input_ids": with_one(token)}, file="plugin.py"
    )
    recipe = SimpleNamespace(data=SimpleNamespace(max_length=8))
    models = {"model": gpt2, **{f"other{number}": one for number, one in enumerate(others)}}
    collate = bound_collate(plugin, Context(gpt2, None, None, recipe, models=models))
    if message is None:
        assert collate([{}, {}])["input_ids"][1, 3] == token
        return
    with pytest.raises(ExampleError, match=message):
        collate([{}, {}])


def test_positions_that_begin_anew_tell_texts_apart():
    from redco_cli.models.decoder.masks import texts_by_position

    begun = np.array([[0, 1, 2, 0, 1], [3, 4, 5, 6, 7]])
    np.testing.assert_array_equal(texts_by_position(begun), [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    assert texts_by_position(begun[1:]) is None
    traced = jax.eval_shape(texts_by_position, jnp.asarray(begun[1:]))
    assert traced.shape == (1, 5)
