"""One decoder-only transformer for many families: its config says which parts it has, its layers are scanned.

Shapes: B batch, S sequence, K keys (S, or the length of the cache), E hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_cli.models.decoder.attention import is_fused
from redco_cli.models.decoder.block import POLICIES, Block, Remat
from redco_cli.models.decoder.cache import KVCache, empty_cache, extended
from redco_cli.models.decoder.classifier import last_states
from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.models.decoder.layers import Dense, Norm
from redco_cli.models.decoder.masks import (
    AttentionContext,
    attention_context,
    layer_traits,
    padding_last,
    reordered,
    token_positions,
)
from redco_cli.models.decoder.runs import layer_runs
from redco_cli.models.kernels.choice import Kernel

Array = Any
Params = Any


class Decoder(nn.Module):  # type: ignore[misc]
    """Token ids to logits.

    Attributes:
        config: which parts it has.
        dtype: compute type; parameters are float32, softmax and norms are computed in float32.
        train: whether dropout is active; needs a key named `dropout`. Make a training copy with `clone(train=True)`.
        remat: what the backward pass recomputes.
        kernel: which code computes attention.
        unroll: how many layers the loop over layers has in its body.
        layer_params: applied to the parameters of one layer right where they are used; they come as the tree that
            the stack of its run is (`params["layers"]`), without the leading dim. What it returns is recomputed under
            `remat`.
    """

    config: DecoderConfig
    dtype: Any = jnp.float32
    train: bool = False
    remat: Remat = "none"
    kernel: Kernel = "plain"
    unroll: int = 1
    layer_params: Callable[[Params], Params] | None = None

    def setup(self) -> None:
        """Names the parts."""
        c = self.config
        normal = nn.initializers.normal(c.initializer_range)
        self.embedding = self.param("embedding", normal, (c.vocab_size, c.embedding_size))
        if c.learned_positions:
            rows = c.learned_positions + c.position_offset
            self.position_embedding = self.param("position_embedding", normal, (rows, c.hidden_size))
        if c.embedding_norm:
            self.embedding_norm = Norm(c, self.dtype)
        if c.embedding_size != c.hidden_size:
            self.project_in = Dense(c.hidden_size, False, self.dtype, c.initializer_range)
            self.project_out = Dense(c.embedding_size, False, self.dtype, c.initializer_range)
        self.embedding_dropout = nn.Dropout(c.embedding_dropout, deterministic=not self.train)
        stacks = [self._scanned(run.count)(run.config, self.dtype, self.train, self.kernel) for run in layer_runs(c)]
        self.layers: Any = stacks[0] if len(stacks) == 1 else stacks  # flax numbers the members of a list
        if c.final_norm:
            self.final_norm = Norm(c, self.dtype)
        if c.num_labels:
            self.score = self.param("score", normal, (c.embedding_size, c.num_labels))
        elif not c.tied:
            self.head = self.param("head", normal, (c.embedding_size, c.vocab_size))
        if c.head_bias and not c.num_labels:
            self.head_bias = self.param("head_bias", nn.initializers.zeros, (c.vocab_size,))

    def __call__(
        self,
        input_ids: Array,
        attention_mask: Array | None = None,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
    ) -> Array:
        """Logits [B, S, V], in the compute type; [B, labels] with a head that classifies.

        Args:
            input_ids: [B, S].
            attention_mask: [B, S], 1 for real tokens, whichever side the padding is on.
            positions: [B, S]; by default tokens are counted from the beginning of the row.
            segment_ids: [B, S]: tokens see only those with the same number. Give `positions` too.
        """
        hidden = self.hidden(input_ids, attention_mask, positions=positions, segment_ids=segment_ids)
        if not self.config.num_labels:
            return self.logits(hidden)
        return last_states(hidden, input_ids, attention_mask, self.config) @ self.score.astype(self.dtype)

    def hidden(
        self,
        input_ids: Array,
        attention_mask: Array | None = None,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
    ) -> Array:
        """What `logits` multiplies with the head: [B, S, E]. Takes what `__call__` takes."""
        return self._run(input_ids, attention_mask, positions, segment_ids, None)[0]

    def prefill(
        self, input_ids: Array, attention_mask: Array, length: int, *, positions: Array | None = None
    ) -> tuple[Array, KVCache]:
        """Reads the beginning of a text, for `decode` to go on from.

        Args:
            input_ids: [B, S].
            attention_mask: [B, S], 1 for real tokens.
            length: how many tokens the cache shall have room for; S or more.
            positions: [B, S]; by default tokens are counted from the beginning of the row.

        Returns:
            Hidden states [B, S, E] and the cache.
        """
        none = empty_cache(self.config, input_ids.shape[0], 0, self.dtype)
        hidden, new = self._run(input_ids, attention_mask, positions, None, none)
        assert new is not None
        return hidden, extended(empty_cache(self.config, input_ids.shape[0], length, self.dtype), new)

    def decode(
        self, input_ids: Array, cache: KVCache, attention_mask: Array, *, positions: Array | None = None
    ) -> tuple[Array, KVCache]:
        """Goes on from a cache.

        Args:
            input_ids: the next tokens [B, S].
            cache: keys and values [L, B, G, K, D] of the tokens before, from `prefill` or `empty_cache`.
            attention_mask: [B, K], 1 for real tokens among those in the cache and the next ones.
            positions: [B, S]; by default they are counted from the beginning of the cache.

        Returns:
            Hidden states [B, S, E] and the cache with these tokens in it.
        """
        hidden, new = self._run(input_ids, attention_mask, positions, None, cache)
        assert new is not None
        return hidden, extended(cache, new)

    def logits(self, hidden: Array) -> Array:
        """Logits [..., V] of hidden states [..., E]."""
        c = self.config
        head = self.embedding.T if c.tied else self.head
        flat = hidden.reshape(-1, hidden.shape[-1]) @ head.astype(self.dtype)
        if c.head_bias:
            flat = flat + self.head_bias.astype(self.dtype)
        return squash(flat * c.logits_scale, c.logits_softcap).reshape(*hidden.shape[:-1], c.vocab_size)

    def _run(
        self,
        input_ids: Array,
        attention_mask: Array | None,
        positions: Array | None,
        segment_ids: Array | None,
        cache: KVCache | None,
    ) -> tuple[Array, KVCache | None]:
        c = self.config
        first = 0 if cache is None else cache.length
        queries = first + jnp.arange(input_ids.shape[1], dtype=jnp.int32)
        if positions is None:
            positions = token_positions(c, queries, attention_mask)
        if attention_mask is not None and cache is None and self._orders(segment_ids):
            order, places = padding_last(attention_mask)
            everywhere = jnp.broadcast_to(positions, input_ids.shape)
            ids, positions = reordered(input_ids, order, places), reordered(everywhere, order, places)
            hidden, _ = self._run(ids, None, positions, None, None)
            return reordered(hidden, places, order), None
        x = self._embed(input_ids, positions)
        context = attention_context(c, queries, positions, attention_mask, segment_ids, cache)
        per_layer = None if cache is None else KVCache(cache.keys, cache.values, jnp.full((c.layers,), cache.length))
        x, new = self._through_layers(x, (layer_traits(c), per_layer), context)
        if c.final_norm:
            x = self.final_norm(x)
        return (self.project_out(x) if c.embedding_size != c.hidden_size else x), new

    def _orders(self, segment_ids: Array | None) -> bool:
        """Whether padding goes behind the tokens of a row, so that the kernel of attention needs no mask.

        Windows count the padding between tokens, which is nowhere but in odd masks, and ALiBi adds a bias anyway.
        """
        c = self.config
        fused = is_fused(c, self.kernel, train=self.train)
        return fused and segment_ids is None and not c.alibi and not any(c.windows)

    def _through_layers(self, x: Array, per_layer: Any, context: AttentionContext) -> tuple[Array, KVCache | None]:
        runs = layer_runs(self.config)
        if len(runs) == 1:
            done: tuple[Array, KVCache | None] = self.layers(x, per_layer, context)
            return done
        caches = []
        for run, stack in zip(runs, self.layers, strict=True):
            own = jax.tree.map(lambda leaf, run=run: leaf[run.first : run.first + run.count], per_layer)
            x, cache = stack(x, own, context)
            caches.append(cache)
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *caches)

    def _embed(self, input_ids: Array, positions: Array) -> Array:
        c = self.config
        x = jnp.asarray(self.embedding).at[input_ids].get(mode="fill").astype(self.dtype)
        if c.padding_id is not None:
            x = jnp.where((input_ids == c.padding_id)[..., None], jax.lax.stop_gradient(x), x)
        x = x * jnp.asarray(c.embedding_scale, self.dtype)
        if c.embedding_size != c.hidden_size:
            x = self.project_in(x)
        if c.learned_positions:
            rows = jnp.take(self.position_embedding, positions + c.position_offset, axis=0)
            x = x + rows.astype(self.dtype)
        if c.embedding_norm:
            x = self.embedding_norm(x)
        return self.embedding_dropout(x)

    def _scanned(self, layers: int) -> Any:
        block: Any = Block
        if self.layer_params is not None and not self.is_initializing():
            block = nn.map_variables(block, "params", trans_in_fn=partial(_under_params, self.layer_params))
        if self.remat != "none":
            in_loop = self.unroll == 1  # a loop's body is not merged with that of the backward loop anyway
            block = nn.remat(block, policy=POLICIES[self.remat], prevent_cse=not in_loop)
        return nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, nn.broadcast),
            length=layers,
            unroll=self.unroll,
            check_constancy_invariants=False,  # which would trace the body twice
        )


def _under_params(change: Callable[[Params], Params], variables: Any) -> Any:
    return {**variables, "params": change(variables["params"])}


def squash(logits: Array, cap: float | None) -> Array:
    """Logits kept within ± `cap`; as they are where it is None."""
    return logits if cap is None else jnp.tanh(logits / cap) * cap


def abstract_params(module: Decoder) -> Params:
    """The parameters of a decoder as a nested dict of `jax.ShapeDtypeStruct`; allocates nothing."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return jax.eval_shape(module.init, jax.random.key(0), ids)["params"]
