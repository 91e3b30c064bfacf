"""gpt-oss as it is published, its experts in MXFP4, beside what transformers unpacks."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from redco_cli.errors import ModelError
from redco_cli.exporting import export
from redco_cli.exporting.export import export_model
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.files import open_checkpoint
from redco_cli.models.weights.load import load_params
from redco_cli.models.weights.mxfp4 import unpacked
from redco_cli.models.weights.table import to_hf
from redco_cli.recipe.schema import ModelSection
from tests.models.decoder.pairs import hf_config, where

WIDE = {"hidden_size": 64, "intermediate_size": 32}
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@pytest.fixture
def packed(tmp_path):
    """The directory of a checkpoint with random experts in MXFP4, and what they are in bfloat16."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_config("gpt_oss", **WIDE)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    file, config = tmp_path / "in/model.safetensors", tmp_path / "in/config.json"
    tensors, kernels = load_file(file), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 128, (count, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        kernels[name] = convert_moe_packed_tensors(blocks, scales).float().numpy()
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": QUANTISED}))
    return tmp_path / "in", kernels


def test_a_published_checkpoint_is_loaded_and_exported_in_bfloat16(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "difference_of", lambda *_: 0.0)
    directory, kernels = packed
    model = resolve_model(ModelSection(name=str(directory)), where=where)
    params = load_params(model, directory).params
    found = to_hf(params, model.decoder)
    for name, kernel in kernels.items():
        np.testing.assert_array_equal(found[name], kernel, err_msg=name)

    export_model(model, params, tmp_path / "out", source=directory)
    again, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert {kind: names for kind, names in told.items() if names} == {}
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    for name, kernel in kernels.items():
        assert again.state_dict()[name].dtype == torch.bfloat16
        np.testing.assert_array_equal(again.state_dict()[name].float().numpy(), kernel)


def test_parts_are_unpacked_alone(packed):
    directory, kernels = packed
    checkpoint = unpacked(open_checkpoint(directory))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    box = (slice(1, 3), slice(30, 50), slice(5, 9))
    for index in (box, box[:2], box[:1], ()):
        np.testing.assert_array_equal(checkpoint.read(name, index).astype(np.float32), kernels[name][index])


def test_other_quantised_weights_are_refused(packed):
    directory, _ = packed
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="quantization_config is set, but quantised weights are not read"):
        resolve_model(ModelSection(name=str(directory)), where=where)
