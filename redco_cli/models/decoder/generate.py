"""Generation by the decoder, as one compiled program.

Shapes: B batch, P length of the prompts, N of the outputs, R rows (of a batch, or beams of it), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.errors import ModelError
from redco_cli.models.decoder.cache import KVCache
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.decoder import Decoder
from redco_cli.models.decoder.runs import layer_runs
from redco_cli.models.generate.engine import outputs_of
from redco_cli.models.generate.prompts import Prompts, moved_right
from redco_cli.models.generate.settings import GenerationSettings
from redco_cli.models.generate.stops import Stops
from redco_cli.plugin.contract import Params

Array = Any


@dataclass(frozen=True)
class DecoderReader:
    """The decoder as it reads prompts. A text starts at position 0 whatever padding is before it.

    Attributes:
        module: the decoder.
        params: its parameters, in the types that it computes with.
        row_dim: the cache is stacked over layers.
    """

    module: Decoder
    params: Params
    row_dim: int = 1

    def begin(self, prompts: Prompts) -> tuple[Array, KVCache]:
        """See `Reader`."""
        positions = jnp.maximum(jnp.cumsum(prompts.mask, axis=1, dtype=jnp.int32) - 1, 0)
        length = prompts.ids.shape[1] + prompts.settings.max_new_tokens - 1
        hidden, cache = self._apply("prefill", prompts.ids, prompts.mask, length, positions=positions)
        return self._apply("logits", hidden[:, -1]), cache

    def go_on(self, prompts: Prompts, tokens: Array, cache: KVCache, step: Array) -> tuple[Array, KVCache]:
        """See `Reader`."""
        positions = prompts.mask.sum(axis=1, dtype=jnp.int32) + step
        mask = jnp.pad(prompts.mask, ((0, 0), (0, prompts.settings.max_new_tokens - 1)), constant_values=True)
        hidden, cache = self._apply("decode", tokens[:, None], cache, mask, positions=positions[:, None])
        return self._apply("logits", hidden[:, -1]), cache

    def _apply(self, method: str, *inputs: Any, **named: Any) -> Any:
        return self.module.apply({"params": self.params}, *inputs, **named, method=method)


@partial(jax.jit, static_argnames=("module", "settings"))
def generate(
    params: Params,
    input_ids: Array,
    attention_mask: Array,
    rng: Any,
    stops: Stops | None = None,
    *,
    module: Decoder,
    settings: GenerationSettings,
) -> Any:
    """The outputs alone, padded after their end; see `outputs_of`.

    A row whose mask is empty gets padding only.

    Args:
        params: of the decoder.
        input_ids: prompts [B, P], padded on either side.
        attention_mask: [B, P], 1 for real tokens.
        rng: key for sampling; None is enough for anything else.
        stops: what ends outputs besides tokens.
        module: the decoder.
        settings: how tokens are chosen.
    """
    ids, mask = moved_right(jnp.asarray(input_ids, jnp.int32), jnp.asarray(attention_mask, bool))
    reading = module.clone(train=False, remat="none", unroll=1)  # unrolled, XLA copies the cache at every token
    reader = DecoderReader(reading, _in_compute_type(params, module.config, module.dtype))
    return outputs_of(Prompts(reader, settings, ids, mask, mask.any(axis=1), ids, stops), rng)


def _in_compute_type(params: Params, config: DecoderConfig, dtype: Any) -> Params:
    """Matrices as the layers would cast them at every token; what is computed in float32 stays so."""

    def cast(tree: Params, dims: int) -> Params:
        narrow: Params = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > dims else leaf, tree)
        return narrow

    stacks = {run.name for run in layer_runs(config)}
    return {name: cast(part, 2 if name in stacks else 1) for name, part in params.items()}


def check_rope(config: DecoderConfig, prompt: int, new: int, where: str) -> None:
    """Refuses outputs in the midst of which the whole text would have to be read again.

    Args:
        config: the decoder's.
        prompt: length of the prompt with its padding, in tokens.
        new: most tokens of the output.
        where: place for errors.

    Raises:
        ModelError: there would be such a place.
    """
    for rope in config.ropes if config.rereads_long_texts else ():
        if rope.kind == "longrope" and prompt <= rope.positions < prompt + new - 1:
            changes = f"{config.family} changes its rotary positions (longrope) at {rope.positions} tokens"
            raise ModelError(
                where,
                f"{changes}, between a prompt of {prompt} and an output of {new}",
                f"make outputs shorter: predict.generation.max_new_tokens: {rope.positions + 1 - prompt}",
            )
