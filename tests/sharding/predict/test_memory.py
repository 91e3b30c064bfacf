"""Predicted memory of train steps, against what the compiler says of the same steps."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli.models.resolve import resolve_model
from redco_cli.recipe.schema import ModelSection
from redco_cli.sharding.compiled.memory import compiled_memory
from redco_cli.sharding.predict.flat import flatten
from redco_cli.sharding.predict.memory import Array, StepConfig, TracedLoss, estimate
from redco_cli.sharding.predict.scattered import as_scattered
from tests.sharding.programs.steps import MESHES, OPTIMIZER, Size, compile_step, model, plan
from tests.sharding.shorthand import f32

SMALL = Size(layers=2, hidden=64, length=64, batch=16, vocab=256)
ONE = MESHES["one"]
NAMES = ("gpt2", "llama", "t5", "bert", "scan remat", "mlp")
ACCELERATOR = StepConfig(cpu_backend=False)


def compared(name, size, mesh, micro_batches=1, dtype="float32"):
    """The prediction and the compiled step."""
    one = model(name, size, dtype)
    specs, gathered = plan(one, mesh)
    micro = {
        key: jax.ShapeDtypeStruct((x.shape[0] // micro_batches, *x.shape[1:]), x.dtype) for key, x in one.batch.items()
    }
    opt_state = jax.eval_shape(OPTIMIZER.init, one.params)
    predicted = estimate(
        TracedLoss(one.loss_fn, one.params, micro), opt_state, mesh, specs, gathered, StepConfig(micro_batches)
    )
    compiled = compiled_memory(
        compile_step(one, mesh, specs, gathered, micro_batches), predicted.gradients, predicted.gathered
    )
    return predicted, compiled


OVER_TENSOR = 0.33
"""With `tensor` XLA for CPUs takes up to a quarter less than is predicted; compiled for H100, within a tenth."""


def assert_close(predicted, compiled, within=0.25):
    """State within 2 %, temporary memory within 25 %, and so activations where they are the larger part of it."""
    arguments = predicted.parameters + predicted.optimizer + predicted.batch
    assert arguments == pytest.approx(compiled.arguments, rel=0.02)
    assert predicted.parameters + predicted.optimizer == pytest.approx(compiled.aliased, rel=0.02)
    assert predicted.copies == pytest.approx(compiled.copies, rel=0.02)
    assert predicted.temporary == pytest.approx(compiled.temporary, rel=within)
    if compiled.activations > compiled.gradients + compiled.copies:
        assert predicted.activations + predicted.logits == pytest.approx(compiled.activations, rel=within)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("gpt2", "llama", "bert", "t5", "scan remat") else name
        for name in NAMES
    ],
)
def test_one_device(name):
    predicted, compiled = compared(name, SMALL, ONE)
    assert compiled.activations > 2 * compiled.gradients
    assert_close(predicted, compiled)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "data2 tensor4"), ("llama", "fsdp8"), ("scan remat", "fsdp8")])
def test_eight_devices(name, mesh):
    assert_close(*compared(name, SMALL, MESHES[mesh]), OVER_TENSOR if "tensor" in mesh else 0.25)


def test_a_plain_network_is_predicted_to_one_percent():
    for size in (SMALL, Size(layers=3, hidden=32, length=32, batch=4, vocab=0)):
        predicted, compiled = compared("mlp", size, ONE)
        assert predicted.temporary == pytest.approx(compiled.temporary, rel=0.01)


@pytest.mark.slow
def test_micro_batches():
    size = SMALL._replace(batch=64)
    predicted, compiled = compared("mlp", size, MESHES["data8"], 4)
    assert_close(predicted, compiled)
    whole, _ = compared("mlp", size, MESHES["data8"])
    assert predicted.activations < whole.activations / 3
    assert predicted.batch == whole.batch


def estimated(loss_fn, params, batch, config, mesh=ONE, specs=None, gathered=None):
    """The prediction alone, of plain gradient descent."""
    whole = jax.tree.map(lambda _: P(), params)
    opt_state = jax.eval_shape(optax.sgd(0.1).init, params)
    program = TracedLoss(loss_fn, params, batch)
    return estimate(program, opt_state, mesh, specs or whole, gathered or whole, config)


def chain(cast, layer=lambda x, w: jnp.tanh(x @ w)):
    def loss_fn(ws, x):
        for w in ws:
            x = layer(x.astype(cast), w.astype(cast))
        return x.astype(jnp.float32).sum()

    return loss_fn


MATRICES, TOKENS = [f32(64, 64)] * 8, f32(1024, 64)
MATRIX, ACTIVATION = 64 * 64 * 4, 1024 * 64 * 4


def test_what_a_chain_keeps_is_counted_by_hand():
    """Each layer keeps its result. The backward pass writes the gradient of each in the place of the result itself.

    The worst moment is its first product: one more activation, and the gradient of the last matrix.
    """
    found = estimated(chain(jnp.float32), MATRICES, TOKENS, ACCELERATOR)
    assert (found.parameters, found.gradients, found.optimizer) == (8 * MATRIX, 8 * MATRIX, 0)
    assert (found.batch, found.gathered, found.copies) == (ACTIVATION, 0, 0)
    assert found.saved == 8 * ACTIVATION
    assert found.temporary == 9 * ACTIVATION + MATRIX
    assert found.largest == (Array(ACTIVATION, (1024, 64), "float32", "tanh"),) * 7 + (
        Array(ACTIVATION, (1024, 64), "float32", "add_any"),
        Array(ACTIVATION, (1024, 64), "float32", "dot_general"),
    )


def test_casts_of_all_weights_live_during_an_unscanned_step():
    """A product of bfloat16 is taken in float32 on a CPU: the rounded weights exist at full width."""
    assert (
        estimated(chain(jnp.bfloat16), MATRICES, TOKENS, ACCELERATOR).gathered == 7 * MATRIX // 2
    )  # the first is done with
    assert estimated(chain(jnp.bfloat16), MATRICES, TOKENS, StepConfig()).gathered == 7 * MATRIX

    def scanned(ws, x):
        def body(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        return jax.lax.scan(body, x.astype(jnp.bfloat16), ws)[0].astype(jnp.float32).sum()

    kept, read_again = 8 * MATRIX // 2, MATRIX // 2  # the backward pass takes the casts of all layers
    assert estimated(scanned, f32(8, 64, 64), TOKENS, ACCELERATOR).gathered == kept + read_again


def test_what_products_of_a_loop_share_is_stacked_once_but_for_cpus():
    """Each product keeps what it is of, in its own shape; XLA for chips finds that it is the same."""

    def scanned(products):
        def loss(ws, x):
            def body(x, w):
                shared = jnp.tanh(x)
                made = [jnp.sin(shared.reshape(-1, 64) @ w[number]) for number in range(products)]
                return x + sum(made).reshape(x.shape), None

            return jax.lax.scan(body, x, ws)[0].sum()

        return loss

    def kept(products, config):
        return estimated(scanned(products), f32(8, 4, 64, 64), f32(16, 64, 64), config).activations

    result = operand = 8 * ACTIVATION
    assert kept(3, ACCELERATOR) - kept(1, ACCELERATOR) == pytest.approx(2 * result, rel=0.15)
    assert kept(3, StepConfig()) - kept(1, StepConfig()) == pytest.approx(2 * (result + operand), rel=0.15)


def test_parameters_are_gathered_for_use():
    mesh, lives, used = {"data": 1, "fsdp": 8, "tensor": 1}, [P("fsdp")] * 8, [P()] * 8
    loss_fn = chain(jnp.float32)
    kept = estimated(loss_fn, MATRICES, TOKENS, ACCELERATOR, mesh, lives, used)
    assert (kept.parameters, kept.gradients, kept.gathered) == (
        MATRIX,
        MATRIX,
        7 * MATRIX,
    )  # no gradient reads the first
    again = estimated(
        loss_fn, MATRICES, TOKENS, dataclasses.replace(ACCELERATOR, reshard_after_forward=True), mesh, lives, used
    )
    assert again.gathered <= MATRIX
    assert again.total < kept.total - 5 * MATRIX


def test_rematerialized_layers_keep_their_inputs_alone():
    def mlp(x, w):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x

    kept = estimated(chain(jnp.float32, mlp), MATRICES, TOKENS, ACCELERATOR)
    again = estimated(chain(jnp.float32, jax.checkpoint(mlp)), MATRICES, TOKENS, ACCELERATOR)
    assert kept.saved == 48 * ACTIVATION
    assert again.saved == (8 + 1) * ACTIVATION
    assert again.activations == pytest.approx((8 + 6) * ACTIVATION, rel=0.1)


def test_frozen_parameters_have_neither_gradient_nor_optimizer_state():
    def loss_fn(params, x):
        return jnp.tanh(x @ params["base"] + x @ params["down"] @ params["up"]).sum()

    params = {"base": f32(64, 64), "down": f32(64, 4), "up": f32(4, 64)}
    trained = {"down": params["down"], "up": params["up"]}
    whole = jax.tree.map(lambda _: P(), params)
    program = TracedLoss(loss_fn, params, TOKENS, frozen={"base": True, "down": False, "up": False})
    opt_state = jax.eval_shape(OPTIMIZER.init, trained)
    found = estimate(program, opt_state, ONE, whole, whole, ACCELERATOR)
    assert (found.parameters, found.gradients) == (MATRIX + 2 * 64 * 4 * 4, 2 * 64 * 4 * 4)
    assert found.optimizer == pytest.approx(2 * found.gradients, abs=8)
    all_trained = estimate(TracedLoss(loss_fn, params, TOKENS), opt_state, ONE, whole, whole, ACCELERATOR)
    assert all_trained.gradients - found.gradients == MATRIX


def test_columns_and_rows_divide_what_lies_between_them():
    def loss_fn(params, x):
        return (jnp.tanh(x @ params["up"]) @ params["down"]).sum()

    params = {"down": f32(512, 64), "up": f32(64, 512)}
    whole = estimated(loss_fn, params, TOKENS, ACCELERATOR)
    mesh, split = {"data": 1, "fsdp": 1, "tensor": 4}, {"down": P("tensor"), "up": P(None, "tensor")}
    quarter = estimated(loss_fn, params, TOKENS, ACCELERATOR, mesh, split, split)
    assert quarter.parameters == whole.parameters // 4
    assert quarter.activations == pytest.approx(whole.activations / 4, rel=0.05)


def test_logits_are_told_apart():
    def loss_fn(params, batch):
        logits = jnp.tanh(params["table"][batch["ids"]]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"]).sum()

    params = {"head": f32(16, 4096), "table": f32(4096, 16)}
    found = estimated(loss_fn, params, {"ids": jax.ShapeDtypeStruct((8, 32), jnp.int32)}, ACCELERATOR)
    logits = 8 * 32 * 4096 * 4
    assert {array.shape for array in found.largest[:2]} == {(8, 32, 4096), (4096, 8, 32)}
    assert found.logits + found.gradients == pytest.approx(2 * logits, rel=0.05)
    assert found.activations < logits / 10


def test_copies_of_donated_arguments_are_read_from_the_compiled_step():
    def step(moment, gradient):  # both outputs read the old moment, and one is written in its place
        new = 0.9 * moment + gradient
        return jnp.where(gradient.sum() > 0, new, moment), jnp.sqrt(new) + moment[::-1]

    compiled = jax.jit(step, donate_argnums=0).lower(f32(1000), f32(1000)).compile()
    found = compiled_memory(compiled, gradients=0)
    assert (found.arguments, found.aliased, found.copies) == (8000, 4000, 4000)
    assert found.outputs == pytest.approx(8000, abs=64)
    assert found.activations == found.temporary - 4000
    assert found.total == found.arguments + found.outputs - found.aliased + found.temporary
    kept = jax.jit(lambda moment, gradient: moment + gradient, donate_argnums=0).lower(f32(1000), f32(1000)).compile()
    assert compiled_memory(kept, gradients=0).copies == 0


FAMILIES = ("gpt2", "llama", "opt", "t5", "bert", "vit", "scan", "scan remat", "mlp")
SIZES = {
    "more tokens": Size(layers=3, hidden=64, length=256, batch=16, vocab=512),
    "more width": Size(layers=2, hidden=256, length=64, batch=32, vocab=1024),
    "more words": Size(layers=2, hidden=64, length=128, batch=16, vocab=4096),
    "more parameters than tokens": Size(layers=2, hidden=256, length=64, batch=8, vocab=512),
}
WITHIN = {"more parameters than tokens": 0.4, "more width": 0.42, "more words": 0.36}
"""Where activations are the smaller part of what a step needs, less of them is known. Over `tensor` 4 llama's gated MLP
is taken for up to 35 % more than XLA keeps of it, depending on how the CPU lets it fuse: too much, never too little.
"""


IN_TURN = [
    (name, size, list(MESHES)[(first + second) % len(MESHES)])
    for first, name in enumerate(FAMILIES)
    for second, size in enumerate(SIZES)
]
"""Each model in each size, on the meshes in turn: each model is on every mesh, and each size."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "mesh"), IN_TURN)
def test_models_of_many_sizes_on_many_meshes(name, size, mesh):
    assert_close(*compared(name, SIZES[size], MESHES[mesh]), WITHIN.get(size, 0.26))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_bfloat16(name, mesh):
    assert_close(*compared(name, SMALL, MESHES[mesh], dtype="bfloat16"), OVER_TENSOR if "tensor" in mesh else 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["gpt2", "scan remat", "t5"])
def test_micro_batches_of_models(name, mesh):
    assert_close(*compared(name, SMALL._replace(batch=64), MESHES[mesh], 4), 0.3)


@pytest.mark.slow
def test_a_model_of_66_billion_parameters_takes_seconds():
    hidden = {"hidden_size": 9216, "word_embed_proj_dim": 9216, "ffn_dim": 36864, "num_attention_heads": 72}
    config = {"model_type": "opt", "vocab_size": 50272, "num_hidden_layers": 64, **hidden}
    opt = resolve_model(ModelSection(config=config, task="causal_lm", implementation="hf_flax"), where=str)
    ids = jax.ShapeDtypeStruct((64, 2048), jnp.int32)

    def loss_fn(params, batch):
        logits = opt(params, **batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["input_ids"]).sum()

    program = TracedLoss(loss_fn, opt.abstract, {"input_ids": ids, "attention_mask": ids})
    mesh = {"data": 1, "fsdp": 8, "tensor": 8}
    lives = jax.tree.map(lambda leaf: P("tensor", "fsdp") if leaf.ndim == 2 else P(), opt.abstract)
    used = jax.tree.map(lambda leaf: P("tensor") if leaf.ndim == 2 else P(), opt.abstract)
    opt_state = jax.eval_shape(OPTIMIZER.init, opt.abstract)
    start = time.process_time()
    first = estimate(program, opt_state, mesh, lives, used, ACCELERATOR)
    middle = time.process_time()
    estimate(program, opt_state, mesh | {"data": 2, "fsdp": 4}, lives, used, ACCELERATOR)
    assert middle - start < 4
    assert time.process_time() - middle < 2
    assert first.parameters == pytest.approx(66e9 * 4 / 64, rel=0.01)
    saved = 64 * 8 * 2048 * 9216 * 4  # at least what comes into each layer
    assert first.activations > saved


def test_gradients_that_a_branch_gives_back_are_in_shards():
    """Of a weight that is gathered in it, whose other branch has none; not what is no gradient of a weight."""

    def loss(params, batch):
        x = batch["x"]
        once = jax.checkpoint(lambda w, x: x @ w)
        used = jax.lax.cond(x.sum() > 0, once, lambda w, x: jnp.zeros_like(x), params["w"], x)
        return (used**2).sum()

    params, batch = {"w": jnp.zeros((64, 64))}, {"x": jnp.zeros((32, 64))}
    flat = flatten(jax.make_jaxpr(jax.grad(loss))(params, batch), partitioned=True, upcast=False)
    whole = np.array([math.prod(shape) * 4.0 for shape in flat.arrays.shapes])
    found = as_scattered(flat, whole, [64 * 64 * 4 // 8])
    changed = {flat.arrays.shapes[place] for place in np.flatnonzero(found != whole)}
    assert changed == {(64, 64)}
    backward = [op for op in flat.ops if op.name == "cond"][-1]
    given_back = [one for one in backward.results if flat.arrays.shapes[one] == (64, 64)]
    assert found[given_back] == pytest.approx(whole[given_back] / 8)
