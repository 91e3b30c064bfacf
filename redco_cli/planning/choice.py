"""Lays a job out over the devices at hand: as its recipe says, and what that leaves open as their memory needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from redco_cli.console import note, warn
from redco_cli.console.numbers import format_bytes
from redco_cli.console.plan import mesh_text
from redco_cli.examples import stages_of
from redco_cli.job import Job, prepare
from redco_cli.placement import Placement, place, read_loss, read_nothing
from redco_cli.planning.devices import devices_here
from redco_cli.planning.options import Option
from redco_cli.planning.targets.fastest import best_ways, fastest_here, own_target, target_here
from redco_cli.planning.workload import job_workload
from redco_cli.runtime.mesh import make_mesh
from redco_cli.runtime.peers.multihost import process_allgather
from redco_cli.sharding.plan import AXES, DATA, FSDP, TENSOR
from redco_cli.sharding.program.reading import Reading


def choose_placement(job: Job) -> tuple[Job, Placement]:
    """A job to train, on its devices.

    Where devices say how much memory they have, `mesh: auto`, `train.remat: auto` and `train.micro_batch_size: auto`
    become what fits and takes least time: by plan, or with `planning: compile` by the compiled programs of the best few
    of these. Others, such as CPUs, each hold everything and share the batch.

    Returns:
        The job, with what was chosen in its recipe, and where everything lives.

    Raises:
        RedcoError: the mesh fits neither the devices nor the model; or no speeds of the devices are known, by which
            compiled programs could be compared.
    """
    memory = _least_memory()
    if job.recipe.planning == "compile":
        own_target(job.where)
    if memory is None:
        return job, recipe_placement(job, read_loss)
    section = job.recipe.mesh
    sizes = None if section == "auto" else section.model_dump()
    ways, _ = best_ways(job_workload(job), devices_here(_count(sizes), memory), sizes, target_here())
    best = fastest_here(ways, memory) if job.recipe.planning == "compile" else ways[0]
    _tell(job, best, memory)
    mesh = make_mesh(best.plan.mesh, job.where)
    return _with_choices(job, best), Placement(mesh, best.plan, best.reshard_after_forward)


def recipe_placement(job: Job, read: Callable[[Job], Reading]) -> Placement:
    """A job on the mesh of its recipe; `auto` shares the batch among all devices.

    Args:
        job: the job.
        read: its program, which is looked at only where it decides something.

    Raises:
        RedcoError: the mesh fits neither the devices nor the model.
    """
    section = job.recipe.mesh
    given = {DATA: len(jax.devices())} if section == "auto" else section.model_dump()
    sizes = {axis: given.get(axis, 1) for axis in AXES}
    splits = sizes[FSDP] * sizes[TENSOR] > 1
    return place(job, read(job) if splits else read_nothing(job), sizes)


def memory_of_a_device() -> int | None:
    """Bytes of a device of this machine; None where it does not say, as a CPU."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)


def _least_memory() -> int | None:
    """The same on all processes, which must choose alike though their devices may not have quite as much."""
    limits = process_allgather("memory of a device", memory_of_a_device())
    return None if None in limits else min(limits)


def _count(sizes: Mapping[str, int] | None) -> int:
    if sizes is None:
        return len(jax.devices())
    count = 1
    for size in sizes.values():
        count *= size
    return count


def _tell(job: Job, best: Option, memory: int) -> None:
    needs = f"{format_bytes(best.memory.total)} of {format_bytes(memory)} per device"
    how = f"mesh {mesh_text(best.plan.mesh)}, micro-batch {best.micro_batch_size}, remat {best.workload.remat}"
    note(f"{how}: {needs} by plan")
    if not best.fits(memory):
        warn(f"by plan this does not fit; redco inspect-sharding {job.loaded.path} shows what to change")
    for warning in best.plan.warnings:
        warn(warning)


def _with_choices(job: Job, best: Option) -> Job:
    """The job with remat and micro-batch size as chosen, where its recipe left them open."""
    train = job.recipe.train
    chosen: dict[str, Any] = {}
    if train.micro_batch_size == "auto" and best.micro_batch_size != train.global_batch_size:
        chosen["micro_batch_size"] = best.micro_batch_size
    if train.remat == "auto" and best.workload.remat != "none":
        chosen["remat"] = best.workload.remat
    if not chosen:
        return job
    recipe = job.recipe.model_copy(update={"train": train.model_copy(update=chosen)})
    origins = {**job.loaded.origins, **{f"train.{key}": "chosen for the memory of the devices" for key in chosen}}
    loaded = replace(job.loaded, recipe=recipe, origins=origins)
    return prepare(loaded, stages=stages_of(recipe), known=job) if "remat" in chosen else replace(job, loaded=loaded)
