"""The pure train and eval step.

With micro-batches i = 1..M of a global batch, each giving (s_i, w_i) = (loss sum, weight):

    loss = Σ s_i / Σ w_i        gradient = Σ ∇s_i / Σ w_i

in float32, with one division at the end: however the batch is cut, over micro-batches or devices, the result is the
same.

Shape letters: M micro-batches per step, B examples of one micro-batch over all devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from redco_cli.plugin.contract import Batch, Loss, Params
from redco_cli.plugin.state import Stats, Variables
from redco_cli.privacy.gradient import PrivateGradient
from redco_cli.sharding.gather.replicas import add_up, has_replicas, parts_like, places_of_parts
from redco_cli.sharding.gather.sharded import Apart
from redco_cli.training.optimizer import Schedule
from redco_cli.training.precision import loss_scale
from redco_cli.training.state import TrainState, merge

LossFunction = Callable[[Variables, Batch, Any, bool], Loss]
"""(variables, batch of leading dim B, key, train) to a `Loss` in float32, metrics and stats as pairs (sum, weight)."""
StateUpdate = Callable[[Variables, Stats], Any]
"""Variables after an update, its state apart, and the stats of the step, to the next state of the plugin."""
Metrics = dict[str, jax.Array]


def make_train_step(
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    seed: int,
    places: Any,
    update_state: StateUpdate = lambda variables, _: variables.state,
    private: PrivateGradient | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """One optimizer step.

    Args:
        loss: of a micro-batch. Of several on a mesh with replicas, it is asked with an `Apart` for each parameter.
        optimizer: clipping included; one that takes extra arguments is given `places`.
        schedule: updates done to learning rate.
        seed: of dropout.
        places: like the trainable parameters, the sharding of each and of its gradient.
        update_state: of the plugin; default: its state stays as it is.
        private: computes the gradient instead. Whether it is finite alone decides about the update then: what is not
            private, such as the loss, must not.

    Returns:
        A function of a state and a batch whose arrays have leading dims [M, B], to the next state and float32 scalars:
        `loss`, `weight`, `grad_norm` (before clipping), `learning_rate`, `skipped`, `streak`, the plugin's metrics, and
        where the state has one the `loss_scale` of this step.
        Where loss or gradient is not finite, parameters and all state stay as they are and the step is counted.
    """
    update = optax.with_extra_args_support(optimizer).update

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        if private is None:
            total, gradient_sum = _accumulate(loss, state, batch, key, places)
            gradient = jax.tree.map(lambda leaf: leaf / total.weight, gradient_sum)
        else:
            total, gradient = private(lambda some: _variables(some, state), state.trainable, batch, key)
        mean, norm = total.sum / total.weight, optax.tree.norm(gradient)
        finite = jnp.isfinite(norm) if private is not None else jnp.isfinite(mean) & jnp.isfinite(norm)
        updates, opt_state = update(gradient, state.opt_state, state.trainable, places=places)
        trainable = optax.apply_updates(state.trainable, updates)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        updated = Variables(merge(trainable, state.frozen), state.plugin_state, state.step + 1)
        following = TrainState(
            step=state.step + 1,
            trainable=keep(trainable, state.trainable),
            frozen=state.frozen,
            opt_state=keep(opt_state, state.opt_state),
            plugin_state=keep(update_state(updated, total.stats), state.plugin_state),
            skipped=jnp.where(finite, state.skipped, state.skipped + 1),
            streak=jnp.where(finite, 0, state.streak + 1),
            loss_scale=loss_scale.following(state.loss_scale, finite, total.weight),
        )
        metrics = {name: part / weight for name, (part, weight) in total.metrics.items()} | {
            "loss": mean,
            "weight": total.weight,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(state.step - state.skipped), jnp.float32),
            "skipped": following.skipped,
            "streak": following.streak,
        }
        if state.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.scale
        return following, metrics

    return train_step


def make_eval_step(loss: LossFunction) -> Callable[[Variables, Batch], Loss]:
    """The `Loss` of one batch [B, ...] without dropout: sums and weights, to be added over batches."""

    def eval_step(variables: Variables, batch: Batch) -> Loss:
        return loss(variables, batch, jax.random.key(0), False)

    return eval_step


def _variables(trainable: Params, state: TrainState) -> Variables:
    """What a loss is computed from, with other trainable parameters."""
    return Variables(merge(trainable, state.frozen), state.plugin_state, state.step)


def _accumulate(loss: LossFunction, state: TrainState, batch: Batch, key: Any, places: Any) -> tuple[Loss, Params]:
    """Adds losses and gradients of the sum over the micro-batches, in float32.

    Of several micro-batches each replica over `data` adds up its own part of the gradient, and these once at the end.
    """
    count = jax.tree.leaves(batch)[0].shape[0]
    apart = count > 1 and has_replicas(places)
    there = places_of_parts(state.trainable, places) if apart else places

    def constrained(gradient: Params) -> Params:
        result: Params = jax.lax.with_sharding_constraint(gradient, there)
        return result

    def loss_sum(given: Params, micro_batch: Batch, micro_key: Any) -> tuple[jax.Array, Loss]:
        trainable = jax.tree.map(Apart, state.trainable, given) if apart else given
        result = loss(_variables(trainable, state), micro_batch, micro_key, True)
        return loss_scale.scaled(result.sum, result.weight, state.loss_scale), result

    def one(micro_batch: Batch, index: Any) -> tuple[Loss, Params]:
        given = parts_like(state.trainable, places) if apart else state.trainable
        gradient, result = jax.grad(loss_sum, has_aux=True)(given, micro_batch, jax.random.fold_in(key, index))
        wide = jax.tree.map(_widened, gradient)
        return result, constrained(loss_scale.unscaled(wide, result.weight, state.loss_scale))

    if count == 1:  # a loop around one pass would only hide it from the compiler
        return one(jax.tree.map(lambda leaf: leaf[0], batch), 0)

    def add(carry: tuple[Loss, Params], xs: tuple[Batch, Any]) -> tuple[tuple[Loss, Params], None]:
        return jax.tree.map(jnp.add, carry, one(*xs)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda leaf: leaf[0], batch), 0)
    loss_zeros, zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, gradient = jax.lax.scan(add, (loss_zeros, constrained(zeros)), (batch, jnp.arange(count)))[0]
    return total, add_up(gradient, places) if apart else gradient


def _widened(leaf: jax.Array) -> jax.Array:
    """A gradient in float32, whose opposite is downhill: of a complex parameter JAX gives the conjugate of that."""
    return leaf.conj().astype(jnp.complex64) if jnp.iscomplexobj(leaf) else leaf.astype(jnp.float32)
