"""Decoders that classify texts, beside PyTorch's: logits, gradients, loading from both kinds of checkpoint, export."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict

from redco_cli.errors import ModelError
from redco_cli.exporting import export
from redco_cli.exporting.export import export_model
from redco_cli.models.decoder.classifier import last_states
from redco_cli.models.decoder.decoder import Decoder
from redco_cli.models.families.registry import families
from redco_cli.models.hf_config import decoder_config
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.models.weights.table import to_hf, to_params
from redco_cli.recipe.schema import ModelSection
from tests.models.decoder.pairs import QUICK, Pair, batch, hf_config, pair, where, worst_gradient

KNOWN = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
FAMILIES = [
    pytest.param(family, marks=() if family == "llama" else pytest.mark.slow)
    for family in families()
    if family in KNOWN
]


def classifier(family, **changed):
    config = hf_config(family, num_labels=3, pad_token_id=0, **changed)
    config._attn_implementation = "sdpa" if family == "falcon" else "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    own = decoder_config(config, where=where, task="sequence_classification")
    return Pair(model, config, own, state, to_params(state, own))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_pytorchs(family):
    """Of rows without padding, with padding behind, and before."""
    models, given = classifier(family), batch()
    ids = np.where(given.real, np.maximum(given.input_ids, 1), 0)
    weights = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    logits = models.torch_model(
        torch.from_numpy(ids).long(), attention_mask=torch.from_numpy(given.attention_mask).long()
    ).logits
    (logits * torch.from_numpy(weights)).sum().backward()
    named = models.torch_model.named_parameters()
    grads = {name: np.zeros(one.shape, np.float32) if one.grad is None else one.grad.numpy() for name, one in named}

    def weighted(params):
        found = Decoder(models.config).apply({"params": params}, ids, given.attention_mask)
        return (found * weights).sum(), found

    run = jax.jit(jax.value_and_grad(weighted, has_aux=True), compiler_options=QUICK)
    (_, found), own_grads = run(models.params)
    np.testing.assert_allclose(found, logits.detach().numpy(), atol=1e-4)
    error, path = worst_gradient(own_grads, to_params(grads, models.config))
    assert error < 1e-3, path
    back = to_hf(models.params, models.config)
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, models.state[name], err_msg=name, strict=True)
    assert "score.weight" in back


def test_the_last_token_is_the_last_that_is_no_padding():
    config = decoder_config(
        hf_config("llama", pad_token_id=0, num_labels=3), where=where, task="sequence_classification"
    )
    hidden = np.arange(12, dtype=np.float32).reshape(3, 4, 1)
    ids = np.array([[5, 0, 6, 0], [0, 0, 7, 8], [0, 0, 0, 0]])
    assert last_states(hidden, ids, None, config)[:, 0].tolist() == [2, 7, 8]
    nobody_says = decoder_config(
        hf_config("llama", pad_token_id=None, num_labels=3), where=where, task="sequence_classification"
    )
    mask = np.array([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    assert last_states(hidden, ids, mask, nobody_says)[:, 0].tolist() == [2, 7, 11]
    assert last_states(hidden, ids, None, nobody_says)[:, 0].tolist() == [3, 7, 11]


def test_a_classifier_comes_back_bit_for_bit_and_a_language_model_gets_a_new_head(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "difference_of", lambda *_: 0.0)
    models = classifier("llama")
    models.torch_model.save_pretrained(tmp_path / "in")
    model = resolve_model(ModelSection(name=str(tmp_path / "in")), where=where)
    assert (model.task, model.packs) == ("sequence_classification", False)
    loaded = load_params(model, tmp_path / "in")
    assert (loaded.fresh, loaded.unused) == ((), ())
    exported = export_model(model, loaded.params, tmp_path / "out", source=tmp_path / "in")
    assert [file.name for file in exported.files] == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    again, told = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert {kind: names for kind, names in told.items() if names} == {}
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, models.torch_model.state_dict()[name]), name

    pair("llama").torch_model.save_pretrained(tmp_path / "lm")
    section = ModelSection(name=str(tmp_path / "lm"), task="sequence_classification", num_labels=5)
    model = resolve_model(section, where=where)
    begun = load_params(model, tmp_path / "lm", rng=jax.random.key(0))
    assert (begun.fresh, begun.unused) == (("score",), ("lm_head.weight",))
    assert flatten_dict(begun.params, sep="/")["score"].shape == (24, 5)
    with pytest.raises(ModelError, match="1 parameters that the checkpoint lacks: score"):
        load_params(model, tmp_path / "lm")


def test_what_needs_a_language_model_is_refused():
    config = hf_config("llama", num_labels=3).to_dict()
    section = ModelSection(config={**config, "model_type": "llama"}, task="sequence_classification")
    model = resolve_model(section, where=where)
    ids = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ModelError, match="a model that classifies has no generate"):
        model.generate(model.abstract, ids)
    with pytest.raises(ModelError, match="a model that classifies has no next_token_loss"):
        model.next_token_loss(model.abstract, ids, labels=ids)
    with pytest.raises(ModelError, match="takes one text a row"):
        model(model.abstract, ids, segment_ids=ids)
