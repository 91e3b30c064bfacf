"""When things happen in a run: the recipe's durations, converted to optimizer steps once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from redco_cli.errors import RecipeError
from redco_cli.recipe.durations import Duration
from redco_cli.recipe.schema import Recipe


@dataclass(frozen=True)
class Timeline:
    """All lengths in optimizer steps.

    Attributes:
        steps: the run.
        steps_per_epoch: training examples / global batch size, not whole as a rule; None for data of unknown length.
        warmup: rise of the learning rate.
        decay: final decay of the `wsd` schedule.
        eval_every: interval of evaluations; None for only at the end.
        checkpoint_every: interval of checkpoints; None for only at the end.
        log_every: interval of records.
    """

    steps: int
    steps_per_epoch: Fraction | None
    warmup: int
    decay: int
    eval_every: int | None
    checkpoint_every: int | None
    log_every: int

    def due(self, step: int, every: int | None) -> bool:
        """Whether something with this interval happens after `step`; everything happens after the last."""
        return step == self.steps or (every is not None and step % every == 0)

    def passed(self, before: int, step: int, every: int | None) -> bool:
        """Whether something with this interval was due after any of the steps behind `before`, up to `step`.

        For loops that look now and then only.
        """
        if step == self.steps > before:
            return True
        return every is not None and step // every > before // every


def make_timeline(recipe: Recipe, train_examples: int | None, where: Callable[[str], str]) -> Timeline:
    """Converts the durations of a recipe.

    Args:
        train_examples: how many there are; None when the data has no known length.
        where: dotted key to its place.

    Raises:
        RecipeError: a duration cannot be converted, is zero where that makes no sense, or exceeds the run.
    """
    per_epoch = None if train_examples is None else Fraction(train_examples, recipe.train.global_batch_size)

    def steps_of(key: str, duration: Duration, total: int | None, least: int) -> int:
        try:
            steps = duration.in_steps(total_steps=total, steps_per_epoch=per_epoch)
        except ValueError as error:
            raise RecipeError(where(key), f"{duration} given: {error}", "give a number of steps") from None
        if steps < least:
            raise RecipeError(where(key), f"{duration} is {steps} steps", f"give at least {least} step")
        return steps

    total = steps_of("train.steps", recipe.train.steps, None, 1)
    warmup = steps_of("train.warmup", recipe.train.warmup, total, 0)
    if warmup > total:
        problem = f"{recipe.train.warmup} is {warmup} steps, longer than the run of {total}"
        raise RecipeError(where("train.warmup"), problem, "warm up for a share, such as 5%")
    decay = steps_of("train.decay", recipe.train.decay, total, 0)
    if recipe.train.schedule == "wsd" and warmup + decay > total:
        problem = (
            f"{recipe.train.decay} is {decay} steps; with {warmup} steps of warm-up, longer than the run of {total}"
        )
        raise RecipeError(where("train.decay"), problem, "shorten warm-up or decay")
    every = recipe.eval.every
    eval_every = None if every is None else steps_of("eval.every", every, total, 1)
    every = recipe.checkpoint.every
    checkpoint_every = eval_every if every is None else steps_of("checkpoint.every", every, total, 1)
    return Timeline(total, per_epoch, warmup, decay, eval_every, checkpoint_every, recipe.logging.every)
