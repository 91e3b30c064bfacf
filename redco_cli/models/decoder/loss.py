"""Cross-entropy of tokens without their logits: a few positions at a time meet the head, forward and backward at once.

For a vocabulary of 128 000 the float32 logits of one batch can be larger than the model. Here a loop over pieces of the
sequence computes each piece's logits, its losses and, when gradients are asked for, what these logits contribute to the
gradients of hidden states and head; then the logits are forgotten. The backward pass only scales what was kept, so that
the head costs three products, as it does when its logits are kept, and not the four of recomputing them.

Shapes: B batch, S sequence, C positions of a piece, E width of the hidden states, V vocabulary, D groups of rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from redco_cli.models.decoder.config import DecoderConfig
from redco_cli.plugin.contract import IGNORED_LABEL
from redco_cli.plugin.scores.losses import has_largest
from redco_cli.sharding.batch_shards import for_each_shard, partial_sums
from redco_cli.sharding.program.marks import gradient_first

Array = Any
_LARGEST_ROW = 2**26
"""Logits of one row that exist at a time: 256 MiB."""
_FEWEST_PIECES = 4


class Head(NamedTuple):
    """What turns hidden states to logits.

    Attributes:
        kernel: [E, V].
        bias: [V]; None for none.
    """

    kernel: Array
    bias: Array | None


class _How(NamedTuple):
    """Static settings: positions per piece, groups of rows, scale and cap of the logits."""

    positions: int
    groups: int
    scale: float
    cap: float | None


class Counted(NamedTuple):
    """Float32 scalars over the tokens with a label.

    Attributes:
        loss: sum of `weight * -log p(label)`; differentiable.
        weight: sum of the weights.
        correct: sum of the weights of tokens whose label has the largest logit.
    """

    loss: Array
    weight: Array
    correct: Array


def head_of(params: Any, config: DecoderConfig) -> Head:
    """The head in the parameters of a decoder; the embedding where it is tied."""
    kernel = params["embedding"].T if config.tied else params["head"]
    return Head(kernel, params["head_bias"] if config.head_bias else None)


def cross_entropy(
    hidden: Array,
    head: Head,
    labels: Array,
    weights: Array | None = None,
    *,
    config: DecoderConfig,
    positions: int | None = None,
    groups: int | None = None,
) -> Counted:
    """The tokens' losses, summed.

    Args:
        hidden: states that the head takes [B, S, E], as `Decoder.hidden` returns them; its type is the compute type.
        head: from `head_of`.
        labels: the token that should follow each position [B, S]; `IGNORED_LABEL` for none.
        weights: of each token [B, S]; one each by default.
        config: how the logits are scaled and capped.
        positions: C; default: a quarter of S, or less where a row's logits would be larger than 256 MiB.
        groups: D, which divides B: the head's gradient is summed within each group in the loop, and over groups once
            at the end, see `for_each_shard`. Default: one for each device that has rows of its own.

    Returns:
        Sums that are differentiable in everything but `labels`.
    """
    counted = labels != IGNORED_LABEL
    weights = jnp.where(counted, 1.0 if weights is None else weights.astype(jnp.float32), 0.0)
    batch, length = labels.shape
    most = max(1, min(-(-length // _FEWEST_PIECES), _LARGEST_ROW // head.kernel.shape[1]))
    how = _How(
        most if positions is None else min(length, positions),
        partial_sums(batch) if groups is None else groups,
        config.logits_scale,
        config.logits_softcap,
    )
    targets = jnp.where(counted, labels, 0)
    own, bias = _as_added_up(head, hidden.dtype, how)
    own, hidden = gradient_first(own, hidden)
    apart = jax.tree.map(lambda leaf: for_each_shard(leaf, how.groups), Head(own, bias))
    used = jax.lax.stop_gradient(head._replace(kernel=head.kernel.astype(hidden.dtype)))  # once, not for every piece
    if hidden.dtype != jnp.float16:
        total, correct = _summed(hidden, apart, used, targets, weights, how)
        return Counted(total, weights.sum(), correct)
    # What is kept for the backward pass is not yet scaled: small weights would make it vanish.
    largest = jax.lax.stop_gradient(jnp.abs(weights).max())
    unit = jnp.where(largest > 0, largest, 1.0)
    total, correct = _summed(hidden, apart, used, targets, weights / unit, how)
    return Counted(total * unit, weights.sum(), correct * unit)


def _as_added_up(head: Head, compute: Any, how: _How) -> Head:
    """The head in the types in which groups add up its gradient: bfloat16, as other weights'; float16 is too narrow."""
    kernel = head.kernel.astype(jnp.bfloat16 if how.groups > 1 and compute == jnp.bfloat16 else jnp.float32)
    return Head(kernel, None if head.bias is None else head.bias.astype(jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _summed(hidden: Array, apart: Head, used: Head, labels: Array, weights: Array, how: _How) -> tuple[Array, Array]:
    """What has a gradient is a head for each group [D, ..]; what is multiplied with, one in the compute type."""

    def add(sums: tuple[Array, Array], piece: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        states, targets, share = piece
        logits, _ = _logits(states, used, how)
        return (sums[0] + (_losses(logits, targets)[0] * share).sum(), sums[1] + _right(logits, targets, share)), None

    zeros = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    return jax.lax.scan(add, zeros, _pieces((hidden, labels, weights), how))[0]


def _forward(
    hidden: Array, apart: Head, used: Head, labels: Array, weights: Array, how: _How
) -> tuple[tuple[Array, Array], tuple[Array, Head, Array]]:
    """The sums, and the gradients of the first: for hidden states, the head of each group, and weights."""
    groups = how.groups
    empty: Head = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), apart)

    def add(sums: tuple[Array, Array, Array, Array], piece: tuple[Array, Array, Array]) -> tuple[Any, Any]:
        states, targets, share = piece
        logits, slope = _logits(states, used, how)
        losses, log_norm = _losses(logits, targets)
        wrong = jnp.exp(logits - log_norm[..., None])
        wrong = wrong - jax.nn.one_hot(targets, logits.shape[-1], dtype=wrong.dtype)
        wrong = wrong * share[..., None] * (how.scale if slope is None else how.scale * slope)
        narrow = wrong.astype(states.dtype)
        to_states = jnp.einsum("bcv,ev->bce", narrow, used.kernel)
        by_group = (groups, -1)
        rows, cause = states.reshape(*by_group, states.shape[-1]), narrow.reshape(*by_group, narrow.shape[-1])
        to_kernel = jnp.einsum("dte,dtv->dev", rows, cause, preferred_element_type=jnp.float32)
        total, correct, to_head, bias = sums
        if bias is not None:  # the bias is added after the product and scaled with it
            bias = bias + wrong.reshape(*by_group, wrong.shape[-1]).sum(1)
        following = total + (losses * share).sum(), correct + _right(logits, targets, share), to_head + to_kernel, bias
        return following, (to_states, losses)

    start = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), *empty)
    (total, correct, *sums), (states, losses) = jax.lax.scan(add, start, _pieces((hidden, labels, weights), how))
    to_head = jax.tree.map(lambda own, leaf: own.astype(leaf.dtype), Head(*sums), apart)
    return (total, correct), (_whole(states, hidden.shape[1]), to_head, _whole(losses, labels.shape[1]))


def _backward(_how: _How, kept: Any, cotangents: tuple[Array, Array]) -> tuple[Any, Any, None, None, Any]:
    states, head, losses = jax.tree.map(lambda grad: (grad * cotangents[0]).astype(grad.dtype), kept)
    return states, head, None, None, losses


_summed.defvjp(_forward, _backward)


def _logits(states: Array, head: Head, how: _How) -> tuple[Array, Array | None]:
    """Logits [B, C, V] in float32, and their derivative by what they were before the cap; None without one."""
    logits = jnp.einsum("bce,ev->bcv", states, head.kernel, preferred_element_type=jnp.float32)
    if head.bias is not None:
        logits = logits + head.bias.astype(jnp.float32)
    logits = logits * how.scale
    if how.cap is None:
        return logits, None
    bent = jnp.tanh(logits / how.cap)
    return bent * how.cap, 1 - jnp.square(bent)


def _losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Each token's loss [B, C], and the logarithm that normalises its probabilities."""
    log_norm = jax.nn.logsumexp(logits, axis=-1)
    return log_norm - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0], log_norm


def _right(logits: Array, targets: Array, share: Array) -> Array:
    """The weights of tokens whose label has the largest logit, summed."""
    return (has_largest(logits, targets) * share).sum()


def _pieces(arrays: tuple[Array, ...], how: _How) -> tuple[Array, ...]:
    """Arrays [B, S, ...] as [pieces, B, C, ...], the last piece filled up with zeros, whose weights count nothing.

    The cut is along the sequence, so that a batch that is split over devices stays where it is.
    """

    def cut(array: Array) -> Array:
        pieces = -(-array.shape[1] // how.positions)
        missing = pieces * how.positions - array.shape[1]
        padded = jnp.pad(array, ((0, 0), (0, missing), *((0, 0),) * (array.ndim - 2)))
        return jnp.moveaxis(padded.reshape(array.shape[0], pieces, how.positions, *array.shape[2:]), 1, 0)

    return tuple(cut(array) for array in arrays)


def _whole(pieces: Array, length: int) -> Array:
    """Undoes `_pieces`: [pieces, B, C, ...] as [B, S, ...]."""
    joined = jnp.moveaxis(pieces, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]
