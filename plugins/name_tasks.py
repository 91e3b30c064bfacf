"""Instructions with one right answer, about names in the standard library: `instruct` on made-up examples.

The names are those of two or three short words in the source of the Python that runs this (`find_spec`). Which of
them are held out is decided by the name: training has never seen a name that evaluation asks about.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redco_cli.plugin.contract import Context, Example
from redco_cli.plugin.parts import builtin, held_out, standard_library

instruct = builtin("instruct")
encode_fn, collate_fn = instruct.encode_fn, instruct.collate_fn
loss_fn, predict_fn = instruct.loss_fn, instruct.predict_fn
output_fn, metric_fn = instruct.output_fn, instruct.metric_fn

TASKS: dict[str, Callable[[str], str]] = {
    "Write {} in upper case.": str.upper,
    "Write {} in camel case.": lambda name: "".join(word.title() for word in name.split("_")),
    "Write {} with spaces.": lambda name: name.replace("_", " "),
    "First word of {}?": lambda name: name.split("_")[0],
    "Last word of {}?": lambda name: name.split("_")[-1],
    "How many words has {}?": lambda name: str(len(name.split("_"))),
}
"""What the user says to what the assistant has to answer."""
LATER: dict[str, Callable[[str], str]] = {
    "Write {} with dashes.": lambda name: name.replace("_", "-"),
    "Write {} in title case.": lambda name: name.replace("_", " ").title(),
    "Initials of {}?": lambda name: "".join(word[0] for word in name.split("_")),
    "Swap the ends of {}.": lambda name: "_".join(_swapped(name.split("_"))),
}
"""Likewise, for a model that has learnt the others."""
LONGEST = 18
"""Letters of the longest name asked about."""


@dataclass(frozen=True)
class Options(instruct.Options):  # type: ignore[name-defined, misc]
    """The options of `instruct` and these.

    Attributes:
        eval_share: share of the names, 0 to 1, that only evaluation asks about.
        eval_examples: how many questions evaluation asks.
        later: ask what else can be asked of names, for a model that knows the first questions.
    """

    eval_share: float = 0.1
    eval_examples: int = 300
    later: bool = False


def _swapped(words: Sequence[str]) -> list[str]:
    return [words[-1], *words[1:-1], words[0]]


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """Every question about every name: `prompt` and `response`. Evaluation asks a random selection."""
    source = "\n".join(standard_library().values())
    names = sorted({name for name in re.findall(r"\b[a-z]{2,8}(?:_[a-z]{2,8}){1,2}\b", source) if len(name) <= LONGEST})
    examples = [
        {ctx.options.prompt or "prompt": question.format(name), ctx.options.response or "response": answer(name)}
        for name in names
        for question, answer in (LATER if ctx.options.later else TASKS).items()
        if held_out(name, ctx.options.eval_share) == (split == "eval")
    ]
    if split == "eval":
        draw = random.Random(ctx.recipe.seed)  # noqa: S311  # examples, not secrets
        return draw.sample(examples, min(ctx.options.eval_examples, len(examples)))
    return examples
