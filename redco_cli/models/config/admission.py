"""What a chat template may ask of operators, methods and filters, decided before they run.

They are Python's own, which look at no clock: those whose time or text grows faster than what they are given are
refused by name, and the others when the numbers and texts they are given make too much.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment
from jinja2.filters import make_attrgetter

from redco_cli.models.config.budget import Budget


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FILTERS = _words(
    "abs attr capitalize count d default dictsort e escape first float format indent int items join last "
    "length list lower map max min reject rejectattr replace reverse safe select selectattr sort string "
    "sum title tojson trim truncate unique upper"
)
ADMITTED = frozenset({"indent", "join", "replace", "sum", "trim"})
"""Those of them whose arguments decide about their size or time."""
_METHODS = _words(
    "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust "
    "lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip "
    "split splitlines startswith strip swapcase title upper zfill"
)
"""Of texts. A template that uses another one, or another filter, is refused by its name."""
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_SEARCHING = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
"""Methods that compare the whole of their argument at each place."""
_CLOCK_FORMAT = 1000
"""Characters of a format of the time: the library takes 256 times as many for what it makes."""


def admit_operation(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Refuses `left operator right` if it makes a value that is too large, or takes long.

    Raises:
        DataError: names the template.
    """
    budget.allow_number(left)
    budget.allow_number(right)
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "%" and isinstance(left, str):
        budget.allow_percent(left, right)
    elif operator == "%" and isinstance(left, bytes):
        budget.refuse("formats bytes")
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        budget.allow(budget.weigh(left) + budget.weigh(right))
    elif operator in ("*", "**") and numbers:
        budget.allow_product(left, right, power=operator == "**")
    elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        times, many = (left, right) if isinstance(left, int) else (right, left)
        if hasattr(many, "__len__"):
            budget.allow(times * (len(many) if isinstance(many, str) else budget.weigh(many)))


def admit_call(budget: Budget, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments by place with which `function` may be called.

    Raises:
        DataError: names the template, and the method that is not bounded.
    """
    given = [*args, *(value for key, value in named.items() if not key.startswith("_"))]  # no variables of a loop
    budget.allow(sum(map(budget.weigh, given)))  # a macro sees them as one list
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    kind = owner if isinstance(owner, type) else type(owner)
    if issubclass(kind, int | bytes) or (issubclass(kind, str) and name not in _METHODS):
        budget.refuse(f"calls {name!r} of a {kind.__name__}, which is not bounded in time and size")
    if name == "strftime_now":
        budget.allow(sum(map(budget.weigh, given)), _CLOCK_FORMAT)
    return _admit_method(budget, name, owner, args, named) if isinstance(owner, str) else args


def _admit_method(
    budget: Budget, name: str, text: str, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    if name == "join" and args:
        return (list(budget.measured(args[0], len(text))), *args[1:])
    if name in _PADDING and args and isinstance(args[0], int):
        budget.allow(args[0])
    elif name == "replace" and len(args) >= 2:
        budget.allow_replace(text, args[0], args[1], args[2] if len(args) > 2 else named.get("count"))
    elif name in _SEARCHING:
        budget.allow_search(text, args[0] if args else named.get("sep"))
    return args


def admit_filter(environment: Environment, budget: Budget, name: str, given: dict[str, Any]) -> None:
    """Refuses arguments that make a text too large; what is joined is measured from now on.

    Args:
        environment: finds the attributes of what is joined.
        budget: of the conversation.
        name: of the filter, in `ADMITTED`.
        given: its arguments by name.

    Raises:
        DataError: names the template.
    """
    if name == "join":
        if given.get("attribute") is not None:
            given["value"] = map(make_attrgetter(environment, given.pop("attribute")), given["value"])
        given["value"] = budget.measured(given["value"], len(str(given.get("d", ""))))
    elif name == "indent":
        width, text = given.get("width", 4), str(given["s"])
        budget.allow(len(text) + (len(text.splitlines()) + 1) * (len(width) if isinstance(width, str) else width))
    elif name == "replace":
        budget.allow_replace(str(given["s"]), str(given["old"]), str(given["new"]), given.get("count"))
    elif name == "trim":
        budget.allow_search(str(given["value"]), given.get("chars"))
    elif name == "sum" and not isinstance(given.get("start", 0), int | float):
        budget.refuse("uses the filter 'sum' for something else than numbers")
