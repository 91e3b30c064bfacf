"""How many bytes of a program exist at each time, on one device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from redco_cli.sharding.predict.kinds import ELEMENTWISE, REDUCTIONS
from redco_cli.sharding.predict.timelines import Integers, Timeline

Bytes = NDArray[np.float64]
_SAMPLES = 32


@dataclass(frozen=True)
class BytesOverTime:
    """Bytes over time.

    Attributes:
        activations: of what is computed.
        weights: of inputs in another place or precision: slices of stacked layers, casts.
    """

    activations: Bytes
    weights: Bytes

    @property
    def total(self) -> Bytes:
        """Of both."""
        return self.activations + self.weights


@dataclass(frozen=True)
class Gradients:
    """Gradients over time.

    Attributes:
        bytes: of those that are there.
        waiting: indices in the arrays of the timeline of those that wait until they are summed over devices.
    """

    bytes: Bytes
    waiting: tuple[int, ...]


def bytes_over_time(
    timeline: Timeline,
    sizes: Bytes,
    own: Bytes,
    summed: Collection[int] = (),
    gathered: Mapping[int, float] = MappingProxyType({}),
) -> BytesOverTime:
    """Plays a timeline, loops and all.

    Args:
        timeline: of a program.
        sizes: bytes of every array, by id.
        own: bytes of `timeline.arrays`.
        summed: indices of stacked results whose slices are summed over devices at the end of an iteration.
        gathered: by id of a layer's array, its bytes where loops gather it; each of a loop's layers is.
    """
    found = BytesOverTime(
        live_bytes(timeline, np.where(timeline.is_weight, 0.0, own)),
        live_bytes(timeline, np.where(timeline.is_weight, own, 0.0)),
    )
    largest: dict[int, tuple[float, float]] = {}
    for loop in timeline.loops:
        inside = sizes[loop.body.arrays]
        parts = [part for y, place in enumerate(loop.stacked) if place in summed for part in loop.body.stacked[y][:1]]
        waiting = waiting_bytes(loop.body, inside, parts, at_once=True)
        inner = bytes_over_time(loop.body, sizes, inside)
        for layer in loop.layers:
            inner.weights[layer.first : layer.last + 1] += gathered.get(layer.array, 0.0)
        at = int((inner.total + waiting).argmax())
        now = (float(inner.activations[at] + waiting[at]), float(inner.weights[at]))
        largest[loop.time] = max(largest.get(loop.time, now), now, key=sum)
    for time, (activations, weights) in largest.items():
        found.activations[time] += activations
        found.weights[time] += weights
    return found


def layer_bytes(
    timeline: Timeline, sizes: Bytes, itemsizes: Sequence[int], parameters: Collection[int]
) -> dict[int, float]:
    """Bytes of the layers that its loops read of some parameters, whole and as they are read, by id of the slice."""
    layers = [layer for loop in timeline.loops for layer in loop.layers if layer.parameter in parameters]
    return {one.array: float(sizes[one.array]) * one.itemsize / itemsizes[one.array] for one in layers}


def live_bytes(timeline: Timeline, own: Bytes) -> Bytes:
    """Bytes over time of the arrays of a timeline, loops apart, given the bytes of each."""
    begun = np.bincount(timeline.births, own, timeline.length + 2)
    ended = np.bincount(timeline.deaths + 1, own, timeline.length + 2)
    return np.cumsum(begun - ended)[: timeline.length + 1]


def live_arrays(timeline: Timeline, time: int) -> Integers:
    """Which of the arrays of a timeline exist at a time, by index."""
    return np.flatnonzero((timeline.births <= time) & (time <= timeline.deaths))


def waiting_bytes(timeline: Timeline, own: Bytes, parts: Iterable[int], *, at_once: bool) -> Bytes:
    """Bytes over time of arrays that are summed over devices in the end; they are no longer counted in `own`.

    Args:
        timeline: of a program.
        own: bytes of `timeline.arrays`.
        parts: indices of the arrays.
        at_once: all sums are taken together, so that for a moment everything exists twice; otherwise one by one.
    """
    found, sizes = np.zeros(timeline.length + 1), [0.0]
    for part in parts:
        found[timeline.births[part] :] += own[part]
        sizes.append(float(own[part]))
        own[part] = 0.0
    found[-1] += sum(sizes) if at_once else max(sizes)
    return found


def add_gradients(
    timeline: Timeline,
    own: Bytes,
    local: Sequence[int],
    *,
    added: bool,
    summed: bool,
    at_once: bool,
    late: bool = False,
) -> Gradients:
    """Gradients over time; they are no longer counted in `own`.

    Args:
        timeline: of the program, whose outputs after the first are the gradients.
        own: bytes of its arrays.
        local: bytes of each gradient where its parameter lives.
        added: gradients of micro-batches are added to arrays that are there all the time.
        summed: they are summed over devices when all are there, otherwise one by one as they come.
        at_once: see `waiting_bytes`.
        late: what loops add up, and is only scaled or added up then, is scattered when all is done, as XLA has it for
            TPUs; with `added`, what loops stack is zeroed before everything else.
    """
    stacked = {place for loop in timeline.loops for place in loop.stacked}
    found = np.full(timeline.length + 1, float(sum(local)) if added else 0.0)
    waiting: dict[int, None] = {}
    for places, size in zip(timeline.outputs[1:], local, strict=True):
        if not places:
            continue
        place, *summands = places
        begin, end = timeline.births[place], timeline.deaths[place]
        if timeline.made_by[place] == "scan":
            whole = own[place] if late and place not in stacked and own[place] != size else 0.0
            found[0 if late and added and place in stacked else begin :] += size + whole
        elif summed:
            waiting.update(dict.fromkeys(summands or places))
        elif added:
            continue  # it is gone as soon as it is added
        else:
            scattered = timeline.length if late and timeline.made_by[place] in ELEMENTWISE | REDUCTIONS else end
            found[begin:] += size
            found[begin : scattered + 1] += 0.0 if own[place] == size else own[place]
        if place not in waiting:
            own[place] = 0.0
    return Gradients(found + waiting_bytes(timeline, own, waiting, at_once=at_once), tuple(waiting))


def add_gathered(
    weights: Bytes,
    timeline: Timeline,
    moved: Mapping[int, float],
    cpu_backend: bool,
    reshard_after_forward: bool,
    repeated: bool,
) -> None:
    """Adds parameters that are gathered to the bytes over time of what is made of weights.

    They are kept from their first use to their last. Those that are gathered again in the backward pass are not kept
    in between, but a CPU backend gathers them as soon as it can. Layers of a loop are gathered in it, one by one.

    Args:
        weights: bytes over time.
        timeline: of the program.
        moved: by id of an input, its bytes where it is used.
        cpu_backend: see `timeline`.
        reshard_after_forward: whether all are gathered again.
        repeated: whether the program runs for several micro-batches, for which a CPU backend gathers only once.
    """
    for array, size in moved.items():
        reads = timeline.reads.get(array)
        if reads is None:
            continue
        first, last = reads.times[0], reads.times[-1]
        early = cpu_backend and not reads.sliced
        if early and repeated:
            weights += size
        elif not (reshard_after_forward or reads.rematerialized):
            weights[0 if early else first : last + 1] += size
        elif early:
            forward = max((time for time in reads.times if time <= timeline.loss[0]), default=-1)
            weights[: forward + 1] += size
            weights[: last + 1] += size if last > forward else 0.0
        elif not reads.sliced:
            weights[list(set(reads.times))] += size


def add_casts(
    weights: Bytes, timeline: Timeline, local: Mapping[int, int], itemsizes: Sequence[int], *, repeated: bool
) -> None:
    """Adds stacked parameters in the precision in which loops use them: XLA casts them for TPUs before the first loop.

    Args:
        weights: bytes over time.
        timeline: of the program.
        local: by id of an input, its bytes where it lives.
        itemsizes: by id of an array.
        repeated: whether the program runs for several micro-batches. Casts are made before the first of them, also of
            parameters whose casts are kept for a backward pass.
    """
    for array, cast in timeline.cast_slices.items():
        if cast.itemsize < itemsizes[array]:
            weights[cast.first : cast.last + 1] += local[array] * cast.itemsize / itemsizes[array]
    kept = {array: itemsizes[timeline.arrays[place]] for place, (array, _) in timeline.casts.items() if repeated}
    for array, itemsize in kept.items():
        weights += local[array] * itemsize / itemsizes[array]


def reused(own: Bytes, places: Sequence[int]) -> float:
    """Bytes of arrays that fit into memory that lies idle, one array in each place.

    Args:
        own: bytes of the arrays.
        places: bytes of the places, largest first.
    """
    found, taken = 0.0, 0
    for size in np.sort(own)[::-1]:
        if taken < len(places) and size <= places[taken]:
            found += float(size)
            taken += 1
    return found


def worst(
    line: Timeline, together: Bytes, own: Bytes, before: Bytes, dying: Sequence[int], copies: Sequence[int]
) -> tuple[int, float]:
    """The worst moment, and the bytes that are there then beside copies of state.

    Args:
        line: of the program.
        together: bytes at each time.
        own: bytes of its arrays.
        before: the same before gradients were taken out.
        dying: arrays that are about to be summed.
        copies: bytes of copies of state, largest first.

    Memory of state that was copied away lies idle until the new state is written there. XLA puts an array in each such
    place that is large enough for it: activations, and gradients that are about to be summed.
    """
    worst = int(together.argmax())
    if not copies:
        return worst, float(together[worst])
    waiting = np.array(dying, np.int64)
    left: dict[int, float] = {}
    for time in {worst, line.length, *range(0, line.length, max(1, line.length // _SAMPLES))}:
        there = np.concatenate([own[live_arrays(line, time)], before[waiting[line.births[waiting] <= time]]])
        left[time] = float(together[time]) - reused(there, copies)
    worst = max(left, key=lambda time: left[time])
    return worst, left[worst]
