"""What an outer loop keeps besides the training state: saved with every checkpoint, restored without a template.

Numbers, text and the structure go into the JSON of a checkpoint, arrays into an item of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

_ARRAY = "__array__"
"""The one key of what stands for an array in the JSON."""
KINDS = "dicts with text keys, lists, arrays, numbers, text, true, false and null"


@dataclass(frozen=True)
class OuterState:
    """An outer loop between two pieces of its work.

    Attributes:
        state: `run.state`; None before `run_fn` gave any.
        predictions: calls of `run.predict` so far.
        logged: values logged since the last boundary.
        is_over: whether `run_fn` has returned.
        is_evaluated: whether the recipe's data were evaluated at this step.
    """

    state: Mapping[str, Any] | None = None
    predictions: int = 0
    logged: Mapping[str, float] = field(default_factory=dict)
    is_over: bool = False
    is_evaluated: bool = False


@dataclass(frozen=True)
class SavedOuterState:
    """The same as it is written.

    Attributes:
        values: plain data; what stands for an array is `{"__array__": its name}`.
        arrays: by those names.
    """

    values: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray[Any, Any]]

    @property
    def digest(self) -> str:
        """A hash of all of it."""
        found = hashlib.sha256(json.dumps(self.values, sort_keys=True).encode())
        for name, array in self.arrays.items():
            found.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


def to_saved(outer: OuterState) -> SavedOuterState:
    """What is written of an outer loop: copies, which later changes of `run.state` do not reach.

    Raises:
        TypeError: `run.state` holds something else than `KINDS`, naming where.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            wrong = [key for key in value if not isinstance(key, str) or key == _ARRAY]
            if wrong:
                raise TypeError(f"{path} has the key {wrong[0]!r}")
            return {key: plain(inner, f"{path}.{key}") for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner, f"{path}.{index}") for index, inner in enumerate(value)]
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            array = np.array(value)
            if array.dtype.hasobject:
                raise TypeError(f"{path} is an array of objects")
            arrays[str(len(arrays))] = array
            return {_ARRAY: str(len(arrays) - 1)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{path} is a {type(value).__name__}")

    values = {
        "state": plain(outer.state, "run.state"),
        "predictions": outer.predictions,
        "logged": {name: float(value) for name, value in outer.logged.items()},
        "is_over": outer.is_over,
        "is_evaluated": outer.is_evaluated,
    }
    return SavedOuterState(values, arrays)


def from_saved(values: Mapping[str, Any], arrays: Mapping[str, Any]) -> OuterState:
    """The inverse of `to_saved`; arrays come back as numpy's, tuples as lists."""

    def restored(value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.keys() == {_ARRAY}:
                return np.array(arrays[value[_ARRAY]])
            return {key: restored(inner) for key, inner in value.items()}
        return [restored(inner) for inner in value] if isinstance(value, list) else value

    counted, logged = int(values["predictions"]), dict(values["logged"])
    is_evaluated = values.get("is_evaluated", False)  # which earlier versions did not say
    return OuterState(restored(values["state"]), counted, logged, values["is_over"], is_evaluated)
