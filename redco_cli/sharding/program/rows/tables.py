"""Tables that a program makes of weights, and rows of them from rows of what they are made of.

Of an array [N1, .., features] rows are looked up by their places along its leading dims. What is computed entry by
entry, or within a row, is computed of the rows; others are not followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.sharding.program.primitives import OF_EACH_ENTRY
from redco_cli.sharding.program.rewrite import bind
from redco_cli.sharding.program.unevaluated import Unevaluated

AS_THEY_ARE = frozenset({"convert_element_type", "name"})
"""Primitives behind which a weight is a weight still."""
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})
_SHAPED = frozenset({"reshape", "squeeze", "expand_dims"})


class Followed:
    """An array that has to do with no example."""

    value: Any
    """The array."""
    is_of_weights: bool
    """Whether it is a weight, or made of such; else it is made of numbers of the program."""

    @property
    def arrays(self) -> Any:
        """The same, for control flow to take along."""
        return self.value

    def having(self, arrays: Any) -> Weight:
        """Another one."""
        return Weight(arrays)

    def layer(self, arrays: Any) -> Weight:
        """One layer of it."""
        return Weight(arrays)

    def stacked(self) -> Any:
        """Itself."""
        return self

    def viewed(self, equation: Any) -> Table:
        """The same, seen in another way."""
        return Table(equation, (self,), self.is_of_weights)

    def array(self, use: str = "") -> Any:
        """The array."""
        return self.value


@dataclass(frozen=True)
class Weight(Followed):
    """A weight, or what is made of such in a way that is not followed; or of numbers of the program."""

    value: Any
    is_of_weights: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return tuple(self.value.shape)


@dataclass(frozen=True)
class Table(Unevaluated, Followed):
    """What a program makes of others."""

    is_of_weights: bool = True

    @cached_property
    def value(self) -> Any:
        """The array."""
        leaves = [x for node in self.nodes for x in node.operands if isinstance(x, Weight)]
        return self.evaluated({id(x): x.value for x in leaves})

    @property
    def costs(self) -> bool:
        """Whether a row of it takes more than to look up what it is made of."""
        return any(node.equation.primitive.name in _REDUCTIONS | {"dot_general"} for node in self.nodes)

    @cached_property
    def is_made(self) -> bool:
        """Whether it is made of weights, and more than one in some precision."""
        return self.is_of_weights and any(node.equation.primitive.name not in AS_THEY_ARE for node in self.nodes)


def value_of(x: Any) -> Any:
    """The array that an operand is.

    Args:
        x: any.
    """
    return x.value if isinstance(x, Followed) else x


def rows_of(x: Any, places: tuple[Any, ...], known: dict[Any, Any]) -> Any | None:
    """Rows [.., features] of an array [N1, .., features], by their places along its leading dims, each [..].

    Args:
        x: a `Weight`, a `Table` or an array.
        places: one for each of the dims.
        known: rows that were found so far.
    """
    key = (id(x), *map(id, places))
    if key not in known:
        if isinstance(x, Table) and x.is_made:
            found = _rows_of_made(x, places, known)
        else:
            found = jnp.asarray(value_of(x)).at[places].get(mode="clip", wrap_negative_indices=False)
        known[key] = found, x, places  # kept, as they are known by `id`
    return known[key][0]


def _rows_of_made(table: Table, places: tuple[Any, ...], known: dict[Any, Any]) -> Any | None:
    name = table.equation.primitive.name
    if name in OF_EACH_ENTRY:
        operands = [_rows_or_number(x, table, places, known) for x in table.operands]
        return None if any(x is None for x in operands) else bind(table.equation, operands)[0]
    return _RULES[name](table, places, known) if name in _RULES else None


def _rows_or_number(x: Any, table: Table, places: tuple[Any, ...], known: dict[Any, Any]) -> Any | None:
    """Of an operand of an elementwise equation, which may be one number, or the same in all rows."""
    shape, count = tuple(getattr(x, "shape", ())), len(places)
    if not shape:
        return value_of(x)
    if shape[:count] == table.shape[:count]:
        return rows_of(x, places, known)
    is_repeated = all(size == 1 for size in shape[:count])
    return jnp.reshape(value_of(x), (1,) * places[0].ndim + shape[count:]) if is_repeated else None


def _reduced(table: Table, places: tuple[Any, ...], known: dict[Any, Any]) -> Any | None:
    count, axes = len(places), table.equation.params["axes"]
    rows = rows_of(table.operands[0], places, known) if all(axis >= count for axis in axes) else None
    if rows is None:
        return None
    shift = places[0].ndim - count
    moved = table.equation.replace(params={**table.equation.params, "axes": tuple(axis + shift for axis in axes)})
    return bind(moved, [rows])[0]


def _repeated(table: Table, places: tuple[Any, ...], known: dict[Any, Any]) -> Any | None:
    """What is repeated along features, or along the rows."""
    (source,), count, ndim = table.operands, len(places), places[0].ndim
    dims, shape = table.equation.params["broadcast_dimensions"], (*places[0].shape, *table.shape[count:])
    of_rows = [dim for dim in dims if dim < count]
    if not of_rows:
        return jax.lax.broadcast_in_dim(value_of(source), shape, [dim - count + ndim for dim in dims])
    if of_rows != list(range(count)) or tuple(source.shape[:count]) != table.shape[:count]:
        return None
    rows = rows_of(source, places, known)
    at = [*range(ndim), *(dim - count + ndim for dim in dims[count:])]
    return None if rows is None else jax.lax.broadcast_in_dim(rows, shape, at)


def _reshaped(table: Table, places: tuple[Any, ...], known: dict[Any, Any]) -> Any | None:
    """As many leading dims of what it was as have as many rows."""
    (source,), count = table.operands, len(places)
    shape, total = tuple(source.shape), math.prod(table.shape[:count])
    leading = next((dim for dim in range(1, len(shape) + 1) if math.prod(shape[:dim]) == total), None)
    if leading is None:
        return None
    if shape[:leading] != table.shape[:count]:
        flat = _once(known, places, (table.shape[:count],), _flat)
        places = _once(known, flat, (shape[:leading],), _along)
        known[_flat, (shape[:leading],), *map(id, places)] = flat, places
    rows = rows_of(source, places, known)
    return None if rows is None else rows.reshape(*places[0].shape, *table.shape[count:])


def _joined(table: Table, places: tuple[Any, ...], known: dict[Any, Any]) -> Any | None:
    """Side by side; or one above the other, where each row is looked up in all."""
    dim, count = table.equation.params["dimension"], len(places)
    if dim >= count:
        parts = [rows for x in table.operands if (rows := rows_of(x, places, known)) is not None]
        axis = dim - count + places[0].ndim
        return jnp.concatenate(parts, axis) if len(parts) == len(table.operands) else None
    if count != 1:
        return None
    start, found = 0, None
    for x in (part for part in table.operands if part.shape[0]):
        rows = rows_of(x, _once(known, places, (start, x.shape[0]), _within), known)
        if rows is None:
            return None
        first = (places[0] < start).reshape(*places[0].shape, *(1,) * (rows.ndim - places[0].ndim))
        found = rows if found is None else jnp.where(first, found, rows)
        start += x.shape[0]
    return found


def _once(known: dict[Any, Any], places: tuple[Any, ...], how: Any, make: Callable[..., Any]) -> tuple[Any, ...]:
    """Other places, the same for all that ask for them: what is found there is known by them."""
    key = (make, how, *map(id, places))
    if key not in known:
        known[key] = make(places, *how), places
    found: tuple[Any, ...] = known[key][0]
    return found


def _flat(places: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """The same places along one dim that is all of these."""
    return places if len(sizes) == 1 else (jnp.ravel_multi_index(places, sizes, mode="clip"),)


def _along(places: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """The same places along dims of such sizes."""
    return places if len(sizes) == 1 else tuple(jnp.unravel_index(places[0], sizes))


def _within(places: tuple[Any, ...], start: int, count: int) -> tuple[Any, ...]:
    """Places in one of several arrays that are one above the other; of rows of others, any."""
    return (jnp.clip(places[0] - start, 0, count - 1),)


def _multiplied(table: Table, places: tuple[Any, ...], known: dict[Any, Any]) -> Any | None:
    """Rows of the left of two matrices, times the right one."""
    left, right = table.operands
    (contracted, others), batched = table.equation.params["dimension_numbers"]
    count, ndim = len(places), places[0].ndim
    if any(batched) or any(dim < count for dim in contracted):
        return None
    rows = rows_of(left, places, known)
    if rows is None:
        return None
    numbers = (tuple(dim - count + ndim for dim in contracted), others), batched
    params = {**table.equation.params, "dimension_numbers": numbers}
    return bind(table.equation.replace(params=params), [rows, value_of(right)])[0]


_RULES = {
    **dict.fromkeys(_REDUCTIONS, _reduced),
    **dict.fromkeys(_SHAPED, _reshaped),
    "broadcast_in_dim": _repeated,
    "concatenate": _joined,
    "dot_general": _multiplied,
}


def is_followed(equation: Any) -> bool:
    """Whether what an equation makes may be made row by row.

    Args:
        equation: any.
    """
    name = equation.primitive.name
    is_turned = name == "reshape" and equation.params["dimensions"] is not None
    is_known = name in OF_EACH_ENTRY or name in _RULES
    return is_known and len(equation.outvars) == 1 and not equation.effects and not is_turned
