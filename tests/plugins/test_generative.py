"""What draws new examples: a variational autoencoder and its bound, a generator and its discriminator."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from redco_cli.plugin.parts import builtin
from tests.plugins.trained import trained

vae, gan = builtin("vae"), builtin("gan")


class Linear:
    """An autoencoder that sees nothing: its latents are always the same, and its logits are its parameters."""

    def __call__(self, params, given, method):
        if method == "encode":
            return jnp.full((len(given), 2), 0.5), jnp.full((len(given), 2), -1.0)
        return jnp.broadcast_to(params, (len(given), *params.shape))


def test_the_loss_is_the_negative_bound_of_its_closed_form(context):
    """Where decoding is constant, the expectation over the latents is too."""
    ctx = context("vae", model=Linear())
    examples = vae.load_examples(ctx, "eval")[:3]
    batch = vae.collate_fn(ctx, examples)
    assert batch["levels"].dtype == np.int32
    np.testing.assert_array_equal(batch["levels"][1] / 16, examples[1]["image"][..., 0])
    logits = np.random.default_rng(0).normal(size=(8, 8, 17)).astype(np.float32)
    loss = jax.jit(lambda params, batch, rng: vae.loss_fn(ctx, params, batch, rng, True))(
        logits, batch, jax.random.key(0)
    )
    of_levels = np.take_along_axis(np.log(softmax(logits, -1))[None], batch["levels"][..., None], -1)
    divergence = 3 * 2 * 0.5 * (0.25 + np.exp(-1) + 1 - 1)
    assert loss.weight == 3
    assert loss.metrics["divergence"] == pytest.approx(divergence, rel=1e-5)
    assert loss.sum == pytest.approx(divergence - of_levels.sum(), rel=1e-5)


def test_samples_of_a_row_follow_from_the_key_alone(context):
    ctx = context("vae", model=Linear())
    batch = vae.collate_fn(ctx, vae.load_examples(ctx, "eval")[:2])
    logits = np.zeros((8, 8, 17), np.float32)
    logits[..., 3] = 50.0
    found = jax.jit(lambda params, batch, rng: vae.predict_fn(ctx, params, batch, rng))(
        logits, batch, jax.random.key(0)
    )
    for images in found.values():
        np.testing.assert_allclose(images, np.full((2, 8, 8), 3.0), rtol=1e-5)


def test_pictures_are_of_images_and_samples(context, tmp_path):
    ctx = context("vae")
    ctx = type(ctx)(None, None, ctx.options, ctx.recipe.model_copy(update={"output_dir": str(tmp_path)}), "predict")
    examples = vae.load_examples(ctx, "eval")[:4]
    images = vae.collate_fn(ctx, examples)["levels"]
    predictions = [{"reconstruction": (one + 1).tolist(), "sample": one.tolist()} for one in images]
    assert vae.metric_fn(ctx, examples, predictions) == {"mean_absolute_error": 1.0}
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_an_autoencoder_knows_more_than_how_often_a_pixel_has_a_level(seed, tmp_path):
    assert trained("vae", tmp_path, [f"seed={seed}"])[-1]["loss"] < 95.0  # each pixel by its levels: 107.6


def test_generator_and_discriminator_do_not_train_each_other(context):
    """Both linear: real points x, generated ones f = z W, and logits x v, whose slope is v everywhere."""
    models = {
        "generator": lambda params, noise: noise @ params,
        "discriminator": lambda params, points: points @ params,
    }
    ctx = replace(context("gan", latents=3, penalty=0.5), models=models)
    draw, key = np.random.default_rng(0), jax.random.key(0)
    params = {"generator": draw.normal(size=(3, 2)).astype(np.float32), "discriminator": np.float32([0.3, -0.7])}
    real = draw.normal(size=(4, 2)).astype(np.float32)

    def total(params):
        loss = gan.loss_fn(ctx, params, {"points": real}, key, True)
        return loss.sum, loss

    gradient, loss = jax.jit(jax.grad(total, has_aux=True))(params)
    noise, v = np.array(jax.random.normal(key, (4, 3))), params["discriminator"]
    fake = noise @ params["generator"]
    ahead = (real - fake) @ v
    judged, fooled = 1 / (1 + np.exp(ahead)), 1 / (1 + np.exp(-ahead))
    np.testing.assert_allclose(gradient["discriminator"], judged @ (fake - real) + 4 * 0.5 * v, rtol=1e-4)
    np.testing.assert_allclose(gradient["generator"], -noise.T @ np.outer(fooled, v), rtol=1e-4)
    assert loss.weight == 4
    assert loss.metrics["generator_loss"] == pytest.approx(np.log1p(np.exp(ahead)).sum(), rel=1e-5)
    assert loss.sum == pytest.approx(np.log1p(np.exp([ahead, -ahead])).sum() + 4 * 0.25 * v @ v, rel=1e-5)


def test_modes_without_their_share_are_not_covered(context, tmp_path):
    ctx = context("gan")
    ctx = replace(ctx, recipe=ctx.recipe.model_copy(update={"output_dir": str(tmp_path)}))
    examples = gan.load_examples(ctx, "eval")[:80]
    drawn = np.repeat(gan.CENTRES, 10, axis=0)
    drawn[:8] += 0.2  # of the first mode two are good, of ten
    assert gan.metric_fn(ctx, examples, drawn.tolist()) == {"good": 0.9, "modes": 7.0}
    assert (tmp_path / "samples.png").is_file()


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_generator_covers_the_ring(seed, tmp_path):
    values = trained("gan", tmp_path, [f"seed={seed}"])[-1]
    assert values["modes"] == 8
    assert values["good"] >= 0.9
