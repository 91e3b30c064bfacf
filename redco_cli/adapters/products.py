"""The product of an activation and an adapted weight, with no more collectives than the weight's own.

Over n devices along `tensor`, W is split by rows or by columns, and A or B along with it:

    rows       y = Σ_i (x_i·W_i + s·(x_i·A_i)·B)             one all-reduce, of y
    columns    y_i = x·W_i + s·(x·A)·B_i                     backward: dx = Σ_i (dy_i·W_iᵀ + s·(dy_i·B_iᵀ)·Aᵀ), likewise

Left to the compiler, x·A = Σ_i x_i·A_i and dy·Bᵀ = Σ_i dy_i·B_iᵀ would have an all-reduce of their own, in each layer,
before the other factor is multiplied. Here the sum over devices is the last thing that is done. What is summed over
them instead is the gradient of the factor that all of them have, along with its sum over the batch. DoRA's norms of
rows are sums over them too: one number for each output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.adapters.merging import norms_of, squared_norms
from redco_cli.adapters.uses import Product
from redco_cli.sharding.program.rewrite import bind
from redco_cli.sharding.tensor_split import TensorSplit

Array = Any
Repeated = Callable[[TensorSplit, Array], Array]
"""What `TensorSplit.repeated` gives of an activation."""


@dataclass(frozen=True)
class AdaptedProduct:
    """A `dot_general` of a weight and an activation, with the low-rank path beside it.

    Attributes:
        equation: the weight's own.
        product: which dims of it are what.
        shape: of the weight.
        scale: s.
        dropout: the share of the path's input that is dropped.
        split: the dim of the weight that is split over `tensor`; None where there is none.
        repeated: of an activation that columns are multiplied with.
    """

    equation: Any
    product: Product
    shape: tuple[int, ...]
    scale: float
    dropout: float
    split: TensorSplit | None
    repeated: Repeated

    def sizes(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Of dims of the weight."""
        return tuple(self.shape[dim] for dim in dims)

    def __call__(
        self,
        weight: Array,
        a: Array,
        b: Array,
        x: Array,
        kept: Array | None,
        *,
        magnitude: Array | None = None,
        ratio: Array | None = None,
    ) -> Array:
        """x·W with its path.

        Args:
            weight: W, of `shape`.
            a: A [*experts, in, r].
            b: B [*experts, r, out].
            x: the activation.
            kept: which of its elements the path is given, bool; None for all.
            magnitude: m [*experts, out] of DoRA, or None.
            ratio: m / |W + s·A·B|, where that is known already.
        """
        experts, inputs, outputs = map(self.sizes, (self.product.experts[0], self.product.inputs[0], self._outputs))
        rows, columns = self._cut(self.product.inputs[0]), self._cut(self._outputs)
        factor = None
        if magnitude is not None and ratio is None:
            ratio = magnitude / self._norms(weight, a, b, rows is not None)
        if ratio is not None:
            factor = self._spread(ratio, x.ndim)
        a, b = a.reshape(*experts, *inputs, -1).astype(x.dtype), b.reshape(*experts, -1, *outputs).astype(x.dtype)
        if rows is not None:
            return self._by_rows(rows, weight, a, b, factor, x, kept)
        if columns is not None:
            return self._by_columns(columns, weight, a, b, factor, x, kept)
        return _combined(self._parts(weight, a, b, x, kept, factor is not None), factor)

    @property
    def _outputs(self) -> tuple[int, ...]:
        return self.product.outputs

    def _cut(self, dims: Sequence[int]) -> int | None:
        """Which of some dims of the weight is cut into blocks, where these are blocks of all of them together."""
        if self.split is None or self.split.dim not in dims:
            return None
        place = dims.index(self.split.dim)
        return place if math.prod(self.sizes(dims[:place])) == 1 else None

    def _by_rows(
        self, place: int, weight: Array, a: Array, b: Array, factor: Array | None, x: Array, kept: Array | None
    ) -> Array:
        split, first = self.split, len(self.product.experts[0])
        assert split is not None
        x, kept = (None if one is None else split.blocks(one, self.product.inputs[1][place]) for one in (x, kept))
        weight, a = split.blocks(weight, self.product.inputs[0][place]), split.blocks(a, first + place)
        parts = jax.vmap(self._parts_for(factor), (0, 0, None, 0, 0))(weight, a, b, x, kept)
        # With the factor within the sum: its gradient takes parts, and y need not be summed again in the backward pass.
        return split.summed(_combined(parts, None if factor is None else factor[None]))

    def _by_columns(
        self, place: int, weight: Array, a: Array, b: Array, factor: Array | None, x: Array, kept: Array | None
    ) -> Array:
        split, first = self.split, len(self.product.experts[0])
        assert split is not None
        weight, b = split.blocks(weight, self._outputs[place]), split.blocks(b, first + 1 + place)
        free = x.ndim - first - len(self.product.inputs[0])
        made = first + place + (free if self.product.weight == 1 else 0)
        parts = jax.vmap(self._parts_for(factor), (0, None, 0, 0, None))(weight, a, b, self.repeated(split, x), kept)
        return _combined([split.whole(part, made) for part in parts], factor)

    def _parts_for(self, factor: Array | None) -> Callable[..., Sequence[Array]]:
        def parts(weight: Array, a: Array, b: Array, x: Array, kept: Array | None) -> Sequence[Array]:
            return self._parts(weight, a, b, x, kept, factor is not None)

        return parts

    def _parts(self, weight: Array, a: Array, b: Array, x: Array, kept: Array | None, is_dora: bool) -> Sequence[Array]:
        """What `_combined` makes one of; sums of parts of the input are parts of the result."""
        product, first = self.product, len(self.product.experts[0])
        dropped = x if kept is None else jnp.where(kept, x / (1 - self.dropout), 0).astype(x.dtype)
        own = self._own(weight, x)
        down = jax.lax.dot_general(
            dropped,
            a,
            (
                (product.inputs[1], tuple(range(first, a.ndim - 1))),
                (tuple(product.experts[1][place] for place in product.shared), product.shared),
            ),
        )
        path = jax.lax.dot_general(down, b, (((down.ndim - 1,), (first,)), (tuple(range(first)), product.shared)))
        if product.weight == 0:  # the weight's dims come before the activation's
            free = path.ndim - first - len(self._outputs)
            moved = [*range(first), *range(first + free, path.ndim), *range(first, first + free)]
            path = path.transpose(moved)
        path = (self.scale * path).astype(own.dtype)
        if is_dora and kept is not None:
            return own, path, self._own(weight, dropped)
        return (own + path,)

    def _own(self, weight: Array, x: Array) -> Array:
        return bind(self.equation, [weight, x] if self.product.weight == 0 else [x, weight])[0]

    def _norms(self, weight: Array, a: Array, b: Array, is_split: bool) -> Array:
        """|W + s·A·B| [*experts, out]."""
        product, first = self.product, len(self.product.experts[0])
        order = (*product.experts[0], *product.inputs[0], *product.outputs)
        flat = weight.transpose(order).reshape(*self.sizes(product.experts[0]), a.shape[-2], b.shape[-1])
        if not is_split or self.split is None:
            return norms_of(squared_norms(flat, a, b, self.scale))
        blocks = (self.split.blocks(one, first) for one in (flat, a))
        squares = jax.vmap(lambda weight, a: squared_norms(weight, a, b, self.scale))(*blocks)
        return norms_of(self.split.summed(squares))

    def _spread(self, factor: Array, ndim: int) -> Array:
        """[*experts, out] as it is multiplied with the result, for an activation of some dims."""
        product, first = self.product, len(self.product.experts[0])
        outputs = self.sizes(product.outputs)
        factor = factor.reshape(*factor.shape[:first], *outputs)
        factor = factor.transpose([*product.shared, *range(first, factor.ndim)])
        free = [1] * (ndim - first - len(product.inputs[0]))
        if product.weight == 0:
            return factor.reshape(*factor.shape, *free)
        return factor.reshape(*factor.shape[:first], *free, *outputs)


def _combined(parts: Sequence[Array], factor: Array | None) -> Array:
    """The result of its parts; DoRA's factor is m / |W + s·A·B|.

    As PEFT (0.21): dropout leaves the weight's own product whole, and is on what DoRA adds to it.
    """
    own, *rest = parts
    if factor is None:
        return own
    factor = factor.astype(own.dtype)
    if not rest:
        return factor * own
    path, again = rest
    return own + (factor - 1) * again + factor * path
