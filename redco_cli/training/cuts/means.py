"""Where a loss gives a mean and redco divides by the weight once more: refused, as all of it is off by a factor.

`Loss(losses.mean(), losses.size)` trains, on a gradient that is smaller by the size of the batch; `losses.sum()` in the
place of a mean trains on one that changes with the micro-batch. Both show in the trace: see `growth`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from redco_cli.batch_sizes import micro_batch_size
from redco_cli.errors import PluginError, Problem, RedcoError
from redco_cli.job import Job
from redco_cli.placement import abstract_batch
from redco_cli.plugin.state import Variables
from redco_cli.sharding.batch_shards import batch_sharded
from redco_cli.training.cuts.growth import ZERO, Growth, growths

_PRIMES = (17, 19, 23)
"""So many times as many examples; another number that two of them divide is none that a third does."""
_SUM = "Loss.sum"
_MEAN = "does not grow with the number of examples, as a mean does not, but"
_REMEDIES = {
    _SUM: "give the sum, Loss(losses.sum(), losses.size); or return the mean alone, losses.mean()",
    "metric": "give the sum over the examples, such as right.sum(), or a pair of value and weight: (value, 1)",
    "stat": "give the sum over the examples, such as x.sum(0), or a pair of value and weight: (value, 1)",
}


def refuse_means(job: Job) -> list[Problem]:
    """Refuses a loss, a metric or a stat that is a mean where the contract asks for the sum beside its weight.

    Nothing is computed: the loss is traced over a few abstract batches. What cannot be told is let pass.

    Returns:
        What is to be told: that the loss grows with its batch, where that is cut.

    Raises:
        PluginError: naming the first of them.
    """
    found = _agreed(job)
    for what, (total, weight, line) in found.items():
        if total == 0 and weight == 1:
            divisor = "is divided by Loss.weight, which does" if what == _SUM else "is divided by a weight that does"
            problem = f"{what} {_MEAN} {divisor}: it would be smaller by the size of the batch"
            raise PluginError(_place(job, line), problem, _REMEDIES[_SUM if what == _SUM else what.split()[1]])
    total, weight, line = found.get(_SUM, (None, None, None))
    is_whole = job.plugin.whole_batch or job.recipe.train.global_batch_size == 1 or job.recipe.privacy is not None
    if is_whole or total is None or weight is None or total == ZERO or total <= weight:
        return []
    problem = "the loss grows with the number of examples in its batch: the result depends on how the batch is cut"
    return [Problem(_place(job, line), problem, "return the mean, losses.mean(), or Loss(losses.sum(), losses.size)")]


def _place(job: Job, line: int | None) -> str:
    return f"{job.plugin.file}:{line}: loss_fn" if line else f"{job.plugin.file}: loss_fn"


def _agreed(job: Job) -> dict[str, tuple[Growth, Growth, int | None]]:
    """Growth and growth of the weight, with the line, of each number for which several batches say the same."""
    first: dict[str, tuple[Growth, Growth, int | None]] | None = None
    for prime in _PRIMES:
        try:
            found = dict(_read(job, prime))
        except RedcoError:  # no batch of this run is so large, and the plugin or the model may refuse it
            return {}
        first = found if first is None else {what: one for what, one in first.items() if found.get(what) == one}
        if all(total is None or total == weight for total, weight, _ in first.values()):
            break
    return first or {}


def _read(job: Job, prime: int) -> Iterator[tuple[str, tuple[Growth, Growth, int | None]]]:
    def loss(variables: Variables, key: Any, arrays: Any) -> Any:
        found = job.loss(variables, arrays, key, train=True)
        stats = [
            (f"the stat {name}{jax.tree_util.keystr(path)}", leaf, weight)
            for name, (total, weight) in found.stats.items()
            for path, leaf in jax.tree.leaves_with_path(total)
        ]
        metrics = [(f"the metric {name}", *pair) for name, pair in found.metrics.items()]
        named = [(_SUM, found.sum, found.weight), *metrics, *stats]
        names[:] = [what for what, *_ in named]
        return [pair for _, *pair in named]

    names: list[str] = []
    size = micro_batch_size(job.recipe) * prime
    abstract, key = abstract_batch(job, size), jax.eval_shape(lambda: jax.random.key(0))
    with batch_sharded(size):
        closed = jax.make_jaxpr(loss)(job.abstract, key, abstract)
    found = growths(closed, [0] * len(closed.jaxpr.invars), prime)
    for number, what in enumerate(names):
        yield what, (found[2 * number], found[2 * number + 1], _line(job, closed.jaxpr, 2 * number))


def _line(job: Job, jaxpr: Any, number: int) -> int | None:
    """The line of the plugin that made a result of a trace; None where it is another file's."""
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    atoms = jaxpr.outvars[number : number + 1]
    while made := [makers[one] for one in atoms if not isinstance(one, core.Literal) and one in makers]:
        traceback = made[0].source_info.traceback
        for frame in [] if traceback is None else traceback.frames:
            if os.path.realpath(frame.file_name) == os.path.realpath(job.plugin.file):
                return int(frame.line_num)
        atoms = made[0].invars
    return None
