"""Splits of intermediate arrays, against what XLA's own partitioner makes of the same program."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.sharding.plan import as_dims
from redco_cli.sharding.predict.flat import flatten
from redco_cli.sharding.predict.propagate import local_bytes, propagate, shard_bytes
from tests.sharding.measure import device_mesh
from tests.sharding.programs.small import doubled
from tests.sharding.shorthand import f32

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
BATCH = ("data", "fsdp")
B, L, D, H, K, F, V = 8, 6, 16, 4, 4, 32, 24
"""Batch, length, hidden dim, heads, dim of a head, MLP width, vocabulary."""


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def layers(x, ws):
    def body(x, w):
        return jnp.tanh(x @ w), x

    return lax.scan(body, x, ws)


def mlp_gradient(x, up, down):
    return jax.grad(lambda up: (jax.nn.relu(x @ up) @ down).sum())(up)


def attention(x, w):
    q = (x @ w).reshape(B, L, H, K)
    scores = jnp.einsum("bqhk,blhk->bhql", q, q)
    scores = jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -1e9)
    return jnp.einsum("bhql,blhk->bqhk", jax.nn.softmax(scores), q).reshape(B, L, D)


def patches(images, kernel):
    return lax.conv_general_dilated(images, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def accumulated(x, w):
    """Gradients added up from zeros, as over micro-batches."""

    def body(total, x):
        return total + jax.grad(lambda w: jnp.tanh(x @ w).sum())(w), None

    return lax.scan(body, jnp.zeros((D, F)), x)[0]


COLUMNS, ROWS, X = P(None, "tensor"), P("tensor", None), P(BATCH)
CASES = {
    "bias": (lambda x, b: x + b, [f32(B, L, D), f32(D)], [X, P()]),
    "columns": (jnp.matmul, [f32(B, L, D), f32(D, F)], [X, COLUMNS]),
    "rows": (jnp.matmul, [f32(B, L, F), f32(F, D)], [P(BATCH, None, "tensor"), ROWS]),
    "gradient of columns": (mlp_gradient, [f32(B, L, D), f32(D, F), f32(F, D)], [X, COLUMNS, ROWS]),
    "split heads": (lambda x, w: (x @ w).reshape(B, L, H, K), [f32(B, L, D), f32(D, D)], [X, COLUMNS]),
    "merge heads": (lambda x: x.reshape(B, L, D), [f32(B, L, H, K)], [P(BATCH, None, "tensor")]),
    "merge tokens": (lambda x: x.reshape(B * L, D), [f32(B, L, D)], [P(BATCH, None, "tensor")]),
    "attention": (attention, [f32(B, L, D), f32(D, D)], [X, COLUMNS]),
    "transpose": (lambda x: x.transpose(2, 0, 1), [f32(B, L, D)], [P(BATCH, None, "tensor")]),
    "reduce": (lambda x: (x.sum(1), x.max((0, 1)), x.argmax(1)), [f32(B, L, D)], [P(BATCH, None, "tensor")]),
    "log-softmax": (jax.nn.log_softmax, [f32(B, L, V)], [P(BATCH, None, "tensor")]),
    "embedding": (lambda table, ids: table[ids], [f32(V, D), i32(B, L)], [ROWS, X]),
    "label": (lambda x, i: jnp.take_along_axis(x, i, -1), [f32(B, L, V), i32(B, L, 1)], [P(BATCH, None, None), X]),
    "convolution": (patches, [f32(B, 8, 8, 4), f32(4, 4, 4, D)], [X, P(None, None, None, "tensor")]),
    "slice and pad": (lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0))), [f32(B, L, D)], [X]),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), [f32(B, L, D), f32(B, L, D)], [X, X]),
    "stack": (lambda x, y: jnp.stack([x, y], 1), [f32(B, L, D), f32(B, L, D)], [X, X]),
    "scan": (layers, [f32(B, D), f32(3, D, D)], [X, P()]),
    "scan over columns and rows": (
        lambda x, ups, downs: lax.scan(lambda x, w: (x + jax.nn.relu(x @ w[0]) @ w[1], None), x, (ups, downs)),
        [f32(B, D), f32(3, D, F), f32(3, F, D)],
        [X, P(None, None, "tensor"), P(None, "tensor", None)],
    ),
    "accumulation": (accumulated, [f32(3, B, D), f32(D, F)], [P(None, BATCH), COLUMNS]),
    "while": (lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x), [f32(B, D)], [X]),
    "cond": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), [f32(B, D)], [X]),
    "remat": (jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum()), [f32(B, D)], [X]),
    "custom derivatives": (jax.grad(lambda x: jax.nn.relu(doubled(x)).sum()), [f32(B, D)], [X]),
    "mask of nothing": (lambda x: jnp.where(jnp.tril(jnp.ones((L, L), bool)), x, -1.0), [f32(B, L, L)], [X]),
    "derivatives by each number": (
        lambda x, w: jax.vmap(jax.grad(lambda x: (x * w).sum()))(x),
        [f32(B), f32(D)],
        [P(BATCH), P()],
    ),
    "a sum beside what it is of": (
        lambda x: jnp.broadcast_to(x.sum(), (L, D)) + jnp.sin(x).sum(0),
        [f32(B, L, D)],
        [X],
    ),
    "singular values": (lambda x: jnp.linalg.svd(x), [f32(B, L, D)], [X]),
    "linear system": (jnp.linalg.solve, [f32(B, D, D), f32(B, D, L)], [X, X]),
    "conjugate gradients": (
        lambda a, b: jax.vmap(lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, maxiter=3)[0])(a, b),
        [f32(B, D, D), f32(B, D)],
        [X, X],
    ),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), [f32(B, L)], [X]),
}


@pytest.mark.parametrize("name", CASES)
def test_splits_are_those_of_xla(name):
    function, shapes, specs = CASES[name]
    mesh = device_mesh(SIZES)
    places = [NamedSharding(mesh, spec) for spec in specs]
    compiled = jax.jit(lambda *args: function(*args), in_shardings=places).lower(*shapes).compile()
    outputs = jax.tree.leaves(jax.eval_shape(function, *shapes))
    expected = [
        math.prod(place.shard_shape(one.shape)) * one.dtype.itemsize
        for place, one in zip(jax.tree.leaves(compiled.output_shardings), outputs, strict=True)
    ]
    closed = jax.make_jaxpr(function)(*shapes)
    sizes, flat = local_bytes(closed, specs, SIZES), flatten(closed)
    assert [sizes[output] for output in flat.outputs] == expected


def test_zeros_of_a_branch_are_split_as_what_another_returns():
    function = jax.grad(lambda x: lax.cond(x.sum() > 0, lambda x: (x**2).sum(), lambda x: 0.0, x))
    flat = flatten(jax.make_jaxpr(function)(f32(B, D)))
    splits, choices = propagate(flat, [X]), [op for op in flat.ops if op.name == "cond"]
    inside = [array for op in choices for body in op.bodies for array in body.outputs]
    matrices = [array for array in inside if array >= 0 and flat.arrays.shapes[array] == (B, D)]
    assert len(matrices) > 1
    assert {splits[array] for array in matrices} == {(BATCH, ())}


def test_what_a_mask_meets_stays_whole_beside_a_gradient_that_is_split():
    """The mask has no preference, what it is applied to has: no forward pass is split for a backward one."""

    def masked(x):
        return jnp.sin(jnp.where(jnp.tril(jnp.ones((B, L, D), bool)), x, 0.0))

    flat = flatten(jax.make_jaxpr(lambda x, w: jax.grad(lambda x: (masked(x) @ w).sum())(x))(f32(B, L, D), f32(D, F)))
    splits = propagate(flat, [X, ROWS])
    [kept] = [op.results[0] for op in flat.ops if op.name == "cos"]
    [gradient] = [
        op.results[0] for op in flat.ops if op.name == "dot_general" and flat.arrays.shapes[op.results[0]][-1] == D
    ]
    assert splits[kept] == (BATCH, (), ())
    assert splits[gradient][-1] == ("tensor",)


def test_the_largest_of_uneven_shards_counts():
    closed = jax.make_jaxpr(jnp.sin)(f32(9, D))
    flat = flatten(closed)
    splits = propagate(flat, [P(("data", "fsdp"), "tensor")])
    assert splits[flat.outputs[0]] == (("data", "fsdp"), ("tensor",)) == as_dims(P(("data", "fsdp"), "tensor"), 2)
    assert shard_bytes(flat, splits, {"data": 2, "fsdp": 2, "tensor": 8})[flat.outputs[0]] == 3 * 2 * 4


def test_what_is_computed_twice_is_one_operation():
    flat = flatten(jax.make_jaxpr(lambda x: jnp.exp(x) + jnp.exp(x) / 2)(f32(4)))
    assert [op.name for op in flat.ops] == ["exp", "mul", "add"]


def test_operations_on_other_numbers_are_others():
    flat = flatten(jax.make_jaxpr(lambda x: (x > 1, x > 2, x > 1))(f32(4)))
    assert [op.name for op in flat.ops] == ["gt", "gt"]
    assert flat.outputs[0] == flat.outputs[2] != flat.outputs[1]


def test_rematerialized_parts_are_computed_twice():
    function = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    names = [op.name for op in flatten(jax.make_jaxpr(jax.value_and_grad(lambda x: function(x).sum()))(f32(4))).ops]
    assert (names.count("sin"), names.count("cos")) == (3, 2)


def test_products_copy_operands_that_do_not_lie_as_they_read_them():
    """Heads come before positions, and summing over two dims turns the first operand around."""
    flat = flatten(jax.make_jaxpr(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k))(f32(B, L, H, K), f32(B, L, H, K)))
    shapes = [flat.arrays.shapes[op.results[0]] for op in flat.ops if op.name == "transpose"]
    assert shapes == [(B, H, L, K), (B, H, K, L)]
    flat = flatten(jax.make_jaxpr(lambda dy, x: jnp.einsum("blf,bld->fd", dy, x))(f32(B, L, F), f32(B, L, D)))
    assert [flat.arrays.shapes[op.results[0]] for op in flat.ops] == [(F, B, L), (F, D)]
