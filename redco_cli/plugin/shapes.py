"""The shapes of the batch that a plugin's own model is built with, as checkpoints and exports keep them.

A batch comes in, of `init_batch` or of the first training examples; plain data go out, without the batch dim, from
which the model is built again where there is no such batch. Where `init_batch` gives other arrays than of one row each,
such as a graph with its nodes and edges, they are what the model takes, all dims of them.

>>> import numpy as np
>>> shapes_of({"points": np.zeros((8, 2), np.float32)})
{'points': {'shape': [2], 'dtype': 'float32'}}
>>> batch_of(shapes_of({"points": np.zeros((8, 2), np.float32)}), 3)
{'points': ShapeDtypeStruct(shape=(3, 2), dtype=float32)}
>>> graph = shapes_of({"nodes": np.zeros((9, 4), np.float32), "edges": np.zeros((2, 30), np.int32)}, built_for=True)
>>> batch_of(graph, 3)["nodes"], batch_of(graph, 3)["edges"]
(ShapeDtypeStruct(shape=(9, 4), dtype=float32), ShapeDtypeStruct(shape=(2, 30), dtype=int32))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Shapes = Mapping[str, Mapping[str, Any]]
"""Name of an array to `{"shape": [...], "dtype": "float32"}`, the shape without the batch dim.

With `"rows"` the first dim has that size in every batch.
"""


def shapes_of(batch: Mapping[str, Any], *, built_for: bool = False) -> dict[str, dict[str, Any]]:
    """The shapes of a batch of any size.

    Args:
        batch: name to array.
        built_for: it is that of `init_batch`: other first dims than 1 are no number of examples.
    """
    rows = {name: int(leaf.shape[0]) for name, leaf in batch.items()}
    fixed = built_for and any(size != 1 for size in rows.values())
    return {
        name: {"shape": [int(size) for size in leaf.shape[1:]], "dtype": jnp.dtype(leaf.dtype).name}
        | ({"rows": rows[name]} if fixed else {})
        for name, leaf in batch.items()
    }


def batch_of(shapes: Shapes, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """An abstract batch of `rows` examples."""
    return {
        name: jax.ShapeDtypeStruct((one.get("rows", rows), *one["shape"]), jnp.dtype(one["dtype"]))
        for name, one in shapes.items()
    }


def read_shapes(restored: Any) -> Shapes:
    """Shapes that were written as JSON.

    Raises:
        ValueError: it is something else.
    """
    try:
        return shapes_of(batch_of(restored, 1), built_for=True)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no shapes of arrays by name: {error}") from None
