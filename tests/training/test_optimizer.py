"""Schedules against their formulas, optimizers against plain optax."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from redco_cli.recipe.schema import TrainSection
from redco_cli.training.optimizer import (
    UpdateWork,
    decay_mask,
    make_optimizer,
    make_schedule,
    own_optimizer,
    update_work,
    with_clipping,
)
from tests.training.cuts.test_findings import job_of

PEAK, STEPS, WARMUP, DECAY = 0.1, 100, 10, 20
EXPECTED = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1 + (0.1 - 1) * (t - WARMUP) / (STEPS - WARMUP),
    "cosine": lambda t: 0.1 + 0.9 * (1 + np.cos(np.pi * (t - WARMUP) / (STEPS - WARMUP))) / 2,
    "wsd": lambda t: 1.0 if t < STEPS - DECAY else 1 + (0.1 - 1) * (t - (STEPS - DECAY)) / DECAY,
    "inverse_sqrt": lambda t: np.sqrt(WARMUP / t),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_schedules_follow_their_formulas(name: str) -> None:
    train = TrainSection(learning_rate=PEAK, schedule=name, final_learning_rate=0.1)
    schedule = make_schedule(train, steps=STEPS, warmup=WARMUP, decay=DECAY)
    for t in range(STEPS + 1):
        factor = t / WARMUP if t < WARMUP else EXPECTED[name](t)
        np.testing.assert_allclose(schedule(t), PEAK * factor, rtol=1e-5, err_msg=f"step {t}")


@pytest.mark.parametrize("name", EXPECTED)
def test_without_warmup_the_first_step_has_the_peak(name: str) -> None:
    schedule = make_schedule(TrainSection(learning_rate=PEAK, schedule=name), steps=STEPS, warmup=0, decay=DECAY)
    np.testing.assert_allclose(schedule(0), PEAK, rtol=1e-6)
    assert float(schedule(STEPS)) <= PEAK * 1.000001


PARAMS = {"w": jnp.arange(12.0).reshape(3, 4) / 10, "b": jnp.ones(4)}
GRADIENT = {"w": jnp.cos(jnp.arange(12.0)).reshape(3, 4), "b": jnp.array([0.5, -1.0, 2.0, 0.0])}
PLAIN = {
    "adamw": lambda lr: optax.adamw(lr, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1, mask=decay_mask),
    "lion": lambda lr: optax.lion(lr, b1=0.8, b2=0.95, weight_decay=0.1, mask=decay_mask),
    "sgd": lambda lr: optax.chain(optax.trace(0.8), optax.add_decayed_weights(0.1, decay_mask), optax.scale(-lr)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_optimizers_equal_plain_optax(name: str) -> None:
    train = TrainSection(optimizer=name, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1)
    ours, plain = make_optimizer(train, optax.constant_schedule(0.01)), PLAIN[name](0.01)
    results = []
    for optimizer in (ours, plain):
        params, state = PARAMS, optimizer.init(PARAMS)
        for _ in range(3):
            updates, state = optimizer.update(GRADIENT, state, params)
            params = optax.apply_updates(params, updates)
        results.append(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd", "muon"])
def test_every_optimizer_lowers_a_quadratic_and_decays_matrices_only(name: str) -> None:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return sum(((leaf - 0.3) ** 2).sum() for leaf in jax.tree.leaves(params))

    train = TrainSection(optimizer=name, weight_decay=0.0)
    optimizer = make_optimizer(train, optax.constant_schedule(0.02))
    update = jax.jit(lambda params, state: optimizer.update(jax.grad(loss)(params), state, params))
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(30):
        updates, state = update(params, state)
        params = optax.apply_updates(params, updates)
    assert loss(params) < 0.5 * loss(PARAMS)

    zero = jax.tree.map(jnp.zeros_like, GRADIENT)
    decaying = make_optimizer(train.model_copy(update={"weight_decay": 0.5}), optax.constant_schedule(0.1))
    updates, _ = jax.jit(decaying.update)(zero, decaying.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["w"], -0.1 * 0.5 * PARAMS["w"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(updates["b"], 0, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd", "muon"])
def test_a_rate_of_its_own_multiplies_an_update_and_leaves_the_state_its_form(name: str) -> None:
    train, schedule = TrainSection(optimizer=name, weight_decay=0.1), optax.linear_schedule(0.1, 0.01, 5)
    params, gradient = ({"some": {"B": one["w"]}, "w": one["w"]} for one in (PARAMS, GRADIENT))
    plain, faster = make_optimizer(train, schedule), make_optimizer(train, schedule, rates={"some/B": 8.0})
    state = plain.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(faster.init(params))
    for _ in range(2):
        slow, after = plain.update(gradient, state, params)
        fast, state = faster.update(gradient, state, params)
        jax.tree.map(np.testing.assert_array_equal, state, after)
        np.testing.assert_allclose(fast["some"]["B"], 8 * slow["some"]["B"], rtol=1e-6)
        np.testing.assert_array_equal(fast["w"], slow["w"])


@pytest.mark.slow
def test_muon_is_that_of_optax() -> None:
    """Whose iterations are done here, for each matrix to be whole on one device of a mesh."""
    draw = np.random.default_rng(0).normal
    shapes = {"wide": (3, 8, 20), "tall": (24, 6), "b": (5,)}
    params = {key: jnp.asarray(draw(size=shape)) for key, shape in shapes.items()}
    gradient = jax.tree.map(lambda leaf: 1.3 * leaf + 0.1, params)
    train = TrainSection(optimizer="muon", weight_decay=0.0)
    last = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    dims = {"wide": last, "tall": last, "b": None}
    adam = {"adam_b1": train.b1, "adam_b2": train.b2}
    right = optax.contrib.muon(1.0, beta=train.b1, muon_weight_dimension_numbers=dims, **adam)
    own = make_optimizer(train, optax.constant_schedule(1.0), {"wide": 1})
    states = right.init(params), own.init(params)
    for _ in range(3):
        expected, first = right.update(gradient, states[0], params)
        found, second = own.update(gradient, states[1], params)
        states = first, second
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_what_an_update_by_muon_takes() -> None:
    """Five iterations for each matrix on a device; others multiply nothing."""
    shapes = {"layers": (16, 32, 64), "scale": (32,)}
    params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
    specs = {"layers": PartitionSpec(None, "fsdp"), "scale": PartitionSpec()}
    mesh = {"data": 1, "fsdp": 8, "tensor": 1}
    work = update_work(TrainSection(optimizer="muon"), {"layers": 1}, params, specs, mesh)
    products = (32 * 64 * 32, 32 * 32 * 32, 32 * 32 * 64)
    assert work.flops == 2 * 5 * 2 * sum(products)
    moved = [(one.kind, one.axis, one.bytes) for one in work.collectives]
    assert moved == [("all-to-all", "fsdp", 2 * 4 * 2 * 32 * 64)]
    assert update_work(TrainSection(), {"layers": 1}, params, specs, mesh) == UpdateWork()


@pytest.mark.parametrize(
    "name", ["sgd", "lion", *(pytest.param(of, marks=pytest.mark.slow) for of in ("adamw", "muon"))]
)
def test_layers_in_one_array_are_updated_as_if_each_had_its_own(name: str) -> None:
    """Kernels of layers and experts are matrices, however many lie in one array; scales of layers are vectors."""
    sizes = {"kernel": (3, 6, 4), "scale": (3, 6), "experts": (3, 2, 4, 6), "head": (6, 5)}
    stacked = {"layers/kernel": 1, "layers/scale": 1, "layers/experts": 2}
    draw = np.random.default_rng(0).normal
    params, gradient = ({key: jnp.asarray(draw(size=shape)) for key, shape in sizes.items()} for _ in range(2))

    def together(leaves: dict[str, jax.Array]) -> dict[str, object]:
        return {"layers": {key: leaf for key, leaf in leaves.items() if key != "head"}, "head": leaves["head"]}

    def apart(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
        layers = {f"{key}{i}": leaves[key][i] for key in ("kernel", "scale") for i in range(3)}
        experts = {f"expert{i}{j}": leaves["experts"][i, j] for i in range(3) for j in range(2)}
        return {**layers, **experts, "head": leaves["head"]}

    def updated(optimizer: optax.GradientTransformation, leaves: object, gradients: object) -> object:
        state = optimizer.init(leaves)
        for _ in range(3):
            updates, state = optimizer.update(gradients, state, leaves)
            leaves = optax.apply_updates(leaves, updates)
        return leaves

    train, schedule = TrainSection(optimizer=name, weight_decay=0.1), optax.constant_schedule(0.02)
    whole = updated(make_optimizer(train, schedule, stacked), together(params), together(gradient))
    single = updated(make_optimizer(train, schedule), apart(params), apart(gradient))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        apart({**whole["layers"], "head": whole["head"]}),
        single,
    )


def test_clipping_bounds_the_global_norm() -> None:
    optimizer = with_clipping(optax.identity(), 0.5)
    clipped, _ = optimizer.update(GRADIENT, optimizer.init(PARAMS), PARAMS)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(GRADIENT)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b * 0.5 / norm, rtol=1e-5), clipped, GRADIENT)
    assert with_clipping(optax.identity(), None) is not None


def test_an_optimizer_of_the_plugin_is_given_nothing_of_redco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`optax.contrib.sam` hands on what it is given, and its parts take nothing."""
    monkeypatch.chdir(tmp_path)
    sam = "optax.contrib.sam(optax.sgd(schedule), optax.sgd(0.05))"
    job = job_of(tmp_path, f"return losses.mean()\n\ndef optimizer_fn(ctx, schedule):\n    return {sam}")
    own = own_optimizer(job, optax.constant_schedule(0.1), job.model.abstract)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), job.model.abstract)
    updates, _ = optax.with_extra_args_support(own).update(params, own.init(params), params, places=params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
