"""Functions to the first sentence of their docstrings: `seq2seq` on the standard library of the Python that runs this.

The source is a function without its docstring, its lines stripped; what it is summed up to is what its author wrote.
Which sentences are held out is decided by the sentence, so training has never seen one that evaluation asks for.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from redco_cli.plugin.contract import Context, Example
from redco_cli.plugin.parts import builtin, column, held_out, rouge, standard_library

seq2seq = builtin("seq2seq")
collate_fn, loss_fn, predict_fn = seq2seq.collate_fn, seq2seq.loss_fn, seq2seq.predict_fn
output_fn = seq2seq.output_fn


@dataclass(frozen=True)
class Options(seq2seq.Options):  # type: ignore[name-defined, misc]
    """The options of `seq2seq` and these.

    Attributes:
        eval_share: share of the sentences, 0 to 1, that only evaluation asks for.
        eval_examples: how many functions evaluation asks about.
    """

    eval_share: float = 0.1
    eval_examples: int = 300


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """Every function and its sentence, if that fits the longest target; of a long function the beginning.

    Evaluation takes a random selection.
    """
    options, length = ctx.options, ctx.recipe.data.max_length
    longest = (options.max_target_length or length) - 1
    examples = [
        {options.source: function[:length].rstrip(), options.target: sentence}
        for function, sentence in functions().items()
        if len(sentence) <= longest and held_out(sentence, options.eval_share) == (split == "eval")
    ]
    if split == "eval":
        draw = random.Random(ctx.recipe.seed)  # noqa: S311  # examples, not secrets
        return draw.sample(examples, min(options.eval_examples, len(examples)))
    return examples


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """The metrics of `seq2seq`, and `first_line_rougeL`: what copying the first line of each function would reach."""
    options = ctx.options
    copied = [source.partition("\n")[0] for source in column(examples, options.source, str)]
    scores: Mapping[str, float] = seq2seq.metric_fn(ctx, examples, predictions)
    return {**scores, "first_line_rougeL": rouge(copied, column(examples, options.target, str))["rougeL"]}


@cache
def functions() -> Mapping[str, str]:
    """Each function of the standard library that has a docstring, without it, to its first sentence."""
    return dict(pair for source in standard_library().values() for pair in documented(source))


def documented(source: str) -> Iterator[tuple[str, str]]:
    r"""The functions of a file that do something besides being documented, with the first sentence of what they say.

    >>> list(documented("def get(self, key):\n  'Return it.  None is none.'\n  return self[key]"))
    [('def get(self, key):\nreturn self[key]', 'Return it.')]
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            said, after = ast.get_docstring(node), node.body[1].lineno
            sentence = re.split(r"(?<=[.!?])\s", " ".join((said or "").partition("\n\n")[0].split()))[0]
            first = node.body[0]
            if sentence and node.lineno < first.lineno < after:
                head, rest = lines[node.lineno - 1 : first.lineno - 1], lines[first.end_lineno : node.end_lineno]
                yield "\n".join(filter(None, map(str.strip, head + rest))), sentence
