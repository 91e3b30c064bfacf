"""The loss of a job as a program, traced over an abstract batch, and which line of the plugin made what is in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from redco_cli.errors import PluginError
from redco_cli.job import Job
from redco_cli.placement import abstract_batch
from redco_cli.plugin.contract import Loss
from redco_cli.plugin.state import Variables
from redco_cli.sharding.batch_shards import batch_sharded

_LEFT = "uses an array that an earlier call of it left behind, in a global or a list: a traced array ends with its call"
_STATE = "keep what is to last in the plugin's state: init_state, Loss(..., stats={...}), update_state"


class LeftBehind(PluginError):
    """A loss takes up an array of a trace that has ended, whatever the size of its batch."""


def traced(job: Job, size: int, numbers: Callable[[Loss], Any], *, train: bool = True) -> tuple[Any, Any]:
    """Some numbers of the plugin's loss as a program of (variables, key, batch). Nothing is computed.

    Args:
        job: the job.
        size: number of examples, the leading dim of every array of the batch.
        numbers: what of a loss the program gives.
        train: of a training step; else of an evaluation.

    Returns:
        The closed jaxpr, and the abstract batch.

    Raises:
        PluginError: of the plugin.
        LeftBehind: it takes up what another trace has left.
    """

    def loss(variables: Variables, key: Any, arrays: Any) -> Any:
        return numbers(job.loss(variables, arrays, key, train=train))

    abstract = abstract_batch(job, size, "train" if train else "eval")
    with batch_sharded(size):
        closed = jax.make_jaxpr(loss)(job.abstract, jax.eval_shape(lambda: jax.random.key(0)), abstract)
    left = {v for v, one in zip(closed.jaxpr.constvars, closed.consts, strict=True) if isinstance(one, jax.core.Tracer)}
    for equation in closed.jaxpr.eqns if left else ():
        if any(not isinstance(atom, core.Literal) and atom in left for atom in equation.invars):
            raise LeftBehind(place_of(job, line_of(job, equation)), _LEFT, _STATE)
    return closed, abstract


def draws(job: Job, size: int) -> bool:
    """Whether anything of a training loss is drawn with the key of its step."""
    closed, _ = traced(job, size, lambda loss: (loss.sum, loss.weight))
    key = closed.jaxpr.invars[len(jax.tree.leaves(job.abstract))]
    drawn = reached(closed.jaxpr, [key])
    return any(not isinstance(atom, core.Literal) and atom in drawn for atom in closed.jaxpr.outvars)


def reached(jaxpr: Any, variables: Sequence[Any]) -> set[Any]:
    """What some variables of a program enter, these included: of its own equations, each taken as a whole.

    `sharding.program.examples` looks into calls too, where two of one function look alike to it.
    """
    found = set(variables)
    for equation in jaxpr.eqns:
        if any(not isinstance(atom, core.Literal) and atom in found for atom in equation.invars):
            found.update(equation.outvars)
    return found


def frames(equation: Any) -> list[tuple[str, int]]:
    """File and line of the calls that led to an equation, the innermost first."""
    traceback = equation.source_info.traceback
    return [] if traceback is None else [(frame.file_name, frame.line_num) for frame in traceback.frames]


def line_of(job: Job, equation: Any) -> int | None:
    """The line of the plugin that led to an equation; None where it is another file's."""
    own = os.path.realpath(job.plugin.file)
    return next((line for file, line in frames(equation) if os.path.realpath(file) == own), None)


def place_of(job: Job, line: int | None) -> str:
    """The loss for errors, with a line of it where one is known."""
    return f"{job.plugin.file}:{line}: loss_fn" if line else f"{job.plugin.file}: loss_fn"
