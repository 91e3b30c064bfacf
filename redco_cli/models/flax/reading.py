"""A Flax class as generation reads with it: its encoder once, its decoder with a key-value cache.

Shapes: B batch, R rows (of a batch, or beams of it), P length of the prompts, N of the outputs, S of what an encoder
gives, E its hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from redco_cli.models.generate.prompts import Prompts
from redco_cli.plugin.contract import Params

Array = Any
_POSITIONS = ("position_ids", "decoder_position_ids")


@dataclass(frozen=True)
class FlaxReader:
    """A Flax class as it reads prompts; their `context` is what `encoded` returns, None without an encoder.

    Attributes:
        flax: the transformers model, without parameters.
        params: its parameters.
        row_dim: rows are the first dim of its cache.
    """

    flax: Any
    params: Params
    row_dim: int = 0

    def begin(self, prompts: Prompts) -> tuple[Array, Any]:
        """See `Reader`. The cache is the class's own, with the positions of the next tokens where it has any."""
        fixed = self._fixed(prompts)
        length = prompts.ids.shape[1] + prompts.settings.max_new_tokens - 1
        given = {"attention_mask": prompts.mask.astype(jnp.int32)}
        if prompts.context is not None:
            given = {"encoder_outputs": fixed["encoder_outputs"]}
        prepared = self.flax.prepare_inputs_for_generation(prompts.ids, length, **given)
        cache = {"past_key_values": prepared["past_key_values"]}
        cache |= {name: jnp.maximum(prepared[name], 0) for name in _POSITIONS if name in prepared}
        return self._read(prompts.ids, cache, fixed)

    def go_on(self, prompts: Prompts, tokens: Array, cache: Any, step: Array) -> tuple[Array, Any]:
        """See `Reader`."""
        return self._read(tokens[:, None], cache, self._fixed(prompts))

    def _read(self, ids: Array, cache: Any, fixed: dict[str, Any]) -> tuple[Array, Any]:
        read = self.flax.decode if "encoder_outputs" in fixed else self.flax
        outputs = read(ids, params=self.params, return_dict=True, **cache, **fixed)
        return outputs.logits[:, -1], self.flax.update_inputs_for_generation(outputs, dict(cache))

    def _fixed(self, prompts: Prompts) -> dict[str, Any]:
        """Named inputs that are the same for every token: masks over all of the cache, and the encoder's outputs."""
        after = prompts.settings.max_new_tokens - 1
        mask = jnp.pad(prompts.mask.astype(jnp.int32), ((0, 0), (0, after)), constant_values=1)
        if prompts.context is None:
            return {"attention_mask": mask}
        hidden, encoder_mask = prompts.context
        fixed = {"encoder_outputs": encoder_outputs(hidden), "decoder_attention_mask": mask}
        return fixed if encoder_mask is None else fixed | {"encoder_attention_mask": encoder_mask}


def encoded(flax: Any, params: Params, inputs: Array, mask: Array | None) -> tuple[Array, Array | None]:
    """What an encoder makes of its inputs.

    Args:
        flax: the transformers model.
        params: its parameters.
        inputs: source ids [B, L], pixel values, or features.
        mask: [B, L], 1 for what is real; None for all, and of images.

    Returns:
        Hidden states [B, S, E], and which of them are real [B, S]: None for all.
    """
    kind = flax.config.model_type
    if kind == "encoder-decoder":
        hidden = _encode_text(flax, params, inputs, mask)
    elif mask is None or kind in ("whisper", "vision-encoder-decoder"):
        return flax.encode(inputs, params=params, return_dict=True).last_hidden_state, None
    else:
        hidden = flax.encode(inputs, attention_mask=mask, params=params, return_dict=True).last_hidden_state
    if kind == "speech-encoder-decoder":
        mask = _feature_mask(flax, params, hidden.shape[1], mask)
    return hidden, mask


def encoder_outputs(hidden: Array) -> Any:
    """Hidden states [B, S, E] as the classes take them."""
    from transformers.modeling_flax_outputs import FlaxBaseModelOutput

    return FlaxBaseModelOutput(last_hidden_state=hidden)


def _encode_text(flax: Any, params: Params, input_ids: Array, mask: Array | None) -> Array:
    """The encoder's outputs: `encode` of the class hands positions to BERT where it takes token types, and gets NaN."""
    mask = jnp.ones_like(input_ids) if mask is None else mask
    outputs = flax.module.apply(
        {"params": params},
        method=lambda module: module._get_encoder_module()(input_ids=input_ids, attention_mask=mask, return_dict=True),
    )
    return outputs.last_hidden_state


def _feature_mask(flax: Any, params: Params, length: int, mask: Array) -> Array:
    """Which of the features [B, S] that the encoder makes of a sound are of its samples, and not of its padding."""
    return flax.module.apply(
        {"params": params},
        method=lambda module: module._get_encoder_module()._get_feature_vector_attention_mask(length, mask),
    )
