"""A tiny Stable Diffusion on disk, in diffusers' layout, and recipes of it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
)

WORDS = ["l", "o", "w", "e", "r</w>", "w</w>", "lo", "low</w>", "<|startoftext|>", "<|endoftext|>"]
SIDE, LENGTH = 16, 12
"""Height and width of an image in pixels, and tokens of a prompt."""
PNDM = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
PNDM |= {"skip_prk_steps": True, "set_alpha_to_one": False}


def write_pipeline(directory: Path, prediction: str = "epsilon") -> Any:
    """A `StableDiffusionPipeline` with random weights, saved, with the scheduler of Stable Diffusion 1.5."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            attention_head_dim=4,
            cross_attention_dim=16,
            norm_num_groups=8,
            sample_size=8,
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            norm_num_groups=8,
            sample_size=SIDE,
        )
        text = CLIPTextConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            bos_token_id=8,
            eos_token_id=9,
            pad_token_id=9,
        )
        whole = StableDiffusionPipeline(
            vae=vae,
            text_encoder=CLIPTextModel(text).eval(),
            tokenizer=_tokenizer(directory / "words"),
            unet=unet,
            scheduler=PNDMScheduler(**PNDM, prediction_type=prediction),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        whole.set_progress_bar_config(disable=True)
        whole.save_pretrained(directory)
    return whole


def write_clip(directory: Path) -> CLIPProcessor:
    """A `CLIPModel` with random weights and its processor, saved; the processor."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 8, "eos_token_id": 9, "pad_token_id": 9}
    text = {"vocab_size": len(WORDS), "max_position_embeddings": LENGTH, **sizes, **ends}
    vision = {"image_size": SIDE, "patch_size": 8, **sizes}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(directory)
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = CLIPProcessor(images, _tokenizer(directory / "words"))
    processor.save_pretrained(directory)
    return processor


def _tokenizer(folder: Path) -> CLIPTokenizer:
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\nl o\nlo w</w>\n")
    return CLIPTokenizer(folder / "vocab.json", folder / "merges.txt", model_max_length=LENGTH)


def write_images(directory: Path, count: int = 4) -> None:
    """Images of several shapes with prompts, as `datasets` keeps them."""
    draw = np.random.default_rng(0)
    shapes = [(20, 30, 3), (SIDE, SIDE, 3), (24, 18, 3), (33, 33, 3)]
    images = [Image.fromarray(draw.integers(0, 256, shapes[number % 4]).astype(np.uint8)) for number in range(count)]
    rows = {"image": images, "text": [" ".join(draw.choice(["low", "lower", "owl"], 3)) for _ in images]}
    columns = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=columns).save_to_disk(str(directory))
    folder = directory.with_name(f"{directory.name}_files")
    folder.mkdir()
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")


SHORT = [
    *("model.name=hub", "model.dtype=float32", "train.global_batch_size=2", "train.steps=2", "train.warmup=0"),
    *("logging.plot=false", "mesh.data=1", "output_dir=run", f"data.max_length={LENGTH}", "plugin.options.steps=2"),
]
"""A short run of a recipe with the pipeline in `hub`."""
