"""The process that compiles for a target: a request comes in on its standard input, JSON lines go out.

{"stage": "tracing"}                        what it does from now on
{"compiled": {...}, "timeline": [...]}      how it ended: what the compiler says, and what happens in the program,
{"too_large": {"needed": 48.., ...}}        that its memory does not suffice,
{"problems": [[where, problem, remedy]]}    or what else is wrong
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import jax

from redco_cli.chips.compiler import OUT_OF_MEMORY, Value, compile_fitting, compile_with
from redco_cli.chips.target import Target, parse_target, targeting
from redco_cli.errors import RedcoError
from redco_cli.models.decoder.block import Remat
from redco_cli.planning.compiled import Program, Way, program_of, read_step, trace_step
from redco_cli.planning.devices import Devices
from redco_cli.planning.options import Planner
from redco_cli.planning.report import Compiled
from redco_cli.planning.targets.deviceless import places_of, target_mesh
from redco_cli.planning.targets.scheduled import schedule_with
from redco_cli.planning.workload import Workload, find_workload
from redco_cli.runtime.cache import cache_directory
from redco_cli.sharding.batch_shards import batch_sharded
from redco_cli.sharding.compiled.events import to_json
from redco_cli.sharding.compiled.timeline import Place, timeline
from redco_cli.sharding.program.branches import by_number

_NEEDED = re.compile(
    r"(?:Used |temporaries \()(?P<used>[\d.]+)(?P<unit>[KMGT])(?: of |\) exceeds available HBM \()"
    r"(?P<limit>[\d.]+)(?P<of>[KMGT])"
)
_NO_TILES, _TRITON = "Couldn't find output tile sizes", "xla_gpu_enable_triton_gemm"
"""Triton's tiles are found by trying them out; without a device XLA takes some that not every number of rows has."""
_WITHOUT_TRITON = f"{_TRITON}=false: XLA has no tiles for a product of this step without a GPU to try them on"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_READ = {"gpu": 7, "tpu": 8}
"""Counted up where something else is read of a program compiled for it: what is kept is read anew then."""
_ADDRESS = re.compile(r'(?<=backend_config = ")\d{9,}(?=")|0x[0-9a-f]{6,}')
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compile.

    Attributes:
        target: as it is typed.
        workload: arguments of `find_workload`.
        remat: what is recomputed where the workload leaves that open.
        mesh: axis to size.
        micro_batch_size: examples that go through the model at once.
        reshard_after_forward: gathered parameters are gathered again in the backward pass.
        options: of XLA's compiler, as a recipe names them.
        cycles: whether a TPU's program is compiled to its end, for the cycles that its compiler estimates then.
    """

    target: str
    workload: Mapping[str, Any]
    remat: Remat
    mesh: Mapping[str, int]
    micro_batch_size: int
    reshard_after_forward: bool
    options: Mapping[str, Any]
    cycles: bool = False


def serve() -> None:
    """Reads one request, and answers it. Whatever a library prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        request = Request(**json.load(sys.stdin))
        say(**answer(request, lambda stage: say(stage=stage)))
    except RedcoError as error:
        say(problems=[[one.where, one.problem, one.remedy] for one in error.problems])
    else:
        os._exit(0)  # a TPU's compiler may still be at work


def answer(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    """How a request ends.

    Args:
        request: what to compile.
        tell: takes what is being done from now on.

    Raises:
        RedcoError: there is no such model, no such devices, or no such option of their compiler.
    """
    target = parse_target(request.target, "--target")
    with targeting(target):
        tell(f"tracing the step for {target}")
        workload = find_workload(**request.workload)
        if request.remat != "none" and workload.recomputing is not None:
            workload = workload.recomputing(request.remat)
        planner = Planner(workload, Devices(target.devices, target.groups, None), request.micro_batch_size)
        way = Way(workload, planner.plan(request.mesh), request.micro_batch_size, request.reshard_after_forward)
        mesh = target_mesh(target, request.mesh)
        traced = trace_step(way, mesh)
        lowered = traced.lower()
    key = _key(lowered.as_text(), str(traced.jaxpr), target, request)
    known = cache_directory().parent / "targets" / f"{key}.json"
    if known.is_file():
        found: dict[str, Any] = json.loads(known.read_text())
        return found
    tell(f"compiling the step for {target}")
    places, in_order = places_of(target, mesh), target.chip.platform == "tpu" and not request.cycles
    make, shares = schedule_with if in_order else compile_whole, partial(_shares, workload, target)
    try:
        found = compile_lowered(lowered, request.mesh, request.options, places, workload.where, make, shares)
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error) or _TRITON in request.options:
            raise
        options = {**request.options, _TRITON: False}
        found = compile_lowered(lowered, request.mesh, options, places, workload.where, make, shares)
        if "compiled" in found:
            found["compiled"]["changed"] = _WITHOUT_TRITON
    known.parent.mkdir(parents=True, exist_ok=True)
    part = known.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(found))
    part.replace(known)
    return found


def compile_whole(lowered: jax.stages.Lowered, options: Mapping[str, Value], where: Callable[[str], str]) -> Program:
    """Compiles a program to its end; see `compile_with`."""
    return program_of(compile_with(lowered, options, where))


def compile_lowered(
    lowered: jax.stages.Lowered,
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
    places: list[Place],
    where: Callable[[str], str],
    make: Callable[[jax.stages.Lowered, Mapping[str, Value], Callable[[str], str]], Program] = compile_whole,
    shares: Callable[[], Mapping[int, Sequence[float]]] = dict,
) -> dict[str, Any]:
    """What a compiler makes of a step, as `answer` says it.

    Args:
        lowered: the step.
        mesh: axis to size.
        options: of the compiler, as a recipe names them.
        places: of the devices, in the order of the mesh.
        where: dotted recipe key to its place.
        make: compiles it, to its end or as far as is needed to read it.
        shares: how often branches are taken, see `timeline`; asked for where there are any.

    Raises:
        RecipeError: the compiler does not know one of the options.
    """
    began = time.perf_counter()
    try:
        program, _, changed = compile_fitting(lambda tried: make(lowered, tried, where), options)
    except jax.errors.JaxRuntimeError as error:
        too_large = _too_large(str(error))
        if too_large is None:
            raise
        return {"too_large": too_large}
    taken = shares() if " conditional(" in program.text else {}
    found: Compiled = dataclasses.replace(read_step(program, mesh, time.perf_counter() - began, taken), changed=changed)
    events = timeline(program.text, mesh, places, taken)
    return {"compiled": dataclasses.asdict(found), "timeline": to_json(events)}


def _shares(workload: Workload, target: Target) -> dict[int, tuple[float, ...]]:
    """How often the branches of a loss are taken, by their number."""
    size, key = workload.micro_batch_size or workload.global_batch_size, jax.random.key(0)
    with targeting(target), batch_sharded(1):
        return by_number(
            jax.make_jaxpr(lambda given, batch: workload.loss(given, batch, key).sum)(
                workload.abstract, workload.batch(size)
            )
        )


def _too_large(said: str) -> dict[str, Any] | None:
    """What a compiler says of a program that its device cannot hold."""
    if OUT_OF_MEMORY not in said:
        return None
    match = _NEEDED.search(said)
    if match is None:
        return {"needed": None, "limit": None, "said": said.splitlines()[0]}
    needed, limit = (float(match[one]) * _UNITS[match[unit]] for one, unit in (("used", "unit"), ("limit", "of")))
    return {"needed": int(needed), "limit": int(limit), "said": said.splitlines()[0]}


def _key(lowered: str, traced: str, target: Target, request: Request) -> str:
    """Of everything that decides what the compiler makes, the same in every process.

    Kernels that split over devices by a rule of their own are in a lowered program by an address: the traced one says
    what they compute, of which addresses do not count either.
    """
    versions = [_version(name) for name in _COMPILERS]
    asked = json.dumps([request.options, request.cycles], sort_keys=True)
    parts = [
        *(_ADDRESS.sub("", text) for text in (lowered, traced)),
        repr(target),
        asked,
        str(versions),
        str(_READ[target.chip.platform]),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
