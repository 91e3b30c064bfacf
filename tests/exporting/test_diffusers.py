"""diffusers loads the adapter of a U-Net that is written here, and what it writes is read: the same outputs."""

import json
import warnings
from functools import cache

import jax
import numpy as np
import peft
import pytest
import torch

from redco_cli.adapters.merging import LowRank
from redco_cli.adapters.model import Adapter, adapter_of
from redco_cli.adapters.peft import read_peft
from redco_cli.errors import ModelError
from redco_cli.exporting.adapter import export_adapter
from redco_cli.exporting.diffusers import lora_file
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from redco_cli.recipe.sections.adapter import AdapterSection
from tests.models.diffusion.tiny import AUTOENCODER, UNET, UNET_2, channels_first, channels_last, latents, opened, saved

with warnings.catch_warnings():  # of what diffusers imports
    warnings.simplefilter("ignore")
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from diffusers.training_utils import _collate_lora_metadata
    from diffusers.utils import convert_state_dict_to_diffusers

UNETS = {"1.x": UNET, "2.x": UNET_2}
FILE = "pytorch_lora_weights.safetensors"
SMALLEST = {
    "_class_name": "UNet2DConditionModel",
    "block_out_channels": [8],
    "down_block_types": ["CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D"],
    "cross_attention_dim": 4,
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
AT = "down_blocks_0/attentions_0"
BLOCK, IN_TORCH = f"{AT}/transformer_blocks_0", "down_blocks.0.attentions.0.transformer_blocks.0"
UP, GATE, PROJ = f"{BLOCK}/ff/up/kernel", f"{BLOCK}/ff/gate/kernel", f"{AT}/proj_in/kernel"


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    """A U-Net of one resolution, without parameters."""
    directory = tmp_path_factory.mktemp("unet")
    (directory / "config.json").write_text(json.dumps(SMALLEST))
    return resolve_model(ModelSection(name=str(directory)), where=str)


def by_hand(model, paths, **section):
    """An adapter of some weights, and arbitrary factors."""
    sizes = {UP: (8, 32), GATE: (8, 32), PROJ: (8, 8)}
    generator = np.random.default_rng(0)
    own = {}
    for path, how in paths.items():
        node = own
        for word in path.split("/"):
            node = node.setdefault(word, {})
        shapes = {"A": (sizes[path][0], how.rank), "B": (how.rank, sizes[path][1])}
        shapes |= {"magnitude": sizes[path][1:]} if section.get("type") == "dora" else {}
        node |= {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return Adapter(AdapterSection(**section), model.abstract, {}, paths, ()), own


def at(own, path):
    for word in path.split("/"):
        own = own[word]
    return own


def test_halves_stand_side_by_side_and_pixels_have_four_dims(smallest):
    adapter, own = by_hand(smallest, {UP: LowRank(2, 1.5), GATE: LowRank(3, 0.5), PROJ: LowRank(2, 2.0)})
    tensors, header = lora_file(adapter, own, smallest)
    name = f"unet.{IN_TORCH}.ff.net.0.proj"
    a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    assert (a.shape, b.shape) == ((5, 8), (64, 5))
    np.testing.assert_array_equal(a, np.concatenate([at(own, path)["A"].T for path in (UP, GATE)]))
    assert not b[:32, 2:].any()
    assert not b[32:, :2].any()
    said = json.loads(header["lora_adapter_metadata"])
    alpha, rank = (
        {one: said[f"unet.{pattern}"].get(one, said[f"unet.{usual}"]) for one in said["unet.target_modules"]}
        for pattern, usual in (("alpha_pattern", "lora_alpha"), ("rank_pattern", "r"))
    )
    pixels = "down_blocks.0.attentions.0.proj_in"
    assert rank == {f"{IN_TORCH}.ff.net.0.proj": 5, pixels: 2}
    assert alpha == {f"{IN_TORCH}.ff.net.0.proj": 7.5, pixels: 4}
    each = [how * (at(own, path)["A"] @ at(own, path)["B"]).T for path, how in ((UP, 1.5), (GATE, 0.5))]
    np.testing.assert_allclose(7.5 / 5 * (b @ a), np.concatenate(each), rtol=1e-5, atol=1e-6)
    assert [tensors[f"unet.{pixels}.lora_{kind}.weight"].shape for kind in "AB"] == [(2, 8, 1, 1), (8, 2, 1, 1)]


def test_what_has_no_place_is_refused(smallest):
    adapter, own = by_hand(smallest, {UP: LowRank(2, 1.0)}, type="dora")
    with pytest.raises(ModelError, match=r"DoRA has a magnitude for each output, but not for .*ff/gate/kernel"):
        lora_file(adapter, own, smallest)
    trained = Adapter(AdapterSection(), smallest.abstract, {}, {}, ("conv_out/kernel",))
    with pytest.raises(ModelError, match=r"conv_out/kernel would be trained itself, for which diffusers' file"):
        lora_file(trained, {}, smallest)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a U-Net, the U-Net and its parameters, and its compiled program; each made once."""

    @cache
    def made(kind):
        directory = tmp_path_factory.mktemp(kind)
        saved(UNETS[kind], directory)
        model, params = opened(directory)
        return directory, model, params, jax.jit(model)

    return made


def outputs(unet):
    noisy, timestep, states = latents()
    with torch.no_grad():
        return channels_last(
            unet.eval()(channels_first(noisy), torch.from_numpy(timestep), torch.from_numpy(states)).sample
        )


SECTIONS = {
    "lora": {"alpha": 5},
    "dora": {"alpha": 5, "type": "dora"},
    "rslora of halves": {
        "alpha": 5,
        "rslora": True,
        "targets": [".*/(up|gate|proj_in)/kernel"],
        "alpha_pattern": {".*gate.*": 7},
        "rank_pattern": {".*/up/.*": 2},
    },
    "one half": {"alpha": 2, "targets": [".*/(gate|to_q|to_out)/kernel"], "init": "pissa"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("kind", UNETS)
def test_diffusers_loads_it_and_saves_it_again(kind, section, base, tmp_path):
    directory, model, params, run = base(kind)
    adapter = adapter_of(model, AdapterSection(rank=3, **SECTIONS[section]), str)
    generator = np.random.default_rng(0)
    own = adapter.begun(params, adapter.init(jax.random.key(0)))
    own = jax.tree.map(lambda leaf: leaf + 0.1 * generator.normal(size=leaf.shape).astype(np.float32), own)
    done = export_adapter(adapter, own, params, model, tmp_path / "out", name=None)
    assert [file.name for file in done.files] == [FILE]
    expected = np.asarray(run(adapter.merged(params, own), *latents()))
    assert np.abs(expected - run(params, *latents())).max() > 0.1
    unet = UNet2DConditionModel.from_pretrained(directory)
    unet.load_lora_adapter(tmp_path / "out", prefix="unet", weight_name=FILE, adapter_name="one")
    np.testing.assert_allclose(outputs(unet), expected, atol=1e-4)
    unet.save_lora_adapter(tmp_path / "again", adapter_name="one")
    again, values = read_peft(tmp_path / "again", model)
    np.testing.assert_allclose(run(again.merged(params, values), *latents()), expected, atol=1e-4)


TARGETS = ["to_q", "to_out.0", "proj_in", "ff.net.0.proj", "ff.net.2", "time_emb_proj"]


def save_as(form, unet, directory):
    """What loops of training save of a U-Net with an adapter."""
    if form == "peft":
        unet.save_pretrained(directory)
        return
    state = peft.get_peft_model_state_dict(unet, adapter_name="default")
    state = convert_state_dict_to_diffusers(state) if form == "example script" else state
    said = None if form == "no header" else _collate_lora_metadata({"unet": unet})
    StableDiffusionPipeline.save_lora_weights(directory, unet_lora_layers=state, **(said or {}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("lora", "save_lora_weights"),
        ("lora", "example script"),
        ("lora", "no header"),
        ("rslora", "save_lora_weights"),
        ("rslora", "peft"),
        ("dora", "save_lora_weights"),
        ("dora", "example script"),
    ],
)
def test_what_diffusers_writes_is_read(kind, form, base, tmp_path):
    directory, model, params, run = base("1.x")
    unet = UNet2DConditionModel.from_pretrained(directory)
    settings = {f"use_{kind}": True} if kind != "lora" else {}
    alpha = 4 if form == "no header" else 6
    config = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=TARGETS, **settings)
    if form == "peft":
        unet = peft.get_peft_model(unet, config)
    else:
        unet.add_adapter(config)
    torch.manual_seed(0)
    for name, parameter in unet.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    save_as(form, unet, tmp_path)
    expected = outputs(unet)
    adapter, own = read_peft(tmp_path, model)
    assert adapter.section.type == ("dora" if kind == "dora" else "lora")
    assert np.abs(expected - run(params, *latents())).max() > 0.1
    np.testing.assert_allclose(run(adapter.merged(params, own), *latents()), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_of_this_u_net_is_named(base, tmp_path):
    directory, model, *_ = base("1.x")
    unet = UNet2DConditionModel.from_pretrained(directory)
    unet.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "conv_in"]))
    unet.save_lora_adapter(tmp_path / "convolution", adapter_name="default")
    with pytest.raises(ModelError, match=r"lora_A of conv_in has the shape \[4, 4, 3, 3\], and is no matrix"):
        read_peft(tmp_path / "convolution", model)
    pair = {"x.lora_A.weight": torch.ones(4, 8), "x.lora_B.weight": torch.ones(8, 4)}
    StableDiffusionPipeline.save_lora_weights(tmp_path / "other", pair)
    with pytest.raises(ModelError, match="it holds x, which this model has not"):
        read_peft(tmp_path / "other", model)
    at_module = "mid_block.attentions.0.proj_in"
    whole = {f"{at_module}.lora_A.weight": torch.ones(4, 64), f"{at_module}.lora_B.weight": torch.ones(64, 4)}
    StableDiffusionPipeline.save_lora_weights(tmp_path / "text", whole, pair)
    with pytest.raises(ModelError, match=r"it holds text_encoder\.x, which this model has not"):
        read_peft(tmp_path / "text", model)
    saved(AUTOENCODER, tmp_path / "vae")
    vae, params = opened(tmp_path / "vae")
    adapter = adapter_of(vae, AdapterSection(rank=2, targets=(".*/to_q/kernel",)), str)
    with pytest.raises(ModelError, match="an adapter of a AutoencoderKL has no form here that others read"):
        export_adapter(adapter, adapter.init(jax.random.key(0)), params, vae, tmp_path / "out", name=None)
