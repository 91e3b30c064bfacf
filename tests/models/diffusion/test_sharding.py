"""How the U-Net and the autoencoder are split over devices: by reading their programs, with the same numbers."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.models.example_inputs import default_batch, default_loss, example_inputs, example_loss
from redco_cli.models.resolve import model_shardings, resolve_model
from redco_cli.recipe.schema import ModelSection
from redco_cli.sharding.derive import make_plan
from redco_cli.sharding.program.reading import read
from tests.sharding.measure import device_mesh
from tests.sharding.trial import compiled

UNET = {
    "_class_name": "UNet2DConditionModel",
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 48,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 8,
}
AUTOENCODER = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 8,
    "sample_size": 16,
}
EIGHT = [{"data": 8, "fsdp": 1, "tensor": 1}, {"data": 2, "fsdp": 2, "tensor": 2}]


def model_of(config):
    return resolve_model(ModelSection(config=config), where=lambda key: key)


def reading_of(config):
    model = model_of(config)
    batch = default_batch(model, 8, 0)
    return read(lambda params, batch: default_loss(model, params, batch, None).sum, model.abstract, batch)


@pytest.mark.slow
def test_the_program_of_an_autoencoder_is_understood():
    assert reading_of(AUTOENCODER).unknown == ()


@pytest.mark.slow
def test_heads_and_the_gated_layer_are_split_in_pairs():
    """Queries, keys and values by columns, what comes out of attention by rows; the feed-forward layer likewise."""
    reading = reading_of(UNET)
    assert reading.unknown == ()
    plan = make_plan(reading, {"data": 1, "fsdp": 1, "tensor": 2}, where=str)
    specs = {path: tuple(spec) for path, spec in flatten_dict(plan.specs, sep="/").items()}
    block = "mid_block/attentions_0/transformer_blocks_0"
    columns = [f"{block}/{name}/kernel" for name in ("attn1/to_q", "attn1/to_k", "attn2/to_v", "ff/up", "ff/gate")]
    rows = [f"{block}/{name}/kernel" for name in ("attn1/to_out", "attn2/to_out", "ff/down")]
    assert {path: specs[path] for path in columns} == dict.fromkeys(columns, (None, "tensor"))
    assert {path: specs[path][:1] for path in rows} == dict.fromkeys(rows, ("tensor",))


@pytest.mark.slow
def test_a_model_that_is_loaded_on_a_mesh_computes_what_one_device_does():
    """Under `jax.jit` alone, where no training step gathers its parameters."""
    model, mesh = model_of(UNET), device_mesh(EIGHT[1])
    params, batch = jax.jit(model.init)(jax.random.key(0)), example_inputs(model, 8)
    loss = jax.jit(lambda params, batch: example_loss(model, params, batch))
    split = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    placed = jax.device_put(params, model_shardings(model, mesh, str))
    np.testing.assert_allclose(loss(placed, split), loss(params, batch), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", EIGHT)
@pytest.mark.parametrize("config", [UNET, AUTOENCODER])
def test_loss_and_gradients_are_those_of_one_device(config, sizes):
    model = model_of(config)
    params, batch = jax.jit(model.init)(jax.random.key(0)), example_inputs(model, 8)

    def loss(params, batch):
        return example_loss(model, params, batch)

    plan = make_plan(read(loss, model.abstract, batch), sizes, where=str)
    value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
    step, (stored, split) = compiled(loss, params, batch, plan)
    found, divided = step(jax.device_put(params, stored), jax.device_put(batch, split))
    np.testing.assert_allclose(found, value, rtol=1e-5)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5 * scale), divided, gradients)
