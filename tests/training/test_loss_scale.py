"""Training in float16: gradients beside those of float32, and how the scale of the loss follows what overflows."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from redco_cli.models.decoder.model import build_decoder
from redco_cli.models.hf_config import decoder_config
from redco_cli.plugin.contract import Loss
from redco_cli.recipe.schema import Recipe
from redco_cli.run import train
from redco_cli.training.precision.loss_scale import LossScale, first_scale, following, saved_scale, values_of
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.meta import Meta
from redco_cli.training.state import new_state
from redco_cli.training.step import make_train_step
from tests.models.decoder.pairs import QUICK, hf_config, where
from tests.training.tiny import assert_same_run, interrupted, recorded

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
IDS = np.random.default_rng(0).integers(0, 64, (1, 4, 16)).astype(np.int32)


def perceptron(dtype, factor, in_weights):
    """First parameters, and a loss in some type whose gradient is small."""
    rng = np.random.default_rng(1)
    params = {name: np.float32(0.3 * rng.normal(size=shape)) for name, shape in (("a", (16, 24)), ("b", (24, 8)))}

    def loss(variables, batch, key, train):
        x = jax.nn.one_hot(batch["ids"] % 16, 16, dtype=dtype)
        hidden = jax.nn.silu(x @ variables.params["a"].astype(dtype))
        logits = (hidden @ variables.params["b"].astype(dtype)).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"] % 8)
        return Loss(each.mean() * factor * 4, jnp.float32(4))

    return params, loss


def language_model(dtype, factor, in_weights):
    """The same of a decoder, the small factor on its loss or in the weights of its tokens."""
    hf = hf_config("llama")
    model = build_decoder(
        decoder_config(hf, where=where), config=hf, dtype=dtype, generation_config=None, where="model"
    )
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: np.float32(0.2 * rng.normal(size=leaf.shape)), model.abstract)

    def loss(variables, batch, key, train):
        weights = jnp.full(batch["ids"].shape, factor if in_weights else 1.0, jnp.float32)
        found = model.next_token_loss(variables.params, batch["ids"], labels=batch["ids"], weights=weights)
        mean = found.sum / (weights.size if in_weights else found.weight / factor)
        return Loss(mean * 4, jnp.float32(4))

    return params, loss


def updated(make, dtype, factor, scale, *, in_weights=False, place=HERE, rows=HERE):
    """What one step of gradient descent at rate 1 / factor takes off each parameter, and the scale that it had."""
    params, loss = make(dtype, factor, in_weights)
    optimizer = optax.sgd(1.0 / factor)
    state = jax.device_put(new_state(params, frozenset(), optimizer, loss_scale=scale), place)
    step = make_train_step(loss, optimizer, optax.constant_schedule(1.0), seed=0, places=place)
    following, metrics = jax.jit(step, compiler_options=QUICK)(state, {"ids": jax.device_put(IDS, rows)})
    taken = jax.tree.map(lambda new, old: np.asarray(old - new), following.params, params)
    return taken, float(metrics.get("loss_scale", 1.0))


def error(found, expected):
    """Of a gradient, relative, over all parameters."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    apart = sum(np.square(one - other).sum() for one, other in pairs)
    return float(np.sqrt(apart / sum(np.square(other).sum() for _, other in pairs)))


@pytest.mark.parametrize(
    ("make", "in_weights"),
    [
        (perceptron, False),
        pytest.param(language_model, False, marks=pytest.mark.slow),
        pytest.param(language_model, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_small_losses_are_right_to_the_precision_of_float16(make, in_weights):
    for factor in (1e-3, 1e-5):
        expected, _ = updated(make, "float32", factor, None, in_weights=in_weights)
        found, scale = updated(make, "float16", factor, saved_scale((65536.0, 0)), in_weights=in_weights)
        assert scale == 65536
        assert error(found, expected) < 4e-3
    assert error(updated(make, "float16", 1e-5, None, in_weights=in_weights)[0], expected) > 0.1


def test_a_mesh_of_two_devices_has_the_same_step_as_one():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    place, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, "data"))
    scale = saved_scale((65536.0, 1999))
    alone, split = (updated(perceptron, "float16", 1e-3, scale, **how) for how in ({}, {"place": place, "rows": rows}))
    assert error(split[0], alone[0]) < 1e-3
    assert alone[1] == split[1]


def steps(weights, scale, factor=1.0):
    """The scale after steps whose loss sums have these weights; the gradient of a weight of nan overflows."""

    def loss(variables, batch, key, train):
        each = jnp.float32(batch["w"])
        return Loss((each * variables.params["p"] * factor).sum(), jnp.where(jnp.isnan(each), 1.0, each).sum())

    optimizer = optax.sgd(0.0)
    state = new_state({"p": jnp.ones(())}, frozenset(), optimizer, loss_scale=scale)
    step = jax.jit(make_train_step(loss, optimizer, optax.constant_schedule(1.0), seed=0, places=HERE))
    for weight in weights:
        state, _ = step(state, {"w": np.full((1, 2), weight, np.float32)})
    return (*values_of(state.loss_scale), int(state.skipped), int(state.streak))


def test_the_scale_follows_what_overflows():
    assert steps([np.nan], saved_scale((64.0, 5))) == (32.0, 0, 1, 1)
    assert steps([1.0, np.nan, 3.0, 1.0], saved_scale((64.0, 5))) == (32.0, 2, 1, 0)
    assert steps([1.0, 1.0], saved_scale((64.0, 1998))) == (128.0, 0, 0, 0)
    assert steps([0.0], saved_scale((64.0, 5))) == (64.0, 0, 1, 1)  # no weight: nothing has overflowed
    assert following(None, jnp.bool(True), jnp.float32(1)) is None


def recipe(**sections):
    given = {"plugin": {"module": "m"}, "train": {"global_batch_size": 2, "steps": 1, "learning_rate": 1}, **sections}
    return Recipe.model_validate({"output_dir": "run", **given})


def test_float16_anywhere_in_a_recipe_begins_with_a_scale():
    assert first_scale(recipe(model={"dtype": "bfloat16"})) is None
    assert values_of(first_scale(recipe(model={"dtype": "float16"}))) == (65536.0, 0)
    teacher = {"teacher": {"dtype": "float16", "frozen": True}}
    assert values_of(first_scale(recipe(model={"dtype": "float32"}, models=teacher))) == (65536.0, 0)


def test_a_checkpoint_keeps_the_scale_and_one_in_another_type_has_none(tmp_path: Path):
    def state(scale):
        return jax.device_put(new_state({"w": jnp.ones(3)}, frozenset(), optax.sgd(1.0), loss_scale=scale), HERE)

    def restored(step, scale):
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=HERE), state(scale))
        return values_of(Checkpoints(tmp_path, 3, "min").restore(step, like).loss_scale)

    checkpoints, meta = Checkpoints(tmp_path, 3, "min"), Meta(5, None, None, False, {})
    odd = LossScale(jnp.float32(2.0**-3), jnp.int32(17))
    checkpoints.save(state(odd), meta)
    checkpoints.save(state(None), dataclasses.replace(meta, step=6))
    checkpoints.close()
    assert restored(5, odd) == (0.125, 17)
    assert restored(5, None) is None  # goes on in bfloat16
    assert restored(6, odd) == (65536.0, 0)  # goes on in float16


@pytest.mark.slow
def test_a_run_in_float16_says_its_scale_and_resumes_with_it(tiny_project: Path, capsys: pytest.CaptureFixture[str]):
    """The fourth step's batches overflow whatever the scale."""
    text = Path("plugin.py").read_text()
    spoiled = "    each = each * jnp.where(ctx.step == 3, jnp.inf, 1.0)\n    seen ="
    Path("plugin.py").write_text("import jax.numpy as jnp\n" + text.replace("    seen =", spoiled))
    half = "model.dtype=float16"
    train("recipe.yaml", [half, "output_dir=whole"])
    assert [one["loss_scale"] for one in recorded("whole") if one["kind"] == "train"] == [65536.0] * 4 + [32768.0] * 8
    said = "step 4: loss or gradient is not finite in float16 with loss_scale 65536, which is halved; the update is"
    assert said in capsys.readouterr().err
    interrupted(5, half)
    meta = json.loads(next(Path("run/checkpoint-5/meta").glob("metadata")).read_text())
    assert meta["loss_scale"] == [32768.0, 1]
    train("recipe.yaml", [half])
    assert_same_run("run", "whole")
