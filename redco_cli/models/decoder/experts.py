"""An MLP for each token among many: every token reaches all the experts that its router chose, none is dropped.

How many tokens an expert gets is known only when the program runs, and shapes must be known before. So an expert has
room for somewhat more than its even share of each row's tokens. Where one gets more, a branch that is usually not taken
computes those that are left: with more room, and at last every expert all tokens, those that did not choose it counting
nothing. What is usual stands outside of any branch, where compilers move weights and gradients beside it. Rows stay by
themselves, so that a batch that is split over devices stays where it is. `jax.lax.ragged_dot` does the same work with
any distribution on TPU, and elsewhere takes X copies of the tokens.

What an expert makes of a token is weighted before the last projection: then nobody needs the result of that for the
gradient of the shares, and the backward pass does not compute it again.

Where F is split over `tensor`, each device has a part of what every expert makes of a token. A compiler sums the parts
as they come out of the product, of each expert's room: of two among eight experts with room for twice their share four
rows for a token, and as many in the backward pass. Here a device adds up what it has for each token first.

Shapes: B batch, S sequence, E hidden size, X experts, N experts per token, C tokens an expert has room for, F width,
T devices along `tensor`.
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

import flax.linen as nn
import jax
import jax.numpy as jnp

from redco_cli.models.decoder.config import DecoderConfig, ExpertsConfig
from redco_cli.models.decoder.layers import ACTIVATIONS, Dense, Mlp
from redco_cli.sharding.program.marks import summed_as, usually
from redco_cli.sharding.tensor_split import TensorSplit, splits_ending, sums_itself

Array = Any
Gating = Callable[[Array, Array], Array]
LATER: Literal["later"] = "later"
Summing = TensorSplit | Literal["later"] | None
"""How parts of sums over F are added up: by the split of F, where that is known; `LATER` in what is read to find one;
None where it is not for the experts to do."""
_CLAMPED_SLOPE = 1.702
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


class Experts(nn.Module):  # type: ignore[misc]
    """The experts of one layer, with their router.

    Attributes:
        config: the decoder's.
        dtype: compute type.
    """

    config: DecoderConfig
    dtype: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Array) -> Array:
        """`x` [B, S, E] to the same shape."""
        c, experts = self.config, self.config.experts
        assert experts is not None
        x = x.astype(self.dtype)
        normal = nn.initializers.normal(c.initializer_range)
        inward = (experts.count, c.hidden_size, experts.width)
        outward = (experts.count, experts.width, c.hidden_size)
        shapes = {"gate": inward, "up": inward, "down": outward}
        own = {name: self.param(name, normal, shape).astype(self.dtype) for name, shape in shapes.items()}
        for name, (count, _, width) in shapes.items() if experts.biases else ():
            bias = self.param(f"{name}_bias", nn.initializers.zeros, (count, width))
            own[f"{name}_bias"] = bias.astype(self.dtype)
        logits = Dense(experts.count, experts.biases, self.dtype, c.initializer_range, name="router")(x)
        shares, chosen = routing(logits, experts)
        mixed = mix(x, Kernels(**own), shares.astype(self.dtype), chosen, _gating(c, experts), self._summing())
        if experts.shared_width:
            share = jax.nn.sigmoid(Dense(1, False, self.dtype, c.initializer_range, name="shared_router")(x))
            mixed = mixed + share * Mlp(c, experts.shared_width, self.dtype, name="shared")(x)
        return mixed

    def _summing(self) -> Summing:
        """How parts of sums over F are added up where these parameters are."""
        endings = {name: "/".join((*self.path, name)) for name in ("gate", "up", "down")}
        if not all(map(sums_itself, endings.values())):
            return None
        # The layers of a decoder are stacked.
        found = {name: [split.layer() for split in splits_ending(ending)] for name, ending in endings.items()}
        dims = {name: {split.dim for split in splits} for name, splits in found.items()}
        return found["down"][0] if dims == {"gate": {2}, "up": {2}, "down": {1}} else LATER


def _gating(config: DecoderConfig, experts: ExpertsConfig) -> Gating:
    """How the two inner projections of an expert become one."""
    act = ACTIVATIONS[config.activation]
    return (lambda gate, up: act(gate) * up) if experts.clamped_at is None else partial(_clamped, experts.clamped_at)


def _clamped(limit: float, gate: Array, up: Array) -> Array:
    """gpt-oss: a SwiGLU with a slope, its inputs bounded, the second one around one."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(_CLAMPED_SLOPE * gate)


def routing(logits: Array, experts: ExpertsConfig) -> tuple[Array, Array]:
    """Which experts a token goes to, and how much each of them counts.

    Args:
        logits: of the router [B, S, X].
        experts: how many are chosen, and whether their shares sum to one.

    Returns:
        Shares [B, S, N], float32, and the indices of the experts [B, S, N].
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    shares, chosen = jax.lax.top_k(probabilities, experts.per_token)
    if experts.normalise:
        shares = shares / shares.sum(-1, keepdims=True)
    return shares, chosen


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
    way = usually(sum((turns[:, -1].max() > room).astype(jnp.int32) for room in rooms), 0) if rooms else 0

    @jax.checkpoint
    def run(x: Array, kernels: Kernels, shares: Array) -> Array:
        given = x, kernels, shares, chosen, place
        if not rooms:
            return rest(*given)
        return steps[0](*given) + jax.lax.switch(way, [_nothing, *map(jax.checkpoint, (*steps[1:], rest))], *given)

    return run(x, kernels, shares)


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
    source = jnp.put_along_axis(source, slots, tokens, axis=1, inplace=False, mode="drop")
    weights = jnp.zeros((batch, count * room), shares.dtype)
    weights = jnp.put_along_axis(weights, slots, shares.reshape(batch, -1), axis=1, inplace=False, mode="drop")
    weights = weights.reshape(batch, count, room, 1)

    def made(x: Array, weights: Array, kernels: Kernels) -> Array:
        def project(equation: str, rows: Array, kernel: Array, bias: Array | None) -> Array:
            made = jnp.einsum(equation, rows, kernel)
            return made if bias is None else made + bias[:, None]

        rows = jnp.take_along_axis(x, source[..., None], axis=1).reshape(batch, count, room, width)
        rows = summed_as(rows, x) if summing == LATER else rows
        gate, up = (
            project("bxce,xef->bxcf", rows, *one)
            for one in ((kernels.gate, kernels.gate_bias), (kernels.up, kernels.up_bias))
        )
        made = jnp.einsum("bxcf,xfe->bxce", gating(gate, up) * weights, kernels.down)
        made = summed_as(made, x) if summing == LATER else made
        if kernels.down_bias is not None:
            made = made + kernels.down_bias[:, None] * weights
        made = made.reshape(batch, count * room, width)
        picked = jnp.take_along_axis(made, slots[..., None], axis=1, mode="clip").reshape(*chosen.shape, width)
        return jnp.einsum("bsne,bsn->bse", picked, is_mine.astype(x.dtype))

    if not isinstance(summing, TensorSplit):
        return made(x, weights, kernels)
    parts = jax.vmap(made, (1, 1, 0), 1)(summing.repeated(x, 1), summing.repeated(weights, 1), _cut(kernels, summing))
    return summing.summed(parts, 1)


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
