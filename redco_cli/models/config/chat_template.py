"""Chat templates with limits: a program that comes with a tokenizer must neither run for ever nor fill the memory.

transformers renders them in the sandbox of jinja, which keeps them from the rest of Python, but lets nested loops turn
for years and `'a' * 10**10` fill the memory. Here every turn of a loop and every call of a macro looks at the clock,
which works in any thread and interrupts nothing in between; so what runs in between has to be short. What makes text of
text is asked for its size before, every value is weighed when it is made, and the filters and methods that take longer
than their text is long are refused by name. Nothing is computed when a template is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from redco_cli.models.config.admission import ADMITTED, FILTERS, admit_call, admit_filter, admit_operation
from redco_cli.models.config.budget import Budget

_known: dict[str, tuple[str, str]] = {}
_state = threading.local()


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
            yield from self.environment.budget.measured(super().generate(*args, **named))


def _budget_of(source: str) -> Budget:
    return Budget(*_known.get(source, ("chat template", "a tokenizer")))


@contextlib.contextmanager
def _spending(source: str) -> Iterator[None]:
    outer = getattr(_state, "budget", None)
    _state.budget = _budget_of(source)
    try:
        yield
    finally:
        _state.budget = outer


class _LimitedNamespace(Namespace):
    """Does not print what it holds, which may hold others again."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _LimitedGenerator(CodeGenerator):
    """Lets the environment see what is made and compared without a call, and computes nothing itself."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - as jinja calls it
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._hand("budget.made", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._hand("budget.made", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._hand("budget.made", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self._hand("budget.copied", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self._hand("ticked", super().visit_Compare, node, frame)

    def _hand(self, method: str, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write(f"environment.{method}(")
        visit(node, frame)
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates so that they ask here in their loops, and before they make something large."""

    template_class = _LimitedTemplate
    code_generator_class = _LimitedGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def from_string(self, source: Any, *args: Any, **named: Any) -> Template:
        template = super().from_string(source, *args, **named)
        template.source = source  # type: ignore[attr-defined]  # it is one of the class above
        return template

    def compile(self, source: Any, *args: Any, **named: Any) -> Any:
        self._prepare()
        tree: nodes.Template = self.parse(source) if isinstance(source, str) else source
        repeated: list[Any] = [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]
        for node in repeated:
            tick = nodes.Call(nodes.EnvironmentAttribute("ticked"), [nodes.Const(True)], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(tick, node.test)
        tree.set_environment(self)
        with _spending(source if isinstance(source, str) else ""):
            return super().compile(tree, *args, **named)

    def _prepare(self) -> None:
        """Once all filters are there: those of transformers are added after the environment was made."""
        self.optimized = False
        self.globals.pop("lipsum", None)
        self.globals["namespace"] = _LimitedNamespace
        self.filters["tojson"] = self.json
        for name, function in self.filters.items():
            if not hasattr(function, "is_limited"):
                self.filters[name] = self._limited_filter(name, function)
        for name, function in self.tests.items():
            if not hasattr(function, "is_limited"):
                self.tests[name] = self._limited_test(cast(Callable[..., Any], function))

    @property
    def budget(self) -> Budget:
        """That of the conversation; one of its own for what is asked outside of any."""
        found: Budget | None = getattr(_state, "budget", None)
        return found or _budget_of("")

    def ticked(self, value: Any) -> Any:
        """The value, unless the time is over."""
        self.budget.check()
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        text: str = self.budget.copied("".join(self.budget.measured(pieces)))
        return text

    def joined(self, parts: Iterable[Any]) -> str:
        """What `~` makes."""
        return self.concat(map(str, parts))

    def json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """What the filter `tojson` of transformers makes, measured piece by piece."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is not None:
            self.budget.allow(indent if isinstance(indent, int) else len(indent))
        return self.concat(encoder.iterencode(value))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.ticked(argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        admit_operation(self.budget, operator, left, right)
        return self.budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        args = admit_call(self.budget, function, args, named)
        return self.budget.made(super().call(context, function, *args, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatting = super().wrap_str_format(value)
        if formatting is None:
            return None

        def limited(*args: Any, **named: Any) -> str:
            self.budget.allow_braces(value.__self__, (*args, *named.values()))
            text: str = self.budget.made(formatting(*args, **named))
            return text

        return limited

    def _limited_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*args: Any, **named: Any) -> Any:
            return self.ticked(function(*args, **named))

        limited.is_limited = True  # type: ignore[attr-defined]
        return limited

    def _limited_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(function, "jinja_pass_arg"))  # the value comes after what jinja itself passes
        signature = inspect.signature(function) if name in ADMITTED else None

        @functools.wraps(function)
        def limited(*args: Any, **named: Any) -> Any:
            if name not in FILTERS:
                self.budget.refuse(f"uses the filter {name!r}, which is not bounded in time and size")
            before, (value, *rest) = args[:first], args[first:]
            if isinstance(value, Iterator):
                value = self.budget.measured(value)
            if name == "format":
                self.budget.allow_percent(str(value), named or tuple(rest))
            elif signature is not None:
                given = signature.bind(*before, value, *rest, **named)
                admit_filter(self, self.budget, name, given.arguments)
                return self.budget.made(function(*given.args, **given.kwargs))
            return self.budget.made(function(*before, value, *rest, **named))

        limited.is_limited = True  # type: ignore[attr-defined]
        return limited
