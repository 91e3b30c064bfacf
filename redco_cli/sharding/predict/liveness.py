"""From when to when the arrays of a program exist in memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from redco_cli.sharding.predict.fusion import STACK, Fusion
from redco_cli.sharding.predict.kinds import ELEMENTWISE, MOVES, PRODUCTS, RESHAPED
from redco_cli.sharding.predict.operations import LITERAL, FlatProgram, Op
from redco_cli.sharding.predict.timelines import Cast, Layer, Loop, Reads, Timeline

_LITTLE = 8
_IN_PLACE = ELEMENTWISE | {"scatter", "scatter-add", "scatter_add", "dynamic_update_slice", "sort"}


def timeline(flat: FlatProgram, weights: Collection[int], *, cpu_backend: bool, tpu_backend: bool = False) -> Timeline:
    """Plays a program.

    Args:
        flat: the program.
        weights: those of its inputs that are parameters.
        cpu_backend: whether everything is computed as soon as it can be, and library kernels take in what lies around
            them, as XLA has it on a CPU; otherwise in the order of the program.
        tpu_backend: see `Fusion`.
    """
    how = {"kernels": cpu_backend, "tpu_backend": tpu_backend}
    fusion = Fusion(flat.ops, flat.outputs, flat, **how)
    return _Scheduler(flat, fusion, flat.inputs, weights, how).timeline(flat.outputs)


class _Scheduler:
    def __init__(
        self,
        flat: FlatProgram,
        fusion: Fusion,
        inputs: Sequence[int],
        weights: Collection[int],
        how: Mapping[str, bool],
    ) -> None:
        self._flat, self._fusion, self._how, self._cpu_backend = flat, fusion, how, how["kernels"]
        self._inputs, self._weights = frozenset(inputs), frozenset(weights)
        self._order = self._cpu_order() if self._cpu_backend else self._program_order()

    def _program_order(self) -> list[int]:
        """As it is written; for a TPU, little that is made of much is made as soon as it can be."""
        order = [index for index, written in enumerate(self._fusion.written) if written]
        if not self._how["tpu_backend"]:
            return order
        early = {index: self._after_reads(index) for index in order if self._shrinks(index)}
        return sorted(order, key=lambda index: early.get(index, float(index)))

    def _shrinks(self, index: int) -> bool:
        """Whether it moves elements, few of those that it reads."""
        op, reads = self._fusion.ops[index], self._fusion.reads[index]
        return op.name in MOVES and bool(reads) and _LITTLE * self._bytes(op.results) <= self._bytes(reads)

    def _after_reads(self, index: int) -> float:
        makers = [self._fusion.maker[array] for array in self._fusion.reads[index] if array in self._fusion.maker]
        return max(makers) + 0.5 if makers else float(index)

    def _bytes(self, arrays: Iterable[int]) -> int:
        shapes, itemsizes = self._flat.arrays.shapes, self._flat.arrays.itemsizes
        return sum(itemsizes[array] * math.prod(shapes[array]) for array in arrays)

    def _cpu_order(self) -> list[int]:
        """Breadth first: what is ready is done in the order in which it became so."""
        fusion, final = self._fusion, self._fusion.results()
        missing: dict[int, int] = {}
        waiting: dict[int, list[int]] = {}
        for index, written in enumerate(fusion.written):
            if written:
                needed = {fusion.maker[array] for array in fusion.reads[index] if array in fusion.maker}
                missing[index] = len(needed)
                for other in needed:
                    waiting.setdefault(other, []).append(index)
        for users in waiting.values():  # what a backward pass goes on with comes before what it is for
            users.sort(key=final.__contains__)
        ready = deque(index for index, count in missing.items() if not count)
        order = []
        while ready:
            index = ready.popleft()
            order.append(index)
            for user in waiting.get(index, ()):
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        return order

    def timeline(self, outputs: Sequence[int], stacked: Sequence[int] = ()) -> Timeline:
        """When everything exists; `stacked` are results of an iteration of a loop."""
        ops, order = self._fusion.ops, self._order
        births, deaths = self._lifetimes()
        places = {array: place for place, array in enumerate(births)}
        return Timeline(
            arrays=np.array(list(births), np.int64),
            births=np.array(list(births.values()), np.int64),
            deaths=np.array([deaths[array] for array in births], np.int64),
            is_weight=np.array([self._is_weight(array) for array in births], np.bool_),
            made_by=tuple(ops[self._fusion.maker[array]].name for array in births),
            casts={place: found for x, place in places.items() if (found := self._stacked_casts(x)) is not None},
            outputs=tuple(self._parts(x, places) for x in outputs),
            stacked=tuple(self._parts(x, places) for x in stacked),
            reads=self._input_reads(),
            cast_slices=self._cast_slices(births),
            loops=tuple(loop for time, index in enumerate(order) for loop in self._loops(time, ops[index], places)),
            loss=self._around_loss(outputs),
            length=len(order) + 1,
        )

    def _lifetimes(self) -> tuple[dict[int, int], dict[int, int]]:
        births: dict[int, int] = {}
        deaths: dict[int, int] = {}
        for time, index in enumerate(self._order):
            deaths.update(dict.fromkeys(self._fusion.reads[index], time))
            op = self._fusion.ops[index]
            zeroed = self._cpu_backend and op.name == "scan"  # stacked results are made of zeros, at the start
            for place, array in enumerate(op.results):
                early = zeroed and place >= op.params["num_carry"]
                births[array], deaths[array] = 0 if early else time, time
        for index in self._order:
            self._reuse_operands(index, births, deaths)
        return births, deaths

    def _reuse_operands(self, index: int, births: dict[int, int], deaths: Mapping[int, int]) -> None:
        """A result takes the place of an operand of the same form that nobody reads afterwards."""
        op, arrays, fusion = self._fusion.ops[index], self._flat.arrays, self._fusion
        pairs: list[tuple[int, Iterable[int]]] = []
        if op.name == "scan":
            first = op.params["num_consts"]
            carry = op.operands[first : first + op.params["num_carry"]]
            pairs = [(result, [fusion.base(x)]) for result, x in zip(op.results, carry, strict=False)]
        elif op.name in _IN_PLACE:
            pairs = [(op.results[0], fusion.reads[index])]
        for result, operands in pairs:
            form = arrays.shapes[result], arrays.itemsizes[result]
            for operand in operands:
                dies = operand in births and deaths[operand] == births[result] and operand not in fusion.ends
                if dies and (arrays.shapes[operand], arrays.itemsizes[operand]) == form:
                    births[result] += 1
                    break

    def _loops(self, time: int, op: Op, places: Mapping[int, int]) -> list[Loop]:
        if op.name != "scan":
            how = {"cpu_backend": self._cpu_backend, "tpu_backend": self._how["tpu_backend"]}
            return [Loop(time, timeline(body, (), **how), ()) for body in op.bodies]
        body, carried = op.bodies[0], op.params["num_carry"]
        first = op.params["num_consts"] + carried
        slices = [Op("dynamic_slice", (LITERAL,), (x,), {}) for x in body.inputs[first:]]
        stacks = [Op(STACK, (y,), (), {}) for y in dict.fromkeys(body.outputs[carried:]) if y != LITERAL]
        given = zip(body.inputs, map(self._fusion.base, op.operands), strict=True)
        weights = [inside for inside, outside in given if self._is_weight(outside)]
        fusion = Fusion([*slices, *body.ops, *stacks], body.outputs[:carried], self._flat, **self._how)
        scheduler = _Scheduler(self._flat, fusion, body.inputs[:first], weights, self._how)
        stacked = tuple(places[x] for x in op.results[carried:])
        layers = zip(map(self._fusion.base, op.operands[first:]), body.inputs[first:], strict=True)
        read = [layer for outer, inner in layers if self._is_weight(outer) for layer in scheduler.layer(outer, inner)]
        return [Loop(time, scheduler.timeline(body.outputs[:carried], body.outputs[carried:]), stacked, tuple(read))]

    def layer(self, parameter: int, array: int) -> list[Layer]:
        """A slice of a parameter, where an iteration, which this is, reads it."""
        fusion, order = self._fusion, {index: time for time, index in enumerate(self._order)}
        itemsize, times, stack = self._flat.arrays.itemsizes[array], set[int](), [array]
        while stack:
            for user in fusion.users.get(stack.pop(), ()):
                if fusion.written[user]:
                    times.add(order[user])
                elif fusion.ops[user].name != STACK:
                    stack += fusion.ops[user].results
                    itemsize = min(itemsize, *(self._flat.arrays.itemsizes[x] for x in fusion.ops[user].results))
        return [Layer(parameter, array, itemsize, min(times), max(times))] if times else []

    def _is_weight(self, array: int) -> bool:
        while array not in self._weights:
            index = self._fusion.maker.get(array)
            if index is None or not self._fusion.operands[index]:
                return False
            op = self._fusion.ops[index]
            if op.name == "scan":
                array = _slice_of(op, op.results.index(array))
            elif op.name in RESHAPED:
                array = self._fusion.operands[index][0]
            else:
                return False
        return True

    def _stacked_casts(self, array: int) -> tuple[int, bool] | None:
        """Of what input, and whether what reads them is rematerialized; None where it is no stack of casts."""
        fusion = self._fusion
        op = fusion.ops[fusion.maker[array]]
        source = fusion.base(_slice_of(op, op.results.index(array))) if op.name == "scan" else LITERAL
        if source not in self._weights:
            return None
        readers = [fusion.ops[index] for index in fusion.users.get(array, ()) if fusion.ops[index].name == "scan"]
        inner = [y for one in readers for x, y in zip(one.operands, one.bodies[0].inputs, strict=True) if x == array]
        return source, not self._flat.arrays.rematerialized.isdisjoint(inner)

    def _parts(self, output: int, places: Mapping[int, int]) -> tuple[int, ...]:
        array = self._fusion.base(output)
        if array not in places:
            return ()
        index = self._fusion.maker[array]
        summands = self._fusion.reads[index] if self._fusion.ops[index].name in ("add", "add_any") else ()
        return (places[array], *(places[x] for x in summands if x in places))

    def _input_reads(self) -> dict[int, Reads]:
        times: dict[int, list[int]] = {}
        sliced: set[int] = set()
        rematerialized = self._flat.arrays.rematerialized
        reread = self._inputs & rematerialized
        for time, index in enumerate(self._order):
            op, cast = self._fusion.ops[index], set[int]()
            if op.name == "scan":
                inside = list(zip(op.operands, op.bodies[0].inputs, strict=True))
                reread = reread | {outer for outer, inner in inside if inner in rematerialized}
                slices = inside[op.params["num_consts"] + op.params["num_carry"] :]
                sliced.update(outer for outer, _ in slices)
                cast = {outer for outer, inner in slices if self._is_cast(inner, op.bodies[0])}
            for array in self._inputs.intersection(self._fusion.reads[index]) - cast:
                codes = "int" in self._flat.arrays.dtypes[array]
                if codes or op.name != "convert_element_type":  # what else is cast is gathered after it
                    times.setdefault(array, []).append(time)
        return {array: Reads(tuple(found), array in sliced, array in reread) for array, found in times.items()}

    def _cast_slices(self, written: Collection[int]) -> dict[int, Cast]:
        """Where the casts are stacked, they are among the arrays of this timeline already."""
        kept = {found[0] for array in written if (found := self._stacked_casts(array)) is not None}
        casts: dict[int, Cast] = {}
        for time, index in enumerate(self._order):
            op = self._fusion.ops[index]
            if op.name != "scan":
                continue
            body, first = op.bodies[0], op.params["num_consts"] + op.params["num_carry"]
            for outer, inner in zip(map(self._fusion.base, op.operands[first:]), body.inputs[first:], strict=True):
                if outer in self._inputs and outer not in kept and self._is_cast(inner, body):
                    result = next(one.results[0] for one in body.ops if inner in one.operands)
                    before = casts.get(outer)
                    casts[outer] = Cast(self._flat.arrays.itemsizes[result], before.first if before else time, time)
        return casts

    def _is_cast(self, array: int, body: FlatProgram) -> bool:
        """Whether a slice is only cast, so that what is kept of it are the results of that."""
        users = [op.name for op in body.ops if array in op.operands]
        return "int" not in self._flat.arrays.dtypes[array] and set(users) == {"convert_element_type"}

    def _around_loss(self, outputs: Sequence[int]) -> tuple[int, int]:
        before = self._fusion.before(self._fusion.base(outputs[0])) if outputs else set()
        products = [(time, i) for time, i in enumerate(self._order) if self._fusion.ops[i].name in PRODUCTS]
        last = max((time for time, index in products if index in before), default=-1)
        return last, min((time for time, _ in products if time > last), default=len(self._order))


def _slice_of(op: Op, place: int) -> int:
    """What a loop takes the slices from that it stacks as a result in another form; `LITERAL` where it computes it."""
    body, first = op.bodies[0], op.params["num_consts"] + op.params["num_carry"]
    makers = {result: inner for inner in body.ops for result in inner.results}
    array = body.outputs[place]
    while array in makers and makers[array].name in RESHAPED and makers[array].operands:
        array = makers[array].operands[0]
    slices = dict(zip(body.inputs[first:], op.operands[first:], strict=True))
    return slices.get(array, LITERAL) if place >= op.params["num_carry"] else LITERAL
