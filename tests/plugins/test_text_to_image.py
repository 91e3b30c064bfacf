"""Text to image: the loss and guidance where the answer is known, and what the digits of prompts are like."""

from dataclasses import replace
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.errors import ExampleError
from redco_cli.plugin.parts import builtin
from redco_cli.run import predict_examples
from redco_cli.trained import load_model
from tests.plugins.trained import trained

text_to_image = builtin("text_to_image")
SCHEDULE = text_to_image.SCHEDULE
PROMPTS = ["a zero", "a one", "a two", "a three", "a four", "a five", "a six", "a seven", "an eight", "a nine"]


class Fixed:
    """A network whose images are known: `params` from a prompt, and zeros without one; it says v."""

    def __call__(self, params, noisy, timestep, tokens, mask, **named):
        self.seen = {"noisy": noisy, "timestep": timestep, "mask": mask}
        alpha, sigma = SCHEDULE.at(timestep, 4)
        clean = jnp.where((mask.sum(-1) > 1)[:, None, None, None], params, 0.0)
        return (alpha * noisy - clean) / sigma


@pytest.mark.parametrize("train", [False, True])
def test_the_loss_is_the_squared_error_of_v_at_random_times(context, train):
    ctx = context("text_to_image", model=Fixed(), unprompted=0.25)
    batch = text_to_image.collate_fn(ctx, text_to_image.load_examples(ctx, "eval")[:300])

    def loss(key):
        return text_to_image.loss_fn(ctx, 0.5, batch, key, train), ctx.model.seen

    found, seen = jax.jit(loss)(jax.random.key(0))
    noisy, timestep, mask = (np.asarray(seen[name]) for name in ("noisy", "timestep", "mask"))
    assert timestep.min() < 20
    assert timestep.max() > 980
    alpha, sigma = SCHEDULE.alpha[timestep][:, None, None, None], SCHEDULE.sigma[timestep][:, None, None, None]
    noise = (noisy - alpha * batch["images"]) / sigma
    assert noise[timestep > 100].std() == pytest.approx(1, abs=0.02)
    clean = 0.5 * (mask.sum(-1) > 1)[:, None, None, None]
    missed = ((alpha * noisy - clean) / sigma - alpha * noise + sigma * batch["images"]) ** 2
    assert found.weight == 300
    assert float(found.sum) == pytest.approx(missed.mean((1, 2, 3)).sum(), rel=1e-3)
    kept = (mask == batch["mask"]).all(-1)
    assert 0.65 < kept.mean() < 0.85 if train else kept.all()
    assert (mask[~kept].sum(-1) == 1).all()


@pytest.mark.parametrize(
    ("guidance", "solver", "wanted"), [(1.0, "ddim", 0.2), (3.0, "dpm_solver++", 0.6), (9.0, "ddim", 1.0)]
)
def test_guidance_goes_from_no_prompt_beyond_the_prompt(context, guidance, solver, wanted):
    ctx = context("text_to_image", model=Fixed(), stage="predict", guidance=guidance, solver=solver, steps=3)
    batch = text_to_image.collate_fn(ctx, [{"text": "a two"}, {"text": "an eight"}])
    found = jax.jit(lambda key: text_to_image.predict_fn(ctx, 0.2, batch, key))(jax.random.key(0))
    np.testing.assert_allclose(found, np.full((2, 8, 8, 1), (1 + wanted) / 2), atol=1e-5)
    rows = text_to_image.output_fn(ctx, np.asarray(found))
    assert np.shape(rows) == (2, 8, 8, 1)
    assert rows[0][0][0][0] == pytest.approx((1 + wanted) / 2, abs=1e-4)


def test_prompts_say_what_the_digits_are(context):
    ctx = context("text_to_image")
    seen, held = (text_to_image.load_examples(ctx, split) for split in ("train", "eval"))
    assert (len(seen), len(held)) == (1433, 364)
    assert all(one["text"] == PROMPTS[one["label"]] for one in [*seen, *held])
    batch = text_to_image.collate_fn(ctx, held[:2])
    assert batch["images"].shape == (2, 8, 8, 1)
    assert (batch["images"].min(), batch["images"].max()) == (-1, 1)
    letters = len(held[0]["text"])
    assert bytes(batch["tokens"][0, :letters].tolist()).decode() == held[0]["text"]
    assert batch["mask"][0].tolist() == [1] * (letters + 1) + [0] * (15 - letters)


def test_samples_are_judged_by_the_nearest_real_image(context, tmp_path):
    ctx = context("text_to_image")
    ctx = replace(ctx, recipe=ctx.recipe.model_copy(update={"output_dir": str(tmp_path)}))
    examples = text_to_image.load_examples(ctx, "eval")[:40]
    drawn = np.stack([one["image"] for one in examples]) * 0.9
    assert text_to_image.metric_fn(ctx, examples, drawn.tolist()) == {"agreement": 1.0}
    moved = text_to_image.metric_fn(ctx, examples, np.roll(drawn, 1, axis=0).tolist())
    labels = np.array([one["label"] for one in examples])
    right = np.mean(labels == np.roll(labels, 1))
    assert moved == {"agreement": pytest.approx(right)}
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")


def test_the_average_follows_soon_and_then_slowly(context):
    ctx = context("text_to_image", ema_decay=0.9)
    state = text_to_image.init_state(ctx, {"w": jnp.zeros(())})
    for step, left in ((1, 2 / 11), (10_000, 0.9)):
        after = text_to_image.update_state(replace(ctx, step=step), state, {"w": jnp.ones(())}, None)
        assert float(after["ema"]["w"]) == pytest.approx(1 - left)


@pytest.mark.parametrize(
    ("image", "found"),
    [(np.ones((8, 8, 3)), r"\[8, 8, 3\], from 1 to 1"), (255 * np.ones((8, 8, 1)), r"\[8, 8, 1\], from 255 to 255")],
)
def test_other_images_are_refused(context, image, found):
    with pytest.raises(ExampleError, match=rf"the image in the column 'image' is {found}") as refused:
        text_to_image.collate_fn(context("text_to_image"), [{"text": "a two", "image": image}])
    assert "the shape of plugin.options.size, [8, 8, 1], from 0 (black) to 1" in str(refused.value)


@pytest.mark.parametrize("given", [{"channels": 12}, {"size": (7, 8, 1)}, {"steps": 0}, {"ema_decay": 1.1}])
def test_what_cannot_be_built_is_refused(given):
    with pytest.raises(ValueError, match="must be"):
        text_to_image.Options(**given)


@pytest.mark.slow
def test_the_network_reads_the_prompt_up_to_its_end(context):
    ctx = context("text_to_image", channels=8)
    net = text_to_image.build_model(ctx)
    draw = np.random.default_rng(0)
    shapes = {name: (one.shape, one.dtype) for name, one in text_to_image.init_batch(ctx).items()}
    inputs = {name: np.zeros(*one) for name, one in shapes.items()} | text_to_image.read(ctx, ["a two"])
    shapes = jax.eval_shape(net.init, jax.random.key(0), **inputs)
    params = jax.tree.map(lambda leaf: 0.3 * draw.normal(size=leaf.shape).astype(np.float32), shapes)
    apply = jax.jit(net.apply)
    first = apply(params, **inputs)
    beyond = np.where(inputs["mask"] == 1, inputs["tokens"], 7)
    np.testing.assert_allclose(apply(params, **{**inputs, "tokens": beyond}), first, atol=1e-5)
    for changed in (text_to_image.read(ctx, ["a ten"]), {"timestep": np.array([500])}):
        assert np.abs(apply(params, **{**inputs, **changed}) - first).max() > 1e-3


def judged(run, images):
    """The classes [N] of images [N, 8, 8, 1] by the network of a run of `digits`, and features [N, F] before that."""
    (model, params), features = load_model(run), []

    def looking(call, given, named, context):
        if isinstance(context.module, nn.Dense):
            features.append(np.asarray(given[0]))
        return call(*given, **named)

    with nn.intercept_methods(looking):
        logits = model(params, jnp.asarray(images, jnp.float32))
    return np.argmax(logits, -1), features[0]


def nearest(images, others):
    """How far each of the images is from the nearest of the others, pixel by pixel."""
    flat, rest = (np.reshape(one, (len(one), -1)).astype(np.float64) for one in (images, others))
    squares = (flat**2).sum(-1)[:, None] + (rest**2).sum(-1) - 2 * flat @ rest.T
    return np.sqrt(squares.clip(0).min(-1))


def marks(run, judge, *overrides, each=100):
    """Of samples of a run: the share that a network of `digits` agrees with, spread and novelty beside real digits.

    `spread` is the mean over features of their standard deviation within a class, as a share of that of all real digits
    of the class: the worst class, and likewise `variance`, of the sum over features of their variance. `novelty` is the
    median distance to the nearest training image, as a share of that of held-out images.
    """
    ctx = SimpleNamespace(options=text_to_image.Options(), recipe=None)
    seen, held = (text_to_image.load_examples(ctx, split) for split in ("train", "eval"))
    found = predict_examples(run, [{"text": text} for text in PROMPTS for _ in range(each)], list(overrides))
    drawn, wanted = np.array([one["prediction"] for one in found]), np.repeat(np.arange(10), each)
    real = {split: np.stack([one["image"] for one in examples]) for split, examples in (("seen", seen), ("held", held))}
    labels = np.array([one["label"] for one in [*seen, *held]])
    classes, features = judged(judge, drawn)
    _, others = judged(judge, np.concatenate([real["seen"], real["held"]]))
    own, theirs = (
        [values[numbers == label] for label in range(10)] for values, numbers in ((features, wanted), (others, labels))
    )
    return {
        "agreement": float((classes == wanted).mean()),
        "spread": float(min(a.std(0).mean() / b.std(0).mean() for a, b in zip(own, theirs, strict=True))),
        "variance": float(min(a.var(0).sum() / b.var(0).sum() for a, b in zip(own, theirs, strict=True))),
        "novelty": float(np.median(nearest(drawn, real["seen"])) / np.median(nearest(real["held"], real["seen"]))),
    }


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_prompts_become_digits_that_nobody_wrote(seed, tmp_path):
    trained("digits", tmp_path / "judge", [f"seed={seed + 10}", "logging.plot=false"])
    trained("text_to_image", tmp_path / "run", [f"seed={seed}", "logging.plot=false"])
    found = marks(tmp_path / "run", tmp_path / "judge", "mesh.data=1")
    assert found["agreement"] >= 0.95, found
    assert min(found["spread"], found["variance"]) >= 0.7, found
    assert found["novelty"] >= 1, found
