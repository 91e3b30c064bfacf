"""The language model in a checkpoint with images: found, loaded and exported as a model of its own."""

import json
import warnings

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from redco_cli.errors import ModelError
from redco_cli.exporting import export
from redco_cli.exporting.export import export_model
from redco_cli.models.families.registry import text_part
from redco_cli.models.initial import initial_params
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.models.weights.table import to_hf
from redco_cli.recipe.schema import ModelSection
from tests.models.decoder.pairs import hf_config, where

SIGLIP = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
IMAGES = ("vision_tower", "multi_modal_projector", "model.vision_tower", "model.multi_modal_projector")


@pytest.fixture(scope="module")
def whole():
    """A random Gemma 3 with images, of PyTorch."""
    text = hf_config("gemma3_text").to_dict()
    config = transformers.Gemma3Config(text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4)
    config.image_token_id = config.image_token_index = 63
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def saved(whole, directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole.save_pretrained(directory)
    return ModelSection(name=str(directory))


def section_with_names(whole, directory, changes):
    """The checkpoint with its tensors called otherwise."""
    section = saved(whole, directory)
    tensors = load_file(directory / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        start = next((one for one in changes if name.startswith(one)), "")
        renamed[changes.get(start, "") + name.removeprefix(start)] = tensor
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    return section


IN_MEMORY = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


@pytest.mark.parametrize("changes", [{}, IN_MEMORY], ids=["as published", "as in memory"])
def test_the_text_part_is_loaded_and_exported_as_a_model_of_its_own(whole, changes, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "difference_of", lambda *_: 0.0)  # other tests compare logits of this family
    section = section_with_names(whole, tmp_path / "in", changes)
    model = resolve_model(section, where=where)
    assert model.decoder.family == "gemma3_text"
    loaded = load_params(model, tmp_path / "in")
    assert loaded.fresh == ()
    assert loaded.unused
    assert all(name.startswith(IMAGES) for name in loaded.unused)
    state = whole.model.language_model.state_dict()
    found = to_hf(loaded.params, model.decoder)
    assert found.keys() == {f"model.{name}" for name in state}
    for name, tensor in state.items():
        np.testing.assert_array_equal(found[f"model.{name}"], tensor.numpy(), err_msg=name)

    export_model(model, loaded.params, tmp_path / "out", source=tmp_path / "in")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    again, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {kind: names for kind, names in told.items() if names} == {}
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(ids).logits, whole(ids).logits)


def test_a_run_says_what_it_leaves_out(whole, tmp_path, capsys):
    section = saved(whole, tmp_path)
    model = resolve_model(section, where=where)
    places = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), model.abstract)
    initial_params(model, section, places, key=jax.random.key(0), where=where)
    said = capsys.readouterr()
    assert "the language model of" in said.out + said.err
    assert "tensors of other parts are left out (multi_modal_projector." in said.out + said.err


def test_what_the_whole_says_is_not_lost(whole, tmp_path):
    section = saved(whole, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def refusal(**changed):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(ModelError) as raised:
            resolve_model(section, where=where)
        return str(raised.value)

    assert "quantization_config is set" in refusal(quantization_config={"quant_method": "gptq", "bits": 4})
    part = text_part(transformers.Gemma3Config(text_config={"hidden_size": 8}, eos_token_id=[1, 106], num_labels=3))
    assert (part.hidden_size, part.eos_token_id, part.num_labels) == (8, [1, 106], 3)
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma3ForSequenceClassification"]}))
    assert resolve_model(section, where=where).task == "sequence_classification"
