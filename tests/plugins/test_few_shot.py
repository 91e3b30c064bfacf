"""Few-shot classification: tasks of classes that training never sees, patches that are convolutions, and the mark."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redco_cli.plugin.parts import builtin
from tests.plugins.trained import trained

few = builtin("few_shot")


@pytest.fixture(scope="module")
def images():
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images / 16, found.target


def labels_of(canvas, images):
    """The digits, however turned, that a canvas holds: found by their pixels among all images."""
    pixels, labels = images
    rows, columns = np.nonzero(canvas[..., 0])
    for top in range(max(0, rows.max() - 7), min(rows.min(), len(canvas) - 8) + 1):
        for left in range(max(0, columns.max() - 7), min(columns.min(), len(canvas) - 8) + 1):
            cut = canvas[top : top + 8, left : left + 8, 0]
            for turns in range(4):
                same = np.isclose(pixels, np.rot90(cut, -turns)).all((1, 2))
                if same.any():
                    return int(labels[same][0])
    raise AssertionError("no digit")


def test_evaluation_has_classes_that_training_never_sees(context, images):
    ctx = context("few_shot", tasks=40, eval_tasks=40)
    seen, held = (few.load_examples(ctx, split) for split in ("train", "eval"))
    assert len(seen) == len(held) == 40
    for tasks, expected in ((seen, False), (held, True)):
        found = {labels_of(image, images) for task in tasks for image in task["x"][:5]}
        assert all((label in few.HELD_OUT) == expected for label in found)
        assert len(found) == (3 if expected else 7)


def test_a_task_follows_from_its_number_and_has_one_image_of_each_class_first(context, images):
    ctx = context("few_shot", ways=4, shots=2, queries=1, canvas=10)
    task, again, other = (few.load_examples(ctx, "train")[number] for number in (7, 7, 8))
    np.testing.assert_array_equal(task["x"], again["x"])
    assert not np.array_equal(task["x"], other["x"])
    assert task["x"].shape == (12, 10, 10, 1)
    np.testing.assert_array_equal(task["y"], [0, 1, 2, 3] * 3)
    digits = [labels_of(image, images) for image in task["x"]]
    assert digits[:4] == digits[4:8] == digits[8:]
    with pytest.raises(IndexError):
        few.load_examples(ctx, "eval")[600]


def test_a_product_of_patches_is_a_convolution():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 6, 3)), jnp.float32)
    convolution = nn.Conv(4, (3, 3), strides=2, padding=1)
    params = convolution.init(jax.random.key(0), x)
    kernel, bias = params["params"]["kernel"].reshape(-1, 4), params["params"]["bias"]
    np.testing.assert_allclose(few.patches(x) @ kernel + bias, convolution.apply(params, x), rtol=1e-5, atol=1e-5)


def test_the_probe_knows_images_that_it_saw(context):
    task = few.load_examples(context("few_shot"), "eval")[0]
    twice = np.concatenate([task["x"][:5]] * 2)
    np.testing.assert_array_equal(few.linear_probe(twice, np.tile(np.arange(5), 2), 5), np.arange(5))


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_new_classes_are_told_apart_better_than_by_pixels(seed, tmp_path):
    values = trained("few_shot", tmp_path, [f"seed={seed}"])[-1]
    assert values["accuracy_after_10"] >= values["linear_probe"] + 0.1
