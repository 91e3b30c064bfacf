"""The cross-entropy of tokens and classes, from their logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from redco_cli.plugin.contract import IGNORED_LABEL, Loss


def token_loss(logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None) -> Loss:
    """Cross-entropy summed over everything that has a label, in float32, in nats.

        sum = -Σ w log softmax(logits)[label]    over positions with label != IGNORED_LABEL
        weight = Σ w: without weights, the number of such positions

    Args:
        logits: [..., V]: tokens [B, L, V], or classes [B, V].
        labels: [...], integers below V, or IGNORED_LABEL.
        weights: w of each label [...]; one each by default.

    Returns:
        The loss, with the metric `accuracy`: the share of labels that have the largest logit.
    """
    counts = labels != IGNORED_LABEL
    safe = jnp.where(counts, labels, 0)
    logits = logits.astype(jnp.float32)
    classes = jnp.arange(logits.shape[-1])
    # Taken by index, the gradient would be scattered into zeros [..., V]; without a class it is no number, as there.
    chosen = jnp.where(classes == safe[..., None], logits, 0.0).sum(-1)
    chosen = jnp.where((safe >= 0) & (safe < logits.shape[-1]), chosen, jnp.nan)
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    correct = has_largest(logits, safe) & counts
    if weights is None:
        return Loss(jnp.where(counts, losses, 0.0).sum(), counts.sum(), {"accuracy": correct.sum()})
    weights = jnp.where(counts, weights.astype(jnp.float32), 0.0)
    return Loss((losses * weights).sum(), weights.sum(), {"accuracy": (correct * weights).sum()})


def next_token_loss(logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None) -> Loss:
    """`token_loss` of predicting each token from those before it.

    Args:
        logits: [B, L, V], those at position i predict token i + 1.
        labels: [B, L], aligned with the input: token i, or IGNORED_LABEL where it carries no loss. The first of each
            row is predicted by nothing and never counts.
        weights: [B, L], aligned with the labels; one each by default.
    """
    return token_loss(logits[:, :-1], labels[:, 1:], None if weights is None else weights[:, 1:])


def has_largest(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether each label [...] is the first of the largest logits [..., V], in loops that XLA makes fast on CPU."""
    rank = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    largest = logits == logits.max(-1, keepdims=True)
    first = jnp.where(largest, rank, logits.shape[-1]).min(-1)
    return first == labels
