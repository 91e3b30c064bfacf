"""The path beside a weight crosses devices together with the weight's own product, in compiled programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.adapters.low_rank import adapting
from redco_cli.adapters.merging import LowRank
from redco_cli.adapters.uses import uses_of
from redco_cli.sharding.compiled.traffic import total_bytes
from redco_cli.sharding.tensor_split import TensorSplit
from tests.adapters.collectives import PLAIN, Sizes, abstract, adapted_loss, collectives, factors_of, step
from tests.adapters.test_low_rank import PROGRAMS, X, drawn
from tests.adapters.test_low_rank import factors_of as drawn_factors
from tests.sharding.measure import QUICKLY, device_mesh

SIZES = Sizes()
DATA2_TENSOR4 = {"data": 2, "fsdp": 1, "tensor": 4}
FSDP4_TENSOR2 = {"data": 1, "fsdp": 4, "tensor": 2}
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
SAVED = (2 + 1) * SIZES.layers * SIZES.batch // 2 * SIZES.length * SIZES.embed * 4
"""On a CPU query, key and value (and gate and up) of the base each all-reduce the gradient of their input over tensor,
where two devices share the batch. Adapted ones add it up first, as GPUs and TPUs do of any."""
HOWS = {
    "lora": PLAIN,
    "dropout": LowRank(3, 0.5, dropout=0.3),
    "dora": PLAIN,
    "dora with dropout": LowRank(3, 0.5, dropout=0.3),
}


def over_tensor(moved):
    return [one for one in moved if "tensor" in one.axes]


def launches(moved):
    return sum(one.count for one in over_tensor(moved))


def per_token(moved, tokens):
    """Those of arrays [.., tokens, rank]: of an activation between A and B."""
    return [one for one in over_tensor(moved) if re.search(rf"\[(\d+,)*{tokens},{SIZES.rank}\]", one.shape)]


def shared_bytes():
    """Of the factors that every device of `tensor` has: A beside columns, B beside rows."""
    factors = factors_of(SIZES)
    rows = {"layers/o", "layers/down"}
    leaves = [factors[path]["B" if path in rows else "A"] for path in factors]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_an_adapter_launches_no_collective_that_its_base_does_not():
    found = {name: collectives(SIZES, DATA2_TENSOR4, name, options=QUICKLY) for name in ("base", "together")}
    assert launches(found["together"]) == launches(found["base"])
    assert per_token(found["together"], SIZES.length) == []
    more = total_bytes(over_tensor(found["together"])) - total_bytes(over_tensor(found["base"]))
    assert more == shared_bytes() - SAVED


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [DATA2_TENSOR4, FSDP4_TENSOR2, CUBE], ids=str)
def test_without_knowing_what_is_split_each_token_is_paid_for(mesh):
    found = {
        name: collectives(SIZES, mesh, name, options=QUICKLY, again=mesh is CUBE)
        for name in ("base", "alone", "together")
    }
    assert launches(found["together"]) == launches(found["base"])
    assert len(per_token(found["alone"], SIZES.length)) >= 4
    assert per_token(found["together"], SIZES.length) == []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [DATA2_TENSOR4, FSDP4_TENSOR2], ids=str)
def test_rows_of_a_split_table_cross_devices_with_those_of_its_factor(mesh):
    base = collectives(SIZES, mesh, "base", options=QUICKLY)
    found = collectives(SIZES, mesh, "together", adapted=("embedding",), options=QUICKLY)
    assert launches(found) == launches(base)
    (together,) = [one.shape for one in per_token(found, SIZES.length)]
    assert f",{SIZES.length},{SIZES.embed}]" in together


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dora", "dropout", "dora with dropout"])
def test_norms_cross_devices_once_and_what_is_dropped_not_at_all(name):
    is_dora = name.startswith("dora")
    base = collectives(SIZES, DATA2_TENSOR4, "base", options=QUICKLY)
    found = collectives(SIZES, DATA2_TENSOR4, "together", how=HOWS[name], dora=is_dora, options=QUICKLY)
    assert per_token(found, SIZES.length) == []
    shapes = [shape for one in over_tensor(found) for shape in re.findall(r"f32\[[\d,]*\]", one.shape)]
    assert f"f32[{SIZES.rank},{SIZES.rank}]" not in shapes
    # Of o and down: the norms, forward and again in the backward pass, and gradients of m, which dropout takes in two.
    vectors = {"dropout": 0, "dora": 2 * 2 + 2, "dora with dropout": 2 * 2 + 2 * 2}[name]
    more = total_bytes(over_tensor(found)) - total_bytes(over_tensor(base))
    assert more == shared_bytes() - SAVED + vectors * SIZES.layers * SIZES.embed * 4


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [DATA2_TENSOR4, FSDP4_TENSOR2, CUBE], ids=str)
@pytest.mark.parametrize("name", HOWS)
def test_loss_and_gradients_are_those_of_one_device(name, mesh):
    how, dora = HOWS[name], name.startswith("dora")
    abstracts = {"model": abstract(SIZES)[0], "adapter": factors_of(SIZES, dora=dora)}
    seeds = iter(range(100))
    params = jax.tree.map(lambda leaf: 0.2 * drawn(leaf.shape, next(seeds)), abstracts)
    batch = {"ids": jnp.arange(SIZES.batch * SIZES.length).reshape(SIZES.batch, -1) % SIZES.vocabulary}
    loss = adapted_loss(SIZES, how)
    expected = jax.value_and_grad(lambda adapter: loss({**params, "adapter": adapter}, batch))(params["adapter"])
    jitted, places, _ = step(SIZES, mesh, abstracts, how, again=mesh is CUBE)
    found, gradients = jitted(*jax.device_put((params, batch), places))
    np.testing.assert_allclose(found, expected[0], rtol=1e-5)
    largest = max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(expected[1]))
    for one, other in zip(jax.tree.leaves(gradients["adapter"]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * largest, rtol=1e-5)


def split_cases():
    for name, (_, shape) in PROGRAMS.items():
        dims = [dim for dim, size in enumerate(shape) if size % 2 == 0 and name not in ("layers", "lookup")]
        dims = [1, 2] if name == "layers" else dims
        for dim in dims:
            marks = () if (name, dim) in (("from heads", 0), ("heads before", 0)) else pytest.mark.slow
            yield pytest.param(name, dim, marks=marks, id=f"{name} {dim}")


@pytest.mark.parametrize(("name", "dim"), list(split_cases()))
def test_any_dim_of_a_weight_may_be_split(name, dim):
    program, shape = PROGRAMS[name]
    params, how = {"w": drawn(shape)}, LowRank(2, 0.3)
    factors = drawn_factors(uses_of(program, params, X)["w"][0], 2, True)
    split = {"w": TensorSplit(device_mesh({"tensor": 2}), dim)}

    def value(splits, factors, x):
        return (adapting(program, {"w": how}, splits)(params, {"w": factors}, None, x) ** 2).sum()

    expected = jax.jit(jax.value_and_grad(lambda *given: value(None, *given), (0, 1)))(factors, X)
    found = jax.jit(jax.value_and_grad(lambda *given: value(split, *given), (0, 1)))(factors, X)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-3)


def view(function, *shape):
    return jax.make_jaxpr(function)(jnp.zeros(shape)).eqns[0]


@pytest.mark.parametrize(
    ("function", "dim", "seen"),
    [
        (lambda x: x.transpose(2, 0, 1), 0, 1),
        (lambda x: x.reshape(4, 48), 0, 0),
        (lambda x: x.reshape(2, 2, 6, 8), 0, 0),
        (lambda x: x.reshape(1, 4, 6, 8), 0, 1),
        (lambda x: x.reshape(24, 8), 1, None),
        (lambda x: x.reshape(4, 3, 2, 8), 1, None),
        (lambda x: x.reshape(4, 2, 3, 8), 1, 1),
        (lambda x: x.reshape(24, 8), 2, 1),
        (lambda x: jnp.expand_dims(x, 0), 1, 2),
        (lambda x: x.astype(jnp.bfloat16), 2, 2),
    ],
)
def test_blocks_are_followed_through_views(function, dim, seen):
    split = TensorSplit(device_mesh({"tensor": 2}), dim)
    found = split.viewed(view(function, 4, 6, 8))
    assert (None if found is None else found.dim) == seen
