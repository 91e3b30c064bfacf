"""Heads and embeddings of the decoder, adapted or trained themselves, tied or not: PEFT and redco mean the same."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redco_cli.adapters.model import adapter_of
from redco_cli.adapters.peft import read_peft
from redco_cli.errors import ModelError, RecipeError
from redco_cli.exporting.peft import peft_files
from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from redco_cli.recipe.sections.adapter import AdapterSection
from tests.exporting.test_peft import IDS, LAYERS, LLAMA

Q = "layers/attention/q/kernel"
SETTINGS = LLAMA | LAYERS


def model_of(kind="llama", **settings):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 64} if kind == "gpt2" else SETTINGS
    return resolve_model(ModelSection(config={"model_type": kind, **sizes, **settings}), where=str)


def made(model, **section):
    """An adapter of a model with arbitrary values, and the base."""
    adapter = adapter_of(model, AdapterSection(rank=2, **section), str)
    base = jax.jit(model.init)(jax.random.key(0))
    own = jax.tree.map(
        lambda leaf: jnp.asarray(np.random.default_rng(leaf.size).normal(size=leaf.shape), "float32"), adapter.abstract
    )
    return adapter, own, base


def written(files, directory):
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(files["adapter_config.json"]))
    save_file(files["adapter_model.safetensors"], directory / "adapter_model.safetensors")
    return directory


CASES = {
    "head and embedding adapted": ({}, {"targets": (Q, "head", "embedding")}),
    "both trained": ({}, {"targets": (Q,), "modules_to_save": ("head", "embedding", ".*norm/scale")}),
    "tied and trained": ({"tie_word_embeddings": True}, {"targets": (Q,), "modules_to_save": ("embedding",)}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_read(case, tmp_path):
    settings, section = CASES[case]
    model = model_of(**settings)
    adapter, own, base = made(model, **section)
    read, again = read_peft(written(peft_files(adapter, own, base, model, None), tmp_path / "a"), model)
    assert set(read.saved) == set(adapter.saved)
    one, other = (which.merged(base, values) for which, values in ((adapter, own), (read, again)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), one, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_peft_computes_the_same(case, tmp_path):
    import peft
    import torch
    import transformers

    from redco_cli import load_model

    settings, section = CASES[case]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SETTINGS, **settings)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    model, base = load_model(tmp_path / "base")
    adapter, own, _ = made(model, **section)
    expected = model(adapter.merged(base, own), input_ids=IDS)
    directory = written(peft_files(adapter, own, base, model, None), tmp_path / "a")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(theirs, directory).eval()
    with torch.no_grad():
        np.testing.assert_allclose(adapted(torch.tensor(IDS)).logits.numpy(), expected, atol=2e-5)
    adapted.save_pretrained(tmp_path / "again")
    read, again = read_peft(tmp_path / "again", model)
    np.testing.assert_allclose(model(read.merged(base, again), input_ids=IDS), expected, atol=2e-5)


def changed(directory, change, **config):
    file = directory / "adapter_model.safetensors"
    found = load_file(file)
    change(found)
    save_file(found, file)
    said = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**said, **config}))


@pytest.mark.slow
def test_what_ties_apart_is_refused(tmp_path):
    tied = model_of(tie_word_embeddings=True)
    with pytest.raises(RecipeError, match=r"embedding is used in several ways .*\n.*modules_to_save trains it"):
        made(tied, targets=("embedding",))
    adapter, own, base = made(tied, targets=(Q,), modules_to_save=("embedding",))
    files = peft_files(adapter, own, base, tied, None)
    assert files["adapter_config.json"]["ensure_weight_tying"] is True
    assert files["adapter_config.json"]["modules_to_save"] == ["model.embed_tokens"]
    directory = written(files, tmp_path / "a")
    changed(directory, lambda found: found["base_model.model.lm_head.weight"].fill(0))
    with pytest.raises(
        ModelError, match=r"trains lm_head.weight apart from the embedding, and this model ties the two"
    ):
        read_peft(directory, tied)
    changed(directory, lambda found: found.pop("base_model.model.lm_head.weight"), ensure_weight_tying=False)
    with pytest.raises(ModelError, match=r"it trains embedding for one of its uses, and this model ties it to another"):
        read_peft(directory, tied)
    factors = {
        f"base_model.model.model.embed_tokens.lora_embedding_{x}": np.ones(s)
        for x, s in (("A", (2, 64)), ("B", (16, 2)))
    }
    changed(directory, lambda found: (found.pop("base_model.model.model.embed_tokens.weight"), found.update(factors)))
    with pytest.raises(ModelError, match=r"it adapts embedding, which this model uses in several ways"):
        read_peft(directory, tied)
    gpt2 = model_of("gpt2")
    with pytest.raises(ModelError, match=r"PEFT ties no transformer.wte\n.*without --adapter"):
        peft_files(*made(gpt2, targets=(".*/q/kernel",), modules_to_save=("embedding",)), gpt2, None)


@pytest.mark.slow
def test_a_module_that_is_trained_in_part_is_refused(tmp_path):
    phi3 = model_of("phi3", pad_token_id=0)
    section = {"targets": (Q,), "modules_to_save": ("layers/attention/v/kernel",)}
    with pytest.raises(ModelError, match=r"in one, of which layers/attention/q/kernel would have an adapter too"):
        peft_files(*made(phi3, **section), phi3, None)
    llama = model_of()
    made_of = made(llama, targets=(Q,), modules_to_save=("layers/attention/v/kernel",))
    directory = written(peft_files(*made_of, llama, None), tmp_path / "a")
    name = "base_model.model.model.layers.1.self_attn.v_proj.weight"
    changed(directory, lambda found: found.update({name: np.zeros((3, 3), np.float32)}))
    with pytest.raises(ModelError, match=r"v_proj.weight has the shape \[3, 3\], and that of the model has \[8, 16\]"):
        read_peft(directory, llama)
    changed(directory, lambda found: found.pop(name))
    with pytest.raises(ModelError, match=r"trains layers/attention/v/kernel itself in some layers"):
        read_peft(directory, llama)
