"""The file of an adapter that diffusers wrote: the names of its tensors, old and new, and what its header says."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from redco_cli.adapters.diffusers import FILE, METADATA
from redco_cli.adapters.peft import is_peft
from redco_cli.adapters.stored import read_files
from redco_cli.errors import ModelError

Q, OUT = "down_blocks.0.attentions.0.attn1.to_q", "down_blocks.0.attentions.0.attn1.to_out.0"
A, B = np.arange(12, dtype=np.float32).reshape(2, 6), np.ones((4, 2), np.float32)
SAID = {"r": 2, "lora_alpha": 5, "alpha_pattern": {"to_out.0": 3}, "use_rslora": False}


def written(directory, tensors, said=None):
    header = {} if said is None else {METADATA: said if isinstance(said, str) else json.dumps(said)}
    save_file(tensors, directory / FILE, {"format": "pt", **header})
    return directory


def named(template, out="to_out.0"):
    """The factors of two modules, by names such as `unet.{}.lora_{}.weight`."""
    at = (Q, OUT.removesuffix("to_out.0") + out)
    letters = ("down", "up") if "down" in template else ("A", "B")
    template = template.replace("down", "{}")
    return {template.format(one, letter): part for one in at for letter, part in zip(letters, (A, B), strict=True)}


FORMS = {
    "save_lora_weights": named("unet.{}.lora_{}.weight"),
    "its example scripts": named("unet.{}.lora.down.weight"),
    "older than PEFT": {
        name.replace(".to_", ".processor.to_"): one for name, one in named("unet.{}_lora.down.weight", "to_out").items()
    },
    "save_lora_adapter": named("{}.lora_{}.weight"),
    "of a convolution": {name: one[:, :, None, None] for name, one in named("unet.{}.lora_{}.weight").items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_factors(form, tmp_path):
    files = read_files(written(tmp_path, FORMS[form]))
    assert is_peft(tmp_path)
    assert files.modules.keys() == {Q, OUT}
    assert files.rest == {}
    for factors in files.modules.values():
        np.testing.assert_array_equal(factors["A"], A)
        np.testing.assert_array_equal(factors["B"], B)
    assert files.scale(Q) == 1  # alpha is the rank where nobody says otherwise


@pytest.mark.parametrize("prefix", ["unet.", ""])
def test_the_header_tells_the_scales(prefix, tmp_path):
    said = {f"{prefix}{key}": value for key, value in SAID.items()} | {"text_encoder.lora_alpha": 9}
    files = read_files(written(tmp_path, named(f"{prefix}{{}}.lora_{{}}.weight"), said))
    assert (files.scale(Q), files.scale(OUT)) == (2.5, 1.5)


def test_what_is_not_of_the_u_net_keeps_its_name(tmp_path):
    tensors = {**FORMS["save_lora_weights"], "text_encoder.q_proj.lora_A.weight": A}
    tensors |= {"text_encoder.q_proj.lora_B.weight": B}
    assert "text_encoder.q_proj" in read_files(written(tmp_path, tensors)).modules


REFUSED = {
    "kohya": (
        {"lora_unet_mid_block_to_q.lora_down.weight": A},
        None,
        "names of kohya's scripts.*\n.*save_lora_adapter",
    ),
    "ranks": (
        {**FORMS["save_lora_weights"], "unet.x.lora_A.weight": A[:1], "unet.x.lora_B.weight": B[:, :1]},
        None,
        "it has ranks 1, 2, and no lora_adapter_metadata that tells their alphas",
    ),
    "nothing": ({"unet.conv_in.weight": A}, None, "it has no lora_A, and no lora_adapter_metadata"),
    "no json": (FORMS["save_lora_weights"], "{", "holds no adapter that can be read"),
    "no mapping": (FORMS["save_lora_weights"], "[]", "peft_type None is not read"),
    "another kind": (FORMS["save_lora_weights"], {"unet.peft_type": "LOHA"}, "peft_type LOHA is not read"),
    "other model": (FORMS["save_lora_weights"], {"text_encoder.r": 2}, "r is None, which is no positive number"),
    "bias": (FORMS["save_lora_weights"], {"unet.lora_bias": True}, "lora_bias is not read"),
    "3 x 3": (
        {"unet.conv_in.lora_A.weight": np.ones((2, 4, 3, 3), np.float32), "unet.conv_in.lora_B.weight": B},
        None,
        r"lora_A of conv_in has the shape \[2, 4, 3, 3\], and is no matrix",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(case, tmp_path):
    tensors, said, problem = REFUSED[case]
    with pytest.raises(ModelError, match=rf"{problem}"):
        read_files(written(tmp_path, tensors, said))


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ModelError, match=r"holds no adapter that can be read: .*\n.*pytorch_lora_weights.safetensors"):
        read_files(tmp_path)
