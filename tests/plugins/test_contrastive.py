"""Two towers: a loss over the whole batch, recall, and texts that training has never seen."""

from pathlib import Path

import datasets
import jax
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from redco_cli.errors import RedcoError
from redco_cli.plugin.parts import builtin
from redco_cli.run import predict_examples, train, validate
from tests.plugins.tiny_pipeline import LENGTH, SIDE, write_clip
from tests.plugins.trained import trained

contrastive = builtin("contrastive")
CLIP = f"""
model: {{name: hub, task: clip}}
data: {{train: {{path: data}}, eval: {{path: data}}, max_length: {LENGTH}}}
plugin: {{module: contrastive}}
train: {{global_batch_size: 9, steps: 8, learning_rate: 1e-2, schedule: constant}}
eval: {{at_start: true, every: 8, predict: true, batch_size: 9}}
logging: {{plot: false}}
output_dir: run
"""


class Vectors:
    """Towers whose vectors are their parameters."""

    def __call__(self, params, pixel_values, input_ids, rng, train):
        images, texts = params
        return contrastive.Compared(images, texts, 5 * images @ texts.T)


def test_the_loss_is_the_mean_of_both_directions(context):
    draw = np.random.default_rng(0)
    images, texts = draw.normal(size=(2, 4, 3)).astype(np.float32)
    ctx = context("contrastive", model=Vectors())
    words = np.arange(12).reshape(4, 3)
    loss = jax.jit(
        lambda *params: contrastive.loss_fn(ctx, params, {"pixel_values": 0, "input_ids": words}, None, True)
    )
    logits = torch.tensor(5 * images @ texts.T)
    both = [torch.nn.functional.cross_entropy(one, torch.arange(4)) for one in (logits, logits.T)]
    assert float(loss(images, texts)) == pytest.approx(float(sum(both)) / 2, rel=1e-5)


def test_texts_that_are_equal_count_alike(context):
    """Two images of one text: whichever of the two is told is right."""
    ctx = context("contrastive", model=Vectors())
    images = np.eye(3, dtype=np.float32)[[0, 0, 1]] * 100
    words = np.array([[1], [1], [2]])
    loss = jax.jit(
        lambda *params: contrastive.loss_fn(ctx, params, {"pixel_values": 0, "input_ids": words}, None, True)
    )
    assert float(loss(images, images / 100)) == pytest.approx(2 / 3 * np.log(2), rel=1e-5)


def test_what_is_held_out_has_other_texts_and_other_digits(context):
    ctx = context("contrastive", train_examples=300)
    seen, held = (contrastive.load_examples(ctx, split) for split in ("train", "eval"))
    assert (len(seen), len(held)) == (300, 100)
    assert len({one["text"] for one in held}) == 100
    assert not {one["text"] for one in held} & {one["text"] for one in seen}
    assert held[0]["image"].shape == (8, 24, 1)
    batch = contrastive.collate_fn(ctx, held[:2])
    said = [" ".join(contrastive.WORDS[number] for number in row) for row in batch["input_ids"]]
    assert said == [one["text"] for one in held[:2]]


def test_recall_is_that_of_the_nearest(context):
    predictions = [{"image": [1.0, 0.0], "text": [0.6, 0.8]}, {"image": [0.0, 1.0], "text": [0.0, 1.0]}]
    found = contrastive.metric_fn(context("contrastive"), [{}, {}], predictions)
    assert found == {"recall_image_to_text": 1.0, "recall_text_to_image": 0.5}


def test_micro_batches_are_refused_by_name(tmp_path):
    with pytest.raises(RedcoError, match=r"train.micro_batch_size.*whole_batch"):
        validate("contrastive", ["train.micro_batch_size=16", "mesh.data=1", f"output_dir={tmp_path}"])


@pytest.mark.slow
def test_a_clip_has_the_loss_of_pytorch_and_its_vectors(tmp_path, monkeypatch):
    """A tiny one with random weights, on nine images with texts of their own; on two devices, and trained."""
    monkeypatch.chdir(tmp_path)
    processor = write_clip(Path("hub"))
    draw = np.random.default_rng(0)
    texts = ["low", "lower", "low low", "low lower", "lower low", "low low low", "low low lower", "low lower low"]
    texts.append("lower low low")
    images = [Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)) for _ in texts]
    columns = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict({"image": images, "text": texts}, features=columns).save_to_disk("data")
    Path("recipe.yaml").write_text(CLIP)
    found = [train("recipe.yaml", [f"mesh.data={size}", f"output_dir={size}"]).evaluations for size in (1, 3)]
    whole = processor(text=texts, images=images, padding="max_length", max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        expected = transformers.CLIPModel.from_pretrained("hub").eval()(**whole, return_loss=True)
    for evaluations in found:
        values = dict(evaluations)
        assert values[0]["loss"] == pytest.approx(float(expected.loss), rel=1e-5)
        assert values[8]["loss"] < values[0]["loss"] - 0.1
        assert {"recall_image_to_text", "recall_text_to_image"} < values[8].keys()
    rows = [{"image": image, "text": text} for image, text in zip(images, texts, strict=True)]
    vectors = [one["prediction"] for one in predict_examples("recipe.yaml", rows, ["mesh.data=1"])]
    for name, wanted in (("image", expected.image_embeds), ("text", expected.text_embeds)):
        np.testing.assert_allclose([one[name] for one in vectors], wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_images_find_texts_that_nobody_has_seen(seed, tmp_path):
    values = trained("contrastive", tmp_path, [f"seed={seed}"])[-1]
    assert values["recall_image_to_text"] >= 0.8
    assert values["recall_text_to_image"] >= 0.8
