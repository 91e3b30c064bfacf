"""Dates as people write them to ISO dates: `3rd of March, 1999` to `1999-03-03`. `seq2seq` on made-up examples.

The examples are a pure function of the recipe's `seed`. Which days are held out for evaluation is decided by the day
itself: none of them is seen in training, in any form.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass

from redco_cli.plugin.contract import Context, Example
from redco_cli.plugin.parts import builtin, held_out

seq2seq = builtin("seq2seq")
collate_fn, loss_fn, predict_fn = seq2seq.collate_fn, seq2seq.loss_fn, seq2seq.predict_fn
output_fn, metric_fn = seq2seq.output_fn, seq2seq.metric_fn

FORMS = (
    "{year}-{month:02}-{day:02}",
    "{year}/{month}/{day}",
    "{day:02}.{month:02}.{year}",
    "{day}.{month}.{year}",
    "{day} {name} {year}",
    "{day}. {name} {year}",
    "{day}{th} of {name}, {year}",
    "{day}{th} {name} {year}",
    "the {day}{th} of {name} {year}",
    "{name} {day}, {year}",
    "{name} {day}{th}, {year}",
    "{name} the {day}{th}, {year}",
    "{short} {day}, {year}",
    "{short} {day} {year}",
    "{day} {short} {year}",
    "{day}-{short}-{year}",
    "{weekday}, {day} {name} {year}",
    "{weekday}, {name} {day}, {year}",
    "{weekday} {day} {short} {year}",
    "{year} {name} {day}",
)
"""How a date may be written. No two dates share a text: where month and day are both numbers, their order follows from
the mark between them."""

FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)


@dataclass(frozen=True)
class Options(seq2seq.Options):  # type: ignore[name-defined, misc]
    """The options of `seq2seq` and these.

    Attributes:
        train_examples: how many to make for training.
        eval_examples: how many to make for evaluation.
        eval_share: share of all days, 0 to 1, that only evaluation sees.
    """

    train_examples: int = 50_000
    eval_examples: int = 500
    eval_share: float = 0.1


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """Random days of 1900 to 2099 in random forms: `source` and `target`."""
    options = ctx.options
    draw = random.Random(f"{ctx.recipe.seed} {split}")  # noqa: S311  # examples, not secrets
    examples: list[Example] = []
    while len(examples) < (options.eval_examples if split == "eval" else options.train_examples):
        date = datetime.date.fromordinal(draw.randint(FIRST.toordinal(), LAST.toordinal()))
        form, case = draw.choice(FORMS), draw.choice((str, str, str.lower, str.upper))
        if held_out(date.isoformat(), options.eval_share) == (split == "eval"):
            examples.append({options.source: case(write(date, form)), options.target: date.isoformat()})
    return examples


def write(date: datetime.date, form: str) -> str:
    """A date in one of the `FORMS`.

    >>> write(datetime.date(1999, 3, 3), "{day}{th} of {name}, {year}")
    '3rd of March, 1999'
    """
    name, weekday = MONTHS[date.month - 1], WEEKDAYS[date.weekday()]
    th = "th" if 11 <= date.day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(date.day % 10, "th")
    return form.format(
        year=date.year, month=date.month, day=date.day, th=th, name=name, short=name[:3], weekday=weekday
    )


MONTHS = "January February March April May June July August September October November December".split()  # noqa: SIM905
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()  # noqa: SIM905
