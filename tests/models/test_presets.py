"""Every preset is the model it is named after: built by PyTorch on the meta device, it has the published size."""

import re

import pytest
import torch
import transformers
from transformers.modeling_utils import no_init_weights

from redco_cli.models.config.read import read_config
from redco_cli.models.config.tasks import choose_task, flax_class_names
from redco_cli.models.presets import close_presets, preset, preset_names
from redco_cli.recipe.schema import ModelSection

OTHERWISE = {
    "gptj-6b": "the card counts a padded head",
    "opt-66b": "the paper rounds to billions",
    "bert-base": "the card rounds to millions",
    "bert-large": "the card rounds to millions",
    "roberta-base": "the paper rounds to millions",
    "roberta-large": "the paper rounds to millions",
}
"""Presets whose published count is not exactly that of the PyTorch class, with the reason."""
EXPECTED = """
    gpt2 gpt2-medium gpt2-large gpt2-xl gptj-6b gpt-neox-20b
    opt-125m opt-350m opt-1.3b opt-2.7b opt-6.7b opt-13b opt-30b opt-66b
    bloom-560m bloom-1b1 bloom-1b7 bloom-3b bloom-7b1
    llama-7b llama-13b llama-30b llama-65b llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b
    llama-3.1-8b llama-3.1-70b llama-3.2-1b llama-3.2-3b llama-3.3-70b mistral-7b mixtral-8x7b
    qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2.5-72b
    qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b qwen3-30b-a3b
    gemma-2b gemma-7b gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-270m gemma-3-1b
    t5-small t5-base t5-large t5-3b t5-11b bart-base bart-large bert-base bert-large roberta-base roberta-large
    vit-base vit-large whisper-tiny whisper-base whisper-small whisper-medium whisper-large whisper-large-v3
    stable-diffusion-1.5 stable-diffusion-2.1
"""
TRANSFORMERS = [name for name in preset_names() if "model_type" in preset(name).config]
"""Of the others tests/models/diffusion says how large they are."""


UNDECLARED = {"qwen3_moe": {"head_dim"}}
"""Settings that the PyTorch class reads although its config class does not name them."""


def config_of(name):
    """The config as transformers builds it, after a check that no setting is misspelt."""
    config = dict(preset(name).config)
    undeclared = UNDECLARED.get(config["model_type"], set())
    read_config(ModelSection(config={key: config[key] for key in config if key not in undeclared}), where=str)
    return transformers.CONFIG_MAPPING[config.pop("model_type")](**config)


def test_the_names_are_these():
    assert list(preset_names()) == EXPECTED.split()


SLOWLY = ("qwen3-30b-a3b",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOWLY else name for name in TRANSFORMERS]
)
def test_the_pytorch_class_has_the_published_size(name):
    config = config_of(name)
    with torch.device("meta"), no_init_weights():
        model = getattr(transformers, config.architectures[0])(config)
        model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(preset(name).parameters, rel=0.01)
    assert (count == preset(name).parameters) is (name not in OTHERWISE)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_setting_is_one_that_transformers_reads_and_keeps(name):
    config = config_of(name)
    given = dict(preset(name).config)
    if given.get("use_sliding_window") is False:
        given["sliding_window"] = None  # transformers drops the width of a window that is off
    assert {key: getattr(config, key) for key in given} == given


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_task_is_that_of_the_architecture(name):
    config = config_of(name)
    if flax_class_names(config.model_type):
        assert preset(name).task == choose_task("auto", config, where=str)
    else:
        assert (preset(name).task, config.architectures[0].endswith("ForCausalLM")) == ("causal_lm", True)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_sequence_fits_the_positions(name):
    config = config_of(name)
    if config.model_type == "vit":
        positions = (config.image_size // config.patch_size) ** 2 + 1
    elif config.model_type == "roberta":
        positions = config.max_position_embeddings - config.pad_token_id - 1
    elif config.model_type in ("t5", "bloom"):
        positions = preset(name).seq_length  # neither has a limit
    else:
        limits = ("max_position_embeddings", "n_positions", "max_target_positions")
        positions = next(getattr(config, key) for key in limits if hasattr(config, key))
    assert preset(name).seq_length <= positions
    assert preset(name).seq_length <= 8192


def test_a_number_in_the_name_is_the_size():
    """Makers round generously, by a sixth down or a third up, but not further."""
    for name in preset_names():
        size = re.search(r"(?<![\d.x])(\d+(?:\.\d+)?)([bm])(\d)?(?!\w)", name)
        if size is not None:
            billions = float(f"{size[1]}.{size[3]}" if size[3] else size[1]) * (1e9 if size[2] == "b" else 1e6)
            assert 0.83 < preset(name).parameters / billions < 1.34, name


def test_a_preset_is_found_by_name_or_hub_id_in_any_case():
    found = preset("llama-3.1-8b")
    assert found.hub == "meta-llama/Llama-3.1-8B"
    assert preset("LLAMA-3.1-8B") == preset("meta-llama/llama-3.1-8b") == found
    assert preset("llama-3.1-9b") is None
    assert len({preset(name).hub for name in preset_names()}) == len(preset_names())


def test_a_callers_change_stays_with_the_caller():
    preset("llama-3.2-1b").config["rope_scaling"]["factor"] = 1.0
    assert preset("llama-3.2-1b").config["rope_scaling"]["factor"] == 32.0


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("lama-2-7b", ("llama-2-7b", "llama-2-70b", "llama-7b")),
        ("meta-llama/Llama-3.1-8B-Instruct", ("llama-3.1-8b", "llama-3-8b", "llama-3.1-70b")),
        ("google/vit-base-patch16-384", ("vit-base", "vit-large")),
        ("gptneox_20b", ("gpt-neox-20b",)),
        ("bert-base-cased", ("bert-base", "bert-large")),
        ("somebody/else", ()),
        ("", ()),
    ],
)
def test_names_that_were_meant(name, close):
    assert close_presets(name) == close
