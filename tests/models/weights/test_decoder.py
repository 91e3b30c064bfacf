"""Checkpoints in the decoder: every family bit for bit, in pieces and in shards; and what is refused."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from redco_cli import load_model
from redco_cli.errors import ModelError
from redco_cli.models.decoder.model import DecoderModel
from redco_cli.models.flax.model import HfFlaxModel
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights import files as checkpoints
from redco_cli.models.weights import fit as load_fit
from redco_cli.models.weights import shards as load_shards
from redco_cli.models.weights.load import check_checkpoint, load_params
from redco_cli.models.weights.shards import Source, fill
from redco_cli.models.weights.table import to_params
from redco_cli.recipe.schema import ModelSection
from tests.models.decoder import pairs
from tests.models.decoder.pairs import families_and, pair, where

TYPES = (torch.float32, torch.bfloat16, torch.float16)
UP, HEAD = "model.layers.1.mlp.up_proj.weight", "lm_head.weight"


def saved(family, directory, dtype=torch.float32, **changed):
    """A random PyTorch model in `directory`, and the model that loads it."""
    models = pair(family, **changed)
    models.torch_model.to(dtype).save_pretrained(directory)
    return models, resolve_model(ModelSection(name=str(directory), implementation="decoder"), where=where)


def assert_loaded(loaded, models):
    """Parameters are those that the whole state gives, in float32."""
    state = {name: tensor.float().numpy() for name, tensor in models.torch_model.state_dict().items()}
    expected, found = (flatten_dict(tree, sep="/") for tree in (to_params(state, models.config), loaded))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].dtype == jnp.float32
        np.testing.assert_array_equal(found[path], array, err_msg=path)


def mesh_of(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def split_twice(leaf, mesh):
    """The last dims that divide over `tensor` and `fsdp`."""
    axes = [None] * leaf.ndim
    for name in ("tensor", "fsdp"):
        for dim in reversed(range(leaf.ndim)):
            if axes[dim] is None and leaf.shape[dim] % mesh.shape[name] == 0:
                axes[dim] = name
                break
    return NamedSharding(mesh, PartitionSpec(*axes))


@pytest.mark.parametrize(("family", "dtype"), families_and(TYPES))
def test_every_tensor_finds_its_place(family, dtype, tmp_path, monkeypatch):
    models, model = saved(family, tmp_path, dtype, tie_word_embeddings=False)
    loaded = load_params(model, tmp_path)
    assert (loaded.fresh, loaded.unused) == ((), ())
    assert_loaded(loaded.params, models)

    monkeypatch.setattr(load_shards, "_turn", lambda piece, dtype, order, _: piece.transpose(order).astype(dtype))
    monkeypatch.setattr(load_shards, "_SMALL_BYTES", 0)
    assert_loaded(load_params(model, tmp_path).params, models)


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3_moe"])
def test_large_arrays_are_filled_in_pieces(family, tmp_path, monkeypatch):
    models, model = saved(family, tmp_path, torch.bfloat16, tie_word_embeddings=False)
    monkeypatch.setattr(load_shards, "_SMALL_BYTES", 0)
    monkeypatch.setattr(load_shards, "PIECE_BYTES", 8192)
    monkeypatch.setattr(checkpoints, "_MAPPED_BYTES", 1000)
    mesh = mesh_of(fsdp=2, tensor=4)
    shardings = jax.tree.map(lambda leaf: split_twice(leaf, mesh), model.abstract)
    params = load_params(model, tmp_path, shardings).params
    assert_loaded(params, models)
    jax.tree.map(lambda leaf, wanted: leaf.sharding.is_equivalent_to(wanted, leaf.ndim) or 1 / 0, params, shardings)


def test_pieces_are_no_larger_than_asked_for(monkeypatch):
    monkeypatch.setattr(load_shards, "_SMALL_BYTES", 0)
    monkeypatch.setattr(load_shards, "PIECE_BYTES", 4 * 8 * 24)
    stored = np.arange(5 * 16 * 12, dtype=np.float16).reshape(5, 16, 12)
    boxes = []

    def read(box):
        boxes.append([part.stop - part.start for part in box])
        first, second, third = box
        return np.ascontiguousarray(stored[first, third, second])

    mesh = mesh_of(fsdp=8)
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    array = fill(Source((5, 12, 16), np.float32, (0, 2, 1), (0, 2, 1), read), sharding)
    np.testing.assert_array_equal(array, stored.transpose(0, 2, 1).astype(np.float32))
    assert array.sharding == sharding
    assert max(map(np.prod, boxes)) == 24  # one layer, of its 16 columns the 2 of a device, whole
    assert len(boxes) == 5 * 8


def test_names_without_the_base_model_are_known(tmp_path):
    models, model = saved("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_loaded(load_params(model, tmp_path).params, models)


def test_a_head_of_another_task_is_unused(tmp_path):
    models, model = saved("gpt2", tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"score.weight": np.zeros((2, 24), np.float32)}))
    loaded = load_params(model, tmp_path)
    assert loaded.unused == ("score.weight",)
    assert_loaded(loaded.params, models)


def test_a_bias_that_the_head_lacks_is_not_of_another_head(tmp_path):
    _, model = saved("qwen2", tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.bias": np.zeros(64, np.float32)}))
    with pytest.raises(ModelError, match=r"lm_head\.bias"):
        load_params(model, tmp_path)


def test_whole_numbers_are_no_weights(tmp_path):
    _, model = saved("llama", tmp_path)
    change(tmp_path, lambda tensors: tensors.update({UP: np.ones(tensors[UP].shape, np.int8)}))
    with pytest.raises(ModelError) as caught:
        load_params(model, tmp_path)
    assert str(caught.value) == (
        f"{model.where}: 1 tensors hold no floating-point numbers: {UP}\n"
        "  -> choose weights in bfloat16, float16 or float32"
    )


def change(directory, edit):
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path, monkeypatch):
    models, model = saved("llama", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    monkeypatch.setattr(load_fit, "PIECE_BYTES", 4 * 24 * 5)
    change(tmp_path, lambda tensors: tensors.update({HEAD: tensors["model.embed_tokens.weight"]}))
    assert_loaded(load_params(model, tmp_path).params, models)

    def edit(tensors):
        tensors[HEAD] = tensors[HEAD].copy()
        tensors[HEAD][-1, -1] += 1

    change(tmp_path, edit)
    check_checkpoint(model, tmp_path)  # headers do not tell
    with pytest.raises(ModelError) as caught:
        load_params(model, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: lm_head.weight differs from model.embed_tokens.weight, though the config says that they are one "
        "tensor\n  -> set tie_word_embeddings: false in its config.json, or save the model again"
    )


def spoil(tensors):
    for layer in (0, 1):
        for name in ("q_proj", "k_proj", "v_proj"):
            del tensors[f"model.layers.{layer}.self_attn.{name}.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors[UP] = np.ascontiguousarray(tensors[UP].T)


@pytest.mark.parametrize("refuse", [load_params, check_checkpoint])
def test_all_misfits_are_named_at_once(tmp_path, refuse):
    _, model = saved("llama", tmp_path)
    change(tmp_path, spoil)
    with pytest.raises(ModelError) as caught:
        refuse(model, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: 1 tensors of another shape than the config says: {UP} [24, 32] instead of [32, 24]\n"
        "  -> the checkpoint and config.json do not fit\n"
        f"{tmp_path}: 6 parameters that the checkpoint lacks: model.layers.0.self_attn.k_proj.weight, "
        "model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.v_proj.weight, "
        "model.layers.1.self_attn.k_proj.weight, model.layers.1.self_attn.q_proj.weight and 1 more\n"
        "  -> choose a checkpoint for this model.task\n"
        f"{tmp_path}: 1 tensors that the model has no place for: model.layers.7.mlp.up_proj.weight\n"
        "  -> choose a checkpoint of this model type"
    )


def test_a_head_that_is_not_tied_must_be_there(tmp_path):
    _, model = saved("llama", tmp_path)
    change(tmp_path, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(ModelError) as caught:
        load_params(model, tmp_path, rng=jax.random.key(0))
    assert str(caught.value) == (
        f"{tmp_path}: 1 parameters that the checkpoint lacks: lm_head.weight\n"
        "  -> choose a checkpoint for this model.task"
    )


def test_an_index_that_promises_too_much_is_refused(tmp_path):
    models, model = saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    models.torch_model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert_loaded(load_params(model, tmp_path).params, models)
    index = tmp_path / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"]["model.other"] = known["weight_map"][UP]
    index.write_text(json.dumps(known))
    with pytest.raises(ModelError) as caught:
        check_checkpoint(model, tmp_path)
    assert str(caught.value) == (
        f"{index}: 1 tensors that the index names are in none of its files: model.other\n"
        "  -> download or save the model again"
    )


def test_types_of_quantised_weights_are_refused(tmp_path):
    _, model = saved("llama", tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_params(model, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: 1 tensors of a type that is not read: {UP} (F8_E4M3)\n"
        "  -> choose weights in bfloat16, float16 or float32"
    )


@pytest.mark.parametrize(("family", "implementation"), [("qwen2", "auto"), ("gpt2", "decoder"), ("gpt2", "hf_flax")])
def test_load_model_agrees_with_pytorch(tmp_path, family, implementation):
    models, _ = saved(family, tmp_path)
    model, params = load_model(str(tmp_path), implementation=implementation)
    assert isinstance(model, HfFlaxModel if implementation == "hf_flax" else DecoderModel)
    batch = pairs.batch()
    logits = jax.jit(model, compiler_options=pairs.QUICK)(params, batch.input_ids, batch.attention_mask)
    expected, _ = pairs.torch_results(models, batch)
    assert pairs.largest_difference(np.asarray(logits), expected, batch) < 1e-4


@pytest.mark.parametrize("implementation", ["decoder", "hf_flax"])
def test_load_model_splits_over_a_mesh(tmp_path, implementation):
    models, _ = saved("gpt2", tmp_path, n_embd=32, n_head=8, vocab_size=64)
    model, params = load_model(str(tmp_path), mesh=mesh_of(fsdp=2, tensor=4), implementation=implementation)
    batch = pairs.batch()
    kernel = (
        params["layers"]["mlp"]["up"]["kernel"]
        if implementation == "decoder"
        else (params["transformer"]["h"]["0"]["mlp"]["c_fc"]["kernel"])
    )
    spec = (None, "fsdp", "tensor") if implementation == "decoder" else (("tensor", "fsdp"),)
    assert tuple(kernel.sharding.spec) == spec
    logits = jax.jit(model, compiler_options=pairs.QUICK)(params, batch.input_ids, batch.attention_mask)
    expected, _ = pairs.torch_results(models, batch)
    assert pairs.largest_difference(np.asarray(logits), expected, batch) < 1e-4


def test_on_other_axes_parameters_are_whole(tmp_path):
    saved("gpt2", tmp_path)
    _, params = load_model(str(tmp_path), mesh=mesh_of(model=8))
    assert {(len(leaf.devices()), leaf.is_fully_replicated) for leaf in jax.tree.leaves(params)} == {(8, True)}


MEASURE = """
import sys
sys.modules["torch"] = None
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pathlib import Path
from redco_cli.models.weights import files as checkpoints
from redco_cli.models.weights import shards as load_shards
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.recipe.schema import ModelSection
directory, piece, devices = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
load_shards.PIECE_BYTES = checkpoints._MAPPED_BYTES = piece
model = resolve_model(ModelSection(name=directory, implementation="decoder"), where=str)
mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
def split(leaf):
    large = max(range(leaf.ndim), key=lambda dim: (leaf.shape[dim] % devices == 0, leaf.shape[dim]))
    return NamedSharding(mesh, PartitionSpec(*(None,) * large, "fsdp"))
def memory(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
before = memory("VmRSS")
params = jax.block_until_ready(load_params(model, Path(directory), jax.tree.map(split, model.abstract)).params)
print(memory("VmHWM") - before - sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def random_llama(directory, **sizes):
    """A checkpoint in bfloat16, without PyTorch's model in memory."""
    from transformers import LlamaConfig

    from redco_cli.models.hf_config import decoder_config
    from redco_cli.models.weights.table import tensor_table

    config = LlamaConfig(**sizes)
    config.save_pretrained(directory)
    rng = np.random.default_rng(0)
    tensors = {}
    for row in tensor_table(decoder_config(config, where=where)):
        for _, name in row.tensors():
            bits = rng.integers(0, 2**16, row.stored_shape, np.uint16)
            tensors[name] = ((bits & 0x807F) | 0x3C80).view(jnp.bfloat16)  # 0.016 to 0.031, either sign
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def beyond_parameters(directory, piece, devices):
    """Bytes by which the peak of a loading process exceeds that before, and the parameters."""
    command = [sys.executable, "-c", MEASURE, str(directory), str(piece), str(devices)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_memory_is_that_of_the_parameters_and_a_few_pieces(tmp_path):
    """112 million parameters: 448 MB, 224 MB on disk, and the largest array 192 MB."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 8}
    random_llama(tmp_path, **sizes, num_key_value_heads=8, vocab_size=6000, tie_word_embeddings=True)
    assert beyond_parameters(tmp_path, 16 * 2**20, 8) < 120e6


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_memory_of_a_billion_parameters(tmp_path, devices):
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    random_llama(tmp_path, **sizes, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True)
    assert beyond_parameters(tmp_path, load_shards.PIECE_BYTES, devices) < 2 * 2**30
