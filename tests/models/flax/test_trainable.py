"""What is trained: the gradients of PyTorch, and what PyTorch leaves alone is left alone."""

import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict

from redco_cli.errors import ModelError
from redco_cli.models.config.tasks import flax_class_names
from redco_cli.models.flax.naming import torch_name
from redco_cli.models.flax.trainable import padding_untrained
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.plugin.parts import token_loss
from redco_cli.recipe.schema import ModelSection
from tests.models.flax.tiny import CONFIGS, config_for, inputs_for, largest_difference, save_torch, where

STARTS_WITH_PADDING = {"pad_token_id": 0, "decoder_start_token_id": 0}
"""As published Pegasus and Marian: the padding token is the first of every target."""


class Words(nn.Module):
    """Two embeddings, of which one is that of tokens."""

    def setup(self):
        self.shared = nn.Embed(6, 2)
        self.positions = nn.Embed(6, 2)

    def __call__(self, ids):
        return self.shared(ids).sum() + self.positions(ids).sum() + self.shared.attend(jnp.ones((1, 2))).sum()


@pytest.mark.parametrize(("model_type", "row"), [("pegasus", 1.0), ("t5", 3.0)])
def test_the_embedding_of_padding_gets_no_gradient_where_pytorch_gives_none(model_type, row):
    """Twice in the input, and once in the output layer that shares it, which counts in any case."""
    ids = jnp.array([[3, 4, 3]])
    params = Words().init(jax.random.key(0), ids)
    with padding_untrained(SimpleNamespace(model_type=model_type, pad_token_id=3)):
        found = jax.grad(lambda params: Words().apply(params, ids))(params)["params"]
    np.testing.assert_array_equal(found["shared"]["embedding"][3:5, 0], [row, 2.0])
    np.testing.assert_array_equal(found["positions"]["embedding"][3:5, 0], [2.0, 1.0])


class Positions(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Embed(6, 2, name="position_embeddings")(ids).sum()


@pytest.mark.parametrize(("model_type", "row"), [("xlm-roberta", 0.0), ("bert", 2.0)])
def test_the_position_of_padding_gets_no_gradient_in_the_kind_of_roberta(model_type, row):
    ids = jnp.array([[3, 4, 3]])
    params = Positions().init(jax.random.key(0), ids)
    with padding_untrained(SimpleNamespace(model_type=model_type, pad_token_id=3)):
        found = jax.grad(lambda params: Positions().apply(params, ids))(params)["params"]
    np.testing.assert_array_equal(found["position_embeddings"]["embedding"][3:5, 0], [row, 1.0])


@pytest.mark.parametrize("model_type", ["marian", "bart"])
def test_the_bias_of_the_logits_is_frozen(model_type):
    section = ModelSection(config=config_for(model_type, "seq2seq"), task="seq2seq", implementation="hf_flax")
    assert resolve_model(section, where=where).frozen == ("final_logits_bias",)


def torch_gradients(saved, inputs, labels):
    """By name, of all parameters that PyTorch trains; None where it has no gradient."""
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    tensors = {name: value.long() if value.dtype == torch.int32 else value for name, value in tensors.items()}
    logits = saved.torch_model(**tensors).logits
    rows, targets = logits.reshape(-1, logits.shape[-1]), torch.from_numpy(labels).long().reshape(-1)
    torch.nn.functional.cross_entropy(rows, targets, reduction="sum").backward()
    return {name: one.grad for name, one in saved.torch_model.named_parameters() if one.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "task", "changed"),
    [
        ("pegasus", "seq2seq", STARTS_WITH_PADDING),
        ("marian", "seq2seq", STARTS_WITH_PADDING),
        ("bart", "seq2seq", {}),
        ("mbart", "seq2seq", {}),
        ("t5", "seq2seq", {}),
        ("whisper", "speech_to_sequence", {}),
        ("bert", "masked_lm", {}),
        ("xglm", "causal_lm", {}),
        ("big_bird", "masked_lm", {"attention_type": "block_sparse"}),
    ],
)
def test_gradients_equal_pytorch(model_type, task, changed, tmp_path):
    """Relative to the largest of each model, with padding among the tokens that are read."""
    saved = save_torch(config_for(model_type, task, **changed), task, tmp_path)
    inputs, pad = inputs_for(model_type, task), saved.torch_model.config.pad_token_id
    read = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"]
    read[:, 0], read[0, 3] = changed.get("decoder_start_token_id", 5), 6 if pad is None else pad
    labels = np.random.default_rng(1).integers(4, 60, read.shape).astype(np.int32)
    expected = torch_gradients(saved, inputs, labels)
    model = resolve_model(saved.section, where=where)
    params = load_params(model, tmp_path).params
    found = jax.jit(jax.grad(lambda params: token_loss(model(params, **inputs), labels).sum))(params)
    largest = max(float(one.abs().max()) for one in expected.values() if one is not None)
    for path, value in flatten_dict(found).items():
        name, order = torch_name(path, value.ndim)
        if name in expected and expected[name] is not None:
            gradient = expected[name].numpy()
            gradient = gradient if order is None else gradient.transpose(np.argsort(order))
            np.testing.assert_allclose(value, gradient, atol=1e-4 * largest, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "task"), [(kind, next(iter(flax_class_names(kind)))) for kind in CONFIGS if flax_class_names(kind)]
)
def test_pytorch_trains_what_redco_trains(model_type, task, tmp_path):
    """Every parameter that is not frozen is one that PyTorch gives a gradient, and the other way round."""
    saved = save_torch(config_for(model_type, task), task, tmp_path)
    model = resolve_model(saved.section, where=where)
    trained = {name for name, one in saved.torch_model.named_parameters() if one.requires_grad}
    for path in flatten_dict(model.abstract):
        leaf = flatten_dict(model.abstract)[path]
        frozen = any(re.fullmatch(pattern, "/".join(path)) for pattern in model.frozen)
        assert (torch_name(path, len(leaf.shape))[0] in trained) != frozen, path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "random", "length"), [(4, 1, 8), (4, 1, 28), (4, 1, 30), (4, 1, 32), (4, 2, 37), (4, 3, 50)]
)
def test_block_sparse_attention_is_that_of_pytorch_at_every_length(block, random, length, tmp_path):
    """Full up to (5 + 2 * random) blocks; longer inputs are padded to whole blocks."""
    changed = {"attention_type": "block_sparse", "block_size": block, "num_random_blocks": random}
    assert largest_difference("big_bird", "masked_lm", tmp_path, length, **changed, max_position_embeddings=64) < 1e-4


def sparse(**changed):
    section = ModelSection(
        config=config_for("big_bird", "masked_lm", attention_type="block_sparse", block_size=2, **changed),
        task="masked_lm",
        implementation="hf_flax",
    )
    return resolve_model(section, where=where)


@pytest.mark.parametrize("length", [5, 22, 23])
def test_short_and_odd_lengths_need_no_whole_blocks(length):
    model = sparse(num_random_blocks=3, num_hidden_layers=1)
    ids = jnp.ones((2, length), jnp.int32)
    shape = jax.eval_shape(lambda params: model(params, ids), model.abstract).shape
    assert shape == (2, length, 64)
    drawn = jax.eval_shape(lambda params: model(params, ids, rng=jax.random.key(0), train=True), model.abstract)
    assert drawn.shape == shape


def test_a_decoder_with_sparse_attention_is_refused():
    with pytest.raises(ModelError, match=r"model.config.is_decoder: big_bird with is_decoder: true is not supported"):
        sparse(is_decoder=True, num_random_blocks=1, num_hidden_layers=1)
