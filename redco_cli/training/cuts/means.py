"""Where a loss gives a mean and redco divides by the weight once more: refused, as all of it is off by a factor.

`Loss(losses.mean(), losses.size)` trains, on a gradient that is smaller by the size of the batch; `losses.sum()` in the
place of a mean trains on one that changes with the micro-batch. Both show in the trace: see `growth`. So does a mean
among the terms of a sum, `Loss(losses.sum() + others.mean(), losses.size)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core

from redco_cli.batch_sizes import micro_batch_size
from redco_cli.errors import PluginError, Problem, RedcoError
from redco_cli.job import Job
from redco_cli.plugin.contract import Loss
from redco_cli.training.cuts.growth import ZERO, Growth, growths
from redco_cli.training.cuts.trace import LeftBehind, line_of, place_of, reached, traced

_PRIMES = (17, 19, 23)
"""So many times as many examples; another number that two of them divide is none that a third does."""
_PAIR = "give the sum over the examples, such as {}, or a pair of value and weight: (value, 1)"
_REMEDIES = {
    "sum": "give the sum, Loss(losses.sum(), losses.size); or return the mean alone, losses.mean()",
    "term": "give the sum of this term too, or the mean times Loss.weight",
    "penalty": "give it times Loss.weight",
    "metric": _PAIR.format("right.sum()"),
    "stat": _PAIR.format("x.sum(0)"),
}
"""By the kind of a number. A penalty is a term of parameters alone."""
_MEAN = "does not grow with the number of examples, as a mean does not, but is divided by"
_FACTOR = "it would be smaller by the size of the batch"
_PENALTY = "a term of Loss.sum does not grow with the examples, but Loss.weight does: a larger batch has less of it"
_CUT = "the result depends on how the batch is cut"
_GROWN = {
    "sum": (
        f"the loss grows with the number of examples in its batch: {_CUT}",
        "return the mean, losses.mean(), or Loss(losses.sum(), losses.size)",
    ),
    "stat": (
        f"a stat grows with the number of examples, and its weight does not: {_CUT}",
        "give it the number of examples as its weight, (x.sum(0), len(x)): update_state has a mean then",
    ),
}
"""What grows faster than it is divided by, in batches that are cut."""
_PARAMS = jax.tree_util.GetAttrKey("params")
_PASSED = frozenset({"add", "sub", "add_any", "convert_element_type", "copy", "neg"})


@dataclass(frozen=True)
class _Number:
    """One of the numbers of a loss: how it grows with the examples, how what it is divided by does, and its line."""

    kind: str
    what: str
    total: Growth
    weight: Growth
    line: int | None


def refuse_means(job: Job) -> list[Problem]:
    """Refuses a loss, a metric or a stat that is a mean where the contract asks for the sum beside its weight.

    Nothing is computed: the loss is traced over a few abstract batches, of training and, where there are examples for
    it, of evaluation. What cannot be told is let pass.

    Returns:
        What is to be told: a penalty that does not grow with its batch; and where that is cut, a loss or a stat that
        does.

    Raises:
        PluginError: naming the first of them.
    """
    found = _agreed(job, train=True)
    _refuse(job, found, "")
    if job.eval_rows is not None:
        _refuse(job, _agreed(job, train=False), " where train is False")
    is_whole = job.plugin.whole_batch or job.recipe.train.global_batch_size == 1 or job.recipe.privacy is not None
    return [
        Problem(place_of(job, one.line), problem, remedy) for one, problem, remedy in _told(found, is_cut=not is_whole)
    ]


def _told(found: Sequence[_Number], *, is_cut: bool) -> Iterator[tuple[_Number, str, str]]:
    for one in found:
        total, weight = one.total, one.weight
        if total is None or weight is None or total == ZERO:
            continue
        if one.kind == "penalty" and (total, weight) == (0, 1):
            yield one, _PENALTY, _REMEDIES["penalty"]
        elif is_cut and one.kind in _GROWN and total > weight:
            yield one, *_GROWN[one.kind]


def _refuse(job: Job, found: Sequence[_Number], when: str) -> None:
    for number in found:
        if (number.total, number.weight) == (0, 1) and number.kind != "penalty":
            divisor = "a weight that does" if number.kind in ("metric", "stat") else "Loss.weight, which does"
            problem = f"{number.what}{when} {_MEAN} {divisor}: {_FACTOR}"
            raise PluginError(place_of(job, number.line), problem, _REMEDIES[number.kind])


def _agreed(job: Job, *, train: bool) -> list[_Number]:
    """The numbers, Loss.sum first; nothing is known of one of which several batches say different things."""
    first: list[_Number] = []
    for prime in _PRIMES:
        try:
            found = list(_read(job, prime, train=train))
        except LeftBehind:
            raise
        except RedcoError:  # no batch of this run is so large, and the plugin or the model may refuse it
            return []
        if first and len(found) != len(first):  # the loss is another one for another size
            return []
        pairs = zip(first, found, strict=True) if first else ()
        first = [one if one == other else replace(one, total=None) for one, other in pairs] or found
        if all(number.total is None or number.total == number.weight for number in first):
            break
    return first


def _read(job: Job, prime: int, *, train: bool) -> Iterator[_Number]:
    def numbers(loss: Loss) -> list[Any]:
        stats = [
            ("stat", f"the stat {name}{jax.tree_util.keystr(path)}", leaf, weight)
            for name, (total, weight) in loss.stats.items()
            for path, leaf in jax.tree.leaves_with_path(total)
        ]
        metrics = [("metric", f"the metric {name}", *pair) for name, pair in loss.metrics.items()]
        named = [("sum", "Loss.sum", loss.sum, loss.weight), *metrics, *stats]
        names[:] = [(kind, what) for kind, what, *_ in named]
        return [pair for _, _, *pair in named]

    names: list[tuple[str, str]] = []
    closed, _ = traced(job, micro_batch_size(job.recipe) * prime, numbers, train=train)
    jaxpr = closed.jaxpr
    terms = _terms(job, jaxpr) if train else []
    found = growths(closed, [0] * len(jaxpr.invars), prime, [*jaxpr.outvars, *(term for term, _ in terms)])
    for place, (kind, what) in enumerate(names):
        total, weight = found[2 * place : 2 * place + 2]
        yield _Number(kind, what, total, weight, _line(job, jaxpr, jaxpr.outvars[2 * place]))
    grown = found[2 * len(names) :]
    for (term, kind), growth in zip(terms, grown, strict=True) if terms[1:] else ():
        yield _Number(kind, "a term of Loss.sum", growth, found[1], _line(job, jaxpr, term))


def _terms(job: Job, jaxpr: Any) -> list[tuple[Any, str]]:
    """What a loss adds up in the end, with its kind: what parameters and the batch enter, or parameters alone.

    Noise for the gradient, a term that is linear in the parameters, belongs to a batch once.
    """
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    paths = [path[0] for path, _ in jax.tree.leaves_with_path(job.abstract)]
    learned = reached(jaxpr, [v for v, one in zip(jaxpr.invars, paths, strict=False) if one == _PARAMS])
    key, *batch = jaxpr.invars[len(paths) :]
    of_batch, drawn = reached(jaxpr, batch), reached(jaxpr, [key])
    found, atoms = [], [jaxpr.outvars[0]]
    while atoms:
        atom = atoms.pop()
        if isinstance(atom, core.Literal) or atom not in makers or atom not in learned:
            continue
        if makers[atom].primitive.name in _PASSED:
            atoms += makers[atom].invars
        elif atom in of_batch or atom not in drawn:
            found.append((atom, "term" if atom in of_batch else "penalty"))
    return found


def _line(job: Job, jaxpr: Any, atom: Any) -> int | None:
    """The line of the plugin that made a number of a trace; None where it is another file's."""
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    atoms = [atom]
    while made := [makers[one] for one in atoms if not isinstance(one, core.Literal) and one in makers]:
        if line := line_of(job, made[0]):
            return line
        atoms = made[0].invars
    return None
