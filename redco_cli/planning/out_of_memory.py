"""Out of memory: what a step holds, in words of the model, and which edits of the recipe help, with what they save.

Savings are by plan (`sharding.predict.memory`), one edit at a time. Nothing here runs before memory has run out.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import jax

from redco_cli.batch_sizes import inference_batch_size, micro_batch_size
from redco_cli.chips.compiler import OUT_OF_MEMORY
from redco_cli.chips.target import current_platform
from redco_cli.console.numbers import format_bytes
from redco_cli.errors import DeviceError, RedcoError
from redco_cli.exporting.export import SETS_AT_ONCE
from redco_cli.job import Job, prepare
from redco_cli.placement import Placement
from redco_cli.planning.choice import memory_of_a_device
from redco_cli.planning.devices import devices_here
from redco_cli.planning.options import Option, Planner
from redco_cli.planning.parameter_groups import group_parameters
from redco_cli.planning.workload import job_workload
from redco_cli.runtime.mesh import data_shards
from redco_cli.sharding.plan import DATA, FSDP, TENSOR, Plan

Edit = tuple[int, str]
"""Bytes that one device saves, and the line of a recipe that saves them."""

_LARGEST = 3
_SHOWN_EDITS = 5
_LEAST = 0.01  # of all, below which neither a kind of memory nor a saving is told
_LONGEST = 160
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>bytes|[KMGT]i?B?)\b")
_STAGES = {"train": "training", "eval": "evaluation", "predict": "prediction", "export": "export"}
_FAILURES = (RedcoError, MemoryError, RuntimeError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError)
"""Of a plan, which must not hide why the run ended: it traces the program of a user, with no memory to spare."""
_POWERS = {"b": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@contextlib.contextmanager
def explaining_out_of_memory(
    job: Job, placement: Placement, stage: Literal["train", "eval", "predict", "export"]
) -> Iterator[None]:
    """Says, when memory runs out, of what it is full and what to change. Costs nothing as long as it does not.

    Args:
        job: what runs.
        placement: on what.
        stage: what it does.

    Raises:
        DeviceError: instead of what JAX or Python raised.
    """
    try:
        yield
    except MemoryError as error:
        raise _of_the_host(job, placement, stage, error) from error
    except (RedcoError, jax.errors.JaxRuntimeError) as error:
        reported = _reported(error)
        if reported is None:
            raise
        where = error.problems[0].where if isinstance(error, RedcoError) else _STAGES[stage]
        raise _shortage(job, placement, stage, where, str(reported)) from error


def _reported(error: BaseException | None) -> BaseException | None:
    """What the runtime raised for want of memory, if that is why there is an error."""
    while error is not None and not (OUT_OF_MEMORY in str(error) and type(error) is jax.errors.JaxRuntimeError):
        error = error.__cause__
    return error


def _shortage(job: Job, placement: Placement, stage: str, where: str, reported: str) -> DeviceError:
    problem, each = f"the devices ran out of memory: {_first_line(reported)}", placement.plan.bytes_per_device
    try:
        if stage == "train":
            now = _option(job, placement.plan, reshard_after_forward=placement.reshard_after_forward)
            held, total = _held(now), now.memory.total
            edits = [edit for find in _TRAIN_EDITS for edit in find(job, placement, now)]
            if where == "eval step":
                edits += _smaller_batch(job, placement, "eval", reported)
        elif stage == "export":
            held, total = f"{SETS_AT_ONCE} times its {_parameters(placement.plan)}", SETS_AT_ONCE * each
            edits = []
        else:
            held, total = _parameters(placement.plan), each
            batch: Literal["eval", "predict"] = "eval" if where == "eval step" else "predict"
            edits = _smaller_batch(job, placement, batch, reported) + _split_parameters(placement)
    except _FAILURES as error:
        remedy = "lower train.micro_batch_size or data.max_length, set model.dtype: bfloat16 or train.remat: full"
        return DeviceError(where, f"{problem} (and there is no plan of it: {error})", remedy)
    memory = memory_of_a_device()
    of = "" if memory is None else f" of {format_bytes(memory)}"
    needs = f"by plan one device needs {format_bytes(total)}{of}: {held}"
    helpful = sorted((edit for edit in edits if edit[0] > _LEAST * total), reverse=True)[:_SHOWN_EDITS]
    lines = [f"{text} saves about {format_bytes(saved)}" for saved, text in helpful]
    return DeviceError(where, f"{problem}\n  {needs}", "\n  -> ".join(lines or ["take more or larger devices"]))


def _first_line(text: str) -> str:
    line = text.splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _held(now: Option) -> str:
    """The kinds of memory of a train step, largest first."""
    found, workload = now.memory, now.workload
    examples = f"{now.micro_batch_size} examples"
    if workload.seq_length is not None:
        examples += f" of {workload.seq_length} tokens"
    kinds = {
        _parameters(now.plan): found.parameters,
        "gradients": found.gradients,
        "optimizer state": found.optimizer + found.copies,
        "state of the plugin": found.plugin_state,
        f"activations of {examples} (remat {workload.remat})": found.activations,
        f"logits of {examples}": found.logits,
        "gathered parameters": found.gathered,
        "the batch": found.batch,
    }
    told = sorted((kind for kind in kinds.items() if kind[1] > _LEAST * found.total), key=lambda kind: -kind[1])
    return "; ".join(name if name == _parameters(now.plan) else f"{name} {format_bytes(size)}" for name, size in told)


def _parameters(plan: Plan) -> str:
    """Bytes of the parameters on one device, with the groups of them that have most."""
    groups = sorted(group_parameters(plan.rows, plan.mesh), key=lambda group: -group.bytes_per_device)[:_LARGEST]
    largest = ", ".join(f"{group.path} {format_bytes(group.bytes_per_device)}" for group in groups)
    return f"parameters {format_bytes(plan.bytes_per_device)} (largest: {largest})"


def _option(job: Job, plan: Plan, *, reshard_after_forward: bool, micro: int | None = None) -> Option:
    """A job on a mesh, with its memory by plan."""
    workload = replace(job_workload(job), recomputing=None)
    size = micro or micro_batch_size(job.recipe)
    eager = current_platform() == "cpu"
    devices = devices_here(math.prod(plan.mesh.values()), None, eager=eager)
    return Planner(workload, devices, size).option(plan, size, reshard_after_forward=reshard_after_forward)


def _smaller_micro_batch(job: Job, placement: Placement, now: Option) -> list[Edit]:
    ways, batch = data_shards(placement.mesh), job.recipe.train.global_batch_size
    sizes = [size for size in range(ways, now.micro_batch_size // 2 + 1, ways) if batch % size == 0]
    if not sizes or job.plugin.whole_batch:
        return []
    then = _option(job, placement.plan, reshard_after_forward=placement.reshard_after_forward, micro=sizes[-1])
    return [(now.memory.total - then.memory.total, f"train.micro_batch_size: {sizes[-1]}")]


def _recomputing(job: Job, placement: Placement, now: Option) -> list[Edit]:
    return [] if now.workload.remat == "full" else _edited(job, placement, now, "train", "remat", "full")


def _lower_precision(job: Job, placement: Placement, now: Option) -> list[Edit]:
    if job.recipe.model.dtype != "float32":
        return []
    return _edited(job, placement, now, "model", "dtype", "bfloat16")


def _shorter_examples(job: Job, placement: Placement, now: Option) -> list[Edit]:
    length = now.workload.seq_length
    if length is None or length < 2:
        return []
    return _edited(job, placement, now, "data", "max_length", length // 2)


def _smaller_state(job: Job, placement: Placement, now: Option) -> list[Edit]:
    if job.plugin.optimizer_fn is not None or job.recipe.train.optimizer == "adafactor":
        return []
    return _edited(job, placement, now, "train", "optimizer", "adafactor")


def _edited(job: Job, placement: Placement, now: Option, section: str, key: str, value: Any) -> list[Edit]:
    """What the step would need with one other value in the recipe; nothing where that cannot be."""
    changed = getattr(job.recipe, section).model_copy(update={key: value})
    loaded = replace(job.loaded, recipe=job.recipe.model_copy(update={section: changed}))
    try:
        then = _option(
            prepare(loaded, stages=("train",)), placement.plan, reshard_after_forward=placement.reshard_after_forward
        )
    except RedcoError:  # a model that cannot recompute, a plugin that needs its length
        return []
    return [(now.memory.total - then.memory.total, f"{section}.{key}: {value}")]


def _other_meshes(job: Job, placement: Placement, now: Option) -> list[Edit]:
    """All devices, with parameters split over them in the two plain ways; the better one."""
    count, found = jax.device_count(), []
    planner = Planner(now.workload, devices_here(count, None), now.micro_batch_size)
    for axis in (FSDP, TENSOR):
        sizes = {DATA: 1, FSDP: 1, TENSOR: 1, axis: count}
        if now.micro_batch_size % sizes[FSDP] or sizes == dict(now.plan.mesh) or count == 1:
            continue
        try:
            then = _option(job, planner.plan(sizes), reshard_after_forward=False)
        except RedcoError:  # heads, or an override, that these devices cannot share
            continue
        found.append((now.memory.total - then.memory.total, f"mesh: {{{axis}: {count}}}"))
    return [max(found)] if found else []


_TRAIN_EDITS: tuple[Callable[[Job, Placement, Option], list[Edit]], ...] = (
    _smaller_micro_batch,
    _recomputing,
    _lower_precision,
    _shorter_examples,
    _smaller_state,
    _other_meshes,
)


def _smaller_batch(job: Job, placement: Placement, stage: Literal["eval", "predict"], reported: str) -> list[Edit]:
    """Half a batch saves about half of what was asked for at once: all that a forward pass holds."""
    size, shards = inference_batch_size(job, placement.mesh, stage), data_shards(placement.mesh)
    asked = _asked(reported)
    half = size // 2 // shards * shards
    return [(asked - asked * half // size, f"{stage}.batch_size: {half}")] if half and asked else []


def _split_parameters(placement: Placement) -> list[Edit]:
    plan, count = placement.plan, jax.device_count()
    return [(plan.bytes_per_device - plan.bytes // count, f"mesh: {{{FSDP}: {count}}}")] if count > 1 else []


def _asked(reported: str) -> int | None:
    """The first amount of memory in a message."""
    match = _AMOUNT.search(reported)
    return None if match is None else round(float(match["number"]) * 1024 ** _POWERS[match["unit"][0]])


def _of_the_host(job: Job, placement: Placement, stage: str, error: MemoryError) -> DeviceError:
    problem = f"this process ran out of the memory of its machine{f': {error}' if str(error) else ''}"
    if stage == "export":
        held = f"an export holds up to {SETS_AT_ONCE} times its parameters, {format_bytes(placement.plan.bytes)}"
        return DeviceError("host memory", f"{problem}; {held}", "give the process more")
    data: Mapping[str, Any] = job.recipe.data.model_dump()
    buffered = f", data.shuffle_buffer (now {data['shuffle_buffer']})" if data["streaming"] else ""
    remedy = f"lower data.workers (now {data['workers']}){buffered} or train.global_batch_size"
    remedy += "" if data["streaming"] else ", or set data.streaming: true to hold less of the data"
    return DeviceError("host memory", problem, f"{remedy}; or give the process more")
