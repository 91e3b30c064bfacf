"""The train state: what a step reads and returns, what a checkpoint holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.errors import RecipeError
from redco_cli.plugin.contract import Params
from redco_cli.plugin.state import Variables
from redco_cli.recipe.explain import matching_paths
from redco_cli.training.precision.loss_scale import LossScale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that changes while training. The random keys are none of it: they follow from (seed, step).

    Attributes:
        step: int32 scalar; optimizer steps done, skipped ones included: the position in the data.
        trainable: the parameters that are updated, nested dicts, float32.
        frozen: the parameters that are not; disjoint paths.
        opt_state: optax state over `trainable`.
        plugin_state: what the plugin's `init_state` and `update_state` made; None without them.
        skipped: int32 scalar; steps without an update, because loss or gradient was not finite.
        streak: int32 scalar; how many of the last steps were skipped in a row.
        loss_scale: where a model computes in float16.
    """

    step: Any
    trainable: Params
    frozen: Params
    opt_state: Any
    plugin_state: Any
    skipped: Any
    streak: Any
    loss_scale: LossScale | None = None

    @property
    def params(self) -> Params:
        """All parameters, as the model takes them."""
        return merge(self.trainable, self.frozen)

    @property
    def variables(self) -> Variables:
        """What a loss or a prediction is computed from, besides its batch."""
        return Variables(self.params, self.plugin_state, self.step)


def new_state(
    params: Params,
    frozen_paths: frozenset[str],
    optimizer: optax.GradientTransformation,
    plugin_state: Callable[[Params], Any] = lambda _: None,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """The state before the first step. Traceable.

    Args:
        params: the first parameters.
        frozen_paths: of those that are not updated.
        optimizer: of the others.
        plugin_state: what a plugin begins with, from all parameters.
        loss_scale: that the run begins with.
    """
    trainable, frozen = partition(params, frozen_paths)
    zero = jnp.zeros((), jnp.int32)
    opt_state = optimizer.init(trainable)
    return TrainState(zero, trainable, frozen, opt_state, plugin_state(params), zero, zero, loss_scale)


def partition(params: Params, frozen_paths: frozenset[str]) -> tuple[Params, Params]:
    """Splits nested dicts in those whose path is not in `frozen_paths`, and those whose path is."""
    flat = flatten_dict(params, sep="/")
    trainable = {path: leaf for path, leaf in flat.items() if path not in frozen_paths}
    frozen = {path: leaf for path, leaf in flat.items() if path in frozen_paths}
    return unflatten_dict(trainable, sep="/"), unflatten_dict(frozen, sep="/")


def merge(trainable: Params, frozen: Params) -> Params:
    """The inverse of `partition`."""
    return unflatten_dict(flatten_dict(trainable, sep="/") | flatten_dict(frozen, sep="/"), sep="/")


def paths(params: Params) -> list[str]:
    """The path of each parameter: `transformer/h/0/attn/kernel`."""
    return list(flatten_dict(params, sep="/"))


def frozen_paths(params: Params, patterns: Sequence[str], always: Sequence[str], where: str) -> frozenset[str]:
    """The paths of the parameters that are never updated.

    Args:
        params: (abstract) parameters.
        patterns: regular expressions of the recipe; each must match a whole path (`.*embed.*`) somewhere.
        always: further expressions, of parameters that the model itself declares constant.
        where: the place of `train.freeze`.

    Raises:
        RecipeError: an expression is malformed or matches nothing, or nothing is left to train.
    """
    known = paths(params)
    chosen = set(matching_paths(patterns, known, where, lambda pattern: _meant(pattern, known)))
    chosen |= {path for path in known if any(re.fullmatch(pattern, path) for pattern in always)}
    if len(chosen) == len(known):
        raise RecipeError(where, "every parameter is frozen", "leave something to train")
    return frozenset(chosen)


def _meant(pattern: str, known: Sequence[str]) -> str:
    """A pattern may lack what paths begin with, such as the name of one of several models."""
    for path in known:
        name, _, rest = path.partition("/")
        if re.fullmatch(pattern, rest):
            return f"did you mean {name}/(?:{pattern})? it must match whole paths"
    return f"paths look like {', '.join(known[:3])}"
