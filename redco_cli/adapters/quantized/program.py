"""Functions of quantised weights: each is dequantised where it is used, and again where the backward pass uses it.

What a loop, or the backward pass, takes along of a weight are its codes and scales. So one layer at a time exists in
the type that it is computed in, and codes are what `gather` gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from redco_cli.adapters.quantized.leaf import Quantized, is_quantized
from redco_cli.plugin.contract import Params
from redco_cli.sharding.program.rewrite import CONTROL_FLOW, bind, rewritten


@dataclass(frozen=True)
class _Kept:
    """A quantised weight that was not used yet.

    Attributes:
        arrays: what is kept of it, or of one of its layers.
        views: equations of one operand, to apply once it is dequantised.
    """

    arrays: Quantized
    views: tuple[Any, ...] = ()

    def array(self, use: str = "") -> Any:
        """The weight, as it is seen."""
        weight = self.arrays.dense()
        for equation in self.views:
            (weight,) = bind(equation, [weight])
        return weight

    def having(self, arrays: Quantized) -> _Kept:
        """The same with other arrays."""
        return replace(self, arrays=arrays)

    layer = having

    def viewed(self, equation: Any) -> _Kept:
        """The same weight, seen in another way."""
        return replace(self, views=(*self.views, equation))

    def stacked(self) -> _Kept:
        """Itself: `uses_of` has told that its layers come first, so that views are casts."""
        return self


class _Dequantizing:
    """Dequantises a weight at each of its uses."""

    enters = CONTROL_FLOW
    calls = frozenset[str]()
    everywhere = False

    def is_tracked(self, operand: Any) -> bool:
        return isinstance(operand, _Kept)

    def use(self, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if not any(map(self.is_tracked, operands)):
            return bind(equation, operands)
        if equation.primitive.name == "name":
            return [operands[0].viewed(equation)]

        def computed(given: Sequence[Any]) -> list[Any]:
            own = [x.having(one) if self.is_tracked(x) else one for x, one in zip(operands, given, strict=True)]
            return list(bind(equation, [x.array() if self.is_tracked(x) else x for x in own]))

        # Rematerialised, or the dequantised weights of all layers would wait for the backward pass.
        results: list[Any] = jax.checkpoint(computed)([x.arrays if self.is_tracked(x) else x for x in operands])
        return results


def seen_params(params: Params) -> Params:
    """Parameters as a program sees them: of a quantised weight its shape and type."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.form.shape, leaf.form.dtype) if is_quantized(leaf) else leaf,
        params,
        is_leaf=is_quantized,
    )


def dense_params(params: Params, dtype: Any = None) -> Params:
    """Parameters with every quantised weight dequantised, all of them at once. Traceable.

    Args:
        params: with quantised weights, or without.
        dtype: of these weights; default: that in which a program sees them.
    """
    return jax.tree.map(lambda leaf: leaf.dense(dtype) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized)


def dequantizing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of parameters of which some are quantised.

    Args:
        function: `function(params, *others)`, any that JAX can trace, of parameters as `seen_params` tells them.
    """

    def dequantized(params: Params, *others: Any) -> Any:
        leaves = jax.tree.leaves(params, is_leaf=is_quantized)
        if not any(map(is_quantized, leaves)):
            return function(params, *others)
        closed, shape = jax.make_jaxpr(function, return_shape=True)(seen_params(params), *others)
        kept = [_Kept(leaf) if is_quantized(leaf) else leaf for leaf in leaves]
        results = rewritten(closed, [*kept, *jax.tree.leaves(others)], _Dequantizing())
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return dequantized
