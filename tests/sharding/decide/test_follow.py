"""Optimizer state lives where its parameters live, for every kind of optax transformation, and a step stays right."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.decide.follow import bytes_per_device, follow
from tests.sharding.measure import QUICKLY, device_mesh

SPECS = {
    "block": {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "scale": P("tensor"), "norm": P()},
    "embedding": P("tensor", "fsdp"),
    "layers": [P(None, "fsdp", "tensor"), P(None, ("fsdp", "tensor"))],
}
SHAPES = {
    "block": {"up": (64, 256), "down": (256, 64), "scale": (256,), "norm": (64,)},
    "embedding": (96, 128),
    "layers": [(3, 64, 256), (3, 48, 64)],
}
PARAMS = jax.tree.map(jnp.zeros, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def state_of(transformation, params=PARAMS):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optax announces changes of its own
        return jax.eval_shape(transformation.init, params)


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, P))


def by_path(tree):
    found = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, P))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def every(name):
    return {f"{name}/{path}": spec for path, spec in by_path(SPECS).items()}


EXACT = {
    "adam": (optax.adam(1e-3), {"0/count": P(), **every("0/mu"), **every("0/nu")}),
    "lion": (optax.lion(1e-3), {"0/count": P(), **every("0/mu")}),
    "momentum": (optax.sgd(1e-3, momentum=0.9), every("0/trace")),
    "sgd": (optax.sgd(1e-3), {}),
    "schedule": (
        optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
        {"0/count": P(), **every("0/mu"), **every("0/nu"), "2/count": P()},
    ),
    "clipped": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        {"1/0/count": P(), **every("1/0/mu"), **every("1/0/nu")},
    ),
    "accumulated": (
        optax.MultiSteps(optax.lion(1e-3), 4),
        {
            "mini_step": P(),
            "gradient_step": P(),
            "inner_opt_state/0/count": P(),
            **every("inner_opt_state/0/mu"),
            **every("acc_grads"),
        },
    ),
    "if finite": (
        optax.apply_if_finite(optax.lion(1e-3), 3),
        {
            "notfinite_count": P(),
            "last_finite": P(),
            "total_notfinite": P(),
            "inner_state/0/count": P(),
            **every("inner_state/0/mu"),
        },
    ),
    "injected": (
        optax.inject_hyperparams(optax.lion)(learning_rate=1e-3),
        {
            "count": P(),
            "inner_state/0/count": P(),
            **{f"hyperparams/{name}": P() for name in ("b1", "b2", "learning_rate", "weight_decay")},
            **every("inner_state/0/mu"),
        },
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_leaf_of_common_transformations(name):
    transformation, expected = EXACT[name]
    assert by_path(follow(state_of(transformation), PARAMS, SPECS)) == expected


def test_adafactor_keeps_rows_and_columns_where_their_dim_lives():
    state = state_of(optax.adafactor(1e-3, min_dim_size_to_factor=32))
    found = by_path(follow(state, PARAMS, SPECS))
    factored = {path[2:]: spec for path, spec in found.items() if path.startswith(("0/v_row", "0/v_col"))}
    assert factored == {
        "v_row/block/up": P("fsdp"),
        "v_col/block/up": P("tensor"),
        "v_row/block/down": P("fsdp"),
        "v_col/block/down": P("tensor"),
        "v_row/embedding": P("tensor"),
        "v_col/embedding": P("fsdp"),
        "v_row/layers/0": P(None, "fsdp"),
        "v_col/layers/0": P(None, "tensor"),
        "v_row/layers/1": P(None, ("fsdp", "tensor")),
        "v_col/layers/1": P(),
        **{f"{kind}/block/{name}": P() for kind in ("v_row", "v_col") for name in ("scale", "norm")},
    }
    whole = {path[4:]: spec for path, spec in found.items() if path.startswith("0/v/")}
    assert whole == {path: SPECS["block"]["scale"] if path == "block/scale" else P() for path in by_path(SPECS)}


def test_adafactor_of_a_square_matrix_is_divided():
    """Its rows and columns look alike; either is fine for both."""
    state = state_of(optax.adafactor(1e-3, min_dim_size_to_factor=32), {"w": jnp.zeros((64, 64))})
    found = by_path(follow(state, {"w": jnp.zeros((64, 64))}, {"w": P("fsdp", "tensor")}))
    assert {found["0/v_row/w"], found["0/v_col/w"]} <= {P("fsdp"), P("tensor")}


LABELS = {
    "block": {"up": "a", "down": "b", "scale": "a", "norm": "none"},
    "embedding": "b",
    "layers": ["none", "a"],
}


def labelled(*labels):
    return {path for path, label in by_path(LABELS).items() if label in labels}


def test_several_optimizers_for_several_parameters():
    several = optax.multi_transform({"a": optax.adam(1e-3), "b": optax.lion(1e-3), "none": optax.set_to_zero()}, LABELS)
    found = by_path(follow(state_of(several), PARAMS, SPECS))
    specs = by_path(SPECS)
    assert {path: spec for path, spec in found.items() if not path.endswith("count")} == {
        **{
            f"inner_states/a/inner_state/0/{moment}/{path}": specs[path]
            for path in labelled("a")
            for moment in ("mu", "nu")
        },
        **{f"inner_states/b/inner_state/0/mu/{path}": specs[path] for path in labelled("b")},
    }


def test_masked_parameters_have_no_state():
    mask = jax.tree.map(lambda label: label == "a", LABELS)
    found = by_path(follow(state_of(optax.masked(optax.lion(1e-3), mask)), PARAMS, SPECS))
    specs = by_path(SPECS)
    assert {path: spec for path, spec in found.items() if not path.endswith("count")} == {
        f"inner_state/0/mu/{path}": specs[path] for path in labelled("a")
    }


FULL = {
    "adagrad": optax.adagrad(1e-3),
    "yogi": optax.yogi(1e-3),
    "ema": optax.ema(0.9),
    "schedule free": optax.contrib.schedule_free(optax.adamw(1e-3), 1e-3),
    "prodigy": optax.contrib.prodigy(1e-3),
    "ademamix": optax.contrib.ademamix(1e-3),
    "adopt": optax.contrib.adopt(1e-3),
    "sophia": optax.contrib.sophia(1e-3),
    "d-adaptation": optax.contrib.dadapt_adamw(1e-3),
    "dog": optax.contrib.dog(1e-3),
    "madgrad": optax.contrib.madgrad(1e-3),
    "mechanic": optax.contrib.mechanize(optax.adam(1e-3)),
    "momo": optax.contrib.momo_adam(1e-3),
    "sharpness aware": optax.contrib.sam(optax.sgd(1e-3, momentum=0.9), optax.sgd(1e-3)),
    "muon": optax.contrib.muon(1e-3),
    "accumulated schedule free": optax.MultiSteps(optax.contrib.schedule_free(optax.sgd(1e-3), 1e-3), 2),
}


@pytest.mark.parametrize("name", FULL)
def test_whatever_has_the_shape_of_a_parameter_lives_where_it_lives(name):
    """Every shape occurs once among the parameters, so that it tells which one a leaf belongs to."""
    state = state_of(FULL[name])
    by_shape = {leaf.shape: spec for leaf, spec in zip(leaves(PARAMS), leaves(SPECS), strict=True)}
    assert len(by_shape) == len(leaves(PARAMS))
    specs = follow(state, PARAMS, SPECS)
    assert jax.tree.structure(specs, is_leaf=lambda leaf: isinstance(leaf, P)) == jax.tree.structure(state)
    found = list(zip(leaves(state), leaves(specs), strict=True))
    assert all(spec == by_shape.get(leaf.shape, P()) for leaf, spec in found)
    assert sum(leaf.shape in by_shape for leaf, _ in found) >= len(by_shape)


def test_a_history_follows_its_parameter():
    """L-BFGS keeps the last ten differences, one after the other in a dim of their own."""
    found = by_path(follow(state_of(optax.lbfgs(memory_size=10)), PARAMS, SPECS))
    assert found["0/diff_params_memory/block/up"] == P(None, "fsdp", "tensor")
    assert found["0/diff_updates_memory/embedding"] == P(None, "tensor", "fsdp")
    assert found["0/params/embedding"] == P("tensor", "fsdp")


def test_of_parameters_with_the_same_last_key_the_longest_path_decides():
    params = {"kernel": jnp.zeros((8, 4)), "a": {"kernel": jnp.zeros((8, 4)), "b": {"kernel": jnp.zeros((8, 4))}}}
    specs = {"kernel": P("fsdp"), "a": {"kernel": P("tensor"), "b": {"kernel": P(None, "tensor")}}}
    found = by_path(follow(state_of(optax.lion(1e-3), params), params, specs))
    assert found == {
        "0/count": P(),
        "0/mu/kernel": P("fsdp"),
        "0/mu/a/kernel": P("tensor"),
        "0/mu/a/b/kernel": P(None, "tensor"),
    }


def test_parameters_that_are_called_like_parts_of_the_state():
    params = {"mu": {"nu": jnp.zeros((8, 4))}, "nu": jnp.zeros((4, 8)), "count": jnp.zeros((6, 4))}
    specs = {"mu": {"nu": P("fsdp")}, "nu": P("tensor"), "count": P("fsdp", "tensor")}
    found = by_path(follow(state_of(optax.adam(1e-3), params), params, specs))
    assert found == {
        "0/count": P(),
        **{f"0/{moment}/mu/nu": P("fsdp") for moment in ("mu", "nu")},
        **{f"0/{moment}/nu": P("tensor") for moment in ("mu", "nu")},
        **{f"0/{moment}/count": P("fsdp", "tensor") for moment in ("mu", "nu")},
    }


def test_parameters_that_are_one_array():
    params = jnp.zeros((8, 4))
    assert by_path(follow(state_of(optax.lion(1e-3), params), params, P("fsdp"))) == {"0/count": P(), "0/mu": P("fsdp")}


def test_no_parameters():
    assert follow(state_of(optax.sgd(1e-3), {}), {}, {}) == state_of(optax.sgd(1e-3), {})


def test_bytes_of_a_state_on_a_device():
    """Of Adam: two moments of each parameter, and a count."""
    mesh = {"data": 2, "fsdp": 2, "tensor": 4}
    state = state_of(optax.adam(1e-3))
    expected = 2 * 4 * (64 * 256 // 8 * 2 + 256 // 4 + 64 + 96 * 128 // 8 + 3 * 64 * 256 // 8 + 3 * 48 * 64 // 8) + 4
    assert bytes_per_device(state, follow(state, PARAMS, SPECS), mesh) == expected
    assert bytes_per_device(PARAMS, SPECS, mesh) == (expected - 4) // 2
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    assert bytes_per_device(half, SPECS, mesh) == (expected - 4) // 4


# A real step.

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def exact_problem():
    """An MLP of small integers: its gradients are sums without rounding, the same in any order."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(-1, 2, shape).astype(np.float32)  # noqa: E731
    params = {"up": draw(32, 64), "bias": draw(64), "down": draw(64, 32), "norm": draw(32)}
    batch = {"x": draw(16, 32), "y": draw(16, 32)}

    def loss_fn(params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["up"] + params["bias"])
        return ((hidden @ params["down"] + params["norm"] - batch["y"]) ** 2).sum()

    return loss_fn, params, batch


@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(0.1), optax.adafactor(0.1, min_dim_size_to_factor=32), optax.lion(0.1, weight_decay=0.1)],
    ids=["adam", "adafactor", "lion"],
)
def test_a_step_on_a_mesh_equals_one_on_one_device(optimizer):
    loss_fn, params, batch = exact_problem()
    plan = derive(loss_fn, params, batch, MESH)
    state = optimizer.init(params)
    devices = device_mesh(MESH)
    place = lambda specs: jax.tree.map(lambda spec: NamedSharding(devices, spec), specs)  # noqa: E731
    where = place(plan.specs), place(follow(state, params, plan.specs))
    split = jax.tree.map(lambda _: NamedSharding(devices, P(("data", "fsdp"))), batch)

    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    sharded = jax.jit(step, in_shardings=(*where, split), out_shardings=where, compiler_options=QUICKLY)
    mine, theirs = (params, state), jax.device_put((params, state), where)
    placed = jax.device_put(batch, split)
    mine, theirs = jax.jit(step, compiler_options=QUICKLY)(*mine, batch), sharded(*theirs, placed)
    for (path, expected), found in zip(jax.tree.leaves_with_path(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    assert not np.array_equal(theirs[0]["up"], params["up"])
    assert plan.specs["up"] == P("fsdp", "tensor")
    moments = [leaf for leaf in jax.tree.leaves(theirs[1]) if leaf.shape == (32, 64)]
    assert all(leaf.sharding.spec == P("fsdp", "tensor") for leaf in moments)
    assert all(leaf.addressable_shards[0].data.shape == (16, 32) for leaf in moments)
