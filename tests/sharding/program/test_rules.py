"""How axes pass through every primitive: exact, on functions of one operation. The notation is in `notation.py`."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from redco_cli.sharding.program.events import COMPARED
from tests.sharding.program.notation import H, W, X, walked_axes

I32 = jnp.int32
IMAGE = ("NHWC", "HWIO", "NHWC")
SERIES = ("NWC", "WIO", "NWC")


def conv(x, w, groups=1, dims=SERIES):
    window = (1,) * (len(dims[0]) - 2)
    return lax.conv_general_dilated(x, w, window, "SAME", dimension_numbers=dims, feature_group_count=groups)


@jax.custom_vjp
def turned(x):
    return x.T


turned.defvjp(lambda x: (x.T, None), lambda _, gradient: (gradient.T,))

AXES = {
    "elementwise": (lambda x, y: x + y, X(4, 6), W(4, 6), "a b, a b -> a b"),
    "a scalar": (lambda x: x * 2 + 1, X(4, 6), "a b -> a b"),
    "three operands": (lambda c, x, y: jnp.where(c > 0, x, y), X(4, 6), H(4, 6), H(4, 6), "a b, a b, a b -> a b"),
    "another dtype": (lambda x: x.astype(jnp.bfloat16), H(4, 6), "a b -> a b"),
    "a bias": (lambda x, b: x + b, H(4, 6), W(6), "a b, b -> a b"),
    "dims of one": (lambda x, s: x * s, H(4, 6), W(4, 1), "a b, a 1 -> a b"),
    "an outer product": (lambda x, y: x[:, None] * y[None], H(4), H(6), "a, b -> a b"),
    "tokens with themselves": (lambda x: x[:, None] - x[None], H(4), "a -> a a"),
    "a factored operand": (lambda x, y: x.reshape(4, 24) + y, H(4, 6, 4), W(4, 24), "a b c, a b*c -> a b*c"),
    "factors that do not line up": (
        lambda x, y: x.reshape(12) + y.reshape(12),
        H(4, 3),
        H(3, 4),
        "a b, c d -> a*b",
    ),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), H(4, 6), X(3), "a b, c -> a b, c"),
    "several arrays placed at once": (lambda x, y: jax.device_put((x, y)), H(4, 6), X(3), "a b, c -> a b, c"),
    "no gradient": (lambda x: lax.stop_gradient(x), H(4, 6), "a b -> a b"),
    "positions": (lambda x: x + jnp.arange(6.0), H(4, 6), "a b -> a b"),
    "random numbers": (lambda x: x + jax.random.uniform(jax.random.key(0), (4, 6)), H(4, 6), "a b -> a b"),
    "matmul": (lambda x, w: x @ w, X(4, 6), W(6, 8), "a b, b c -> a c"),
    "matmul with a transpose": (lambda x, w: x @ w.T, X(4, 6), W(8, 6), "a b, c b -> a c"),
    "batched matmul": (lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k), H(2, 4, 6), H(2, 5, 6), "a b c, a d c -> a b d"),
    "vmap": (lambda x, w: jax.vmap(lambda one: one @ w)(x), X(4, 6), W(6, 8), "a b, b c -> a c"),
    "transpose": (lambda x: x.transpose(2, 0, 1), X(2, 3, 4), "a b c -> c a b"),
    "split by reshape": (lambda x: x.reshape(4, 2, 3), X(4, 6), "a b*c -> a b c"),
    "merged by reshape": (lambda x: x.reshape(24), X(4, 6), "a b -> a*b"),
    "reshape that cuts unevenly": (lambda x: x.reshape(3, 2, 5), X(2, 3, 5), "a b c -> d e c"),
    "broadcast": (lambda x: jnp.broadcast_to(x, (4, 6)), H(6), "a -> b a"),
    "broadcast of a dim of one": (lambda x: jnp.broadcast_to(x, (4, 6)), H(4, 1), "a 1 -> a b"),
    "repeat": (lambda x: jnp.repeat(x, 3, axis=1), H(4, 6), "a b -> a b*c"),
    "squeeze": (lambda x: jnp.squeeze(x, 1), X(4, 1, 6), "a 1 b -> a b"),
    "expand": (lambda x: jnp.expand_dims(x, (0, 2)), X(4, 6), "a b -> 1 a 1 b"),
    "sum": (lambda x: x.sum(1), H(4, 6, 5), "a b c -> a c"),
    "maximum of everything": (lambda x: x.max(), H(4, 6), "a b -> ."),
    "argmax": (lambda x: x.argmax(-1), H(4, 6), "a b -> a"),
    "cumsum": (lambda x: jnp.cumsum(x, 1), H(4, 6), "a b -> a b"),
    "sort": (lambda x: jnp.sort(x, 1), H(4, 6), "a b -> a b"),
    "Fourier transform": (lambda x: jnp.fft.rfft2(x), H(4, 6, 5), "a b c -> a d e"),
    "triangular system": (
        lax.linalg.triangular_solve,
        H(4, 5, 5),
        H(4, 6, 5),
        "a b c, a d e -> a f g",
    ),
    "singular values": (lambda x: lax.linalg.svd(x, full_matrices=False), H(4, 6, 5), "a b c -> a d e, a f, a g h"),
    "linear system": (lambda a, b: jnp.linalg.solve(a, b), H(4, 5, 5), H(4, 5, 6), "a b c, a d e -> a f g"),
    "backwards": (lambda x: x[::-1], H(4, 6), "a b -> a b"),
    "convolution": (conv, X(2, 8, 6), W(3, 6, 5), "a b c, d' c e -> a f e"),
    "convolution of images": (
        lambda x, w: conv(x, w, 1, IMAGE),
        X(2, 8, 8, 6),
        W(3, 3, 6, 5),
        "a b c d, e' f' d g -> a h i g",
    ),
    "convolution in groups": (lambda x, w: conv(x, w, 2), H(2, 8, 6), W(3, 3, 10), "a b c*d, e' d c*f -> a g c*f"),
    "convolution by channel": (lambda x, w: conv(x, w, 6), H(2, 8, 6), W(3, 1, 6), "a b c, d' 1 c -> a e c"),
    "jit": (lambda x: jax.jit(lambda y: y.T)(x), X(4, 6), "a b -> b a"),
    "remat": (lambda x: jax.checkpoint(lambda y: y.T * 2)(x), X(4, 6), "a b -> b a"),
    "custom derivative, forward": (jax.nn.relu, X(4, 6), "a b -> a b"),
    "custom derivative, backward": (turned, X(4, 6), "a b -> b a"),
    "scan": (
        lambda x, w: lax.scan(lambda c, v: (jnp.tanh(c @ v), c.sum(0)), x, w),
        H(4, 6),
        W(3, 6, 6),
        "a b, c' b b -> a b, d' b",
    ),
    "scan over nothing but a constant": (
        lambda x, w: lax.fori_loop(0, 3, lambda _, c: c @ w, x),
        H(4, 6),
        W(6, 6),
        "a b, b b -> a b",
    ),
    "scan that changes places": (
        lambda x, y: lax.scan(lambda c, _: ((c[1], c[0]), None), (x, y), length=3)[0],
        H(4, 6),
        H(4, 6),
        "a b, a b -> a b, a b",
    ),
    "map": (lambda x, w: lax.map(lambda one: one @ w, x), H(4, 6), W(6, 8), "a' b, b c -> d' c"),
    "while": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].T), (0, x))[1],
        X(6, 6),
        "a a -> a a",
    ),
    "cond": (lambda p, x, y: lax.cond(p[0] > 0, lambda: x, lambda: y), X(1), H(4, 6), H(4, 6), "1, a b, a b -> a b"),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), H(4, 6), H(4, 2), "a b, a c -> a d"),
    "cut in equal parts": (lambda x: jnp.split(x, 3, 1), H(4, 6), "a b*c -> a c, a c, a c"),
    "cut in other parts": (lambda x: jnp.split(x, [2], 1), H(4, 6), "a b -> a c, a d"),
    "slice of a part": (lambda x: x[:, 2:4], H(4, 6), "a b*c -> a c"),
    "slice across parts": (lambda x: x[:, 1:4], H(4, 6), "a b -> a c"),
    "every second": (lambda x: x[:, ::2], H(4, 6), "a b*c -> a b"),
    "every second from the second": (lambda x: x[:, 1::2], H(4, 6), "a b*c -> a b"),
    "every second from the third": (lambda x: x[:, 2::2], H(4, 6), "a b -> a c"),
    "every fourth of six": (lambda x: x[:, ::4], H(4, 6), "a b -> a c"),
    "one layer of a weight": (lambda w: w[1], W(3, 6, 8), "a' b c -> b c"),
    "one element of an activation": (lambda x: x[:, 1], H(3, 6, 8), "a b c -> a c"),
    "slice from somewhere": (lambda x, i: lax.dynamic_slice_in_dim(x, i[0], 2, 1), H(4, 6), X(1), "a b, 1 -> a c"),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 1))), H(4, 6), "a b -> a c"),
    "write a part": (lambda x, y: lax.dynamic_update_slice(x, y, (0, 2)), H(4, 6), H(4, 2), "a b, a c -> a b"),
    "look up rows": (lambda t, i: t[i], W(9, 6), X(4, 5, dtype=I32), "a b, c d -> c d b"),
    "look up columns": (lambda t, i: t[:, i], W(6, 9), X(4, dtype=I32), "a b, c -> a c"),
    "take along": (
        lambda x, i: jnp.take_along_axis(x, i[..., None], -1)[..., 0],
        H(4, 5, 9),
        X(4, 5, dtype=I32),
        "a b c, a b -> a b",
    ),
    "add up rows": (lambda x, i, u: x.at[i].add(u), H(9, 6), X(4, dtype=I32), H(4, 6), "a b, c, d b -> a b"),
    "rows by segment": (
        lambda u, i: jax.ops.segment_sum(u, i, num_segments=9),
        H(4, 6),
        X(4, dtype=I32),
        "a b, c -> d b",
    ),
    "write a column": (lambda x, u: x.at[:, 0].set(u), H(4, 6), H(4), "a b, a -> a b"),
    "one hot": (lambda i, w: jax.nn.one_hot(i, 9) @ w, X(4, 5, dtype=I32), W(9, 6), "a b, c d -> a b d"),
    "attention": (
        jax.nn.dot_product_attention,
        *(H(2, 16, 8, 4),) * 3,
        "a b c d, a e c d, a e c f -> a b c f",
    ),
    "attention, grouped": (
        jax.nn.dot_product_attention,
        H(2, 16, 8, 4),
        H(2, 16, 2, 4),
        H(2, 16, 2, 4),
        "a b c*d e, a f c e, a f c g -> a b c*d g",
    ),
}


def concretely(operand):
    """Indices that start a slice must be integers."""
    return operand._replace(array=jax.ShapeDtypeStruct((1,), I32)) if operand.array.shape == (1,) else operand


@pytest.mark.parametrize("name", AXES)
def test_axes(name):
    function, *operands, expected = AXES[name]
    found = walked_axes(function, *map(concretely, operands))
    assert found.axes == expected
    assert not found.walk.unknown


PARTS = "array that is cut into parts"
SORTED = "array that is scanned or sorted"
MOVES = {
    "elementwise": (lambda x, y: x + y, H(4, 6), W(4, 6), []),
    "an activation that is repeated": (
        lambda x, s: x * s,
        H(4, 6),
        H(4, 1),
        ["all-reduce if b: a 1, 1 x gradient of a repeated array"],
    ),
    "a weight that is repeated": (lambda x, s: x * s, H(4, 6), W(4, 1), []),
    "a broadcast activation": (
        lambda x: jnp.broadcast_to(x[:, None], (4, 6)),
        H(4),
        ["all-reduce if b: a 1, 1 x gradient of a repeated array"],
    ),
    "factors that do not line up": (
        lambda x, y: x.reshape(12) + y.reshape(12),
        H(4, 3),
        H(3, 4),
        [
            "all-gather if c*d: c*d, 1 x array whose parts do not line up",
            "all-reduce if c*d: c*d, 1 x gradient of array whose parts do not line up",
        ],
    ),
    "matmul of examples": (
        lambda x, w: x @ w,
        X(4, 6),
        W(6, 8),
        ["all-reduce if b: a c, 1 x partial sums of a matmul"],
    ),
    "matmul of activations with a weight": (
        lambda x, w: x @ w,
        H(4, 6),
        W(6, 8),
        [
            "all-reduce if b: a c, 1 x partial sums of a matmul",
            "all-reduce if c: a b, 1 x gradient of a matmul's input",
        ],
    ),
    "matmul of two activations": (
        lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k),
        H(2, 4, 6),
        H(2, 5, 6),
        [
            "all-reduce if c: a b d, 1 x partial sums of a matmul",
            "all-reduce if d: a b c, 1 x gradient of a matmul's input",
            "all-reduce if b: a d c, 1 x gradient of a matmul's input",
            f"all-gather if b: a d c, 1 x {COMPARED}",
            f"reduce-scatter if b: a d c, 1 x gradient of {COMPARED}",
        ],
    ),
    "sum": (lambda x: x.sum(1), H(4, 6, 5), ["all-reduce if b: a c, 1 x partial sums of a reduction"]),
    "argmax": (lambda x: x.argmax(-1), H(4, 6), ["all-gather if b: a b, 1 x array whose largest element is sought"]),
    "cumsum of examples": (lambda x: jnp.cumsum(x, 1), X(4, 6), [f"all-gather if b: a b, 1 x {SORTED}"]),
    "cumsum": (
        lambda x: jnp.cumsum(x, 1),
        H(4, 6),
        [f"all-gather if b: a b, 1 x {SORTED}", f"all-reduce if b: a b, 1 x gradient of {SORTED}"],
    ),
    "reshape that cuts unevenly": (
        lambda x: x.reshape(3, 2, 5),
        X(2, 3, 5),
        ["all-gather if a or b: a b c, 1 x reshaped array"],
    ),
    "convolution": (
        conv,
        H(2, 8, 6),
        W(3, 6, 5),
        [
            "all-gather if b: a b c, 1 x edges of an image",
            "all-reduce if b: a b c, 1 x gradient of edges of an image",
            "all-reduce if c: a f e, 1 x partial sums of a convolution",
            "all-reduce if e: a b c, 1 x gradient of a convolution's input",
        ],
    ),
    "convolution by channel": (
        lambda x, w: conv(x, w, 6),
        X(2, 8, 6),
        W(3, 1, 6),
        ["all-gather if b: a b c, 1 x edges of an image"],
    ),
    "scan": (
        lambda x, w: lax.scan(lambda c, v: (c @ v, None), x, w)[0],
        H(4, 6),
        W(3, 6, 6),
        [
            "all-reduce if b: a b, 3 x partial sums of a matmul",
            "all-reduce if b: a b, 3 x gradient of a matmul's input",
        ],
    ),
    "scan in a scan": (
        lambda x: lax.fori_loop(0, 3, lambda _, c: lax.fori_loop(0, 5, lambda _, d: d - d.sum(), c), x),
        H(4),
        ["all-reduce if a: ., 15 x partial sums of a reduction"],
    ),
    "after a scan": (
        lambda x, w: lax.scan(lambda c, v: (c * v, None), x, w)[0].sum(),
        H(4),
        W(3, 4),
        ["all-reduce if a: ., 1 x partial sums of a reduction"],
    ),
    "concatenate": (
        lambda x, y: jnp.concatenate([x, y], 1),
        X(4, 6),
        X(4, 2),
        [
            "all-gather if b: a b, 1 x concatenated array",
            "all-gather if c: a c, 1 x concatenated array",
            "all-gather if d: a d, 1 x concatenated array",
        ],
    ),
    "cut in equal parts": (lambda x: jnp.split(x, 3, 1), X(4, 6), [f"all-gather if b: a b*c, 1 x {PARTS}"]),
    "slice of a part": (lambda x: x[:, 2:4], X(4, 6), [f"all-gather if b: a b*c, 1 x {PARTS}"]),
    "slice across parts": (lambda x: x[:, 1:4], X(4, 6), [f"all-gather if b: a b, 1 x {PARTS}"]),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 1))), X(4, 6), [f"all-gather if b: a b, 1 x {PARTS}"]),
    "write a part": (
        lambda x, y: lax.dynamic_update_slice(x, y, (0, 2)),
        X(4, 6),
        X(4, 2),
        ["all-gather if b: a b, 1 x array that is written in parts"],
    ),
    "look up rows": (lambda t, i: t[i], W(9, 6), X(4, 5, dtype=I32), ["all-reduce if a: c d b, 1 x rows looked up"]),
    "look up rows of activations": (
        lambda t, i: t[i],
        H(9, 6),
        X(4, dtype=I32),
        ["all-reduce if a: c b, 1 x rows looked up"],
    ),
    "add up rows": (
        lambda x, i, u: x.at[i].add(u),
        H(9, 6),
        X(4, dtype=I32),
        H(4, 6),
        ["all-reduce if d: a b, 1 x rows added up", "all-reduce if a: d b, 1 x gradient of rows added up"],
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_would_have_to_move(name):
    function, *operands, expected = MOVES[name]
    assert walked_axes(function, *operands).collectives == expected


FLAGS = {
    "a weight with a weight": (lambda x, y: x @ y, W(4, 6), W(6, 8), ["requires_grad"]),
    "a weight with an example": (lambda x, y: x @ y, X(4, 6), W(6, 8), ["requires_grad from_batch"]),
    "examples alone": (lambda x, y: x + y, X(4, 6), X(4, 6), ["from_batch"]),
    "a constant": (lambda x: jnp.arange(3), X(4), [""]),
    "stopped": (lax.stop_gradient, H(4, 6), ["from_batch"]),
    "argmax": (lambda x: x.argmax(-1), H(4, 6), ["from_batch"]),
    "rows of a table": (lambda t, i: t[i], W(9, 6), X(4, dtype=I32), ["requires_grad from_batch"]),
    "a fixed row of a table": (lambda t: t[jnp.arange(3)], W(9, 6), ["requires_grad"]),
    "a layer of weights": (lambda w: w[1], W(3, 6), ["requires_grad"]),
    "a carry that the weights reach": (
        lambda x, w: lax.scan(lambda c, v: (c * v, None), x, w)[0],
        X(4),
        W(3, 4),
        ["requires_grad from_batch"],
    ),
    "one of two branches": (
        lambda p, x, y: lax.cond(p[0] > 0, lambda: x, lambda: y),
        X(2),
        W(4),
        X(4),
        ["requires_grad from_batch"],
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_what_has_a_gradient_and_what_depends_on_the_batch(name):
    function, *operands, expected = FLAGS[name]
    results = walked_axes(function, *operands).results
    assert [" ".join(flag for flag in ("requires_grad", "from_batch") if getattr(x, flag)) for x in results] == expected


def test_a_product_of_weights_is_no_matmul_with_an_activation():
    found = walked_axes(lambda x, a, b: x @ (a @ b), X(4, 6), W(6, 2), W(2, 8))
    assert [matmul.path for matmul in found.walk.matmuls] == [""]
    assert found.axes == "a b, b c, c d -> a d"


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w.T.T,
        lambda w: w.reshape(12, 2).T.reshape(6, 4),
        lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
        lambda w: w[None, :, :, None].squeeze((0, 3)),
        lambda w: jax.jit(lambda v: v * 2)(w),
    ],
)
def test_matmuls_know_the_weight_through_views_of_it(view):
    found = walked_axes(lambda x, w: x @ view(w), X(4, 6), W(6, 4))
    assert [matmul.path for matmul in found.walk.matmuls] == ["w1"]


def test_a_product_of_two_weights_belongs_to_neither():
    found = walked_axes(lambda x, w, scale: x @ (w * scale), X(4, 6), W(6, 4), W(4))
    assert [matmul.path for matmul in found.walk.matmuls] == [""]


def test_products_of_activations_are_contacts():
    found = walked_axes(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), H(2, 4, 8, 6), H(2, 5, 8, 6))
    ((contracted, batch, free),) = found.walk.activation_products
    assert [[dim[0].size for dim in dims] for dims in (contracted, batch, *free)] == [[6], [2, 8], [4], [5]]
    assert not walked_axes(lambda x, w: x @ w, H(4, 6), W(6, 8)).walk.activation_products


def test_experts_are_dims_that_a_weight_and_an_activation_keep_apart():
    found = walked_axes(lambda x, w: jnp.einsum("etd,edf->etf", x, w), X(3, 4, 6), W(3, 6, 8))
    assert found.axes == "a b c, a c d -> a b d"
    assert [dim[0].size for dim in found.walk.batched] == [3]


def test_what_is_not_understood_is_needed_whole_and_counted():
    shorter = jax.ShapeDtypeStruct((4,), jnp.float32)
    found = walked_axes(lambda x: jax.pure_callback(lambda x: x[:, 0], shorter, x), H(4, 6))
    assert found.axes == "a b -> c"
    assert dict(found.walk.unknown) == {"pure_callback": 1}
    assert found.collectives == [
        "all-gather if a or b: a b, 1 x operand of pure_callback",
        "all-reduce if a or b: a b, 1 x gradient of operand of pure_callback",
    ]


def test_what_no_gradient_meets_is_not_counted():
    shorter = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert not walked_axes(lambda x: jax.pure_callback(lambda x: x[:, 0], shorter, x), X(4, 6)).walk.unknown


OPAQUE = {
    "callback": lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "kernel": lambda x: jax.ffi.ffi_call("fused", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
    "search": lambda x: lax.approx_max_k(x, 4)[0],
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_is_not_understood_is_not_elementwise_for_its_shape(name):
    found = walked_axes(OPAQUE[name], H(4, 4))
    assert sum(found.walk.unknown.values()) == 1
    assert found.axes == "a b -> c d"


ROUTED = {
    "stack": (lambda x, y: jnp.stack([x, y], 1), H(4, 6), H(4, 6), "a b, a b -> a c b"),
    "unstack": (lambda x: jnp.unstack(x, axis=0), H(2, 6), "a b -> b, b"),
    "tile": (lambda x: jnp.tile(x, (1, 3)), H(4, 6), "a b -> a c*b"),
    "sort by another": (lambda x, y: lax.sort((x, y), num_keys=1), H(4, 6), H(4, 6), "a b, a b -> a b, a b"),
    "top k": (lambda x: lax.top_k(x, 2), H(4, 6), "a b -> a c, a c"),
    "scatter max": (lambda x, i, u: x.at[i].max(u), H(9, 6), X(4, dtype=I32), H(4, 6), "a b, c, d b -> a b"),
    "ragged matmul": (lax.ragged_dot, H(4, 6), W(3, 6, 8), X(3, dtype=I32), "a b, c b d, e -> a d"),
}


@pytest.mark.parametrize("name", ROUTED)
def test_axes_on_the_way_to_experts_and_rotations(name):
    function, *operands, expected = ROUTED[name]
    found = walked_axes(function, *operands)
    assert found.axes == expected
    assert not found.walk.unknown


def test_a_carry_that_starts_as_a_constant_is_an_activation():
    """The hidden state of a recurrent layer: `h @ u` is a matmul with a weight."""

    def step(h, x, w, u):
        return jnp.tanh(x @ w + h @ u), None

    def layer(x, w, u):
        return lax.scan(lambda h, now: step(h, now, w, u), jnp.zeros((4, 8)), x)[0]

    found = walked_axes(layer, X(3, 4, 6), W(6, 8), W(8, 8))
    assert found.axes == "a' b c, c d, d d -> b d"
    assert sorted(matmul.path for matmul in found.walk.matmuls) == ["w1", "w2"]


def test_a_row_of_a_weight_that_the_batch_selects_is_an_activation():
    found = walked_axes(lambda w, i, v: w[i[0]] @ v, W(3, 6), X(1, dtype=I32), W(6, 8))
    assert [matmul.path for matmul in found.walk.matmuls] == ["w2"]
