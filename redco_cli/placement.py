"""A job on its devices: where parameters, optimizer state and batches live, and how a step uses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_cli.adapters.quantized.layout import read_as_seen
from redco_cli.adapters.quantized.program import seen_params
from redco_cli.batch_sizes import micro_batch_size
from redco_cli.job import Job, first_batch
from redco_cli.models.several import constant_of
from redco_cli.plugin.contract import Batch, Loss, Params, Stage
from redco_cli.plugin.state import Variables
from redco_cli.recipe.schema import Recipe
from redco_cli.runtime.mesh import make_mesh
from redco_cli.sharding.batch_shards import batch_sharded
from redco_cli.sharding.decide.follow import follow, followers, used_alike
from redco_cli.sharding.decide.override import Override
from redco_cli.sharding.derive import make_plan
from redco_cli.sharding.gather.gathering import gathering, values
from redco_cli.sharding.plan import BATCH_AXES, Plan
from redco_cli.sharding.program.reading import Reading, parameters_only, read
from redco_cli.sharding.tensor_split import split_as


@dataclass(frozen=True)
class Placement:
    """Where everything lives.

    Attributes:
        mesh: the devices.
        plan: where each parameter lives and is used.
        reshard_after_forward: gathered parameters are forgotten after the forward pass, and gathered again in the
            backward pass.
    """

    mesh: Mesh
    plan: Plan
    reshard_after_forward: bool = False

    def shardings(self, specs: Any) -> Any:
        """A tree of `PartitionSpec`s as one of shardings on the mesh."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )

    @property
    def params(self) -> Any:
        """The sharding of each parameter."""
        return self.shardings(self.plan.specs)

    def following(self, state: Any, abstract: Params) -> Any:
        """The sharding of each leaf of a state that belongs to the parameters, such as an optimizer's.

        Args:
            state: arrays or abstract.
            abstract: the parameters.
        """
        return self.shardings(follow(state, abstract, self.plan.specs))

    def described(self, job: Job) -> dict[str, Any]:
        """The plan of parameters and of the plugin's state as plain JSON values."""
        rows = followers(job.abstract.state, self.plan, job.model.abstract)
        return self.plan.described() | ({"state": [row.described() for row in rows]} if rows else {})

    def loss(self, job: Job) -> Callable[[Variables, Batch, Any, bool], Loss]:
        """The job's loss of parameters and state that live in shards."""

        def loss(variables: Variables, batch: Batch, key: Any, train: bool) -> Loss:
            gathered = self.gathering(lambda variables, batch, key: job.loss(variables, batch, key, train))
            result: Loss = gathered(variables, batch, key)
            return result

        return loss

    def gathering(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of (variables, *arrays) that gathers parameters, and state that lies as they do, where used."""
        ways = math.prod(self.plan.mesh[axis] for axis in BATCH_AXES)

        def on_the_mesh(*arguments: Any) -> Any:
            with batch_sharded(ways), split_as(self.plan, self.mesh):
                return function(*arguments)

        def gathers(variables: Variables, *others: Any) -> Any:
            plain = values(variables)
            lives, used = (follow(plain, plain.params, specs) for specs in (self.plan.specs, self.plan.gathered))
            usage = used_alike(plain, plain.params, self.plan.usage)
            again = self.reshard_after_forward
            gathered = gathering(on_the_mesh, lives, used, self.mesh, usage=usage, reshard_after_forward=again)
            return gathered(variables, *others)

        return gathers


def place(job: Job, reading: Reading, sizes: Mapping[str, int], *, reshard_after_forward: bool = False) -> Placement:
    """Plans a job on the devices of this machine, or of all processes.

    Args:
        job: the job.
        reading: its program.
        sizes: of the mesh axes.
        reshard_after_forward: whether gathered parameters are gathered again in the backward pass.

    Raises:
        DeviceError: too few devices, or parameters that cannot be split so.
        RecipeError: `sharding.override` does not fit.
    """
    constants = constant_of(job.model)
    frozen = {one.path for one in reading.parameters if one.path.partition("/")[0] in constants}
    plan = make_plan(reading, sizes, override=overrides(job.recipe), where=job.where, frozen=frozen)
    return Placement(make_mesh(sizes, job.where), plan, reshard_after_forward)


def overrides(recipe: Recipe) -> tuple[Override, ...]:
    """`sharding.override` of a recipe."""
    return tuple(
        (one.path, [None if axes is None else axes.split("+") for axes in one.axes]) for one in recipe.sharding.override
    )


def read_loss(job: Job) -> Reading:
    """The logical axes of the parameters, from the plugin's loss over a global micro-batch of training."""
    return _read_loss(job, "train")


def read_evaluation(job: Job) -> Reading:
    """The logical axes of the parameters, from the plugin's loss of eval examples: there may be no others."""
    return _read_loss(job, "eval")


def _read_loss(job: Job, stage: Stage) -> Reading:
    def loss(variables: Variables, arrays: Any) -> Any:
        return job.loss(variables, arrays, jax.random.key(0), train=stage == "train").sum

    rows = micro_batch_size(job.recipe)
    with batch_sharded(rows):
        return read_program(loss, job.abstract, abstract_batch(job, rows, stage))


def read_prediction(job: Job) -> Reading:
    """The logical axes of the parameters, from the plugin's predictions of a batch."""

    def predict(variables: Variables, arrays: Any) -> Any:
        return job.prediction(variables, arrays, jax.random.key(0))

    return read_program(predict, job.abstract, abstract_batch(job, micro_batch_size(job.recipe), "predict"))


def read_program(function: Callable[[Variables, Any], Any], abstract: Variables, batch: Any) -> Reading:
    """The logical axes of the parameters, from a function of (variables, batch) over abstract values."""

    def positional(params: Params, batch: Any, state: Any, step: Any) -> Any:
        return function(Variables(params, state, step), batch)

    reading = read(positional, seen_params(abstract.params), batch, abstract.state, abstract.step)
    return read_as_seen(reading, abstract.params)


def read_nothing(job: Job) -> Reading:
    """The parameters of a job without its program: enough where nothing is split but the batch."""
    return read_as_seen(parameters_only(seen_params(job.model.abstract)), job.model.abstract)


def abstract_batch(job: Job, size: int, stage: Any = "train") -> Any:
    """The shapes of a batch like the first examples of a stage.

    Args:
        job: the job.
        size: number of examples, the leading dim of every array.
        stage: whose examples.
    """
    batch = first_batch(job, stage)
    return {name: jax.ShapeDtypeStruct((size, *np.shape(leaf)[1:]), leaf.dtype) for name, leaf in batch.items()}
