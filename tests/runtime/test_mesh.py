"""Parameters that replace others: in their place, with their type, and not the buffers that were given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli.runtime.mesh import make_mesh, put_like

MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, str)
PLACE = jax.sharding.NamedSharding(MESH, P("fsdp", "tensor"))
VALUES = np.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize("value", [VALUES, VALUES.tolist(), jnp.asarray(VALUES), jax.device_put(VALUES, PLACE)])
def test_whatever_is_given_takes_the_place_of_the_old(value: object) -> None:
    old = jax.device_put(jnp.zeros((4, 6), jnp.bfloat16), PLACE)
    new = put_like(value, old)
    assert (new.sharding, new.dtype) == (old.sharding, old.dtype)
    np.testing.assert_array_equal(np.asarray(new, np.float64), VALUES)


def test_what_is_given_outlives_the_copy() -> None:
    given = jax.device_put(jnp.asarray(VALUES), PLACE)
    put_like(given, given).delete()
    np.testing.assert_array_equal(given, VALUES)


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an array of shape \[3\] cannot replace one of \[4, 6\]"):
        put_like(np.zeros(3), jax.device_put(VALUES, PLACE))
