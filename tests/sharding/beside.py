"""A function of parameters in shards beside the same on one device: its results, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.compiled.traffic import compiled_collectives
from redco_cli.sharding.gather.gathering import gathering
from redco_cli.sharding.gather.replicas import add_up, parts_like
from redco_cli.sharding.gather.sharded import Apart
from tests.sharding.measure import QUICKLY, device_mesh

MESH = {"data": 1, "fsdp": 4, "tensor": 2}
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


def slowly(*values):
    """Parameters of a test that `make test-all` runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def draw(*shape, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * 0.3).astype(np.float32)


def on_mesh(function, params, *others, specs, gathered, reshard_after_forward=False, mesh=MESH):
    """The results and the gradients of a function on the mesh and on one device."""
    devices = device_mesh(mesh)
    stored = jax.tree.map(lambda spec: NamedSharding(devices, spec), specs)
    whole = jax.tree.map(lambda _: NamedSharding(devices, P()), others)
    gathers = gathering(function, specs, gathered, devices, reshard_after_forward=reshard_after_forward)

    def both(function):
        def run(params, *others):
            results, pull = jax.vjp(lambda params: function(params, *others), params)
            return results, pull(jax.tree.map(jnp.ones_like, results))

        return run

    step = jax.jit(
        both(gathers), in_shardings=(stored, *whole), out_shardings=(None, (stored,)), compiler_options=QUICKLY
    )
    return step(*jax.device_put((params, *others), (stored, *whole))), jax.jit(both(function))(params, *others)


def approximately(found, right, tolerance=2e-6):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        largest = max(1.0, float(np.abs(other).max(initial=0.0)))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * largest)


def in_parts(function, params, *others, specs, gathered, mesh):
    """The gradient of a function's sum in parts of each replica, and as it is on one device."""
    devices = device_mesh(mesh)
    places = jax.tree.map(lambda spec: NamedSharding(devices, spec), specs)
    gathers = gathering(function, specs, gathered, devices)

    def total(results):
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(results))

    @jax.jit
    def gradient(params, *others):
        def loss(parts):
            return total(gathers(jax.tree.map(Apart, params, parts), *others))

        return jax.grad(loss)(parts_like(params, places))

    right = jax.jit(jax.grad(lambda params: total(function(params, *others))))(params)
    parts = gradient(jax.device_put(params, places), *others)
    return parts, add_up(parts, places), right


def moved(loss, params, batch, mesh, kind=""):
    """Bytes that a derived step sends, by one kind of collective or all."""
    plan = derive(loss, params, batch, mesh)
    devices = device_mesh(mesh)
    places = jax.tree.map(lambda spec: NamedSharding(devices, spec), plan.specs)
    over_batch = jax.tree.map(lambda _: NamedSharding(devices, P(("data", "fsdp"))), batch)
    step = jax.jit(
        jax.value_and_grad(gathering(loss, plan.specs, plan.gathered, devices, usage=plan.usage)),
        in_shardings=(places, over_batch),
        out_shardings=(None, places),
        compiler_options=QUICKLY,
    )
    found = compiled_collectives(step.lower(params, batch).compile(), mesh)
    return sum(one.sent for one in found if kind in one.kind)
