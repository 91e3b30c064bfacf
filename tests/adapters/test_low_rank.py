"""Whatever a program does with its weights, with adapters it computes what it does with the merged weights alone."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.adapters.low_rank import adapting
from redco_cli.adapters.merging import LowRank, column_norms, magnitude_ratio, merged
from redco_cli.adapters.uses import Use, uses_of
from redco_cli.errors import ModelError
from redco_cli.plugin.contract import ADAPTER_OFF

X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 4)), jnp.float32)


def drawn(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def einsum(text):
    return lambda params, x: jnp.einsum(text, x, params["w"])


def scanned(params, x):
    def body(x, w):
        return jnp.tanh(jax.checkpoint(lambda x, w: x @ w.astype(x.dtype))(x, w)), None

    return jax.lax.scan(body, x, params["w"])[0]


def in_branches(params, x):
    return jax.lax.switch(1, [lambda w, x: x @ w, lambda w, x: jnp.einsum("bsi,io->bso", 2 * x, w)], params["w"], x)


def repeated(params, x):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ params["w"]), x)


def lookup(params, x):
    return jnp.take(params["w"], (jnp.abs(x[..., 0]) * 2).astype(int), axis=0)


def experts_together(params, x):
    return jnp.einsum("bsi,xio->bsxo", x, params["w"])


def experts_apart(params, x):
    rows = jnp.stack([x, 2 * x], 1)
    return jnp.einsum("bxsi,xio->bxso", rows, params["w"])


PROGRAMS = {
    "plain": (einsum("bsi,io->bso"), (4, 6)),
    "transposed": (einsum("bsi,oi->bso"), (6, 4)),
    "heads": (einsum("bsi,ihd->bshd"), (4, 2, 3)),
    "from heads": (lambda p, x: jnp.einsum("bshd,hdo->bso", x.reshape(3, 5, 2, 2), p["w"]), (2, 2, 6)),
    "heads before": (einsum("bsi,hid->bhsd"), (2, 4, 3)),
    "weight first": (lambda p, x: jnp.einsum("io,bsi->obs", p["w"], x), (4, 6)),
    "reshaped": (lambda p, x: jnp.einsum("bsi,ihd->bshd", x, p["w"].T.reshape(4, 3, 2)), (6, 4)),
    "layers": (scanned, (3, 4, 4)),
    "branches": (in_branches, (4, 6)),
    "while": (repeated, (4, 4)),
    "lookup": (lookup, (9, 6)),
    "experts apart": (experts_apart, (2, 4, 6)),
    "one input, many experts": (experts_together, (2, 4, 6)),
}


def factors_of(use, rank, dora):
    factors = {"A": drawn((*use.stack, use.inputs, rank), 1), "B": drawn((*use.stack, rank, use.outputs), 2)}
    return factors | ({"magnitude": 1 + drawn((*use.stack, use.outputs), 3) ** 2} if dora else {})


PLAIN = ("plain", "lookup", "experts apart")
"""What is tried without a magnitude in every run of the tests, and the rest in `make test-all` only."""
DORA = tuple(name for name in PROGRAMS if name not in ("layers", "while", "one input, many experts", "lookup"))
"""The same with one; lookups have none."""


def chosen(names, *, dora):
    every = (name for name in PROGRAMS if not dora or name != "lookup")
    return [pytest.param(name, dora, marks=() if name in names else pytest.mark.slow) for name in every]


@pytest.mark.parametrize(("name", "dora"), [*chosen(PLAIN, dora=False), *chosen(DORA, dora=True)])
def test_an_adapter_does_what_the_merged_weight_does(name, dora):
    program, shape = PROGRAMS[name]
    params = {"w": drawn(shape)}
    use = uses_of(program, params, X)["w"][0]
    how, factors = LowRank(2, 0.3), factors_of(use, 2, dora)
    adapted = adapting(program, {"w": how})
    expected = program({"w": merged(params["w"], factors, how, use)}, X)
    np.testing.assert_allclose(jax.jit(adapted)(params, {"w": factors}, None, X), expected, rtol=2e-4, atol=2e-4)
    slope = jax.grad(lambda factors: adapted(params, {"w": factors}, None, X).sum())(factors)
    assert all(jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slope))


def test_norms_that_are_known_are_not_computed_again():
    params, how = {"w": drawn((4, 4))}, LowRank(2, 0.3)
    use = uses_of(repeated, params, X)["w"][0]
    factors = factors_of(use, 2, dora=True)
    known = {**factors, "ratio": use.by_layer(functools.partial(magnitude_ratio, scale=0.3), params["w"], factors)}
    adapted = adapting(repeated, {"w": how})
    both = [jax.make_jaxpr(adapted)(params, {"w": one}, None, X) for one in (factors, known)]
    assert ["sqrt" in str(one) for one in both] == [True, False]
    np.testing.assert_allclose(*(adapted(params, {"w": one}, None, X) for one in (factors, known)), atol=1e-5)


def test_it_is_known_how_a_weight_is_used():
    stacks = {name: uses_of(program, {"w": drawn(shape)}, X)["w"] for name, (program, shape) in PROGRAMS.items()}
    assert stacks["layers"] == [Use("product", 1, (3,), 4, 4, (0, 1), ())]
    assert [use.shape for use in stacks["branches"]] == [("product", (), 4, 6)] * 2
    assert stacks["experts apart"][0].shape == ("product", (2,), 4, 6)
    assert stacks["one input, many experts"][0].shape == ("product", (), 4, 12)
    assert stacks["lookup"][0].kind == "lookup"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (lambda p, x: x @ jnp.square(p["w"]), "square"),
        (lambda p, x: x @ p["w"] @ p["w"].T @ (p["w"] @ p["w"].T), "dot_general"),
        (lambda p, x: jax.lax.fori_loop(0, 2, lambda _, w: 2 * w, p["w"]), "loop"),
        (lambda p, x: p["w"], "the result"),
    ],
)
def test_what_cannot_carry_an_adapter_is_refused_by_path(program, why):
    params = {"w": drawn((4, 4))}
    use = Use("product", 0, (), 4, 4, (0, 1), ())
    x = X[0, :4]
    assert any(isinstance(one, str) for one in uses_of(program, params, x)["w"])
    with pytest.raises(ModelError, match=f"w is used by .*{why}"):
        adapting(program, {"w": LowRank(2, 1.0)})(params, {"w": factors_of(use, 2, False)}, None, x)


def test_an_adapter_can_be_left_out():
    from jax.ad_checkpoint import checkpoint_name

    def program(params, x):
        return x @ params["w"] - x @ checkpoint_name(params["w"], ADAPTER_OFF)

    params, how = {"w": drawn((4, 6))}, LowRank(2, 0.5)
    factors = factors_of(uses_of(program, params, X)["w"][0], 2, False)
    found = adapting(program, {"w": how})(params, {"w": factors}, None, X)
    np.testing.assert_allclose(found, 0.5 * (X @ factors["A"] @ factors["B"]), rtol=1e-4, atol=1e-4)


def test_dropout_differs_between_layers_and_follows_its_key():
    def program(params, x):
        return jax.lax.scan(lambda x, w: (x, x @ w), x, params["w"])[1]

    params = {"w": jnp.zeros((2, 4, 6))}
    factors = {"A": jnp.ones((2, 4, 2)), "B": jnp.ones((2, 2, 6))}
    adapted = functools.partial(adapting(program, {"w": LowRank(2, 1.0, dropout=0.5)}), params, {"w": factors})
    first, again, other = (adapted(jax.random.key(seed), X) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert not np.allclose(first[0], first[1])
    np.testing.assert_allclose(adapted(None, X)[0], 2 * X.sum(-1, keepdims=True) * jnp.ones(6), rtol=1e-5)


def test_a_module_of_ones_own():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.remat(nn.Dense)(7)(nn.Conv(4, (1,))(x)))

    params = Own().init(jax.random.key(0), X)["params"]
    uses = uses_of(lambda params, x: Own().apply({"params": params}, x), params, X)
    assert {path for path, found in uses.items() if all(isinstance(use, Use) for use in found)} == {
        "Dense_0/kernel",
        "CheckpointDense_0/kernel",
    }
    assert uses["Conv_0/kernel"] == ["conv_general_dilated"]


def test_dora_begins_as_the_model_whatever_is_dropped():
    params = {"w": drawn((4, 6))}
    use = uses_of(PROGRAMS["plain"][0], params, X)["w"][0]
    norms = column_norms(use.matrix(params["w"]), jnp.zeros((4, 2)), jnp.zeros((2, 6)), 1.0)
    factors = {"A": drawn((4, 2)), "B": jnp.zeros((2, 6)), "magnitude": norms}
    adapted = adapting(PROGRAMS["plain"][0], {"w": LowRank(2, 1.0, dropout=0.5)})
    found = adapted(params, {"w": factors}, jax.random.key(0), X)
    np.testing.assert_allclose(found, X @ params["w"], rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_used_in_two_orientations_has_two_uses():
    found = uses_of(lambda params, x: x @ params["w"] @ params["w"].T, {"w": drawn((4, 4))}, X)["w"]
    assert len({use.signature for use in found}) == 2
    same = uses_of(in_branches, {"w": drawn((4, 6))}, X)["w"]
    assert len({use.signature for use in same}) == 1


def test_a_use_unlike_the_one_that_it_was_made_for_is_refused():
    factors = {"A": drawn((4, 2)), "B": drawn((2, 9))}
    with pytest.raises(ModelError, match="w is used by a product of other dims"):
        adapting(PROGRAMS["plain"][0], {"w": LowRank(2, 1.0)})({"w": drawn((4, 6))}, {"w": factors}, None, X)


def test_a_narrow_base_is_merged_as_it_is_used():
    model, adapter = {"w": drawn((4, 6))}, {"A": drawn((4, 2)), "B": 1e-3 * drawn((2, 6))}
    use = uses_of(PROGRAMS["plain"][0], model, X)["w"][0]
    narrow = model["w"].astype(jnp.bfloat16).astype(jnp.float32)
    delta = merged(narrow, adapter, LowRank(2, 1.0), use) - narrow
    np.testing.assert_allclose(delta, adapter["A"] @ adapter["B"], rtol=1e-2, atol=1e-6)
