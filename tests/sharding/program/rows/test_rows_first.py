"""Rows are looked up in weights before they are computed with: the same numbers and gradients, and few bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from redco_cli.sharding.program.rows.first import rows_first
from tests.sharding.beside import CUBE, approximately, draw, moved, slowly

ROWS, WIDTH, RANK = 12, 8, 2
WEIGHTS = {
    "table": draw(ROWS, WIDTH),
    "new": draw(3, WIDTH, seed=1),
    "left": draw(ROWS, RANK, seed=2),
    "right": draw(RANK, WIDTH, seed=3),
    "scale": draw(WIDTH, seed=4),
    "stack": draw(4, 3, WIDTH, seed=5),
    "number": draw(seed=6),
}
IDS = np.array([[0, 5, 11, 5], [-1, 3, 12, 14]], np.int32)
FSDP = {"data": 1, "fsdp": 8, "tensor": 1}


def joined(p):
    return jnp.concatenate([p["table"], p["new"], p["table"] * 2])


CONSTANT = draw(ROWS + 3, WIDTH, seed=7)
MADE = {
    "joined": joined,
    "joined with none": lambda p: jnp.concatenate([p["table"], p["new"][:0], p["new"]]),
    "joined with constants": lambda p: jnp.concatenate([p["table"], np.ones((3, WIDTH), np.float32)]) * CONSTANT,
    "joined side by side": lambda p: jnp.concatenate([p["table"], p["left"]], 1),
    "scaled": lambda p: p["table"] * p["scale"] * p["number"],
    "normed": lambda p: p["table"] / jnp.linalg.norm(p["table"], axis=-1, keepdims=True),
    "layer norm of rows": lambda p: (p["table"] - p["table"].mean(1, keepdims=True)) / p["table"].std(1, keepdims=True),
    "merged": lambda p: p["table"] + 0.5 * p["left"] @ p["right"],
    "factors": lambda p: p["left"] @ p["right"],
    "frozen in part": lambda p: jnp.concatenate([jax.lax.stop_gradient(p["table"]), p["new"]]),
    "rows of a stack": lambda p: 2 * p["stack"].reshape(ROWS, WIDTH),
    "a stack of rows": lambda p: jnp.tanh(p["table"]).reshape(ROWS // 2, 2 * WIDTH),
    "heads": lambda p: jnp.tanh(p["table"]).reshape(ROWS, 2, WIDTH // 2) + p["new"][0, : WIDTH // 2],
    "padded": lambda p: p["table"].at[0].set(0.0),
    "of all rows": lambda p: jax.nn.softmax(p["table"], 0),
    "one vector in all rows": lambda p: jnp.broadcast_to(p["scale"], (ROWS, WIDTH)) + p["table"][:1],
    "numbers": lambda p: jnp.square(p["table"]).sum(1),
    "in another precision": lambda p: (p["table"] * 2).astype(jnp.bfloat16),
    "transposed": lambda p: (p["right"].T @ p["left"].T).T,
    "within a jit": lambda p: jax.jit(joined)(p),
    "rematerialised": lambda p: jax.checkpoint(joined)(p),
}
BY_ALL = {"padded", "of all rows", "transposed", "a stack of rows", "layer norm of rows", "rematerialised"}
"""What is not made row by row, or what numbers of all rows that are no weights are made for."""
LOOKUPS = {
    "indexed": lambda table, ids: table[ids % 6],
    "taken": lambda table, ids: jnp.take(table, ids, axis=0),
    "clipped": lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"),
    "filled": lambda table, ids: table.at[ids].get(mode="fill", fill_value=7),
    "one each": lambda table, ids: table[ids[0]],
}


def on_weights(loss, ids):
    """A loss as it is written, and as rows are looked up first."""
    leaves, tree = jax.tree.flatten(WEIGHTS)
    closed = jax.make_jaxpr(lambda leaves, ids: loss(jax.tree.unflatten(tree, leaves), ids))(leaves, ids)
    first = rows_first(closed, len(leaves))

    def run(p):
        (result,) = core.jaxpr_as_fun(first)(*jax.tree.leaves(p), ids)
        return result

    return run, first


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_numbers_and_gradients_are_the_same(made, lookup):
    def loss(p, ids):
        rows = LOOKUPS[lookup](MADE[made](p), ids)
        return jnp.nan_to_num(jnp.sin(rows.astype(jnp.float32)), nan=3.0).sum()

    run, _ = on_weights(loss, IDS)
    found, right = (jax.value_and_grad(function)(WEIGHTS) for function in (run, lambda p: loss(p, IDS)))
    approximately(found, right, 2e-2 if made == "in another precision" else 1e-5)


@pytest.mark.parametrize("made", sorted(MADE.keys() - BY_ALL))
def test_no_more_rows_are_made_than_are_looked_up(made):
    _, first = on_weights(lambda p, ids: MADE[made](p)[ids].sum(), IDS)
    computed = [one.outvars[0].aval.shape for one in first.eqns if one.primitive.name not in ("gather", "reshape")]
    assert not any(shape[:1] in ((ROWS,), (2 * ROWS + 3,), (ROWS + 3,), (ROWS // 2,)) for shape in computed)


def test_a_table_that_is_not_made_is_left_alone():
    closed = jax.make_jaxpr(lambda table, ids: table.astype(jnp.bfloat16)[ids])(WEIGHTS["table"], IDS)
    assert rows_first(closed, 1) is closed


def test_what_is_looked_up_in_vain_is_left_out():
    """A table that is followed only in part."""

    def loss(p, ids):
        return jnp.concatenate([p["table"], jnp.sort(p["table"], 1) + p["left"][:, :1].T[:, :1]])[ids].sum()

    run, first = on_weights(loss, IDS % ROWS)
    read = {x for one in first.eqns for x in one.invars if not isinstance(x, core.Literal)} | {*first.jaxpr.outvars}
    assert all(read.intersection(one.outvars) for one in first.eqns)
    approximately(jax.value_and_grad(run)(WEIGHTS), jax.value_and_grad(loss)(WEIGHTS, IDS % ROWS), 1e-5)


def test_numbers_of_another_kind_are_looked_up_as_they_are():
    closed = jax.make_jaxpr(lambda table, ids: jnp.take(table * 2, ids, axis=0))(np.arange(12).reshape(6, 2), IDS)
    found, right = (core.jaxpr_as_fun(one)(np.arange(12).reshape(6, 2), IDS) for one in (rows_first(closed, 1), closed))
    np.testing.assert_array_equal(found, right)


def test_few_rows_are_not_made_for_each_of_many_ids():
    """More work than to make all of them once."""
    many = np.zeros((16, ROWS), np.int32)
    closed = jax.make_jaxpr(lambda left, right, ids: (left @ right)[ids])(WEIGHTS["left"], WEIGHTS["right"], many)
    products = [one for one in rows_first(closed, 2).eqns if one.primitive.name == "dot_general"]
    assert [one.outvars[0].aval.shape for one in products] == [(ROWS, WIDTH)]


def test_what_is_made_of_itself_in_several_shapes_is_followed_once():
    def loss(p, ids):
        table = p["table"]
        for _ in range(12):
            one, other = table.reshape(ROWS // 2, 2, WIDTH), table.reshape(ROWS // 4, 4, WIDTH)
            table = jnp.sin(one).reshape(ROWS, WIDTH) + jnp.cos(other).reshape(ROWS, WIDTH)
        return table[ids].sum()

    _, first = on_weights(loss, IDS % ROWS)
    assert len(first.eqns) < 500


def test_what_is_used_besides_is_made_once():
    """A head that is the table, too."""

    def loss(p, ids):
        table = joined(p)
        return (jnp.tanh(table[ids]) @ table.T).sum()

    run, first = on_weights(loss, IDS % ROWS)
    assert sum(one.primitive.name == "concatenate" for one in first.eqns) == 1
    approximately(jax.value_and_grad(run)(WEIGHTS), jax.value_and_grad(loss)(WEIGHTS, IDS % ROWS), 1e-5)


@pytest.mark.parametrize("made", ["joined", "normed", "merged", *slowly("scaled", "rows of a stack", "frozen in part")])
@pytest.mark.parametrize("mesh", [FSDP, *slowly(CUBE)], ids=["fsdp", "cube"])
def test_rows_move_and_no_table(made, mesh):
    sizes = {"table": (8192, 128), "new": (256, 128), "left": (8192, 4), "right": (4, 128), "stack": (64, 128, 128)}
    shapes = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in sizes.items()}
    params = shapes | {"scale": shapes["right"].update(shape=(128,)), "number": shapes["right"].update(shape=())}
    table = {"rows of a stack": lambda p: 2 * p["stack"].reshape(8192, 128)}.get(made, MADE[made])
    batch = {"ids": jax.ShapeDtypeStruct((16, 8), jnp.int32)}
    sent = moved(lambda p, batch: jnp.square(table(p)[batch["ids"]]).mean(), params, batch, mesh)
    assert sent < 4 * 8192 * 128 / 3
