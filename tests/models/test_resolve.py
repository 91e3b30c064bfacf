"""From a recipe's `model` section to a model, and every way in which that goes wrong."""

import json
import logging

import jax
import pytest

from redco_cli.errors import ModelError
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.flax.model import HfFlaxModel
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from tests.models.flax.tiny import config_for, where

LLAMA = config_for("llama", "causal_lm")


def refusal(**section):
    with pytest.raises(ModelError) as caught:
        resolve_model(ModelSection(**section), where=where)
    return str(caught.value)


def test_a_directory_needs_nothing_but_its_config(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.chdir(tmp_path)
    model = resolve_model(ModelSection(name="tiny"), where=where)
    assert model.task == "causal_lm"
    assert {type(leaf) for leaf in jax.tree.leaves(model.abstract)} == {jax.ShapeDtypeStruct}
    assert model.abstract["embedding"].shape == (64, 16)


def test_a_model_of_sixty_six_billion_parameters_is_only_shapes():
    wide, tall, vocabulary, layers = 9216, 36864, 50272, 64
    config = {"model_type": "opt", "hidden_size": wide, "num_hidden_layers": layers, "num_attention_heads": 72}
    model = resolve_model(ModelSection(config=config | {"ffn_dim": tall, "word_embed_proj_dim": wide}), where=where)
    layer = 4 * (wide * wide + wide) + (2 * wide * tall + tall + wide) + 4 * wide
    total = vocabulary * wide + 2050 * wide + layers * layer + 2 * wide
    assert sum(leaf.size for leaf in jax.tree.leaves(model.abstract)) == total > 65e9


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BartForConditionalGeneration", "seq2seq"),
        ("BartForSequenceClassification", "sequence_classification"),
        ("BartForCausalLM", "causal_lm"),
    ],
)
def test_auto_reads_the_task_from_architectures(architecture, task):
    config = config_for("bart", "seq2seq", architectures=[architecture])
    assert resolve_model(ModelSection(config=config), where=where).task == task


@pytest.mark.parametrize(("model_type", "task"), [("llama", "causal_lm"), ("t5", "seq2seq"), ("clip", "clip")])
def test_auto_takes_the_only_task_of_a_model_type(model_type, task):
    assert resolve_model(ModelSection(config=config_for(model_type, task)), where=where).task == task


def test_auto_asks_where_several_heads_are_possible():
    assert refusal(config=config_for("distilbert", "masked_lm")) == (
        "recipe.yaml:3: model.task: the config of this distilbert has no architectures, which does not say which head "
        "is meant\n  -> set model.task to one of: masked_lm, sequence_classification, token_classification, "
        "question_answering"
    )


@pytest.mark.parametrize("architecture", ["LlamaForTokenClassification", "LlamaForRewardModel"])
def test_another_head_of_a_covered_type_is_not_taken_for_a_language_model(architecture):
    assert architecture in refusal(config=config_for("llama", "causal_lm", architectures=[architecture]))


def test_what_the_decoder_refuses_is_refused_elsewhere_where_no_case_proves_it():
    assert "add_cross_attention" in refusal(config=config_for("gpt2", "causal_lm", add_cross_attention=True))
    assert "partial_rotary_factor" in refusal(config=config_for("llama", "causal_lm", partial_rotary_factor=0.5))


def test_architectures_that_are_no_list_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": "LlamaForCausalLM"}')
    assert refusal(name=str(tmp_path)) == (
        f"recipe.yaml:3: model.name: the config.json of {tmp_path} has architectures 'LlamaForCausalLM', which is no "
        "list of names\n  -> repair the file, or save the model again"
    )


def test_a_task_that_the_type_lacks_is_refused():
    assert refusal(config=config_for("t5", "seq2seq"), task="token_classification") == (
        "recipe.yaml:3: model.task: t5 has no token_classification head\n  -> it has: seq2seq"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "model.config: an inline config needs model_type\n  -> add it, such as model_type: llama"),
        ({"model_type": "lama"}, "model.config.model_type: 'lama' is no model type\n  -> did you mean llama?"),
        (
            {"model_type": "llama", "hiden_size": 8},
            "model.config.hiden_size: llama has no such setting\n  -> did you mean hidden_size?",
        ),
        (
            {"model_type": "llama", "hidden_size": "8"},
            "model.config.hidden_size: '8' given, but a number is expected\n  -> its default is 4096",
        ),
        (
            {"model_type": "llama", "attention_bias": 1},
            "model.config.attention_bias: 1 given, but true or false is expected\n  -> its default is False",
        ),
        (
            {"model_type": "clip", "text_config": {"hiden_size": 8}},
            "model.config.text_config.hiden_size: clip_text_model has no such setting\n  -> did you mean hidden_size?",
        ),
        (
            {"model_type": "encoder-decoder", "encoder": {"model_type": "brt"}},
            "model.config.encoder.model_type: 'brt' is no model type\n  -> did you mean bert?",
        ),
        (
            {"model_type": "encoder-decoder", "encoder": {"vocab_size": 8}},
            "model.config.encoder: a nested config needs model_type\n  -> add it, such as model_type: bert",
        ),
    ],
)
def test_typos_in_an_inline_config_are_refused(config, message):
    assert refusal(config=config) == f"recipe.yaml:3: {message}"


def test_generic_settings_and_other_names_of_settings_are_known():
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "id2label": {"0": "no", "1": "yes"}, "use_cache": False}
    assert resolve_model(ModelSection(config=config), where=where).config.id2label == {0: "no", 1: "yes"}
    gpt2 = {"model_type": "gpt2", "hidden_size": 16, "n_head": 4, "n_layer": 1, "max_position_embeddings": 8}
    assert resolve_model(ModelSection(config=gpt2), where=where).config.n_embd == 16


def test_resolving_leaves_the_recipe_as_it_is():
    section = ModelSection(config=config_for("encoder-decoder", "seq2seq"))
    before = json.dumps(section.config)
    resolve_model(section, where=where)
    assert json.dumps(section.config) == before


def test_sizes_that_do_not_fit_are_refused():
    message = refusal(config=config_for("bert", "masked_lm", hidden_size=18), task="masked_lm")
    assert message.startswith("recipe.yaml:3: model.config: FlaxBertForMaskedLM cannot be built from this config: ")
    assert message.endswith("\n  -> correct the config: sizes must be positive, and heads must divide the hidden size")


@pytest.mark.parametrize(
    ("config", "implementation", "expected"),
    [
        (LLAMA, "auto", DecoderModel),
        (LLAMA | {"rope_theta": 500000.0}, "decoder", DecoderModel),
        (LLAMA, "decoder", DecoderModel),
        (LLAMA, "hf_flax", HfFlaxModel),
        ({**LLAMA, "model_type": "qwen2"}, "auto", DecoderModel),
        (config_for("gpt_neo", "causal_lm"), "auto", HfFlaxModel),
        (config_for("opt", "causal_lm", layerdrop=0.1), "auto", HfFlaxModel),
    ],
    ids=["covered", "another theta", "decoder", "hf_flax", "no Flax class", "not covered", "refused by the decoder"],
)
def test_auto_takes_the_decoder_where_it_covers_a_model(config, implementation, expected):
    section = ModelSection(config=config, implementation=implementation)
    assert type(resolve_model(section, where=where)) is expected


def test_the_refusal_of_the_decoder_names_the_setting():
    assert refusal(
        config=LLAMA | {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, implementation="decoder"
    ).startswith("recipe.yaml:3: model.config.rope_scaling: rope_scaling has the unknown type 'spiral'\n  -> ")


def test_a_covered_type_with_another_head_is_no_language_model_unless_asked_for():
    config = LLAMA | {"architectures": ["LlamaForTokenClassification"]}
    assert refusal(config=config) == (
        "recipe.yaml:3: model.task: the config's architecture is LlamaForTokenClassification, and llama has no such "
        "head here\n  -> set model.task: causal_lm to take the language model in it"
    )
    assert resolve_model(ModelSection(config=config, task="causal_lm"), where=where).task == "causal_lm"


def test_the_decoder_has_two_heads():
    assert refusal(config=LLAMA, task="masked_lm", implementation="decoder") == (
        "recipe.yaml:3: model.task: the decoder has no masked_lm head\n"
        "  -> it has: causal_lm, sequence_classification; or set model.implementation: hf_flax"
    )
    granite = {"model_type": "granite", "architectures": ["GraniteForSequenceClassification"]}
    assert refusal(config=granite).startswith(
        "recipe.yaml:3: model.task: transformers has no sequence_classification head for granite\n"
    )


def test_a_config_from_scratch_fits_the_byte_tokenizer_unless_it_says_otherwise():
    config = {key: value for key, value in LLAMA.items() if key != "vocab_size"} | {"eos_token_id": 10}
    found = resolve_model(ModelSection(config=config, tokenizer="byte"), where=where).config
    ids = (found.vocab_size, found.pad_token_id, found.bos_token_id, found.eos_token_id)
    assert ids == (260, 256, 257, 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "./nowhere",
            "there is no directory ./nowhere\n"
            "  -> give a directory with config.json, or a hub id such as openai-community/gpt2",
        ),
        (
            "openai-community/gpt2",
            "openai-community/gpt2 is no local directory, and the hub cannot be reached\n"
            "  -> check the name and the network (and HF_HUB_OFFLINE), or give a local directory",
        ),
    ],
)
def test_models_that_are_not_there_are_named(name, message):
    assert refusal(name=name) == f"recipe.yaml:3: model.name: {message}"


def test_directories_that_are_no_model_are_named(tmp_path):
    assert refusal(name=str(tmp_path)) == (
        f"recipe.yaml:3: model.name: the directory {tmp_path} has no config.json\n"
        "  -> give the directory of a saved model"
    )
    (tmp_path / "config.json").write_text("{")
    message = refusal(name=str(tmp_path))
    assert message.startswith(f"recipe.yaml:3: model.name: the config.json of {tmp_path} cannot be used: ")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    message = refusal(name=str(tmp_path))
    assert message.startswith("recipe.yaml:3: model: neither the decoder nor a Flax class of ")


def test_remat_where_the_class_has_it():
    bert = ModelSection(config=config_for("bert", "masked_lm"), task="masked_lm")
    plain = resolve_model(bert, where=where)
    remat = resolve_model(bert, where=where, remat="full")
    assert jax.tree.map(lambda leaf: leaf.shape, remat.abstract) == jax.tree.map(
        lambda leaf: leaf.shape, plain.abstract
    )

    def program(model):
        return str(jax.make_jaxpr(jax.grad(lambda p: model(p, jax.numpy.ones((1, 4), int)).sum()))(model.abstract))

    assert ("remat" in program(plain), "remat" in program(remat)) == (False, True)
    with pytest.raises(ModelError) as caught:
        resolve_model(ModelSection(config=LLAMA, implementation="hf_flax"), where=where, remat="full")
    assert str(caught.value) == (
        "recipe.yaml:3: model.config: FlaxLlamaForCausalLM cannot recompute activations\n  -> set train.remat: none"
    )


def test_only_the_deprecation_of_flax_is_silenced(caplog):
    logger = logging.getLogger("transformers.modeling_flax_utils")
    resolve_model(ModelSection(config=LLAMA, implementation="hf_flax"), where=where)
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        logger.warning("TensorFlow and JAX classes are deprecated and will be removed in Transformers v5.")
        logger.warning("something else")
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == ["something else"]
