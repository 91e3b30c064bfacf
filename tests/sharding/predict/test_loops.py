"""What loops keep for their backward pass, and what chips make again, counted by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.predict.test_memory import ACCELERATOR, MATRIX, TOKENS, StepConfig, estimated
from tests.sharding.shorthand import f32

LAYERS, STACK = 8, f32(8, 64, 64)
CASTS = LAYERS * MATRIX // 2
SHARDED = {"data": 1, "fsdp": 8, "tensor": 1}, P(None, "fsdp"), P()


def product(x, w):
    return jnp.tanh(x @ w)


def looped(layer):
    """Layers in a loop that casts their matrices."""

    def loss_fn(ws, x):
        def body(x, w):
            return layer(x, w.astype(jnp.bfloat16)), None

        return jax.lax.scan(body, x.astype(jnp.bfloat16), ws)[0].astype(jnp.float32).sum()

    return loss_fn


def test_casts_that_a_backward_pass_multiplies_with_are_kept_as_they_were_gathered():
    found = estimated(looped(product), STACK, TOKENS, ACCELERATOR, *SHARDED)
    assert found.gathered == CASTS + MATRIX // 2


@pytest.mark.parametrize(
    ("layer", "config"),
    [
        (jax.checkpoint(product), ACCELERATOR),
        (product, dataclasses.replace(ACCELERATOR, reshard_after_forward=True)),
    ],
    ids=["rematerialized", "resharded"],
)
def test_casts_that_are_gathered_again_are_kept_in_shards(layer, config):
    kept = estimated(looped(product), STACK, TOKENS, ACCELERATOR, *SHARDED)
    again = estimated(looped(layer), STACK, TOKENS, config, *SHARDED)
    assert again.gathered == CASTS // 8 + MATRIX // 2
    assert kept.gathered - again.gathered == CASTS * 7 // 8


def test_what_drops_elements_is_drawn_again_on_chips():
    def loss_fn(ws, x):
        for number in range(4):
            kept = jax.random.bernoulli(jax.random.key(number), 0.9, x.shape)
            x = jnp.where(kept, jnp.tanh(x @ ws), 0.0)
        return x.sum()

    matrix = f32(64, 64)
    chip, cpu = (estimated(loss_fn, matrix, TOKENS, config) for config in (ACCELERATOR, StepConfig()))
    assert cpu.saved - chip.saved >= 3 * 1024 * 64


def test_products_of_tpus_compute_the_elements_of_their_operands():
    def loss_fn(ws, x):
        for w in ws:
            hidden = x @ w
            x = hidden * jnp.tanh(hidden)
        return (x @ ws[0]).sum()

    matrices, written = [f32(64, 64)] * 4, 1024 * 64 * 4
    gpu, tpu = (
        estimated(loss_fn, matrices, TOKENS, dataclasses.replace(ACCELERATOR, tpu_backend=fuses))
        for fuses in (False, True)
    )
    assert gpu.saved - tpu.saved == 2 * 4 * written  # each hyperbolic tangent, and what the next product reads
