"""Stable Diffusion, 1.x and 2.x: text to image in the latents of an autoencoder, fine-tuned on images and prompts.

    z = scale * (mean + deviation * normal)      of an image, by the frozen autoencoder
    z_t = alpha_t z + sigma_t epsilon            the U-Net sees z_t, t and the states of the prompt, and tells
    epsilon, or v = alpha_t epsilon - sigma_t z  whichever its scheduler says, by the mean squared error

(Rombach et al., 2022). Schedule, target and sampler are those of the model's `scheduler_config.json`. Mean, deviation
and states are computed once, before the first step, by `prepare_fn`. DreamBooth (Ruiz et al., 2023) adds an image of
the class that a subject belongs to beside each of its own, so that the class stays what it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageOps

from redco_cli.errors import ExampleError, PluginError
from redco_cli.plugin.contract import Batch, Context, Example, Loss, Params
from redco_cli.plugin.diffusion import Drawn, Scheduler, load_scheduler, snr_weight, target_of
from redco_cli.plugin.parts import column, cut, encode, image_grid, pad, padding_id, tokenizer_of

OWN, OF_CLASS = "", "class_"
"""What the columns of an image of its own, and of one of its class, begin with."""
COLUMNS, SHOWN = 4, 16
"""Of `samples.png`: images in a row, and in all."""


@dataclass(frozen=True)
class Options:
    """What `plugin.options` may hold.

    Attributes:
        image: the column of images: PIL images, or arrays [height, width, 3] from 0 to 1.
        text: the column of prompts.
        instance_prompt: the prompt of images without such a column.
        images: a folder of images to learn from, where the recipe has no `data.train`.
        class_images: a folder of images of the class, for prior preservation; or data have the column `class_image`.
        class_prompt: the prompt of these, without a column `class_text`.
        prior_weight: of the error on images of the class.
        size: height and width of images in pixels; default: what the U-Net was trained for.
        unprompted: share of prompts, 0 to 1, that are left out in training, for guidance.
        min_snr: gamma: an image that is seen more clearly counts no more (5 in the paper); default: unweighted.
        scheduler: where the scheduler is, a directory or a hub id; default: `model.name`.
        solver: how images are drawn: `ddim`, `dpm_solver++` or `pndm`; default: what the scheduler says.
        steps: of drawing.
        guidance: how far an image goes from what is drawn by `negative` to what is by its prompt; 1 is just by it.
        negative: what an image is pushed away from; default: the empty prompt.
    """

    image: str = "image"
    text: str = "text"
    instance_prompt: str | None = None
    images: str | None = None
    class_images: str | None = None
    class_prompt: str | None = None
    prior_weight: float = 1.0
    size: int | None = None
    unprompted: float = 0.0
    min_snr: float | None = None
    scheduler: str | None = None
    solver: Drawn | None = None
    steps: int = 50
    guidance: float = 7.5
    negative: str = ""

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if not 0 <= self.unprompted <= 1 or self.prior_weight < 0 or (self.min_snr is not None and self.min_snr <= 0):
            raise ValueError("unprompted must be 0 to 1, prior_weight 0 or more, and min_snr above 0")
        if self.class_images is not None and (self.class_prompt is None or self.images is None):
            raise ValueError("class_images need a class_prompt, and images beside which they stand")


def scheduler_of(ctx: Context) -> Scheduler:
    """The scheduler of the model, or of `plugin.options.scheduler`.

    Raises:
        PluginError: nothing says where it is, or it asks for what is not computed.
    """
    section, given = ctx.recipe.model, ctx.options.scheduler
    name = given or section.name
    if name is None:
        problem = "a model without a name has no scheduler beside it"
        raise PluginError("plugin.options.scheduler", problem, "name a model in diffusers' layout")
    if given is None and Path(name, "config.json").is_file():  # the U-Net of a pipeline that is a folder
        name = str(Path(name).parent)
    return load_scheduler(name, section.revision if given is None else None, ctx.options.solver)


def size_of(ctx: Context) -> int:
    """Height and width of images in pixels."""
    return int(ctx.options.size or ctx.model.config.sample_size * shrinks(ctx))


def shrinks(ctx: Context) -> int:
    """How many times smaller latents are than images."""
    return int(2 ** (len(ctx.models["vae"].config.block_out_channels) - 1))


def load_examples(ctx: Context, split: str) -> Sequence[Example] | None:
    """The images of the folder `plugin.options.images`, each beside the next of `class_images`; None for evaluation."""
    options = ctx.options
    if options.images is None or split != "train":
        return None
    own, of_class = ([] if one is None else files(one) for one in (options.images, options.class_images))
    count = max(len(own), len(of_class))
    examples = [{options.image: own[index % len(own)]} for index in range(count)]
    for index, example in enumerate(examples if of_class else []):
        example[f"{OF_CLASS}image"] = of_class[index % len(of_class)]
    return examples


def files(folder: str) -> list[Path]:
    """The images of a folder.

    Raises:
        PluginError: there are none.
    """
    found = sorted(path for path in Path(folder).glob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"))
    if not found:
        raise PluginError("plugin.options", f"there are no images in {folder}", "put .png, .jpg or .webp files there")
    return found


def pixels(value: Any, size: int) -> np.ndarray[Any, Any]:
    """An image as an array [size, size, 3] from -1 to 1: its shorter side becomes `size`, and its middle is taken.

    Raises:
        ExampleError: it is no image, or an array of another shape.
    """
    if isinstance(value, Path):
        with Image.open(value) as opened:
            value = ImageOps.exif_transpose(opened).convert("RGB")
    if isinstance(value, Image.Image):
        fitted = ImageOps.fit(value.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
        return np.asarray(fitted, np.float32) / 127.5 - 1
    array = np.asarray(value, np.float32)
    if array.shape != (size, size, 3) or array.min() < 0 or array.max() > 1:
        problem = f"an image is an array {list(array.shape)}"
        remedy = f"give PIL images, or arrays {[size, size, 3]} from 0 to 1"
        raise ExampleError("collate_fn", problem, remedy)
    return 2 * array - 1


def tokens(ctx: Context, texts: Sequence[str]) -> np.ndarray[Any, Any]:
    """Ids [B, L] of prompts, as the text encoder was trained: ended, and padded to L = `data.max_length`."""
    tokenizer, length = tokenizer_of(ctx), ctx.recipe.data.max_length
    rows = [[*row[:-1], tokenizer.eos_token_id] for row in cut(encode(tokenizer, list(texts)), length)]
    ids: np.ndarray[Any, Any] = pad(rows, length, padding_id(tokenizer))[0]
    return ids


def kinds_of(names: Any) -> list[str]:
    """Which images there are: its own, and those of its class where there are such columns."""
    return [OWN, *([OF_CLASS] if any(name.startswith(OF_CLASS) for name in names) else [])]


def collate_fn(ctx: Context, examples: Sequence[Example]) -> Mapping[str, Any]:
    """`images` and `input_ids` for `prepare_fn`, what that made of them for a loss, `input_ids` for a prediction."""
    options = ctx.options
    if ctx.stage in ("train", "eval"):
        names = [f"{kind}{name}" for kind in kinds_of(examples[0]) for name in ("mean", "deviation", "states")]
        return {name: np.stack([example[name] for example in examples]) for name in names}
    batch = {}
    for kind in kinds_of(examples[0]) if ctx.stage == "prepare" else [OWN]:
        prompt = options.instance_prompt if kind == OWN else options.class_prompt
        name = options.text if kind == OWN else f"{kind}text"
        same = prompt is not None and name not in examples[0]
        batch[f"{kind}input_ids"] = tokens(ctx, [prompt] * len(examples) if same else column(examples, name, str))
        if ctx.stage == "prepare":
            images = column(examples, f"{kind}image" if kind else options.image)
            batch[f"{kind}images"] = np.stack([pixels(image, size_of(ctx)) for image in images])
    return batch


def prepare_fn(ctx: Context, params: Params, batch: Batch) -> Mapping[str, Any]:
    """`mean` and `deviation` of the latents of an image [B, h, w, C], and `states` of its prompt [B, L, D]."""
    made: dict[str, Any] = {}
    for kind in kinds_of(batch):
        mean, log_variance = ctx.models["vae"].encode(params["vae"], batch[f"{kind}images"])
        states = ctx.models["text_encoder"](params["text_encoder"], batch[f"{kind}input_ids"])
        made |= {f"{kind}mean": mean, f"{kind}deviation": jnp.exp(log_variance / 2), f"{kind}states": states}
    return made


def loss_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
    """The mean squared error at a random time of each image, and `prior_weight` times that on images of the class."""
    options, scheduler, kinds = ctx.options, scheduler_of(ctx), kinds_of(batch)
    mean, deviation, states = (
        jnp.concatenate([batch[f"{kind}{name}"] for kind in kinds]) for name in ("mean", "deviation", "states")
    )
    place, noise, timestep = draws(ctx, batch, mean.shape, rng)
    latents = (mean + deviation * place) * ctx.models["vae"].config.scaling_factor
    if train and options.unprompted:
        empty = ctx.models["text_encoder"](params["text_encoder"], tokens(ctx, [""]))
        left_out = jax.random.bernoulli(jax.random.fold_in(rng, 2), options.unprompted, (len(mean), 1, 1))
        states = jnp.where(left_out, empty, states)
    alpha, sigma = scheduler.schedule.at(timestep, latents.ndim)
    found = ctx.model(params["model"], alpha * latents + sigma * noise, timestep, states, train=train, rng=rng)
    error = ((found - target_of(scheduler.prediction, latents, noise, alpha, sigma)) ** 2).mean((1, 2, 3))
    if options.min_snr is not None:
        error *= snr_weight(scheduler.prediction, alpha, sigma, options.min_snr).reshape(-1)
    own, *of_class = jnp.split(error, len(kinds))
    prior = sum(one.sum() for one in of_class)
    metrics = {"prior": prior} if of_class else {}
    return Loss(own.sum() + options.prior_weight * prior, len(own), metrics)


def draws(ctx: Context, batch: Batch, shape: tuple[int, ...], rng: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normal numbers that say where latents lie in their distribution, and of noise; both of a shape; and times [B]."""
    keys = jax.random.split(jax.random.fold_in(rng, 1), 3)
    timestep = jax.random.randint(keys[2], shape[:1], 0, len(scheduler_of(ctx).schedule))
    return jax.random.normal(keys[0], shape), jax.random.normal(keys[1], shape), timestep


def predict_fn(ctx: Context, params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
    """An image of each prompt [B, height, width, 3], from 0 to 1."""
    count, side = len(batch["input_ids"]), size_of(ctx) // shrinks(ctx)
    return draw(ctx, params, batch, jax.random.normal(rng, (count, side, side, ctx.model.config.in_channels)))


def draw(ctx: Context, params: Params, batch: Batch, noise: jax.Array) -> jax.Array:
    """Images [B, height, width, 3] of prompts, from noise [B, h, w, C]."""
    options, scheduler, count = ctx.options, scheduler_of(ctx), len(noise)
    ids = batch["input_ids"]
    if options.guidance != 1:
        ids = jnp.concatenate([jnp.broadcast_to(tokens(ctx, [options.negative]), ids.shape), ids])
    states = ctx.models["text_encoder"](params["text_encoder"], ids)

    def predict(noisy: jax.Array, timestep: jax.Array) -> jax.Array:
        seen = jnp.concatenate([noisy] * (len(ids) // count))
        found = ctx.model(params["model"], seen, jnp.full(len(seen), timestep), states)
        without, *wanted = jnp.split(found, len(ids) // count)
        return without + options.guidance * (wanted[0] - without) if wanted else without

    latents = scheduler.sample(predict, noise, options.steps) / ctx.models["vae"].config.scaling_factor
    drawn: jax.Array = ctx.models["vae"].decode(params["vae"], latents)
    return (drawn / 2 + 0.5).clip(0, 1)


def output_fn(ctx: Context, outputs: Any) -> list[Any]:
    """Where each image was written: a PNG file in `images` of the output directory, named after what is in it.

    Whoever draws it writes it, in one stroke, so that several may.
    """
    folder, found = Path(ctx.recipe.output_dir, "images"), []
    folder.mkdir(parents=True, exist_ok=True)
    for image in np.round(outputs * 255).astype(np.uint8):
        path = folder / f"{hashlib.sha256(image.tobytes()).hexdigest()[:16]}.png"
        if not path.exists():
            new = folder / f".{uuid4().hex}.png"
            Image.fromarray(image).save(new)
            new.replace(path)
        found.append({"image": str(path)})
    return found


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """Draws the first images in `samples.png`; there is no number that tells how good they are."""
    drawn = [np.asarray(Image.open(one["image"])) for one in predictions[:SHOWN]]
    image_grid(ctx, "samples.png", np.stack(drawn) / 255, columns=COLUMNS)
    return {}
