"""The models of a Stable Diffusion pipeline behind the interface of every model: abstract parameters, init, apply.

Shapes: B batch, Y height and X width in pixels or latents, C channels, L tokens of a prompt, D size of their states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from redco_cli.errors import ModelError
from redco_cli.models.diffusion.autoencoder import Autoencoder
from redco_cli.models.diffusion.config import AutoencoderConfig, ComponentConfig, UNetConfig
from redco_cli.models.diffusion.unet import Remat, UNet
from redco_cli.plugin.contract import Params


@dataclass(frozen=True, eq=False)
class _Component:
    """What a U-Net and an autoencoder have in common; made by `build_component`, as one of the two below.

    Attributes:
        config: its settings; `config.stored` has all of the file's.
        where: the place in the recipe that asked for it.
        module: the linen module; holds no parameters.
        abstract: the parameters as a nested dict of `jax.ShapeDtypeStruct`, float32.
        task: None: it has no head to choose.
        frozen: empty: everything may be trained.
        added: None: it has no vocabulary.
    """

    config: Any
    where: str
    module: Any = field(repr=False)
    abstract: Params = field(repr=False)
    task: None = None
    frozen: tuple[str, ...] = ()
    added: None = None

    def init(self, rng: Any) -> Params:
        """Fresh float32 parameters from a key. Traceable: call it under `jit` to have them born sharded."""
        return _init(self.module, self.config, rng)

    def next_token_loss(self, params: Params, *inputs: Any, **named: Any) -> NoReturn:
        """Refuses: it writes no tokens.

        Raises:
            ModelError: always.
        """
        self._refuse("next_token_loss", "write the loss in loss_fn")

    def decoder_inputs(self, labels: Any) -> NoReturn:
        """Refuses: it has no decoder of tokens.

        Raises:
            ModelError: always.
        """
        self._refuse("decoder_inputs", "call the model in loss_fn")

    def generate(self, params: Params, inputs: Any, attention_mask: Any = None, **settings: Any) -> NoReturn:
        """Refuses: images are drawn by a sampler around it.

        Raises:
            ModelError: always.
        """
        self._refuse("generate", "draw in predict_fn, with redco_cli.plugin.diffusion")

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise ModelError(self.where, f"{self.config.model_type} has no {what}", remedy)


@dataclass(frozen=True, eq=False)
class UNetModel(_Component):
    """The U-Net: predicts noise, or v, as it was trained to."""

    config: UNetConfig

    def __call__(
        self, params: Params, latents: Any, timestep: Any, states: Any, *, rng: Any = None, train: bool = False
    ) -> Any:
        """What is predicted of noisy latents [B, Y, X, C], float32.

        Args:
            params: as `init` returns them.
            latents: [B, Y, X, C].
            timestep: [B], from 0; the time that each row is at.
            states: [B, L, D], the last hidden states of the text encoder.
            rng: not needed: nothing is dropped.
            train: changes nothing.

        Raises:
            ModelError: inputs of other shapes.
        """
        c = self.config
        shapes = {"latents": jnp.shape(latents), "timestep": jnp.shape(timestep), "states": jnp.shape(states)}
        rows = shapes["latents"][:1]
        self._check("latents", shapes, len(shapes["latents"]) == 4 and shapes["latents"][3] == c.in_channels)
        self._check("timestep", shapes, shapes["timestep"] == rows)
        right = len(shapes["states"]) == 3 and shapes["states"][::2] == (*rows, c.cross_attention_dim)
        self._check("states", shapes, right)
        return self.module.apply({"params": params}, latents, timestep, states)

    def _check(self, name: str, shapes: dict[str, tuple[int, ...]], fits: bool) -> None:
        if not fits:
            c, wanted = self.config, {"timestep": "[B]"}
            wanted |= {"latents": f"[B, height, width, {c.in_channels}]", "states": f"[B, L, {c.cross_attention_dim}]"}
            problem = f"{name} has shape {list(shapes[name])}, but the U-Net takes {wanted[name]}"
            raise ModelError(self.where, problem, "channels come last; take the text encoder of this pipeline")


@dataclass(frozen=True, eq=False)
class AutoencoderModel(_Component):
    """The autoencoder, of images [B, Y, X, channels] from -1 to 1."""

    config: AutoencoderConfig

    def __call__(self, params: Params, images: Any, *, rng: Any = None, train: bool = False) -> Any:
        """Images by way of the means of their latents, float32; `rng` and `train` change nothing."""
        return self.decode(params, self.encode(params, images)[0])

    def encode(self, params: Params, images: Any) -> tuple[Any, Any]:
        """Mean and logarithm of the variance of the latents of images, both [B, Y / 8, X / 8, C], float32.

        A U-Net sees latents times `config.scaling_factor`. 8 is `config.reduction`.

        Raises:
            ModelError: images of another shape.
        """
        shape, times = jnp.shape(images), self.config.reduction
        if len(shape) != 4 or shape[3] != self.config.in_channels or shape[1] % times or shape[2] % times:
            wanted = f"[B, height, width, {self.config.in_channels}], height and width multiples of {times}"
            problem = f"images have shape {list(shape)}, but the autoencoder takes {wanted}"
            raise ModelError(self.where, problem, "channels come last; cut or resize images")
        moments: tuple[Any, Any] = self.module.apply({"params": params}, images, method="encode")
        return moments

    def decode(self, params: Params, latents: Any) -> Any:
        """Images [B, 8 Y, 8 X, channels] of latents [B, Y, X, C], float32.

        Raises:
            ModelError: latents of another shape.
        """
        shape = jnp.shape(latents)
        if len(shape) != 4 or shape[3] != self.config.latent_channels:
            wanted = f"[B, height, width, {self.config.latent_channels}]"
            problem = f"latents have shape {list(shape)}, but the autoencoder takes {wanted}"
            raise ModelError(self.where, problem, "channels come last")
        return self.module.apply({"params": params}, latents, method="decode")


DiffusionModel = UNetModel | AutoencoderModel


def build_component(config: ComponentConfig, *, dtype: str, where: str, remat: Remat = "none") -> DiffusionModel:
    """The model that a config describes; allocates nothing.

    Args:
        config: its settings.
        dtype: compute type; parameters are float32.
        where: the place in the recipe, for errors.
        remat: what the backward pass recomputes.
    """
    if isinstance(config, UNetConfig):
        module: Any = UNet(config, jnp.dtype(dtype), remat)
        return UNetModel(config, where, module, _abstract(module, config))
    module = Autoencoder(config, jnp.dtype(dtype), remat)
    return AutoencoderModel(config, where, module, _abstract(module, config))


def _abstract(module: Any, config: ComponentConfig) -> Params:
    return jax.eval_shape(lambda rng: _init(module, config, rng), jax.random.key(0))


def _init(module: Any, config: ComponentConfig, rng: Any) -> Params:
    """Parameters, whose shapes are the same for the smallest inputs."""
    side = 2 ** (len(config.block_out_channels) - 1)
    image = jnp.zeros((1, side, side, config.in_channels))
    if isinstance(config, UNetConfig):
        states = jnp.zeros((1, 1, config.cross_attention_dim))
        return module.init(rng, image, jnp.zeros(1, jnp.int32), states)["params"]
    return module.init(rng, image)["params"]
