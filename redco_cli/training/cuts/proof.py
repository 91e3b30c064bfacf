"""The loss of the first micro-batch in one piece and in two, computed and compared, before a run takes its first step.

With s, w = sum and weight of a part, a loss that may be cut has s(whole) = s(half) + s(other half),
and w alike. What the trace does not tell shows here: a mean over unevenly masked tokens, a term that is added once for
each micro-batch, a shape that a loss branches on.

It is the loss of training where that draws nothing; else that of evaluation, as noise is another one in each part.

It is done where it costs little, by one rule for all processes:

- a fresh run whose batches are cut, by a plugin that does not say whole_batch = True;
- the rows of a micro-batch divide by two on every device;
- at least `MICRO_BATCHES` micro-batches in the run, of which the proof takes the time of less than one;
- at most `PARAMETERS` parameters: compiling takes about as long as for the train step, which for these is seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from redco_cli.adapters.attach import computed
from redco_cli.errors import PluginError
from redco_cli.job import Job
from redco_cli.placement import Placement
from redco_cli.plugin.calls import call_loss
from redco_cli.plugin.contract import Batch, Loss
from redco_cli.plugin.state import Variables
from redco_cli.runtime.mesh import data_shards, replicated
from redco_cli.training.cuts.findings import REMEDY
from redco_cli.training.cuts.trace import draws

MICRO_BATCHES = 500
PARAMETERS = 10**9
_TOLERANCE = {4: 1e-3, 2: 2e-2}
"""By bytes of the narrowest float in the program: how much of itself a sum may differ."""
_CANCELLED = {4: 1e-5, 2: 1e-2}
"""How much it may differ for each unit of weight: terms of both signs may add up to nearly nothing."""


def prove_cut(
    job: Job,
    placement: Placement,
    steps: int,
    variables: Variables,
    batch: Batch,
    announce: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Refuses a loss that depends on how its batch is cut, where that is cheap to find out.

    Args:
        job: the job.
        placement: where everything lives.
        steps: of the run.
        variables: on the mesh.
        batch: the first global batch, arrays with leading dims [micro-batches, examples].
        announce: told of the compilation.

    Raises:
        PluginError: on all processes: sum or weight of the parts do not add up.
    """
    count, size = jax.tree.leaves(batch)[0].shape[:2]
    shards = data_shards(placement.mesh)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables.params))
    is_cheap = count * steps >= MICRO_BATCHES and parameters <= PARAMETERS
    if job.recipe.privacy is not None:  # each example has its own gradient, however the batch is cut
        return
    if job.plugin.whole_batch or count == 1 or size % (2 * shards) or not is_cheap:
        return
    train = not draws(job, size)
    both = jax.jit(_whole_and_halves(job, placement, shards, train=train), out_shardings=replicated(placement.mesh))
    try:
        traced = both.trace(variables, batch)
    except PluginError:  # the plugin takes a batch to train on for no batch to evaluate: then it cannot be told
        return
    with announce("the loss of a micro-batch in one piece and in two"):
        compiled = traced.lower().compile()
        whole, halves = jax.device_get(compiled(variables, batch))
    width, parts = _narrowest_float(traced.jaxpr.jaxpr), halves.sum(axis=0)
    allowed = _TOLERANCE[width] * abs(halves).sum(axis=0) + _CANCELLED[width] * abs(whole[1])
    is_empty = (halves[:, 0] == 0).any()  # nothing counted in it, and a weight of at least 1 would be no mistake
    if is_empty or not (abs(parts - whole) > allowed).any():  # what is not finite is for the step to tell
        return
    which = "" if train else ", without dropout"
    error = PluginError(
        f"{job.plugin.file}: loss_fn",
        f"of the first {size} examples sum and weight are {whole[0]:g} and {whole[1]:g} in one piece, but {parts[0]:g} "
        f"and {parts[1]:g} in two{which}: train.micro_batch_size would change the result",
        REMEDY,
    )
    error.on_all_processes = True
    raise error


def _whole_and_halves(job: Job, placement: Placement, shards: int, *, train: bool) -> Callable[[Variables, Batch], Any]:
    """Of variables and a batch [M, B, ...]: (sum, weight) of the first micro-batch [2], and of its halves [2, 2]."""

    def loss(seen: Variables, batch: Batch) -> Any:
        ctx = seen.told(job.context("train"))
        found: Loss = call_loss(job.plugin, ctx, seen.params, batch, jax.random.key(0), train=train)
        return jnp.stack([found.sum, found.weight])

    def adapted(variables: Variables, batch: Batch) -> Any:
        return computed(job.model, loss, variables, batch)

    gathered = placement.gathering(adapted)

    def half(number: int) -> Callable[[jax.Array], jax.Array]:
        """Half of the rows on each device, so that none has to move."""

        def rows(leaf: jax.Array) -> jax.Array:
            cut = leaf[0].reshape(shards, 2, -1, *leaf.shape[2:])
            return cut[:, number].reshape(-1, *leaf.shape[2:])

        return rows

    def both(variables: Variables, batch: Batch) -> Any:
        whole = gathered(variables, jax.tree.map(lambda leaf: leaf[0], batch))
        return whole, jnp.stack([gathered(variables, jax.tree.map(half(number), batch)) for number in range(2)])

    return both


def _narrowest_float(jaxpr: Any) -> int:
    """Bytes of the narrowest floats that a program computes in, 2 or 4."""
    for equation in jaxpr.eqns:
        dtypes = [getattr(variable.aval, "dtype", None) for variable in equation.outvars]
        if any(dtype in (jnp.bfloat16, jnp.float16) for dtype in dtypes):
            return 2
        inner = [getattr(one, "jaxpr", one) for one in jax.tree.leaves(dict(equation.params))]
        if any(hasattr(one, "eqns") and _narrowest_float(one) == 2 for one in inner):
            return 2
    return 4
