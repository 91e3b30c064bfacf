"""Checkpoints of diffusers in and out: old names, matrices as convolutions, half precision, and export."""

import json

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from redco_cli.errors import ModelError
from redco_cli.exporting.export import export_model
from redco_cli.models.weights.load import check_checkpoint
from tests.models.diffusion.tiny import AUTOENCODER, OLD_NAMES, UNET, UNET_2, opened, saved, tensors

FILE = "diffusion_pytorch_model.safetensors"
_PIXEL = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")


def same_bits(expected, directory):
    """The class of diffusers finds every tensor in a directory, and the same bits in each."""
    again, found = type(expected).from_pretrained(directory, output_loading_info=True, torch_dtype=expected.dtype)
    assert {kind: names for kind, names in found.items() if names} == {}
    loaded = again.state_dict()
    assert loaded.keys() == expected.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.state_dict().items())


def renamed(directory, rename):
    """A checkpoint under other names, or in another layout."""
    stored = load_file(directory / FILE)
    save_file(dict(rename(name, tensor) for name, tensor in stored.items()), directory / FILE, {"format": "pt"})


def old(name, tensor):
    for new, before in OLD_NAMES.items():
        name = name.replace(f".{new}.", f".{before}.") if ".attentions.0." in name else name
    return name, tensor


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [UNET, UNET_2, AUTOENCODER])
def test_what_is_exported_is_what_diffusers_saved_bit_for_bit(config, dtype, tmp_path):
    torch_model = saved(config, tmp_path / "in").to(dtype)
    torch_model.save_pretrained(tmp_path / "in")
    model, params = opened(tmp_path / "in")
    exported = export_model(model, params, tmp_path / "out", source=tmp_path / "in")
    assert [file.name for file in exported.files] == ["config.json", FILE]
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(
        (tmp_path / "in/config.json").read_text()
    )
    same_bits(torch_model, tmp_path / "out")


def test_every_tensor_is_read_into_a_parameter_and_back(tmp_path):
    torch_model = saved(UNET_2, tmp_path)
    found, expected = tensors(*opened(tmp_path)), torch_model.state_dict()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key].numpy()) for key in expected)


def test_old_names_and_convolutions_of_one_pixel_are_the_same_parameters(tmp_path):
    torch_model = saved(AUTOENCODER, tmp_path)
    renamed(tmp_path, lambda name, one: old(name, one[:, :, None, None] if name.endswith(_PIXEL) else one))
    assert "encoder.mid_block.attentions.0.proj_attn.weight" in load_file(tmp_path / FILE)
    found, expected = tensors(*opened(tmp_path)), torch_model.state_dict()
    assert all(np.array_equal(found[key], expected[key].numpy()) for key in expected)


@pytest.mark.slow
def test_a_checkpoint_with_old_names_keeps_them(tmp_path):
    torch_model = saved(AUTOENCODER, tmp_path / "in")
    renamed(tmp_path / "in", old)
    export_model(*opened(tmp_path / "in"), tmp_path / "out", source=tmp_path / "in")
    assert load_file(tmp_path / "out" / FILE).keys() == load_file(tmp_path / "in" / FILE).keys()
    same_bits(torch_model, tmp_path / "out")


def test_files_in_half_precision_are_found_where_they_alone_are_there(tmp_path):
    torch_model = saved(AUTOENCODER, tmp_path / "vae").half()
    torch_model.save_pretrained(tmp_path / "vae", variant="fp16")
    (tmp_path / "vae" / FILE).unlink()
    assert (tmp_path / "vae/diffusion_pytorch_model.fp16.safetensors").is_file()
    _, params = opened(tmp_path / "vae")
    kernel = params["encoder"]["conv_in"]["kernel"]
    expected = torch_model.encoder.conv_in.weight.detach().float().numpy().transpose(2, 3, 1, 0)
    assert kernel.dtype == np.float32
    assert np.array_equal(jax.device_get(kernel), expected)


def test_what_does_not_fit_is_named(tmp_path):
    saved(AUTOENCODER, tmp_path)
    model, _ = opened(tmp_path)
    stored = load_file(tmp_path / FILE)
    del stored["decoder.conv_in.bias"]
    stored |= {"quant_conv.bias": torch.zeros(3), "loss.logvar": torch.zeros(1)}
    save_file(stored, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        check_checkpoint(model, tmp_path)
    assert [problem.problem for problem in caught.value.problems] == [
        "1 tensors of another shape than the config says: quant_conv.bias [3] instead of [8]",
        "1 parameters that the checkpoint lacks: decoder.conv_in.bias",
        "1 tensors that the model has no place for: loss.logvar",
    ]
