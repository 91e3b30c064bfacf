"""What their experts make of tokens, without a dropped one.

Shapes: as in `redco_cli.models.decoder.experts`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from redco_cli.sharding.program.marks import summed_as, usually
from redco_cli.sharding.tensor_split import TensorSplit

Array = Any
Gating = Callable[[Array, Array], Array]
LATER: Literal["later"] = "later"
Summing = TensorSplit | Literal["later"] | None
"""How parts of sums over F are added up: by the split of F, where that is known; `LATER` in what is read to find one;
None where it is not for the experts to do."""
BRANCH = "branch of experts"
"""Name of the index of the branch that a layer takes, which is kept for the backward pass."""
_GROUPS = 4
"""At most so many groups of experts compute by themselves."""
_LEAST = 2**26
"""Bytes of a projection in one group, as it is used on one device. Compilers for TPUs make sums of gathers of little,
twice the bytes: on v6e:8x8 of 16 MiB, and not of 64."""
_ROOM = (2.0, 6.0)
"""Even shares that an expert has room for, in the usual case and before it computes all tokens."""


@dataclass
class Met:
    """Whether there are experts in what was traced."""

    met: bool = False


_EVENLY: ContextVar[Met | None] = ContextVar("evenly", default=None)


@contextlib.contextmanager
def evenly_chosen() -> Iterator[Met]:
    """What is traced in this context has experts with even shares, and room for no more: to count what they need."""
    met = Met()
    token = _EVENLY.set(met)
    try:
        yield met
    finally:
        _EVENLY.reset(token)


class Kernels(NamedTuple):
    """The experts' projections: `gate` and `up` [X, E, F], `down` [X, F, E]; and their biases [X, F] and [X, E]."""

    gate: Array
    up: Array
    down: Array
    gate_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None


def mix(x: Array, kernels: Kernels, shares: Array, chosen: Array, gating: Gating, summing: Summing = None) -> Array:
    """The sum of what its experts make of each token, weighted.

    Args:
        x: tokens [B, S, E].
        kernels: of the experts.
        shares: of each token's experts [B, S, N], in the type of `x`.
        chosen: their indices [B, S, N].
        gating: what becomes of an expert's `gate` and `up`.
        summing: how parts of sums over F are added up.

    Returns:
        [B, S, E]. The backward pass computes what is inside the experts again.
    """
    count, length = kernels.gate.shape[0], x.shape[1]
    even = length * chosen.shape[-1] / count
    evenly = _EVENLY.get()
    if evenly is not None:
        evenly.met = True
    rooms = [room for share in (_ROOM if evenly is None else (1.0,)) if (room := math.ceil(share * even)) < length]
    took = jnp.zeros((*x.shape[:2], count), jnp.int32)
    took = jnp.put_along_axis(took, chosen, 1, axis=-1, inplace=False)
    turns = jnp.cumsum(took, axis=1)  # how many tokens of the row an expert has got
    place = jnp.take_along_axis(turns, chosen, axis=-1) - 1
    within = partial(_with_room, gating=gating, summing=summing)
    steps = [partial(within, first=a, room=b - a) for a, b in itertools.pairwise([0, *rooms])]
    rest = partial(_all_by_all, gating=gating, first=min(rooms, default=0))
    if not rooms:
        return jax.checkpoint(rest)(x, kernels, shares, chosen, place)
    usual = jax.checkpoint(steps[0])(x, kernels, shares, chosen, place)
    # No weight or gradient is on its way while devices agree upon a branch and take it: what is usual comes before.
    usual, most = jax.lax.optimization_barrier((usual, turns[:, -1]))
    usual, x = _turned(usual, x)
    way = checkpoint_name(sum((most.max() > room).astype(jnp.int32) for room in rooms), BRANCH)

    @jax.checkpoint
    def left(way: Array, *given: Any) -> Array:
        return jax.lax.switch(usually(way, 0), [_nothing, *map(jax.checkpoint, (*steps[1:], rest))], *given)

    return usual + left(way, x, kernels, shares, chosen, place)


@jax.custom_vjp
def _turned(first: Array, x: Array) -> tuple[Array, Array]:
    """The same arrays. In the backward pass, what made `first` comes after all that has a gradient of `x`."""
    return first, x


_turned.defvjp(lambda *arrays: (arrays, None), lambda _, gradients: jax.lax.optimization_barrier(gradients))


def _nothing(x: Array, *_: Any) -> Array:
    return jnp.zeros_like(x)


def _with_room(
    x: Array,
    kernels: Kernels,
    shares: Array,
    chosen: Array,
    place: Array,
    *,
    gating: Gating,
    summing: Summing,
    first: int,
    room: int,
) -> Array:
    """Every expert computes `room` tokens of a row, from the one on that is its `first`; see `place` [B, S, N]."""
    batch, length, width = x.shape
    count = kernels.gate.shape[0]
    is_mine = (place >= first) & (place < first + room)
    slots = jnp.where(is_mine, chosen * room + place - first, count * room).reshape(batch, -1)  # [B, S * N]
    tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], chosen.shape[1:]).reshape(1, -1)
    source = jnp.zeros((batch, count * room), jnp.int32)
    source = jnp.put_along_axis(source, slots, tokens, axis=1, inplace=False, mode="drop").reshape(batch, count, room)
    weights = jnp.zeros((batch, count * room), shares.dtype)
    weights = jnp.put_along_axis(weights, slots, shares.reshape(batch, -1), axis=1, inplace=False, mode="drop")
    weights = weights.reshape(batch, count, room, 1)

    def picked(made: Array) -> Array:
        made = made.reshape(batch, count * room, width)
        found = jnp.take_along_axis(made, slots[..., None], axis=1, mode="clip").reshape(*chosen.shape, width)
        return jnp.einsum("bsne,bsn->bse", found, is_mine.astype(x.dtype))

    def of_group(of: slice, x: Array, weights: Array, kernels: Kernels) -> Array:
        own = jax.tree.map(lambda one: one[of], kernels)
        computed = partial(_computed, gating=gating, summing=summing)
        if not isinstance(summing, TensorSplit):
            return computed(x, source[:, of], weights[:, of], own)
        each = jax.vmap(computed, (1, None, 1, 0), 1)
        return each(x, source[:, of], weights[:, :, of], _cut(own, summing))

    groups = _groups(kernels.gate, summing.ways if isinstance(summing, TensorSplit) else 1)
    made = [jax.checkpoint(partial(of_group, of)) for of in groups]
    if not isinstance(summing, TensorSplit):
        return picked(jnp.concatenate([one(x, weights, kernels) for one in made], axis=1))
    x_each, weights_each = summing.repeated(x, 1), summing.repeated(weights, 1)
    parts = jnp.concatenate([one(x_each, weights_each, kernels) for one in made], axis=2)
    return summing.summed(jax.vmap(picked, 1, 1)(parts), 1)


def _computed(x: Array, source: Array, weights: Array, kernels: Kernels, gating: Gating, summing: Summing) -> Array:
    """What experts make of the tokens `source` [B, X, C], each weighted [B, X, C, 1]: [B, X, C, E]."""

    def project(equation: str, rows: Array, kernel: Array, bias: Array | None) -> Array:
        made = jnp.einsum(equation, rows, kernel)
        return made if bias is None else made + bias[:, None]

    rows = jnp.take_along_axis(x, source.reshape(len(x), -1, 1), axis=1).reshape(*source.shape, x.shape[-1])
    rows = summed_as(rows, x) if summing == LATER else rows
    gate = project("bxce,xef->bxcf", rows, kernels.gate, kernels.gate_bias)
    up = project("bxce,xef->bxcf", rows, kernels.up, kernels.up_bias)
    made = jnp.einsum("bxcf,xfe->bxce", gating(gate, up) * weights, kernels.down)
    made = summed_as(made, x) if summing == LATER else made
    return made if kernels.down_bias is None else made + kernels.down_bias[:, None] * weights


def _groups(kernel: Array, ways: int) -> list[slice]:
    """Experts of a projection [X, E, F], split over so many devices, in as many equal groups as there can be."""
    count = kernel.shape[0]
    most = max(1, min(_GROUPS, kernel.size * kernel.dtype.itemsize // (ways * _LEAST)))
    size = next(size for size in range(math.ceil(count / most), count + 1) if count % size == 0)
    return [slice(first, first + size) for first in range(0, count, size)]


def _cut(kernels: Kernels, split: TensorSplit) -> Kernels:
    """What each device has of them [T, ...]; a bias of what is summed over devices is the first one's."""
    gate, up, down, gate_bias, up_bias, down_bias = kernels
    if gate_bias is not None and up_bias is not None and down_bias is not None:
        gate_bias, up_bias = split.blocks(gate_bias, 1), split.blocks(up_bias, 1)
        is_first = jnp.arange(split.ways)[:, None, None] == 0
        down_bias = split.on_devices(jnp.where(is_first, down_bias, 0))
    return Kernels(split.blocks(gate, 2), split.blocks(up, 2), split.blocks(down, 1), gate_bias, up_bias, down_bias)


def _all_by_all(
    x: Array, kernels: Kernels, shares: Array, chosen: Array, place: Array, *, gating: Gating, first: int
) -> Array:
    """Every expert computes every token, one expert after the other; those count that are its `first` or after."""
    shares = jnp.where(place >= first, shares, 0)
    batch, length, width = x.shape
    count = kernels.gate.shape[0]
    tokens = x.reshape(-1, width)
    weights = jnp.einsum("bsn,bsnx->xbs", shares, jax.nn.one_hot(chosen, count, dtype=x.dtype)).reshape(count, -1, 1)

    @jax.checkpoint
    def add(total: Array, expert: tuple[Kernels, Array]) -> tuple[Array, None]:
        kernel, weight = expert

        def project(rows: Array, one: Array, bias: Array | None) -> Array:
            return rows @ one if bias is None else rows @ one + bias

        gate, up = project(tokens, kernel.gate, kernel.gate_bias), project(tokens, kernel.up, kernel.up_bias)
        made = (gating(gate, up) * weight) @ kernel.down
        return total + (made if kernel.down_bias is None else made + kernel.down_bias * weight), None

    total, _ = jax.lax.scan(add, jnp.zeros_like(tokens), (kernels, weights))
    return total.reshape(batch, length, width)
