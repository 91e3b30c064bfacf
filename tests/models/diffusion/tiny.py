"""Tiny random models of diffusers on disk, and what PyTorch and redco compute with them: outputs and gradients."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import flatten_dict

from redco_cli.models.resolve import resolve_model
from redco_cli.models.weights.diffusion import named_entries
from redco_cli.models.weights.load import load_params
from redco_cli.recipe.schema import ModelSection

with warnings.catch_warnings():  # of what diffusers imports
    warnings.simplefilter("ignore")
    from diffusers import AutoencoderKL, UNet2DConditionModel

UNET: dict[str, Any] = {
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 32,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 8,
}
"""As Stable Diffusion 1.5, with `attention_head_dim: 8`."""
UNET_2: dict[str, Any] = {
    **UNET,
    "attention_head_dim": [2, 4],
    "norm_num_groups": 32,
    "upcast_attention": True,
    "use_linear_projection": True,
}
"""As Stable Diffusion 2."""
AUTOENCODER: dict[str, Any] = {
    "block_out_channels": [32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 8,
    "sample_size": 16,
}
OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def where(key: str) -> str:
    return f"recipe.yaml:3: {key}"


def saved(config: dict[str, Any], directory: Path, **saving: Any) -> Any:
    """A PyTorch model with random weights, biases and scales too, in `directory`."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = (UNet2DConditionModel if "cross_attention_dim" in config else AutoencoderKL)(**config)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(torch.randn_like(tensor) * 0.05)
        model.eval().save_pretrained(directory, **saving)
    return model


def opened(directory: Path, **section: Any) -> tuple[Any, Any]:
    """The model in a directory, and its parameters, as a recipe gets them."""
    model = resolve_model(ModelSection(name=str(directory), **section), where=where)
    return model, load_params(model, directory).params


def latents(height: int = 8, width: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Latents, times and states of two rows."""
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(2, height, width, 4)).astype(np.float32),
        np.array([3, 961], np.int32),
        rng.normal(size=(2, 5, 32)).astype(np.float32),
    )


def images(height: int = 16, width: int = 24) -> np.ndarray:
    """Two of them."""
    return np.random.default_rng(0).uniform(-1, 1, (2, height, width, 3)).astype(np.float32)


def channels_first(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))


def channels_last(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().transpose(0, 2, 3, 1)


def torch_run(model: Any, output: torch.Tensor) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """An output [B, height, width, C], and the gradients of a weighted sum of it by names of tensors."""
    model.zero_grad()
    found = channels_last(output)
    (output * channels_first(weights_of(found))).sum().backward()
    return found, {name: one.grad.numpy() for name, one in model.named_parameters() if one.grad is not None}


def redco_run(model: Any, params: Any, call: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The same of `call(params)` by redco."""

    def summed(params: Any) -> tuple[Any, Any]:
        found = call(params)
        return jnp.sum(found * weights_of(found)), found

    gradients, found = jax.jit(jax.grad(summed, has_aux=True))(params)
    return np.asarray(found), tensors(model, gradients)


def tensors(model: Any, tree: Any) -> dict[str, np.ndarray]:
    """What is shaped as the parameters, by names and in layouts of diffusers."""
    flat = flatten_dict(jax.device_get(tree))
    return {
        name: np.concatenate([flat[path].transpose(entry.order) for path in entry.paths]).reshape(entry.stored_shape)
        for entry, name in named_entries(model, None)
    }


def weights_of(output: Any) -> np.ndarray:
    return np.random.default_rng(1).normal(size=output.shape).astype(np.float32)


def faults(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> list[str]:
    """Gradients that are not the same, by 1e-4 of the largest; those that PyTorch has none for are zero."""
    scale = max(float(np.abs(one).max()) for one in expected.values())
    lines = [name for name in expected if name not in found]
    for name, value in found.items():
        apart = float(np.abs(value - expected.get(name, 0.0)).max())
        if not apart < 1e-4 * scale:
            lines.append(f"{name}: {apart / scale:.1e}")
    return lines
