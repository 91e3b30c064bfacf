"""What XLA for a TPU has in memory that it has not elsewhere: as found in the buffers of compiled steps."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

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


def found(tpu_backend):
    plan = derive(loss, PARAMS, BATCH, MESH)
    config = StepConfig(cpu_backend=False, copies_state=False, tpu_backend=tpu_backend)
    return estimate(TracedLoss(loss, PARAMS, BATCH), {}, MESH, plan.specs, plan.gathered, config)


def test_stacked_weights_are_cast_before_loops_that_recompute():
    """In shards, in the half of their bytes: at the worst moment they are there on a TPU, elsewhere slice by slice."""
    stack = LAYERS * WIDE * WIDE * 2 // MESH["fsdp"]
    assert found(tpu_backend=True).gathered - found(tpu_backend=False).gathered == pytest.approx(stack, rel=0.01)


def micro_batched(micro_batches):
    """A step of layers that keep what they compute."""

    def loss(params, batch):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None), batch["x"], params["layers"])[0].sum()

    params = {"layers": PARAMS["layers"]}
    plan = derive(loss, params, BATCH, MESH)
    config = StepConfig(micro_batches, cpu_backend=False, copies_state=False, tpu_backend=True)
    return estimate(TracedLoss(loss, params, BATCH), {}, MESH, plan.specs, plan.gathered, config)


def test_what_micro_batches_share_is_made_before_the_first():
    """Casts of weights, beside those that each keeps; and where they are added up, beside those of each.

    The worst moment is then another, when a layer is gathered.
    """
    once, twice = micro_batched(1), micro_batched(2)
    shard = LAYERS * WIDE * WIDE // MESH["fsdp"]
    layer = 2 * WIDE * WIDE
    assert twice.gathered - once.gathered == 2 * shard + layer
    assert twice.temporary - once.temporary == (2 + 4) * shard


TOKENS, FEATURES = 1024, 512


def activations(blocks, tokens=TOKENS, **how):
    """Bytes on one device for `blocks` layers that widen, and add what they make to a stream in float32."""
    params = {
        f"{block}": {
            "up": jax.ShapeDtypeStruct((FEATURES, 4 * FEATURES), jnp.bfloat16),
            "down": jax.ShapeDtypeStruct((4 * FEATURES, FEATURES), jnp.bfloat16),
        }
        for block in range(blocks)
    }

    def loss(params, x):
        for own in params.values():
            normed = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True))
            wide = jax.nn.gelu(normed.astype(jnp.bfloat16) @ own["up"], approximate=how.get("approximate", False))
            x = x + (wide @ own["down"]).astype(jnp.float32)
        return jnp.square(x).sum()

    x, one = jax.ShapeDtypeStruct((tokens, FEATURES), jnp.float32), {"data": 1, "fsdp": 1, "tensor": 1}
    config = StepConfig(cpu_backend=False, copies_state=False, tpu_backend=how.get("tpu_backend", True))
    whole = jax.tree.map(lambda _: PartitionSpec(), params)
    return estimate(TracedLoss(loss, params, x), {}, one, whole, whole, config).saved


@pytest.mark.parametrize("tpu_backend", [True, False])
def test_the_residual_stream_is_kept_as_it_is(tpu_backend):
    """In float32 where it is: not, in fewer bytes, as the products that are added to it."""
    block = activations(3, tpu_backend=tpu_backend) - activations(2, tpu_backend=tpu_backend)
    stream, narrow = 4 * TOKENS * FEATURES, 2 * TOKENS * FEATURES
    widened = 8 if tpu_backend else 16  # of the MLP: its input and the error function, on a GPU what is made of it too
    normed = 0 if tpu_backend else narrow  # a TPU's product computes it
    assert block == pytest.approx(stream + normed + widened * narrow, rel=0.01)


def test_an_error_function_is_computed_once():
    """A polynomial of some twenty terms; what a hyperbolic tangent takes is done again in the backward pass."""
    exact, approximate = (
        activations(3, approximate=approximate) - activations(2, approximate=approximate)
        for approximate in (False, True)
    )
    assert exact - approximate == 2 * TOKENS * 4 * FEATURES


def test_memory_is_in_tiles():
    """Of 128 numbers and 8: 129 tokens take as much of a stream of 512 features as 136."""
    assert activations(3, tokens=129) - activations(2, tokens=129) == pytest.approx(
        activations(3, tokens=136) - activations(2, tokens=136), rel=0.01
    )
