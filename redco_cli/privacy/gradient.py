"""The private gradient of a step: of each example alone, clipped, added up, with noise.

With s_i, w_i = sum and weight of the loss of example i alone, clip c, noise multiplier sigma and expected batch size B:

    gradient = (sum over i of clip(grad (s_i / w_i), c) + N(0, (sigma c)^2)) / B

once for each optimizer step, however many micro-batches there are: those of padding alone are not computed. An example
without weight has no gradient, and one whose gradient is not finite counts as zero. Clipping and noise are those of
jax-privacy. The noise follows from the seed, the step, and what the run is trained with (`Budget.salt`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.data.batch import PADDING
from redco_cli.plugin.contract import Batch, Loss, Params
from redco_cli.plugin.state import Variables
from redco_cli.privacy.accounting import Budget
from redco_cli.privacy.convolutions import by_patches
from redco_cli.privacy.libraries import library

PrivateGradient = Callable[[Callable[[Params], Variables], Params, Batch, Any], tuple[Loss, Params]]
"""From what makes variables of trainable parameters, these, a batch with leading dims [M, B] and the key of the step:
the loss of the batch, which is not private, and the gradient, which is."""
_STREAM = 0x6E6F6973
"""Keeps the noise apart from what a loss draws from the same key."""


def private_gradient(
    loss: Callable[[Variables, Batch, Any, bool], Loss],
    budget: Budget | None,
    places: Any,
    accepted: Sequence[Mapping[str, Any]] = (),
) -> PrivateGradient | None:
    """What computes the gradient of a step; None without a budget.

    Args:
        loss: of a batch.
        budget: clip, noise and batch size.
        places: like the trainable parameters, the sharding of each and of its gradient.
        accepted: other code or data that the run went on with: what is computed with these has noise of its own.
    """
    if budget is None:
        return None
    add_noise = _noise(budget, accepted)

    def gradient(
        variables_of: Callable[[Params], Variables], trainable: Params, batch: Batch, key: Any
    ) -> tuple[Loss, Params]:
        def example_loss(trainable: Params, example: Batch, row: jax.Array) -> tuple[jax.Array, Loss]:
            found = loss(variables_of(trainable), example, jax.random.fold_in(key, row[0]), True)
            counts = found.weight != 0
            return jnp.where(counts, found.sum / jnp.where(counts, found.weight, 1.0), 0.0), found

        several = any(place.num_devices > 1 for place in jax.tree.leaves(places))
        alone = by_patches(example_loss) if several else example_loss
        total, summed = _accumulated(alone, trainable, batch, budget.clip, places)
        noisy = jax.lax.with_sharding_constraint(add_noise(summed, key), places)
        return total, jax.tree.map(lambda leaf: leaf / budget.batch_size, noisy)

    return gradient


def _accumulated(
    example_loss: Callable[..., Any], trainable: Params, batch: Batch, clip: float, places: Any
) -> tuple[Loss, Params]:
    """Losses and clipped gradients of all examples, added up over micro-batches in float32."""
    clipped_grad = library("jax_privacy.clipping", "privacy").clipped_grad
    # A batch of one example is what a plugin's loss takes: `keep_batch_dim` leaves each that dim.
    clipped = clipped_grad(example_loss, has_aux=True, batch_argnums=(1, 2), l2_clip_norm=clip, dtype=jnp.float32)
    rest = {name: leaf for name, leaf in batch.items() if name != PADDING}
    count, size = batch[PADDING].shape

    def one(micro_batch: Batch, padding: jax.Array, index: Any) -> tuple[Loss, Params]:
        rows = index * size + jnp.arange(size)
        gradient, found = clipped(trainable, micro_batch, rows, is_padding_example=padding)
        losses = jax.tree.map(lambda leaf: jnp.where(padding, 0.0, leaf).sum(axis=0), found.aux)
        return losses, jax.lax.with_sharding_constraint(gradient, places)

    first: Batch = {name: leaf[0] for name, leaf in rest.items()}
    if count == 1:
        return one(first, batch[PADDING][0], 0)
    shapes = jax.eval_shape(one, first, batch[PADDING][0], 0)
    zeros: tuple[Loss, Params] = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(carry: tuple[Loss, Params], xs: tuple[Batch, Any, Any]) -> tuple[tuple[Loss, Params], None]:
        def added(carry: tuple[Loss, Params]) -> tuple[Loss, Params]:
            more: tuple[Loss, Params] = jax.tree.map(jnp.add, carry, one(*xs))
            return more

        return jax.lax.cond(xs[1].all(), lambda carry: carry, added, carry), None

    start = zeros[0], jax.lax.with_sharding_constraint(zeros[1], places)
    total: tuple[Loss, Params] = jax.lax.scan(add, start, (rest, batch[PADDING], jnp.arange(count)))[0]
    return total


def _noise(budget: Budget, accepted: Sequence[Mapping[str, Any]]) -> Callable[[Params, Any], Params]:
    """Adds noise to a sum of clipped gradients, given the key of its step."""
    told = json.dumps([budget.salt, [[one.get(name) for name in ("step", "what", "mark")] for one in accepted]])
    salt = jnp.uint32(int.from_bytes(hashlib.sha256(told.encode()).digest()[:4]))
    privatizer = library("jax_privacy.noise_addition", "privacy").gaussian_privatizer

    def add_noise(summed: Params, key: Any) -> Params:
        own = jax.random.fold_in(jax.random.fold_in(key, _STREAM), salt)
        noise = privatizer(stddev=budget.noise_multiplier * budget.clip, prng_key=own)
        noisy: Params = noise.update(summed, noise.init(summed))[0]
        return noisy

    return add_noise
