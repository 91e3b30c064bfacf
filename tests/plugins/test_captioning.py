"""Captions of two digits: what is held out, what goes into a batch and a loss, what is made of predictions."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from redco_cli.errors import ExampleError, PluginError
from redco_cli.models.config.byte_tokenizer import EOS, ByteTokenizer
from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.plugin.parts import builtin
from redco_cli.row_notes import noting
from redco_cli.run import predict
from tests.plugins.trained import trained

captioning, digits = builtin("captioning"), builtin("image_classification")
CLASSES = 10


def halves(example):
    """The places at which a digit of 8 rows may stand, left and right, as bytes."""
    image = example["image"][..., 0]
    return [{image[top : top + 8, side : side + 8].tobytes() for top in range(9)} for side in (0, 8)]


def named(example):
    return tuple(captioning.WORDS.index(name) for name in example["caption"].split(" and "))


def test_evaluation_has_other_digits_in_other_pairs(context):
    ctx = context("captioning", train_examples=2000)
    seen, held = (captioning.load_examples(ctx, split) for split in ("train", "eval"))
    assert (len(seen), len(held)) == (2000, 500)
    pairs = {named(example) for example in seen}, {named(example) for example in held}
    assert (len(pairs[0]), len(pairs[1])) == (80, 20)
    assert not pairs[0] & pairs[1]
    for side in (0, 1):
        assert sorted(pair[side] for pair in pairs[1]) == sorted([*range(CLASSES)] * 2)
    plain = context("image_classification")
    own = [
        {one["image"].tobytes(): one["label"] for one in digits.load_examples(plain, split)}
        for split in ("train", "eval")
    ]
    for examples, mine, other in ((seen, *own), (held, *own[::-1])):
        for example in list(examples)[:200]:
            for found, digit in zip(halves(example), named(example), strict=True):
                assert {mine[image] for image in found if image in mine} == {digit}
                assert not found & other.keys()


def test_an_example_follows_from_its_number_and_the_seed(context):
    first, again, other = (captioning.load_examples(context("captioning", seed=seed), "train") for seed in (0, 0, 1))
    assert len(first) == 100_000
    np.testing.assert_array_equal(first[70_000]["image"], again[70_000]["image"])
    assert len({first[number]["image"].tobytes() for number in range(50)}) == 50
    assert not np.array_equal(first[0]["image"], other[0]["image"])
    assert len(list(captioning.load_examples(context("captioning", eval_examples=3), "eval"))) == 3


def test_a_batch_has_images_as_models_take_them_and_captions_as_tokens(context):
    ctx = context("captioning", max_length=24)
    examples = list(captioning.load_examples(ctx, "eval"))[:3]
    batch = captioning.collate_fn(ctx, examples)
    assert batch["pixel_values"].shape == (3, 1, 16, 16)
    np.testing.assert_array_equal(batch["pixel_values"][2, 0], examples[2]["image"][..., 0])
    for labels, example in zip(batch["labels"], examples, strict=True):
        ids = [*example["caption"].encode(), EOS]
        assert labels.tolist() == ids + [IGNORED_LABEL] * (24 - len(ids))
    assert captioning.collate_fn(replace(ctx, stage="predict"), examples).keys() == {"pixel_values"}


def test_a_processor_reads_image_files_of_any_mode(context):
    def processor(images, return_tensors):
        return {"pixel_values": np.stack([np.asarray(one).transpose(2, 0, 1) for one in images])}

    both = SimpleNamespace(image_processor=processor, tokenizer=ByteTokenizer())
    ctx = context("captioning", max_length=4, tokenizer=both, caption="text")
    images = [Image.new(mode, (6, 5), 7) for mode in ("RGB", "L", "P", "1", "CMYK")]
    batch = captioning.collate_fn(ctx, [{"image": image, "text": "a\u00e9"} for image in images])
    assert batch["pixel_values"].shape == (5, 3, 5, 6)
    assert batch["pixel_values"][1].tolist() == np.full((3, 5, 6), 7).tolist()
    assert batch["labels"].tolist() == [[97, 195, 169, EOS]] * 5


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"image": None}, "the column 'image' is null or missing, but an image is expected"),
        ({"image": "a.png"}, "the column 'image' holds 'a.png', but an image is expected"),
        (
            {"image": np.zeros((8, 8, 1))},
            "the image in the column 'image' has shape [8, 8, 1], but [16, 16, 1], as others have, is expected",
        ),
        ({"caption": None}, "the column 'caption' is null or missing, but text is expected"),
        ({"caption": ["a", "b"]}, "the column 'caption' holds ['a', 'b'], a list, but text is expected"),
    ],
)
def test_what_is_no_image_or_caption_is_refused(context, row, problem):
    good = {"image": np.zeros((16, 16, 1)), "caption": "a one and a two"}
    with pytest.raises(ExampleError) as caught:
        captioning.collate_fn(context("captioning"), [good, {**good, **row}])
    assert caught.value.problems[0].problem == problem


def test_an_image_processor_alone_is_no_tokenizer(context):
    ctx = context("captioning", tokenizer=SimpleNamespace(model_input_names=["pixel_values"]))
    with pytest.raises(PluginError, match=r"^model.tokenizer: the plugin captioning needs a tokenizer"):
        captioning.collate_fn(ctx, [{"image": np.zeros((16, 16, 1)), "caption": "a"}])


def test_long_captions_are_cut_and_counted(context):
    with noting() as notes:
        ctx = context("captioning", max_length=3)
        batch = captioning.collate_fn(ctx, [{"image": np.zeros((4, 4, 3)), "caption": text} for text in ("ab", "abc")])
    assert batch["labels"].tolist() == [[97, 98, EOS], [97, 98, 99]]
    assert notes == {"longer than data.max_length 3, and cut": [1]}


def test_the_loss_counts_each_token_and_the_end(context, logits_model):
    class Decoder(logits_model):
        def decoder_inputs(self, labels):
            return ("moved", labels)

    ctx = context("captioning", max_length=8, model=Decoder())
    batch = captioning.collate_fn(ctx, [{"image": np.zeros((4, 4, 1)), "caption": text} for text in ("ab", "cdef")])
    loss = captioning.loss_fn(ctx, jnp.zeros((2, 8, 260)), batch, None, True)
    assert loss.weight == 3 + 5
    assert loss.sum / loss.weight == pytest.approx(np.log(260), rel=1e-6)
    (inputs, named_inputs) = ctx.model.calls[0]
    assert inputs == (batch["pixel_values"],)
    assert named_inputs["decoder_input_ids"] == ("moved", batch["labels"])


def test_words_are_hidden_from_the_decoder_in_training_alone(context, logits_model):
    class Decoder(logits_model):
        def decoder_inputs(self, labels):
            return jnp.pad(labels, ((0, 0), (1, 0)), constant_values=9)[:, :-1]

    ctx = context("captioning", max_length=24, model=Decoder(), word_dropout=0.5)
    batch = captioning.collate_fn(ctx, list(captioning.load_examples(ctx, "eval"))[:64])
    for train in (True, False):
        captioning.loss_fn(ctx, jnp.zeros((64, 24, 260)), batch, jax.random.key(0), train)
    shown, whole = (inputs["decoder_input_ids"] for _, inputs in ctx.model.calls)
    np.testing.assert_array_equal(whole, ctx.model.decoder_inputs(batch["labels"]))
    assert set(np.unique(shown[shown != whole])) == {9}
    assert 0.4 < np.mean(shown != whole) < 0.5  # of half the places one in 24 has the start token already


@pytest.mark.parametrize("said", ["a one and a six", {"text": "a one and a six", "log_probs": [-0.5]}])
def test_captions_are_compared_and_drawn(context, tmp_path, said):
    ctx = context("captioning")
    ctx = replace(ctx, recipe=ctx.recipe.model_copy(update={"output_dir": str(tmp_path)}))
    example = {"image": np.zeros((16, 16, 1)), "caption": "a one and a six"}
    strange = "$\\frac$ \x04 \u4e00"  # no formula, and letters that fonts lack
    found = captioning.metric_fn(
        ctx, [example, {**example, "caption": "a two and a six"}, example], [said, said, strange]
    )
    assert found["exact_match"] == pytest.approx(1 / 3)
    assert found["rouge1"] == pytest.approx((1 + 4 / 5) / 3)
    assert (tmp_path / "captions.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_digits_that_nobody_has_seen_are_named_in_pairs_that_nobody_has_seen(seed, tmp_path):
    values = trained("captioning", tmp_path, [f"seed={seed}"])[-1]
    assert values["exact_match"] >= 0.9
    assert values["rougeL"] >= values["exact_match"]
    lines = [json.loads(line) for line in predict(tmp_path).read_text().splitlines()]
    right = [line["prediction"] == line["example"]["caption"] for line in lines]
    assert np.mean(right) == pytest.approx(values["exact_match"])
    assert Path(tmp_path, "captions.png").is_file()
