"""Tokens that a recipe adds: their rows are the mean of the others, as PyTorch computes it, and exports have them."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from redco_cli.errors import ModelError
from redco_cli.exporting.export import export_model
from redco_cli.models.config.tokenizer import load_tokenizer
from redco_cli.models.resolve import resolve_model
from redco_cli.models.vocabulary import AddedTokens, vocab_size_of
from redco_cli.models.weights import rows as module
from redco_cli.models.weights import shards
from redco_cli.models.weights.load import check_checkpoint, load_params
from redco_cli.recipe.schema import ModelSection
from tests.models.decoder import pairs
from tests.models.flax import tiny
from tests.models.weights.test_decoder import mesh_of, split_twice

TOKENS = ("<|im_start|>", "<|im_end|>", "<tool>")
FAMILIES = [
    pytest.param(family, changed, marks=[pytest.mark.slow] if slow else [])
    for family, changed, slow in (
        ("llama", {"tie_word_embeddings": False}, False),
        ("gpt2", {}, True),
        ("gptj", {}, True),  # with a bias of the head
        ("gemma2", {}, True),
        ("bloom", {}, True),
        ("opt", {}, True),
        ("gpt_neox", {"tie_word_embeddings": False}, True),
    )
]


def save_tokenizer(directory, words):
    """A tokenizer of so many words, `w0` and so on."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def saved(family, directory, words=None, tokens=TOKENS, **changed):
    """A random PyTorch model in `directory` with a tokenizer, and the section that adds tokens to both."""
    torch_model = pairs.pair(family, **changed).torch_model
    torch_model.save_pretrained(directory)
    save_tokenizer(directory, torch_model.config.vocab_size if words is None else words)
    return torch_model, ModelSection(name=str(directory), implementation="decoder", added_tokens=tokens)


def grown(torch_model):
    """The model as PyTorch grows it, its new rows the mean of the old ones."""
    before = torch_model.config.vocab_size
    embedding, head = torch_model.get_input_embeddings(), torch_model.get_output_embeddings()
    means = [layer.weight.detach().double().mean(0).float() for layer in (embedding, head)]
    bias = getattr(head, "bias", None)
    means.append(None if bias is None else bias.detach().double().mean().float())
    torch_model.resize_token_embeddings(before + len(TOKENS), mean_resizing=False)
    with torch.no_grad():
        embedding, head = torch_model.get_input_embeddings(), torch_model.get_output_embeddings()
        embedding.weight[before:], head.weight[before:] = means[0], means[1]
        if bias is not None:
            head.bias[before:] = means[2]
    return torch_model


@pytest.mark.parametrize(("family", "changed"), FAMILIES)
def test_a_grown_model_is_the_one_that_pytorch_grows_and_so_is_its_export(family, changed, tmp_path):
    (tmp_path / "in").mkdir()
    torch_model, section = saved(family, tmp_path / "in", **changed)
    model, tokenizer = resolve_model(section, where=pairs.where), load_tokenizer(section, where=pairs.where)
    before = torch_model.config.vocab_size
    assert model.added == AddedTokens(before, before + 3, before)
    assert model.config.vocab_size == len(tokenizer) == before + 3
    assert tokenizer("w1 <tool>w2")["input_ids"] == [1, before + 2, 2]
    params = load_params(model, tmp_path / "in").params
    ids = np.array([[1, before, 2, before + 1, before + 2, 3]])
    wanted = grown(torch_model)(torch.from_numpy(ids)).logits.detach().numpy()
    np.testing.assert_allclose(model(params, ids), wanted, atol=5e-5)
    export_model(model, params, tmp_path / "out", source=tmp_path / "in", tokenizer=tokenizer)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (again.config.vocab_size, again.get_input_embeddings().weight.shape[0]) == (before + 3, before + 3)
    np.testing.assert_allclose(again(torch.from_numpy(ids)).logits.detach().numpy(), wanted, atol=5e-5)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("w1 <tool>w2")["input_ids"] == [
        1,
        before + 2,
        2,
    ]
    exported = ModelSection(name=str(tmp_path / "out"), implementation="decoder", added_tokens=TOKENS)
    assert resolve_model(exported, where=pairs.where).added is None  # they are there: nothing begins anew


@pytest.mark.slow
def test_pieces_and_shards_have_the_same_rows(tmp_path, monkeypatch):
    _, section = saved("gptj", tmp_path, tokens=(*TOKENS, "<4>", "<5>", "<6>", "<7>", "<8>"))
    model = resolve_model(section, where=pairs.where)
    whole = load_params(model, tmp_path).params
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    monkeypatch.setattr(shards, "PIECE_BYTES", 2048)
    monkeypatch.setattr(module, "_AT_ONCE", 1000)
    mesh = mesh_of(fsdp=2, tensor=4)
    shardings = jax.tree.map(lambda leaf: split_twice(leaf, mesh), model.abstract)
    split = load_params(model, tmp_path, shardings).params
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), whole, split)


def test_a_vocabulary_with_room_does_not_grow(tmp_path):
    """And the rows that nobody trained become the mean of those that somebody did."""
    torch_model, section = saved("llama", tmp_path, words=60, tie_word_embeddings=False)
    model = resolve_model(section, where=pairs.where)
    assert torch_model.config.vocab_size == model.config.vocab_size == 64
    params = load_params(model, tmp_path).params
    stored = torch_model.model.embed_tokens.weight.detach().numpy()
    found = np.asarray(params["embedding"])
    np.testing.assert_array_equal(found[[*range(60), 63]], stored[[*range(60), 63]])
    np.testing.assert_allclose(found[60:63], np.broadcast_to(stored[:60].mean(0), (3, stored.shape[1])), atol=1e-7)


def test_a_checkpoint_that_does_not_fit_its_config_is_still_refused(tmp_path):
    _, section = saved("llama", tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 70}))
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight \[64, \d+\] instead of \[70"):
        check_checkpoint(resolve_model(section, where=pairs.where), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bert", "t5", "bart"])
def test_flax_classes_grow_likewise(model_type, tmp_path):
    task = {"bert": "masked_lm"}.get(model_type, "seq2seq")
    made = tiny.save_torch(tiny.config_for(model_type, task), task, tmp_path)
    torch_model, before = made.torch_model, made.torch_model.config.vocab_size
    save_tokenizer(tmp_path, before)
    update = {"implementation": "hf_flax", "added_tokens": TOKENS}
    section = made.section.model_copy(update=update)
    model = resolve_model(section, where=tiny.where)
    params = load_params(model, tmp_path).params
    assert model.config.vocab_size == before + 3
    grown(torch_model)
    out = tmp_path / "out"
    export_model(model, params, out, source=tmp_path)
    again = type(torch_model).from_pretrained(out).state_dict()
    for name, tensor in torch_model.state_dict().items():
        np.testing.assert_allclose(again[name], tensor, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [("byte", "the tokenizer takes no more tokens"), (None, "there is no tokenizer")],
)
def test_what_takes_no_tokens(tokenizer, said):
    section = ModelSection(
        config=tiny.config_for("llama", "causal_lm", vocab_size=260), tokenizer=tokenizer, added_tokens=("<a>",)
    )
    with pytest.raises(ModelError) as caught:
        load_tokenizer(section, where=pairs.where)
    assert str(caught.value).startswith(f"recipe.yaml:3: model.added_tokens: given, but {said}\n  -> leave it out")


def test_a_token_that_is_there_stays_where_it_is(tmp_path, capsys):
    save_tokenizer(tmp_path, 5)
    config = tiny.config_for("llama", "causal_lm", vocab_size=5)
    section = ModelSection(config=config, tokenizer=str(tmp_path), added_tokens=("w3", "<new>"))
    model, tokenizer = resolve_model(section, where=pairs.where), load_tokenizer(section, where=pairs.where)
    assert tokenizer.convert_tokens_to_ids(["w3", "<new>"]) == [3, 5]
    assert (model.added, model.config.vocab_size) == (AddedTokens(5, 6, 5), 6)
    assert "model.added_tokens: the tokenizer has 1 of 2 already" in capsys.readouterr().err
    assert tokenizer.decode([1, 5, 3], skip_special_tokens=True) == "w1"


def test_two_vocabularies_do_not_grow():
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(), transformers.BertConfig()
    )
    assert vocab_size_of(config) is None
    assert vocab_size_of(transformers.BertConfig(vocab_size=7)) == 7
    assert vocab_size_of(transformers.ViTConfig()) is None
