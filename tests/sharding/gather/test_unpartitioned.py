"""Fourier transforms and grouped convolutions: each device takes its own examples; complex weights move as others."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from redco_cli.sharding import derive
from redco_cli.sharding.rings import sent_bytes
from tests.sharding.beside import CUBE, MESH, approximately, draw, moved, on_mesh, slowly
from tests.sharding.trial import attempt

LENGTH, WIDTH, MODES = 16, 16, 5
FSDP = {"data": 1, "fsdp": 8, "tensor": 1}
CONVOLUTION = {
    "up": draw(WIDTH, 4 * WIDTH),
    "kernel": draw(4 * WIDTH, LENGTH, seed=1),
    "down": draw(4 * WIDTH, WIDTH, seed=2),
}
OPERATOR = {
    "real": draw(2, WIDTH, WIDTH, MODES, seed=3),
    "imaginary": draw(2, WIDTH, WIDTH, MODES, seed=4),
    "beside": draw(2, WIDTH, WIDTH, seed=5),
}
X = draw(8, LENGTH, WIDTH, seed=6)


def long_convolution(p, x):
    """Over time, by the convolution theorem: transforms of examples [B, F, S], and of a kernel [F, S]."""
    hidden = x @ p["up"]
    spectrum = jnp.fft.rfft(hidden, n=2 * LENGTH, axis=1) * jnp.fft.rfft(p["kernel"].T, n=2 * LENGTH, axis=0)
    return jax.nn.gelu(jnp.fft.irfft(spectrum, n=2 * LENGTH, axis=1)[:, :LENGTH]) @ p["down"]


def operator(p, x):
    """Layers of a Fourier neural operator (arXiv 2010.08895), whose weights multiply the lowest modes."""

    def layer(x, p):
        modes = jnp.fft.rfft(x, axis=1)[:, :MODES]
        modes = jnp.einsum("bmi,iom->bmo", modes, p["real"] + 1j * p["imaginary"])
        spectrum = jnp.zeros((len(x), LENGTH // 2 + 1, WIDTH), modes.dtype).at[:, :MODES].set(modes)
        return jax.nn.gelu(jnp.fft.irfft(spectrum, n=LENGTH, axis=1) + x @ p["beside"]), None

    return jax.lax.scan(layer, x, p)[0]


def mixed(p, x):
    """FNet (arXiv 2105.03824): a transform over time and features, of which the real part is kept."""
    return jnp.fft.fft2(jnp.tanh(x @ p["up"]) @ p["down"]).real


SPLIT = {"up": P("fsdp", "tensor"), "kernel": P(("tensor", "fsdp")), "down": P(("tensor", "fsdp"))}
USED = {"up": P(None, "tensor"), "kernel": P("tensor"), "down": P("tensor")}
PROGRAMS = {
    "long convolution": (long_convolution, CONVOLUTION, SPLIT, USED),
    "operator": (operator, OPERATOR, P(None, "fsdp"), P()),
    "mixed": (mixed, CONVOLUTION, SPLIT, USED),
}


@pytest.mark.parametrize("mesh", [MESH, *slowly(FSDP, CUBE)], ids=["fsdp and tensor", "fsdp", "cube"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_one_device(name, mesh):
    function, params, *places = PROGRAMS[name]
    specs, gathered = (jax.tree.map(lambda _, one=one: one, params) if isinstance(one, P) else one for one in places)
    found, right = on_mesh(function, params, X, specs=specs, gathered=gathered, mesh=mesh)
    approximately(found, right, 1e-5)


@pytest.mark.parametrize(("name", "at_most"), [("long convolution", 2.3), ("operator", 1.02), ("mixed", 1.02)])
def test_examples_do_not_move(name, at_most):
    """Only weights do, and the gradient of the spectrum of a kernel, which is larger than the kernel."""
    function, params, *_ = PROGRAMS[name]
    batch = {"x": jnp.tile(X, (8, 1, 1))}

    def loss(p, batch):
        return jnp.square(function(p, batch["x"])).mean()

    plan = derive(loss, params, batch, FSDP)
    assert moved(loss, params, batch, FSDP) <= at_most * sum(sent_bytes(one, FSDP) for one in plan.collectives)


def grouped(groups):
    def loss_fn(params, batch):
        dims = ("NWC", "WIO", "NWC")
        x = batch["x"] @ params["a"]
        y = jax.lax.conv_general_dilated(
            x, params["k"], (1,), "SAME", dimension_numbers=dims, feature_group_count=groups
        )
        return ((y @ params["b"]) ** 2).mean()

    params = {"a": draw(256, 16), "k": draw(3, 16 // groups, 16), "b": draw(16, 256)}
    return loss_fn, params, {"x": draw(8, 12, 256, seed=1)}


MESHES = [(2, 1, 4), (1, 4, 2), (4, 1, 2), (2, 2, 2), (1, 1, 8), (1, 8, 1), (1, 2, 4)]


def grouped_error(mesh, groups, override=(), reshard_after_forward=False):
    loss_fn, params, batch = grouped(groups)
    plan = derive(loss_fn, params, batch, dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)), override=override)
    return attempt(loss_fn, params, batch, plan, reshard_after_forward=reshard_after_forward).worst


@pytest.mark.parametrize(("mesh", "groups"), [((2, 1, 4), 4), ((2, 2, 2), 16)])
def test_gradients_of_grouped_convolutions(mesh, groups):
    """XLA alone makes them too large by the size of an axis that splits nothing (see `test_traffic.py`)."""
    assert grouped_error(mesh, groups) < 1e-5
    assert grouped_error(mesh, groups, override=[("k", [])]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("groups", [2, 4, 16])
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_of_grouped_convolutions_on_every_mesh(mesh, groups, whole, reshard_after_forward):
    assert (
        grouped_error(mesh, groups, override=[("k", [])] if whole else [], reshard_after_forward=reshard_after_forward)
        < 1e-5
    )
