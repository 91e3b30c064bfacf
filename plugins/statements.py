"""Two questions about lines of Python, with answers from its own parser: `text_classification` on made-up examples.

    keyword  which keyword a statement begins with, from the rest of its line: `_ line in file:` is a `for`
    nodes    how large the syntax tree of a line is, in tens of nodes: `return x + 1` has 0.6

The lines are those of the standard library of the Python that runs this, each once: of one that fits two keywords
(`_ done:`) the last one met is the answer. Which lines are held out is decided by the line, so training has never seen
one that evaluation asks about.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from redco_cli.plugin.contract import Context, Example
from redco_cli.plugin.parts import builtin, held_out, standard_library

base = builtin("text_classification")
collate_fn, loss_fn, predict_fn = base.collate_fn, base.loss_fn, base.predict_fn
output_fn, metric_fn = base.output_fn, base.metric_fn

KEYWORDS = {
    ast.ClassDef: "class",
    ast.FunctionDef: "def",
    ast.For: "for",
    ast.ImportFrom: "from",
    ast.If: "if",
    ast.Import: "import",
    ast.Raise: "raise",
    ast.Return: "return",
    ast.While: "while",
    ast.With: "with",
}


@dataclass(frozen=True)
class Options(base.Options):  # type: ignore[name-defined, misc]
    """The options of `text_classification` and these.

    Attributes:
        question: which of the two questions to ask.
        eval_share: share of the lines, 0 to 1, that only evaluation asks about.
        eval_examples: how many lines evaluation asks about.
    """

    question: Literal["keyword", "nodes"] = "keyword"
    eval_share: float = 0.1
    eval_examples: int = 500


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """Every line and its answer; evaluation takes a random selection."""
    options = ctx.options
    ask = keyword_questions if options.question == "keyword" else node_questions
    answers = dict(question for source in standard_library().values() for question in ask(source))
    examples = [
        {options.text: line, options.label: answer}
        for line, answer in answers.items()
        if held_out(line, options.eval_share) == (split == "eval")
    ]
    if split == "eval":
        draw = random.Random(ctx.recipe.seed)  # noqa: S311  # examples, not secrets
        return draw.sample(examples, min(options.eval_examples, len(examples)))
    return examples


def keyword_questions(source: str) -> Iterator[tuple[str, str]]:
    """The line of each statement with `_` for its keyword, and the keyword.

    >>> list(keyword_questions("for line in file: print(line)"))
    [('_ line in file: print(line)', 'for')]
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        keyword = KEYWORDS.get(type(node))
        if keyword is not None:
            line = lines[node.lineno - 1][node.col_offset :]  # type: ignore[attr-defined]
            if line.startswith(f"{keyword} "):  # not so for `elif`
                yield f"_{line.removeprefix(keyword)}", keyword


def node_questions(source: str) -> Iterator[tuple[str, float]]:
    """Each statement that fills one line, and a tenth of the number of nodes of its syntax tree.

    >>> list(node_questions("return x + 1"))  # Return, BinOp, Name, Load, Add, Constant
    [('return x + 1', 0.6)]
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno == node.end_lineno:
            line = lines[node.lineno - 1]
            if line.strip() == line[node.col_offset : node.end_col_offset]:
                yield line.strip(), sum(1 for _ in ast.walk(node)) / 10
