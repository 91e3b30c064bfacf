"""A plugin's own Flax module behind the interface of the named models."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.errors import ModelError, PluginError
from redco_cli.models.own_module import module_model

WHERE = "plugins/p.py: build_model"
BATCH = {"image": jax.ShapeDtypeStruct((4, 6), jnp.float32), "label": jax.ShapeDtypeStruct((4,), jnp.int32)}


class Plain(nn.Module):
    @nn.compact
    def __call__(self, image, scale=1.0):
        return nn.Dense(3)(image) * scale


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, image, *, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(3)(image))


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, image, deterministic=True):
        return nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(3)(image))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, image):
        return nn.BatchNorm(use_running_average=True)(image)


class Wanting(nn.Module):
    @nn.compact
    def __call__(self, pixels):
        return nn.Dense(3)(pixels)


class Broken(nn.Module):
    @nn.compact
    def __call__(self, image):
        return image @ jnp.ones((5, 3))


def ones():
    return jnp.ones((4, 6))


def test_is_the_module_itself():
    model = module_model(Plain(), BATCH, WHERE)
    shapes = jax.tree.map(lambda leaf: leaf.shape, model.abstract)
    assert shapes == {"Dense_0": {"kernel": (6, 3), "bias": (3,)}}
    params = jax.jit(model.init)(jax.random.key(0))
    expected = jax.jit(Plain().init)({"params": jax.random.key(0)}, ones())["params"]
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    kernel = params["Dense_0"]["kernel"]
    np.testing.assert_allclose(jax.jit(model)(params, ones(), scale=2.0), 2 * ones() @ kernel, rtol=1e-5)
    assert (model.config, model.task, model.frozen) == (None, None, ())


@pytest.mark.parametrize("module", [Dropping(), Deterministic()], ids=["train", "deterministic"])
def test_dropout_is_active_in_training_only(module):
    model = module_model(module, BATCH, WHERE)
    params = jax.jit(model.init)(jax.random.key(0))
    still = model(params, ones(), rng=jax.random.key(1))
    moving = model(params, ones(), rng=jax.random.key(1), train=True)
    np.testing.assert_allclose(still, ones() @ params["Dense_0"]["kernel"], rtol=1e-5)
    dropped = np.asarray(moving == 0)
    assert dropped.any()
    np.testing.assert_allclose(moving[~dropped], 2 * still[~dropped], rtol=1e-5)
    with pytest.raises(ModelError) as caught:
        model(params, ones(), train=True)
    assert str(caught.value) == (
        f"{WHERE}: training this module needs a key for dropout\n  -> pass rng= to ctx.model, as loss_fn got it"
    )


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Wanting(),
            "Wanting.__call__ takes pixels, but the batch has image, label\n"
            "  -> give the parameters of __call__ the names that collate_fn gives its arrays, or define init_batch",
        ),
        (
            Normed(),
            "Normed keeps variables in batch_stats besides its params\n"
            "  -> keep them: define init_state(ctx, params) that returns ctx.model.init_variables(), and update_state; "
            "or use layers without state, such as GroupNorm or LayerNorm instead of BatchNorm",
        ),
    ],
)
def test_modules_that_do_not_fit_are_refused(module, message):
    with pytest.raises(PluginError) as caught:
        module_model(module, BATCH, WHERE)
    assert str(caught.value) == f"{WHERE}: {message}"


def test_a_module_that_raises_is_told_with_its_shapes():
    with pytest.raises(PluginError, match=r"Broken cannot be applied to \{'image': \[4, 6\]\}: dot_general") as caught:
        module_model(Broken(), BATCH, WHERE)
    assert str(caught.value).endswith(
        "\n  -> make the arrays of init_batch, or of a batch of collate_fn, fit the module"
    )


def test_it_does_not_generate():
    model = module_model(Plain(), BATCH, WHERE)
    with pytest.raises(ModelError) as caught:
        model.generate(model.abstract, ones())
    assert str(caught.value) == (
        f"{WHERE}: Plain comes from build_model and does not generate\n  -> write the decoding loop in predict_fn"
    )


def test_what_it_keeps_is_found_in_a_state_by_name_and_shape():
    model = module_model(Normed(), BATCH, WHERE, keeps_state=True)
    stats = jax.eval_shape(model.init_variables)["batch_stats"]
    assert model.places_in({"batch_stats": stats, "ema": {"mean": 0}}, "model") == {"batch_stats": ("batch_stats",)}
    several = {"policy": {"batch_stats": stats}, "critic": {"batch_stats": stats}}
    assert model.places_in(several, "critic") == {"batch_stats": ("critic", "batch_stats")}
    start = f"{WHERE}: the module is nothing without its batch_stats, and the plugin's state "
    with pytest.raises(ModelError) as caught:
        model.places_in(several, "model")
    assert str(caught.value).startswith(f"{start}has it at policy/batch_stats and critic/batch_stats\n")
    with pytest.raises(ModelError) as caught:
        model.places_in({"statistics": stats, "batch_stats": {"x": stats["BatchNorm_0"]["mean"]}}, "model")
    assert str(caught.value).startswith(f"{start}does not have it under that name\n")
