"""Options of XLA's compiler for a train step: those of a recipe, or what `train.xla: auto` chooses for its devices.

They are given to the compilation of that step alone (`compiler_options` of JAX), never by `XLA_FLAGS`: nothing else of
a process sees them, and they are part of the keys of all caches.

Sources, by the letters behind the entries:

    M  MaxText (github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py, 2026): continuation fusion, which
       moves the bytes of collectives beside matrix products, for all-gathers and all-reduces; or sparse cores, which
       do so beside whatever else runs, chosen there for DeepSeek-V3 on v5p and Llama-3.1-70B of long rows on v6e
    T  the flags of libtpu 0.0.42.1 itself: the same for reduce-scatters, and the switch that makes these asynchronous
    J  JAX (github.com/jax-ml/jax, its tests of overlap on TPUs)
    N  NVIDIA JAX-Toolbox (github.com/NVIDIA/JAX-Toolbox, rosetta/docs/GPU_performance.md): overlap of communication
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from redco_cli.chips.target import chip_of, current_target
from redco_cli.errors import RecipeError
from redco_cli.recipe.explain import did_you_mean

Value = bool | int | float | str
Compiled = TypeVar("Compiled")
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""In what the compiler, or a device, says where memory does not suffice."""
Given = Literal["auto"] | Mapping[str, Value]
"""`train.xla` of a recipe."""

_FUSED_COLLECTIVES: dict[str, Value] = {
    "xla_enable_async_all_gather": True,  # M
    "xla_enable_async_all_reduce": True,  # M
    "xla_enable_async_reduce_scatter_fusion": True,  # T
    "xla_tpu_enable_async_collective_fusion": True,  # M
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,  # M
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,  # M
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,  # T
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,  # M
    "xla_tpu_overlap_compute_collective_tc": True,  # M
}
_SPARSE_CORES: dict[str, Value] = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,  # M, as one excludes the other
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,  # M
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False,  # M
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,  # M
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,  # J
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,  # for the torus of a v5p
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,  # M
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,  # M
    "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": True,  # J
    "xla_tpu_use_tc_device_shape_on_sc": True,  # M
    "xla_sc_disable_megacore_partitioning": True,  # M
    "xla_sc_enable_instruction_fusion": False,  # M
    "xla_lhs_prioritize_async_depth_over_stall": True,  # M, for copies to and from the host
}
"""The bytes of all collectives move beside work, reduce-scatters too, and several are begun at a time. Of the bytes of
Llama-3.1-70B (fsdp, rows of 8,192 tokens, remat `offload`, libtpu 0.0.42.1) 0.90, 0.87, 0.89 and 0.88 move beside
products or attention on 32, 64, 128 and 256 v6e, with continuation fusion 0.75, 0.73, 0.61 and 0.75; by the walk over
the programs a step takes 0.93, 0.96, 0.98 and 0.99 of the time. On 64 v5p 0.90 for 0.71, in 0.98 of the time."""
_WITHOUT_SPARSE_CORES = (
    "collectives fused with products instead of on sparse cores: beside what these would gather ahead it does not fit"
)
_GPU: dict[str, Value] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,  # N
    "xla_gpu_memory_limit_slop_factor": 115,
}
"""The scheduler that moves bytes beside work gives up on a program that needs more than a share of what 80 % of the
memory leaves beside its arguments: 95 % of that by default. At 115 % the whole is 90 to 92 % of the memory. On 8 H100
(Llama-3.1-8B, fsdp 8, micro-batches of 16 rows, JAX 0.10.2) rows of 8,192 tokens with remat `dots` overlap 0.80 of
their results' bytes instead of 0.43 for 0.8 GiB more, and rows of 4,096 without remat 0.88 instead of 0 for 1.0 GiB
more; by the walk over the programs a step takes 0.90 and 0.84 of the time.

The thresholds of N below which collectives are combined stay XLA's own. Llama-3.1-8B on 8 H100 (fsdp 8, 16 rows of
4,096 tokens, JAX 0.10.2) moves 80 % of its results' bytes beside work so; with all-gathers combined up to 128 MiB and
reduce-scatters up to 64 MiB 66 %, and 77 % where these are pipelined and loops double-buffered besides.

Not taken: `xla_gpu_experimental_parallel_collective_overlap_limit`, with which several collectives are begun at a time.
At 4 Mixtral-8x7B on 64 H100 (fsdp 64, 128 rows of 4,096 tokens) moves 88 % of its bytes beside work instead of 44 %,
and Llama-3.1-70B there (64 rows, remat `full`) 98 % instead of 68 %, for 0.93 and 0.98 of the time by the walk. But
several in flight had undefined results (openxla/xla, pull request 40520), users see gradients that differ from run to
run, and here it was never run."""
_AUTO: dict[str, dict[str, Value]] = {
    "v5e": _FUSED_COLLECTIVES,
    "v5p": _SPARSE_CORES,
    "v6e": _SPARSE_CORES,
    "tpu7x": {},  # its sparse cores move the bytes of collectives already, and exclude this fusion (M)
    "a100": _GPU,
    "h100": _GPU,
    "h200": _GPU,
    "b200": _GPU,
}
_LEVEL = "jax_optimization_level"
_LEVELS = {"O0": 9, "O1": 19, "O2": 29, "O3": 39}
"""Values of `xla.ExecutionOptions.EffortLevel` (xla/xla.proto), by the names that JAX has for them."""
_REFUSALS = (
    re.compile(r"No such compile option: '(?P<name>[^']*)'"),
    re.compile(r"While setting option (?P<name>\w+), (?P<why>.*)"),
    re.compile(r"(?P<why>Failed to parse .*) into flag (?P<name>\w+)"),
)


def step_options(given: Given) -> dict[str, Value]:
    """The options that a train step is compiled with, for the current target or else the devices of this machine.

    Args:
        given: `train.xla` of a recipe; options that are given there are all that there are.
    """
    if given != "auto":
        return dict(given)
    target = current_target()
    chip = chip_of(jax.devices()[0].device_kind) if target is None else target.chip
    return {} if chip is None else dict(_AUTO[chip.name])


class Fitting(NamedTuple, Generic[Compiled]):
    """What was compiled.

    Attributes:
        program: what was made.
        options: with which.
        changed: what was changed of those that were asked for, if anything was.
    """

    program: Compiled
    options: Mapping[str, Value]
    changed: str | None


def compile_fitting(make: Callable[[Mapping[str, Value]], Compiled], options: Mapping[str, Value]) -> Fitting[Compiled]:
    """Compiles a program with options; where it does not fit with those of sparse cores, with what needs less memory.

    Args:
        make: compiles it with the options that it is given.
        options: see `step_options`.

    Raises:
        JaxRuntimeError: what `make` raises; where nothing fits, of the options that need less.
    """
    try:
        return Fitting(make(options), options, None)
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error) or not options or not options.items() <= _SPARSE_CORES.items():
            raise
    return Fitting(make(_FUSED_COLLECTIVES), _FUSED_COLLECTIVES, _WITHOUT_SPARSE_CORES)


def compile_with(
    lowered: jax.stages.Lowered, options: Mapping[str, Value], where: Callable[[str], str]
) -> jax.stages.Compiled:
    """Compiles a program with options.

    Args:
        lowered: the program.
        options: see `step_options`.
        where: dotted recipe key to its place.

    Raises:
        RecipeError: the compiler does not know one of them, or not that value.
        JaxRuntimeError: it fails for another reason.
    """
    try:
        return lowered.compile(compiler_options=for_jax(options))
    except jax.errors.JaxRuntimeError as error:
        refused = _refused(str(error), options)
        if refused is None:
            raise
        name, why = refused
        remedy = did_you_mean(name, sorted({one for known in _AUTO.values() for one in known} - {name}))
        if remedy.startswith("known:") or why:
            remedy = "correct it, or leave it out; train.xla: {} leaves everything to the compiler"
        raise RecipeError(where(f"train.xla.{name}"), why or "the compiler knows no such option", remedy) from None


def accepted_options(given: Given, where: Callable[[str], str]) -> tuple[dict[str, Value], list[str]]:
    """The options for the devices of this machine, proved by compiling next to nothing with them.

    Args:
        given: `train.xla` of a recipe.
        where: dotted recipe key to its place.

    Returns:
        The options; and those that `auto` would choose, but the compiler here is too old or too new for.

    Raises:
        RecipeError: the compiler does not know one that was given.
    """
    options, unknown = step_options(given), list[str]()
    nothing = jax.jit(lambda: jnp.zeros(())).lower() if options else None
    while nothing is not None:
        try:
            compile_with(nothing, options, where)
            break
        except RecipeError as error:
            name = next((one for one in options if error.problems[0].where == where(f"train.xla.{one}")), None)
            if given != "auto" or name is None:
                raise
            unknown.append(name)
            del options[name]
    return options, unknown


def for_jax(options: Mapping[str, Value]) -> dict[str, Any] | None:
    """Options as JAX takes them (`compiler_options`); None where there are none.

    >>> for_jax({"xla_a": True, "jax_optimization_level": "O2"}), for_jax({})
    ({'xla_a': True, 'optimization_level': 29}, None)
    """
    found: dict[str, Any] = {name: value for name, value in options.items() if name != _LEVEL}
    if _LEVEL in options:  # which JAX calls so among its settings, and otherwise among the options of a compilation
        found["optimization_level"] = _LEVELS[str(options[_LEVEL])]
    return found or None


def _refused(said: str, options: Mapping[str, Value]) -> tuple[str, str] | None:
    """Which option a compiler complains of, and why, where it says more than that it knows none of that name."""
    for pattern in _REFUSALS:
        match = pattern.search(said)
        if match is not None and match["name"] in options:
            return match["name"], match.groupdict().get("why") or ""
    return None
