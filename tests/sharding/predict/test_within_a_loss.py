"""What a loss adds up over all examples before it is done, beside compiled steps."""

import jax
import jax.numpy as jnp
import pytest

from redco_cli.sharding import derive
from redco_cli.sharding.plan import Collective
from redco_cli.sharding.predict.collectives import in_a_step
from redco_cli.sharding.rings import sent_bytes
from tests.sharding.beside import CUBE, draw, moved, slowly

ROWS, WIDTH, HIDDEN, OUTPUTS = 64, 256, 512, 128
FSDP = {"data": 1, "fsdp": 8, "tensor": 1}
DATA = {"data": 8, "fsdp": 1, "tensor": 1}
MESHES = {"fsdp": FSDP, "data": DATA, "cube": CUBE}


def answers(weights, x):
    return jnp.tanh(x @ weights["up"]) @ weights["down"]


def of_a_step_within(params, batch):
    """The loss after a step of gradient descent over all examples."""

    def missed(weights):
        return jnp.square(answers(weights, batch["x"]) - batch["y"]).mean()

    ahead = jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(missed)(params))
    return jnp.square(answers(ahead, batch["asked"]) - batch["right"]).mean()


def features(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def of_what_goes_together(params, batch):
    """Features of two views that should go together, and none with another (Barlow Twins, arXiv 2103.03230)."""
    both = features(params, jnp.concatenate([batch["x"][:, None], batch["asked"][:, None]], 1))
    return jnp.square(both[:, 0].T @ both[:, 1] / ROWS - jnp.eye(OUTPUTS)).sum()


def of_pairs(params, batch):
    """Each example beside all others, as CLIP has it (arXiv 2103.00020)."""
    both = features(params, jnp.concatenate([batch["x"][:, None], batch["asked"][:, None]], 1))
    scores = both[:, 0] @ both[:, 1].T
    return -jnp.diag(jax.nn.log_softmax(scores)).mean()


def of_distances(params, batch):
    """The same by differences, which no product makes."""
    made = features(params, batch["x"])
    return jnp.exp(-jnp.abs(made[:, None] - made[None]).sum(-1)).mean()


def of_normed_batches(params, batch):
    """Each feature normed over all examples."""
    made = batch["x"] @ params["up"]
    normed = (made - made.mean(0)) / jnp.sqrt(made.var(0) + 1e-5)
    return jnp.square(jax.nn.relu(normed) @ params["down"]).mean()


def job():
    sizes = {"x": WIDTH, "y": OUTPUTS, "asked": WIDTH, "right": OUTPUTS}
    batch = {name: draw(ROWS, size, seed=2 + k) for k, (name, size) in enumerate(sizes.items())}
    return {"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, OUTPUTS, seed=1)}, batch


LOSSES = (of_a_step_within, of_what_goes_together, of_pairs, of_distances, of_normed_batches)


@pytest.mark.parametrize("mesh", ["fsdp", *slowly("data", "cube")])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_what_moves_among_examples_is_predicted(loss, mesh):
    params, batch = job()
    plan = derive(loss, params, batch, MESHES[mesh])
    predicted = sum(sent_bytes(one, MESHES[mesh]) for one in plan.collectives)
    assert moved(loss, params, batch, MESHES[mesh]) == pytest.approx(
        predicted, rel=0.25 if loss is of_a_step_within else 0.05
    )


def test_sums_do_not_grow_with_the_examples_of_a_step():
    """Of four passes of two examples, of a plan for one: statistics move once a pass, activations with the examples."""
    statistics = Collective("all-reduce", "data+fsdp", "partial sums of a matmul", count=1, bytes=100)
    activations = Collective("all-reduce", "tensor", "partial sums of a matmul", count=1, bytes=100)
    found = in_a_step([statistics, activations], 4, 8.0, regathers=False, kept=1.0)
    assert [one.bytes for one in found] == [400, 800]
