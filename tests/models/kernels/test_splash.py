"""Attention by JAX's kernel for TPUs, interpreted, against the plain form."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from redco_cli.models.decoder.decoder import Decoder
from redco_cli.models.kernels import choice, splash
from redco_cli.models.kernels.mapped import can_attend
from redco_cli.run import train
from redco_cli.sharding.derive import derive
from redco_cli.sharding.plan import AXES, BATCH_AXES
from redco_cli.sharding.tensor_split import current_mesh, split_as
from redco_cli.training.records.metrics import read_records
from tests.models.decoder.pairs import QUICK, abstract_decoder, hf_config

LENGTH = 200
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def test_it_is_the_softmax_of_the_scores():
    q, k, v = normal(1, 128, 2, 8), normal(1, 128, 1, 8), normal(1, 128, 1, 8)
    found = jax.jit(functools.partial(splash.attend, window=None, softcap=None), compiler_options=QUICK)(
        q, k, v, None, None
    )
    expected = jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_short_rows_and_batches_that_do_not_divide_are_left_to_the_plain_form():
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    plan = derive(lambda params, x: (x @ params["w"]).sum(), {"w": normal(8, 8)}, normal(4, 8), dict(mesh.shape))
    assert can_attend(3, 128)
    assert not can_attend(3, 127)
    with split_as(plan, mesh):
        assert can_attend(8, 128)
        assert not can_attend(6, 128)


CASES = {
    "llama": {},
    "llama, one head of keys": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 17},
    "gemma2": {"sliding_window": 17},
    "gemma3_text": {"sliding_window": 17},
    "gpt_oss": {"sliding_window": 17},
    "gpt2": {"n_positions": 256, "scale_attn_by_inverse_layer_idx": True},
    "opt": {"max_position_embeddings": 256},
    "bloom": {},
}


def rows(count):
    """Padded on the right, on the left, in the middle, not at all; and the texts of packed rows."""
    ids = RNG.integers(3, 60, size=(count, LENGTH))
    mask = np.ones((count, LENGTH), np.int32)
    mask[0, 150:], mask[1, :40], mask[2, 20:60] = 0, 0, 0
    segments = np.zeros((count, LENGTH), np.int32)
    segments[:, 70:], segments[:, 130:] = 1, 2
    return jnp.asarray(ids), mask, jnp.asarray(segments)


def decoder(case):
    module, abstract = abstract_decoder(hf_config(case.partition(",")[0], **CASES[case]))
    params = jax.tree.map(lambda leaf: 0.2 * normal(*leaf.shape), abstract)
    return module, params


def losses(module: Decoder, weights):
    """A loss of the states of real tokens, with and without texts that share rows."""

    def loss(params, ids, mask, segments):
        padded = module.apply({"params": params}, ids, mask, method="hidden")
        packed = module.apply({"params": params}, ids, positions=None, segment_ids=segments, method="hidden")
        return (jnp.tanh(padded) * weights * mask[..., None]).sum() + (jnp.tanh(packed) * weights).sum()

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_plain_form(case):
    module, params = decoder(case)
    ids, mask, segments = rows(4)
    weights = normal(LENGTH, module.config.hidden_size)
    (expected, wanted), (value, found) = (
        jax.jit(jax.value_and_grad(losses(module.clone(kernel=kernel), weights)), compiler_options=QUICK)(
            params, ids, jnp.asarray(mask), segments
        )
        for kernel in ("plain", "splash")
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-4)  # of tens of thousands of terms of either sign
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-5 * largest), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4)])
def test_heads_of_keys_that_do_not_divide_are_repeated(sizes):
    q, k, v = normal(4, 128, 4, 8), normal(4, 128, 2, 8), normal(4, 128, 2, 8)
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)
    plan = derive(lambda params, x: (x @ params["w"]).sum(), {"w": normal(8, 8)}, normal(4, 8), dict(mesh.shape))

    def attend(*given):
        with split_as(plan, mesh):
            return splash.attend(*given, None, None, window=None, softcap=None)

    found = jax.jit(attend, compiler_options=QUICK)(q, k, v)
    expected = jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def compare_with_one_device(case, kernel, sizes):
    """Losses and gradients of a model by a kernel on a mesh, and on one device."""
    module, params = decoder(case)
    module = module.clone(kernel=kernel)
    ids, mask, segments = rows(8)
    loss = losses(module, normal(LENGTH, module.config.hidden_size))
    given = (ids, jnp.asarray(mask), segments)
    expected, wanted = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params, *given)
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)
    plan = derive(lambda params, batch: loss(params, *batch), params, given, dict(mesh.shape))

    def on_the_mesh(*arguments):
        with split_as(plan, mesh):
            return loss(*arguments)

    placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, plan.specs)
    split = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(BATCH_AXES))) for x in given]
    value, found = jax.jit(jax.value_and_grad(on_the_mesh), compiler_options=QUICK)(placed, *split)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-5 * largest), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1)])
def test_every_mesh_gives_what_one_device_gives(sizes):
    compare_with_one_device("llama", "splash", sizes)


RECIPE = """
model: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
  num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 256}, task: causal_lm, tokenizer: byte}
data: {train: {path: json, data_files: texts.jsonl}, max_length: 128}
plugin: {module: causal_lm}
train: {global_batch_size: 16, micro_batch_size: 8, steps: 3, learning_rate: 1e-2}
logging: {every: 1, plot: false}
"""


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_run_is_the_same_with_it_on_a_mesh(packing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["a fox " * int(count) for count in RNG.integers(2, 18, size=200)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    given = [f"data.packing={packing}", "data.buckets=false"]
    train("recipe.yaml", [*given, "mesh={data: 1}", "output_dir=plain"])
    monkeypatch.setattr(choice, "current_platform", lambda: "tpu")
    used = []
    attend = splash.attend
    monkeypatch.setattr(splash, "attend", lambda *args, **named: used.append(current_mesh()) or attend(*args, **named))
    train("recipe.yaml", [*given, "mesh={data: 2, fsdp: 2, tensor: 2}", "output_dir=kernel"])
    assert {None if mesh is None else mesh.size for mesh in used} == {None, 8}
    expected, found = (
        [row["loss"] for row in read_records(tmp_path / name / "metrics.jsonl") if row["kind"] == "train"]
        for name in ("plain", "kernel")
    )
    assert len(expected) == 3
    np.testing.assert_allclose(found, expected, rtol=1e-5)
