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
from redco_cli.training.cuts.trace import LeftBehind, line_of, place_of, traced

_PRIMES = (17, 19, 23)
"""So many times as many examples; another number that two of them divide is none that a third does."""
_SUM, _TERM = "Loss.sum", "a term of Loss.sum"
_MEAN = "does not grow with the number of examples, as a mean does not, but"
_SUM_REMEDY = "give the sum, Loss(losses.sum(), losses.size); or return the mean alone, losses.mean()"
_TERM_REMEDY = "give the sum of this term too, or the mean times Loss.weight"
_PENALTY_REMEDY = "give it times Loss.weight"
_PAIR_REMEDY = "give the sum over the examples, such as right.sum(), or a pair of value and weight: (value, 1)"
_PARAMS = jax.tree_util.GetAttrKey("params")
_PASSED = frozenset({"add", "sub", "add_any", "convert_element_type", "copy", "neg"})


@dataclass(frozen=True)
class _Number:
    """One of the numbers of a loss: how it grows with the examples, how what it is divided by does, and its line."""

    what: str
    total: Growth
    weight: Growth
    line: int | None
    remedy: str


def refuse_means(job: Job) -> list[Problem]:
    """Refuses a loss, a metric or a stat that is a mean where the contract asks for the sum beside its weight.

    Nothing is computed: the loss is traced over a few abstract batches, of training and, where there are examples for
    it, of evaluation. What cannot be told is let pass.

    Returns:
        What is to be told: that the loss grows with its batch, where that is cut; that a penalty does not.

    Raises:
        PluginError: naming the first of them.
    """
    found = _agreed(job, train=True)
    _refuse(job, found, "")
    if job.eval_rows is not None:
        _refuse(job, _agreed(job, train=False), " where train is False")
    loss, told = found[0] if found else None, _penalties(job, found)
    is_whole = job.plugin.whole_batch or job.recipe.train.global_batch_size == 1 or job.recipe.privacy is not None
    if is_whole or loss is None or loss.total is None or loss.weight is None:
        return told
    if loss.total == ZERO or loss.total <= loss.weight:
        return told
    problem = "the loss grows with the number of examples in its batch: the result depends on how the batch is cut"
    remedy = "return the mean, losses.mean(), or Loss(losses.sum(), losses.size)"
    return [*told, Problem(place_of(job, loss.line), problem, remedy)]


def _refuse(job: Job, found: Sequence[_Number], when: str) -> None:
    for number in found:
        if number.total == 0 and number.weight == 1 and number.remedy != _PENALTY_REMEDY:
            divisor = "a weight that does" if number.remedy == _PAIR_REMEDY else "Loss.weight, which does"
            problem = (
                f"{number.what}{when} {_MEAN} is divided by {divisor}: it would be too small by the size of the batch"
            )
            raise PluginError(place_of(job, number.line), problem, number.remedy)


def _penalties(job: Job, found: Sequence[_Number]) -> list[Problem]:
    problem = (
        f"{_TERM} does not grow with the examples, but Loss.weight does: the larger a batch is, the less it counts"
    )
    penalties = [one for one in found if one.remedy == _PENALTY_REMEDY and (one.total, one.weight) == (0, 1)]
    return [Problem(place_of(job, one.line), problem, one.remedy) for one in penalties]


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
            (f"the stat {name}{jax.tree_util.keystr(path)}", leaf, weight)
            for name, (total, weight) in loss.stats.items()
            for path, leaf in jax.tree.leaves_with_path(total)
        ]
        metrics = [(f"the metric {name}", *pair) for name, pair in loss.metrics.items()]
        named = [(_SUM, loss.sum, loss.weight), *metrics, *stats]
        names[:] = [what for what, *_ in named]
        return [pair for _, *pair in named]

    names: list[str] = []
    closed, _ = traced(job, micro_batch_size(job.recipe) * prime, numbers, train=train)
    jaxpr = closed.jaxpr
    terms = _terms(job, jaxpr) if train else []
    found = growths(closed, [0] * len(jaxpr.invars), prime, [*jaxpr.outvars, *(term for term, _ in terms)])
    for place, what in enumerate(names):
        line, remedy = _line(job, jaxpr, jaxpr.outvars[2 * place]), _PAIR_REMEDY if place else _SUM_REMEDY
        yield _Number(what, found[2 * place], found[2 * place + 1], line, remedy)
    grown = found[2 * len(names) :]
    for (term, of_batch), growth in zip(terms, grown, strict=True) if 1 in grown else ():
        yield _Number(_TERM, growth, found[1], _line(job, jaxpr, term), _TERM_REMEDY if of_batch else _PENALTY_REMEDY)


def _terms(job: Job, jaxpr: Any) -> list[tuple[Any, bool]]:
    """What a loss adds up in the end, parameters entering: of the batch, or drawn with nothing, as a penalty is.

    Noise for the gradient, a term that is linear in the parameters, belongs to a batch once.
    """
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    paths = [path[0] for path, _ in jax.tree.leaves_with_path(job.abstract)]
    learned = _reached(jaxpr, [v for v, one in zip(jaxpr.invars, paths, strict=False) if one == _PARAMS])
    key, *batch = jaxpr.invars[len(paths) :]
    of_batch, drawn = _reached(jaxpr, batch), _reached(jaxpr, [key])
    found, atoms = [], [jaxpr.outvars[0]]
    while atoms:
        atom = atoms.pop()
        if isinstance(atom, core.Literal) or atom not in makers or atom not in learned:
            continue
        if makers[atom].primitive.name in _PASSED:
            atoms += makers[atom].invars
        elif atom in of_batch or atom not in drawn:
            found.append((atom, atom in of_batch))
    return found


def _reached(jaxpr: Any, variables: Sequence[Any]) -> set[Any]:
    """What some variables of a program enter, these included."""
    found = set(variables)
    for equation in jaxpr.eqns:
        if any(not isinstance(atom, core.Literal) and atom in found for atom in equation.invars):
            found.update(equation.outvars)
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
