"""The step against plain JAX: accumulation, unequal weights, the finite check, no recompiles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.errors import RecipeError
from redco_cli.plugin.contract import Loss, Params
from redco_cli.plugin.state import Variables
from redco_cli.sharding.compiled.traffic import compiled_collectives, total_bytes
from redco_cli.sharding.gather.gathering import gathering
from redco_cli.training.state import TrainState, frozen_paths, merge, new_state, partition
from redco_cli.training.step import make_eval_step, make_train_step
from tests.sharding.measure import device_mesh

PARAMS = {"layer": {"w": jnp.array([[0.5], [-0.25], [1.0]]), "b": jnp.array([0.1])}}
OPTIMIZER = optax.sgd(0.1)

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def loss(variables: Variables, batch: dict[str, jax.Array], rng: object, train: bool) -> Loss:
    params = variables.params
    error = (batch["x"] @ params["layer"]["w"] + params["layer"]["b"])[:, 0] - batch["y"]
    weighted = jnp.float32(error**2) * batch["w"]
    return Loss(weighted.sum(), batch["w"].sum(), {"bias": (error.sum(), jnp.float32(error.size))})


def batch_of(weights: list[int], micro_batches: int) -> dict[str, jax.Array]:
    generator = np.random.default_rng(0)
    n = len(weights)
    flat = {"x": generator.normal(size=(n, 3)), "y": generator.normal(size=n), "w": np.array(weights)}
    return {k: jnp.float32(v).reshape(micro_batches, n // micro_batches, *v.shape[1:]) for k, v in flat.items()}


def reference(weights: list[int]) -> tuple[float, dict[str, dict[str, np.ndarray]]]:
    batch = jax.tree.map(lambda leaf: leaf[0], batch_of(weights, 1))

    def mean(params: object) -> jax.Array:
        result = loss(Variables(params), batch, None, True)
        return result.sum / result.weight

    value, gradient = jax.value_and_grad(mean)(PARAMS)
    return float(value), jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, gradient)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=8, max_size=8).filter(any), st.sampled_from([1, 2, 4, 8]))
def test_any_cut_of_unevenly_weighted_examples_gives_the_same_step(weights: list[int], micro_batches: int) -> None:
    step = make_train_step(loss, OPTIMIZER, optax.constant_schedule(0.1), seed=0, places=HERE)
    state, metrics = step(new_state(PARAMS, frozenset(), OPTIMIZER), batch_of(weights, micro_batches))
    value, params = reference(weights)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.params, params)
    assert int(state.step) == 1
    assert int(state.skipped) == 0


def mlp_loss(variables: Variables, batch: dict[str, jax.Array], rng: object, train: bool) -> Loss:
    params = variables.params
    rows = jnp.tanh(params["table"][batch["row"]] @ params["up"]) @ params["down"]
    return Loss((batch["w"] * (rows[:, 0] - batch["y"]) ** 2).sum(), batch["w"].sum())


@pytest.mark.parametrize("sizes", [{"data": 8, "fsdp": 1, "tensor": 1}, {"data": 4, "fsdp": 2, "tensor": 1}])
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_gradients_are_added_up_over_data_once_in_a_step(sizes: dict[str, int], micro_batches: int) -> None:
    """However many micro-batches: a shard of each gradient, and the update is that of one device."""
    draw = np.random.default_rng(0).normal
    params = {"table": draw(size=(16, 8)), "up": draw(size=(8, 32)), "down": draw(size=(32, 8))}
    params = jax.tree.map(np.float32, params)
    batch = {"row": np.arange(32) % 16, "y": np.float32(draw(size=32)), "w": np.arange(32.0, dtype=np.float32)}
    batch = {name: leaf.reshape(micro_batches, -1) for name, leaf in batch.items()}
    mesh = device_mesh(sizes)
    specs = {name: P("fsdp") if sizes["fsdp"] > 1 else P() for name in params}
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    def on_mesh(variables: Variables, batch: dict[str, jax.Array], rng: object, train: bool) -> Loss:
        def inner(params: Params, batch: dict[str, jax.Array]) -> Loss:
            return mlp_loss(Variables(params), batch, rng, train)

        result: Loss = gathering(inner, specs, dict.fromkeys(specs, P()), mesh)(variables.params, batch)
        return result

    def state(place: object) -> TrainState:
        return new_state(jax.device_put(params, place), frozenset(), OPTIMIZER)

    cut = jax.device_put(batch, NamedSharding(mesh, P(None, ("data", "fsdp"))))
    step = jax.jit(make_train_step(on_mesh, OPTIMIZER, optax.constant_schedule(0.1), seed=0, places=places))
    compiled = step.lower(state(places), cut).compile()
    alone = make_train_step(mlp_loss, OPTIMIZER, optax.constant_schedule(0.1), seed=0, places=HERE)
    found, right = compiled(state(places), cut)[0], alone(state(HERE), batch)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found.params, right.params)
    over_data = [one for one in compiled_collectives(compiled, sizes) if one.axes == ("data",)]
    shards = sum(leaf.nbytes for leaf in params.values()) // sizes["fsdp"]
    assert shards <= total_bytes(over_data) < shards + 100, over_data  # and scalars


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_counts(bad: float) -> None:
    step = jax.jit(make_train_step(loss, OPTIMIZER, optax.constant_schedule(0.1), seed=0, places=HERE))
    state = jax.device_put(new_state(PARAMS, frozenset(), OPTIMIZER), HERE)
    spoiled = batch_of([1, 1, 1, 1], 2)
    spoiled["x"] = spoiled["x"].at[1, 0, 0].set(bad)
    for count in (1, 2):
        state, _ = step(state, spoiled)
        assert (int(state.step), int(state.skipped), int(state.streak)) == (count, count, count)
        jax.tree.map(np.testing.assert_array_equal, state.params, PARAMS)
    state, metrics = step(state, batch_of([1, 1, 1, 1], 2))
    assert (int(state.step), int(state.skipped), int(state.streak)) == (3, 2, 0)
    assert np.isfinite(metrics["loss"])
    assert step._cache_size() == 1


def test_a_batch_without_weight_is_skipped() -> None:
    step = make_train_step(loss, OPTIMIZER, optax.constant_schedule(0.1), seed=0, places=HERE)
    state, _ = step(new_state(PARAMS, frozenset(), OPTIMIZER), batch_of([0, 0, 0, 0], 2))
    assert int(state.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, PARAMS)


def test_metrics_have_their_own_weight() -> None:
    step = make_train_step(loss, OPTIMIZER, optax.constant_schedule(0.1), seed=0, places=HERE)
    _, metrics = step(new_state(PARAMS, frozenset(), OPTIMIZER), batch_of([0, 3, 1, 0], 4))
    batch = jax.tree.map(lambda leaf: leaf[0], batch_of([0, 3, 1, 0], 1))
    error = (batch["x"] @ PARAMS["layer"]["w"] + PARAMS["layer"]["b"])[:, 0] - batch["y"]
    np.testing.assert_allclose(metrics["bias"], error.mean(), rtol=1e-5)


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    optimizer = optax.adam(0.1)
    frozen = frozen_paths(PARAMS, ["layer/b"], [], "r.yaml:1: train.freeze")
    state = new_state(PARAMS, frozen, optimizer)
    assert [leaf.shape for leaf in jax.tree.leaves(state.opt_state)] == [(), (3, 1), (3, 1)]
    following, _ = make_train_step(loss, optimizer, optax.constant_schedule(0.1), seed=0, places=HERE)(
        state, batch_of([1] * 4, 1)
    )
    np.testing.assert_array_equal(following.params["layer"]["b"], PARAMS["layer"]["b"])
    assert (following.params["layer"]["w"] != PARAMS["layer"]["w"]).all()
    assert merge(*partition(PARAMS, frozen)) == PARAMS


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("laier/.*", "r.yaml:1: train.freeze: 'laier/.*' matches no parameter path\n"),
        ("(", "r.yaml:1: train.freeze: '(' is no regular expression: "),
        (".*", "r.yaml:1: train.freeze: every parameter is frozen\n  -> leave something to train"),
    ],
)
def test_freeze_patterns_that_cannot_work(pattern: str, text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        frozen_paths(PARAMS, [pattern], [], "r.yaml:1: train.freeze")
    assert str(refused.value).startswith(text)


def test_dropout_keys_differ_by_step_and_micro_batch() -> None:
    def noisy(variables: Variables, batch: dict[str, jax.Array], rng: object, train: bool) -> Loss:
        noise = jax.random.normal(rng, ())
        return Loss(noise + 0 * variables.params["layer"]["b"].sum(), jnp.float32(1))

    step = jax.jit(make_train_step(noisy, OPTIMIZER, optax.constant_schedule(0.1), seed=7, places=HERE))
    state: TrainState = new_state(PARAMS, frozenset(), OPTIMIZER)
    seen = []
    for micro_batches in (1, 2):
        for _ in range(2):
            state, metrics = step(state, batch_of([1, 1], micro_batches))
            seen.append(float(metrics["loss"]))
    assert len(set(seen)) == 4
    _, metrics = step(new_state(PARAMS, frozenset(), OPTIMIZER), batch_of([1, 1], 1))
    assert float(metrics["loss"]) == seen[0]


def test_eval_step_returns_sums() -> None:
    batch = jax.tree.map(lambda leaf: leaf[0], batch_of([1, 2, 0, 4], 1))
    result = make_eval_step(loss)(Variables(PARAMS), batch)
    assert float(result.weight) == 7
    np.testing.assert_allclose(result.sum / 7, reference([1, 2, 0, 4])[0], rtol=1e-6)
