"""Gradients that are to come first, on TPUs: the same numbers, in that order, and none that nobody asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec as P

from redco_cli.models.decoder.loss import Head, cross_entropy
from redco_cli.models.hf_config import decoder_config
from redco_cli.sharding.batch_shards import batch_sharded
from redco_cli.sharding.gather.gathering import gathering
from redco_cli.sharding.gather.sharded import Sharded
from tests.models.decoder.pairs import hf_config, where
from tests.sharding.beside import CUBE, MESH, approximately, draw, in_parts, on_mesh
from tests.sharding.measure import device_mesh

CONFIG = decoder_config(hf_config("llama"), where=where)
LABELS = np.random.default_rng(1).integers(0, 64, (8, 12))
PARAMS = {"layer": draw(16, 16), "head": draw(16, 64, seed=2)}
SPECS = {"layer": P("fsdp", "tensor"), "head": P("fsdp", "tensor")}
GATHERED = {"layer": P(None, "tensor"), "head": P(None, "tensor")}


@pytest.fixture(autouse=True)
def _on_tpus(monkeypatch):
    monkeypatch.setattr(Sharded, "is_on_tpu", True)


def loss(params, x):
    hidden = jnp.tanh(x @ params["layer"])
    return cross_entropy(hidden, Head(params["head"], None), LABELS, config=CONFIG).loss


def barriers(jaxpr):
    """Shapes of the first two operands of each barrier in a program."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            found.append(tuple(x.aval.shape for x in equation.invars[:2]))
        for inner in core.jaxprs_in_params(equation.params):
            found += barriers(inner)
    return found


def gradient(of, mesh, specs=SPECS):
    """The traced gradient of the loss by some of its parameters."""
    with batch_sharded(4):
        gathers = gathering(loss, specs, GATHERED, device_mesh(mesh))
        some, others = ({name: PARAMS[name] for name in PARAMS if (name in of) == asked} for asked in (True, False))
        return jax.make_jaxpr(jax.grad(lambda some, x: gathers({**some, **others}, x)))(some, draw(8, 12, 16)).jaxpr


@pytest.mark.parametrize("mesh", [MESH, CUBE], ids=["fsdp", "cube"])
def test_the_loss_and_its_gradients_are_those_of_one_device(mesh):
    with batch_sharded(4):
        found, right = on_mesh(loss, PARAMS, draw(8, 12, 16), specs=SPECS, gathered=GATHERED, mesh=mesh)
    approximately(found, right)


def test_the_parts_of_each_replica_are_those_of_one_device():
    with batch_sharded(4):
        parts, found, right = in_parts(loss, PARAMS, draw(8, 12, 16), specs=SPECS, gathered=GATHERED, mesh=CUBE)
    assert parts["head"].shape == (16, 64, 2)
    approximately(found, right)


def test_the_gradient_of_a_head_is_there_before_that_of_hidden_states_goes_on():
    assert barriers(gradient(PARAMS, MESH)) == [((16, 64), (8, 12, 16))]


def test_a_gradient_that_nobody_asks_for_is_not_waited_for():
    assert not barriers(gradient(["layer"], MESH))
    assert not barriers(gradient(["head"], MESH))


def test_a_head_that_is_not_gathered_has_nothing_to_wait_for():
    assert not barriers(gradient(PARAMS, {"data": 4, "fsdp": 1, "tensor": 2}, GATHERED))
