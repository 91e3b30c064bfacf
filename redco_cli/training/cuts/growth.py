"""How the numbers of a loss grow with its batch: a sum grows as the number of examples does, a mean does not.

With n examples a number that is about n^g has the growth g: 1 for `losses.sum()` and for the weight that counts the
examples, 0 for `losses.mean()`. What divides a number must grow as it does, or the quotient is off by the size of the
batch. Growth is read from the trace of a loss over a batch of p·m examples, p a prime: where p divides a constant, or
the size of a dim, that is the number of examples. A verdict has to be the same for several primes.

Where the rules do not know they say None, and of that nothing is said to the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from redco_cli.sharding.program.primitives import ELEMENTWISE
from redco_cli.sharding.program.reference import reference_jaxpr
from redco_cli.sharding.scans import scan_counts

Growth = float | None
"""The exponent of the number of examples; infinite for zero, which is of any growth; None where it cannot be told."""

ZERO = math.inf
_LARGEST, _EXACT = 2**24, {1: 1, 2: 2**8}
"""Whole numbers up to here are exact in float32, and in floats of fewer bytes."""
_COUNTABLE, _ROUNDING = 2**40, 1e-6
"""No count is larger: 1e30 is there to mask with. How far off a float32 may be."""
_LINEAR = """
    neg real imag stop_gradient convert_element_type copy copy_p device_put reduce_precision sharding_constraint pvary
    reshape broadcast_in_dim transpose squeeze expand_dims slice dynamic_slice gather rev abs reduce_max reduce_min
    optimization_barrier reduce_window_max reduce_window_min sort top_k cummax cummin split unstack name
"""
"""A result that is so many times as large when the operand is."""
_CALLS = """
    jit pjit closed_call core_call eval_jaxpr remat remat2 checkpoint custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr custom_lin custom_vmap_call composite
"""
_FREE = """
    random_seed random_split random_fold_in random_wrap random_unwrap random_bits random_gamma axis_index argmax argmin
    eq ne lt le gt ge eq_to lt_to le_to is_finite and or xor not sign reduce_and reduce_or erf_inv create_token
"""
"""Truths, places, signs, draws: no power of the number of examples, whatever they are made of."""
_FASTEST = {
    **dict.fromkeys(("add", "sub", "add_any", "max", "concatenate", "stack", "pad"), slice(None)),
    "select_n": slice(1, None),
    "select_and_scatter_add": slice(1),
    "clamp": slice(1, 2),
    "dynamic_update_slice": slice(2),
    "scatter": slice(0, 3, 2),
}
"""Results that grow as the fastest of some operands does."""
_KINDS = {
    **dict.fromkeys(ELEMENTWISE.split(), "pointwise"),
    **dict.fromkeys(_LINEAR.split(), "linear"),
    **dict.fromkeys(_FREE.split(), "free"),
    **dict.fromkeys(_CALLS.split(), "call"),
}


def growths(closed: Any, given: Sequence[Growth], prime: int, atoms: Sequence[Any] | None = None) -> list[Growth]:
    """The growth of each result of a traced function.

    Args:
        closed: its jaxpr.
        given: of each argument.
        prime: which divides the number of examples, and no other size.
        atoms: of the jaxpr, instead of its results.
    """
    return _Reading(prime).closed(closed, list(given), atoms)


class _Reading:
    """Goes through programs, one equation at a time."""

    def __init__(self, prime: int) -> None:
        self.prime = prime

    def closed(self, inner: Any, args: Sequence[Growth], atoms: Sequence[Any] | None = None) -> list[Growth]:
        """The results of a jaxpr, closed or open, or other atoms of it."""
        jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
        known: dict[Any, Growth] = dict.fromkeys(jaxpr.constvars)
        known.update(zip(jaxpr.constvars, map(self.constant, consts), strict=False))
        known.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Growth:
            return self.constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            found = self.results(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in (jaxpr.outvars if atoms is None else atoms)]

    def multiplicity(self, number: float) -> int:
        """How often the prime divides a whole number."""
        whole, times = round(abs(number)), 0
        while whole and whole % self.prime == 0:
            whole, times = whole // self.prime, times + 1
        return times

    def constant(self, value: Any) -> Growth:
        """A number as it is written, such as the 8.0 or the 0.125 of a mean over 8."""
        if hasattr(value, "dtype") and not isinstance(value.dtype, np.dtype):  # such as a key
            return 0
        array = np.asarray(value)
        if array.size == 0 or array.dtype.kind not in "iufbV":  # V: bfloat16
            return 0
        if array.size > 1 and not (array == array.flat[0]).all():
            return None if any(map(self.multiplicity, array.shape)) else 0
        number = abs(float(array.flat[0]))
        if number == 0 or not math.isfinite(number):
            return ZERO
        inverse, exact = 1 / number, _EXACT.get(array.dtype.itemsize, _LARGEST)
        for sign, whole in ((1, number), (-1, inverse)):
            if whole <= exact and abs(whole - round(whole)) < _ROUNDING * whole:
                return sign * self.multiplicity(whole)
        largest = max(number, inverse)
        digits = math.log10(largest)
        is_written = abs(digits - round(digits)) < _ROUNDING  # as 1e-12 is, to keep a divisor from being zero
        if largest <= exact or largest > _COUNTABLE or is_written or array.dtype.kind in "iu":
            return 0
        return None  # maybe a count, of which a float has only the first digits

    def results(self, equation: Any, given: list[Growth]) -> list[Growth]:
        """The results of an equation."""
        name, count = equation.primitive.name, len(equation.outvars)
        reference = reference_jaxpr(equation)
        if reference is not None:
            return self.closed(reference, given)
        if _KINDS.get(name) == "call":
            keys = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
            return self.closed(next(equation.params[key] for key in keys if key in equation.params), given)
        if name in _PROGRAMS:
            return _PROGRAMS[name](self, equation, given)
        if _KINDS.get(name) == "linear" and len(given) == count:
            return given
        return [self.result(name, equation, given)] * count

    def result(self, name: str, equation: Any, given: list[Growth]) -> Growth:
        """That of an equation with one result, or several alike."""
        kind = _KINDS.get(name)
        if name in _RULES:
            return _RULES[name](self, equation, given)
        if kind == "free":
            return 0
        if name in _FASTEST:
            return _fastest(given[_FASTEST[name]])
        if kind == "linear":
            return given[0]
        if kind == "pointwise" and all(one in (0, ZERO) for one in given):
            return 0
        return None

    def times(self, shape: Sequence[int], axes: Sequence[int]) -> int:
        """The growth of how many elements are summed up."""
        return sum(self.multiplicity(shape[axis]) for axis in axes)


def _fastest(given: Sequence[Growth]) -> Growth:
    finite = [one for one in given if one is not None and one != ZERO]
    return None if None in given else max(finite, default=ZERO)


def _either(first: Growth, second: Growth) -> Growth:
    """What holds of an array that is one of two."""
    found = {first, second} - {ZERO}
    return ZERO if not found else found.pop() if len(found) == 1 else None


def _product(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    first, second = given
    if ZERO in given:
        return ZERO
    return None if first is None or second is None else first + second


def _quotient(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    first, second = given
    if first is None or second is None or second == ZERO:
        return None
    return first - second


def _power(exponent: Callable[[Any], float]) -> Callable[[_Reading, Any, list[Growth]], Growth]:
    def rule(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
        power = exponent(equation)
        if given[0] is None or (given[0] == ZERO and power < 0):
            return None
        return given[0] * power if power else 0

    return rule


def _sum(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    times = reading.times(equation.invars[0].aval.shape, equation.params["axes"])
    return None if given[0] is None else given[0] + times


def _multiplied(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    return 0 if given[0] == 0 == reading.times(equation.invars[0].aval.shape, equation.params["axes"]) else None


def _cumulative(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    size = equation.invars[0].aval.shape[equation.params["axis"]]
    return None if reading.multiplicity(size) else given[0]


def _dot(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    ((axes, _), _), shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    product = _product(reading, equation, given)
    return None if product is None else product + reading.times(shape, axes)


def _conv(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    kernel = equation.invars[1].aval.shape  # with examples in it, it is the gradient of a kernel
    return None if any(map(reading.multiplicity, kernel)) else _product(reading, equation, given)


def _scattered(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    """Several may be added up at one place, where there are fewer places than examples."""
    into, what = ([*map(reading.multiplicity, equation.invars[i].aval.shape)] for i in (0, 2))
    return _fastest([given[0], given[2]]) if sum(into) >= sum(what) else None


def _logarithm(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    return None if given[0] is None else 0


def _numbered(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    return None if any(map(reading.multiplicity, equation.params["shape"])) else 0


def _window(reading: _Reading, equation: Any, given: list[Growth]) -> Growth:
    return None if any(map(reading.multiplicity, equation.params["window_dimensions"])) else given[0]


_RULES: dict[str, Callable[[_Reading, Any, list[Growth]], Growth]] = {
    "mul": _product,
    "div": _quotient,
    "integer_pow": _power(lambda equation: equation.params["y"]),
    "square": _power(lambda _: 2),
    "sqrt": _power(lambda _: 0.5),
    "rsqrt": _power(lambda _: -0.5),
    "cbrt": _power(lambda _: 1 / 3),
    **dict.fromkeys(("log", "log1p"), _logarithm),
    "iota": _numbered,
    "min": lambda reading, equation, given: _either(*given),
    "reduce_sum": _sum,
    "reduce_prod": _multiplied,
    "cumsum": _cumulative,
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "scatter-add": _scattered,
    "reduce_window_sum": _window,
}


def _scan(reading: _Reading, equation: Any, given: list[Growth]) -> list[Growth]:
    params, (consts, carried), body = equation.params, scan_counts(equation.params), equation.params["jaxpr"]
    fixed, carry, scanned = given[:consts], given[consts : consts + carried], given[consts + carried :]
    grows = reading.multiplicity(params["length"]) > 0
    carry, results = _settled(carry, lambda now: reading.closed(body, [*fixed, *now, *scanned]), exactly=grows)
    return [*carry, *results[carried:]]


def _while(reading: _Reading, equation: Any, given: list[Growth]) -> list[Growth]:
    first = equation.params["cond_nconsts"]
    second = first + equation.params["body_nconsts"]
    fixed, body = given[first:second], equation.params["body_jaxpr"]
    return _settled(given[second:], lambda now: reading.closed(body, [*fixed, *now]), exactly=True)[0]


def _settled(
    carry: list[Growth], turn: Callable[[list[Growth]], list[Growth]], *, exactly: bool
) -> tuple[list[Growth], list[Growth]]:
    """The carry of a loop after its rounds; `exactly`: of as many rounds as there are examples, or nobody knows."""
    while True:
        results = turn(carry)
        after = [
            before if now == before else None if exactly else _either(before, now)
            for before, now in zip(carry, results, strict=False)
        ]
        if after == carry:
            return after, results
        carry = after


def _cond(reading: _Reading, equation: Any, given: list[Growth]) -> list[Growth]:
    branches = [reading.closed(branch, given[1:]) for branch in equation.params["branches"]]
    return [_fastest(results) for results in zip(*branches, strict=True)]


_PROGRAMS: dict[str, Callable[[_Reading, Any, list[Growth]], list[Growth]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
