"""Generation with a key-value cache: the prompt is read at once, then one token of every row at a time.

The loop ends when every row has ended. Shapes are those of the longest output, so that a program is compiled once for
all prompts of a shape. A text starts at position 0 whatever padding is before it.

Shapes: B batch, M beams, R rows: B, or B * M; P length of the prompts, N of the outputs, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_cli.models.decoder.decoder import Decoder
from redco_cli.models.decoder.generate.sampling import Choice, changed_scores, filtered_scores
from redco_cli.models.decoder.masks import Cache
from redco_cli.plugin.contract import Params

Array = Any
_NEVER = -1.0e9
"""Added to the score of what must not be chosen, so that among such the better one still comes first."""


@partial(jax.jit, static_argnames=("module", "choice"))
def generate(
    params: Params, input_ids: Array, attention_mask: Array, rng: Any, *, module: Decoder, choice: Choice
) -> Array:
    """Token ids [B, N]: the outputs alone, padded after their end.

    A row whose mask is empty gets padding only.

    Args:
        params: of the decoder.
        input_ids: prompts [B, P], padded on either side.
        attention_mask: [B, P], 1 for real tokens.
        rng: key for sampling; None is enough for anything else.
        module: the decoder.
        choice: how tokens are chosen.
    """
    ids, mask = _moved_right(jnp.asarray(input_ids, jnp.int32), jnp.asarray(attention_mask, bool))
    reading = module.clone(train=False, remat="none", unroll=1)  # unrolled, XLA copies the cache at every token
    text = _Text(reading, choice, _in_compute_type(params, module.dtype), ids, mask)
    return beam_search(text) if choice.beams > 1 else one_by_one(text, rng)


@dataclass(frozen=True)
class _Text:
    """Prompts that are being continued.

    Attributes:
        module: the decoder.
        choice: how tokens are chosen.
        params: of the decoder.
        ids: prompts [R, P], with their padding on the left.
        mask: [R, P], bool.
    """

    module: Decoder
    choice: Choice
    params: Params
    ids: Array
    mask: Array

    def begin(self) -> tuple[Array, Cache]:
        """Reads the prompts.

        Returns:
            Logits of the first token [R, V], and a cache with room for all outputs but their last token.
        """
        positions = jnp.maximum(jnp.cumsum(self.mask, axis=1, dtype=jnp.int32) - 1, 0)
        length = self.ids.shape[1] + self.choice.new - 1
        hidden, cache = self._apply("prefill", self.ids, self.mask, length, positions=positions)
        return self._logits(hidden), cache

    def go_on(self, tokens: Array, cache: Cache, step: Array) -> tuple[Array, Cache]:
        """Reads `tokens` [R], number `step` of the outputs, to the logits of the next [R, V]."""
        positions = self.mask.sum(axis=1, dtype=jnp.int32) + step
        mask = jnp.pad(self.mask, ((0, 0), (0, self.choice.new - 1)), constant_values=True)
        hidden, cache = self._apply("decode", tokens[:, None], cache, mask, positions=positions[:, None])
        return self._logits(hidden), cache

    def changed(self, scores: Array, outputs: Array, step: Array) -> Array:
        """Scores [R, V] of token number `step` behind the `outputs` [R, N] so far; see `changed_scores`."""
        history = jnp.concatenate([self.ids, outputs], axis=1)
        real = jnp.broadcast_to(jnp.arange(self.choice.new) < step, outputs.shape)
        real = jnp.concatenate([self.mask, real], axis=1)
        return changed_scores(scores, self.choice, history, real, step, self.ids.shape[1])

    def in_beams(self) -> _Text:
        """Each row M times, one after the other."""
        ids, mask = (_repeated(array, self.choice.beams, axis=0) for array in (self.ids, self.mask))
        return _Text(self.module, self.choice, self.params, ids, mask)

    def _logits(self, hidden: Array) -> Array:
        logits: Array = self._apply("logits", hidden[:, -1])
        return logits.astype(jnp.float32)

    def _apply(self, method: str, *inputs: Any, **named: Any) -> Any:
        return self.module.apply({"params": self.params}, *inputs, **named, method=method)


def one_by_one(text: _Text, rng: Any) -> Array:
    """Token ids [B, N]: the likeliest token each time, or one that is drawn with the key `rng`."""
    choice = text.choice

    def choose(logits: Array, step: Array, outputs: Array, ended: Array) -> tuple[Array, Array, Array]:
        scores = text.changed(logits, outputs, step)
        if choice.sample:
            tokens = jax.random.categorical(jax.random.fold_in(rng, step), filtered_scores(scores, choice))
        else:
            tokens = jnp.argmax(scores, axis=-1)
        tokens = jnp.where(ended, choice.pad, tokens).astype(jnp.int32)
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, tokens[:, None], step, axis=1)
        return tokens, outputs, ended | _ends(tokens, choice)

    def unfinished(state: tuple[Any, ...]) -> Array:
        step, _, _, ended, _ = state
        return (step < choice.new) & ~ended.all()

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, tokens, outputs, ended, cache = state
        logits, cache = text.go_on(tokens, cache, step - 1)
        return step + 1, *choose(logits, step, outputs, ended), cache

    logits, cache = text.begin()
    outputs = jnp.full((text.ids.shape[0], choice.new), choice.pad, jnp.int32)
    first = choose(logits, jnp.int32(0), outputs, ~text.mask.any(axis=1))
    return jax.lax.while_loop(unfinished, advance, (jnp.int32(1), *first, cache))[2]


class _Beams(NamedTuple):
    """The state of a beam search.

    Attributes:
        outputs: of the beams that go on [B, M, N].
        scores: their log-probabilities [B, M], best first.
        ended: the best outputs that have ended [B, M, N].
        ended_scores: theirs, divided by the power of their lengths [B, M], best first.
        filled: which of `ended` there are [B, M].
        hopeful: whether a row's beams may still become better than its ended ones [B].
        stuck: whether no beam can go on.
    """

    outputs: Array
    scores: Array
    ended: Array
    ended_scores: Array
    filled: Array
    hopeful: Array
    stuck: Array


def beam_search(text: _Text) -> Array:
    """Token ids [B, N] of the likeliest outputs found by M beams a row, as PyTorch's transformers search."""
    choice = text.choice
    batch, beams = text.ids.shape[0], choice.beams
    logits, cache = text.begin()
    hopeful = text.mask.any(axis=1)
    text = text.in_beams()
    cache = Cache(_repeated(cache.keys, beams, axis=1), _repeated(cache.values, beams, axis=1), cache.length)

    def select(state: _Beams, logits: Array, step: Array) -> tuple[_Beams, Array, Array]:
        scores = jax.nn.log_softmax(logits, axis=-1)
        scores = text.changed(scores, state.outputs.reshape(batch * beams, -1), step)
        return _selected(state, scores.reshape(batch, beams, -1), step, choice)

    def unfinished(carry: tuple[Any, ...]) -> Array:
        step, state, *_ = carry
        enough = state.filled.all() if choice.early_stopping is True else False
        return (step < choice.new) & state.hopeful.any() & ~state.stuck & jnp.logical_not(enough)

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, state, tokens, parents, cache = carry
        cache = Cache(_of_parents(cache.keys, parents), _of_parents(cache.values, parents), cache.length)
        logits, cache = text.go_on(tokens.reshape(-1), cache, step - 1)
        return step + 1, *select(state, logits, step), cache

    outputs = jnp.full((batch, beams, choice.new), choice.pad, jnp.int32)
    one = jnp.where(jnp.arange(beams) == 0, 0.0, _NEVER)  # the others would find the same
    nothing = jnp.full((batch, beams), _NEVER)
    empty = jnp.zeros((batch, beams), bool)
    start = _Beams(outputs, jnp.broadcast_to(one, (batch, beams)), outputs, nothing, empty, hopeful, jnp.array(False))
    first = select(start, _repeated(logits, beams, axis=0), jnp.int32(0))
    return jax.lax.while_loop(unfinished, advance, (jnp.int32(1), *first, cache))[1].ended[:, 0]


def _selected(state: _Beams, scores: Array, step: Array, choice: Choice) -> tuple[_Beams, Array, Array]:
    """The state after token number `step`, the beams' tokens [B, M] and the beams that they continue [B, M].

    Enough candidates are kept for M of them to go on when all others end.

    Args:
        state: before.
        scores: log-probabilities of every token behind every beam [B, M, V].
        step: index of the token.
        choice: how tokens are chosen.
    """
    batch, beams, vocabulary = scores.shape
    count = max(2, 1 + len(choice.ends)) * beams
    scores, places = jax.lax.top_k((scores + state.scores[..., None]).reshape(batch, -1), count)
    parents, tokens = places // vocabulary, (places % vocabulary).astype(jnp.int32)
    outputs = jnp.take_along_axis(state.outputs, parents[..., None], axis=1)
    outputs = jax.lax.dynamic_update_slice_in_dim(outputs, tokens[..., None], step, axis=2)
    ends = _ends(tokens, choice) | (step == choice.new - 1)

    going, best = jax.lax.top_k(jnp.where(ends, scores + _NEVER, scores), beams)
    ended, ended_scores, filled = _ended(state, outputs, scores, ends, step, choice)
    never = choice.early_stopping == "never" and choice.length_penalty > 0
    longest = jnp.asarray(choice.new if never else step + 1, jnp.float32)
    worst = jnp.where(filled, ended_scores.min(axis=1, keepdims=True), _NEVER)
    hopeful = (going[:, :1] / longest**choice.length_penalty > worst).any(axis=1)
    after = _Beams(
        jnp.take_along_axis(outputs, best[..., None], axis=1),
        going,
        ended,
        ended_scores,
        filled,
        state.hopeful & hopeful,
        ends.all(),
    )
    return after, jnp.take_along_axis(tokens, best, axis=1), jnp.take_along_axis(parents, best, axis=1)


def _ended(
    state: _Beams, outputs: Array, scores: Array, ends: Array, step: Array, choice: Choice
) -> tuple[Array, Array, Array]:
    """`ended`, `ended_scores` and `filled` after candidates that ended took their places.

    Args:
        state: before.
        outputs: of the candidates [B, C, N], best first; only the first M may end.
        scores: their log-probabilities [B, C].
        ends: which of them end [B, C].
        step: index of their last token.
        choice: how tokens are chosen.
    """
    beams = choice.beams
    ends = ends & (jnp.arange(ends.shape[1]) < beams)
    closed = ~state.hopeful[:, None]
    if choice.early_stopping is True:
        closed = closed | state.filled.all(axis=1, keepdims=True)
    scores = scores / (step + 1).astype(jnp.float32) ** choice.length_penalty
    scores = scores + jnp.where(closed, _NEVER, 0.0) + jnp.where(ends, 0.0, _NEVER)
    ended_scores, best = jax.lax.top_k(jnp.concatenate([state.ended_scores, scores], axis=1), beams)
    ended = jnp.concatenate([state.ended, outputs], axis=1)
    filled = jnp.concatenate([state.filled, ends], axis=1)
    return (
        jnp.take_along_axis(ended, best[..., None], axis=1),
        ended_scores,
        jnp.take_along_axis(filled, best, axis=1),
    )


def _ends(tokens: Array, choice: Choice) -> Array:
    return jnp.isin(tokens, jnp.array(choice.ends))


def _repeated(array: Array, times: int, *, axis: int) -> Array:
    """Each element along an axis so many times in a row."""
    shape = array.shape
    wide = jnp.broadcast_to(jnp.expand_dims(array, axis + 1), (*shape[: axis + 1], times, *shape[axis + 1 :]))
    return wide.reshape(*shape[:axis], -1, *shape[axis + 1 :])


def _of_parents(array: Array, parents: Array) -> Array:
    """What the cache holds of beams' rows [L, B * M, ...], for the beams that they go on from [B, M]."""
    layers, _, *rest = array.shape
    rows = array.reshape(layers, *parents.shape, *rest)
    return jax.vmap(lambda row, parent: row[:, parent], in_axes=(1, 0), out_axes=1)(rows, parents).reshape(array.shape)


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
