"""What draws new examples: a variational autoencoder and its bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from redco_cli.plugin.parts import builtin
from redco_cli.run import train

vae = builtin("vae")


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
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_an_autoencoder_knows_more_than_how_often_a_pixel_has_a_level(seed, tmp_path):
    result = train("vae", [f"seed={seed}", "mesh.data=1", f"output_dir={tmp_path}"])
    assert result.evaluations[-1][1]["loss"] < 95.0  # each pixel by its levels: 107.6
