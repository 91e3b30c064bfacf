"""A traced program as a compiler sees it: calls inlined, repetition removed, every repeat and transpose spelled out.

What is spelled out is what matters for memory: an operand that is repeated along a dim, and one that a matrix product
needs in another order of dims, are arrays of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
from jax.extend import core

from redco_cli.sharding.predict.dots import canonical_operands
from redco_cli.sharding.predict.kinds import CALLS, ELEMENTWISE, SCATTERED
from redco_cli.sharding.predict.operations import LITERAL, NARROW, Arrays, FlatProgram, Op
from redco_cli.sharding.program.marks import GRADIENT_FIRST
from redco_cli.sharding.scans import scan_counts

_HOST = jax.memory.Space.Host
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def flatten(
    closed_jaxpr: Any, *, partitioned: bool = True, upcast: bool = False, scatters: bool = False
) -> FlatProgram:
    """Reads a traced program.

    Args:
        closed_jaxpr: as `jax.make_jaxpr` returns it.
        partitioned: whether it runs on more than one device, or in a loop; XLA then finds what is repeated before it
            simplifies, and simplifies a little less.
        upcast: whether products are computed in float32, whatever they are of, as XLA does on a CPU.
        scatters: whether a gradient that is to come first is scattered there, see `gradient_first`.
    """
    return _program(closed_jaxpr, _Reader(Arrays(), partitioned, upcast, scatters))


def _program(closed: Any, reader: _Reader, made: Mapping[int, Op] | None = None) -> FlatProgram:
    """One program with its own list of operations; inputs that are `made` are what such an operation makes."""
    inputs = [reader.array(variable.aval) for variable in closed.jaxpr.invars]
    for place, op in (made or {}).items():
        reader.ops.append(Op(op.name, op.operands, (inputs[place],), op.params))
    outputs = reader.run(closed, inputs)
    return FlatProgram(reader.arrays, tuple(inputs), tuple(outputs), _needed(reader.ops, outputs))


def _needed(ops: list[Op], outputs: Sequence[int]) -> list[Op]:
    """The operations that something depends on."""
    wanted = set(outputs)
    kept = []
    for op in reversed(ops):
        if not wanted.isdisjoint(op.results):
            if op.name == "scan":
                _drop_stacked(op, wanted)
            wanted.update(op.operands)
            kept.append(op)
    return kept[::-1]


def _drop_stacked(op: Op, wanted: set[int]) -> None:
    """Leaves out of a scan what it computes for stacked results that nobody reads."""
    body, carried = op.bodies[0], op.params["num_carry"]
    stacked = zip(body.outputs[carried:], op.results[carried:], strict=True)
    body.outputs = body.outputs[:carried] + tuple(y if result in wanted else LITERAL for y, result in stacked)
    body.ops = _needed(body.ops, body.outputs)


def _once(results: tuple[int, ...], outputs: Sequence[int], carried: int) -> tuple[int, ...]:
    """Results of a scan; what it stacks more than once is one of them, as XLA has it, but for CPUs."""
    stacked = dict(zip(reversed(outputs[carried:]), reversed(results[carried:]), strict=True))
    both = zip(outputs[carried:], results[carried:], strict=True)
    return (*results[:carried], *(result if y == LITERAL else stacked[y] for y, result in both))


class _Reader:
    def __init__(self, arrays: Arrays, partitioned: bool, upcast: bool, scatters: bool) -> None:
        self.arrays, self.partitioned, self.upcast, self.scatters = arrays, partitioned, upcast, scatters
        self.ops: list[Op] = []
        self.maker: dict[int, Op] = {}
        self._divisors: set[int] = set()
        self._seen: dict[Any, tuple[int, ...]] = {}
        self._literals: tuple[Any, ...] = ()

    def inside(self, closed: Any, made: Mapping[int, Op] | None = None) -> FlatProgram:
        """A program within this one."""
        return _program(closed, _Reader(self.arrays, self.partitioned, self.upcast, self.scatters), made)

    def array(self, aval: Any) -> int:
        shape, (itemsize, dtype) = getattr(aval, "shape", ()), _element(getattr(aval, "dtype", None))
        if getattr(aval, "memory_space", None) is not _HOST:
            return self.arrays.new(shape, itemsize, dtype)
        array = self.arrays.new(shape, 0, dtype)
        self.arrays.on_host[array] = itemsize
        return array

    def run(self, jaxpr: Any, operands: Sequence[int]) -> list[int]:
        """Appends the operations of a jaxpr, open or closed, applied to arrays."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known: dict[Any, int] = dict(zip(jaxpr.invars, operands, strict=True))
        for variable in jaxpr.constvars:
            known[variable] = LITERAL if not variable.aval.shape else self.array(variable.aval)
        for equation in jaxpr.eqns:
            inputs = tuple(LITERAL if isinstance(a, core.Literal) else known[a] for a in equation.invars)
            self._literals = tuple(repr(a.val) for a in equation.invars if isinstance(a, core.Literal))
            known.update(zip(equation.outvars, self._apply(equation, inputs), strict=True))
        return [LITERAL if isinstance(a, core.Literal) else known[a] for a in jaxpr.outvars]

    def _apply(self, equation: Any, operands: tuple[int, ...]) -> Sequence[int]:
        name, params = equation.primitive.name, equation.params
        inner = next((params[key] for key in _BODIES if key in params), None) if name in CALLS else None
        if inner is not None:
            if params.get("differentiated"):
                self.arrays.rematerialized.update(operands)
            if params.get("differentiated") and params.get("prevent_cse"):
                operands = tuple(x if x == LITERAL else self._fresh_view(x) for x in operands)
            results = self.run(inner, operands)
            if self.scatters and params.get("name") == GRADIENT_FIRST and len(results) == len(operands):
                gradient = equation.outvars[0].aval
                return [*self.emit(SCATTERED, (results[0],), [gradient], {}), *results[1:]]
            return results
        avals = [variable.aval for variable in equation.outvars]
        if name in ("scan", "while", "cond"):
            return self._append(self._loop(equation, operands))
        if name == "split":
            return self._split(operands[0], avals, params)
        if name in ELEMENTWISE:
            return self._elementwise(name, operands, avals[0], params)
        if name == "transpose":
            return (self.transpose(operands[0], params["permutation"]),)
        if name == "dot_general":
            return (self._product(operands, avals[0], params["dimension_numbers"]),)
        return self.emit(name, operands, avals, params)

    def _loop(self, equation: Any, operands: tuple[int, ...]) -> Op:
        """A loop or a choice, with the programs in it. Constants of a scan are made where they are used."""
        name, params = equation.primitive.name, equation.params
        results = tuple(self.array(variable.aval) for variable in equation.outvars)
        if name == "cond":
            bodies = tuple(map(self.inside, params["branches"]))
            return Op(name, operands, results, params, bodies)
        if name == "while":
            return Op(name, operands, results, params, (self.inside(params["body_jaxpr"]),))
        constants, carried = scan_counts(params)
        params = {**params, "num_consts": constants, "num_carry": carried}
        if self.upcast:  # stacked results are kept as products read them
            for array in results[carried:]:
                self.arrays.widen(array)
        made = {}
        for place, operand in enumerate(operands[:constants]):
            maker = self.maker.get(operand)
            if maker is not None and maker.name == "broadcast_in_dim" and maker.operands == (LITERAL,):
                made[place] = maker
        body = self.inside(params["jaxpr"], made)
        if not self.upcast:
            results = _once(results, body.outputs, carried)
        operands = tuple(LITERAL if place in made else operand for place, operand in enumerate(operands))
        return Op(name, operands, results, params, (body,))

    def emit(
        self, name: str, operands: tuple[int, ...], avals: Sequence[Any], params: Mapping[str, Any]
    ) -> Sequence[int]:
        """Appends an operation, unless the same was done before."""
        shapes = (getattr(aval, "shape", ()) for aval in avals)
        key = (name, operands, *self._literals, *shapes, *_frozen(params))
        if key not in self._seen:
            self._seen[key] = self._append(Op(name, operands, tuple(self.array(aval) for aval in avals), params))
        return self._seen[key]

    def _append(self, op: Op) -> tuple[int, ...]:
        self.ops.append(op)
        self.maker.update(dict.fromkeys(op.results, op))
        return op.results

    def _new(self, name: str, operands: tuple[int, ...], result: int, params: Mapping[str, Any]) -> int:
        """Appends an operation whose one result looks as `result` does."""
        key = (name, operands, self.arrays.shapes[result], self.arrays.dtypes[result], *_frozen(params))
        if key not in self._seen:
            self._seen[key] = self._append(Op(name, operands, (result,), params))
        return self._seen[key][0]

    def _fresh_view(self, array: int) -> int:
        """The same array under another name, so that what is computed from it is not found to be known."""
        result = self.arrays.like(array, self.arrays.shapes[array])
        return self._append(Op("optimization_barrier", (array,), (result,), {}))[0]

    def transpose(self, array: int, permutation: Sequence[int]) -> int:
        """The array with its dims in another order, without transposing twice."""
        maker = self.maker.get(array)
        if maker is not None and maker.name == "transpose":
            permutation = [maker.params["permutation"][place] for place in permutation]
            array = maker.operands[0]
        shape = self.arrays.shapes[array]
        if maker is not None and maker.name == "dot_general" and list(permutation) == [1, 0]:
            (left, right), (left_batch, right_batch) = maker.params["dimension_numbers"]
            numbers = {"dimension_numbers": ((right, left), (right_batch, left_batch))}
            return self._new("dot_general", maker.operands[::-1], self.arrays.like(array, shape[::-1]), numbers)
        moved = [place for place in permutation if shape[place] != 1]
        if list(permutation) == list(range(len(shape))):
            return array
        result = self.arrays.like(array, [shape[place] for place in permutation])
        name = "reshape" if moved == sorted(moved) else "transpose"
        return self._new(name, (array,), result, {"permutation": tuple(permutation)})

    def _product(self, operands: tuple[int, ...], aval: Any, numbers: Any) -> int:
        narrow = aval.dtype if self.upcast and _element(aval.dtype)[1] in NARROW else None
        if self.upcast:
            operands = tuple(
                self._cast(x, 4, "float32") if x != LITERAL and self.arrays.dtypes[x] in NARROW else x for x in operands
            )
        operands, numbers = canonical_operands(self, operands, numbers)
        result = self.arrays.new(aval.shape, *(_element(aval.dtype) if narrow is None else (4, "float32")))
        product = self._new("dot_general", operands, result, {"dimension_numbers": numbers})
        return product if narrow is None else self._cast(product, *_element(narrow))

    def _cast(self, array: int, itemsize: int, dtype: str) -> int:
        result = self.arrays.new(self.arrays.shapes[array], itemsize, dtype)
        return self._new("convert_element_type", (array,), result, {})

    def _split(self, array: int, avals: Sequence[Any], params: Mapping[str, Any]) -> list[int]:
        results: list[int] = []
        start = 0
        for aval, size in zip(avals, params["sizes"], strict=True):
            at = {"axis": params["axis"], "start": int(start), "size": int(size)}
            results += self.emit("slice", (array,), [aval], at)
            start += size
        return results

    def _elementwise(self, name: str, operands: tuple[int, ...], aval: Any, params: Mapping[str, Any]) -> Sequence[int]:
        shapes = self.arrays.shapes
        if name == "div" and (operands[1] == LITERAL or shapes[operands[1]] != aval.shape):
            if operands[1] not in self._divisors or not self.partitioned:
                name = "mul"  # by the reciprocal, which is small
            if operands[1] != LITERAL and name == "mul":
                self._divisors.add(operands[1])
                one = self.arrays.like(operands[1], shapes[operands[1]])
                operands = (operands[0], self._new("div", (LITERAL, operands[1]), one, {}))
        elif name == "erfc":  # exp(-x²) is part of it, and of its derivative
            square = self.emit("square", operands, [aval], {})
            below = self.emit("neg", tuple(square), [aval], {})
            operands += tuple(self.emit("exp", tuple(below), [aval], {"accuracy": None}))
        operands = tuple(
            x if x == LITERAL or not shapes[x] or shapes[x] == aval.shape else self._repeat(x, aval.shape)
            for x in operands
        )
        return self.emit(name, operands, [aval], params)

    def _repeat(self, array: int, shape: Sequence[int]) -> int:
        result = self.arrays.like(array, shape)
        return self._new("broadcast_in_dim", (array,), result, {"broadcast_dimensions": tuple(range(len(shape)))})


@cache
def _element(dtype: Any) -> tuple[int, str]:
    """Bytes and name of an element; those of keys and tokens are not known."""
    return getattr(dtype, "itemsize", 4), str(dtype)


def _frozen(params: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells two operations of one primitive apart."""
    items = tuple(params.items())
    try:
        hash(items)
    except TypeError:
        return (id(params),)
    return items
