"""Which parameter an array of state belongs to, such as a moment of an optimizer or a moving average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

Keys = tuple[str, ...]
Shape = tuple[int, ...]


class Owner(NamedTuple):
    """The parameter that an array belongs to.

    Attributes:
        parameter: its place among the leaves of the parameters.
        dims: for each dim of the array the dim of the parameter that it is; None for one that the parameter lacks.
    """

    parameter: int
    dims: tuple[int | None, ...]


def owners(state: Any, params: Any) -> list[Owner | None]:
    """The owner of each leaf of a state, None where it has none.

    A leaf whose place in the state ends with the place of a parameter belongs to it if it has its shape (moments), its
    shape without one dim (factored second moments: Adafactor, arXiv 1804.04235), or several of its shape.

    Args:
        state: arrays, or abstract ones.
        params: the same.
    """
    known = {
        _keys(path): (index, tuple(leaf.shape)) for index, (path, leaf) in enumerate(jax.tree.leaves_with_path(params))
    }
    longest = max(map(len, known), default=0)
    return [_owner(_keys(path), tuple(leaf.shape), known, longest) for path, leaf in jax.tree.leaves_with_path(state)]


def _owner(keys: Keys, shape: Shape, known: Mapping[Keys, tuple[int, Shape]], longest: int) -> Owner | None:
    for length in range(min(longest, len(keys)), -1, -1):
        found = known.get(keys[len(keys) - length :])
        dims = None if found is None else _fitted(shape, found[1])
        if found is not None and dims is not None:
            return Owner(found[0], dims)
    return None


def _fitted(shape: Shape, whole: Shape) -> tuple[int | None, ...] | None:
    """The dims of a parameter in an array of its shape, of its shape without a dim, or of several of it."""
    every = tuple(range(len(whole)))
    if shape == whole:
        return every
    for dropped in every:
        if shape == whole[:dropped] + whole[dropped + 1 :]:
            return every[:dropped] + every[dropped + 1 :]
    more = len(shape) - len(whole)
    return (*(None,) * more, *every) if more > 0 and shape[more:] == whole else None


def _keys(path: Sequence[Any]) -> Keys:
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
