"""From the recipe's `train` section to a learning-rate schedule and an optax transformation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from redco_cli.errors import PluginError
from redco_cli.job import Job
from redco_cli.plugin.guard import guarded, with_remedy
from redco_cli.privacy.accounting import Budget
from redco_cli.recipe.schema import TrainSection
from redco_cli.sharding.plan import Collective
from redco_cli.sharding.whole_matrices import each_whole, shared_out
from redco_cli.training.timeline import Segment

_ITERATIONS = 5
_QUINTIC = 3.4445, -4.7750, 2.0315
"""Of x, x³ and x⁵ in an iteration of muon: found for the steepest slope at zero."""
_ALONE = (
    "return one that updates from gradients, state and parameters alone: redco gives it neither loss nor a function"
)
Schedule = Callable[[Any], Any]
"""Updates done so far to the learning rate of the next."""
Stacked = Mapping[str, int]
"""Path of a parameter to how many of its first dims number layers or experts: each entry of those is an array of its
own to the optimizer."""
Rates = Mapping[str, float]
"""Path of a parameter to its learning rate over that of the schedule; others have that."""


def make_schedule(train: TrainSection, *, steps: int, warmup: int, decay: int) -> Schedule:
    """The learning rate, as a function of the number of optimizer steps done: t = 0 for the first.

    With peak p, w warm-up steps, T steps, final fraction f and d decay steps of wsd:
        t < w            p * t / w
        constant         p
        linear           p * (1 + (f - 1) * (t - w) / (T - w))
        cosine           p * (f + (1 - f) * (1 + cos(pi * (t - w) / (T - w))) / 2)
        wsd              p until T - d, then linear to p * f
        inverse_sqrt     p * sqrt(max(w, 1) / max(t, w, 1))
    """
    peak, final = train.learning_rate, train.learning_rate * train.final_learning_rate
    rest = max(steps - warmup, 1)
    after: Schedule
    if train.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif train.schedule == "linear":
        after = optax.linear_schedule(peak, final, rest)
    elif train.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=train.final_learning_rate)
    elif train.schedule == "wsd":
        after = optax.linear_schedule(peak, final, max(decay, 1), transition_begin=max(rest - decay, 0))
    else:
        timescale = max(warmup, 1)
        after = lambda count: peak * jnp.sqrt(timescale / jnp.maximum(count + warmup, timescale))  # noqa: E731
    if warmup == 0:
        return after
    warm_up: Schedule = optax.linear_schedule(0.0, peak, warmup)
    joined: Schedule = optax.join_schedules([warm_up, after], [warmup])
    return joined


def join_segments(train: TrainSection, segments: Sequence[Segment]) -> Schedule:
    """The learning rate of a run, whose length may have changed on the way."""
    parts = [make_schedule(train, steps=one.steps - one.offset, warmup=one.warmup, decay=one.decay) for one in segments]
    if len(parts) == 1:
        return parts[0]

    def schedule(count: Any) -> Any:
        rate = parts[0](count)
        for segment, part in zip(segments[1:], parts[1:], strict=True):
            rate = jnp.where(count < segment.begin, rate, part(count - segment.offset))
        return rate

    return schedule


def make_optimizer(
    train: TrainSection,
    schedule: Schedule,
    stacked: Stacked = MappingProxyType({}),
    rates: Rates = MappingProxyType({}),
) -> optax.GradientTransformation:
    """The optimizer of the recipe, decoupled weight decay included, clipping not.

    Each is: direction, plus weight_decay * parameter where the parameter has two dims or more, times the learning rate.
    Dims that stack arrays count as none: the scales of all layers in one array are vectors, their kernels matrices.
    `adafactor` (Shazeer and Stern, 2018) is used without its scaling by the size of the parameter, so that the learning
    rate means what it says; `muon` (Jordan et al., 2024) takes matrices and leaves the rest to adamw.

    Args:
        train: the recipe's section.
        schedule: its learning rate.
        stacked: which parameters hold several arrays.
        rates: which parameters have a learning rate of their own.
    """
    directions = {
        "adamw": lambda: optax.scale_by_adam(train.b1, train.b2, train.eps),
        "lion": lambda: optax.scale_by_lion(train.b1, train.b2),
        "adafactor": lambda: optax.chain(optax.adafactor(None, multiply_by_parameter_scale=False), optax.scale(-1)),
        "sgd": lambda: optax.trace(train.b1),
        "muon": lambda: optax.chain(_muon(train, stacked), optax.scale(-1)),
    }
    return optax.chain(
        directions[train.optimizer](),
        optax.add_decayed_weights(train.weight_decay, partial(decay_mask, stacked=stacked)),
        _scale_by_learning_rates(schedule, rates),
    )


def own_optimizer(job: Job, schedule: Schedule, trainable: Any) -> optax.GradientTransformation:
    """The plugin's optimizer, proved on abstract parameters. It is given gradients, state and parameters alone.

    Args:
        job: whose plugin has an `optimizer_fn`.
        schedule: the learning rate.
        trainable: the parameters that it updates, abstract.

    Raises:
        PluginError: `optimizer_fn` raised, or returned what cannot update these parameters.
    """
    assert job.plugin.optimizer_fn is not None
    place = f"{job.plugin.file}: optimizer_fn"
    with guarded(place, "optimizer_fn", job.plugin.file):
        given = job.plugin.optimizer_fn(job.context("train"), schedule)
    if not isinstance(given, optax.GradientTransformation):
        problem = f"returned {given!r:.60}, which is no optax transformation"
        raise PluginError(place, problem, "return one, such as optax.adam(schedule)")

    def updated(params: Any) -> tuple[Any, Any, Any]:
        state = given.init(params)
        try:
            updates, following = given.update(params, state, params)
        except TypeError as error:
            raise with_remedy(error, _ALONE) if "keyword-only" in str(error) else error from None
        return optax.apply_updates(params, updates), state, following

    with guarded(place, "updating the parameters with what optimizer_fn returned", job.plugin.file):
        _, before, after = jax.eval_shape(updated, trainable)
    described = [jax.tree.map(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", state) for state in (before, after)]
    if described[0] != described[1]:
        problem = f"its update makes another state than its init: {described[1]!r:.200} of {described[0]!r:.200}"
        raise PluginError(place, problem, "return a state of the same structure, shapes and types from both")
    return optax.GradientTransformation(given.init, lambda *args: given.update(*args))


@dataclass(frozen=True)
class UpdateWork:
    """What an update takes beyond elementwise operations, of an optimizer that multiplies matrices.

    Attributes:
        flops: on one device, in float32.
        collectives: what moves.
    """

    flops: int = 0
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Updates:
    """How parameters change in a step.

    Attributes:
        optimizer: the optax transformation, clipping included.
        schedule: updates done to learning rate.
        frozen: paths of the parameters that do not change.
        privacy: what the gradients of a run may spend; None without differential privacy.
        work: of trained parameters, their specs and a mesh, what an update takes; not known of a plugin's.
    """

    optimizer: optax.GradientTransformation
    schedule: Schedule
    frozen: frozenset[str]
    privacy: Budget | None
    work: Callable[[Any, Any, Mapping[str, int]], UpdateWork] = lambda *_: UpdateWork()


def update_work(train: TrainSection, stacked: Stacked, params: Any, specs: Any, mesh: Mapping[str, int]) -> UpdateWork:
    """What an update by the recipe's optimizer takes on a mesh.

    Args:
        train: the recipe's section.
        stacked: which parameters hold several arrays.
        params: those that are trained, abstract.
        specs: like them, where each lives.
        mesh: axis to size.
    """
    if train.optimizer != "muon":
        return UpdateWork()
    leaves, places = jax.tree.leaves(params), jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    chosen = [number for number, rank in enumerate(jax.tree.leaves(ranks(params, stacked))) if rank == 2]
    wide = [jax.ShapeDtypeStruct(leaves[x].shape, jnp.promote_types(leaves[x].dtype, jnp.float32)) for x in chosen]
    own, moved = shared_out(wide, [places[number] for number in chosen], mesh)
    return UpdateWork(sum(count * _orthogonal_flops(*sorted(shape)) for count, shape in own), moved)


def _orthogonal_flops(short: int, long: int) -> int:
    """Of `_orthogonal`: x·xᵀ, its square, and that times x."""
    return _ITERATIONS * (4 * short * short * long + 2 * short**3)


def _muon(train: TrainSection, stacked: Stacked) -> optax.GradientTransformationExtraArgs:
    """Optax's muon, but for its iterations: on a mesh each matrix is whole on one device for these.

    Optax divides what is to be orthogonalised by its norm, which the iterations take no notice of, and multiplies it
    by sqrt(max(1, N / M)) for a matrix [M, N].
    """

    def matrices(params: Any) -> Any:
        """Which dims of each matrix are multiplied; None for what is no matrix."""
        last = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        return jax.tree.map(lambda rank: last if rank == 2 else None, ranks(params, stacked))

    adam = {"adam_b1": train.b1, "adam_b2": train.b2, "muon_weight_dimension_numbers": matrices}
    plain = optax.contrib.muon(1.0, beta=train.b1, ns_steps=0, **adam)

    def update(updates: Any, state: Any, params: Any = None, *, places: Any = None, **_: Any) -> tuple[Any, Any]:
        updates, state = plain.update(updates, state, params)
        leaves, tree = jax.tree.flatten(updates)
        chosen = [number for number, rank in enumerate(jax.tree.leaves(ranks(updates, stacked))) if rank == 2]
        known = [None] * len(leaves) if places is None else jax.tree.leaves(places)
        lives = [known[number] if isinstance(known[number], NamedSharding) else None for number in chosen]
        for number, whole in zip(chosen, each_whole(_orthogonal, [leaves[x] for x in chosen], lives), strict=True):
            leaves[number] = math.sqrt(max(1, whole.shape[-1] / whole.shape[-2])) * whole
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformationExtraArgs(plain.init, update)


def _orthogonal(matrix: Any) -> Any:
    """The orthogonal matrix nearest to one [M, N], coarsely: five Newton-Schulz iterations (Jordan et al., 2024)."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = _QUINTIC[0] * x + (_QUINTIC[1] * square + _QUINTIC[2] * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _scale_by_learning_rates(schedule: Schedule, rates: Rates) -> optax.GradientTransformation:
    """As `optax.scale_by_learning_rate`, with the same state whatever the rates, so that checkpoints keep their form.

    Every direction above is made before the learning rate, so that a parameter's own is a factor of its update.
    """
    plain = optax.scale_by_learning_rate(schedule)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = plain.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(lambda path, leaf: rates.get(_name(path), 1.0) * leaf, updates), state

    return optax.GradientTransformation(plain.init, update) if rates else plain


def decay_mask(params: Any, stacked: Stacked = MappingProxyType({})) -> Any:
    """Whether each parameter is decayed: matrices and larger are; biases, norms and scales are not."""
    return jax.tree.map(lambda rank: rank >= 2, ranks(params, stacked))


def ranks(params: Any, stacked: Stacked) -> Any:
    """How many dims each parameter has, apart from those that stack several."""

    def rank(path: Any, leaf: Any) -> int:
        return int(leaf.ndim) - stacked.get(_name(path), 0)

    return jax.tree_util.tree_map_with_path(rank, params)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def with_schedules_of(old: Any, new: Any) -> Any:
    """A fresh optimizer state whose schedules have come as far as those of the old one."""

    def counts_updates(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(lambda one, other: other if counts_updates(one) else one, new, old, is_leaf=counts_updates)


def with_clipping(optimizer: optax.GradientTransformation, max_norm: float | None) -> optax.GradientTransformation:
    """Scales gradients down to a global norm of `max_norm` before the optimizer sees them; None for never."""
    return optimizer if max_norm is None else optax.chain(optax.clip_by_global_norm(max_norm), optimizer)
