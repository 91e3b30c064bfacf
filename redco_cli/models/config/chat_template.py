"""Chat templates with limits: a program that comes with a tokenizer must neither run for ever nor fill the memory.

transformers renders them in the sandbox of jinja, which keeps them from the rest of Python, but lets nested loops turn
for years and `'a' * 10**10` fill the memory. Here every turn of a loop and every call of a macro looks at the clock,
which works in any thread and interrupts nothing in between; and what makes text of text is asked for its size before.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from redco_cli.errors import DataError

SECONDS = 10.0
"""Processor time for one conversation; templates that are used take milliseconds."""
LONGEST = 2**24
"""Characters that a text, or elements that a list, may have: four million tokens and more."""
_PRODUCED = 2**30
"""Characters of all texts that are made on the way."""
_BITS = 4096
"""Of a whole number: those that templates count with have few."""
_GROWING = frozenset({"batch", "center", "indent", "slice", "tojson"})
"""Filters that make as much as a number says."""
_WIDTH = re.compile(r"\d{8}|:[^{}]*\{")
"""A number in a format that is a width beyond all bounds, or one that is given with the values."""

_known: dict[str, tuple[str, str]] = {}
_state = threading.local()


class _Budget:
    """What is left for one conversation."""

    def __init__(self, source: str) -> None:
        self._source, self._until, self._produced = source, time.thread_time() + SECONDS, 0

    def check(self, produced: int = 0) -> None:
        """Counts characters that were made, and looks at the clock."""
        self._produced += produced
        if time.thread_time() > self._until:
            self.refuse(f"takes more than {SECONDS:g} s for one conversation")
        if self._produced > _PRODUCED:
            self.refuse(f"makes more than {_PRODUCED:,} characters on its way")

    def refuse(self, problem: str) -> NoReturn:
        where, name = _known.get(self._source, ("chat template", "a tokenizer"))
        remedy = "correct it (chat_template.jinja or tokenizer_config.json), or name another model.tokenizer"
        raise DataError(where, f"the chat template of {name} {problem}", remedy)


def limit_templates(tokenizer: Any, name: str, where: str) -> None:
    """From now on transformers renders chat templates with limits; those of this tokenizer are named in errors.

    Args:
        tokenizer: a tokenizer or processor.
        name: what it was loaded from.
        where: its place in the recipe.
    """
    from transformers.utils import chat_template_utils

    if chat_template_utils.ImmutableSandboxedEnvironment is not _LimitedEnvironment:
        chat_template_utils.ImmutableSandboxedEnvironment = _LimitedEnvironment
        chat_template_utils._compile_jinja_template.cache_clear()
    for holder in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        templates = getattr(holder, "chat_template", None)
        for text in templates.values() if isinstance(templates, dict) else (templates,):
            if isinstance(text, str):
                _known[text] = (where, name)


class _LimitedTemplate(Template):
    """A template that spends a budget each time it is rendered."""

    environment: _LimitedEnvironment
    source = ""

    def render(self, *args: Any, **named: Any) -> str:
        with _spending(self.source):
            return super().render(*args, **named)

    def generate(self, *args: Any, **named: Any) -> Iterator[str]:
        with _spending(self.source):
            yield from self.environment.measured(super().generate(*args, **named))


@contextlib.contextmanager
def _spending(source: str) -> Iterator[None]:
    outer = getattr(_state, "budget", None)
    _state.budget = _Budget(source)
    try:
        yield
    finally:
        _state.budget = outer


class _LimitedGenerator(CodeGenerator):
    """Lets the environment join what `~` joins."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - as jinja calls it
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates so that they ask here in their loops, and before they make something large."""

    template_class = _LimitedTemplate
    code_generator_class = _LimitedGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def from_string(self, source: Any, *args: Any, **named: Any) -> Template:
        template = super().from_string(source, *args, **named)
        template.source = source  # type: ignore[attr-defined]  # it is one of the class above
        return template

    def compile(self, source: Any, *args: Any, **named: Any) -> Any:
        self.globals.pop("lipsum", None)
        for name, function in self.filters.items():
            if not hasattr(function, "is_limited"):
                self.filters[name] = self._limited_filter(name, function)
        tree: nodes.Template = self.parse(source) if isinstance(source, str) else source
        repeated: list[Any] = [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]
        for node in repeated:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(tick, node.test)
        tree.set_environment(self)
        return super().compile(tree, *args, **named)

    def tick(self) -> bool:
        """True, unless the time is over."""
        self._budget.check()
        return True

    def concat(self, pieces: Iterable[str]) -> str:
        return "".join(self.measured(pieces))

    def joined(self, parts: Iterable[Any]) -> str:
        """What `~` makes."""
        text: str = self._counted(self.concat(map(str, parts)))
        return text

    def measured(self, pieces: Iterable[Any], between: int = 0) -> Iterator[Any]:
        """The same pieces, until they are too much in one text."""
        total = 0
        for piece in pieces:
            total += between + (len(piece) if isinstance(piece, str) else 1)
            self._allow(total)
            yield piece

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self._allow_format(left, starred=True)
        elif operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            self._allow(len(left) + len(right))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            self._allow(left.bit_length() + right.bit_length(), _BITS, "bits")
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            times, many = (left, right) if isinstance(left, int) else (right, left)
            self._allow(times * len(many) if hasattr(many, "__len__") else 0)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._allow(left.bit_length() * right, _BITS, "bits")
        return self._counted(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if not isinstance(owner, str):
            return super().call(context, function, *args, **named)
        return self._counted(
            super().call(context, function, *self._admit(function.__name__, owner, args, named), **named)
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatting = super().wrap_str_format(value)
        if formatting is None:
            return None

        def limited(*args: Any, **named: Any) -> str:
            self._allow_format(value.__self__)
            return str(self._counted(formatting(*args, **named)))

        return limited

    def _limited_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(function, "jinja_pass_arg"))  # the value comes after what jinja itself passes

        @functools.wraps(function)
        def limited(*args: Any, **named: Any) -> Any:
            before, (value, *rest) = args[:first], args[first:]
            if name in _GROWING or (name == "replace" and isinstance(value, str)):
                rest = list(self._admit(name, value, tuple(rest), named))
            elif name == "join":
                separator = rest[0] if rest else named.get("d", "")
                value = self.measured(value, len(str(separator)))
            elif name == "format":
                self._allow_format(str(value), starred=True)
            return self._counted(function(*before, value, *rest, **named))

        limited.is_limited = True  # type: ignore[attr-defined]
        return limited

    def _admit(self, name: str, text: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a method or filter on a text, unless they make it too large."""
        for one in (*args, *named.values()):
            if isinstance(one, int):
                self._allow(one)
        if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self._allow(len(text) + text.count(args[0]) * len(args[1]))
        if name == "join" and args:
            return (list(self.measured(args[0], len(text))), *args[1:])
        return args

    def _allow_format(self, text: str, *, starred: bool = False) -> None:
        self._allow(len(text))
        if _WIDTH.search(text) or (starred and re.search(r"%[^%a-zA-Z]*\*", text)):
            self._budget.refuse("formats text to a width that is not bounded")

    def _allow(self, size: int, limit: int = LONGEST, unit: str = "characters or elements") -> None:
        if size > limit:
            self._budget.refuse(f"makes a value of more than {limit:,} {unit}")

    def _counted(self, value: Any) -> Any:
        self._budget.check(len(value) if isinstance(value, str) else 0)
        return value

    @property
    def _budget(self) -> _Budget:
        """That of the conversation; a fresh one for what is computed when a template is compiled."""
        found: _Budget | None = getattr(_state, "budget", None)
        return found or _Budget("")
