"""Operations that networks rarely hold, in losses: each is read, planned, and computed on a mesh as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

from redco_cli.sharding import make_plan, read
from redco_cli.sharding.predict.memory import StepConfig, TracedLoss, estimate
from redco_cli.training.cuts.growth import growths
from tests.sharding.trial import attempt, due_to_rounding

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
WIDTH, EXAMPLES = 16, 16
PARAMS = {
    "up": np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32) / 3,
    "down": np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4,
}
BATCH = {"x": np.random.default_rng(2).normal(size=(EXAMPLES, 8)).astype(np.float32)}


def net(params):
    return lambda x: jnp.tanh(x @ params["up"]) @ params["down"]


def sq(y):
    return (y**2).reshape(y.shape[0], -1).sum(-1)


def cg(a, b):
    return jax.scipy.sparse.linalg.cg(a, b, maxiter=5)[0]


@jax.custom_vjp
def cv(x):
    return x * 2


cv.defvjp(lambda x: (x * 2, x), lambda x, g: (g * 2,))


@jax.custom_jvp
def cj(x):
    return x * 3


cj.defjvp(lambda primals, tangents: (cj(*primals), tangents[0] * 3))

OPERATIONS = {
    "hessian": lambda f, x, r: sq(jax.vmap(jax.hessian(lambda z: f(z).sum()))(x)),
    "jacfwd": lambda f, x, r: sq(jax.vmap(jax.jacfwd(f))(x)),
    "jacrev": lambda f, x, r: sq(jax.vmap(jax.jacrev(f))(x)),
    "laplacian": lambda f, x, r: jax.vmap(lambda z: jnp.trace(jax.hessian(lambda q: f(q).sum())(z)))(x) ** 2,
    "jvp": lambda f, x, r: sq(jax.jvp(f, (x,), (jnp.ones_like(x),))[1]),
    "fft": lambda f, x, r: sq(jnp.abs(jnp.fft.fft(f(x)))),
    "rfft2": lambda f, x, r: sq(jnp.abs(jnp.fft.rfft2(f(x).reshape(-1, 4, 4)))),
    "irfft": lambda f, x, r: sq(jnp.fft.irfft(jnp.fft.rfft(f(x)) * (1 + 2j))),
    "cholesky": lambda f, x, r: sq(
        jnp.linalg.cholesky(jnp.einsum("bij,bkj->bik", f(x).reshape(-1, 4, 4), f(x).reshape(-1, 4, 4)) + jnp.eye(4))
    ),
    "solve": lambda f, x, r: sq(jnp.linalg.solve(f(x).reshape(-1, 4, 4) + 4 * jnp.eye(4), jnp.ones((4, 1)))),
    "svd": lambda f, x, r: jnp.linalg.svd(f(x).reshape(-1, 4, 4), compute_uv=False).sum(-1),
    "svd uv": lambda f, x, r: sq(jnp.linalg.svd(f(x).reshape(-1, 4, 4))[0]),
    "eigh": lambda f, x, r: sq(jnp.linalg.eigh(f(x).reshape(-1, 4, 4) + f(x).reshape(-1, 4, 4).swapaxes(1, 2))[0]),
    "qr": lambda f, x, r: sq(jnp.linalg.qr(f(x).reshape(-1, 4, 4))[1]),
    "slogdet": lambda f, x, r: jnp.linalg.slogdet(f(x).reshape(-1, 4, 4))[1] ** 2,
    "expm": lambda f, x, r: sq(jax.vmap(jax.scipy.linalg.expm)(f(x).reshape(-1, 4, 4) * 0.1)),
    "sort": lambda f, x, r: sq(jnp.sort(f(x))[:, :5]),
    "argsort": lambda f, x, r: sq(jnp.take_along_axis(f(x), jnp.argsort(f(x), axis=-1), axis=-1)[:, 2:]),
    "top k": lambda f, x, r: lax.top_k(f(x), 3)[0].sum(-1),
    "approx max k": lambda f, x, r: lax.approx_max_k(f(x), 3)[0].sum(-1),
    "assoc": lambda f, x, r: sq(
        lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.tanh(f(x)), f(x)), axis=1)[1]
    ),
    "fori": lambda f, x, r: sq(lax.fori_loop(0, 3, lambda i, y: f(y[:, :8]), f(x))),
    "fori param": lambda f, x, r: sq(lax.fori_loop(0, 3, lambda i, y: f(y[:, :8]) * (i + 1), f(x))),
    "scan x": lambda f, x, r: sq(lax.scan(lambda c, t: (f(c)[:, :8] + t, c), x, jnp.arange(4.0))[0]),
    "scan rev": lambda f, x, r: sq(
        lax.scan(lambda c, t: (f(c)[:, :8] + t, c), x, jnp.arange(4.0), reverse=True, unroll=2)[1].swapaxes(0, 1)
    ),
    "map": lambda f, x, r: lax.map(lambda z: f(z).sum() ** 2, x),
    "map batch": lambda f, x, r: lax.map(lambda z: f(z).sum() ** 2, x, batch_size=4),
    "segment": lambda f, x, r: sq(jax.ops.segment_sum(f(x).T, jnp.arange(16) // 4, 4).T),
    "segment max": lambda f, x, r: sq(jax.ops.segment_max(f(x).T, jnp.arange(16) // 4, 4).T),
    "conv transpose": lambda f, x, r: sq(
        lax.conv_transpose(f(x).reshape(-1, 4, 4, 1), jnp.ones((3, 3, 1, 2)), (2, 2), "SAME")
    ),
    "conv1d": lambda f, x, r: sq(jax.vmap(lambda z: jnp.convolve(z, jnp.ones(3)))(f(x))),
    "pool": lambda f, x, r: sq(nn.max_pool(f(x).reshape(-1, 4, 4, 1), (2, 2), (2, 2))),
    "avgpool": lambda f, x, r: sq(nn.avg_pool(f(x).reshape(-1, 4, 4, 1), (3, 3), (1, 1), "SAME")),
    "cumprod": lambda f, x, r: sq(jnp.cumprod(f(x), 1)),
    "cumlogsumexp": lambda f, x, r: sq(lax.cumlogsumexp(f(x), 1)),
    "searchsorted": lambda f, x, r: sq(f(x) * jnp.searchsorted(jnp.linspace(0, 1, 5), x).sum(-1, keepdims=True)),
    "interp": lambda f, x, r: sq(
        jax.vmap(lambda z: jnp.interp(z, jnp.linspace(-1, 1, 7), jnp.linspace(0, 1, 7)))(f(x))
    ),
    "dyn slice": lambda f, x, r: sq(
        jax.vmap(lambda z, i: lax.dynamic_slice(z, (i,), (4,)))(f(x), jnp.argmax(f(x), -1) % 8)
    ),
    "dyn update": lambda f, x, r: sq(
        jax.vmap(lambda z, i: lax.dynamic_update_slice(z, jnp.zeros(2), (i,)))(f(x), jnp.argmax(f(x), -1) % 8)
    ),
    "scatter": lambda f, x, r: sq(jnp.zeros((x.shape[0], 20)).at[:, jnp.arange(16)].add(f(x))),
    "scatter b": lambda f, x, r: jnp.zeros(x.shape[0]).at[jnp.arange(x.shape[0])].set(f(x).sum(-1)) ** 2,
    "scatter max": lambda f, x, r: sq(jnp.zeros((x.shape[0], 20)).at[:, jnp.arange(16)].max(f(x))),
    "scatter mul": lambda f, x, r: sq(jnp.ones((x.shape[0], 16)).at[:, jnp.arange(16)].mul(f(x), unique_indices=True)),
    "normal": lambda f, x, r: sq(f(x) + jax.random.normal(r, (x.shape[0], 16))),
    "gumbel": lambda f, x, r: sq(f(x) * jax.nn.one_hot(jax.random.categorical(r, f(x)), 16)),
    "permute": lambda f, x, r: sq(f(x) - f(x)[jax.random.permutation(r, x.shape[0])]),
    "gamma": lambda f, x, r: sq(jax.random.gamma(r, jnp.exp(f(x) * 0.1))),
    "beta": lambda f, x, r: sq(jax.random.beta(r, jnp.exp(f(x) * 0.1), 1.0)),
    "poisson": lambda f, x, r: sq(f(x) * jax.random.poisson(r, 3.0, (x.shape[0], 1))),
    "truncated": lambda f, x, r: sq(f(x) * jax.random.truncated_normal(r, -1, 1, (x.shape[0], 16))),
    "keys": lambda f, x, r: jax.vmap(lambda z, k: (f(z) * jax.random.normal(k, (16,))).sum() ** 2)(
        x, jax.random.split(r, x.shape[0])
    ),
    "custom vjp": lambda f, x, r: sq(cv(f(x))),
    "custom jvp": lambda f, x, r: sq(cj(f(x))),
    "cg": lambda f, x, r: sq(
        jax.vmap(lambda a, b: cg(lambda v: a.T @ (a @ v) + v, b))(f(x).reshape(-1, 4, 4), x[:, :4])
    ),
    "root": lambda f, x, r: (
        jax.vmap(
            lambda a: lax.custom_root(
                lambda y: y**3 - a,
                1.0,
                lambda g, y: lax.fori_loop(0, 5, lambda i, z: z - g(z) / 3, y),
                lambda g, y: y / g(1.0),
            )
        )(f(x).sum(-1))
        ** 2
    ),
    "ctc": lambda f, x, r: optax.ctc_loss(
        f(x).reshape(-1, 4, 4), jnp.zeros((x.shape[0], 4)), jnp.ones((x.shape[0], 2), int), jnp.zeros((x.shape[0], 2))
    ),
    "sinkhorn": lambda f, x, r: sq(
        lax.fori_loop(
            0,
            3,
            lambda i, z: z - jax.nn.logsumexp(z, 1, keepdims=True) - jax.nn.logsumexp(z, 2, keepdims=True),
            f(x).reshape(-1, 4, 4),
        )
    ),
    "complex": lambda f, x, r: sq(jnp.abs(jnp.exp(1j * f(x)) @ jnp.ones((16, 3), jnp.complex64))),
    "bits": lambda f, x, r: sq(f(x) * ((jnp.arange(16) & 3) ^ 1)),
    "popcount": lambda f, x, r: sq(f(x) * lax.population_count(jnp.arange(16))),
    "clamp": lambda f, x, r: sq(jnp.clip(f(x), -1, jnp.abs(f(x)).mean())),
    "specials": lambda f, x, r: sq(
        jax.scipy.special.digamma(jnp.abs(f(x)) + 1)
        + jax.scipy.special.erfinv(jnp.tanh(f(x)))
        + jax.scipy.special.i0e(f(x))
    ),
    "betainc": lambda f, x, r: sq(jax.scipy.special.betainc(1.0, 2.0, jax.nn.sigmoid(lax.stop_gradient(f(x)))) + f(x)),
    "reduce prec": lambda f, x, r: sq(lax.reduce_precision(f(x), 8, 7)),
    "select n": lambda f, x, r: sq(jnp.select([f(x) > 1, f(x) > 0], [f(x), 2 * f(x)], 0.0)),
    "switch": lambda f, x, r: sq(
        lax.switch(jnp.int32(jnp.abs(x.sum())) % 3, [f, lambda z: 2 * f(z), lambda z: f(z) ** 2], x)
    ),
    "cond in scan": lambda f, x, r: sq(
        lax.scan(lambda c, i: (lax.cond(i > 1, lambda z: f(z)[:, :8], lambda z: z, c), None), x, jnp.arange(3))[0]
    ),
    "while vmap": lambda f, x, r: sq(
        f(x) * jax.vmap(lambda a: lax.while_loop(lambda v: v < 9, lambda v: v * 2 + 1, jnp.abs(a)))(x[:, 0])[:, None]
    ),
    "remat": lambda f, x, r: sq(jax.checkpoint(f)(x)),
    "einsum": lambda f, x, r: sq(jnp.einsum("bi,ci,cj->bj", f(x), f(x), f(x))),
    "pairwise": lambda f, x, r: jax.nn.logsumexp(f(x) @ f(x).T, axis=-1) ** 2,
    "gram inv": lambda f, x, r: sq(f(x) @ jnp.linalg.inv(f(x).T @ f(x) + jnp.eye(16))),
    "cross cov": lambda f, x, r: jnp.full(x.shape[0], ((f(x).T @ f(x) - jnp.eye(16)) ** 2).sum()),
    "sort batch": lambda f, x, r: jnp.sort(f(x).sum(-1)) ** 2,
    "cumsum batch": lambda f, x, r: jnp.cumsum(f(x).sum(-1)) ** 2,
    "median": lambda f, x, r: jnp.full(x.shape[0], jnp.median(f(x))),
    "quantile": lambda f, x, r: jnp.quantile(f(x), jnp.array([0.1, 0.9]), axis=-1).sum(0) ** 2,
    "roll": lambda f, x, r: sq(jnp.roll(f(x), 3, 1)),
    "flip": lambda f, x, r: sq(f(x)[:, ::-1][:, ::2]),
    "tri solve": lambda f, x, r: sq(
        jax.scipy.linalg.solve_triangular(
            jnp.tril(f(x).reshape(-1, 4, 4)) + 4 * jnp.eye(4), jnp.ones((x.shape[0], 4, 1)), lower=True
        )
    ),
    "nonzero": lambda f, x, r: sq(f(x)[:, jnp.nonzero(jnp.arange(16) % 3, size=6)[0]]),
    "reduce custom": lambda f, x, r: sq(f(x)) * lax.reduce(lax.stop_gradient(f(x)), 1.0, lax.mul, (1,)),
    "reduce any": lambda f, x, r: sq(f(x)) * jnp.any(f(x) > 0, -1) * jnp.all(f(x) > -9),
    "resize": lambda f, x, r: sq(jax.image.resize(f(x).reshape(-1, 4, 4, 1), (x.shape[0], 8, 8, 1), "bilinear")),
    "map coords": lambda f, x, r: sq(
        jax.vmap(lambda im, c: jax.scipy.ndimage.map_coordinates(im, [c * 3, c * 2], 1))(
            f(x).reshape(-1, 4, 4), jax.nn.sigmoid(x)
        )
    ),
    "kron": lambda f, x, r: sq(jax.vmap(lambda z: jnp.kron(z.reshape(4, 4), z.reshape(4, 4)))(f(x))),
    "ragged": lambda f, x, r: sq(lax.ragged_dot(f(x), jnp.ones((2, 16, 4)), jnp.array([16, 16]))),
    "f8": lambda f, x, r: sq(f(x).astype(jnp.float8_e4m3fn).astype(jnp.float32)),
    "bf16": lambda f, x, r: sq(
        lax.dot_general(
            f(x).astype(jnp.bfloat16),
            jnp.ones((16, 4), jnp.bfloat16),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
    ),
    "grad penalty": lambda f, x, r: (jnp.linalg.norm(jax.vmap(jax.grad(lambda z: f(z).sum()))(x), axis=-1) - 1) ** 2,
    "linearize": lambda f, x, r: sq(jax.linearize(f, x)[1](x)),
    "vjp": lambda f, x, r: sq(jax.vjp(f, x)[1](jnp.ones((x.shape[0], 16)))[0]),
    "scalar time": lambda f, x, r: sq(f(x) * jnp.exp(-f(x).sum() * 0)),
    "outer scalar": lambda f, x, r: jax.vmap(lambda z: f(z) @ f(z) * jnp.eye(3).sum())(x),
    "histogram": lambda f, x, r: sq(f(x) * jnp.histogram(x, bins=4)[0].sum()),
    "bincount": lambda f, x, r: sq(f(x) * jnp.bincount(jnp.argmax(x, -1), length=8).max()),
    "softmax where": lambda f, x, r: sq(jax.nn.softmax(f(x), where=f(x) > 0)),
    "lgamma": lambda f, x, r: sq(lax.lgamma(jnp.abs(f(x)) + 1) + lax.igamma(jnp.abs(f(x)) + 1, 2.0)),
    "gather modes": lambda f, x, r: sq(
        jnp.take(f(x), jnp.array([0, 99]), axis=1, mode="clip")
        + jnp.take(f(x), jnp.array([0, 99]), axis=1, mode="fill", fill_value=0)
    ),
    "split": lambda f, x, r: sq(sum(jnp.split(f(x), 4, 1))),
    "tile": lambda f, x, r: sq(jnp.tile(f(x), (1, 3))),
    "repeat": lambda f, x, r: sq(jnp.repeat(f(x), 3, 1)),
    "repeat batch": lambda f, x, r: sq(f(jnp.repeat(x, 4, 0))).reshape(-1, 4).sum(1),
    "meshgrid": lambda f, x, r: sq(jnp.stack(jnp.meshgrid(f(x)[0], f(x)[1]))).sum() + sq(f(x)),
    "ema": lambda f, x, r: sq(lax.reduce_window(f(x), 0.0, lax.add, (1, 3), (1, 1), "SAME")),
    "argmax ste": lambda f, x, r: sq(f(x) + lax.stop_gradient(jax.nn.one_hot(f(x).argmax(-1), 16) - f(x))),
    "vmap cond": lambda f, x, r: jax.vmap(lambda z: lax.cond(z.sum() > 0, lambda a: f(a).sum(), lambda a: 0.0, z) ** 2)(
        x
    ),
    "polyval": lambda f, x, r: sq(jnp.polyval(jnp.array([1.0, 2.0, 3.0]), f(x))),
    "scan emit": lambda f, x, r: lax.scan(lambda c, z: (c + f(z).sum(), c * f(z).sum()), 0.0, x)[1],
    "nested": lambda f, x, r: sq(jax.grad(lambda z: sq(jax.grad(lambda q: sq(f(q)).sum())(z)).sum())(x)),
}
"""Of a network, its inputs [B, 8] and a key, to a number for each example."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_step_equals_one_on_one_device(name):
    def loss(params, batch):
        return OPERATIONS[name](net(params), batch["x"], jax.random.key(0)).mean()

    plan = make_plan(read(loss, PARAMS, BATCH), CUBE)
    memory = estimate(TracedLoss(loss, PARAMS, BATCH), (), CUBE, plan.specs, plan.gathered, StepConfig())
    assert memory.total > 0
    closed = jax.make_jaxpr(loss)(PARAMS, BATCH)
    assert len(growths(closed, [0] * len(closed.jaxpr.invars), 17)) == 1
    allowed = max(2e-5, 4 * due_to_rounding(loss, PARAMS, BATCH))
    assert attempt(loss, PARAMS, BATCH, plan).worst < allowed
