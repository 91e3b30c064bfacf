"""Checkpoints on disk: what loads, what is born fresh, what is refused, and that torch is not needed."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from redco_cli import load_model
from redco_cli.errors import ModelError
from redco_cli.models.flax.naming import place_tensors
from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.load import load_params
from redco_cli.recipe.schema import ModelSection
from tests.models.flax.tiny import config_for, inputs_for, redco_outputs, save_torch, torch_outputs, where

BASE = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_torch(config_for("bert", "masked_lm"), "masked_lm", tmp_path_factory.mktemp("bert"))


def changed(saved, directory, change):
    """A copy of the checkpoint with its tensors changed by `change`, and the model that reads it."""
    tensors = load_file(saved.directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return resolve_model(saved.section, where=where)


def as_arrays(params):
    return {"/".join(path): np.asarray(leaf) for path, leaf in flatten_dict(params).items()}


def test_masks_of_attention_and_of_cross_attention_are_no_parameters():
    """Older checkpoints of GPT-2 have them beside its weights, such as `nlpconnect/vit-gpt2-image-captioning`."""
    block = "decoder.transformer.h.0."
    tree = tuple(f"{block}{name}.c_attn.bias" for name in ("attn", "crossattention"))
    masks = {f"{block}{name}": (1, 1, 8, 8) for name in ("attn.bias", "crossattention.bias")}
    masks |= {f"{block}{name}": () for name in ("attn.masked_bias", "crossattention.masked_bias")}
    found = place_tensors({**dict.fromkeys(tree, (4,)), **masks}, [tuple(path.split(".")) for path in tree], "model")
    assert (found.missing, found.unused, found.extra, len(found.sources)) == ((), (), (), 2)


def test_sharded_files_load_as_one(saved, tmp_path):
    saved.torch_model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = resolve_model(saved.section, where=where)
    whole, parts = load_params(model, saved.directory).params, load_params(model, tmp_path).params
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_half_precision_becomes_float32(saved, tmp_path):
    tensors = load_file(saved.directory / "model.safetensors")
    exact = tensors[BASE]

    def shorten(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(jnp.bfloat16 if "encoder" in name else np.float16)

    model = changed(saved, tmp_path, shorten)
    arrays = as_arrays(load_params(model, tmp_path).params)
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    kernel = arrays["bert/encoder/layer/0/attention/self/query/kernel"]
    np.testing.assert_array_equal(kernel, exact.astype(jnp.bfloat16).astype(np.float32).T)


@pytest.mark.parametrize("safe", [False, True], ids=["msgpack", "safetensors"])
def test_what_flax_saved_loads(saved, tmp_path, safe):
    model = resolve_model(saved.section, where=where)
    params = load_params(model, saved.directory).params
    model.flax.save_pretrained(tmp_path, params=params, safe_serialization=safe)
    again = load_params(model, tmp_path)
    assert again.fresh == ()
    assert again.unused == ()
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_parameters_are_born_on_their_shardings(saved):
    model = resolve_model(saved.section, where=where)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding(leaf):
        split = leaf.ndim > 0 and leaf.shape[0] % 8 == 0
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data" if split else None))

    shardings = jax.tree.map(sharding, model.abstract)
    params = load_params(model, saved.directory, shardings).params
    placed = jax.tree.map(lambda leaf, wanted: leaf.sharding.is_equivalent_to(wanted, leaf.ndim), params, shardings)
    assert all(jax.tree.leaves(placed))
    jax.tree.map(np.testing.assert_array_equal, params, load_params(model, saved.directory).params)


def test_a_lacking_head_is_born_fresh_and_another_head_is_unused(saved):
    section = ModelSection(name=str(saved.directory), task="sequence_classification", num_labels=5)
    model = resolve_model(section, where=where)
    loaded = load_params(model, saved.directory, rng=jax.random.key(7))
    fresh = {"classifier/kernel", "classifier/bias", "bert/pooler/dense/kernel", "bert/pooler/dense/bias"}
    assert set(loaded.fresh) == fresh
    assert loaded.unused == (
        "cls.predictions.bias",
        "cls.predictions.transform.LayerNorm.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.dense.weight",
    )
    arrays, born = as_arrays(loaded.params), as_arrays(jax.jit(model.init)(jax.random.key(7)))
    assert arrays["classifier/kernel"].shape == (16, 5)
    for name in fresh:
        np.testing.assert_array_equal(arrays[name], born[name])
    np.testing.assert_array_equal(
        arrays["bert/encoder/layer/0/attention/self/query/kernel"],
        saved.torch_model.state_dict()[BASE].numpy().T,
    )


def test_a_lacking_head_without_a_key_is_refused(saved):
    model = resolve_model(ModelSection(name=str(saved.directory), task="token_classification"), where=where)
    with pytest.raises(ModelError) as caught:
        load_params(model, saved.directory)
    assert str(caught.value) == (
        f"{saved.directory}: 2 parameters that the checkpoint lacks: classifier/bias, classifier/kernel\n"
        "  -> choose a checkpoint for this model.task"
    )


def test_a_base_model_without_prefix_loads(saved, tmp_path):
    saved.torch_model.bert.save_pretrained(tmp_path)
    model = resolve_model(saved.section, where=where)
    loaded = load_params(model, tmp_path, rng=jax.random.key(0))
    assert {name.split("/")[0] for name in loaded.fresh} == {"cls"}
    whole = load_params(model, saved.directory).params
    jax.tree.map(np.testing.assert_array_equal, loaded.params["bert"], whole["bert"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda tensors: tensors.pop(BASE),
            "1 parameters that the checkpoint lacks: bert/encoder/layer/0/attention/self/query/kernel\n"
            "  -> choose a checkpoint for this model.task",
        ),
        (
            lambda tensors: tensors.pop("cls.predictions.bias"),
            "1 parameters that the checkpoint lacks: cls/predictions/bias\n"
            "  -> choose a checkpoint for this model.task",
        ),
        (
            lambda tensors: tensors.update({"bert.encoder.layer.7.new.weight": np.zeros((2, 2), np.float32)}),
            "1 tensors that the model has no place for: bert.encoder.layer.7.new.weight\n"
            "  -> choose a checkpoint of this model type",
        ),
        (
            lambda tensors: tensors.update({BASE: np.zeros((4, 16), np.float32)}),
            f"1 tensors of another shape than the config says: {BASE} [4, 16]"
            " for bert/encoder/layer/0/attention/self/query/kernel [16, 16]\n"
            "  -> the checkpoint and config.json do not fit",
        ),
    ],
    ids=["missing", "part of a head", "extra", "misshapen"],
)
def test_misfits_are_named(saved, tmp_path, change, problem):
    model = changed(saved, tmp_path, change)
    with pytest.raises(ModelError) as caught:
        load_params(model, tmp_path, rng=jax.random.key(0))
    assert str(caught.value) == f"{tmp_path}: {problem}"


def test_second_names_of_a_tied_tensor_must_hold_the_same(saved, tmp_path):
    words, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder"

    def repeat(tensors):
        tensors[f"{decoder}.weight"], tensors[f"{decoder}.bias"] = tensors[words], tensors["cls.predictions.bias"]

    model = changed(saved, tmp_path, repeat)
    expected = load_params(model, saved.directory).params
    jax.tree.map(np.testing.assert_array_equal, load_params(model, tmp_path).params, expected)

    def differ(tensors):
        repeat(tensors)
        tensors[f"{decoder}.bias"] = tensors[f"{decoder}.bias"] + 1

    changed(saved, tmp_path, differ)
    with pytest.raises(ModelError) as caught:
        load_params(model, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: cls.predictions.decoder.bias differs from cls.predictions.bias, though the config says that they "
        "are one tensor\n  -> set tie_word_embeddings: false in its config.json, or save the model again"
    )


def test_damaged_files_are_named(saved, tmp_path):
    model = resolve_model(saved.section, where=where)
    file = tmp_path / "model.safetensors"
    file.write_bytes((saved.directory / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"the file is truncated or damaged: .*not fully covered") as caught:
        load_params(model, tmp_path)
    assert str(caught.value).startswith(f"{file}: ")
    file.unlink()

    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {BASE: "model-1.safetensors"}}))
    with pytest.raises(ModelError) as caught:
        load_params(model, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/model-1.safetensors: the file is missing\n  -> download or save the model again"
    )
    index.write_text('{"weight')
    with pytest.raises(ModelError, match="the index is damaged: JSONDecodeError") as caught:
        load_params(model, tmp_path)
    assert str(caught.value).startswith(f"{index}: ")
    index.unlink()

    (tmp_path / "flax_model.msgpack").write_bytes(b"\x81\xa1")
    with pytest.raises(ModelError, match="the file is truncated or damaged") as caught:
        load_params(model, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/flax_model.msgpack: ")


def test_pickled_weights_are_refused(saved, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError) as caught:
        load_params(resolve_model(saved.section, where=where), tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: the weights are in PyTorch's pickle format (.bin)\n"
        "  -> convert it once where torch is installed: "
        "AutoModel...from_pretrained(DIR).save_pretrained(DIR) writes safetensors"
    )


def test_load_model_replicates_over_a_mesh(tmp_path):
    saved = save_torch(config_for("gpt2", "causal_lm"), "causal_lm", tmp_path)
    model, params = load_model(str(tmp_path))
    assert {leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(params)} == {True}
    inputs = inputs_for("gpt2", "causal_lm")
    logits = jax.jit(model)(params, inputs["input_ids"], inputs["attention_mask"])
    real = inputs["attention_mask"].astype(bool)
    expected = torch_outputs(saved.torch_model, inputs)["logits"]
    np.testing.assert_allclose(np.asarray(logits)[real], expected[real], atol=1e-4)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    half, everywhere = load_model(str(tmp_path), mesh=mesh, dtype="bfloat16")
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(everywhere)} == {8}
    assert {leaf.dtype for leaf in jax.tree.leaves(everywhere)} == {jnp.dtype("float32")}
    logits = jax.jit(half)(everywhere, inputs["input_ids"], inputs["attention_mask"])
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(logits, np.float32)[real], expected[real], atol=0.1)


@pytest.mark.slow
def test_torch_is_never_needed(saved):
    """A process in which torch cannot be imported gets the same logits."""
    inputs = inputs_for("bert", "masked_lm")
    expected = redco_outputs(saved, inputs)["logits"]
    script = f"""
import sys
sys.modules["torch"] = None
import jax, numpy as np
from redco_cli import load_model
model, params = load_model({str(saved.directory)!r})
logits = jax.jit(model)(params, np.array({inputs["input_ids"].tolist()}), np.array({inputs["attention_mask"].tolist()}))
np.save({str(saved.directory / "logits.npy")!r}, logits)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    np.testing.assert_allclose(np.load(saved.directory / "logits.npy"), expected, atol=1e-5)
