"""How fast a way to run a workload is on a target: step time, tokens a second, MFU and cost, each with its range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from redco_cli.chips.speeds import CLOCKS, SPEEDS, peak
from redco_cli.chips.target import Target
from redco_cli.models.decoder.experts.mix import evenly_chosen
from redco_cli.planning.options import Option
from redco_cli.planning.report import Compiled
from redco_cli.planning.targets.roofline import FASTER, SLOWER, planned_events
from redco_cli.planning.targets.seconds import StepTime, step_time
from redco_cli.planning.timing import Constant, Speed, Term
from redco_cli.planning.workload import Workload
from redco_cli.plugin.state import Variables
from redco_cli.sharding.batch_shards import batch_sharded
from redco_cli.sharding.compiled.events import Event, Loop
from redco_cli.sharding.compiled.work import Work
from redco_cli.sharding.program.flops import Products, gradient_flops, products_of
from redco_cli.training.state import merge, partition


@dataclass(frozen=True)
class Forward:
    """The matrix products of a forward pass over the global batch, on all devices together.

    Attributes:
        products: those that are computed.
        needed: operations of those that the model needs: experts also compute what they have room for.
        passes: how many times these a step has, without what is recomputed: three where all parameters are trained,
            and what the first of them multiplies is computed, too.
    """

    products: Products
    needed: int
    passes: float


def forward_of(workload: Workload) -> Forward:
    """What a forward pass takes."""
    size, key = workload.micro_batch_size or workload.global_batch_size, jax.random.key(0)
    given, batch = workload.abstract, workload.batch(size)
    trained, frozen = partition(given.params, workload.frozen)
    params = merge(jax.tree.map(lambda _: True, trained), jax.tree.map(lambda _: False, frozen))
    others = jax.tree.map(lambda _: False, (given.state, given.step, batch))
    is_trained = jax.tree.leaves((params, *others))

    def traced() -> Any:
        def loss(params: Any, state: Any, step: Any, batch: Any) -> Any:
            return workload.loss(Variables(params, state, step), batch, key).sum

        return jax.make_jaxpr(loss)(given.params, given.state, given.step, batch)

    with batch_sharded(1):
        with evenly_chosen() as experts:
            even = traced()
        needed, times = products_of(even), workload.global_batch_size // size
        products = products_of(traced()) if experts.met else needed
    passes = 1 + gradient_flops(even, is_trained) / max(1, needed.flops)
    return Forward(products * times, needed.flops * times, passes)


def speed_of(
    target: Target | None,
    best: Option,
    forward: Forward | None,
    outcome: tuple[Compiled | None, Sequence[Event] | None],
    price: float | None,
) -> Speed | None:
    """How fast a step that fits is: by its program where it was compiled, else by its plan.

    Args:
        target: the devices; nothing is known without any, nor without `forward`.
        best: the way to run it.
        forward: what a forward pass takes.
        outcome: what the compiler made of it, and what happens in that.
        price: of a chip for an hour.
    """
    compiled, events = outcome
    if target is None or forward is None:
        return None
    if compiled is None:
        return planned_speed(best, target, forward, price)
    return None if events is None else compiled_speed(events, best, target, forward, price)


def compiled_speed(
    events: Sequence[Event], option: Option, target: Target, forward: Forward, price: float | None
) -> Speed:
    """The speed of a compiled step.

    Args:
        events: its timeline.
        option: the way that was compiled.
        target: the devices.
        forward: what its forward pass takes.
        price: of a chip for an hour.
    """
    return _speed("compiled", step_time(events, target), events, option, target, forward, price)


def fastest_first(ways: Sequence[Option], target: Target, forward: Forward, memory: int | None) -> list[Option]:
    """The ways that fit, by the step time that is printed of them, which their seconds are then; the others follow.

    Args:
        ways: those that are worth a closer look, by a rougher estimate.
        target: the devices.
        forward: what a forward pass takes.
        memory: bytes of one device; None where that is not known.
    """
    fitting = []
    for way in (one for one in ways if one.fits(memory)):
        events = planned_events(way, forward.products, forward.passes, target)
        fitting.append(replace(way, seconds=step_time(events, target).typical))
    return sorted(fitting, key=lambda way: way.seconds) + [way for way in ways if not way.fits(memory)]


def planned_speed(option: Option, target: Target, forward: Forward, price: float | None) -> Speed:
    """The speed of a step that was not compiled; see `compiled_speed`."""
    events = planned_events(option, forward.products, forward.passes, target)
    found = step_time(events, target)
    wider = StepTime(found.low * FASTER, found.typical, found.high * SLOWER, found.terms, found.hidden)
    return _speed("plan", wider, events, option, target, forward, price)


def _speed(
    basis: str,
    found: StepTime,
    events: Sequence[Event],
    option: Option,
    target: Target,
    forward: Forward,
    price: float | None,
) -> Speed:
    workload, chips = option.workload, target.devices // target.chip.of_a_chip
    passes = forward.passes
    flops, most = passes * forward.needed, peak(target.chip, _dtype(workload))
    per_step = None if workload.seq_length is None else workload.global_batch_size * workload.seq_length
    tokens = None if per_step is None else per_step / found.typical
    cost = None if price is None else price * chips * found.typical / 3600
    formula = (
        f"MFU = {flops:.3g} FLOPs of the model / ({found.typical:.4g} s x {target.devices} devices x "
        f"{most / 1e12:.4g} TFLOP/s); FLOPs = {passes:.3g} x {forward.needed:.3g} of the matrix products forward, "
        "attention without what its causal mask leaves out, experts without what they have room for, recomputation "
        "not counted"
    )
    return Speed(
        basis=basis,
        step=found.typical,
        low=found.low,
        high=found.high,
        terms=tuple(Term(name, seconds) for name, seconds in found.terms.items()),
        hidden=found.hidden,
        examples=workload.global_batch_size / found.typical,
        tokens=tokens,
        tokens_of_a_chip=None if tokens is None else tokens / chips,
        model_flops=flops,
        peak=most,
        mfu=flops / (found.typical * target.devices * most),
        formula=formula,
        price=None if price is None else float(price),
        cost_of_a_billion_tokens=None if cost is None or per_step is None else cost * 1e9 / per_step,
        cost_of_a_million_examples=None if cost is None or per_step else cost * 1e6 / workload.global_batch_size,
        cost_of_a_run=None if cost is None or workload.steps is None else cost * workload.steps,
        steps=workload.steps,
        compiler=_by_the_compiler(events, target),
        constants=tuple(Constant(name, **vars(one)) for name, one in SPEEDS[target.chip.name].constants.items()),
        notes=tuple(_notes(events)),
    )


def _dtype(workload: Workload) -> str:
    return "tensorfloat32" if workload.dtype == "float32" else workload.dtype


def _kernels(events: Sequence[Event], times: float = 1) -> Iterator[tuple[Work, float]]:
    for one in events:
        if isinstance(one, Work):
            yield one, times
        elif isinstance(one, Loop):
            yield from _kernels(one.events, times * one.times)


def _by_the_compiler(events: Sequence[Event], target: Target) -> float | None:
    """Seconds of all kernels by the compiler's own estimate, which TPUs' has."""
    clock = CLOCKS.get(target.chip.name)
    cycles = sum(work.cycles * times for work, times in _kernels(events))
    return cycles / clock if clock and cycles else None


def _notes(events: Sequence[Event]) -> Iterator[str]:
    opaque = sum(times for work, times in _kernels(events) if work.opaque)
    if opaque:
        yield f"{opaque:.0f} runs of kernels of libraries are timed by what they read and write alone"
    if any(_is_unknown(one) for one in events):
        yield "a loop whose number of turns the program does not say counts once"


def _is_unknown(event: Event) -> bool:
    return isinstance(event, Loop) and (not event.known or any(_is_unknown(one) for one in event.events))
