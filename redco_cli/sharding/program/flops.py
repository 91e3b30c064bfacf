"""How many operations the matrix products of a traced program take, and what they write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jax
from jax.extend import core

from redco_cli.sharding.bands import causal_share, flash_share, window_share
from redco_cli.sharding.program.branches import Shares, branch_shares
from redco_cli.sharding.program.reference import is_causal, reference_jaxpr
from redco_cli.sharding.scans import scan_counts

_CAUSAL = (2, 3)
"""Masks of cuDNN's attention under which half of the scores is computed (`MaskType` in JAX)."""
_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")
_FUSED = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")


@dataclass(frozen=True)
class Products:
    """The matrix products of a program.

    Attributes:
        flops: two operations for each multiplication.
        attention: part of them, of a fused kernel.
        written: bytes of all results, those of a fused kernel its own.
        width: dims of a head, of most of the attention; 0 without any.
        summed: bytes of arrays that loops add to, counted in each turn: each is read and written there.
    """

    flops: int = 0
    attention: int = 0
    written: int = 0
    width: int = 0
    summed: int = 0

    def __add__(self, other: Products) -> Products:
        width = max((self, other), key=lambda one: one.attention).width
        sums = self.flops + other.flops, self.attention + other.attention, self.written + other.written
        return Products(*sums, width, self.summed + other.summed)

    def __mul__(self, times: float) -> Products:
        flops, attention = int(times * self.flops), int(times * self.attention)
        return Products(flops, attention, int(times * self.written), self.width, int(times * self.summed))


def count_products(function: Callable[..., Any], *arguments: Any) -> Products:
    """The matrix products of a function that JAX can trace; nothing is computed.

    Loops count as often as they turn, those whose number of turns depends on values once. Branches count by how often
    each is taken, and where that depends on values the dearest does. Recomputation in a backward pass does not: count
    the forward pass. Attention counts the scores that a fused kernel computes: half of them under a causal mask, and
    fewer within a window.

    Args:
        function: of the arguments.
        arguments: arrays or `jax.ShapeDtypeStruct`s.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from redco_cli.sharding.program.flops import count_products
        >>> x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32)
        >>> count_products(lambda x, w: jax.nn.relu(x @ w), x, w)
        Products(flops=1024, attention=0, written=128, width=0, summed=0)
    """
    return products_of(jax.make_jaxpr(function)(*arguments))


def products_of(closed_jaxpr: Any) -> Products:
    """The same of a program that is traced already; of a backward pass, fused attention is not counted.

    Args:
        closed_jaxpr: as `jax.make_jaxpr` returns it.
    """
    return _of_jaxpr(closed_jaxpr.jaxpr, branch_shares(closed_jaxpr))


def gradient_flops(closed_jaxpr: Any, is_trained: Sequence[bool]) -> int:
    """Operations of the products of a backward pass: as many as forward for each operand that a gradient goes to.

    What is recomputed is not counted, nor what is known to be frozen: a gradient goes to what is computed of trained
    inputs, unless the program stops it. Functions with a derivative of their own are taken to have the products that
    another derivative would have.

    Args:
        closed_jaxpr: of the loss, as `jax.make_jaxpr` returns it.
        is_trained: for each of its inputs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from redco_cli.sharding.program.flops import gradient_flops
        >>> x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32)
        >>> gradient_flops(jax.make_jaxpr(lambda x, w: jax.nn.relu(x @ w).sum())(x, w), [False, True])
        1024
    """
    given = [_Path.OPEN if yes else _Path.NONE for yes in is_trained]
    wanted = [True] * len(closed_jaxpr.jaxpr.outvars)
    return _gradients(closed_jaxpr.jaxpr, given, wanted, branch_shares(closed_jaxpr))[0]


class _Path(IntEnum):
    """The way from an array to what is trained."""

    NONE = 0
    STOPPED = 1
    OPEN = 2


def _gradients(jaxpr: Any, given: Sequence[_Path], wanted: Sequence[bool], shares: Shares) -> tuple[int, list[_Path]]:
    """Operations, and the paths of its outputs; `wanted` are those that have a gradient."""
    paths, total, reached = dict(zip(jaxpr.invars, given, strict=True)), 0, _reached(jaxpr, wanted)

    def path(atom: Any) -> _Path:
        return _Path.NONE if isinstance(atom, core.Literal) else paths.get(atom, _Path.NONE)

    for equation in jaxpr.eqns:
        operands, results = [path(atom) for atom in equation.invars], [x in reached for x in equation.outvars]
        if any(operands) and any(results):
            flops, found = _gradients_of(equation, operands, results, shares)
            total += flops
            paths.update(zip(equation.outvars, found, strict=True))
        elif any(operands):
            paths.update(dict.fromkeys(equation.outvars, _Path.STOPPED))
    return total, [path(atom) for atom in jaxpr.outvars]


def _reached(jaxpr: Any, wanted: Sequence[bool]) -> set[Any]:
    """The variables that a gradient of some outputs may come to."""
    found = {x for x, yes in zip(jaxpr.outvars, wanted, strict=True) if yes and not isinstance(x, core.Literal)}
    for equation in reversed(jaxpr.eqns):
        if equation.primitive.name != "stop_gradient" and not found.isdisjoint(equation.outvars):
            found.update(x for x in equation.invars if not isinstance(x, core.Literal))
    return found


def _gradients_of(
    equation: Any, operands: list[_Path], wanted: list[bool], shares: Shares
) -> tuple[int, Sequence[_Path]]:
    name, params, inside = equation.primitive.name, equation.params, list(_programs(equation))
    if name == "stop_gradient":
        return 0, [_Path.STOPPED]
    if name == "cond":
        branches = [_gradients(branch.jaxpr, operands[1:], wanted, shares) for branch in params["branches"]]
        each, paths = zip(*branches, strict=True)
        known = shares.get(id(equation))
        usual = max(each) if known is None else sum(one * share for one, share in zip(each, known, strict=True))
        return int(usual), [max(ways) for ways in zip(*paths, strict=True)]
    if name == "scan":
        first, carried = scan_counts(params)
        wanted = [True] * carried + wanted[carried:]
        while True:
            flops, found = _gradients(inside[0], operands, wanted, shares)
            now = [max(pair) for pair in zip(operands[first : first + carried], found[:carried], strict=True)]
            if now == operands[first : first + carried]:
                return flops * params["length"], found
            operands = [*operands[:first], *now, *operands[first + carried :]]
    is_kernel, best = reference_jaxpr(equation) is not None, max(operands)
    if is_kernel or name in _PRODUCTS or len(inside) != 1 or len(inside[0].invars) != len(operands):
        ways = 2 if is_kernel or inside else sum(path == _Path.OPEN for path in operands)
        flops = ways * _of_equation(equation, shares).flops if best == _Path.OPEN else 0
        return flops, [best] * len(equation.outvars)
    if "custom_vjp" in name and best == _Path.OPEN:  # its own derivative may be one of what is stopped before it
        operands = [_Path.OPEN if path else path for path in operands]
    return _gradients(inside[0], operands, wanted, shares)


def _of_jaxpr(jaxpr: Any, shares: Shares) -> Products:
    return sum((_of_equation(equation, shares) for equation in jaxpr.eqns), Products())


def _of_equation(equation: Any, shares: Shares) -> Products:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (summed, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return _product(equation, math.prod(shape[dim] for dim in summed))
    if name in ("ragged_dot", "ragged_dot_general"):
        return _product(equation, equation.invars[0].aval.shape[-1])
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        return _product(equation, math.prod(kernel) // kernel[numbers[0]])
    reference = reference_jaxpr(equation)
    if reference is not None:
        return _fused(equation, _of_jaxpr(reference.jaxpr, {}).flops)
    if name == "cond":
        branches = [_of_jaxpr(branch.jaxpr, shares) for branch in params["branches"]]
        if id(equation) not in shares:
            return max(branches, key=lambda one: one.flops)
        return sum((one * share for one, share in zip(branches, shares[id(equation)], strict=True)), Products())
    within = sum((_of_jaxpr(inner, shares) for inner in _programs(equation)), Products())
    return within if name != "scan" else (within + Products(summed=_summed(params))) * params["length"]


def _summed(params: Any) -> int:
    """Bytes of what a loop carries along and adds to in each turn."""
    jaxpr, (first, count) = params["jaxpr"].jaxpr, scan_counts(params)
    carried = dict(zip(jaxpr.outvars[:count], jaxpr.invars[first : first + count], strict=True))
    sums = [
        result
        for equation in jaxpr.eqns
        if equation.primitive.name in ("add", "add_any")
        for result in equation.outvars
        if result in carried and any(atom is carried[result] for atom in equation.invars)
    ]
    return sum(one.aval.size * one.aval.dtype.itemsize for one in sums)


def _product(equation: Any, summed: int) -> Products:
    result = equation.outvars[0].aval
    return Products(2 * result.size * summed, 0, result.size * result.dtype.itemsize)


def _fused(equation: Any, flops: int) -> Products:
    """A kernel that computes what its reference form does."""
    written = sum(one.aval.size * one.aval.dtype.itemsize for one in equation.outvars)
    width = equation.invars[0].aval.shape[-1]
    if is_causal(equation):
        flops = int(flops * _share_of_scores(equation))
        return Products(flops, flops, written, width)
    if equation.primitive.name not in _FUSED:
        return Products(flops, 0, written)
    mask = equation.params.get("mask_type", 0)
    if int(getattr(mask, "value", mask)) in _CAUSAL:
        window, length = equation.params.get("sliding_window_length"), max(equation.invars[1].aval.shape[1:3])
        flops = int(flops * causal_share(length, window))
    return Products(flops, flops, written, width)


def _share_of_scores(equation: Any) -> float:
    """Which share of the scores causal attention computes: half, or within a window that of its blocks.

    The grid of a kernel of splash attention ends with the blocks of queries, and how many of keys each of them has.
    """
    kernel = next(_kernels(equation), None)
    if kernel is None:
        return 0.5
    share = flash_share(str(kernel.params.get("name")), equation.invars[0].aval.shape[1])
    if share is not None:
        return share
    queries, keys = kernel.params["grid_mapping"].grid[-2:]
    return 0.5 if keys >= queries else window_share(queries, keys)


def _kernels(equation: Any) -> Iterator[Any]:
    for inner in _programs(equation):
        for one in inner.eqns:
            if one.primitive.name == "pallas_call":
                yield one
            yield from _kernels(one)


def _programs(equation: Any) -> Iterator[Any]:
    """The programs that an equation runs; of a `while` its body."""
    for key, value in equation.params.items():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns") and key != "cond_jaxpr":
            yield inner
