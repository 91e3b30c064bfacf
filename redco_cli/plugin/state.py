"""State of a plugin, arrays that are no parameters: begun, updated within the step, checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from redco_cli.errors import PluginError
from redco_cli.plugin.contract import Context, Params
from redco_cli.plugin.guard import guarded
from redco_cli.plugin.load import LoadedPlugin

Stats = Mapping[str, tuple[Any, Any]]
"""Name to (sum, weight): an array, or a pytree of arrays, and a scalar, float32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Variables:
    """What a loss or a prediction is computed from, besides its batch.

    Attributes:
        params: the parameters.
        state: what `init_state` and `update_state` of the plugin made; None without them.
        step: int32 scalar; optimizer steps done.
    """

    params: Params
    state: Any = None
    step: Any = field(default_factory=lambda: np.int32(0))

    def told(self, ctx: Context) -> Context:
        """The context of a function that computes with them."""
        return replace(ctx, state=self.state, step=self.step)

    def using(self, name: str | None) -> Variables:
        """The same with the parameters that the state has under a name: what it lacks of them stays.

        Raises:
            ValueError: there are none, or others than parameters.
        """
        if name is None:
            return self
        if not isinstance(self.state, Mapping) or name not in self.state:
            known = ", ".join(map(str, self.state)) if isinstance(self.state, Mapping) else "nothing by name"
            raise ValueError(f"the plugin's state has no {name}, but {known}")
        params = flatten_dict(self.params, sep="/")
        averaged: dict[str, Any] = flatten_dict({name: self.state[name]}, sep="/")
        averaged = {path.partition("/")[2]: leaf for path, leaf in averaged.items()}
        for path, leaf in averaged.items():
            if path not in params or leaf.shape != params[path].shape:
                raise ValueError(f"{name}/{path} in the plugin's state is no parameter")
        return replace(self, params=unflatten_dict(params | averaged, sep="/"))


def init_state(plugin: LoadedPlugin, ctx: Context, params: Params) -> Any:
    """The plugin's state before the first step; None where it keeps none. Traceable.

    Raises:
        PluginError: `init_state` raised, or returned something else than arrays.
    """
    if plugin.init_state is None:
        return None
    where = f"{plugin.file}: init_state"
    with guarded(where, "init_state", plugin.file):
        state = plugin.init_state(ctx, params)
    for path, leaf in jax.tree.leaves_with_path(state):
        if not path:
            problem = f"returned {leaf!r:.40} alone, and checkpoints keep arrays by name"
            raise PluginError(where, problem, 'return a dict of arrays, such as {"count": 0}')
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            problem = f"{_path(path)} is {leaf!r:.40}, which is no array"
            raise PluginError(where, problem, "return a pytree of arrays; keep other things in options")
    # A number typed in Python has no dtype of its own, and would get one from the first update.
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), state)


def update_state(plugin: LoadedPlugin, ctx: Context, variables: Variables, stats: Stats) -> Any:
    """The plugin's state after an update. Traceable.

    Args:
        ctx: for the stage train.
        variables: parameters after the update, the state before it, and the step, this one included.
        stats: their sums and weights over the global batch.

    Raises:
        PluginError: `update_state` raised, or returned other shapes than it was given.
    """
    if plugin.update_state is None:
        return variables.state
    where = f"{plugin.file}: update_state"
    means = {name: _divided(total, weight) for name, (total, weight) in stats.items()}
    known = {"stats": means, "the state": variables.state}
    with guarded(where, "update_state", plugin.file, known=known):
        following = plugin.update_state(replace(ctx, step=variables.step), variables.state, variables.params, means)
    _check_same(variables.state, following, where)
    return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), following, variables.state)


@contextlib.contextmanager
def read_only(state: Any, where: str) -> Iterator[None]:
    """Refuses what assigns to the state of a plugin: it is given to be read, and only an update returns the next one.

    Raises:
        PluginError: naming what was assigned.
    """
    before = dict(jax.tree.leaves_with_path(state))
    yield
    after = dict(jax.tree.leaves_with_path(state))
    changed = [path for path in {**before, **after} if before.get(path) is not after.get(path)]
    if changed:
        problem = f"it assigns to ctx.state ({_path(changed[0])}), which is there to be read: nothing would come of it"
        remedy = (
            "hand update_state what it needs as Loss(..., stats={name: (sum, weight)}), and return the next state there"
        )
        raise PluginError(where, problem, remedy)


def _divided(total: Any, weight: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf / weight, total)


def _check_same(before: Any, after: Any, where: str) -> None:
    remedy = "return what init_state returns, with other values"
    if after is None and before is not None:
        raise PluginError(where, "it returned None", remedy)
    old, new = (dict(jax.tree.leaves_with_path(tree)) for tree in (before, after))
    if odd := [path for path in [*old, *new] if path not in old or path not in new]:
        raise PluginError(where, f"{_path(odd[0])} is {'missing' if odd[0] in old else 'not in its state'}", remedy)
    given, kept = (str(jax.tree.structure(tree)) for tree in (after, before))
    if given != kept:
        raise PluginError(where, f"it returned {given}, not {kept}", remedy)
    for path, leaf in old.items():
        if jnp.shape(new[path]) != jnp.shape(leaf):
            problem = f"{_path(path)} has shape {list(jnp.shape(new[path]))}, not {list(jnp.shape(leaf))}"
            raise PluginError(where, problem, remedy)
        dtype = jnp.result_type(new[path])
        if not jnp.can_cast(dtype, leaf.dtype, "same_kind"):
            raise PluginError(where, f"{_path(path)} is {dtype}, not {leaf.dtype}", remedy)


def stat_sums(plugin: LoadedPlugin, stats: Any, weight: Any) -> dict[str, tuple[Any, Any]]:
    """`Loss.stats` as pairs (sum, weight), float32, without gradient.

    Args:
        plugin: whose loss it is.
        stats: as the plugin gave them.
        weight: of the loss, for those without one of their own.

    Raises:
        PluginError: they are no arrays by name, or there is no `update_state` that would take them.
    """
    where = f"{plugin.file}: loss_fn"
    if not isinstance(stats, Mapping) or not all(isinstance(name, str) for name in stats):
        raise PluginError(where, f"the stats are {stats!r:.60}, no dict by name", "return a dict of name to array")
    if stats and plugin.update_state is None:
        remedy = "define init_state and update_state, or return metrics"
        raise PluginError(where, f"Loss.stats has {next(iter(stats))}, but there is no update_state", remedy)
    return {name: _pair(value, weight, where, f"the stat {name}") for name, value in stats.items()}


def _pair(value: Any, weight: Any, where: str, what: str) -> tuple[Any, Any]:
    total, own = value if isinstance(value, tuple) and len(value) == 2 else (value, weight)
    try:
        total, own = jax.tree.map(lambda leaf: jax.lax.stop_gradient(jnp.asarray(leaf, jnp.float32)), (total, own))
    except (TypeError, ValueError):
        problem = f"{what} is {value!r:.60}"
        raise PluginError(where, problem, "give arrays, or a pair (sum, weight)") from None
    if getattr(own, "shape", None) != ():
        problem = f"{what} has the weight {own!r:.60}"
        raise PluginError(where, problem, "weigh it by one number: how many values were summed")
    return total, own


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "it"
