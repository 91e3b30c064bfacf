"""A head that classifies texts by their last token, as `LlamaForSequenceClassification` and its likes have it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from redco_cli.models.decoder.config import DecoderConfig

Array = Any


def last_states(hidden: Array, input_ids: Array, attention_mask: Array | None, config: DecoderConfig) -> Array:
    """The state of the last token of each text that is no padding [B, E].

    As in transformers, padding is what has the id of padding, on either side, whatever the mask says. A model without
    such an id takes one text at a time there; here the mask tells then where a text ends.

    Args:
        hidden: states [B, S, E].
        input_ids: [B, S].
        attention_mask: [B, S]; None for all.
        config: knows the id.
    """
    places = jnp.arange(input_ids.shape[1], dtype=jnp.int32)
    if config.text_padding_id is not None:
        real = input_ids != config.text_padding_id
    else:
        real = jnp.ones(input_ids.shape, bool) if attention_mask is None else attention_mask.astype(bool)
    last = jnp.where(real, places, 0).max(axis=1)
    states: Array = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return states
