"""What is said of how long a step takes, as data: its parts and its range, tokens a second, MFU, cost, constants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A part of a step.

    Attributes:
        name: what the time is spent on.
        seconds: of a step.
    """

    name: str
    seconds: float


@dataclass(frozen=True)
class Constant:
    """What a step time is reckoned with.

    Attributes:
        name: such as `matmul`, the share of its peak that matrix products reach.
        slow: its value where things go slowly.
        typical: what is believed.
        fast: its value where things go well.
        origin: where it is from: measured by others, assumed, or fitted.
    """

    name: str
    slow: float
    typical: float
    fast: float
    origin: str


@dataclass(frozen=True)
class Speed:
    """How fast a step is, by estimate. Rates are those of the typical time.

    Attributes:
        basis: `compiled`, from the program that the compiler made, or `plan`, from what was predicted of it.
        step: seconds of a step.
        low: seconds where all goes well.
        high: seconds where all goes slowly.
        terms: what the step is made of, the longest first.
        hidden: seconds in which bytes move beside work, none of them in `step`.
        examples: a second.
        tokens: a second; None where examples are no tokens.
        tokens_of_a_chip: a second.
        model_flops: operations of the model in a step, on all devices together; recomputation is none of the model's.
        peak: operations a second of one device.
        mfu: share of the peak of all devices that the model's operations take.
        formula: how `mfu` and `model_flops` come about, with their numbers.
        price: of a chip for an hour; None where none was given.
        cost_of_a_billion_tokens: in the unit of the price.
        cost_of_a_million_examples: likewise, of what has no tokens.
        cost_of_a_run: of `train.steps` steps; None where no recipe says how many.
        steps: of the run.
        compiler: seconds that the compiler estimates for its kernels, without transfers; None where it does not say.
        constants: what all this is reckoned with.
        notes: what is not known.
    """

    basis: str
    step: float
    low: float
    high: float
    terms: tuple[Term, ...]
    hidden: float
    examples: float
    tokens: float | None
    tokens_of_a_chip: float | None
    model_flops: float
    peak: float
    mfu: float
    formula: str
    price: float | None
    cost_of_a_billion_tokens: float | None
    cost_of_a_million_examples: float | None
    cost_of_a_run: float | None
    steps: int | None
    compiler: float | None
    constants: tuple[Constant, ...]
    notes: tuple[str, ...]
