"""What a run is made of, gathered before its first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from redco_cli.chips.compiler import Value, accepted_options
from redco_cli.console import TrainProgress, note, warn
from redco_cli.console.collectives import options_text
from redco_cli.job import Job
from redco_cli.placement import Placement
from redco_cli.plugin.contract import Example
from redco_cli.plugin.state import Variables
from redco_cli.privacy.accounting import Budget
from redco_cli.privacy.gradient import private_gradient
from redco_cli.runtime.batch_shapes import BatchShapes
from redco_cli.runtime.mesh import replicated
from redco_cli.runtime.program import Announce, Program
from redco_cli.runtime.stopping.signals import StopRequest
from redco_cli.training.optimizer import Schedule
from redco_cli.training.records.metrics import Recorder
from redco_cli.training.saving.checkpoint import Checkpoints
from redco_cli.training.saving.meta import Meta
from redco_cli.training.state import TrainState
from redco_cli.training.step import make_train_step
from redco_cli.training.timeline import Timeline

Predict = Callable[[Variables, Sequence[Example], Sequence[int]], list[Any]]
"""Predictions of examples; calls with other numbers in the last argument draw other numbers."""


@dataclass(frozen=True)
class Setup:
    """What a run is made of; nothing of it changes while training.

    Attributes:
        job: recipe, plugin, model and data.
        placement: where everything lives.
        timeline: when things happen.
        optimizer: the optax transformation, clipping included.
        schedule: updates done to learning rate.
        privacy: what may be spent; None without differential privacy.
        recorder: writes `metrics.jsonl`.
        checkpoints: writes `checkpoint-<step>/`.
        progress: the live line.
        predict: variables and examples to predictions.
        stop: what a signal asked for.
        meta: what every checkpoint says of the run, as of step 0.
    """

    job: Job
    placement: Placement
    timeline: Timeline
    optimizer: Any
    schedule: Schedule
    privacy: Budget | None
    recorder: Recorder
    checkpoints: Checkpoints
    progress: TrainProgress
    predict: Predict
    stop: StopRequest
    meta: Meta


def train_program(setup: Setup, state: TrainState, announce: Announce) -> Program:
    """The train step of a run: a function of (state, batch), compiled with the options of `train.xla`.

    Args:
        setup: what the run is made of.
        state: on the mesh; its memory is what a call of the program takes over.
        announce: told of each compilation.
    """
    job, placement = setup.job, setup.placement
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    loss, updates = placement.loss(job), (setup.optimizer, setup.schedule)
    private = private_gradient(loss, setup.privacy, places.trainable, setup.meta.accepted)
    step = make_train_step(loss, *updates, job.recipe.seed, places.trainable, job.update_state, private)
    return Program(
        "train step",
        step,
        announce,
        shapes=BatchShapes(job.collate_place, warn, dims=2, limit=job.recipe.train.max_compilations),
        donate=(0,),
        out_shardings=(places, replicated(placement.mesh)),
        options=accepted_options(job.recipe.train.xla, job.where)[0],
        warn=warn,
    )


def prove_options(job: Job) -> dict[str, Value]:
    """The options that the train step is compiled with on this machine, said to the user where there are any.

    Raises:
        RecipeError: its compiler does not know one that the recipe gives.
    """
    options, unknown = accepted_options(job.recipe.train.xla, job.where)
    for name in unknown:
        warn(f"train.xla: auto leaves out {name}, which the compiler here does not know")
    if options:
        note(f"compiler options of the train step: {options_text(options)}")
    return options
