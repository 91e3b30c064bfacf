"""The models of one pipeline in folders below it: each found by its folder, with the tokenizer of them all."""

import json

import jax
import numpy as np
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from redco_cli.errors import ModelError
from redco_cli.models.config.tokenizer import load_tokenizer
from redco_cli.models.resolve import resolve_model
from redco_cli.models.several import section_of
from redco_cli.models.weights.load import checkpoint_directory, load_params
from redco_cli.recipe.schema import ModelSection, Recipe

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
"""The last two as in Stable Diffusion 1.5, where they are wrong and nothing of the last hidden states hangs on them."""
UNET = {
    "_class_name": "UNet2DConditionModel",
    "_diffusers_version": "0.6.0",
    "block_out_channels": [32],
    "down_block_types": ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"],
    "cross_attention_dim": 16,
}
WORDS = ["l", "o", "w", "w</w>", "lo", "low</w>", "<|startoftext|>", "<|endoftext|>"]


def where(key):
    return f"recipe.yaml:3: {key}"


@pytest.fixture
def pipeline(tmp_path):
    """A directory with the config of a U-Net, a text encoder with weights, and a tokenizer."""
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet/config.json").write_text(json.dumps(UNET))
    (tmp_path / "model_index.json").write_text("{}")
    torch.manual_seed(0)
    CLIPTextModel(CLIPTextConfig(**TEXT)).eval().save_pretrained(tmp_path / "text_encoder")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\nl o\nlo w</w>\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"}))
    return tmp_path


def test_a_model_is_found_by_its_folder_with_the_tokenizer_of_the_pipeline(pipeline):
    section = ModelSection(name=str(pipeline), subfolder="unet")
    model, tokenizer = resolve_model(section, where=where), load_tokenizer(section, where=where)
    assert model.config.block_out_channels == (32,)
    assert model.config.stored == UNET
    assert checkpoint_directory(section, where=where) == pipeline / "unet"
    assert tokenizer("low").input_ids == [6, 5, 7]


def test_a_folder_is_a_model_by_itself(pipeline):
    section = ModelSection(name=str(pipeline / "unet"))
    assert resolve_model(section, where=where).config.cross_attention_dim == 16
    assert load_tokenizer(section, where=where) is None


def test_the_text_encoder_gives_the_last_hidden_states_of_pytorch(pipeline):
    section = ModelSection(name=str(pipeline), subfolder="text_encoder")
    model = resolve_model(section, where=where)
    params = load_params(model, checkpoint_directory(section, where=where)).params
    ids = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
    with torch.no_grad():
        given = torch.from_numpy(ids).long()
        expected = CLIPTextModel.from_pretrained(pipeline / "text_encoder")(given).last_hidden_state.numpy()
    assert model.task == "text_encoder"
    np.testing.assert_allclose(jax.jit(model)(params, ids), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"name": "{}"},
            "recipe.yaml:3: model.name: the directory {} is a pipeline of several models\n"
            "  -> set model.subfolder to one of them: text_encoder, unet",
        ),
        (
            {"name": "{}", "subfolder": "vae"},
            "recipe.yaml:3: model.subfolder: there is no directory {}/vae\n  -> name one of the models of the pipeline",
        ),
        (
            {"config": UNET, "subfolder": "unet"},
            "recipe.yaml:3: model.subfolder: given without model.name\n"
            "  -> set model.name to the pipeline that it is a folder of",
        ),
    ],
)
def test_what_is_no_model(section, message, pipeline):
    section = {key: one.format(pipeline) if isinstance(one, str) else one for key, one in section.items()}
    with pytest.raises(ModelError) as caught:
        resolve_model(ModelSection(**section), where=where)
    assert str(caught.value) == message.format(pipeline)


def test_a_further_model_may_be_another_folder_of_the_same_pipeline():
    recipe = Recipe.model_validate(
        {
            "model": {"name": "a/b", "subfolder": "unet", "revision": "r", "dtype": "bfloat16", "params": "runs/x"},
            "models": {"vae": {"subfolder": "vae"}, "text": {"name": "c/d", "subfolder": "text_encoder"}},
            "plugin": {"module": "causal_lm"},
            "output_dir": "runs/y",
        }
    )
    own = {"name", "subfolder", "revision", "dtype"}
    assert section_of(recipe, "vae").model_dump(exclude_defaults=True) == {
        "name": "a/b",
        "subfolder": "vae",
        "revision": "r",
        "dtype": "bfloat16",
    }
    other = section_of(recipe, "text")
    assert {key: getattr(other, key) for key in own} == {
        "name": "c/d",
        "subfolder": "text_encoder",
        "revision": None,
        "dtype": "bfloat16",
    }
    assert section_of(recipe, "model").subfolder == "unet"


@pytest.mark.parametrize("hidden", [{"hidden_act": "quick_gelu"}, {"hidden_act": "gelu"}])
def test_configs_of_published_text_encoders_are_taken(hidden, tmp_path):
    """Of Stable Diffusion 1.5 and of 2.1, in all that is not a size."""
    config = {
        "architectures": ["CLIPTextModel"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dropout": 0.0,
        "eos_token_id": 2,
        "hidden_size": 32,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 64,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77,
        "model_type": "clip_text_model",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "pad_token_id": 1,
        "projection_dim": 512,
        "torch_dtype": "float32",
        "transformers_version": "4.25.0.dev0",
        "vocab_size": 100,
        **hidden,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = resolve_model(ModelSection(name=str(tmp_path)), where=where)
    given = jax.ShapeDtypeStruct((2, 77), np.int32)
    assert jax.eval_shape(model, model.abstract, given).shape == (2, 77, 32)
