"""What PyTorch drops at random in training, dropped likewise in the Flax classes: attention, layers, spans of sounds.

The Flax classes of BART's kind never tell their attention that they are trained, nor wav2vec2 its layers, nor DINOv2
the paths it drops; ALBERT's drops once more than PyTorch's; dropped layers are drawn once, when the program is traced;
SpecAugment is left to the caller. Methods are intercepted instead of changed, so that the classes stay those of
transformers.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_cli.errors import MissingKeyError, ModelError

_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_DEAF_ATTENTION = frozenset(
    f"transformers.models.{name}.modeling_flax_{name}"
    for name in ("bart", "blenderbot", "blenderbot_small", "marian", "mbart", "pegasus", "whisper", "xglm")
)
"""Modules of transformers whose layers do not tell their attention whether they are trained."""

_DEAF = frozenset({"FlaxWav2Vec2EncoderLayerStableLayerNormCollection", "FlaxDinov2DropPath"})
"""Modules that are not told it themselves."""


def with_layer_drop(config: Any, like: Any = None) -> Any:
    """A copy of a config with the layer drop of another; without any where there is no other.

    A Flax class gets the latter, so that it drops no layers itself.
    """
    found = copy.deepcopy(config)
    for part, other in zip(_parts(found), _parts(found if like is None else like), strict=True):
        for key in _LAYER_DROPS:
            if hasattr(part, key):
                setattr(part, key, 0.0 if like is None else getattr(other, key))
    return found


def _parts(config: Any) -> list[Any]:
    return [config, *(getattr(config, name) for name in config.sub_configs)]


def dropping(config: Any, rng: Any, where: str) -> contextlib.AbstractContextManager[Any]:
    """Within it, a Flax class that is trained drops what PyTorch's drops.

    Args:
        config: the transformers config, with its layer drop.
        rng: key for what is dropped; None where nothing is dropped at random.
        where: place for errors.

    Raises:
        ModelError: on a call that needs a key where there is none.
    """

    def intercepted(call: Callable[..., Any], args: Any, named: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":
            return call(*args, **named)
        kind, path = type(module).__name__, module.path
        deaf = kind.endswith("Attention") and type(module).__module__ in _DEAF_ATTENTION
        if deaf or kind in _DEAF:
            return call(*args, **{"deterministic": False, **named})
        if isinstance(module, nn.Dropout) and path[-3:-2] == ("albert_layers",):
            return args[0]
        if path[-2:-1] == ("layers",) and "adapter" not in path and _rate(config, path):
            return _maybe_skipped(call, args, named, _rate(config, path), _key(rng, path, where))
        if kind == "FlaxWav2Vec2Module":
            _refuse_dropped_adapters(module.config, where)
            masked = _masked_times(module, args, named, rng, where)
            return call(*args, **named, **({} if masked is None else {"mask_time_indices": masked}))
        return call(*args, **named)

    context: contextlib.AbstractContextManager[Any] = nn.intercept_methods(intercepted)
    return context


def _key(rng: Any, path: tuple[str, ...], where: str) -> Any:
    if rng is None:
        raise MissingKeyError(
            where, "training this model needs a key for what is dropped", "pass rng= to ctx.model, as loss_fn got it"
        )
    return jax.random.fold_in(rng, zlib.crc32("/".join(path).encode()) & 0x7FFFFFFF)


def _rate(config: Any, path: tuple[str, ...]) -> float:
    """How likely the layer at a path is left out."""
    part = config if not config.sub_configs else getattr(config, path[0], config)
    side = f"{path[-3]}_layerdrop" if len(path) > 2 else ""
    return float(getattr(part, side, 0) or getattr(part, "layerdrop", 0) or 0)


def _maybe_skipped(call: Callable[..., Any], args: Any, named: Any, rate: float, key: Any) -> Any:
    """What a layer makes of its input, or its input as it is."""
    given = args[0] if args else named["hidden_states"]
    found, *others = call(*args, **named)
    return jnp.where(jax.random.uniform(key) < rate, given, found), *others


def _refuse_dropped_adapters(config: Any, where: str) -> None:
    """PyTorch leaves out layers of the adapter of a wav2vec2 too, and each shortens the sound."""
    if config.add_adapter and config.layerdrop:
        problem = f"layerdrop: {config.layerdrop} with add_adapter changes how long a sound is, from step to step"
        raise ModelError(where, problem, "set layerdrop: 0 in the config of the encoder")


def _masked_times(module: Any, args: Any, named: Any, rng: Any, where: str) -> Any:
    """Which features of sounds SpecAugment masks [B, S]; None for none."""
    config = module.config
    if not config.apply_spec_augment or not config.mask_time_prob > 0:
        return None
    sounds = args[0] if args else named["input_values"]
    mask = args[1] if len(args) > 1 else named.get("attention_mask")
    length = int(module._get_feat_extract_output_lengths(jnp.shape(sounds)[1], add_adapter=False))
    lengths = jnp.full(len(sounds), length)
    if mask is not None:
        lengths = module._get_feat_extract_output_lengths(mask.sum(-1), add_adapter=False)
    if config.mask_time_length > length:
        problem = f"the sounds make {length} features, but mask_time_length is {config.mask_time_length}"
        raise ModelError(where, problem, "pad sounds, or set apply_spec_augment: false in the config of the encoder")
    return masked_spans(
        _key(rng, (*module.path, "mask_time"), where),
        lengths,
        length,
        config.mask_time_prob,
        config.mask_time_length,
        config.mask_time_min_masks,
    )


def masked_spans(rng: Any, lengths: Any, length: int, share: float, span: int, least: int) -> Any:
    """Spans that SpecAugment masks, drawn as `_compute_mask_indices` of PyTorch's transformers draws them.

    Args:
        rng: a key.
        lengths: how many features each row has [B].
        length: how many there are with padding.
        share: of the features that spans would mask if they did not overlap.
        span: features in a span.
        least: how many spans there are in any case, as far as they fit.

    Returns:
        Whether each feature is masked [B, length].

    References:
        Park et al. 2019, "SpecAugment: A Simple Data Augmentation Method for Automatic Speech Recognition".
    """
    rounding, drawing = jax.random.split(rng)
    starts = lengths - (span - 1)
    count = jnp.maximum((share * lengths / span + jax.random.uniform(rounding)).astype(jnp.int32), least)
    count = jnp.where(count * span > length, length // span, count)
    count = jnp.where(starts < count, jnp.maximum(starts, 0), count)
    drawn = jax.random.uniform(drawing, (lengths.shape[0], length))
    drawn = jnp.where(jnp.arange(length) < starts[:, None], drawn, 2.0)
    ranks = drawn.argsort(-1).argsort(-1)
    begun = jnp.cumsum(ranks < count[:, None], -1)
    return begun - jnp.pad(begun, ((0, 0), (span, 0)))[:, :length] > 0
