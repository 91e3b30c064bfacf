"""Lines of Python to a sentence of what they do, told from their syntax tree: `seq2seq` on the standard library.

    self.num = num
    self.root.quit()        ->  Sets num, calls quit.

The lines are consecutive statements of the standard library of the Python that runs this. Which sentences are held out
is decided by the sentence, so training has never seen one that evaluation asks for.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any

from redco_cli.plugin.contract import Context, Example
from redco_cli.plugin.parts import builtin, column, held_out, rouge, standard_library

seq2seq = builtin("seq2seq")
collate_fn, loss_fn, predict_fn = seq2seq.collate_fn, seq2seq.loss_fn, seq2seq.predict_fn
output_fn = seq2seq.output_fn

MOST = 3
"""Statements of one example, at most; two at least."""
LONGEST, SAID = 63, 47
"""Letters of the lines and of the sentence, at most."""


@dataclass(frozen=True)
class Options(seq2seq.Options):  # type: ignore[name-defined, misc]
    """The options of `seq2seq` and these.

    Attributes:
        eval_share: share of the sentences, 0 to 1, that only evaluation asks for.
        eval_examples: how many pieces of source evaluation asks about.
    """

    eval_share: float = 0.1
    eval_examples: int = 500


def load_examples(ctx: Context, split: str) -> Sequence[Example]:
    """Every piece of source and its sentence; evaluation takes a random selection."""
    options = ctx.options
    examples = [
        {options.source: lines, options.target: sentence}
        for lines, sentence in told().items()
        if held_out(sentence, options.eval_share) == (split == "eval")
    ]
    if split == "eval":
        draw = random.Random(ctx.recipe.seed)  # noqa: S311  # examples, not secrets
        return draw.sample(examples, min(options.eval_examples, len(examples)))
    return examples


def metric_fn(ctx: Context, examples: Sequence[Example], predictions: Sequence[Any]) -> Mapping[str, float]:
    """The metrics of `seq2seq`, and `first_line_rougeL`: what copying the first of the lines would reach."""
    options = ctx.options
    copied = [source.partition("\n")[0] for source in column(examples, options.source, str)]
    scores: Mapping[str, float] = seq2seq.metric_fn(ctx, examples, predictions)
    return {**scores, "first_line_rougeL": rouge(copied, column(examples, options.target, str))["rougeL"]}


@cache
def told() -> Mapping[str, str]:
    """Pieces of the standard library of two to `MOST` statements, to what they do, where both are short enough."""
    return dict(pair for source in standard_library().values() for pair in pieces(source))


def pieces(source: str) -> Iterator[tuple[str, str]]:
    r"""Consecutive statements of a file, their lines stripped and without comments, with what they do.

    >>> list(pieces("seen = read(file)  # all\nif seen:\n  raise OSError"))
    [('seen = read(file)  # all\nif seen:\nraise OSError', 'Sets seen, checks seen, raises OSError.')]
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        for statements in filter(None, (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))):
            for first in range(len(statements) if isinstance(statements, list) else 0):
                for after in range(first + 2, min(first + MOST, len(statements)) + 1):
                    yield from _piece(lines, statements[first:after])


def _piece(lines: Sequence[str], statements: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    start, end = statements[0].lineno - 1, statements[-1].end_lineno
    text = "\n".join(line for line in map(str.strip, lines[start:end]) if line and not line.startswith("#"))
    deeds = [list(deeds_of(statement)) for statement in statements]
    if all(deeds) and text.count("\n") and len(text) <= LONGEST:
        sentence = sentence_of(deed for some in deeds for deed in some)
        if len(sentence) <= SAID:
            yield text, sentence


def sentence_of(deeds: Iterable[tuple[str, str]]) -> str:
    """Verbs with their objects as a sentence; of one verb in a row the objects stand together.

    >>> sentence_of([("sets", "x"), ("sets", "y"), ("calls", "print"), ("returns", "")])
    'Sets x and y, calls print, returns.'
    """
    said = []
    for verb, pairs in groupby(deeds, key=itemgetter(0)):
        *first, last = dict.fromkeys(name for _, name in pairs)
        said.append(f"{verb} {', '.join(first)}{' and ' if first else ''}{last}".rstrip())
    sentence = ", ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}."


def deeds_of(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    r"""A verb and its object for a statement, and then for those in it, in their order; nothing of one not known.

    >>> list(deeds_of(ast.parse("for name in self.names:\n  print(name)").body[0]))
    [('loops over', 'names'), ('calls', 'print')]
    """
    match statement:
        case ast.Return(value=value):
            yield "returns", named(value)
        case ast.Raise(exc=error):
            yield "raises", named(error) or "it again"
        case ast.For(iter=among) | ast.AsyncFor(iter=among):
            yield "loops over", named(among)
        case ast.While(test=test):
            yield "loops while", named(test)
        case ast.If(test=test):
            yield "checks", named(test)
        case ast.Assert(test=test):
            yield "asserts", named(test)
        case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target):
            yield "sets", named(target)
        case ast.AugAssign(target=target):
            yield "changes", named(target)
        case ast.Delete(targets=[target, *_]):
            yield "deletes", named(target)
        case ast.Expr(value=ast.Yield(value=value)):
            yield "yields", named(value)
        case ast.Expr(value=ast.Call() | ast.Await() as call):
            yield "calls", named(call)
        case ast.With(items=[item, *_]) | ast.AsyncWith(items=[item, *_]):
            yield "enters", named(item.context_expr)
        case ast.Import(names=[ast.alias(name=name), *_]) | ast.ImportFrom(names=[ast.alias(name=name), *_]):
            yield "imports", name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield "defines", name
            return
    for part in ("body", "orelse", "finalbody"):
        for inner in getattr(statement, part, ()):
            yield from deeds_of(inner)


def named(value: ast.expr | None) -> str:
    """The name that an expression begins with, the last one where they are joined by dots; else what it is.

    >>> [named(ast.parse(text, mode="eval").body) for text in ("self.names[0]", "not done", "read(x)", "(1, 2)")]
    ['names', 'done', 'read', 'a tuple']
    """
    match value:
        case None:
            return ""
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.Await(value=inner):
            return named(inner)
        case ast.UnaryOp(operand=inner) | ast.Compare(left=inner) | ast.BinOp(left=inner):
            return named(inner)
        case ast.BoolOp(values=[inner, *_]):
            return named(inner)
        case ast.JoinedStr() | ast.Constant(value=str()):
            return "a text"
        case ast.Constant(value=known):
            return str(known)
        case ast.Tuple() | ast.List() | ast.Dict() | ast.Set():
            return f"a {type(value).__name__.lower()}"
    return "a value"
