"""Generation with a key-value cache: greedy search, sampling or beam search, as one compiled program.

The loop ends when every row has ended. Shapes are those of the longest output, so that a program is compiled once for
all prompts of a shape.

Shapes: B batch, P length of the prompts, N of the outputs, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.models.decoder.decoder import Decoder
from redco_cli.models.decoder.generate.prompts import Prompts
from redco_cli.models.decoder.generate.sampling import GenerationSettings, filtered_scores, is_end
from redco_cli.models.decoder.generate.search import beam_search
from redco_cli.plugin.contract import Params

Array = Any


@partial(jax.jit, static_argnames=("module", "settings"))
def generate(
    params: Params, input_ids: Array, attention_mask: Array, rng: Any, *, module: Decoder, settings: GenerationSettings
) -> Array:
    """Token ids [B, N]: the outputs alone, padded after their end.

    A row whose mask is empty gets padding only.

    Args:
        params: of the decoder.
        input_ids: prompts [B, P], padded on either side.
        attention_mask: [B, P], 1 for real tokens.
        rng: key for sampling; None is enough for anything else.
        module: the decoder.
        settings: how tokens are chosen.
    """
    ids, mask = _moved_right(jnp.asarray(input_ids, jnp.int32), jnp.asarray(attention_mask, bool))
    reading = module.clone(train=False, remat="none", unroll=1)  # unrolled, XLA copies the cache at every token
    prompts = Prompts(reading, settings, _in_compute_type(params, module.dtype), ids, mask)
    return beam_search(prompts) if settings.beams > 1 else _one_token_at_a_time(prompts, rng)


def _one_token_at_a_time(prompts: Prompts, rng: Any) -> Array:
    """Token ids [B, N]: the likeliest token each time, or one that is drawn with the key `rng`."""
    settings = prompts.settings

    def choose(logits: Array, step: Array, outputs: Array, ended: Array) -> tuple[Array, Array, Array]:
        scores = prompts.processed_scores(logits, outputs, step)
        if settings.sample:
            tokens = jax.random.categorical(jax.random.fold_in(rng, step), filtered_scores(scores, settings))
        else:
            tokens = jnp.argmax(scores, axis=-1)
        tokens = jnp.where(ended, settings.pad, tokens).astype(jnp.int32)
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, tokens[:, None], step, axis=1)
        return tokens, outputs, ended | is_end(tokens, settings)

    def unfinished(state: tuple[Any, ...]) -> Array:
        step, _, _, ended, _ = state
        return (step < settings.max_new_tokens) & ~ended.all()

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, tokens, outputs, ended, cache = state
        logits, cache = prompts.go_on(tokens, cache, step - 1)
        return step + 1, *choose(logits, step, outputs, ended), cache

    logits, cache = prompts.begin()
    outputs = jnp.full((prompts.ids.shape[0], settings.max_new_tokens), settings.pad, jnp.int32)
    first = choose(logits, jnp.int32(0), outputs, ~prompts.mask.any(axis=1))
    return jax.lax.while_loop(unfinished, advance, (jnp.int32(1), *first, cache))[2]


def _moved_right(ids: Array, mask: Array) -> tuple[Array, Array]:
    """Prompts and mask [B, P] with the padding that was behind a prompt before it."""
    length = mask.shape[1]
    behind = jnp.argmax(mask[:, ::-1], axis=1)
    source = (jnp.arange(length) - behind[:, None]) % length
    return jnp.take_along_axis(ids, source, axis=1), jnp.take_along_axis(mask, source, axis=1)


def _in_compute_type(params: Params, dtype: Any) -> Params:
    """Matrices as the layers would cast them at every token; what is computed in float32 stays so."""
    layers = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 2 else leaf, params["layers"])
    others = {name: part for name, part in params.items() if name != "layers"}
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, others) | {"layers": layers}
