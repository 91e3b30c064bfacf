"""What XLA for a TPU has in memory that it has not elsewhere: as found in the buffers of compiled steps."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from redco_cli.sharding import derive
from redco_cli.sharding.predict.memory import StepConfig, TracedLoss, estimate

LAYERS, WIDE, EXAMPLES, CHUNKS = 16, 256, 64, 8
MESH = {"data": 1, "fsdp": 8, "tensor": 1}
PARAMS = {
    "layers": jax.ShapeDtypeStruct((LAYERS, WIDE, WIDE), jnp.float32),
    "head": jax.ShapeDtypeStruct((WIDE, 4 * WIDE), jnp.float32),
}
BATCH = {"x": jax.ShapeDtypeStruct((EXAMPLES, CHUNKS, WIDE), jnp.bfloat16)}


@partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
def layer(x, w):
    return jnp.tanh(x @ w.astype(jnp.bfloat16)), None


def loss(params, batch):
    x = jax.lax.scan(layer, batch["x"], params["layers"])[0]

    @partial(jax.checkpoint, prevent_cse=False)
    def chunk(total, part):
        scores = (part @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return total + jax.nn.logsumexp(scores, axis=-1).sum(), None

    return jax.lax.scan(chunk, 0.0, jnp.swapaxes(x, 0, 1))[0] / EXAMPLES


def found(fuses_operands):
    plan = derive(loss, PARAMS, BATCH, MESH)
    config = StepConfig(cpu_backend=False, copies_state=False, fuses_operands=fuses_operands)
    return estimate(TracedLoss(loss, PARAMS, BATCH), {}, MESH, plan.specs, plan.gathered, config)


def test_stacked_weights_are_cast_before_loops_that_recompute():
    """In shards, in the half of their bytes: at the worst moment they are there on a TPU, elsewhere slice by slice."""
    stack = LAYERS * WIDE * WIDE * 2 // MESH["fsdp"]
    assert found(fuses_operands=True).gathered - found(fuses_operands=False).gathered == pytest.approx(stack, rel=0.01)
