"""How many examples go through a model at once: in training, evaluation and prediction."""

from __future__ import annotations

from typing import Literal

from jax.sharding import Mesh

from redco_cli.job import Job
from redco_cli.recipe.schema import Recipe
from redco_cli.runtime.mesh import check_divisible, data_shards


def micro_batch_size(recipe: Recipe) -> int:
    """Examples per forward and backward pass over all devices."""
    micro = recipe.train.micro_batch_size
    return recipe.train.global_batch_size if micro == "auto" else micro


def check_sizes(job: Job, mesh: Mesh) -> None:
    """Refuses batch sizes that the devices cannot share evenly, of every stage at once.

    Raises:
        DeviceError: naming the recipe key.
    """
    is_given = job.recipe.train.micro_batch_size != "auto"
    key, what = ("micro_batch_size", "a micro-batch") if is_given else ("global_batch_size", "a global batch")
    check_divisible(micro_batch_size(job.recipe), mesh, job.where(f"train.{key}"), what)
    inference_batch_size(job, mesh, "eval")
    inference_batch_size(job, mesh, "predict")


def inference_batch_size(job: Job, mesh: Mesh, stage: Literal["eval", "predict"]) -> int:
    """Examples per evaluation or prediction batch over all devices, a multiple of the data axis.

    Raises:
        DeviceError: the recipe gives a size that the devices cannot share evenly.
    """
    keys = ("eval.batch_size",) if stage == "eval" else ("predict.batch_size", "eval.batch_size")
    for key in keys:
        size = getattr(job.recipe, key.split(".")[0]).batch_size
        if size != "auto":
            check_divisible(size, mesh, job.where(key), key)
            return int(size)
    shards = data_shards(mesh)
    return -(-micro_batch_size(job.recipe) // shards) * shards
