"""Image classification: an own Flax network on scikit-learn's handwritten digits, or a named model on image files.

Without `model.name` and `model.config`, `build_model` makes a small convolutional network, and without `data.train`
`load_examples` gives the 1797 digits of scikit-learn, 8 x 8 pixels each, a fixed fifth of every class held out. A
named model is one of Hugging Face (ViT, ...), and its image processor makes what it reads of the column `image`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from redco_cli.errors import ExampleError, PluginError
from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.parts import column, token_loss


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        image: the column of images: PIL images, or arrays [height, width, channels] for the network built here.
        label: the column of classes, integers from 0.
        channels: width of the first convolution of the network built here; the second has twice as many.
        classes: how many classes the network built here tells apart.
        dropout: share of features, 0 to 1, dropped in its training.
        shift: images are moved by up to so many pixels in its training.
    """

    image: str = "image"
    label: str = "label"
    channels: int = 32
    classes: int = 10
    dropout: float = 0.3
    shift: int = 1


class ConvNet(nn.Module):  # type: ignore[misc]
    """Two convolutions, pooling, two more, and a classifier."""

    options: Options

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, pixel_values: jax.Array, train: bool = False) -> jax.Array:
        """Images [B, height, width, channels] to logits [B, classes]."""
        x = pixel_values
        for width in (self.options.channels, 2 * self.options.channels):
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(self.options.dropout, deterministic=not train)(x)
        logits: jax.Array = nn.Dense(self.options.classes)(x)
        return logits


def build_model(ctx: Context) -> nn.Module:
    """The network for when no model is named."""
    return ConvNet(ctx.options)


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """The digits of scikit-learn, pixels scaled to 0 .. 1: of each class every fifth image is for evaluation.

    Raises:
        PluginError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise PluginError(
            "load_examples", "the digits come with scikit-learn, which is not installed", 'pip install "redco[digits]"'
        ) from None
    digits = load_digits()
    images, labels = digits.images[..., None].astype(np.float32) / 16, digits.target
    rank = np.array([(labels[:index] == label).sum() for index, label in enumerate(labels)])
    chosen = np.flatnonzero((rank % 5 == 0) == (split == "eval"))
    return [{ctx.options.image: images[index], ctx.options.label: int(labels[index])} for index in chosen]


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """`pixel_values`: [B, height, width, channels], or as a processor makes them; for training also `labels` [B]."""
    images = column(examples, ctx.options.image)
    if ctx.tokenizer is None:
        batch = {"pixel_values": np.stack(arrays(images, ctx.options.image))}
    else:
        for row, image in enumerate(images):
            if image is None or isinstance(image, str | int | float):
                raise not_an_image(image, ctx.options.image, row)
        batch = {"pixel_values": ctx.tokenizer(images=in_colour(images), return_tensors="np")["pixel_values"]}
    if ctx.stage != "predict":
        batch["labels"] = class_array(ctx, column(examples, ctx.options.label, int))
    return batch


def arrays(images: Sequence[Any], name: str) -> list[np.ndarray[Any, Any]]:
    """The images of a column as arrays [height, width, channels] of one shape.

    Raises:
        ExampleError: one of them is no such array.
    """
    found: list[np.ndarray[Any, Any]] = []
    for row, image in enumerate(images):
        if image is None:
            raise not_an_image(image, name, row)
        try:
            found.append(np.asarray(image, np.float32))
        except (TypeError, ValueError):
            raise not_an_image(image, name, row) from None
        if found[row].ndim != 3 or found[row].shape != found[0].shape:
            problem = f"the image in the column {name!r} has shape {list(found[row].shape)}"
            expected = "[height, width, channels]" if found[0].ndim != 3 else f"{list(found[0].shape)}, as others have,"
            remedy = "give all images one shape, or name a model, whose image processor does"
            raise ExampleError("collate_fn", f"{problem}, but {expected} is expected", remedy, row)
    return found


def in_colour(images: Sequence[Any]) -> list[Any]:
    """PIL images in grey, with a palette or for print as RGB, which image processors expect; arrays as they are."""
    return [image.convert("RGB") if getattr(image, "mode", "RGB") != "RGB" else image for image in images]


def not_an_image(value: Any, name: str, row: int) -> ExampleError:
    """The refusal of a value that no image can be made of."""
    found = "is null or missing" if value is None else f"holds {repr(value)[:60]}"
    problem = f"the column {name!r} {found}, but an image is expected"
    remedy = (
        "correct that row or leave it out; a file name becomes an image when the dataset declares that column as one"
    )
    return ExampleError("collate_fn", problem, remedy, row)


def class_array(ctx: Context, labels: Sequence[int]) -> np.ndarray[Any, Any]:
    """Numbers of classes [B].

    Raises:
        ExampleError: one is not among those that the model tells apart.
    """
    config = ctx.model.config if ctx.model is not None else None
    count = ctx.options.classes if config is None else config.num_labels
    for row, label in enumerate(labels):
        if not 0 <= label < count:
            problem = f"the column {ctx.options.label!r} holds {label}, but classes go from 0 to {count - 1}"
            remedy = f"correct the data, or set {'plugin.options.classes' if config is None else 'model.num_labels'}"
            raise ExampleError("collate_fn", problem, remedy, row)
    return np.array(labels, np.int32)


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """Cross-entropy of each image's class. In training, images are moved by a random number of pixels."""
    images = batch["pixel_values"]
    if train and ctx.tokenizer is None and ctx.options.shift:
        images = shifted(images, ctx.options.shift, jax.random.fold_in(rng, 1))
    return token_loss(ctx.model(params, images, rng=rng, train=train), batch["labels"])


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
    """The likeliest class [B]."""
    return jnp.argmax(ctx.model(params, batch["pixel_values"]), axis=-1)


def shifted(images: jax.Array, most: int, rng: jax.Array) -> jax.Array:
    """Each of the images [B, height, width, channels] moved by -most to most pixels along both dims, zeros moved in."""
    padded = jnp.pad(images, ((0, 0), (most, most), (most, most), (0, 0)))
    offsets = jax.random.randint(rng, (len(images), 2), 0, 2 * most + 1)

    def crop(image: jax.Array, offset: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(image, (offset[0], offset[1], 0), images.shape[1:])

    return jax.vmap(crop)(padded, offsets)
